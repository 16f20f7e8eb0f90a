/* A replay of two pools, of which one encodes by WAA's rule and hands over to the other
 * (xsimulator/replay/flow.py, pool.py, stage_line.py, kernel.py): the same events in the same order,
 * of (seconds, priority, sequence), and the same sums. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <tuple>
#include <vector>

#include "pool_replay.h"

#include "step_times.h"
#include "waa_rules.h"

namespace xgpt_handing {

constexpr double NEVER = std::numeric_limits<double>::quiet_NaN();

struct Query : xgpt_replay::Place {
    double start_s = NEVER, first_s = NEVER, last_s = NEVER;
};

/* `fresh`: who joined without a token, and was not decoded yet. The step that is awaited is through
 * at `ready_s`. */
struct Group : xgpt_replay::Rows<Query> {
    double ready_s = 0.0;
    std::vector<int64_t> fresh;
};

/* What a pool did, as told.py has it: labels[7], sizes[4] and [stages] durations and ends by step. In
 * place of evicted queries are those handed over. */
struct Told {
    std::vector<int64_t> labels, chunks, ended, handed, memory_tokens;
    std::vector<double> memory_s, sizes, durations_s, ends_s;
};

struct Pool {
    Pool(const xgpt_times::Clock &of, int64_t num_groups)
        : clock(of), groups(num_groups),
          free_s(of.stages, -std::numeric_limits<double>::infinity()), seconds(of.stages) {}
    xgpt_times::Clock clock;
    std::vector<Group> groups;
    std::vector<double> free_s, seconds;
    bool is_idle = true;
    int64_t noted = -1;
    Told told;
};

/* `order`: queries as they come; left: their iterations to go. */
struct Given {
    int64_t queries, gives_token, compacts;
    const int64_t *inputs, *left, *order;
    const double *arrival_s;
};

class Replay {
public:
    Replay(const Given &given, const xgpt_waa::EncodeRule &encode, int64_t encode_groups,
           const xgpt_waa::DecodeRule &decode, int64_t decode_groups,
           const xgpt_times::Clock &encode_clock, const xgpt_times::Clock &decode_clock,
           const xgpt_times::Blocks &handover_s)
        : queries(given.queries), encoding(encode_clock, encode_groups),
          decoding(decode_clock, decode_groups), given_(given), encode_(encode), decode_(decode),
          handover_s_(handover_s) {}

    std::vector<Query> queries;
    Pool encoding, decoding;
    std::vector<double> sent;  // [3]: step, begin, end

    void run() {
        announce();
        while (!events_.empty()) {
            const Event event = events_.top();
            events_.pop();
            act(event, event.at_s);
        }
    }

private:
    enum Priority : int64_t { ARRIVAL, TURN };
    enum What : int64_t { COME, ARRIVE, END_EARLY, ENCODE_TURNS, ENCODE_ON, DECODE_TURNS, DECODE_ON };
    enum Kind : int64_t { ENCODE, DECODE, MIXED };
    struct Event {
        double at_s;
        int64_t priority, sequence;
        What what;
        int64_t which;
        bool operator<(const Event &other) const {  // the first is the greatest
            return std::tie(at_s, priority, sequence) >
                   std::tie(other.at_s, other.priority, other.sequence);
        }
    };
    Given given_;
    xgpt_waa::EncodeRule encode_;
    xgpt_waa::DecodeRule decode_;
    xgpt_times::Blocks handover_s_;
    std::priority_queue<Event> events_;
    int64_t sequence_ = 0, coming_ = 0;
    double link_free_s_ = -std::numeric_limits<double>::infinity();
    std::vector<std::vector<int64_t>> under_way_;  // handovers: their queries
    std::vector<int64_t> joined_;
    xgpt_waa::Decided step_;
    xgpt_times::Sizes sizes_;

    void at(double at_s, Priority priority, What what, int64_t which) {
        events_.push({at_s, priority, ++sequence_, what, which});
    }
    bool is_free_until(double at_s) const { return events_.empty() || events_.top().at_s > at_s; }

    void act(const Event &event, double now) {
        switch (event.what) {
            case COME: return come(now);
            case ARRIVE: return arrive(under_way_[event.which], now);
            case END_EARLY: return end_early(event.which, now);
            case ENCODE_ON: encode(event.which, now); [[fallthrough]];
            case ENCODE_TURNS: return take_turns(encoding, now);
            case DECODE_ON: decode(event.which, now); [[fallthrough]];
            case DECODE_TURNS: return take_turns(decoding, now);
        }
    }

    /* Arrivals */
    void announce() {
        if (coming_ < given_.queries)
            at(given_.arrival_s[given_.order[coming_]], ARRIVAL, COME, 0);
    }
    void come(double now) {
        while (coming_ < given_.queries && given_.arrival_s[given_.order[coming_]] <= now)
            encode_.submit(given_.order[coming_++]);
        give(now);
        wake(encoding, now);
        announce();
    }

    /* PoolProcess */
    void wake(Pool &pool, double now) {
        if (!pool.is_idle) return;
        pool.is_idle = false;
        at(now, TURN, &pool == &encoding ? ENCODE_TURNS : DECODE_TURNS, 0);
    }
    void take_turns(Pool &pool, double now) {
        const bool encodes = &pool == &encoding;
        pool.is_idle = false;
        for (int64_t g; (g = encodes ? encode_.next_group() : decode_.next_group()) >= 0;) {
            const Group &group = pool.groups[g];
            double at_s = now > pool.free_s[0] ? now : pool.free_s[0];
            if (group.awaited >= 0 && group.ready_s > at_s) at_s = group.ready_s;
            if (!is_free_until(at_s)) return at(at_s, TURN, encodes ? ENCODE_ON : DECODE_ON, g);
            now = at_s;
            encodes ? encode(g, now) : decode(g, now);
        }
        pool.is_idle = true;
    }
    void note_memory(Pool &pool, double now) {
        const int64_t held = &pool == &encoding ? encode_.held() : decode_.held();
        if (held == pool.noted) return;
        pool.noted = held;
        pool.told.memory_s.push_back(now);
        pool.told.memory_tokens.push_back(held);
    }
    void begin_turn(Pool &pool, double now) {
        if (now > pool.free_s[0]) pool.free_s[0] = now;
        sizes_ = {};
    }
    void begin(int64_t query, double now) {
        if (std::isnan(queries[query].start_s)) queries[query].start_s = now;
    }
    /* StageLine.work, and the step's records. */
    void work(Pool &pool, Group &group, const int64_t (&label)[7], double now) {
        Told &told = pool.told;
        pool.clock.seconds(sizes_, pool.seconds.data());
        group.awaited = static_cast<int64_t>(told.labels.size() / 7);
        group.ready_s = now;
        for (int64_t s = 0; s < pool.clock.stages; ++s) {
            const double free_s = pool.free_s[s], from_s = group.ready_s;
            group.ready_s = pool.free_s[s] = (from_s > free_s ? from_s : free_s) + pool.seconds[s];
        }
        told.labels.insert(told.labels.end(), label, label + 7);
        for (double size : {static_cast<double>(sizes_.tokens), static_cast<double>(sizes_.encoded),
                            static_cast<double>(sizes_.decoded), sizes_.context})
            told.sizes.push_back(size);
        told.durations_s.insert(told.durations_s.end(), pool.seconds.begin(), pool.seconds.end());
        told.ends_s.insert(told.ends_s.end(), pool.free_s.begin(), pool.free_s.end());
    }

    /* PoolHead.turn of the pool that encodes. */
    void encode(int64_t g, double now) {
        Group &group = encoding.groups[g];
        begin_turn(encoding, now);
        group.awaited = -1;
        const int64_t number = encode_.decide(joined_);
        if (number >= 0) {
            for (int64_t query : joined_) {
                begin(query, now);
                sizes_.spans.emplace_back(0, given_.inputs[query]);
                sizes_.tokens += given_.inputs[query];
            }
            const int64_t count = sizes_.encoded = static_cast<int64_t>(joined_.size());
            work(encoding, group, {ENCODE, g, number, 0, 0, 0, count}, now);
            encoding.told.ended.insert(encoding.told.ended.end(), joined_.begin(), joined_.end());
            group.ready_s = send(number, group.ready_s);
        }
        note_memory(encoding, now);
    }

    /* The same of the one that decodes. */
    void decode(int64_t g, double now) {
        Group &group = decoding.groups[g];
        begin_turn(decoding, now);
        if (group.awaited >= 0) collect(group, now);
        if (decode_.decide(step_)) execute(group, g, now);
        note_memory(decoding, now);
    }
    void collect(Group &group, double now) {
        for (int64_t query : group.first)
            if (std::isnan(queries[query].first_s)) queries[query].first_s = now;
        for (int64_t query : group.done) {
            decode_.finish(query);
            group.leave(queries[query]);
            queries[query].last_s = now;
        }
        for (int64_t query : group.done) tell(query, now);
        group.first.clear();
        group.done.clear();
        group.awaited = -1;
    }
    void execute(Group &group, int64_t g, double now) {
        for (int64_t query : step_.handed) sizes_.handed += given_.inputs[query];
        join(group, g, step_.handed);
        if (step_.decodes) {
            double decoded[3];
            group.decode(g, queries, decoded);
            sizes_.decoded = group.rows;
            sizes_.context = decoded[1];
            sizes_.longest = decoded[2];
            sizes_.moved = given_.compacts ? group.moved() : (group.removed = 0);
            if (!given_.gives_token) std::swap(group.first, group.fresh);
        }
        if (!step_.chunks.empty()) encode_beside(group, g, now);
        const int64_t chunks = static_cast<int64_t>(step_.chunks.size()),
                      handed = static_cast<int64_t>(step_.handed.size());
        const Kind kind = !chunks ? DECODE : step_.decodes ? MIXED : ENCODE;
        work(decoding, group, {kind, g, step_.phase, 1, chunks, handed, sizes_.encoded}, now);
        Told &told = decoding.told;
        for (const xgpt_waa::Chunk &chunk : step_.chunks)
            for (int64_t value : {chunk.query, chunk.first, chunk.tokens}) told.chunks.push_back(value);
        told.ended.insert(told.ended.end(), step_.joined.begin(), step_.joined.end());
        told.handed.insert(told.handed.end(), step_.handed.begin(), step_.handed.end());
    }
    void encode_beside(Group &group, int64_t g, double now) {
        for (const xgpt_waa::Chunk &chunk : step_.chunks) {
            sizes_.spans.emplace_back(chunk.first, chunk.tokens);
            sizes_.tokens += chunk.tokens;
            if (chunk.first) continue;
            begin(chunk.query, now);
            encode_.begun(chunk.query);
        }
        give(now);
        sizes_.encoded = static_cast<int64_t>(step_.joined.size());
        join(group, g, step_.joined);
        if (given_.gives_token) group.first = step_.joined;
    }
    void join(Group &group, int64_t g, const std::vector<int64_t> &joined) {
        for (int64_t query : joined) {
            group.enter(g, query, queries[query], given_.inputs[query], given_.left[query]);
            if (!given_.gives_token) group.fresh.push_back(query);
        }
    }

    /* Handover */
    double send(int64_t step, double encoded_s) {
        std::vector<int64_t> leaving;
        int64_t tokens = 0;
        for (int64_t query : joined_) {
            if (given_.gives_token) queries[query].first_s = encoded_s;
            if (given_.left[query] > 0) {
                leaving.push_back(query);
                tokens += given_.inputs[query];
            } else {
                at(encoded_s, ARRIVAL, END_EARLY, query);
            }
        }
        if (leaving.empty()) return encoded_s;
        const double begin_s = std::max(encoded_s, link_free_s_);
        link_free_s_ = begin_s + *handover_s_.row(tokens);
        for (double value : {static_cast<double>(step), begin_s, link_free_s_}) sent.push_back(value);
        at(link_free_s_, ARRIVAL, ARRIVE, static_cast<int64_t>(under_way_.size()));
        under_way_.push_back(std::move(leaving));
        return link_free_s_;
    }
    void give(double now) {
        int64_t count = 0;
        for (int64_t query; (query = encode_.give()) >= 0; ++count) decode_.take(query);
        if (!count) return;
        note_memory(decoding, now);
        wake(decoding, now);
    }
    void arrive(const std::vector<int64_t> &arrived, double now) {
        for (int64_t query : arrived) {
            encode_.finish(query);
            decode_.submit(query);
        }
        note_memory(encoding, now);
        note_memory(decoding, now);
        wake(decoding, now);
        wake(encoding, now);
    }
    void end_early(int64_t query, double now) {
        encode_.finish(query);
        note_memory(encoding, now);
        queries[query].last_s = now;
        tell(query, now);
    }
    void tell(int64_t query, double now) {
        encode_.release(query);
        give(now);
        wake(encoding, now);
    }
};

}  // namespace xgpt_handing
