/* How many of the waiting requests make one encode batch: as xrunner/rules/batch_sizer.py, by
 * the same sums in the same order. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>

#include "uncontracted.h"

namespace xgpt_reserving {

constexpr int64_t LEAST_ADJUSTED = 4;

/* See BatchSizer. `tokens`: input tokens of a waiting request by its place; `waiting`: their
 * number. */
struct Sizer {
    double mean_input, adjustment;

    bool is_adjusted(int64_t batch) const { return adjustment > 0 && batch >= LEAST_ADJUSTED; }
    int64_t most(int64_t batch) const { return is_adjusted(batch) ? 2 * batch : batch; }

    int64_t lean(double away, double mean) const {
        bool is_near = std::fabs(away) <= adjustment * mean;
        return is_near ? 0 : -static_cast<int64_t>(std::nearbyint(away));
    }
    template <class Tokens>
    int64_t count(const Tokens &tokens, int64_t waiting, int64_t batch, int64_t lean) const {
        int64_t known = std::min(waiting, most(batch)), count = nearest(tokens, known, batch);
        bool is_led = lean != 0 && most(batch) > batch && known >= batch;
        return is_led ? led(tokens, known, batch, count, lean) : count;
    }

private:
    template <class Tokens>
    static int64_t sum(const Tokens &tokens, int64_t count) {
        int64_t all = 0;
        for (int64_t place = 0; place < count; ++place) all += tokens(place);
        return all;
    }
    template <class Tokens>
    int64_t nearest(const Tokens &tokens, int64_t known, int64_t batch) const {
        int64_t planned = std::min(batch, known);
        if (!is_adjusted(batch) || planned < batch) return planned;
        double target = static_cast<double>(batch) * mean_input;
        double away = static_cast<double>(sum(tokens, batch)) - target;
        if (std::fabs(away) <= adjustment * target) return batch;
        double least = target;
        int64_t best = 0, all = 0;
        for (int64_t place = 0; place < known; ++place) {
            all += tokens(place);
            double distance = std::fabs(static_cast<double>(all) - target);
            if (distance < least) {
                least = distance;
                best = place + 1;
            }
            if (static_cast<double>(all) >= target) break;
        }
        return std::max(best, int64_t{1});
    }
    template <class Tokens>
    int64_t led(const Tokens &tokens, int64_t known, int64_t batch, int64_t count,
                int64_t lean) const {
        double target = static_cast<double>(batch) * mean_input, allowed = adjustment * target;
        int64_t all = sum(tokens, count);
        if (lean > 0) {
            int64_t until = std::min(std::min(count + lean, most(batch)), known);
            for (; count < until; ++count) {
                all += tokens(count);
                if (static_cast<double>(all) > target + allowed) break;
            }
            return count;
        }
        for (int64_t until = std::max(count + lean, int64_t{1}); count > until; --count) {
            all -= tokens(count - 1);
            if (static_cast<double>(all) < target - allowed) break;
        }
        return count;
    }
};

}  // namespace xgpt_reserving
