/* What replays share, whatever the rules: rows of groups (GroupRows in
 * xsimulator/replay/queries.py), stages of a pool (Pipeline in pipeline.py), and turns of a
 * replica with a single pool (PoolProcess in pool.py). */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "replica.h"
#include "step_times.h"

namespace xgpt_replay {

enum Kind : int64_t { ENCODE, DECODE, MIXED };

/* A group's rows. A request that was evicted and came again may be in `entered` and `longest`
 * more than once: only what its row says is valid. The longest is searched only for padded rows.
 * `first`, `done`: requests whose first or last token is awaited, which is there at `ready_s`.
 * `fresh`: those that joined without a token and were not decoded yet. */
struct Rows {
    bool is_padded = false, is_awaited = false;
    double ready_s = 0.0;
    int64_t iterations = 0, base = 0, rows = 0, removed = 0;
    std::vector<std::pair<int64_t, int64_t>> entered;          // (request, next of its end)
    std::vector<std::pair<int64_t, int64_t>> ends;             // by last iteration: first, last
    std::priority_queue<std::pair<int64_t, int64_t>> longest;  // (base, request), some gone
    std::vector<int64_t> first, done, fresh;

    void enter(int64_t g, int64_t q, Query &query, int64_t context, int64_t left) {
        query.base = context - iterations;
        query.end = iterations + left;
        query.group = g;
        base += query.base;
        rows += 1;
        if (left > 0) {
            if (static_cast<int64_t>(ends.size()) <= query.end) ends.resize(query.end + 1, {-1, -1});
            auto &[from, until] = ends[query.end];
            const int64_t place = static_cast<int64_t>(entered.size());
            (from < 0 ? from : entered[until].second) = place;
            until = place;
            entered.emplace_back(q, -1);
            if (is_padded) longest.emplace(query.base, q);
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
    /* Rows moved into places vacated since the last step; call it once a step. */
    double moved() {
        const int64_t gone = std::exchange(removed, 0);
        return gone ? static_cast<double>(gone * rows) / static_cast<double>(rows + gone) : 0.0;
    }
    /* Writes rows, mean context and longest context into `sizes`. */
    void decode(int64_t g, Query *queries, xgpt_times::Sizes &sizes) {
        iterations += 1;
        while (!longest.empty() && (queries[longest.top().second].group != g ||
                                    queries[longest.top().second].base != longest.top().first))
            longest.pop();
        sizes.decoded = rows;
        sizes.context = static_cast<double>(base) / static_cast<double>(rows) +
                        static_cast<double>(iterations);
        sizes.longest = longest.empty() ? sizes.context
                                        : static_cast<double>(longest.top().first + iterations);
        if (static_cast<int64_t>(ends.size()) <= iterations) return;
        for (int64_t at = ends[iterations].first; at >= 0; at = entered[at].second) {
            const int64_t q = entered[at].first;
            if (queries[q].group != g || queries[q].end != iterations) continue;
            done.push_back(q);
            queries[q].end = -1;
        }
    }
    /* Removes all rows, finished ones too. */
    void clear() {
        base = rows = removed = 0;
        entered.clear();
        ends.clear();
        longest = {};
    }
};

/* Record of a pool's steps in order: durations and ends by stage. On request also labels[7]
 * kind, group, phase (with paged KV the step's number in its group), iteration, numbers of
 * chunks, of requests that moved (evicted, or handed over) and of those encoded; these chunks[3]
 * request, first, tokens; these requests; sizes[4] tokens, encoded, decoded, context; and tokens
 * held from each moment on; and shared[4] the number of a step, and what prefixes.h tells of it. */
struct Told {
    std::vector<int64_t> labels, chunks, ended, moved, memory_tokens, shared;
    std::vector<double> memory_s, sizes, durations_s, ends_s;
};

/* The stages of a pool, which work steps in the order in which these are decided. */
class Line {
public:
    /* factors[stages]: of the clock's seconds */
    Line(xgpt_times::Clock &clock, const double *factors, bool is_told)
        : stages(clock.stages), is_told(is_told),
          free_s(clock.stages, -std::numeric_limits<double>::infinity()), clock_(&clock),
          factors_(factors), seconds_(clock.stages) {}

    const int64_t stages;
    const bool is_told;
    std::vector<double> free_s;  // when each is next free
    xgpt_times::Sizes sizes;     // of the step being decided
    Told told;

    void begin_turn(double now) {
        if (now > free_s[0]) free_s[0] = now;
        sizes.clear();
    }
    void chunk(int64_t query, int64_t first, int64_t tokens) {
        sizes.spans.emplace_back(first, tokens);
        sizes.tokens += tokens;
        if (!is_told) return;
        for (int64_t value : {query, first, tokens}) told.chunks.push_back(value);
    }
    /* Sends the step through the stages; returns when the last one is done. */
    double work(const int64_t (&label)[7], const std::vector<int64_t> &joined, double now) {
        clock_->seconds(sizes, seconds_.data());
        for (int64_t s = 0; s < stages; ++s) {
            const double free = free_s[s];
            seconds_[s] *= factors_[s];
            free_s[s] = now = (now > free ? now : free) + seconds_[s];
        }
        told.durations_s.insert(told.durations_s.end(), seconds_.begin(), seconds_.end());
        told.ends_s.insert(told.ends_s.end(), free_s.begin(), free_s.end());
        if (!is_told) return now;
        told.labels.insert(told.labels.end(), label, label + 7);
        told.ended.insert(told.ended.end(), joined.begin(), joined.end());
        for (double size : {static_cast<double>(sizes.tokens), static_cast<double>(sizes.encoded),
                            static_cast<double>(sizes.decoded), sizes.context})
            told.sizes.push_back(size);
        return now;
    }
    void move(const std::vector<int64_t> &queries) {
        if (is_told) told.moved.insert(told.moved.end(), queries.begin(), queries.end());
    }
    /* Records what the next step does with shared prefixes. */
    void share(const std::vector<int64_t> &threes) {
        const int64_t step = static_cast<int64_t>(told.labels.size()) / 7;
        for (size_t at = 0; is_told && at < threes.size(); at += 3)
            told.shared.insert(told.shared.end(),
                               {step, threes[at], threes[at + 1], threes[at + 2]});
    }
    void note_memory(int64_t held, double now) {
        if (held == noted_ || !is_told) return;
        noted_ = held;
        told.memory_s.push_back(now);
        told.memory_tokens.push_back(held);
    }

private:
    xgpt_times::Clock *clock_;
    const double *factors_;
    std::vector<double> seconds_;
    int64_t noted_ = -1;
};

/* Input of a replica with a single pool: the clock and factors[stages] of its seconds, whether
 * encoding yields a token, whether rows are compacted. */
struct Given {
    xgpt_times::Clock &clock;
    const double *factors;
    bool gives_token, is_told, compacts;
};

/* Turns of a rule, which chooses the group of the next one (-1: nothing to do) and decides its
 * step. Group has the members of Rows. */
template <class Group>
class PoolReplay : public Replica {
public:
    PoolReplay(const Given &given, Job &job, int64_t num_groups)
        : Replica(job), line(given.clock, given.factors, given.is_told), groups_(num_groups),
          gives_token_(given.gives_token), compacts_(given.compacts) {
        line_.reserve(job.queries.size());
        for (Group &group : groups_) group.is_padded = given.clock.is_padded();
    }

    void submit(int64_t q) override { line_.push_back(q); }
    void wake(double now) override {
        if (!is_idle_) return;
        is_idle_ = false;
        kernel().at(now, TURN, *this, -1);
    }
    void act(int64_t g, int64_t, double now) override {
        if (g >= 0) take_turn(g, now);
        take_turns(now);
    }
    std::vector<Line *> lines() override { return {&line}; }

protected:
    Line line;
    std::vector<Group> groups_;
    std::vector<int64_t> joined_, moved_;  // requests encoded and evicted by the step
    double now_ = 0.0;
    int64_t next_ = 0, held_ = 0;  // place of the first waiting request; tokens
    bool gives_token_, compacts_;
    std::vector<int64_t> line_;  // requests that have come, in line from `next_` on

    int64_t num_waiting() const { return static_cast<int64_t>(line_.size()) - next_; }
    virtual int64_t next_group() = 0;
    /* Whether the next turn waits for the tokens of its group. */
    virtual bool needs_tokens() const { return true; }
    /* `takes`: whether the group's tokens are there to be collected. */
    virtual void turn(int64_t g, bool takes) = 0;

    /* Takes up the tokens of a group; calls leave(request) for each that is done. */
    template <class Leave>
    void collect(Group &group, const Leave &leave) {
        for (int64_t q : group.first)
            if (std::isnan(queries[q].first_s)) queries[q].first_s = now_;
        for (int64_t q : group.done) leave(q);
        group.first.clear();
        group.is_awaited = false;
    }
    void chunk(int64_t q, int64_t first, int64_t tokens) {
        line.chunk(q, first, tokens);
        begin(q, now_);
    }
    void decode(Group &group, int64_t g) {
        group.decode(g, queries, line.sizes);
        if (compacts_) line.sizes.moved = group.moved();
        if (!gives_token_) std::swap(group.first, group.fresh);
    }
    void enter(Group &group, int64_t g, int64_t q, int64_t context) {
        group.enter(g, q, queries[q], context, queries[q].left);
        (gives_token_ ? group.first : group.fresh).push_back(q);
    }
    void work(Group &group, Kind kind, int64_t g, int64_t phase, int64_t iteration) {
        xgpt_times::Sizes &sizes = line.sizes;
        sizes.encoded = static_cast<int64_t>(joined_.size());
        line.move(moved_);
        group.ready_s = line.work(
            {kind, g, phase, iteration, static_cast<int64_t>(sizes.spans.size()),
             static_cast<int64_t>(moved_.size()), sizes.encoded}, joined_, now_);
        group.is_awaited = true;
    }

private:
    bool is_idle_ = true;

    bool waits(int64_t g) const { return groups_[g].is_awaited && needs_tokens(); }
    void take_turns(double now) {
        is_idle_ = false;
        for (int64_t g; (g = next_group()) >= 0;) {
            now = std::max(now, line.free_s[0]);
            if (waits(g)) now = std::max(now, groups_[g].ready_s);
            if (!kernel().is_free_until(now)) return kernel().at(now, TURN, *this, g);
            take_turn(g, now);
        }
        is_idle_ = true;
    }
    void take_turn(int64_t g, double now) {
        now_ = now;
        line.begin_turn(now);
        joined_.clear();
        moved_.clear();
        turn(g, waits(g));
    }
};

}  // namespace xgpt_replay
