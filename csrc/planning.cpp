/* What the planner takes step by step: the walks of xsimulator/policies/continuous/paged_walk.py, which
 * says what they are of, and others. The same sums in the same order, so that either finds the same
 * to the bit. Needs nothing of the other files here, so that planning can have it without them
 * (xsimulator/native.py). */
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "size_tables.h"

#include "uncontracted.h"

namespace {

constexpr int DEPTH = 32, AT_ONCE = 128;
constexpr double NO_LIMIT = 1e12;

/* Sizes drawn one after the other, over and over, and the sums of those before each. */
struct Stream {
    const double *values, *sums;  // [size], [size + 1]
    int64_t size;

    double at(int64_t index) const { return values[index % size]; }
    double until(int64_t index) const {
        return static_cast<double>(index / size) * sums[size] + sums[index % size];
    }
    /* How many sizes from `first` on, `most` of them at most, bring the sum of those before `first`
     * to no more than `amount`, or a shade more. A step takes few. */
    int64_t within(int64_t first, double amount, int64_t most) const {
        int64_t round = first / size, place = first % size, count = 0;
        double begin = static_cast<double>(round) * sums[size], bound = amount + 1e-6;
        for (; count < most; ++count) {
            if (++place == size) {
                place = 0;
                begin = static_cast<double>(++round) * sums[size];
            }
            if (!(begin + sums[place] <= bound)) break;
        }
        return count;
    }
};

/* The latest sizes; the oldest of a full stack are forgotten. */
struct Stack {
    double sizes[DEPTH] = {};
    int64_t count = 0, end = 0;

    double &place(int64_t index) { return sizes[index & (DEPTH - 1)]; }
    double top() { return place(end - 1); }
    void push(double value) {
        place(end++) = value;
        count = std::min<int64_t>(count + 1, DEPTH);
    }
    void pop() {
        --end;
        count = std::max<int64_t>(count - 1, 0);
    }
    void push_many(int64_t number, int64_t first, const Stream &values, double age) {
        int64_t kept = std::min<int64_t>(number, DEPTH);
        for (int64_t i = 0; i < kept; ++i)
            place(end + i) = values.at(first + number - kept + i) - age;
        end += kept;
        count = std::min<int64_t>(count + kept, DEPTH);
    }
};

/* One group. Names as in paged_walk. */
struct Walked {
    double running, free, part, whole;
    Stack latest;
};

/* One configuration: of its groups the one whose turn it is. */
struct Walker {
    const Stream &inputs, &blocks, &lasts, &gaps;
    bool is_chunked;
    double iterations, held, half_block, slots, room, budget, watermark;
    Stack waiting;
    int64_t drawn = 0, ended = 0;
    double hazard = 0, anew = 0, pieces = 0, done = 0, evictions = 0;
    double tokens = 0, joined = 0, left = 0, blocks_drawn = 0, inputs_drawn = 0, lasts_ended = 0;
    bool may_admit = true;

    void evict(double number, Walked &group) {
        for (int i = 0; i < AT_ONCE && group.free < group.running && group.running > 1; ++i) {
            may_admit = !is_chunked;
            if (group.part > 0) {
                group.free += group.whole + half_block;
                waiting.push(group.whole);
                group.part = 0;
            } else {
                double size = group.latest.count > 0 ? group.latest.top() + number : held;
                group.free += size;
                group.running -= 1;
                evictions += 1;
                group.latest.pop();
                waiting.push(size - half_block + 1);
            }
        }
    }
    void encode(double number, Walked &group) {
        double take = std::min(group.part, left);
        if (!(take > 0)) return;
        tokens += take;
        left -= take;
        group.part -= take;
        pieces += 1;
        if (group.part <= 0) {
            done += 1;
            group.running += 1;
            joined += 1;
            group.latest.push(group.whole + half_block - (number + 1));
        }
    }
    bool come_back(double number, Walked &group) {
        double size = waiting.top();
        bool fits = group.free - size - half_block >= watermark || group.running == 0;
        if (!(group.part <= 0 && left > 0 && fits && group.running < slots)) return false;
        waiting.pop();
        anew += size;
        group.free -= size + half_block;
        group.part = group.whole = size;
        hazard += 1 / iterations;
        encode(number, group);
        return waiting.count > 0;
    }
    void begin(double number, Walked &group) {
        bool can = may_admit && waiting.count == 0 && group.part <= 0 && left > 0;
        int64_t most = can ? static_cast<int64_t>(std::max(slots - group.running, 0.0)) : 0;
        if (most > 0)
            most = std::max<int64_t>(
                blocks.within(drawn, blocks_drawn + std::max(group.free - watermark, 0.0), most),
                group.running == 0);
        double before = inputs_drawn, held_before = blocks_drawn;
        int64_t ready = most;
        if (is_chunked && most > 0) ready = inputs.within(drawn, before + left, most);
        int64_t after = drawn + std::min(ready + 1, most), begun = after - drawn;
        inputs_drawn = inputs.until(after);
        blocks_drawn = blocks.until(after);
        double all = inputs_drawn - before;
        tokens += std::min(all, left);
        if (begun > ready) {
            group.part = all - left;
            group.whole = inputs.at(drawn + ready);
        }
        group.free -= blocks_drawn - held_before;
        pieces += static_cast<double>(begun);
        done += static_cast<double>(ready);
        joined += static_cast<double>(ready);
        group.running += static_cast<double>(ready);
        group.latest.push_many(ready, drawn, blocks, number + 1);
        drawn = after;
    }
    void admit(double number, Walked &group) {
        encode(number, group);
        if (waiting.count > 0 && may_admit)
            for (int i = 0; i < AT_ONCE && come_back(number, group); ++i) {
            }
        begin(number, group);
    }
    void end(Walked &group) {
        int64_t number = gaps.within(ended, hazard, static_cast<int64_t>(group.running));
        int64_t after = ended + number;
        double used = (room - group.free) / std::max(group.running, 1.0) / held;
        double gone = lasts.until(after);
        group.free += (gone - lasts_ended) * std::min(std::max(used, 0.5), 2.0);
        lasts_ended = gone;
        group.running -= static_cast<double>(number);
        hazard = std::min(hazard, gaps.until(after + 1));
        ended = after;
    }
    void step(double number, Walked &group) {
        may_admit = true;
        evict(number, group);
        group.free -= group.running;
        tokens = joined = 0;
        hazard += group.running / iterations;
        left = is_chunked ? std::max(budget - group.running, 0.0) : NO_LIMIT;
    }
    void finish(double number, Walked &group) {
        if (is_chunked) admit(number, group);
        end(group);
        if (!is_chunked) admit(number, group);
        group.free = std::min(group.free, room);
        group.latest.count = std::min(group.latest.count, static_cast<int64_t>(group.running));
    }
};

}  // namespace

/* streams: [4, 2] the addresses of values [size] and sums [size + 1] of inputs, blocks, lasts and
 * gaps. facts: iterations, held, half_block. configs: [6, n] slots, room, budget, watermark,
 * running and free at the beginning, of each of `groups` groups, which take turns. means: [8, n]
 * zeros, to which are added, over the steps after `warm_up`, queries that decode and that wait; and
 * in the end tokens encoded anew, sum of inputs drawn, evictions, pieces, queries done, queries
 * drawn. tokens, joined: [n, (steps - warm_up) groups]. */
extern "C" void xgpt_walks(const double *const *streams, const int64_t *stream_sizes,
                           const double *facts, int is_chunked, const double *configs, int64_t n,
                           int64_t groups, int64_t steps, int64_t warm_up, double *means,
                           double *tokens, double *joined) {
    Stream of[4];
    for (int i = 0; i < 4; ++i) of[i] = {streams[2 * i], streams[2 * i + 1], stream_sizes[i]};
    for (int64_t i = 0; i < n; ++i) {
        Walker walker{of[0], of[1], of[2], of[3], is_chunked != 0, facts[0], facts[1], facts[2],
                      configs[i], configs[n + i], configs[2 * n + i], configs[3 * n + i], {}};
        std::vector<Walked> all(groups, Walked{configs[4 * n + i], configs[5 * n + i], 0, 0, {}});
        double *tokens_of = tokens + i * (steps - warm_up) * groups;
        double *joined_of = joined + i * (steps - warm_up) * groups;
        for (int64_t turn = 0; turn < steps * groups; ++turn) {
            Walked &group = all[turn % groups];
            double number = static_cast<double>(turn / groups);
            walker.step(number, group);
            double decoding = group.running, waits = static_cast<double>(walker.waiting.count);
            walker.finish(number, group);
            if (turn < warm_up * groups) continue;
            means[i] += decoding;
            means[n + i] += waits;
            *tokens_of++ = walker.tokens;
            *joined_of++ = walker.joined;
        }
        int64_t drawn = std::max<int64_t>(walker.drawn, 1);
        double last[6] = {walker.anew, of[0].until(drawn), walker.evictions, walker.pieces,
                          walker.done, static_cast<double>(drawn)};
        for (int k = 0; k < 6; ++k) means[(2 + k) * n + i] = last[k];
    }
}

/* The stages of a replay's only pool, which work its steps in order (xsimulator/replay/stage_line.py:
 * _in_line): a turn begins when the head is free and the tokens of the turn it waits for are there.
 *
 * waits[turns]: that turn, or -1; turn_of[steps], rising: the turn of each step; seconds[steps]
 * [stages]; free[stages]: when each is free at first. Into turns_s[turns] when each began, and into
 * ends[steps][stages]; ready[turns] is room. */
extern "C" void xgpt_in_line(const int64_t *waits, const int64_t *turn_of, const double *seconds,
                             int64_t turns, int64_t steps, int64_t stages, double *free,
                             double *ready, double *turns_s, double *ends) {
    int64_t step = 0;
    for (int64_t turn = 0; turn < turns; ++turn) {
        double at = free[0];
        if (waits[turn] >= 0 && ready[waits[turn]] > at) at = ready[waits[turn]];
        turns_s[turn] = at;
        if (step == steps || turn_of[step] != turn) {
            free[0] = at;
            continue;
        }
        const double *own = seconds + step * stages;
        double *row = ends + step * stages;
        for (int64_t s = 0; s < stages; ++s) {
            at = (at > free[s] ? at : free[s]) + own[s];
            free[s] = row[s] = at;
        }
        ready[turn] = at;
        ++step;
    }
}

namespace {

/* As numpy's maximum: what is no number stays. */
inline double larger(double one, double other) {
    return one >= other || one != one ? one : other;
}

}  // namespace

/* WAA's encode pools with uneven batches (xsimulator/policies/waa/unevenness.py: _between_s), row by
 * row: a pool with one kind of batch.
 *
 * shares[batches][count]: tokens of each batch over their mean; of a row its batch, the steps that
 * may be under way (`limits`, DEPTH at most `depth`), steps and rises [rows][most] of its stages and
 * of those that take no time, and handover. Into between[rows] the seconds from one step to the next
 * after the first `begin`; room[2 most + 2 + depth]. */
extern "C" void xgpt_between(const double *shares, const int64_t *batch, const int64_t *limits,
                             const double *steps, const double *rises, const double *handover,
                             int64_t rows, int64_t most, int64_t count, int64_t begin,
                             int64_t depth, double *room, double *between) {
    double *before = room, *seconds = before + most + 1, *ends = seconds + most + 1;
    for (int64_t row = 0; row < rows; ++row) {
        const double *share = shares + batch[row] * count, *rise = rises + row * most;
        const double *step_s = steps + row * most;
        std::fill(before, before + most + 1, 0.0);
        std::fill(ends, ends + depth, 0.0);
        double began = 0.0;
        for (int64_t step = 0; step < count; ++step) {
            for (int64_t s = 0; s < most; ++s)
                seconds[s] = larger(step_s[s] + (share[step] - 1) * rise[s], 0.0);
            seconds[most] = share[step] * handover[row];
            double &end = ends[step % limits[row]];
            double so_far = 0.0, free = 0.0;
            for (int64_t s = 0; s <= most; ++s) {
                so_far = s ? so_far + seconds[s] : seconds[s];
                double own = before[s] - so_far + seconds[s];
                if (s == 0) free = larger(before[0], end);
                else free = larger(free, own);
                before[s] = so_far + free;
            }
            end = before[most];
            if (step == begin - 1) began = before[most];
        }
        between[row] = (before[most] - began) / static_cast<double>(count - begin);
    }
}
