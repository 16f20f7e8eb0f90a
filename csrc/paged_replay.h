/* A replay of a pool that is alone and has paged KV: what its rule (xrunner/rules/paged.py) decides,
 * turn by turn, and what each step has of queries and tokens (xsimulator/replay/pool.py,
 * queries.py). When it all happens is found afterwards (stage_line.py: LaterLine). The same
 * decisions in the same order. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <deque>
#include <queue>
#include <utility>
#include <vector>

namespace xgpt_replay {

constexpr int64_t BLOCK = 16;

inline int64_t blocks_of(int64_t tokens) { return (tokens + BLOCK - 1) / BLOCK; }
inline int64_t residue(int64_t value) { return ((value % BLOCK) + BLOCK) % BLOCK; }

struct Facts {
    int64_t queries, groups, blocks, watermark, budget, is_chunked;
};

struct Query {
    int64_t inputs, left, made, tokens;      // `tokens`: it is to be encoded with
    int64_t start, first, last;              // turns
    int64_t group, held, joined;             // its rule's base, and when it joined that group
    int64_t row_group, base, end;            // its row's
};

/* A group's blocks, and its rows. */
struct Group {
    int64_t free = 0, slots = 0, clock = 0, begins[BLOCK] = {}, running = 0, joins = 0;
    int64_t part = -1, part_tokens = 0, part_done = 0;  // a query that is encoded in part
    int64_t steps = 0, awaited = -1, iterations = 0, base = 0, rows = 0;
    std::vector<std::pair<int64_t, int64_t>> order;     // (query, when it joined), some gone
    std::vector<std::vector<int64_t>> ends;             // by iteration: whose last it is
    std::priority_queue<std::pair<int64_t, int64_t>> longest;  // (base, query), some gone
    std::vector<int64_t> first, done;                   // of the step that is awaited

    int64_t present() const { return running + (part >= 0); }
    int64_t needed() const { return begins[residue(-clock)]; }
};

/* What is told of all turns and steps. */
struct Told {
    std::vector<int64_t> waits, turn_of, labels, chunks, ended, evicted, memory;
    std::vector<double> sizes;
    int64_t preemptions = 0;
};

class Replay {
public:
    Replay(const Facts &facts, const int64_t *slots, const int64_t *inputs, const int64_t *left)
        : facts_(facts), groups_(facts.groups), queries_(facts.queries) {
        for (int64_t g = 0; g < facts.groups; ++g) {
            groups_[g].free = facts.blocks;
            groups_[g].slots = slots[g];
        }
        for (int64_t q = 0; q < facts.queries; ++q) {
            queries_[q] = {inputs[q], left[q], 0, inputs[q], -1, -1, -1, -1, 0, 0, -1, 0, 0};
            waiting_.push_back(q);
        }
    }
    void run() {
        for (int64_t g; (g = next()) >= 0;) {
            Group &group = groups_[g];
            now_ = static_cast<int64_t>(told.waits.size());
            told.waits.push_back(group.awaited);
            if (group.awaited >= 0) collect(group);
            group.awaited = -1;
            turn_ = (g + 1) % facts_.groups;
            facts_.is_chunked ? mix(group, g) : either(group, g);
            if (held_ != noted_) {
                noted_ = held_;
                told.memory.push_back(now_);
                told.memory.push_back(held_ * BLOCK);
            }
        }
    }
    const std::vector<Query> &queries() const { return queries_; }

    Told told;

private:
    Facts facts_;
    std::vector<Group> groups_;
    std::vector<Query> queries_;
    std::deque<int64_t> waiting_;
    std::vector<int64_t> joined_;
    int64_t turn_ = 0, now_ = 0, held_ = 0, noted_ = -1;

    int64_t next() const {
        for (int64_t ahead = 0; ahead < facts_.groups; ++ahead) {
            int64_t g = (turn_ + ahead) % facts_.groups;
            if (!waiting_.empty() || groups_[g].present()) return g;
        }
        return -1;
    }
    void take(Group &group, int64_t blocks) {
        group.free -= blocks;
        held_ += blocks;
    }
    void leave_row(Group &group, Query &query) {
        group.base -= query.base;
        group.rows -= 1;
        query.row_group = -1;
    }
    int64_t leave(Group &group, Query &query) {
        int64_t held = query.held + group.clock;
        group.begins[residue(query.held)] -= 1;
        group.running -= 1;
        query.group = -1;
        take(group, -blocks_of(held));
        return held;
    }
    void collect(Group &group) {
        for (int64_t q : group.first)
            if (queries_[q].first < 0) queries_[q].first = now_;
        for (int64_t q : group.done) {
            leave(group, queries_[q]);
            leave_row(group, queries_[q]);
            queries_[q].last = now_;
        }
        group.first.clear();
        group.done.clear();
    }
    /* The latest admitted queries go until all that are left can grow by a token. */
    int64_t make_room(Group &group, int64_t g) {
        int64_t count = 0;
        while (group.needed() > group.free) {
            int64_t q = group.part;
            if (q >= 0) {
                group.part = -1;
                take(group, -blocks_of(group.part_tokens));
            } else {
                while (q = group.order.back().first, queries_[q].group != g ||
                       queries_[q].joined != group.order.back().second)
                    group.order.pop_back();
                group.order.pop_back();
                queries_[q].tokens = leave(group, queries_[q]) + 1;
            }
            waiting_.push_front(q);
            told.evicted.push_back(q);
            ++count;
        }
        return count;
    }
    void evict_rows(Group &group, int64_t g, int64_t count) {
        for (size_t i = told.evicted.size() - count; i < told.evicted.size(); ++i) {
            Query &query = queries_[told.evicted[i]];
            if (query.row_group != g) continue;
            int64_t left = query.end - group.iterations;
            leave_row(group, query);
            query.made += 1 + query.left - left;
            query.left = left;
            told.preemptions += 1;
        }
    }
    void advance(Group &group) {
        take(group, group.needed());
        group.clock += 1;
    }
    bool can_admit(const Group &group) const {
        if (waiting_.empty() || group.present() >= group.slots) return false;
        int64_t left = group.free - blocks_of(queries_[waiting_.front()].tokens);
        return left >= (group.present() ? facts_.watermark : 0);
    }
    int64_t admit(Group &group) {
        int64_t q = waiting_.front();
        waiting_.pop_front();
        take(group, blocks_of(queries_[q].tokens));
        return q;
    }
    void join(Group &group, int64_t g, int64_t q) {
        Query &query = queries_[q];
        query.held = query.tokens - group.clock;
        query.group = g;
        query.joined = group.joins++;
        group.begins[residue(query.held)] += 1;
        group.running += 1;
        group.order.emplace_back(q, query.joined);
        joined_.push_back(q);
    }
    void join_rows(Group &group, int64_t g) {
        for (int64_t q : joined_) {
            Query &query = queries_[q];
            if (query.made) query.left -= 1;
            query.base = query.inputs + query.made - group.iterations;
            query.end = group.iterations + query.left;
            query.row_group = g;
            group.base += query.base;
            group.rows += 1;
            if (query.left > 0) {
                if (static_cast<int64_t>(group.ends.size()) <= query.end)
                    group.ends.resize(query.end + 1);
                group.ends[query.end].push_back(q);
                group.longest.emplace(query.base, q);
            } else {
                group.done.push_back(q);
            }
        }
        group.first = joined_;
    }
    /* (rows, mean context, longest context) */
    void decode(Group &group, int64_t g, double *sizes) {
        group.iterations += 1;
        auto &longest = group.longest;
        while (!longest.empty() && (queries_[longest.top().second].row_group != g ||
                                    queries_[longest.top().second].base != longest.top().first))
            longest.pop();
        double iterations = static_cast<double>(group.iterations);
        sizes[0] = static_cast<double>(group.rows);
        sizes[1] = static_cast<double>(group.base) / sizes[0] + iterations;
        sizes[2] = longest.empty() ? sizes[1]
                                   : static_cast<double>(longest.top().first + group.iterations);
        if (static_cast<int64_t>(group.ends.size()) <= group.iterations) return;
        for (int64_t q : group.ends[group.iterations]) {
            if (queries_[q].row_group != g || queries_[q].end != group.iterations) continue;
            group.done.push_back(q);
            queries_[q].end = -1;  // one that left and came again may be there twice
        }
        std::vector<int64_t>().swap(group.ends[group.iterations]);
    }
    void begin(int64_t q) {
        if (queries_[q].start < 0) queries_[q].start = now_;
    }
    /* kind: 0 encode, 1 decode, 2 mixed */
    void execute(Group &group, int64_t g, int64_t kind, int64_t evicted, int64_t chunks) {
        double decoded[3] = {0.0, 0.0, 0.0};
        evict_rows(group, g, evicted);
        if (kind != 0) decode(group, g, decoded);
        double tokens = 0.0;
        for (size_t i = told.chunks.size() - 3 * chunks; i < told.chunks.size(); i += 3) {
            if (told.chunks[i + 1] == 0) begin(told.chunks[i]);
            tokens += static_cast<double>(told.chunks[i + 2]);
        }
        double encoded = static_cast<double>(joined_.size());
        if (kind != 1) join_rows(group, g);
        for (double value : {tokens, encoded, decoded[0], decoded[1], decoded[2], 0.0, 0.0})
            told.sizes.push_back(value);
        told.turn_of.push_back(now_);
        for (int64_t value : {kind, g, group.steps - 1, chunks, evicted,
                              static_cast<int64_t>(joined_.size())})
            told.labels.push_back(value);
        told.ended.insert(told.ended.end(), joined_.begin(), joined_.end());
        group.awaited = now_;
    }
    void chunk(int64_t q, int64_t first, int64_t tokens) {
        for (int64_t value : {q, first, tokens}) told.chunks.push_back(value);
    }
    /* _decode_and_chunks */
    void mix(Group &group, int64_t g) {
        group.steps += 1;
        bool may_admit = group.needed() <= group.free;
        int64_t evicted = make_room(group, g), left = facts_.budget - group.running, count = 0;
        bool is_decode = group.running > 0;
        joined_.clear();
        if (is_decode) advance(group);
        for (; left > 0; ++count) {
            if (group.part < 0) {
                if (!(may_admit && can_admit(group))) break;
                group.part = admit(group);
                group.part_tokens = queries_[group.part].tokens;
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
        if (is_decode || count) execute(group, g, is_decode ? (count ? 2 : 1) : 0, evicted, count);
    }
    /* _encode_or_decode */
    void either(Group &group, int64_t g) {
        int64_t left = facts_.budget;
        joined_.clear();
        while (can_admit(group)) {
            if (!joined_.empty() && queries_[waiting_.front()].tokens > left) break;
            int64_t q = admit(group);
            join(group, g, q);
            left -= queries_[q].tokens;
            chunk(q, 0, queries_[q].inputs + queries_[q].made);
        }
        group.steps += 1;
        if (!joined_.empty()) {
            execute(group, g, 0, 0, static_cast<int64_t>(joined_.size()));
        } else if (group.running) {
            int64_t evicted = make_room(group, g);
            advance(group);
            execute(group, g, 1, evicted, 0);
        }
    }
};

}  // namespace xgpt_replay

/* A replay of a pool with paged KV that is alone. facts: numbers of queries, groups,
 * blocks of a group, blocks that admission leaves free, tokens of a step, whether inputs are encoded
 * in chunks; slots[groups]; inputs[queries] tokens, left[queries] iterations. Into counts[6] how many
 * turns, steps, chunks, queries encoded, queries evicted and changes of memory there are, which
 * xgpt_paged_told hands over, and frees what is returned here. */
extern "C" void *xgpt_paged(const int64_t *facts, const int64_t *slots, const int64_t *inputs,
                            const int64_t *left, int64_t *counts) {
    auto *replay = new xgpt_replay::Replay(
        {facts[0], facts[1], facts[2], facts[3], facts[4], facts[5]}, slots, inputs, left);
    replay->run();
    const auto &told = replay->told;
    const size_t sizes[6] = {told.waits.size(), told.turn_of.size(), told.chunks.size() / 3,
                             told.ended.size(), told.evicted.size(), told.memory.size() / 2};
    std::copy(sizes, sizes + 6, counts);
    return replay;
}

/* Into waits[turns] the turn whose tokens each waits for (-1: none); turn_of[steps]; labels[steps][6]
 * kind (0 encode, 1 decode, 2 mixed), group, number, chunks, evicted, encoded; chunks[chunks][3]
 * query, first, tokens; ended, evicted: queries; memory[changes][2] turn, tokens; sizes[steps][7] as
 * of LaterLine; times[3][queries] the turns of a query's start, first and last token. Returns how
 * often a query with a row was evicted. */
extern "C" int64_t xgpt_paged_told(void *given, int64_t *waits, int64_t *turn_of, int64_t *labels,
                                   int64_t *chunks, int64_t *ended, int64_t *evicted,
                                   int64_t *memory, double *sizes, int64_t *times) {
    auto *replay = static_cast<xgpt_replay::Replay *>(given);
    const auto &told = replay->told;
    const std::pair<const std::vector<int64_t> *, int64_t *> all[] = {
        {&told.waits, waits},     {&told.turn_of, turn_of}, {&told.labels, labels},
        {&told.chunks, chunks},   {&told.ended, ended},     {&told.evicted, evicted},
        {&told.memory, memory}};
    for (const auto &[from, to] : all) std::copy(from->begin(), from->end(), to);
    std::copy(told.sizes.begin(), told.sizes.end(), sizes);
    const int64_t count = static_cast<int64_t>(replay->queries().size());
    for (int64_t q = 0; q < count; ++q) {
        const auto &query = replay->queries()[q];
        times[q] = query.start;
        times[count + q] = query.first;
        times[2 * count + q] = query.last;
    }
    int64_t preemptions = told.preemptions;
    delete replay;
    return preemptions;
}
