/* Seconds of a step in each stage of a pool (StepClock.seconds of
 * xsimulator/replay/step_clock.py): the same sums in the same order, from the same tables.
 * Python holds the tables, and fetches a block of rows when one of them is first needed. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "uncontracted.h"

namespace xgpt_times {

/* Address of a block of a table; nullptr if it is not available. */
using Fetch = const double *(*)(int64_t table, int64_t block);

/* Something lies beyond the tables, or is not available: Python must compute it. */
struct Stopped {};

/* A table's rows of `width` numbers, `size` of them in a block. */
class Blocks {
public:
    Blocks(Fetch fetch, int64_t table, int64_t size, int64_t width)
        : fetch_(fetch), table_(table), size_(size), width_(width) {}
    const double *row(int64_t row) {
        const size_t block = static_cast<size_t>(row / size_);
        if (block >= blocks_.size()) blocks_.resize(block + 1);
        if (!blocks_[block]) blocks_[block] = fetch_(table_, static_cast<int64_t>(block));
        if (!blocks_[block]) throw Stopped();
        return blocks_[block] + row % size_ * width_;
    }

private:
    Fetch fetch_;
    int64_t table_, size_, width_;
    std::vector<const double *> blocks_;
};

/* See StepSizes. A span: first token, tokens. */
struct Sizes {
    std::vector<std::pair<int64_t, int64_t>> spans;
    int64_t tokens = 0, encoded = 0, decoded = 0, handed = 0;
    double context = 0.0, longest = 0.0, moved = 0.0;

    void clear() {
        spans.clear();
        tokens = encoded = decoded = handed = 0;
        context = longest = moved = 0.0;
    }
};

/* numbers[11 + 4 stages]: numbers of stages, of degrees, of context nodes; whether the longest
 * context counts; whether encoder and decoder layers share no pass; numbers of row sizes, of
 * whole-number ones, of rows in a block, of requests in a block; most inputs together; tokens of
 * the longest input. Then by stage: decoder layers, index of their degree, encoder layers, index
 * of theirs. figures: overhead of a pass, row sizes, context nodes. */
class Clock {
public:
    Clock(Fetch fetch, const int64_t *numbers, const double *figures)
        : stages(numbers[0]), degrees_(numbers[1]), num_nodes_(numbers[2]), is_padded_(numbers[3]),
          is_apart_(numbers[4]), num_sizes_(numbers[5]), dense_(numbers[6]), together_(numbers[9]),
          most_tokens_(numbers[10]), layers_(numbers + 11), overhead_(figures[0]),
          row_sizes_(figures + 1), nodes_(figures + 1 + numbers[5]) {
        for (int64_t table = 0; table < INPUTS; ++table)
            tables_.emplace_back(fetch, table, numbers[7], table < HEADS ? stages : 1);
        tables_.emplace_back(fetch, INPUTS, 1, degrees_ * (most_tokens_ + 1));
        for (int64_t grid = 0; grid < 2 * degrees_; ++grid)
            tables_.emplace_back(fetch, GRIDS + grid, numbers[8], num_nodes_);
        each_.resize(static_cast<size_t>(degrees_));
        apart_.resize(static_cast<size_t>(stages));
    }
    const int64_t stages;

    bool is_padded() const { return is_padded_ != 0; }
    /* Into total[stages]. */
    void seconds(const Sizes &sizes, double *total) {
        if (is_apart_ && sizes.tokens && sizes.decoded) {
            Sizes decoding = sizes, encoding = sizes;
            decoding.spans.clear();
            decoding.tokens = decoding.encoded = 0;
            encoding.decoded = encoding.handed = 0;
            encoding.moved = 0.0;
            one_pass(decoding, total);
            one_pass(encoding, apart_.data());
            for (int64_t s = 0; s < stages; ++s) total[s] = total[s] + apart_[s] - overhead_;
        } else {
            one_pass(sizes, total);
        }
        for (int64_t s = 0; s < stages; ++s)
            if (std::isnan(total[s])) throw Stopped();  // NaN times have no common order of events
    }

private:
    enum Table : int64_t { DECODES, ENCODES, CROSS, HEADS, ENDS, INPUTS, GRIDS };
    int64_t degrees_, num_nodes_, is_padded_, is_apart_, num_sizes_, dense_, together_, most_tokens_;
    const int64_t *layers_;
    double overhead_;
    const double *row_sizes_, *nodes_;
    std::vector<Blocks> tables_;
    std::vector<double> each_, apart_;

    void one_pass(const Sizes &sizes, double *total) {
        std::fill(total, total + stages, 0.0);
        if (sizes.tokens) add_rows(ENCODES, sizes.tokens + sizes.decoded, total, stages);
        else add_rows(DECODES, sizes.decoded, total, stages);
        if (sizes.tokens) {
            find_attention(sizes.spans);
            add_layers(2, total);
        }
        if (sizes.decoded) {
            const double context = is_padded_ ? sizes.longest : sizes.context;
            for (int64_t d = 0; d < degrees_; ++d) each_[d] = at(GRIDS + d, sizes.decoded, context);
            if (sizes.moved >= 0.5) {
                const int64_t moved = std::max<int64_t>(std::llrint(sizes.moved), 1);
                for (int64_t d = 0; d < degrees_; ++d)
                    each_[d] += at(GRIDS + degrees_ + d, moved, context);
            }
            add_layers(0, total);
        }
        if (sizes.handed && is_apart_) add_rows(CROSS, sizes.handed, total, stages);
        const int64_t heads = sizes.decoded + (is_apart_ ? 0 : sizes.encoded);
        if (heads) add_rows(sizes.tokens ? ENDS : HEADS, heads, total + stages - 1, 1);
    }
    /* _RowTimes.at */
    void add_rows(Table table, int64_t rows, double *total, int64_t columns) {
        Blocks &blocks = tables_[table];
        if (rows <= dense_) {
            const double *seconds = blocks.row(rows);
            for (int64_t c = 0; c < columns; ++c) total[c] += seconds[c];
            return;
        }
        const double asked = static_cast<double>(rows), *end = row_sizes_ + num_sizes_;
        const double *above = std::upper_bound(row_sizes_ + dense_, end, asked);
        if (above == end) throw Stopped();
        const double share = (asked - above[-1]) / (*above - above[-1]);
        const int64_t place = above - row_sizes_;
        const double *low = blocks.row(place - 1), *high = blocks.row(place);
        for (int64_t c = 0; c < columns; ++c)
            total[c] += high[c] < HUGE_VAL ? low[c] + share * (high[c] - low[c]) : high[c];
    }
    /* layers: decoder (0) or encoder (2), as in `numbers`. */
    void add_layers(int64_t kind, double *total) const {
        const int64_t *counts = layers_ + kind * stages, *places = counts + stages;
        for (int64_t s = 0; s < stages; ++s)
            total[s] += static_cast<double>(counts[s]) * each_[places[s]];
    }
    /* _Inputs.attention_s */
    void find_attention(const std::vector<std::pair<int64_t, int64_t>> &spans) {
        const int64_t count = static_cast<int64_t>(spans.size());
        const double *table = tables_[INPUTS].row(std::min(count, together_));
        for (int64_t d = 0; d < degrees_; ++d, table += most_tokens_ + 1) {
            double all = 0.0;
            for (const auto &[first, tokens] : spans) {
                if (first + tokens > most_tokens_) throw Stopped();
                const double end = table[first + tokens];
                all += end < HUGE_VAL ? end - table[first] : end;
            }
            each_[d] = all;
        }
    }
    /* _GridTimes.at */
    double at(int64_t table, int64_t queries, double context) {
        const double *row = tables_[table].row(queries);
        int64_t index = std::upper_bound(nodes_, nodes_ + num_nodes_, context) - nodes_ - 1;
        index = std::min(index, num_nodes_ - 2);
        const double left = row[index], right = row[index + 1], low = nodes_[index];
        if (right == HUGE_VAL) return right;
        return left + (context - low) / (nodes_[index + 1] - low) * (right - left);
    }
};

}  // namespace xgpt_times
