/* A replica of two pools, of which one encodes by WAA's rule and hands over to the other. As
 * xsimulator/replay/handover.py, pool.py and pipeline.py: the same events in the same order, and
 * the same sums. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool_replay.h"

#include "step_times.h"
#include "waa_rules.h"

namespace xgpt_handing {

using Group = xgpt_replay::Rows;

struct Pool {
    Pool(xgpt_times::Clock &clock, const double *factors, bool is_told, int64_t num_groups)
        : line(clock, factors, is_told), groups(num_groups) {
        for (Group &group : groups) group.is_padded = clock.is_padded();
    }
    xgpt_replay::Line line;
    std::vector<Group> groups;
    bool is_idle = true;
};

/* Factors of the seconds of all stages; inputs[requests] tokens. */
struct Given {
    int64_t gives_token, compacts, is_told;
    const double *factors;
    const int64_t *inputs;
};

class Replay : public xgpt_replay::Replica {
public:
    Replay(const Given &given, xgpt_replay::Job &job, const xgpt_waa::EncodeFacts &encode,
           const xgpt_reserving::Sizer &sizer, const xgpt_waa::DecodeFacts &decode,
           const xgpt_waa::Asked &asked, xgpt_times::Clock &encode_clock,
           xgpt_times::Clock &decode_clock, const xgpt_times::Blocks &handover_s)
        : Replica(job), encoding(encode_clock, given.factors, given.is_told, encode.groups),
          decoding(decode_clock, given.factors + encode_clock.stages, given.is_told,
                   decode.groups), given_(given), encode_(encode, sizer, asked),
          decode_(decode, asked), handover_s_(handover_s) {}

    void submit(int64_t q) override { encode_.submit(q); }
    void wake(double now) override {
        give(now);
        wake(encoding, now);
    }
    void act(int64_t what, int64_t which, double now) override {
        switch (what) {
            case ARRIVE: return arrive(under_way_[which], now);
            case END_EARLY: return end_early(which, now);
            case ENCODE_ON: encode(which, now); [[fallthrough]];
            case ENCODE_TURNS: return take_turns(encoding, now);
            case DECODE_ON: decode(which, now); [[fallthrough]];
            case DECODE_TURNS: return take_turns(decoding, now);
        }
    }
    std::vector<xgpt_replay::Line *> lines() override { return {&encoding.line, &decoding.line}; }
    std::vector<double> handovers() override { return std::move(sent); }

private:
    enum What : int64_t { ARRIVE, END_EARLY, ENCODE_TURNS, ENCODE_ON, DECODE_TURNS, DECODE_ON };
    Pool encoding, decoding;
    std::vector<double> sent;  // [3]: step, begin, end
    Given given_;
    xgpt_waa::EncodeRule encode_;
    xgpt_waa::DecodeRule decode_;
    xgpt_times::Blocks handover_s_;
    double link_free_s_ = -std::numeric_limits<double>::infinity();
    std::vector<std::vector<int64_t>> under_way_;  // handovers: their requests
    std::vector<int64_t> joined_, early_;
    xgpt_waa::Decided step_;

    void at(double at_s, xgpt_replay::Priority priority, What what, int64_t which) {
        kernel().at(at_s, priority, *this, what, which);
    }

    /* PoolProcess */
    void wake(Pool &pool, double now) {
        if (!pool.is_idle) return;
        pool.is_idle = false;
        at(now, xgpt_replay::TURN, &pool == &encoding ? ENCODE_TURNS : DECODE_TURNS, 0);
    }
    void take_turns(Pool &pool, double now) {
        const bool encodes = &pool == &encoding;
        pool.is_idle = false;
        for (int64_t g; (g = encodes ? encode_.next_group() : decode_.next_group()) >= 0;) {
            const Group &group = pool.groups[g];
            double at_s = now > pool.line.free_s[0] ? now : pool.line.free_s[0];
            if (group.is_awaited && group.ready_s > at_s) at_s = group.ready_s;
            if (!kernel().is_free_until(at_s))
                return at(at_s, xgpt_replay::TURN, encodes ? ENCODE_ON : DECODE_ON, g);
            now = at_s;
            encodes ? encode(g, now) : decode(g, now);
        }
        pool.is_idle = true;
    }
    void note_memory(Pool &pool, double now) {
        pool.line.note_memory(&pool == &encoding ? encode_.held() : decode_.held(), now);
    }
    /* PoolHead.turn of the encode pool */
    void encode(int64_t g, double now) {
        Group &group = encoding.groups[g];
        xgpt_replay::Line &line = encoding.line;
        line.begin_turn(now);
        group.is_awaited = false;
        const int64_t number = encode_.decide(joined_);
        if (number >= 0) {
            for (int64_t query : joined_) {
                begin(query, now);
                line.chunk(query, 0, given_.inputs[query]);
            }
            const int64_t count = line.sizes.encoded = static_cast<int64_t>(joined_.size());
            group.ready_s = line.work({xgpt_replay::ENCODE, g, number, 0, count, 0, count}, joined_, now);
            group.ready_s = send(number, group.ready_s);
            group.is_awaited = true;
        }
        note_memory(encoding, now);
    }

    /* PoolHead.turn of the decode pool */
    void decode(int64_t g, double now) {
        Group &group = decoding.groups[g];
        decoding.line.begin_turn(now);
        if (group.is_awaited) collect(group, now);
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
        end(group.done, now);
        group.is_awaited = false;
    }
    void execute(Group &group, int64_t g, double now) {
        xgpt_replay::Line &line = decoding.line;
        report(now);
        for (int64_t query : step_.handed) line.sizes.handed += given_.inputs[query];
        join(group, g, step_.handed);
        if (step_.decodes) {
            group.decode(g, queries, line.sizes);
            const double moved = group.moved();
            if (given_.compacts) line.sizes.moved = moved;
            if (!given_.gives_token) std::swap(group.first, group.fresh);
        }
        if (!step_.chunks.empty()) encode_beside(group, g, now);
        const int64_t chunks = static_cast<int64_t>(step_.chunks.size()),
                      handed = static_cast<int64_t>(step_.handed.size());
        const xgpt_replay::Kind kind = !chunks         ? xgpt_replay::DECODE
                                       : step_.decodes ? xgpt_replay::MIXED
                                                       : xgpt_replay::ENCODE;
        line.move(step_.handed);
        group.ready_s = line.work({kind, g, step_.phase, 1, chunks, handed, line.sizes.encoded},
                                  step_.joined, now);
        group.is_awaited = true;
    }
    void encode_beside(Group &group, int64_t g, double now) {
        for (const xgpt_waa::Chunk &chunk : step_.chunks) {
            decoding.line.chunk(chunk.query, chunk.first, chunk.tokens);
            if (chunk.first) continue;
            begin(chunk.query, now);
        }
        decoding.line.sizes.encoded = static_cast<int64_t>(step_.joined.size());
        join(group, g, step_.joined);
        if (given_.gives_token) group.first = step_.joined;
    }
    void join(Group &group, int64_t g, const std::vector<int64_t> &joined) {
        for (int64_t query : joined) {
            group.enter(g, query, queries[query], given_.inputs[query], queries[query].left);
            if (!given_.gives_token) group.fresh.push_back(query);
        }
    }

    /* Handover */
    double send(int64_t step, double encoded_s) {
        std::vector<int64_t> leaving;
        int64_t tokens = 0;
        for (int64_t query : joined_) {
            if (given_.gives_token) queries[query].first_s = encoded_s;
            if (queries[query].left > 0) {
                leaving.push_back(query);
                tokens += given_.inputs[query];
            } else {
                at(encoded_s, xgpt_replay::ARRIVAL, END_EARLY, query);
            }
        }
        if (leaving.empty()) return encoded_s;
        const double begin_s = std::max(encoded_s, link_free_s_);
        link_free_s_ = begin_s + *handover_s_.row(tokens);
        for (double value : {static_cast<double>(step), begin_s, link_free_s_}) sent.push_back(value);
        at(link_free_s_, xgpt_replay::ARRIVAL, ARRIVE,
           static_cast<int64_t>(under_way_.size()));
        under_way_.push_back(std::move(leaving));
        return link_free_s_;
    }
    /* _on_step */
    void report(double now) {
        const bool has_joined =
            decode_.tells_joined && !(step_.handed.empty() && step_.joined.empty());
        if (has_joined) {
            encode_.joined(step_.handed, step_.phase);
            encode_.joined(step_.joined, step_.phase);
            wake(encoding, now);
        }
        for (const xgpt_waa::Chunk &chunk : step_.chunks)
            if (!chunk.first) encode_.begun(chunk.query);
        if (has_joined || !step_.chunks.empty()) give(now);
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
        early_.assign(1, query);
        end(early_, now);
    }
    void tell(int64_t query, double now) {
        encode_.release(query);
        give(now);
        wake(encoding, now);
    }
};

}  // namespace xgpt_handing
