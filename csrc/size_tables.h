/* Step times out of tables over sizes (xsimulator/step_table.py). The same sums as arrays make. */
#pragma once

#include <stdint.h>

#include <algorithm>
#include <cstring>

/* Tables of step times over sizes whose nodes divide each octave evenly (xsimulator/step_table.py:
 * SizeTable). nodes, rises[columns][width]: seconds at each node, and a unit of size more from there;
 * sizes[n], of which those below `least` count as that; a node's number is the size's bits shifted
 * right, less `first`. Into out[columns][n], unless a size lies beyond the table. Returns the highest
 * node that is asked for. */
extern "C" int64_t xgpt_lines(const double *nodes, const double *rises, int64_t columns,
                              int64_t width, const double *sizes, int64_t n, double least,
                              int64_t shift, int64_t first, double *out) {
    constexpr int64_t PART = 256;
    auto node_of = [&](double size, double *beyond) {
        int64_t bits;
        size = size >= least || size != size ? size : least;
        std::memcpy(&bits, &size, sizeof bits);
        bits >>= shift;
        int64_t before = static_cast<int64_t>(static_cast<uint64_t>(bits) << shift);
        double node;
        std::memcpy(&node, &before, sizeof node);
        *beyond = size - node;
        return bits - first;
    };
    int64_t top = 0, index[PART];
    double beyond[PART];
    for (int64_t i = 0; i < n; ++i) top = std::max(top, node_of(sizes[i], beyond));
    if (top >= width) return top;
    for (int64_t begin = 0; begin < n; begin += PART) {
        const int64_t count = std::min(PART, n - begin);
        for (int64_t i = 0; i < count; ++i) index[i] = node_of(sizes[begin + i], beyond + i);
        for (int64_t c = 0; c < columns; ++c) {
            const double *node = nodes + c * width, *rise = rises + c * width;
            double *seconds = out + c * n + begin;
            for (int64_t i = 0; i < count; ++i)
                seconds[i] = rise[index[i]] * beyond[i] + node[index[i]];
        }
    }
    return top;
}
