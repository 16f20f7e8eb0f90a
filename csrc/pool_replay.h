/* What replays of a pool that is alone have in common, whatever its rule: the rows of its groups
 * (GroupRows in xsimulator/replay/queries.py), and what is told of all turns and steps
 * (xsimulator/replay/told.py). */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <initializer_list>
#include <queue>
#include <utility>
#include <vector>

namespace xgpt_replay {

/* A query's row: its group (-1: it has none), and context and last iteration, counted from the group's
 * first. */
struct Place {
    int64_t group = -1, base = 0, end = -1;
};

/* Besides, the turns of the query's start, first and last token (-1: not yet). */
struct Row : Place {
    int64_t start = -1, first = -1, last = -1;
};

/* A group's rows. A query that left and came again may be in `ends` and `longest` more than once:
 * what its row says is so. */
template <class Query>
struct Rows {
    int64_t awaited = -1, iterations = 0, base = 0, rows = 0, removed = 0;
    std::vector<std::vector<int64_t>> ends;                    // by iteration: whose last it is
    std::priority_queue<std::pair<int64_t, int64_t>> longest;  // (base, query), some gone
    std::vector<int64_t> first, done;                          // of the step that is awaited

    void enter(int64_t g, int64_t q, Query &query, int64_t context, int64_t left) {
        query.base = context - iterations;
        query.end = iterations + left;
        query.group = g;
        base += query.base;
        rows += 1;
        if (left > 0) {
            if (static_cast<int64_t>(ends.size()) <= query.end) ends.resize(query.end + 1);
            ends[query.end].push_back(q);
            longest.emplace(query.base, q);
        } else {
            done.push_back(q);
        }
    }
    void leave(Query &query) {
        base -= query.base;
        rows -= 1;
        removed += 1;
        query.group = -1;
    }
    /* Rows that are moved into places of those that left since the last step; once a step. */
    double moved() {
        const int64_t gone = std::exchange(removed, 0);
        return gone ? static_cast<double>(gone * rows) / static_cast<double>(rows + gone) : 0.0;
    }
    /* Into sizes[3]: rows, mean context, longest context. */
    void decode(int64_t g, std::vector<Query> &queries, double *sizes) {
        iterations += 1;
        while (!longest.empty() && (queries[longest.top().second].group != g ||
                                    queries[longest.top().second].base != longest.top().first))
            longest.pop();
        sizes[0] = static_cast<double>(rows);
        sizes[1] = static_cast<double>(base) / sizes[0] + static_cast<double>(iterations);
        sizes[2] = longest.empty() ? sizes[1]
                                   : static_cast<double>(longest.top().first + iterations);
        if (static_cast<int64_t>(ends.size()) <= iterations) return;
        for (int64_t q : ends[iterations]) {
            if (queries[q].group != g || queries[q].end != iterations) continue;
            done.push_back(q);
            queries[q].end = -1;
        }
        std::vector<int64_t>().swap(ends[iterations]);
    }
};

/* What is told of all turns and steps, as xgpt_told hands it over; times by query. */
struct Told {
    std::vector<int64_t> waits, turn_of, labels, chunks, ended, evicted, memory, times;
    std::vector<double> sizes;
    int64_t preemptions = 0;
};

/* Turns of a rule; Query has what Row has, Group what Rows has. */
template <class Query, class Group>
class PoolReplay {
public:
    PoolReplay(int64_t groups, int64_t queries) : groups_(groups), queries_(queries) {}

    /* What is told, when all turns are over. */
    Told finished() {
        for (const Query &query : queries_) told.times.push_back(query.start);
        for (const Query &query : queries_) told.times.push_back(query.first);
        for (const Query &query : queries_) told.times.push_back(query.last);
        return std::move(told);
    }

protected:
    enum Kind : int64_t { ENCODE, DECODE, MIXED };

    Told told;
    std::vector<Group> groups_;
    std::vector<Query> queries_;
    std::vector<int64_t> joined_;       // whose encoding the step ends
    int64_t now_ = 0, held_ = 0;        // the turn, and tokens held

    /* A turn begins: `leave` is told of each query that is done. */
    template <class Leave>
    void begin_turn(Group &group, const Leave &leave) {
        now_ = static_cast<int64_t>(told.waits.size());
        told.waits.push_back(group.awaited);
        if (group.awaited >= 0) {
            for (int64_t q : group.first)
                if (queries_[q].first < 0) queries_[q].first = now_;
            for (int64_t q : group.done) {
                leave(queries_[q]);
                group.leave(queries_[q]);
                queries_[q].last = now_;
            }
            group.first.clear();
            group.done.clear();
        }
        group.awaited = -1;
        joined_.clear();
    }
    void end_turn() {
        if (held_ == noted_) return;
        noted_ = held_;
        told.memory.push_back(now_);
        told.memory.push_back(held_);
    }
    void chunk(int64_t q, int64_t first, int64_t tokens) {
        for (int64_t value : {q, first, tokens}) told.chunks.push_back(value);
    }
    /* Tokens of the step's `chunks`, the last that are told; a query starts with its first. */
    double encoded_tokens(int64_t chunks) {
        double tokens = 0.0;
        for (size_t i = told.chunks.size() - 3 * chunks; i < told.chunks.size(); i += 3) {
            Query &query = queries_[told.chunks[i]];
            if (told.chunks[i + 1] == 0 && query.start < 0) query.start = now_;
            tokens += static_cast<double>(told.chunks[i + 2]);
        }
        return tokens;
    }
    /* decoded[4]: of LaterLine's sizes, what decoding has. */
    void tell(Group &group, Kind kind, int64_t g, int64_t phase, int64_t iteration, int64_t chunks,
              int64_t evicted, double tokens, const double *decoded) {
        int64_t joined = static_cast<int64_t>(joined_.size());
        for (double value : {tokens, static_cast<double>(joined), decoded[0], decoded[1], decoded[2],
                             decoded[3], 0.0})
            told.sizes.push_back(value);
        told.turn_of.push_back(now_);
        for (int64_t value : {static_cast<int64_t>(kind), g, phase, iteration, chunks, evicted, joined})
            told.labels.push_back(value);
        told.ended.insert(told.ended.end(), joined_.begin(), joined_.end());
        group.first = joined_;
        group.awaited = now_;
    }

private:
    int64_t noted_ = -1;
};

}  // namespace xgpt_replay
