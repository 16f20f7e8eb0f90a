/* What encode_attention's kernels share: their arguments, and a block's span. Shapes as in
 * native.h. */
#ifndef XGPT_CUDA_ENCODE_H
#define XGPT_CUDA_ENCODE_H

#include "cuda_elements.h"

namespace xgpt {

struct EncodeAttention {
    void *out;                  // [T, heads, dim]
    const void *query;          // [T, heads, dim], rows query_stride elements apart
    const void *keys, *values;  // [num_blocks, kv_heads, block_size, dim]
    const i64 *blocks;                  // [spans, most_blocks]
    const i64 *first, *tokens_of;       // [spans] start of each span, and its tokens
    const i64 *starts;                  // [spans] packed tokens before it
    i64 query_stride, spans, heads, kv_heads, dim, num_blocks, block_size, block_bits, most_blocks,
        is_wide;
    float scale;
};

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;

/* A span of a request's input: `tokens` of it, behind `before` tokens in the cache. */
struct OwnSpan {
    i64 tokens, before, start;  // `start`: packed tokens before it
    const i64 *blocks;
    bool is_there;  // whether it exists, with all its tokens in the cache
};

__device__ inline OwnSpan span_of(const EncodeAttention &p, i64 span) {
    const i64 *blocks = p.blocks + span * p.most_blocks;
    const i64 tokens = p.tokens_of[span], before = p.first[span];
    return {tokens, before, p.starts[span], blocks,
            blocks[0] >= 0 && blocks[0] < p.num_blocks && before >= 0 &&
                before + tokens <= p.most_blocks * p.block_size};
}

}  // namespace xgpt
#endif
