/* RRA's points and the bounds of its boxes (xsimulator/policies/rra: closed_form.py, bounds.py),
 * many of several plans in a call. Attention is the timing source's, asked for between the two
 * calls: first xgpt_rra_loads, which says how many queries decode, then xgpt_rra_figures. */
#include <vector>

#include "planning_steps.h"
#include "planning_timeline.h"

using namespace xgpt_planning;

namespace {

constexpr int64_t SHORT_ITERATIONS = 2;  // xsimulator/pipeline.py

double tolerance(const Asked &asked, const Plan &plan, int64_t c, double iterations) {
    const Loads &loads = asked.loads;
    double stages = static_cast<double>(plan.stages);
    const double *of = asked.facts.tolerances;
    if (loads.groups[c] > stages) return loads.batch[c] < loads.groups[c] ? of[0] : of[1];
    return iterations < stages ? of[2] : asked.is_range ? of[3] : of[4];
}

/* Up to LANES configurations of one plan, whose timeline is followed together. */
struct Together {
    std::vector<double> decode[2], encode[2], widths;  // [blocks][kinds][LANES]
    Phase phase;

    void begin(const Asked &asked, const Plan &plan, int64_t c, int64_t count, int64_t *blocks) {
        const Loads &loads = asked.loads;
        for (int64_t l = 0; l < count; ++l) blocks[l] = asked.table.counts[loads.column[c + l]];
        size_t most = static_cast<size_t>(blocks[0]), kinds = static_cast<size_t>(plan.kinds);
        for (int i = 0; i < 2; ++i) {
            decode[i].assign(most * kinds * LANES, 0.0);
            encode[i].assign(kinds * LANES, 0.0);
        }
        widths.assign(most * LANES, 0.0);
        phase.stages = plan.stages, phase.count = count;
        phase.kind_of = plan.kind_of, phase.blocks = blocks;
        phase.encode = {encode[0].data(), encode[1].data()};
        phase.decode.resize(most), phase.skip.resize(most), phase.active.resize(most);
        for (size_t b = 0; b < most; ++b) {
            phase.decode[b] = {decode[0].data() + b * kinds * LANES,
                               decode[1].data() + b * kinds * LANES};
            phase.active[b] = std::count_if(blocks, blocks + count, [&](int64_t own) {
                return own > static_cast<int64_t>(b);
            });
            phase.skip[b] = nullptr;
        }
    }
    void put(const Asked &asked, const Plan &plan, const Block *blocks, int64_t lane,
             const Steps1 &steps) {
        int64_t kinds = plan.kinds, count = phase.blocks[lane];
        bool is_point = asked.of == POINT;
        for (int64_t k = 0; k < kinds; ++k) {
            encode[0][k * LANES + lane] = steps.encode_one[k];
            encode[1][k * LANES + lane] = steps.encode_all[k] - (is_point ? 0 : steps.encode_one[k]);
        }
        for (int64_t b = 0; b < count; ++b) {
            widths[b * LANES + lane] = blocks[b].widths - 1;
            if (blocks[b].widths > 1) phase.skip[b] = widths.data() + b * LANES;
            for (int64_t k = 0; k < kinds; ++k) {
                int64_t at = (b * kinds + k) * LANES + lane, own = b * kinds + k;
                decode[0][at] = steps.one[own];
                decode[1][at] = steps.all[own] - (is_point ? 0 : steps.one[own]);
            }
        }
    }
};

double known_rate(double batch, double period) {
    return std::isfinite(period) && period > 0 ? batch / period : INFINITY;
}

double known_seconds(double seconds) { return std::isfinite(seconds) ? seconds : 0.0; }

/* The least variance of the number of active queries by block, over N_D from one to another
 * (QueryFlow.least_variance; least_steps.py: _variance_by_block). */
void least_variance(const double *share, int64_t size, int64_t own, int64_t other, bool is_latency,
                    const Block *blocks, int64_t count, std::vector<double> &room, double *found) {
    int64_t fewest = std::min(own, other), most = std::max(own, other);
    room.assign(static_cast<size_t>(own), 0.0);
    for (int64_t phase = 0; phase * most < size; ++phase)
        for (int64_t u = 0; u < own && phase * most + u < size; ++u)
            room[u] += std::min(share[phase * fewest + u], share[phase * most + u]);
    int64_t u = 0;
    double least = INFINITY;
    for (int64_t b = 0; b < count; ++b) {
        double sum = 0;
        for (int64_t end = u + static_cast<int64_t>(blocks[b].widths); u < end; ++u)
            sum += room[u], least = std::min(least, room[u]);
        found[b] = is_latency ? least : sum / blocks[b].widths;
    }
}

void figures_of_point(const Asked &asked, const Line &line, const Steps1 *steps, int64_t c,
                      int64_t lane, const Plan &plan, double *found, int64_t n) {
    const Blocks &table = asked.table;
    int64_t column = asked.loads.column[c], seen = table.seen[column], count = table.counts[column];
    const Block *blocks = table.blocks + table.begins[column];
    double before = 0, last = 0, through = 0, rest = 0;
    for (int64_t b = 0; b < count; ++b) before += steps->more[0][b] * blocks[b].widths;
    for (int64_t b = 0; b <= seen; ++b) last += steps->more[1][b] * blocks[b].widths;
    for (int64_t k = 0; k < plan.kinds; ++k) {
        through += steps->encode_one[k] * static_cast<double>(plan.counts[k]);
        rest = std::max(rest, steps->encode_all[k]);
    }
    double latency = line.encoded[lane];
    if (asked.facts.seen_iterations > 0)
        latency = static_cast<double>(table.before[column]) * (line.period[lane] + before)
                  + (line.finish[seen * LANES + lane] + last);
    double values[] = {line.period[lane], latency, line.encoded[lane], line.finish[lane],
                       through + rest, steps->is_timed ? 1.0 : 0.0};
    for (int64_t i = 0; i < 6; ++i) found[i * n + c] = values[i];
}

double bound_of(const Asked &asked, const Plan &plan, int64_t c, const Steps1 &steps,
                const Line *line, int64_t lane) {
    const Blocks &table = asked.table;
    int64_t column = asked.loads.column[c], count = table.counts[column], seen = table.seen[column];
    const Block *blocks = table.blocks + table.begins[column];
    double before = static_cast<double>(table.before[column]), iterations = 0;
    for (int64_t b = 0; b < count; ++b) iterations += blocks[b].widths;
    Sums sums{asked, plan, steps, blocks, count, seen, plan.kinds, before};
    double share = 1 + tolerance(asked, plan, c, iterations), batch = asked.loads.batch[c];
    if (asked.of == RATE || asked.of == LINE_RATE) {
        if (!steps.is_timed) return INFINITY;
        return known_rate(batch, line ? line->period[lane] : sums.period()) * share;
    }
    if (asked.of == TTFT) return known_seconds(sums.of_kinds(steps.encode_one)) / share;
    if (!steps.is_timed) return 0.0;
    if (asked.of == TPOT) return known_seconds(sums.decoding()) / share;
    double least = sums.latency();
    if (line) {
        double finish = asked.facts.seen_iterations == 0 ? line->encoded[lane]
                                                         : line->finish[seen * LANES + lane];
        least = std::max(least, finish + before * line->period[lane]);
    }
    return known_seconds(least) / share;
}

}  // namespace

/* How much decodes in each block: into `loads`. Of bounds (`is_bound`) over several N_D, `share` has
 * S (1 - S) [size] of the queries' survival S, `own` and `other` the ends of the boxes' N_D, and
 * `until`, where latency is asked for, tokens of context read by N_D (1, 2, ...). */
extern "C" void xgpt_rra_loads(const Blocks *table, const Facts *facts, const Loads *loads, int64_t n,
                               int64_t is_bound, const double *share, int64_t size,
                               const int64_t *own, const int64_t *other, const double *until) {
    std::vector<double> room, variance;
    for (int64_t c = 0; c < n; ++c) {
        int64_t column = loads->column[c], count = table->counts[column];
        const Block *blocks = table->blocks + table->begins[column];
        load_encoding(*facts, *loads, c, is_bound != 0);
        if (share) {
            variance.resize(static_cast<size_t>(count));
            least_variance(share, size, own[c], other[c], until != nullptr, blocks, count, room,
                           variance.data());
            if (until) loads->read[c] = *std::min_element(until + other[c] - 1, until + own[c]);
        }
        double place = std::log2(loads->batch[c] / loads->groups[c]) - FIRST_OCTAVE;
        place = std::min(std::max(place, 0.0), OCTAVES - 1.0);
        int64_t lower = std::min<int64_t>(static_cast<int64_t>(place), OCTAVES - 2);
        double most = 0;
        for (int64_t b = 0; b < count; ++b) {
            int64_t e = loads->begin[c] + b;
            load_block(*loads, blocks[b], table->is_padded != 0, c, e, lower,
                       place - static_cast<double>(lower), share ? variance[b] : blocks[b].variance);
            most = std::max({most, loads->queries[0][e], loads->queries[1][e]});
        }
        loads->most[c] = most;
    }
}

/* What is asked for (`Of`): of points [6, n] period, latency, encoded, first iteration's end,
 * encoding, whether all is timed; else bounds [n]. `plans` [n]; what follows a timeline in falling
 * order of blocks within each plan. is_sure [n]: 0 where a table of steps does not answer. */
extern "C" void xgpt_rra_figures(const Blocks *table, const Facts *facts, const Loads *loads,
                                 const Plan *const *plans, const double *const *attention,
                                 const double *const *compaction, const double *const *rates,
                                 const double *encode_attention, int64_t n, int64_t all, int64_t of,
                                 int64_t is_range, double *found, int64_t *is_sure) {
    Asked asked{*loads, *table, *facts, attention, compaction, rates, encode_attention,
                of, is_range, all};
    bool has_line = of == POINT || of == LINE_RATE || of == LINE_LATENCY;
    Steps1 steps[LANES];
    Together together;
    Line line, rested;
    int64_t blocks[LANES], count;
    for (int64_t begin = 0; begin < n; begin += count) {
        const Plan &plan = *plans[begin];
        bool is_short = table->counts[loads->column[begin]] <= SHORT_ITERATIONS;
        for (count = 1; count < LANES && begin + count < n && plans[begin + count] == &plan; ++count)
            if ((table->counts[loads->column[begin + count]] <= SHORT_ITERATIONS) != is_short) break;
        if (has_line) together.begin(asked, plan, begin, count, blocks);
        for (int64_t l = 0; l < count; ++l) {
            int64_t c = begin + l;
            steps[l].is_timed = steps[l].is_sure = true;
            encode_steps(asked, plan, c, steps[l]);
            decode_steps(asked, plan, c, steps[l]);
            is_sure[c] = steps[l].is_sure;
            if (has_line && steps[l].is_timed)
                together.put(asked, plan, table->blocks + table->begins[loads->column[c]], l, steps[l]);
        }
        if (has_line) steady(together.phase, is_short && of != LINE_LATENCY ? 2 : 1, line);
        if (of == LINE_LATENCY) {
            from_rest(together.phase, rested);
            std::copy(line.period, line.period + count, rested.period);
        }
        for (int64_t l = 0; l < count; ++l) {
            if (of == POINT) figures_of_point(asked, line, &steps[l], begin + l, l, plan, found, n);
            else
                found[begin + l] = bound_of(asked, plan, begin + l, steps[l], !has_line ? nullptr :
                                            of == LINE_LATENCY ? &rested : &line, l);
        }
    }
}

/* xsimulator/pipeline.py: sorted_timeline. work: by kind of stage its encode_s, encode_rest_s
 * [configs], decode_s and decode_rest_s [rows, configs]; kind_of: [stages]; blocks: [configs],
 * falling; widths: [rows, configs] or none. Into period, encoded [configs], finish [rows, configs]. */
extern "C" void xgpt_timeline(const double *const *work, const int64_t *kind_of,
                              const int64_t *blocks, const double *widths, int64_t kinds,
                              int64_t stages, int64_t configs, int64_t rows, double *period,
                              double *encoded, double *finish) {
    std::vector<double> encode[2], decode[2], before;
    Phase phase;
    Line line;
    int64_t count;
    for (int64_t begin = 0; begin < configs; begin += count) {
        bool is_short = blocks[begin] <= SHORT_ITERATIONS;
        for (count = 1; count < LANES && begin + count < configs; ++count)
            if ((blocks[begin + count] <= SHORT_ITERATIONS) != is_short) break;
        size_t most = static_cast<size_t>(blocks[begin]);
        phase.stages = stages, phase.count = count;
        phase.kind_of = kind_of, phase.blocks = blocks + begin;
        phase.decode.resize(most), phase.skip.assign(most, nullptr), phase.active.resize(most);
        before.assign(most * LANES, 0.0);
        for (int i = 0; i < 2; ++i) {
            encode[i].assign(static_cast<size_t>(kinds) * LANES, 0.0);
            decode[i].assign(most * static_cast<size_t>(kinds) * LANES, 0.0);
            for (int64_t k = 0; k < kinds; ++k)
                for (int64_t l = 0; l < count; ++l) {
                    encode[i][k * LANES + l] = work[4 * k + i][begin + l];
                    for (int64_t b = 0; b < blocks[begin + l]; ++b)
                        decode[i][(b * kinds + k) * LANES + l] =
                            work[4 * k + 2 + i][b * configs + begin + l];
                }
        }
        phase.encode = {encode[0].data(), encode[1].data()};
        for (size_t b = 0; b < most; ++b) {
            phase.decode[b] = {decode[0].data() + b * kinds * LANES,
                               decode[1].data() + b * kinds * LANES};
            phase.active[b] = 0;
            for (int64_t l = 0; l < count; ++l) {
                if (blocks[begin + l] <= static_cast<int64_t>(b)) continue;
                ++phase.active[b];
                if (!widths || widths[b * configs + begin + l] == 1) continue;
                before[b * LANES + l] = widths[b * configs + begin + l] - 1;
                phase.skip[b] = before.data() + b * LANES;
            }
        }
        steady(phase, is_short ? 2 : 1, line);
        for (int64_t l = 0; l < count; ++l) {
            period[begin + l] = line.period[l], encoded[begin + l] = line.encoded[l];
            for (int64_t b = 0; b < rows; ++b)
                finish[b * configs + begin + l] =
                    line.finish[std::min<int64_t>(b, static_cast<int64_t>(most) - 1) * LANES + l];
        }
    }
}
