/* How much RRA's configurations hold, and the largest batch there is room for (closed_form.py:
 * Rra._kv_tokens, Rra._held; xsimulator/memory.py): the same sums in the same order. */
#include <stdint.h>

#include <algorithm>
#include <cmath>

#include "uncontracted.h"

namespace {

/* Bytes on each rank of a stage [stages]: weights, a token's entries, a row at work, and what does
 * not depend on these; `head`: of one query more on the last stage. */
struct Held {
    int64_t stages;
    const double *weights, *token, *row, *fixed;
    double head;
};

/* What all share; `queries` is infinite where their number is not known. */
struct Room {
    double longest, quantile, queries, most_present, mean_input, std_input, max_input, activation;
    double capacity;
    const double *phases, *present, *reserved, *variance, *max_present;  // by column, of one query
};

struct Found {
    double tokens, bytes, present;
};

Found found_of(const Room &room, const Held &held, int64_t column, double groups, double batch) {
    double own = batch / groups, longest = room.longest;
    double wanted = own * room.reserved[column]
                    + room.quantile * std::sqrt(own * room.variance[column]) + longest;
    double most = std::ceil(own) * room.max_present[column];
    if (std::isfinite(room.queries))
        most = std::min(most, std::ceil(room.queries / std::min(groups, room.queries)));
    double tokens = std::min(std::max(wanted, longest), std::max(most, 1.0) * longest);
    tokens = std::ceil(tokens) * groups;
    double encode = std::ceil(batch / std::min(groups, batch)), decode = own * room.phases[column];
    double rows = encode * room.mean_input + room.activation * room.std_input * std::sqrt(encode);
    rows = std::max(std::min(rows, encode * room.max_input), decode);
    double bytes = 0;
    for (int64_t s = 0; s < held.stages; ++s) {
        double work = rows * held.row[s] + held.fixed[s];
        if (s == held.stages - 1) work += std::max(encode, decode) * held.head;
        bytes = std::max(bytes, held.weights[s] + tokens * held.token[s] + work);
    }
    return {tokens, bytes, batch * room.present[column]};
}

}  // namespace

/* Of configurations [n], `held` that of each one's plan: into found [3, n] tokens of KV, bytes on
 * the fullest rank, and queries present. */
extern "C" void xgpt_rra_held(const Room *room, const Held *const *held, const int64_t *column,
                              const double *groups, const double *batch, int64_t n, double *found) {
    for (int64_t c = 0; c < n; ++c) {
        Found own = found_of(*room, *held[c], column[c], groups[c], batch[c]);
        found[c] = own.tokens, found[n + c] = own.bytes, found[2 * n + c] = own.present;
    }
}

/* Of lines [n]: into `most` the largest batch up to `largest` that there is room for, 0 where there
 * is none; what is needed grows with the batch. */
extern "C" void xgpt_rra_room(const Room *room, const Held *const *held, const int64_t *column,
                              const double *groups, int64_t n, int64_t largest, int64_t *most) {
    for (int64_t c = 0; c < n; ++c) {
        int64_t low = 0, high = largest + 1;
        while (high - low > 1) {
            // sizes act in ratios
            int64_t tried = low < 1 ? 1 : static_cast<int64_t>(std::sqrt(
                static_cast<double>(low) * static_cast<double>(high)));
            tried = std::min(std::max(tried, low + 1), high - 1);
            Found own = found_of(*room, *held[c], column[c], groups[c], static_cast<double>(tried));
            bool has_room = own.bytes <= room->capacity && own.present <= room->most_present;
            (has_room ? low : high) = tried;
        }
        most[c] = low;
    }
}
