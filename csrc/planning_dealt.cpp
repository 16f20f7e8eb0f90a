/* What RRA's groups are dealt and encode in chunks, phase by phase: the rule alone, without steps
 * (xsimulator/policies/rra/dealt.py, which says why; to the token as there). */
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "batch_sizer.h"

namespace {

struct Facts {
    int64_t inputs, batch, iterations, chunk, groups, laps, most_phases;
};

/* Tokens of the group before each query dealt to it; how many of these are begun; tokens dealt to
 * it, and encoded. */
struct Group {
    std::vector<int64_t> starts;
    size_t begun = 0;
    int64_t dealt = 0, done = 0;
};

}  // namespace

/* inputs[facts.inputs] tokens, the first again after the last; even[2]: mean input, adjustment. Into
 * counts, sizes, before [phases][groups] queries dealt, tokens of a chunk and tokens encoded before,
 * every[phases] iterations from one chunk to the next; returns the number of phases. */
extern "C" int64_t xgpt_dealt(const Facts *facts, const double *even, const int64_t *inputs,
                              int64_t *counts, int64_t *sizes, int64_t *before, int64_t *every) {
    const int64_t all = facts->inputs, groups = facts->groups, iterations = facts->iterations;
    const int64_t base = facts->batch / groups, odd = facts->batch % groups;
    const xgpt_reserving::Sizer sizer{even[0], even[1]};
    std::vector<Group> held(static_cast<size_t>(groups));
    int64_t next = 0, phase = 0;
    for (; phase < facts->most_phases && next < facts->laps * all; ++phase) {
        int64_t most = 1;
        for (int64_t g = 0; g < groups; ++g) {
            Group &own = held[static_cast<size_t>(g)];
            int64_t quota = base + ((g + phase * odd) % groups < odd), count = 0;
            if (static_cast<int64_t>(own.starts.size() - own.begun) < quota) {
                auto tokens = [&](int64_t place) { return inputs[(next + place) % all]; };
                count = sizer.count(tokens, INT64_MAX, quota, 0);
                for (int64_t place = 0; place < count; ++place) {
                    own.starts.push_back(own.dealt);
                    own.dealt += tokens(place);
                }
                next += count;
            }
            counts[phase * groups + g] = count;
            most = std::max(most, own.dealt - own.done);
        }
        every[phase] = std::min(std::max(facts->chunk * iterations / most, int64_t{1}), iterations);
        int64_t times = (iterations + every[phase] - 1) / every[phase];
        for (int64_t g = 0; g < groups; ++g) {
            Group &own = held[static_cast<size_t>(g)];
            int64_t left = own.dealt - own.done;
            int64_t size = std::min((left + times - 1) / times, facts->chunk);
            sizes[phase * groups + g] = size;
            before[phase * groups + g] = own.done;
            own.done += std::min(left, size * times);
            while (own.begun < own.starts.size() && own.starts[own.begun] < own.done) ++own.begun;
        }
    }
    return phase;
}
