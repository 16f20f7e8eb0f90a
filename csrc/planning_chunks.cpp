/* Bounds of RRA's configurations that encode in chunks (xsimulator/policies/rra/chunk_bounds.py,
 * which says why), of boxes of any plans. */
#include "planning_rra.h"

using namespace xgpt_planning;

namespace {

/* [boxes] queries encoded in each round from `low` to `high`, in chunks of at most `chunk` tokens;
 * `largest`: queries of a group that may decode right after a chunk. */
struct Ranges {
    const double *low, *high, *chunk, *groups, *largest;
};

struct Times {
    double round, plain;
    bool is_sure;
};

Times times_of(const Facts &facts, const Ranges &ranges, const Plan &plan, double context,
               const double *const *rates, const double *encode_attention, int64_t c, double rate) {
    double groups = ranges.groups[c], mean = facts.mean_input, largest = ranges.largest[c];
    double most_rows = largest + ranges.chunk[c], most_heads = largest + ranges.chunk[c] / mean;
    double decoded = rate * facts.mean_iterations, read = rate * context;
    double rows = decoded + rate * mean, heads = decoded + rate;
    Place alone_at(largest), most_at(most_rows);
    double head = alone_at.of(plan.ends, 0), most_head = Place(most_heads).of(plan.ends, 0);
    double heads_alone = decoded * head / largest;
    double heads_all = std::max(heads_alone, heads * most_head / most_heads);
    Times found{0, 0, std::isfinite(head) && std::isfinite(most_head)};
    double through = 0, plain_through = 0;
    for (int64_t k = 0; k < plan.kinds; ++k) {
        const double *least = encode_attention + plan.slots[k] * 3 * SHARES + SHARES;
        double row = alone_at.of(plan.encode, k), most = most_at.of(plan.encode, k);
        double layers = plan.decode_layers[k], attention = layers * read * rates[plan.slots[k]][c];
        double alone = decoded * row / largest;
        double whole = std::max(alone, rows * most / most_rows) + attention
                       + layers * rate * least[SHARES - 1];
        if (k == plan.kind_of[plan.stages - 1]) alone += heads_alone, whole += heads_all;
        found.round = std::max(found.round, whole);
        found.plain = std::max(found.plain, alone);
        through += static_cast<double>(plan.counts[k]) * whole / groups;
        plain_through += static_cast<double>(plan.counts[k]) * alone / groups;
        found.is_sure = found.is_sure && std::isfinite(row) && std::isfinite(most);
    }
    found.round = std::max(found.round, through);
    found.plain = std::max(found.plain, plain_through);
    return found;
}

}  // namespace

/* Into found [n] throughput that no configuration of a box exceeds, infinite where nothing is known,
 * or latency that none falls below, 0 there. context: tokens that a query reads while it decodes;
 * rates: by degree [n] a layer's least seconds for one; is_sure [n]: 0 where a table of steps does
 * not answer. */
extern "C" void xgpt_rra_chunks(const Facts *facts, const Ranges *ranges, const Plan *const *plans,
                                const double *const *rates, const double *encode_attention, int64_t n,
                                int64_t is_latency, double context, double tolerance, double *found,
                                int64_t *is_sure) {
    for (int64_t c = 0; c < n; ++c) {
        double rate = is_latency ? ranges->low[c] : ranges->high[c];
        Times times = times_of(*facts, *ranges, *plans[c], context, rates, encode_attention, c, rate);
        is_sure[c] = times.is_sure;
        if (!is_latency) {
            bool is_known = std::isfinite(times.round) && times.round > 0;
            found[c] = is_known ? ranges->high[c] * (1 + tolerance) / times.round : INFINITY;
            continue;
        }
        double tokens = ranges->low[c] / ranges->groups[c] * facts->mean_input;
        double every = std::max(1.25 * ranges->chunk[c] / tokens, 2.0), seen = facts->seen_iterations;
        double least = std::max((seen + 1) * times.plain, std::max(seen - every, 0.0) * times.round);
        found[c] = std::isfinite(least) ? least / (1 + tolerance) : 0.0;
    }
}
