/* Replicas of a replay, and the routing of requests to them as they arrive (Routing in
 * xsimulator/replay/routing.py, the rules of xrunner/rules/arrival_routing.py): the same decisions
 * in the same order. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernel.h"

namespace xgpt_replay {

constexpr double NEVER = std::numeric_limits<double>::quiet_NaN();

/* A request: its row, with its group (-1: none), and context and last iteration counted from the
 * group's first. `left`: iterations to go; `made`: tokens generated before its latest eviction.
 * Seconds: start of its encoding, first and last token. */
struct Query {
    int64_t group = -1, base = 0, end = -1, left = 0, made = 0;
    double start_s = NEVER, first_s = NEVER, last_s = NEVER;
};

/* Hears that a request has begun, or that some have ended. */
class Listener {
public:
    virtual ~Listener() = default;
    virtual void begun(double now) = 0;
    virtual void ended(size_t count, double now) = 0;
};

/* The requests of all replicas; tokens[requests] as routing counts them, or nullptr. */
struct Job {
    std::vector<Query> queries;
    const int64_t *tokens = nullptr;
    Kernel kernel;
    Listener *listener = nullptr;  // nullptr: nobody asks
};

/* Requests of a replica that are not done: waiting, active, and tokens of all. */
struct Load {
    int64_t waiting = 0, active = 0, tokens = 0;

    int64_t all() const { return waiting + active; }
};

class Line;

class Replica : public Process {
public:
    explicit Replica(Job &job) : queries(job.queries.data()), job_(job) {}

    Load load;
    int64_t preemptions = 0;

    virtual void submit(int64_t q) = 0;
    /* Lets it take up what was submitted. */
    virtual void wake(double now) = 0;
    /* The stages of its pools. */
    virtual std::vector<Line *> lines() = 0;
    /* Handovers between these, in threes. */
    virtual std::vector<double> handovers() { return {}; }

protected:
    Query *queries;

    Kernel &kernel() { return job_.kernel; }
    void begin(int64_t q, double now) {
        if (!std::isnan(queries[q].start_s)) return;
        queries[q].start_s = now;
        load.waiting -= 1;
        load.active += 1;
        if (job_.listener) job_.listener->begun(now);
    }
    /* Counts requests whose last tokens are there, and clears `done`. */
    void end(std::vector<int64_t> &done, double now) {
        const size_t count = done.size();
        load.active -= static_cast<int64_t>(count);
        if (job_.tokens)
            for (int64_t q : done) load.tokens -= job_.tokens[q];
        done.clear();
        if (count && job_.listener) job_.listener->ended(count, now);
    }

private:
    Job &job_;
};

/* Rules of routing. Dealt: the replica of each request is known. */
enum Rule : int64_t { DEALT, LEAST_QUERIES, LEAST_TOKENS, DEFERRED };

/* See Window in xrunner/rules/routing.py. */
struct Window {
    int64_t waiting, present;

    bool lacks(const Load &load) const {
        return waiting > load.waiting || present > load.all();
    }
};

/* order[requests] of arrival; arrival_s[requests], infinite for those of a closed loop, in place of
 * which it writes when they arrive; owners[requests]: replica of each, which it writes if the rule
 * does not know it before; windows[replicas], of the rule DEFERRED. */
struct Coming {
    int64_t rule;
    const int64_t *order;
    double *arrival_s;
    int64_t *owners;
    const Window *windows;
};

class Routing : public Process, public Listener {
public:
    Routing(const Coming &coming, Job &job, std::vector<std::unique_ptr<Replica>> &replicas)
        : coming_(coming), job_(job), replicas_(replicas), is_fed_(replicas.size()) {
        const bool is_closed = count() && std::isinf(coming.arrival_s[coming.order[count() - 1]]);
        if (is_closed || coming.rule == DEFERRED) job.listener = this;
        announce();
    }
    void act(int64_t what, int64_t, double now) override {
        if (what == ROUTING) is_due_ = false;
        else for (; come_ < count() && next_s() <= now; ++come_) arrive(coming_.order[come_]);
        give_waiting();
        wake(now);
        if (what == ARRIVAL) announce();
    }
    void begun(double now) override { ask(now); }
    void ended(size_t ended, double now) override {
        for (; ended && come_ < count() && std::isinf(next_s()); --ended, ++come_) {
            coming_.arrival_s[coming_.order[come_]] = now;
            arrive(coming_.order[come_]);
        }
        wake(now);
        ask(now);
    }

private:
    Coming coming_;
    Job &job_;
    std::vector<std::unique_ptr<Replica>> &replicas_;
    std::vector<char> is_fed_;
    std::vector<size_t> fed_;  // replicas to wake, in order
    std::vector<int64_t> waiting_;  // requests at the router, from `next_` on
    size_t come_ = 0, next_ = 0;
    bool is_due_ = false;

    size_t count() const { return job_.queries.size(); }
    double next_s() const { return coming_.arrival_s[coming_.order[come_]]; }
    bool keeps() const { return next_ < waiting_.size(); }

    void announce() {
        job_.kernel.quiet_s = come_ < count() ? next_s() : std::numeric_limits<double>::infinity();
        if (!std::isinf(job_.kernel.quiet_s)) job_.kernel.at(next_s(), ARRIVAL, *this, ARRIVAL);
    }
    /* Lets the router decide when all turns of this moment are over. */
    void ask(double now) {
        if (is_due_ || !keeps()) return;
        is_due_ = true;
        job_.kernel.at(now, ROUTING, *this, ROUTING);
    }
    void arrive(int64_t q) {
        if (coming_.rule != DEFERRED) return give(q, chosen(q));
        waiting_.push_back(q);
        if (waiting_.size() - next_ == 1) give_one();
    }
    size_t chosen(int64_t q) const {
        if (coming_.rule == DEALT) return static_cast<size_t>(coming_.owners[q]);
        return least([](size_t) { return true; });
    }
    /* The first with the least load among these. */
    template <class Counts>
    size_t least(const Counts &counts) const {
        const size_t none = replicas_.size();
        size_t best = none;
        for (size_t r = 0; r < none; ++r)
            if (counts(r) && (best == none || load(r) < load(best))) best = r;
        return best;
    }
    int64_t load(size_t r) const {
        const Load &load = replicas_[r]->load;
        return coming_.rule == LEAST_TOKENS ? load.tokens : load.all();
    }
    /* Deferred.next */
    bool give_one() {
        if (!keeps()) return false;
        const size_t r = least([&](size_t one) {
            return coming_.windows[one].lacks(replicas_[one]->load);
        });
        if (r == replicas_.size()) return false;
        give(waiting_[next_++], r);
        return true;
    }
    void give_waiting() {
        while (give_one()) {}
    }
    void give(int64_t q, size_t r) {
        Replica &replica = *replicas_[r];
        coming_.owners[q] = static_cast<int64_t>(r);
        replica.load.waiting += 1;
        if (job_.tokens) replica.load.tokens += job_.tokens[q];
        replica.submit(q);
        if (is_fed_[r]) return;
        is_fed_[r] = true;
        fed_.push_back(r);
    }
    void wake(double now) {
        for (size_t r : fed_) {
            replicas_[r]->wake(now);
            is_fed_[r] = false;
        }
        fed_.clear();
    }
};

}  // namespace xgpt_replay
