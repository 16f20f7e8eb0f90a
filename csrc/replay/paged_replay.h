/* A replay of a single pool with paged KV, by the prefill-first rule or Sarathi's: the decisions
 * of xrunner/rules/paged.py, turn by turn, in the same order. */
#pragma once

#include <stdint.h>

#include "rooms_replay.h"

namespace xgpt_paging {

/* `budget`: tokens of a step. */
struct Facts {
    int64_t groups, budget, is_chunked;
};

using xgpt_rooms::Group;

class Replay : public xgpt_rooms::Replay {
public:
    Replay(const xgpt_replay::Given &given, const Facts &facts, const xgpt_rooms::Asked &asked)
        : xgpt_rooms::Replay(given, facts.groups, asked), facts_(facts) {}

private:
    Facts facts_;

    int64_t next_group() override { return next_in_turn(); }
    void decide(Group &group, int64_t g) override {
        turn_ = (g + 1) % facts_.groups;
        facts_.is_chunked ? mix(group, g) : either(group, g);
    }
    /* _decode_and_chunks */
    void mix(Group &group, int64_t g) {
        make_room(group);
        const int64_t left = facts_.budget - group.room.decoding;
        const bool is_decode = group.room.decoding > 0;
        if (is_decode) group.room.advance();
        encode(group, left,
               [&] { return moved_.empty() ? admitted(group, group.slots, false) : -1; },
               [&](int64_t q) { group.room.begin(q); });
        execute(group, g, is_decode, group.steps++, is_decode);
    }
    /* _encode_or_decode */
    void either(Group &group, int64_t g) {
        int64_t left = facts_.budget;
        while (num_waiting()) {
            const int64_t next = line_[next_], extra = shared_ ? shared_->to_encode({next}) : 0;
            const int64_t tokens = this->tokens(next) + extra;
            if (!joined_.empty() && tokens > left) break;
            const int64_t q = admitted(group, group.slots, true);
            if (q < 0) break;
            left -= tokens;
            encode_whole(q);
        }
        const bool is_decode = joined_.empty() && group.room.decoding;
        if (is_decode) {
            make_room(group);
            group.room.advance();
        }
        execute(group, g, is_decode, group.steps++, is_decode);
    }
};

}  // namespace xgpt_paging
