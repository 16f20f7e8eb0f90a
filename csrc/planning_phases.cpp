/* A phase of RRA's decode iterations as blocks of nearly equal ones
 * (xsimulator/policies/rra/phase_blocks.py: BlockTable._derive; xsimulator/occupancy.py: what the
 * fields are). Chances that nobody is there are products here where they are sums of logarithms
 * there: the same but for rounding. */
#include <vector>

#include "planning_rra.h"

using namespace xgpt_planning;

namespace {

constexpr int64_t SINGLE_BLOCKS = 2, STRIDES = -FIRST_OCTAVE;
constexpr double FADED = 1e-3, EVENLY = 3.0;  // xsimulator/policies/rra/phase_blocks.py

/* [4, size] by a query's own iteration: survival, context, what is reserved and its square;
 * of all queries the last two. */
struct Flow {
    const double *values;
    int64_t size;
    double reserved, squared;

    const double *row(int i) const { return values + i * size; }
};

struct Sums {
    std::vector<double> active, context, variance, moved;  // [N_D]
    std::vector<double> absent[3][OCTAVES];                // [N_D] of any, own before, own last
    std::vector<double> rows;                              // [offsets][N_D]
};

void add_phases(const Flow &flow, int64_t n_d, Sums &sums) {
    const double *survival = flow.row(0), *context = flow.row(1);
    sums.active.assign(n_d, 0.0), sums.context.assign(n_d, 0.0);
    sums.variance.assign(n_d, 0.0), sums.moved.assign(n_d, 0.0);
    for (int64_t begin = 0; begin < flow.size; begin += n_d) {
        int64_t count = std::min(n_d, flow.size - begin);
        for (int64_t u = 0; u < count; ++u) {
            double there = survival[begin + u];
            sums.active[u] += there;
            sums.context[u] += context[begin + u];
            sums.variance[u] += there * (1 - there);
        }
    }
    for (int64_t u = 0; u < n_d; ++u) {
        double active = sums.active[u], before = sums.active[(u ? u : n_d) - 1];
        double removed = std::max(before - (u ? active : active - survival[0]), 0.0);
        sums.moved[u] = active * (removed / (active > 0 ? active + removed : 1.0));
    }
}

/* How many of the phases 0..number - 1 are at an offset of so many. */
double visits(int64_t number, int64_t stride, int64_t offset) {
    return static_cast<double>((number - offset + stride - 1) / stride * (number > offset));
}

/* Chances that nobody is active in a group, by octave of the queries that it encodes: at each
 * iteration, in the mean of the offsets that any phases, those before and the last are at. */
void add_absence(const Flow &flow, int64_t n_d, int64_t before, Sums &sums) {
    const double *survival = flow.row(0);
    int64_t phases = (flow.size + n_d - 1) / n_d, stride = int64_t{1} << STRIDES;
    int64_t kept = std::min(stride, phases), own = std::max<int64_t>(before, 1);
    sums.rows.assign(kept * n_d, 1.0);
    for (int64_t phase = 0; phase < phases; ++phase) {
        double *row = sums.rows.data() + phase % stride * n_d;
        int64_t begin = phase * n_d, count = std::min(n_d, flow.size - begin);
        for (int64_t u = 0; u < count; ++u) row[u] *= 1 - std::min(survival[begin + u], 1.0);
    }
    for (int octave = 0; octave < STRIDES; ++octave, stride /= 2) {
        if (kept > stride) {  // rows that are a stride apart are of one offset now
            for (int64_t at = 0; at < (kept - stride) * n_d; ++at)
                sums.rows[at] *= sums.rows[stride * n_d + at];
            kept = stride;
        }
        double certain[3] = {static_cast<double>(stride - kept), 0, before % stride >= kept ? 1.0 : 0};
        for (int64_t offset = kept; offset < stride; ++offset) certain[1] += visits(own, stride, offset);
        for (int i = 0; i < 3; ++i) sums.absent[i][octave].assign(n_d, certain[i]);
        for (int64_t offset = 0; offset < kept; ++offset) {
            const double *row = sums.rows.data() + offset * n_d;
            double *any = sums.absent[0][octave].data(), *earlier = sums.absent[1][octave].data();
            double often = visits(own, stride, offset);
            for (int64_t u = 0; u < n_d; ++u) any[u] += row[u];
            if (often > 0)
                for (int64_t u = 0; u < n_d; ++u) earlier[u] += often * row[u];
            if (before % stride == offset)
                for (int64_t u = 0; u < n_d; ++u) sums.absent[2][octave][u] += row[u];
        }
        for (int64_t u = 0; u < n_d; ++u) {
            sums.absent[0][octave][u] /= static_cast<double>(stride);
            sums.absent[1][octave][u] /= static_cast<double>(own);
        }
    }
    for (int64_t offset = 1; offset < kept; ++offset)
        for (int64_t u = 0; u < n_d; ++u) sums.rows[u] *= sums.rows[offset * n_d + u];
    for (int octave = STRIDES; octave < OCTAVES; ++octave) {
        sums.absent[0][octave].assign(sums.rows.begin(), sums.rows.begin() + n_d);
        for (int64_t u = 0; u < n_d; ++u) sums.rows[u] *= sums.rows[u];
    }
}

/* phase_blocks.py: block_ends. */
std::vector<int64_t> ends_of(const std::vector<double> &active, int64_t n_d, int64_t last,
                             int64_t exact, double resolution) {
    std::vector<int64_t> ends;
    if (n_d <= exact) {
        for (int64_t end = 1; end <= n_d; ++end) ends.push_back(end);
        return ends;
    }
    double least = std::max(FADED * active[0], 2.2250738585072014e-308), length = 0;
    double each = EVENLY / static_cast<double>(n_d - SINGLE_BLOCKS);
    std::vector<double> lengths;
    for (int64_t u = SINGLE_BLOCKS; u < n_d; ++u) {
        double change = std::abs(std::log(active[u] + least) - std::log(active[u - 1] + least));
        lengths.push_back(length += change + each);
    }
    for (int64_t end = 1; end <= SINGLE_BLOCKS; ++end) ends.push_back(end);
    ends.push_back(last + 1), ends.push_back(n_d);
    int64_t inner = static_cast<int64_t>(length / resolution);
    for (int64_t i = 1; i <= inner; ++i) {
        double target = length * static_cast<double>(i) / static_cast<double>(inner + 1);
        ends.push_back(SINGLE_BLOCKS + (std::lower_bound(lengths.begin(), lengths.end(), target)
                                        - lengths.begin()));
    }
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    return ends;
}

double mean(const std::vector<double> &values, int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t u = begin; u < end; ++u) sum += values[u];
    return sum / static_cast<double>(end - begin);
}

}  // namespace

/* Phases of `n_d` iterations; `last`: that of its phase at which the latency's query ends, after
 * `before` phases. Into blocks [n_d at most], singles [5] (mean phases and queries present, tokens
 * reserved and their variance, phases at most), and seen; returns how many blocks there are. */
extern "C" int64_t xgpt_rra_phase(const Flow *flow, int64_t n_d, int64_t last, int64_t before,
                                  int64_t exact, double resolution, Block *blocks, double *singles,
                                  int64_t *seen) {
    Sums sums;
    add_phases(*flow, n_d, sums);
    add_absence(*flow, n_d, before, sums);
    std::vector<int64_t> ends = ends_of(sums.active, n_d, last, exact, resolution);
    int64_t begin = 0;
    for (size_t b = 0; b < ends.size(); begin = ends[b++]) {
        Block &block = blocks[b];
        block = Block();
        block.widths = static_cast<double>(ends[b] - begin);
        block.active = mean(sums.active, begin, ends[b]);
        block.context = mean(sums.context, begin, ends[b]) / (block.active > 0 ? block.active : 1.0);
        block.variance = mean(sums.variance, begin, ends[b]);
        block.moved = mean(sums.moved, begin, ends[b]);
        for (int octave = 0; octave < OCTAVES; ++octave) {
            double queries = std::exp2(octave + FIRST_OCTAVE);
            double absent = std::log(mean(sums.absent[0][octave], begin, ends[b]));
            if (octave == STRIDES) block.nobody = absent;
            block.absent[octave] = block.own_before[octave] = block.own_last[octave] = absent / queries;
            if (octave >= STRIDES) continue;  // one query at least a phase: all phases are alike
            block.own_before[octave] = std::log(mean(sums.absent[1][octave], begin, ends[b])) / queries;
            block.own_last[octave] = std::log(mean(sums.absent[2][octave], begin, ends[b])) / queries;
        }
    }
    const double *survival = flow->row(0), *reserve = flow->row(2), *squared = flow->row(3);
    std::fill(singles, singles + 5, 0.0);
    for (int64_t at = 0; at < flow->size; at += n_d) {
        double held = at ? reserve[at] : flow->reserved;
        singles[0] += survival[at];
        singles[1] += at ? survival[at] : 1.0;
        singles[2] += held;
        singles[3] += (at ? squared[at] : flow->squared) - held * held;
        singles[4] += 1;
    }
    singles[3] = std::max(singles[3], 0.0);  // rounding may leave less of lengths that are nearly one
    *seen = std::lower_bound(ends.begin(), ends.end(), last + 1) - ends.begin();
    return static_cast<int64_t>(ends.size());
}
