/* A replay of a single pool with paged KV: the decisions of its rule (xrunner/rules/paged.py),
 * turn by turn, and the requests and tokens of each step (xsimulator/replay/pool.py,
 * queries.py). The same decisions in the same order. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "pool_replay.h"

namespace xgpt_paging {

constexpr int64_t BLOCK = 16;

inline int64_t blocks_of(int64_t tokens) { return (tokens + BLOCK - 1) / BLOCK; }
inline int64_t residue(int64_t value) { return ((value % BLOCK) + BLOCK) % BLOCK; }

struct Facts {
    int64_t queries, groups, blocks, watermark, budget, is_chunked;
};

struct Query : xgpt_replay::Query {
    int64_t inputs, left, made, tokens;  // `tokens`: to be encoded with
    int64_t holder, held, joined;        // its rule's group and base; when it joined the group
};

/* A group's blocks, and its rows. */
struct Group : xgpt_replay::Rows<Query> {
    int64_t free = 0, slots = 0, clock = 0, begins[BLOCK] = {}, running = 0, joins = 0;
    int64_t part = -1, part_tokens = 0, part_done = 0;  // a partly encoded request
    int64_t steps = 0;
    std::vector<std::pair<int64_t, int64_t>> order;     // (request, joined), some gone

    int64_t present() const { return running + (part >= 0); }
    int64_t needed() const { return begins[residue(-clock)]; }
};

class Replay : public xgpt_replay::PoolReplay<Query, Group> {
public:
    Replay(const xgpt_replay::Given &given, const Facts &facts, const int64_t *slots,
           const int64_t *inputs, const int64_t *left)
        : PoolReplay(given, facts.groups, facts.queries), facts_(facts) {
        for (int64_t g = 0; g < facts.groups; ++g) {
            groups_[g].free = facts.blocks;
            groups_[g].slots = slots[g];
        }
        for (int64_t q = 0; q < facts.queries; ++q) {
            queries[q] = {{}, inputs[q], left[q], 0, inputs[q], -1, 0, 0};
            waiting_.push_back(q);
        }
    }
    void run() {
        for (int64_t g; (g = next()) >= 0;) {
            Group &group = groups_[g];
            begin_turn(group, [&](Query &query) { leave_rule(group, query); });
            turn_ = (g + 1) % facts_.groups;
            facts_.is_chunked ? mix(group, g) : either(group, g);
            line.note_memory(held_, now_);
        }
    }

private:
    Facts facts_;
    std::deque<int64_t> waiting_;
    int64_t turn_ = 0;

    int64_t next() const {
        for (int64_t ahead = 0; ahead < facts_.groups; ++ahead) {
            int64_t g = (turn_ + ahead) % facts_.groups;
            if (!waiting_.empty() || groups_[g].present()) return g;
        }
        return -1;
    }
    void take(Group &group, int64_t blocks) {
        group.free -= blocks;
        held_ += blocks * BLOCK;
    }
    int64_t leave_rule(Group &group, Query &query) {
        int64_t held = query.held + group.clock;
        group.begins[residue(query.held)] -= 1;
        group.running -= 1;
        query.holder = -1;
        take(group, -blocks_of(held));
        return held;
    }
    /* Evicts the latest admitted requests until all that are left can grow by a token. */
    void make_room(Group &group, int64_t g) {
        while (group.needed() > group.free) {
            int64_t q = group.part;
            if (q >= 0) {
                group.part = -1;
                take(group, -blocks_of(group.part_tokens));
            } else {
                while (q = group.order.back().first, queries[q].holder != g ||
                       queries[q].joined != group.order.back().second)
                    group.order.pop_back();
                group.order.pop_back();
                queries[q].tokens = leave_rule(group, queries[q]) + 1;
            }
            waiting_.push_front(q);
            moved_.push_back(q);
        }
    }
    void evict_rows(Group &group, int64_t g) {
        for (int64_t q : moved_) {
            Query &query = queries[q];
            if (query.group != g) continue;
            int64_t left = query.end - group.iterations;
            group.leave(query);
            query.made += gives_token_ + query.left - left;
            query.left = left;
            preemptions += 1;
        }
    }
    void advance(Group &group) {
        take(group, group.needed());
        group.clock += 1;
    }
    bool can_admit(const Group &group) const {
        if (waiting_.empty() || group.present() >= group.slots) return false;
        int64_t left = group.free - blocks_of(queries[waiting_.front()].tokens);
        return left >= (group.present() ? facts_.watermark : 0);
    }
    int64_t admit(Group &group) {
        int64_t q = waiting_.front();
        waiting_.pop_front();
        take(group, blocks_of(queries[q].tokens));
        return q;
    }
    void join(Group &group, int64_t g, int64_t q) {
        Query &query = queries[q];
        query.held = query.tokens - group.clock;
        query.holder = g;
        query.joined = group.joins++;
        group.begins[residue(query.held)] += 1;
        group.running += 1;
        group.order.emplace_back(q, query.joined);
        joined_.push_back(q);
    }
    void execute(Group &group, int64_t g, xgpt_replay::Kind kind) {
        evict_rows(group, g);
        if (kind != xgpt_replay::ENCODE) decode(group, g);
        for (int64_t q : joined_) {
            Query &query = queries[q];
            if (query.made) query.left -= gives_token_;
            enter(group, g, q, query.inputs + query.made, query.left);
        }
        work(group, kind, g, group.steps - 1, kind != xgpt_replay::ENCODE);
    }
    /* _decode_and_chunks */
    void mix(Group &group, int64_t g) {
        group.steps += 1;
        bool may_admit = group.needed() <= group.free;
        make_room(group, g);
        int64_t left = facts_.budget - group.running;
        bool is_decode = group.running > 0;
        if (is_decode) advance(group);
        while (left > 0) {
            if (group.part < 0) {
                if (!(may_admit && can_admit(group))) break;
                group.part = admit(group);
                group.part_tokens = queries[group.part].tokens;
                group.part_done = 0;
            }
            int64_t size = std::min(left, group.part_tokens - group.part_done);
            chunk(group.part, group.part_done, size);
            group.part_done += size;
            left -= size;
            if (group.part_done == group.part_tokens) {
                join(group, g, group.part);
                group.part = -1;
            }
        }
        bool encodes = !line.sizes.spans.empty();
        if (is_decode || encodes)
            execute(group, g, !is_decode ? xgpt_replay::ENCODE
                              : encodes  ? xgpt_replay::MIXED
                                         : xgpt_replay::DECODE);
    }
    /* _encode_or_decode */
    void either(Group &group, int64_t g) {
        int64_t left = facts_.budget;
        while (can_admit(group)) {
            if (!joined_.empty() && queries[waiting_.front()].tokens > left) break;
            int64_t q = admit(group);
            join(group, g, q);
            left -= queries[q].tokens;
            chunk(q, 0, queries[q].inputs + queries[q].made);
        }
        group.steps += 1;
        if (!joined_.empty()) {
            execute(group, g, xgpt_replay::ENCODE);
        } else if (group.running) {
            make_room(group, g);
            advance(group);
            execute(group, g, xgpt_replay::DECODE);
        }
    }
};

}  // namespace xgpt_paging
