/* Groups in flight through a pipeline (xsimulator/policies/continuous/in_flight.py, which says what
 * they are of), LANES configurations at a time: a sequence of steps, some of which encode, and when
 * each begins. Sums differ from numpy's in their last digits. */
#include <stdint.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "uncontracted.h"

namespace {

constexpr int LANES = 8;
constexpr double EMPTY = 2;  // the place of a turn that nobody takes
constexpr double LEAST = 1e-12;

/* Of all configurations; see xgpt_rounds. */
struct Pipeline {
    const double *table, *places;
    const int64_t *of_places;
    const double *share;
    const int64_t *kind_of;
    int64_t sizes, rounds, warm_up, stages, kinds, configs, alternates;
};

/* The last turn of each place in a round: when it began, its row of the table, and whether it
 * encodes. */
struct Turns {
    std::vector<double> begun;  // [stages][LANES]
    std::vector<int64_t> row;
    std::vector<char> is_encode;

    explicit Turns(int64_t stages) : begun(stages * LANES, 0.0), row(stages * LANES, 0),
                                     is_encode(stages * LANES, 0) {}
};

struct Sums {
    double total[LANES] = {}, of_encodes[LANES] = {}, number[LANES] = {};
};

/* Up to LANES configurations from `first` on. */
template <bool IS_WHOLE>
void run(const Pipeline &of, int64_t first, int number, Sums &sums, double *counts) {
    const int count = IS_WHOLE ? LANES : number;
    const int64_t stages = of.stages, empty = of.sizes + 1, each = of.kinds * of.configs;
    std::vector<double> done((stages + 1) * LANES, 0.0), then((stages + 1) * LANES, 0.0);
    Turns turns(stages);
    std::fill(turns.row.begin(), turns.row.end(), empty);
    for (int64_t round = 0; round < of.rounds; ++round)
        for (int64_t slot = 0; slot < stages; ++slot) {
            double *back = done.data(), *begun = turns.begun.data() + slot * LANES;
            int64_t *row = turns.row.data() + slot * LANES;
            char *is_encode = turns.is_encode.data() + slot * LANES;
            for (int l = 0; l < count; ++l) {
                const double *places = of.places + of.of_places[first + l] * of.rounds * stages;
                const bool is_real = places[slot] < EMPTY;
                // its group's tokens are back: the turn a round before has left the last stage
                back[l] = is_real ? done[stages * LANES + l] : 0.0;
                double begin = std::max(back[LANES + l], back[l]);
                if (round > of.warm_up && is_real) {
                    double between = begin - begun[l];
                    sums.total[l] += between;
                    if (is_encode[l]) sums.of_encodes[l] += between, sums.number[l] += 1;
                    counts[(first + l) * empty + row[l]] += 1;
                }
                begun[l] = begin;
                double share = of.share[first + l], chance = std::max(share, LEAST);
                if (of.alternates && round > 0)
                    chance = is_encode[l] ? std::max(2 - 1 / chance, LEAST)
                                          : std::min(chance / std::max(1 - share, LEAST), 1.0);
                double place = places[round * stages + slot];
                is_encode[l] = place < chance;
                row[l] = is_encode[l] ? std::min(static_cast<int64_t>(
                    place / chance * static_cast<double>(of.sizes)), of.sizes) : of.sizes;
                row[l] += !is_real;
            }
            for (int64_t s = 0; s < stages; ++s) {
                const int64_t *own = turns.row.data() + (slot - s + (slot < s) * stages) * LANES;
                const double *step = of.table + of.kind_of[s] * of.configs + first;
                const double *sooner = done.data() + s * LANES;
                double *end = then.data() + (s + 1) * LANES;
                for (int l = 0; l < count; ++l)
                    end[l] = std::max(sooner[LANES + l], sooner[l]) + step[own[l] * each + l];
            }
            std::swap(done, then);
        }
}

}  // namespace

/* table: [sizes + 2, kinds, configs] seconds of steps that encode, of one that does not, and of none;
 * places: [numbers of groups, rounds, stages] each turn's in the order of steps that encode;
 * of_places, share: [configs]; kind_of: [stages]. Over the rounds after `warm_up`, but for the last:
 * into sums [3, configs] seconds between a group's steps, those of steps that encode, and how many
 * these are; into counts [configs, sizes + 1], zeros, how many there are of each size. */
extern "C" void xgpt_rounds(const double *table, const double *places, const int64_t *of_places,
                            const double *share, const int64_t *kind_of, const int64_t *numbers,
                            double *sums, double *counts) {
    Pipeline of{table, places, of_places, share, kind_of, numbers[0], numbers[1], numbers[2],
                numbers[3], numbers[4], numbers[5], numbers[6]};
    for (int64_t first = 0; first < of.configs; first += LANES) {
        int count = static_cast<int>(std::min<int64_t>(LANES, of.configs - first));
        Sums own;
        if (count == LANES) run<true>(of, first, count, own, counts);
        else run<false>(of, first, count, own, counts);
        for (int l = 0; l < count; ++l) {
            sums[first + l] = own.total[l];
            sums[of.configs + first + l] = own.of_encodes[l];
            sums[2 * of.configs + first + l] = own.number[l];
        }
    }
}
