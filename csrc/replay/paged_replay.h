/* A replay of a single pool with paged KV, by the rules of prefill-first, Sarathi, mixed batching
 * and LightLLM: the decisions of xrunner/rules/paged.py, turn by turn, in the same order. */
#pragma once

#include <stdint.h>

#include "rooms_replay.h"

namespace xgpt_paging {

/* As xrunner.rules.paged.ENCODINGS. */
enum Encoding : int64_t { ALONE, BESIDE, CHUNKS };

/* `budget`: tokens of a step; `light_steps`: as of PagedRule. */
struct Facts {
    int64_t groups, budget, encoding, light_steps;
};

using xgpt_rooms::Group;

class Replay : public xgpt_rooms::Replay {
public:
    Replay(const xgpt_replay::Given &given, xgpt_replay::Job &job, const Facts &facts,
           const xgpt_rooms::Asked &asked)
        : xgpt_rooms::Replay(given, job, facts.groups, asked), facts_(facts),
          decoded_(facts.groups) {}

private:
    Facts facts_;
    std::vector<int64_t> decoded_;  // by group: steps since it last tried to encode

    int64_t next_group() override { return next_in_turn(); }
    void decide(Group &group, int64_t g) override {
        turn_ = (g + 1) % facts_.groups;
        facts_.encoding == ALONE ? either(group, g) : both(group, g);
    }
    /* _decode_and_encode */
    void both(Group &group, int64_t g) {
        make_room(group);
        const int64_t left = facts_.budget - group.room.decoding;
        const bool is_decode = group.room.decoding > 0;
        if (is_decode) group.room.advance();
        if (facts_.encoding == CHUNKS)
            encode(group, left,
                   [&] { return moved_.empty() ? admitted(group, group.slots, false) : -1; },
                   [&](int64_t q) { group.room.begin(q); });
        else if (moved_.empty())
            encode_inputs(group, left, !is_decode);
        execute(group, g, is_decode, group.steps++, is_decode);
    }
    /* _encode_or_decode */
    void either(Group &group, int64_t g) {
        if (!group.room.decoding || decoded_[g] >= facts_.light_steps) {
            decoded_[g] = 0;
            encode_inputs(group, facts_.budget, true);
        }
        const bool is_decode = joined_.empty() && group.room.decoding;
        if (is_decode) {
            decoded_[g] += 1;
            make_room(group);
            group.room.advance();
        }
        execute(group, g, is_decode, group.steps++, is_decode);
    }
    /* _whole_inputs */
    void encode_inputs(Group &group, int64_t left, bool is_alone) {
        while (num_waiting()) {
            const int64_t next = line_[next_], extra = shared_ ? shared_->to_encode({next}) : 0;
            const int64_t tokens = this->tokens(next) + extra;
            if (tokens > left && (!joined_.empty() || !is_alone)) break;
            const int64_t q = admitted(group, group.slots, true);
            if (q < 0) break;
            left -= tokens;
            encode_whole(q);
        }
    }
};

}  // namespace xgpt_paging
