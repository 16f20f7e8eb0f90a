/* Bounds of WAA's boxes, each under one division of the devices (xsimulator/policies/waa:
 * plan_bounds.py and chunk_bounds.py, which say why), of any divisions at once. The logarithm is the
 * C library's: bounds differ from those by arrays in their last digits. */
#include <cfloat>

#include "planning_rra.h"

using namespace xgpt_planning;

namespace {

/* What all pairs of a call share. */
struct WaaFacts {
    double outputs, iterations, mean_input, waited;
    double most_latency_s;  // with its tolerance
    double tolerance, accuracy, log_ratio;
    double many_groups, full, least_share;  // few_each.py
    const double *least_shares;             // at `sizes` of queries a group, evenly up to `full`
    int64_t sizes;
    int64_t is_modest;
};

/* Ranges of boxes. */
struct Boxes {
    const int64_t *least, *most, *fewest, *highest, *chunk, *largest_chunk;
};

/* A decode pool whose steps take chunks (ChunkedPoolBounds). */
struct Pool {
    int64_t kinds, last;              // the kind that has the head
    const double *number, *layers;    // [kinds] stages, and layers of one
    const double *encoded_s;          // [kinds] attention of a query's encoding in a layer
    const double *const *attention;   // [kinds] of a row, by place
    const int64_t *places;            // [kinds] of them
    Table encode, ends, decode;
};

/* PlanBounds: by batch, and by rows of decode steps. */
struct Division {
    const double *most_rate, *least_rate, *least_encode, *least_through;
    const double *slowest, *through, *sizes;  // [rows]; sizes of these, and infinity
    int64_t rows;
    double most_in_system;
    const Pool *pool;
};

/* A size that the tables of steps, or of attention, lack; or one that they do not answer. */
enum Lack : int64_t { STEPS, ATTENTION, UNSURE };

struct Lacking {
    Lack what;
    double size;
};

double finite(double seconds) {
    if (!std::isfinite(seconds)) throw Lacking{UNSURE, 0};
    return seconds;
}

double in_table(const Table &table, double size, int64_t column) {
    Place place(finite(size));
    if (place.index >= table.count) throw Lacking{STEPS, size};
    return finite(place.of(table, column));
}

struct Pair {
    const WaaFacts &facts;
    const Division &division;
    double least, most, fewest, highest, chunk, largest_chunk;
    double least_rate, most_rate, encode_s;

    double at(const double *table, double rows) const {
        double position = std::log(std::max(rows, 1.0)) / facts.log_ratio;
        int64_t index = std::min<int64_t>(static_cast<int64_t>(position), division.rows - 2);
        double left = finite(table[index]), right = finite(table[index + 1]);
        return left + std::min(position - static_cast<double>(index), 1.0) * (right - left);
    }
    /* few_each.py */
    double least_busy(double decoding) const {
        double each = decoding / fewest;
        if (highest < facts.many_groups || each >= facts.full)
            return std::min(fewest, std::max(decoding, 1.0));
        double nodes = static_cast<double>(facts.sizes) / facts.full;
        double place = std::max(each * nodes - 1, 0.0);
        int64_t index = std::min<int64_t>(static_cast<int64_t>(place), facts.sizes - 2);
        double left = facts.least_shares[index], right = facts.least_shares[index + 1];
        double share = left + (place - static_cast<double>(index)) * (right - left);
        return std::max(fewest * share, 1.0);
    }
    /* PlanBounds._iteration_s */
    double plain_s(double decoding) const {
        double steps = least_busy(finite(decoding));
        double slowest = at(division.slowest, decoding / steps);
        double through = at(division.through, decoding / highest);
        return std::max(steps * slowest, through);
    }
    double longest_s() const {
        if (facts.waited <= 0) return INFINITY;
        bool is_timed = std::isfinite(encode_s);
        double left_s = facts.most_latency_s - (is_timed ? encode_s : 0.0);
        return std::max(is_timed ? left_s / facts.waited : 0.0, 0.0);
    }
    double size_within(const double *table, double seconds) const {
        return division.sizes[std::upper_bound(table, table + division.rows, seconds) - table];
    }
    double most_decoding(double iteration_s) const {
        double in_turn = size_within(division.slowest, iteration_s / fewest);
        if (highest >= facts.many_groups && in_turn < facts.full)
            in_turn = std::min(facts.full, size_within(
                division.slowest, iteration_s / (facts.least_share * fewest)));
        return std::min(fewest * in_turn, highest * size_within(division.through, iteration_s));
    }
    /* pool_times.py: root, of one. */
    double fewest_without_chunks() const {
        double wanted = least * facts.outputs, rate = least_rate * facts.iterations;
        auto excess = [&](double decoding) { return rate * plain_s(decoding) - decoding; };
        double of_high = excess(wanted);
        if (of_high >= 0) return wanted;
        double low = 0, high = wanted, of_low = std::max(excess(0), DBL_MIN), between = high;
        bool was_above = false, was_below = false;
        for (int step = 0; step < 100; ++step) {
            between = high + (high - low) * of_high / (of_low - of_high);
            double found = excess(between);
            if (std::fabs(found) <= facts.accuracy * between) break;
            if (found < 0) {
                of_low = (was_above ? 0.5 : 1.0) * of_low;
                of_high = found, high = between, was_above = true, was_below = false;
            } else {
                of_high = (was_below ? 0.5 : 1.0) * of_high;
                of_low = found, low = between, was_above = false, was_below = true;
            }
        }
        return (1 - 2 * facts.accuracy) * between;
    }

    double attention_s(int64_t kind, double rows) const {
        const Pool &pool = *division.pool;
        double place = std::ceil(std::log(rows) / facts.log_ratio - 1e-9);
        if (place >= static_cast<double>(pool.places[kind])) throw Lacking{ATTENTION, rows};
        return finite(pool.attention[kind][static_cast<int64_t>(std::max(place, 0.0))]);
    }
    /* ChunkedPoolBounds._steps_s; `is_plain`: steps that encode nothing are among them. */
    double step_s(int64_t kind, double rows, double chunk_size, bool is_plain) const {
        const Pool &pool = *division.pool;
        double mixed = in_table(pool.encode, rows + chunk_size, kind);
        if (kind == pool.last) mixed += in_table(pool.ends, rows, 0);
        if (is_plain || chunk_size == 0)
            mixed = std::min(mixed, in_table(pool.decode, rows, kind));
        double encoded = chunk_size / facts.mean_input;
        return mixed + pool.layers[kind] * (rows * attention_s(kind, rows)
                                            + encoded * pool.encoded_s[kind]);
    }
    double iteration_s(double decoding, double chunk_size, bool is_plain) const {
        double steps = least_busy(decoding), slowest = -INFINITY, through = 0;
        double in_turn = std::max(decoding / steps, 1.0), at_once = std::max(decoding / highest, 1.0);
        for (int64_t kind = 0; kind < division.pool->kinds; ++kind) {
            slowest = std::max(slowest, step_s(kind, in_turn, chunk_size, is_plain));
            through += division.pool->number[kind] * step_s(kind, at_once, chunk_size, is_plain);
        }
        return std::max(steps * slowest, through);
    }
    double by_work(double decoding, double chunk_size) const {
        const Pool &pool = *division.pool;
        double rows = std::max(decoding / least_busy(decoding), 1.0), limit = INFINITY;
        double step = rows + chunk_size, heads = rows + chunk_size / facts.mean_input;
        double head = in_table(pool.ends, heads, 0) / heads;
        for (int64_t kind = 0; kind < pool.kinds; ++kind) {
            double own = in_table(pool.encode, step, kind) / step, decoded = own;
            double encoded = facts.mean_input * own + pool.layers[kind] * pool.encoded_s[kind];
            if (kind == pool.last) decoded += head, encoded += head;
            double plain_s = in_table(pool.decode, rows, kind);
            decoded = facts.iterations * (std::min(decoded, plain_s / rows)
                                          + pool.layers[kind] * attention_s(kind, rows));
            limit = std::min(limit, (1 + most_rate * encoded) / (decoded + encoded));
        }
        return limit;
    }
    double by_chunks(double decoding, double chunk_size, double brought) const {
        double rows = std::max(decoding / highest, 1.0), slowest = -INFINITY, through = 0;
        for (int64_t kind = 0; kind < division.pool->kinds; ++kind) {
            double seconds = step_s(kind, rows, chunk_size, false);
            slowest = std::max(slowest, seconds);
            through += division.pool->number[kind] * seconds;
        }
        return most_rate + brought / std::max(slowest, through / highest);
    }
    double fewest_with_chunks() const {
        double planned = least * facts.outputs, decoding = 0;
        for (int step = 0; step < 5; ++step) {
            double every_s = iteration_s(decoding, chunk, false) / (1 + facts.tolerance);
            decoding = std::min(facts.iterations * (
                least_rate * every_s + fewest * chunk / facts.mean_input), planned);
        }
        return decoding;
    }
    /* ChunkedPoolBounds.limits: (most throughput, fewest that decode, shortest iteration). */
    void with_chunks(double longest_s, double *found) const {
        double size = largest_chunk, iterations = facts.iterations, mean = facts.mean_input;
        double brought = size / mean;
        double decoding = std::min(std::min(most * facts.outputs, division.most_in_system),
                                   iterations * (most_rate * longest_s + highest * brought));
        if (facts.is_modest) {
            size = std::min(size, decoding * mean / (iterations * fewest));
            brought = size / mean;
        }
        double limit = by_work(decoding, size), few = fewest_with_chunks();
        if (facts.is_modest) few = std::max(few, iterations * fewest * chunk / mean);
        limit = std::min(limit, by_chunks(few, size, brought));
        limit = std::max(limit, most_rate) * (1 + facts.tolerance);
        limit = std::min(limit, decoding * (1 + facts.tolerance)
                                    / (iterations * iteration_s(decoding, 0, true)));
        found[0] = limit, found[1] = few;
        found[2] = std::max(iteration_s(few, 0, true) / (1 + facts.tolerance),
                            few / (iterations * limit));
    }
    /* PlanBounds.bound, but for memory: with_chunks' three, and waited-for seconds. */
    void bound(double *found) const {
        double longest = longest_s();
        if (chunk > 0) {
            with_chunks(longest, found);
        } else {
            double largest = std::min(most * facts.outputs, most_decoding(longest));
            double absorbed = largest / (facts.iterations * plain_s(largest));
            found[0] = std::min(most_rate, absorbed);
            found[1] = fewest_without_chunks();
            found[2] = plain_s(found[1]);
        }
        found[3] = encode_s + facts.waited * found[2];
    }
};

Pair pair_of(const WaaFacts &facts, const Division &division, const Boxes &boxes, int64_t box) {
    auto real = [box](const int64_t *values) { return static_cast<double>(values[box]); };
    int64_t least = boxes.least[box], most = boxes.most[box];
    return {facts, division, real(boxes.least), real(boxes.most), real(boxes.fewest),
            real(boxes.highest), real(boxes.chunk), real(boxes.largest_chunk),
            division.least_rate[least], division.most_rate[most], division.least_encode[least]};
}

}  // namespace

/* Into found [5][n], of each box from `begin` on under its division: most throughput, fewest that
 * decode, the shortest iteration, least latency and seconds until the first token; is_sure [n]: 0
 * where a table does not answer, or what comes out is no number. Returns the first box for which a
 * table has too few sizes, with the kind of table in lack[0] and the size in size[0], or else n. */
extern "C" int64_t xgpt_waa_bounds(const WaaFacts *facts, const Boxes *boxes,
                                   const Division *const *divisions, int64_t begin, int64_t n,
                                   double *found, int64_t *is_sure, int64_t *lack, double *size) {
    for (int64_t at = begin; at < n; ++at) {
        double own[4] = {0, 0, 0, 0};
        is_sure[at] = 1;
        try {
            pair_of(*facts, *divisions[at], *boxes, at).bound(own);
        } catch (const Lacking &lacking) {
            if (lacking.what != UNSURE) {
                *lack = lacking.what, *size = lacking.size;
                return at;
            }
            is_sure[at] = 0;
        }
        for (int i = 0; i < 4; ++i) {
            if (std::isnan(own[i])) is_sure[at] = 0;
            found[i * n + at] = own[i];
        }
        found[4 * n + at] = divisions[at]->least_through[boxes->least[at]];
    }
    return n;
}
