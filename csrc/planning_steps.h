/* What steps of RRA take, and the sums of them that bound a box (xsimulator/policies/rra: phases.py,
 * least_steps.py, bounds.py, which say why), of one configuration at a time. */
#pragma once
#include <vector>

#include "planning_rra.h"

namespace xgpt_planning {

constexpr double MANY_STEPS = 8;  // phases.py

enum Of : int64_t { POINT, RATE, LINE_RATE, LATENCY, LINE_LATENCY, TTFT, TPOT };

/* What is asked of the timing source, by degree, and the rest of a call. */
struct Asked {
    const Loads &loads;
    const Blocks &table;
    const Facts &facts;
    const double *const *attention;   // by degree: [2][all blocks], a layer's seconds
    const double *const *compaction;  // by degree: [all blocks]; or none
    const double *const *rates;       // by degree: [configs] seconds a token of context, of ranges
    const double *encode_attention;   // [degrees][3][SHARES] a query's; least of fewer; of more
    int64_t of, is_range, all;

    bool is_latency() const { return of >= LATENCY; }
};

/* Seconds of one configuration's steps by kind of stage: a group's, and all groups' or, of a point,
 * all others'; and of a group that has the query for certain. */
struct Steps1 {
    std::vector<double> one, all, own;  // [blocks][kinds]
    std::vector<double> encode_one, encode_all;
    std::vector<double> more[2];  // of a point: own_steps_s [blocks], phases before and the last
    bool is_timed = true, is_sure = true;
};

inline void encode_steps(const Asked &asked, const Plan &plan, int64_t c, Steps1 &steps) {
    const Loads &loads = asked.loads;
    double groups = std::min(loads.groups[c], loads.batch[c]), queries = loads.encoded[c];
    Place most(loads.tokens[0][c]), usual(loads.tokens[1][c]), ends(queries);
    steps.encode_one.resize(plan.kinds), steps.encode_all.resize(plan.kinds);
    for (int64_t k = 0; k < plan.kinds; ++k) {
        const double *shares = asked.encode_attention + plan.slots[k] * 3 * SHARES;
        double each;
        if (asked.of == POINT) each = interpolated(queries, shares);
        else if (!asked.is_latency()) each = interpolated(queries, shares + SHARES);
        else {
            int at = 0;
            while (at < SHARES - 1 && TOGETHER[at] <= queries) ++at;
            each = shares[2 * SHARES + at];
        }
        double seconds[2];
        for (int i = 0; i < 2; ++i) {
            double rows = (i ? usual : most).of(plan.encode, k);
            double worth = loads.tokens[i][c] / asked.facts.mean_input;
            seconds[i] = rows + worth * each * plan.encode_layers[k];
            if (!plan.is_encoder_decoder && k == plan.kind_of[plan.stages - 1]) {
                double head = ends.of(plan.ends, 0);
                if (!std::isfinite(head)) steps.is_sure = false;
                seconds[i] += head;
            }
            if (!std::isfinite(rows)) steps.is_sure = false;
            if (!std::isfinite(seconds[i])) steps.is_timed = false;
        }
        if (asked.of == POINT) {
            steps.encode_one[k] = seconds[0] * std::min(groups, 1.0);
            steps.encode_all[k] = std::max(groups * seconds[1] - seconds[0], 0.0);
        } else {
            steps.encode_one[k] = seconds[0];
            steps.encode_all[k] = std::max(groups * seconds[1], seconds[0]);
        }
    }
}

/* Seconds of a layer's attention at `e`, of the slowest group's step and a usual one's. */
inline double attention_of(const Asked &asked, int64_t slot, int i, int64_t c, int64_t e) {
    if (!asked.is_range) return asked.attention[slot][i * asked.all + e];
    const Loads &loads = asked.loads;
    double queries = loads.queries[i][e], each;
    if (!asked.is_latency()) {
        each = queries * (loads.read[c] / std::max(asked.facts.mean_iterations, 1e-9));
    } else {
        double usual = loads.queries[1][e] > 0 ? loads.queries[1][e] : 1.0;
        double a_step = loads.batch[c] / loads.groups[c] * loads.read[c]
                        / std::max(asked.facts.seen_iterations, 1.0);
        each = queries / usual * (a_step / loads.chance[e]);
    }
    return each * asked.rates[slot][c];
}

/* Of a point: how much longer an iteration is in the eyes of the latency's query. */
inline void own_steps(const Asked &asked, const Plan &plan, int64_t c, int64_t b, const Block &block,
               double steps_there, double through, double slowest, Steps1 &steps) {
    const Loads &loads = asked.loads;
    double batch = loads.batch[c] / loads.groups[c];
    double place = std::min(std::max(std::log2(batch) - FIRST_OCTAVE, 0.0), OCTAVES - 1.0);
    int64_t lower = std::min<int64_t>(static_cast<int64_t>(place), OCTAVES - 2);
    double share = place - static_cast<double>(lower);
    double alone = std::exp(loads.batch[c] * block.nobody);
    double crowd = std::min(steps_there / static_cast<double>(plan.stages), 1.0);
    const double *of[2] = {block.own_before, block.own_last};
    for (int i = 0; i < 2; ++i) {
        double absent = std::exp(batch * between_octaves(of[i], lower, share));
        absent = std::max(absent - asked.facts.negligible, 0.0);
        double nobody = std::min(alone, absent);
        steps.more[i][b] = absent > 0 ? nobody * through + (absent - nobody) * crowd * slowest : 0.0;
    }
}

inline void decode_steps(const Asked &asked, const Plan &plan, int64_t c, Steps1 &steps) {
    const Loads &loads = asked.loads;
    const int64_t column = loads.column[c], count = asked.table.counts[column], kinds = plan.kinds;
    const Block *blocks = asked.table.blocks + asked.table.begins[column];
    for (auto *each : {&steps.one, &steps.all, &steps.own}) each->resize(count * kinds);
    for (auto &each : steps.more) each.assign(count, 0.0);
    for (int64_t b = 0; b < count; ++b) {
        int64_t e = loads.begin[c] + b;
        Place most(loads.queries[0][e]), usual(loads.queries[1][e]);
        double number = loads.steps[e], chance = std::min(number, 1.0), through = 0, slowest_own = 0;
        if (number < MANY_STEPS && number > 0)  // phases.py: that anyone is there
            chance = std::min(chance, -std::expm1(loads.batch[c] * blocks[b].nobody));
        for (int64_t k = 0; k < kinds; ++k) {
            int64_t slot = plan.slots[k];
            double layers = plan.decode_layers[k];
            double bare[2] = {most.of(plan.decode, k), usual.of(plan.decode, k)};
            if (!std::isfinite(bare[0]) || !std::isfinite(bare[1])) steps.is_sure = false;
            double more[2] = {attention_of(asked, slot, 0, c, e) * layers,
                              attention_of(asked, slot, 1, c, e) * layers};
            double slow = bare[0] + more[0], mean = bare[1] + more[1], own = 0;
            if (asked.is_latency()) {  // least_steps.py: _own
                if (asked.is_range)
                    own = std::max(bare[0] * chance, bare[1] * (1 - asked.facts.own_tolerance))
                          + (slow - bare[0]) * chance;
                else
                    own = std::max(slow * chance, mean * (1 - asked.facts.own_tolerance));
            }
            if (!asked.is_range && asked.compaction[slot]) {
                double moved = loads.share[e] * (asked.compaction[slot][e] * layers);
                slow += moved, mean += moved;
            }
            if (!std::isfinite(slow + mean)) steps.is_timed = false;
            double &one = steps.one[b * kinds + k], &all = steps.all[b * kinds + k];
            one = slow * chance;
            all = asked.of == POINT ? std::max(number * mean - one, 0.0)
                                    : std::max(number * mean, one);
            steps.own[b * kinds + k] = asked.is_latency() ? own : one;
            through += mean * static_cast<double>(plan.counts[k]);
            slowest_own = std::max(slowest_own, mean);
        }
        if (asked.of == POINT)
            own_steps(asked, plan, c, b, blocks[b], number, through, slowest_own, steps);
    }
}

/* Sums that bound one configuration's phases (bounds.py). */
struct Sums {
    const Asked &asked;
    const Plan &plan;
    const Steps1 &steps;
    const Block *blocks;
    int64_t count, seen, kinds;
    double before;  // phases, before the latency's query is in its last

    double of_kinds(const std::vector<double> &values) const {
        double sum = 0;
        for (int64_t k = 0; k < kinds; ++k) sum += values[k] * static_cast<double>(plan.counts[k]);
        return sum;
    }
    double of_blocks(const std::vector<double> &values, int64_t kind, int64_t until) const {
        double sum = 0;
        for (int64_t b = 0; b < until; ++b) sum += blocks[b].widths * values[b * kinds + kind];
        return sum;
    }
    double through_blocks(const std::vector<double> &values, int64_t until) const {
        double sum = 0;
        for (int64_t k = 0; k < kinds; ++k)
            sum += static_cast<double>(plan.counts[k]) * of_blocks(values, k, until);
        return sum;
    }
    double first() const {
        double sum = 0;
        for (int64_t k = 0; k < kinds; ++k) sum += steps.one[k] * static_cast<double>(plan.counts[k]);
        return sum;
    }
    double encode_all() const {
        double most = 0;
        for (int64_t k = 0; k < kinds; ++k)
            most = std::max(most, steps.encode_all[k] - steps.encode_one[k]);
        return of_kinds(steps.encode_one) + most;
    }
    double behind() const { return encode_all() + steps.one[plan.kind_of[plan.stages - 1]]; }
    double period() const {
        double decode = through_blocks(steps.one, count), period = 0;
        for (int64_t k = 0; k < kinds; ++k)
            period = std::max(period, steps.encode_all[k] + of_blocks(steps.all, k, count));
        period = std::max(period, decode + of_kinds(steps.encode_one));
        return std::max(period, behind() + decode - first());
    }
    double phase() const {
        return std::max(period(), through_blocks(steps.own, count) + of_kinds(steps.encode_one));
    }
    double decoding() const {
        if (asked.facts.seen_iterations == 0) return 0;
        double own = 0;  // kind by kind, so that of one iteration nothing is left
        for (int64_t k = 0; k < kinds; ++k)
            own += static_cast<double>(plan.counts[k])
                   * (of_blocks(steps.own, k, seen + 1) - steps.own[k]);
        return own + before * phase();
    }
    double latency() const {
        double through = of_kinds(steps.encode_one);
        if (asked.facts.seen_iterations == 0) return through;
        double own = through_blocks(steps.own, seen + 1);
        double longest = own + 0.5 * (through + std::max(through, behind() - first()));
        const double *last_one = steps.one.data() + seen * kinds;
        double so_far = 0, after = 0;
        for (int64_t k = 0; k < kinds; ++k) after += last_one[k] * static_cast<double>(plan.counts[k]);
        for (int64_t s = 0; s < plan.stages; ++s) {
            int64_t k = plan.kind_of[s];
            after -= last_one[k];
            const int64_t *end = plan.kind_of + plan.stages;
            bool is_first = std::find(plan.kind_of, plan.kind_of + s, k) == plan.kind_of + s;
            if (is_first || std::find(plan.kind_of + s + 1, end, k) == end) {
                double all = of_blocks(steps.all, k, seen + 1), path;
                double last_all = steps.all[seen * kinds + k];
                if (asked.is_range) path = steps.encode_one[k] + all - last_all;
                else
                    path = so_far + 0.5 * (steps.encode_all[k] + steps.encode_one[k]) + all
                           - 0.5 * (last_all - last_one[k]) + after;
                longest = std::max(longest, path);
            }
            so_far += steps.encode_one[k];
        }
        return longest + before * phase();
    }
};

}  // namespace xgpt_planning
