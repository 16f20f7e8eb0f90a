/* The steady-state timeline of RRA's phases, as xsimulator/pipeline.py has it and says what it is of:
 * the same maxima of the same sums, for LANES configurations of one pipeline at a time. */
#pragma once
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "uncontracted.h"

namespace xgpt_planning {

constexpr int LANES = 8;
constexpr int WARM_UP_PHASES = 2;

/* Seconds of steps [kinds][LANES]: of one group's, and of all others' together. */
struct Steps {
    const double *one, *rest;
};

/* One phase of up to LANES configurations, in falling order of their `blocks`. */
struct Phase {
    int64_t stages, count;
    const int64_t *kind_of, *blocks;  // [stages], [count]
    Steps encode;
    std::vector<Steps> decode;         // by block
    std::vector<const double *> skip;  // by block, [LANES] its iterations less one
    std::vector<int64_t> active;       // by block: configurations that have it

    /* Seconds until the last group's next step may begin once the first group's may, [LANES]: all
     * others' steps of what comes next, after `block` blocks. */
    double before_last(int64_t block, int lane) const {
        const double *rest = block < blocks[lane] ? decode[static_cast<size_t>(block)].rest : encode.rest;
        return rest[kind_of[0] * LANES + lane];
    }
};

/* After a round: stages' ends [stages][LANES], the last of which is the return of the last group's
 * tokens, and the return of the first group's. */
struct State {
    std::vector<double> free;
    double first[LANES] = {};
    int64_t stages;

    explicit State(int64_t count) : free(static_cast<size_t>(count * LANES), 0.0), stages(count) {}
    double last(int lane) const { return free[static_cast<size_t>((stages - 1) * LANES + lane)]; }
    double next_start(int lane) const { return std::max(first[lane], free[static_cast<size_t>(lane)]); }

    template <bool IS_WHOLE>
    void advance_of(const Phase &phase, const Steps &step, const double *skip, int64_t active) {
        const int count = IS_WHOLE ? LANES : static_cast<int>(active);
        if (skip) {
            double around[LANES] = {};
            for (int64_t s = 0; s < stages; ++s)
                for (int l = 0; l < count; ++l) around[l] += step.one[phase.kind_of[s] * LANES + l];
            for (int64_t s = 0; s < stages; ++s) {
                double *end = free.data() + s * LANES;
                const double *one = step.one + phase.kind_of[s] * LANES;
                const double *rest = step.rest + phase.kind_of[s] * LANES;
                if (s == stages - 1)
                    for (int l = 0; l < count; ++l)
                        end[l] += std::max(skip[l] * (one[l] + rest[l]), skip[l] * around[l]);
                else
                    for (int l = 0; l < count; ++l) end[l] += skip[l] * (one[l] + rest[l]);
            }
            for (int l = 0; l < count; ++l) first[l] += skip[l] * around[l];
        }
        double end[LANES], begin[LANES];  // of the last group's step on the stage before; the first's
        for (int l = 0; l < count; ++l) end[l] = last(l), begin[l] = first[l];
        for (int64_t s = 0; s < stages; ++s) {
            double *ready = free.data() + s * LANES;
            const double *one = step.one + phase.kind_of[s] * LANES;
            const double *rest = step.rest + phase.kind_of[s] * LANES;
            for (int l = 0; l < count; ++l) {
                begin[l] = std::max(begin[l], ready[l]) + one[l];
                end[l] = std::max(end[l] + one[l], begin[l] + rest[l]);
                ready[l] = end[l];
            }
        }
        for (int l = 0; l < count; ++l) first[l] = begin[l];
    }
    void advance(const Phase &phase, const Steps &step, const double *skip, int64_t active) {
        if (active == LANES) advance_of<true>(phase, step, skip, active);
        else advance_of<false>(phase, step, skip, active);
    }
    void decode(const Phase &phase, size_t block) {
        advance(phase, phase.decode[block], phase.skip[block], phase.active[block]);
    }
};

/* [LANES] period_s and encoded_s; finish_s [blocks][LANES], constant beyond a lane's own blocks. */
struct Line {
    double period[LANES], encoded[LANES];
    std::vector<double> finish;
};

inline void keep(Line &line, const Phase &phase, size_t block, int lane, double value) {
    bool is_own = static_cast<int64_t>(block) < phase.blocks[lane] || block == 0;
    line.finish[block * LANES + lane] = is_own ? value : line.finish[(block - 1) * LANES + lane];
}

/* The mean over `watched` phases once they repeat; what is seen is seen in the last. */
inline void steady(const Phase &phase, int watched, Line &line) {
    State state(phase.stages);
    const int count = static_cast<int>(phase.count);
    line.finish.assign(phase.decode.size() * LANES, 0.0);
    double begun[LANES] = {};
    for (int number = 0; number < WARM_UP_PHASES + watched; ++number) {
        double first_start[LANES], last_start[LANES];
        const bool is_seen = number == WARM_UP_PHASES + watched - 1;
        for (int l = 0; l < count; ++l) {
            first_start[l] = state.next_start(l);
            if (number == WARM_UP_PHASES) begun[l] = first_start[l];
            last_start[l] = std::max(
                state.last(l), first_start[l] + phase.encode.rest[phase.kind_of[0] * LANES + l]);
        }
        auto seen = [&](int64_t block, int l) {
            double again = state.next_start(l);
            double then = std::max(state.last(l), again + phase.before_last(block, l));
            return 0.5 * (again - first_start[l] + (then - last_start[l]));
        };
        state.advance(phase, phase.encode, nullptr, phase.count);
        if (is_seen)
            for (int l = 0; l < count; ++l) line.encoded[l] = seen(0, l);
        for (size_t block = 0; block < phase.decode.size(); ++block) {
            state.decode(phase, block);
            if (is_seen)
                for (int l = 0; l < count; ++l)
                    keep(line, phase, block, l, seen(static_cast<int64_t>(block) + 1, l));
        }
    }
    for (int l = 0; l < count; ++l) line.period[l] = (state.next_start(l) - begun[l]) / watched;
}

/* Into encoded and finish: from stages at rest, in the mean of the first group and of the last one,
 * whose encode step is the first that is done. */
inline void from_rest(const Phase &phase, Line &line) {
    State first(phase.stages), last(phase.stages);
    const int count = static_cast<int>(phase.count);
    line.finish.assign(phase.decode.size() * LANES, 0.0);
    auto seen = [&](int64_t block, int l) {
        return 0.5 * (first.next_start(l) + std::max(
            last.last(l), last.next_start(l) + phase.before_last(block, l)));
    };
    first.advance(phase, phase.encode, nullptr, phase.count);
    for (int l = 0; l < count; ++l) {
        double end = 0;
        for (int64_t s = 0; s < phase.stages; ++s)
            last.free[static_cast<size_t>(s * LANES + l)] = end += phase.encode.one[
                phase.kind_of[s] * LANES + l];
        line.encoded[l] = seen(0, l);
    }
    for (size_t block = 0; block < phase.decode.size(); ++block) {
        first.decode(phase, block);
        last.decode(phase, block);
        for (int l = 0; l < count; ++l)
            keep(line, phase, block, l, seen(static_cast<int64_t>(block) + 1, l));
    }
}

}  // namespace xgpt_planning
