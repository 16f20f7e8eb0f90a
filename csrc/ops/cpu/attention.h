/* Attention: checks shared by decode_attention.cpp and encode_attention.cpp. */
#ifndef XGPT_ATTENTION_H
#define XGPT_ATTENTION_H

#include <algorithm>
#include <cmath>
#include <vector>

#include "native.h"
#include "threads.h"

namespace xgpt {

/* Where KV of requests, or of spans, lies: arrays [num_blocks, k, block_size, d], and the blocks
 * of each [n, width]. */
struct Blocks {
    int64_t num_blocks, block_size;
    const int64_t *table;
    int64_t width;

    int64_t of(int64_t i, int64_t position) const {
        return table[i * width + position / block_size];
    }
    /* XGPT_OK if request i has room for `length` tokens, in existing blocks. */
    int check(int64_t i, int64_t length) const {
        if (length > block_size * width) return XGPT_WRONG_LENGTH;
        for (int64_t at = 0; at < length; at += block_size)
            if (of(i, at) < 0 || of(i, at) >= num_blocks) return XGPT_WRONG_SLOT;
        return XGPT_OK;
    }
    bool wrong() const { return width < 1 || block_size < 0 || (width > 1 && odd()); }
    /* Whether a register of keys, 16 at most, could reach into two blocks. */
    bool odd() const { return block_size < 16 || (block_size & (block_size - 1)) != 0; }

    /* Calls body(block, offset, first, count) for tokens from..to-1 of request i, block by
     * block: `count` of them from `offset` of the block on; `first` is the request's token
     * number. */
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

/* Whether a distance in low..high lies outside the bias. */
inline bool wrong_bias(const float *bias, int64_t low, int64_t high, int64_t width, int64_t center) {
    return bias && (low + center < 0 || high + center >= width);
}

}  // namespace xgpt
#endif
