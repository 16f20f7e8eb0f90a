/* Attention: what the checks of decode_attention.cpp and encode_attention.cpp have in common. */
#ifndef XGPT_ATTENTION_H
#define XGPT_ATTENTION_H

#include <algorithm>
#include <cmath>
#include <vector>

#include "native.h"
#include "threads.h"

namespace xgpt {

/* Where the entries of queries, or of spans, lie: arrays [num_blocks, k, block_size, d], and the
 * blocks of each [n, width]. */
struct Blocks {
    int64_t num_blocks, block_size;
    const int64_t *table;
    int64_t width;

    int64_t of(int64_t i, int64_t position) const {
        return table[i * width + position / block_size];
    }
    /* XGPT_OK where query i has room for `length` entries, in blocks that are there. */
    int check(int64_t i, int64_t length) const {
        if (length > block_size * width) return XGPT_WRONG_LENGTH;
        for (int64_t at = 0; at < length; at += block_size)
            if (of(i, at) < 0 || of(i, at) >= num_blocks) return XGPT_WRONG_SLOT;
        return XGPT_OK;
    }
    bool wrong() const { return width < 1 || block_size < 0 || (width > 1 && odd()); }
    /* Keys are taken a register at a time, of 16 at most: none of those divides two blocks. */
    bool odd() const { return block_size < 16 || (block_size & (block_size - 1)) != 0; }

    /* body(block, offset, first, count): the entries from..to-1 of query i, block by block: `count`
     * of them from `offset` of the block on, the first of which is the query's `first`. */
    template <typename Body>
    void each(int64_t i, int64_t from, int64_t to, Body &&body) const {
        for (int64_t at = from; at < to;) {
            const int64_t offset = at % block_size;
            const int64_t count = std::min(block_size - offset, to - at);
            body(of(i, at), offset, at, count);
            at += count;
        }
    }
};

inline bool wrong_dtype(int dtype) { return dtype != XGPT_FLOAT32 && dtype != XGPT_BFLOAT16; }

inline bool wrong_heads(int64_t heads, int64_t kv_heads, int64_t dim) {
    return heads < 1 || kv_heads < 1 || dim < 1 || heads % kv_heads != 0;
}

/* Is every distance low..high inside the bias? */
inline bool wrong_bias(const float *bias, int64_t low, int64_t high, int64_t width, int64_t center) {
    return bias && (low + center < 0 || high + center >= width);
}

}  // namespace xgpt
#endif
