/* What decode_attention's kernels share: their arguments, a block's part of the work, and how it
 * ends. Shapes as in native.h. */
#ifndef XGPT_CUDA_DECODE_H
#define XGPT_CUDA_DECODE_H

#include "cuda_elements.h"

namespace xgpt {

struct DecodeAttention {
    void *out;                 // [n, heads, dim]
    const void *query;         // [n, heads, dim], rows query_stride elements apart
    const void *keys, *values; // [num_blocks, kv_heads, block_size, dim]
    const i64 *blocks;         // [n, most_blocks]
    const i64 *lengths;
    const float *bias;         // [heads, bias_width] by distance, the last one's beyond; or null
    float *parts;              // [n, heads, num_parts, dim + 2]: sums, maximum, weight
    i64 query_stride, n, heads, kv_heads, dim, num_blocks, block_size, block_bits, most_blocks,
        bias_width, bias_center, num_parts, is_wide;
    float scale;
};

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr i64 LEAST = 64;  // chosen: keys of a part, if there are as many
constexpr i64 TILE = 16;   // a part begins at a multiple of it

/* A block's part of the work: some heads of a request, and a part of its context. */
struct Work {
    i64 query, kv_head, first_head, heads;  // `heads` of them from first_head on
    i64 length, from, to;                   // of the context, and its part
};

template <int HEADS>
__device__ inline Work work_of(const DecodeAttention &p) {
    const i64 group = p.heads / p.kv_heads, chunks = (group + HEADS - 1) / HEADS;
    const i64 each = (group + chunks - 1) / chunks;  // heads of a block
    Work work;
    const i64 chunk = blockIdx.x % chunks, pair = blockIdx.x / chunks;
    work.query = pair / p.kv_heads;
    work.kv_head = pair % p.kv_heads;
    work.first_head = work.kv_head * group + chunk * each;
    work.heads = min(each, group - chunk * each);
    // a row of a captured batch without a request has length 0 and gets zeros
    const i64 block = p.blocks[work.query * p.most_blocks];
    const bool is_there = block >= 0 && block < p.num_blocks;
    work.length = is_there ? min(p.lengths[work.query], p.most_blocks * p.block_size) : 0;
    const i64 even = max((work.length + p.num_parts - 1) / p.num_parts, LEAST);
    const i64 part = (even + TILE - 1) / TILE * TILE;
    work.from = min(blockIdx.y * part, work.length);
    work.to = min(work.from + part, work.length);
    return work;
}

/* Merges the softmaxes of a block's warps, in shared memory [WARPS, work.heads, dim + 2] (sums,
 * then maximum and weight). Writes the heads' rows, whole or as parts. */
template <typename T>
__device__ inline void merge_warps(const DecodeAttention &p, const Work &work, const float *shared) {
    const i64 width = p.dim + 2;
    __syncthreads();
    for (i64 at = threadIdx.x; at < work.heads * p.dim; at += THREADS) {
        const i64 h = at / p.dim, e = at % p.dim;
        float most = minus_infinity(), weight = 0.f, sum = 0.f;
        for (int w = 0; w < WARPS; ++w)
            most = fmaxf(most, shared[(w * work.heads + h) * width + p.dim]);
        for (int w = 0; w < WARPS; ++w) {
            const float *row = shared + (w * work.heads + h) * width;
            const float factor = rescale(row[p.dim], most);
            weight += row[p.dim + 1] * factor;
            sum += row[e] * factor;
        }
        const i64 out = work.query * p.heads + work.first_head + h;
        if (p.num_parts == 1) {
            from_float(weight > 0.f ? sum / weight : 0.f, static_cast<T *>(p.out) + out * p.dim + e);
            continue;
        }
        float *part = p.parts + (out * p.num_parts + blockIdx.y) * width;
        part[e] = sum;
        if (e == 0) {
            part[p.dim] = most;
            part[p.dim + 1] = weight;
        }
    }
}

}  // namespace xgpt
#endif
