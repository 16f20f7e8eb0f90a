/* What steps of continuous batching take at least (xsimulator/policies/continuous/bounds.py and
 * least_steps.py, which say why), of lines of one plan at given rates: the same sums in the same
 * order as by arrays. All fields have eight bytes, so that arrays of integers stand for the
 * structures. */
#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "planning_rra.h"
#include "uncontracted.h"

namespace {

enum Filling : int64_t { SARATHI, VLLM, ORCA };

/* xsimulator/convex_steps.py: ConvexTimes. */
struct Convex {
    const double *slopes, *offsets, *from;
    int64_t count;

    double mean(double size) const {
        int64_t place = std::upper_bound(from, from + count - 1, size) - from;
        return offsets[place] + slopes[place] * size;
    }
};

/* Of a problem and a policy. */
struct Facts {
    int64_t filling;
    double input, iterations, watched, split, evictions, crowded, least, unused;
};

/* Of one plan, by kind of stage: how many of it, decoder layers, a query's encoding attention,
 * decode attention at `sizes` [num_sizes], and tables of the other times. */
struct Plan {
    int64_t kinds, last, num_sizes;
    const double *sizes, *number, *layers, *encode;
    const double *const *decode;
    const Convex *rows;
    Convex head;
    xgpt_planning::Table table;
};

/* [lines] and [kinds, lines] of one plan; rates are a row's least seconds in steps up to the largest,
 * and up to what is held. */
struct Lines {
    int64_t count;
    double groups;
    const double *held, *least, *most, *iterations, *is_crowded, *decoding;
    const double *each, *largest_rate, *held_rate, *head_rate;
};

/* np.interp. */
double interpolated(double x, const double *sizes, const double *values, int64_t count) {
    if (!(x > sizes[0])) return values[0];
    if (x >= sizes[count - 1]) return values[count - 1];
    int64_t at = std::upper_bound(sizes, sizes + count, x) - sizes - 1;
    if (sizes[at] == x) return values[at];
    double slope = (values[at + 1] - values[at]) / (sizes[at + 1] - sizes[at]);
    return slope * (x - sizes[at]) + values[at];
}

/* Steps of one line at one rate. */
struct Steps {
    double plain, through, slowest;  // of all stages: decoding alone, in the mean; of the slowest
};

double again_of(const Facts &facts, const Lines &lines, int64_t line, double rate) {
    bool is_full = rate * (lines.iterations[line] + 1) >= facts.crowded * lines.held[line];
    return lines.is_crowded[line] != 0 && is_full ? facts.evictions : 0.0;
}

double share_of(const Facts &facts, const Lines &lines, int64_t line, double rate, double again) {
    if (facts.filling == ORCA) return rate;
    double room = facts.filling == SARATHI
                      ? lines.least[line] - 2 * (rate * (lines.iterations[line] + 1) + 1)
                      : std::max(lines.least[line] - facts.unused, facts.input);
    double each = 1 + facts.input / std::max(room, 1.0);
    return std::min(facts.split * rate * (1 + again) * each, 1.0);
}

Steps steps_of(const Facts &facts, const Plan &plan, const Lines &lines, int64_t line, double rate,
               double again) {
    double iterations = lines.iterations[line], share = share_of(facts, lines, line, rate, again);
    double rows = rate * (facts.input + iterations), heads = rate * (1 + iterations);
    double tokens = rate * facts.input / std::max(share, 1e-300);
    double decoding = std::max(rate * iterations, lines.decoding[line]);
    xgpt_planning::Place place(decoding);
    Steps found{0, 0, 0};
    for (int64_t k = 0; k < plan.kinds; ++k) {
        int64_t at = k * lines.count + line;
        double layers = plan.layers[k], largest = lines.largest_rate[at];
        double attention = interpolated(decoding, plan.sizes, plan.decode[k], plan.num_sizes);
        double plain = place.of(plan.table, k) + attention * layers;
        if (!std::isfinite(plain)) plain = 0;
        double own = std::max(plan.rows[k].mean(rows), rows * largest);
        if (facts.filling == VLLM)
            own = std::max(own, rate * facts.input * largest
                                    + rate * iterations * lines.held_rate[at]);
        own = own + rate * layers * (plan.encode[k] + iterations * lines.each[at]);
        if (k == plan.last)
            own = own + std::max(plan.head.mean(heads), heads * lines.head_rate[line]);
        double mixed = (1 - share) * plain + share * plan.rows[k].mean(tokens)
                       + rate * layers * plan.encode[k];
        double work = std::max(own, mixed);
        found.plain = k ? found.plain + plan.number[k] * plain : plan.number[k] * plain;
        found.through = k ? found.through + plan.number[k] * work : plan.number[k] * work;
        found.slowest = k ? std::max(found.slowest, work) : work;
    }
    return found;
}

/* From where a query's encoding begins to its first token. */
double own_encoding(const Facts &facts, const Plan &plan, const Lines &lines, int64_t line,
                    double rate) {
    double tokens = facts.input, pieces = 1, total = 0;
    if (facts.filling == SARATHI) pieces = std::max(tokens / lines.most[line], 1.0);
    if (facts.filling == VLLM) tokens = tokens / (1 + std::min(2 * rate, 1.0));
    for (int64_t k = 0; k < plan.kinds; ++k)
        total += plan.number[k] * (pieces * plan.rows[k].mean(tokens / pieces)
                                   + plan.layers[k] * plan.encode[k] * tokens / facts.input);
    return total + plan.head.mean(1.0);
}

/* weight: as ContinuousBounds._weights has it. */
double latency_of(const Facts &facts, const Plan &plan, const Lines &lines, int64_t line,
                  double rate, double weight, const Steps &steps, double again) {
    double watched = facts.watched, mean = facts.iterations;
    double interval = steps.through;
    if (rate * mean > 1) interval = std::max(interval, lines.groups * steps.slowest);
    double lower = std::min(steps.plain, interval);
    double own = own_encoding(facts, plan, lines, line, rate);
    double alone = own + std::max(watched - again, 0.0) * lower, seconds;
    if (facts.filling == SARATHI) {
        double longer = std::max(watched / mean - 1, 0.0);
        double times = std::min(watched * (mean + 1) / mean - longer / weight, watched + 1);
        seconds = times * interval + longer * (1 / weight - 1) * lower;
        double pieces = std::max(facts.input / lines.most[line], 1.0);
        seconds = seconds + (pieces - 1 - again) * interval;
    } else if (facts.filling == VLLM) {
        double others = std::max(1 - 1 / std::max(rate * mean, 1.0), 0.0);
        seconds = own + std::max(watched - again, 0.0) * lower
                  + std::max(watched - 1 - again, 0.0) * others * (interval - lower);
    } else {
        seconds = watched * (weight * interval + (1 - weight) * lower)
                  + (1 - again) * std::max(interval, own);
    }
    return facts.least * std::max(seconds, alone);
}

}  // namespace

/* Into found [n, per] seconds between the steps of a group of the lines `line` [n] at rates [n, per],
 * at least; or, is_latency, of a latency. weights [n, per]: see latency_of. */
extern "C" void xgpt_least_steps(const Facts *facts, const Plan *plan, const Lines *lines,
                                 const int64_t *line, const double *rates, const double *weights,
                                 int64_t n, int64_t per, int64_t is_latency, double *found) {
    for (int64_t i = 0; i < n * per; ++i) {
        int64_t own = line[i / per];
        double again = again_of(*facts, *lines, own, rates[i]);
        Steps steps = steps_of(*facts, *plan, *lines, own, rates[i], again);
        found[i] = is_latency ? latency_of(*facts, *plan, *lines, own, rates[i], weights[i], steps,
                                           again)
                              : std::max(steps.through, lines->groups * steps.slowest);
    }
}
