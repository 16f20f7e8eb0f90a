/* RRA's phases for the planner, one configuration at a time: how many queries each of a phase's
 * blocks has, and what its steps take (xsimulator/policies/rra: phases.py, least_steps.py and
 * phase_blocks.py say what is meant). All fields have eight bytes, so that arrays of integers can
 * stand for the structures. Exponentials are the C library's: figures differ from numpy's in their
 * last digits, by less than 1e-12 of them. */
#pragma once
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>

#include "uncontracted.h"

namespace xgpt_planning {

constexpr int OCTAVES = 15, FIRST_OCTAVE = -6, DOUBLINGS = 13, SHARES = 8;
constexpr double TOGETHER[SHARES] = {1, 2, 4, 8, 16, 32, 64, 128};

/* Of a block (xsimulator/policies/rra/phase_blocks.py); the longest contexts only where charged. */
struct Block {
    double widths, active, context, variance, nobody, moved;
    double absent[OCTAVES], own_before[OCTAVES], own_last[OCTAVES], longest[DOUBLINGS];
};

/* Phases by column: where their blocks begin, how many, that at whose end the latency's query ends,
 * and phases before. */
struct Blocks {
    const Block *blocks;
    const int64_t *begins, *counts, *seen, *before;
    int64_t is_padded;
};

/* xsimulator/step_table.py: SizeTable. */
struct Table {
    const double *nodes, *rises;  // [columns, count]
    int64_t count;
};

struct Plan {
    int64_t kinds, stages, is_encoder_decoder;
    const int64_t *kind_of, *counts;           // [stages], [kinds]
    const int64_t *slots;                      // [kinds] which degree
    const double *decode_layers, *encode_layers;  // [kinds]
    Table decode, encode, ends;
};

/* What all configurations of a call share. */
struct Facts {
    double mean_input, std_input, adjustment, least_adjusted;
    double mean_iterations, seen_iterations, largest_context;
    double negligible, own_tolerance;
    double tolerances[5];  // sparse, crowded, short, range, line
};

/* Arrays of a call: [configs], or by block of one after the other. */
struct Loads {
    const int64_t *column, *begin;
    const double *groups, *batch, *largest;  // `largest`: queries of a group in the largest batch
    double *queries[2], *context[2], *steps, *chance, *rows, *share;
    double *encoded, *tokens[2], *most, *read;  // [configs]
};

inline double ratio(double x, const double *above, const double *below) {
    double a = above[0], b = below[0];
    for (int i = 1; i < 8; ++i) a = a * x + above[i], b = b * x + below[i];
    return a / b;
}

/* Wichura's AS 241, as xgpt/core/normal.py has it: highest powers first. */
inline double normal_quantile(double p) {
    static const double MIDDLE[2][8] = {
        {2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4,
         4.5921953931549871457e4, 1.3731693765509461125e4, 1.9715909503065514427e3,
         1.3314166789178437745e2, 3.3871328727963666080e0},
        {5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4,
         2.1213794301586595867e4, 5.3941960214247511077e3, 6.8718700749205790830e2,
         4.2313330701600911252e1, 1.0}};
    static const double TAIL[2][8] = {
        {7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
         1.27045825245236838258e0, 3.64784832476320460504e0, 5.76949722146069140550e0,
         4.63033784615654529590e0, 1.42343711074968357734e0},
        {1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
         1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940e0,
         2.05319162663775882187e0, 1.0}};
    double q = p - 0.5, r = 0.180625 - q * q;
    if (r >= 0) return q * ratio(r, MIDDLE[0], MIDDLE[1]);
    // of a count up to 2^40 the tail is no further out than the second polynomial reaches
    double tail = std::sqrt(-std::log(std::min(p, 1 - p)));
    return std::copysign(ratio(tail - 1.6, TAIL[0], TAIL[1]), q);
}

/* xsimulator/occupancy.py: expected_maximum_z. */
inline double largest_normal(double count) {
    return count > 1 ? normal_quantile((count - 0.375) / (count + 0.25)) : 0.0;
}

inline double between_octaves(const double *values, int64_t lower, double share) {
    double left = values[lower], right = values[lower + 1];
    if (std::isfinite(left) && std::isfinite(right)) return (right - left) * share + left;
    return share > 0 ? std::min(left, right) : left;
}

/* np.interp over TOGETHER. */
inline double interpolated(double x, const double *values) {
    if (!(x > TOGETHER[0])) return values[0];
    if (x >= TOGETHER[SHARES - 1]) return values[SHARES - 1];
    int at = 0;
    while (TOGETHER[at + 1] <= x) ++at;
    double slope = (values[at + 1] - values[at]) / (TOGETHER[at + 1] - TOGETHER[at]);
    return slope * (x - TOGETHER[at]) + values[at];
}

inline double longest_among(const double *table, double queries) {
    double place = std::min(std::log2(std::max(queries, 1.0)), DOUBLINGS - 1.0);
    int64_t lower = std::min<int64_t>(static_cast<int64_t>(place), DOUBLINGS - 2);
    return table[lower] + (place - static_cast<double>(lower)) * (table[lower + 1] - table[lower]);
}

/* Where in an octave a size is: octaves are halved SPLITS times. */
struct Place {
    int64_t index;
    double beyond;

    explicit Place(double size) {
        constexpr int SHIFT = 52 - 5;
        const double least = 0x1p-10;
        int64_t bits, first;
        size = std::max(size, least);
        memcpy(&bits, &size, 8), memcpy(&first, &least, 8);
        int64_t node_bits = bits >> SHIFT << SHIFT;
        double node;
        memcpy(&node, &node_bits, 8);
        index = (bits >> SHIFT) - (first >> SHIFT);
        beyond = size - node;
    }
    /* Not finite where the table does not say. */
    double of(const Table &table, int64_t column) const {
        if (index < 0 || index >= table.count) return INFINITY;
        int64_t at = column * table.count + index;
        return table.rises[at] * beyond + table.nodes[at];
    }
};

/* EncodeTokens.adjusted. */
inline double adjusted(const Facts &facts, double spread, double tokens, double queries) {
    if (facts.adjustment <= 0) return spread;
    double mean = facts.mean_input, deviation = facts.std_input;
    double band = facts.adjustment * tokens / std::sqrt(3.0);
    double cut = (mean + deviation * deviation / mean) / std::sqrt(12.0);
    double share = std::min(std::max(queries - (facts.least_adjusted - 1), 0.0), 1.0);
    return spread + share * (std::min(spread, std::max(band, cut)) - spread);
}

/* What a micro-batch encodes: queries, tokens, and those of a phase's largest. A bound leaves out
 * what an uneven split costs. */
inline void load_encoding(const Facts &facts, const Loads &loads, int64_t c, bool is_bound) {
    double groups = std::min(loads.groups[c], loads.batch[c]), queries = loads.batch[c] / groups;
    double tokens = queries * facts.mean_input, spread;
    if (is_bound) {
        double most = loads.largest ? std::max(queries, loads.largest[c]) : queries;
        spread = adjusted(facts, std::sqrt(queries) * facts.std_input, tokens, most);
    } else {
        double odd = queries - std::floor(queries);
        spread = std::sqrt(queries * (facts.std_input * facts.std_input)
                           + odd * (1 - odd) * (facts.mean_input * facts.mean_input));
        spread = adjusted(facts, spread, tokens, queries);
    }
    loads.encoded[c] = queries;
    loads.tokens[0][c] = tokens + largest_normal(groups) * spread;
    loads.tokens[1][c] = tokens;
}

/* PhaseBatches.decode_loads, charged_context and moved_rows of one block, at `e`. */
inline void load_block(const Loads &loads, const Block &block, bool is_padded, int64_t c, int64_t e,
                       int64_t lower, double share, double variance) {
    double batch = loads.batch[c] / loads.groups[c], mean = batch * block.active, chance = 1.0;
    if (mean > 0) {
        chance = std::min(-std::expm1(batch * between_octaves(block.absent, lower, share)), mean);
        if (chance <= 0) chance = mean;
    }
    double queries = mean / chance, square = (batch * variance + mean * mean) / chance;
    double spread = std::sqrt(std::max(square - queries * queries, 0.0));
    double steps = mean > 0 ? loads.groups[c] * chance : 0.0;
    loads.queries[0][e] = queries + largest_normal(steps) * spread;
    loads.queries[1][e] = queries;
    loads.steps[e] = steps, loads.chance[e] = chance;
    for (int one = 0; one < 2; ++one)
        loads.context[one][e] = is_padded ? std::max(block.context, longest_among(
            block.longest, loads.queries[one][e])) : block.context;
    double moved = batch * block.moved, happens = -std::expm1(-moved);
    loads.rows[e] = moved / (happens > 0 ? happens : 1.0);
    loads.share[e] = std::min(happens / chance, 1.0);
}

}  // namespace xgpt_planning
