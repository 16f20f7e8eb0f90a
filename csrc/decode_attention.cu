/* One new token of each of n queries against its own context; shapes as in native.h.
 *
 * A block of 128 threads takes one query, up to HEADS of the heads that read one KV head, and one
 * part of the context. In a warp a key belongs to as many neighbouring lanes as have 8 elements of
 * the head each (a power of two); every such team of lanes keeps a softmax of its own over the
 * keys it met, and they are merged at the end: over the warp by shuffles, over the block in shared
 * memory, over the parts of the context by a second kernel.
 */
#include "cuda_elements.h"

namespace xgpt {

struct DecodeAttention {
    void *out;                 // [n, heads, dim]
    const void *query;         // [n, heads, dim], rows query_stride elements apart
    const void *keys, *values; // [num_blocks, kv_heads, block_size, dim]
    const i64 *blocks;         // [n, most_blocks]
    const i64 *lengths;
    const float *bias;         // [heads, bias_width] by distance, the farthest's beyond; or null
    float *parts;              // [n, heads, num_parts, dim + 2]: sums, maximum, weight
    i64 query_stride, n, heads, kv_heads, dim, num_blocks, block_size, block_bits, most_blocks,
        bias_width, bias_center, num_parts, is_wide;
    float scale;
};

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int KEYS = 4;  // of a team, whose loads are under way at once
constexpr i64 LEAST = 64;  // keys of a part, where there are as many
constexpr float LOG2_E = 1.4426950408889634f;

/* A softmax under way, of one head: `sum` of values, each times 2^(score - most); `weight` is the
 * sum of those factors. `most` is -inf before the first key. */
struct Softmax {
    float sum[8];
    float most, weight;
};

/* What a sum is to be multiplied by when its maximum rises from `old` to `now`. */
__device__ inline float rescale(float old, float now) {
    return old == minus_infinity() ? 0.f : exp2f(old - now);
}

__device__ inline void merge(Softmax &own, int offset) {
    const float other_most = __shfl_xor_sync(ALL, own.most, offset);
    const float other_weight = __shfl_xor_sync(ALL, own.weight, offset);
    const float now = fmaxf(own.most, other_most);
    const float factor = rescale(own.most, now), other_factor = rescale(other_most, now);
    own.most = now;
    own.weight = own.weight * factor + other_weight * other_factor;
#pragma unroll
    for (int e = 0; e < 8; ++e)
        own.sum[e] = own.sum[e] * factor + __shfl_xor_sync(ALL, own.sum[e], offset) * other_factor;
}

/* Which part of which head's context a block works on. */
struct Work {
    i64 query, kv_head, first_head, heads;  // `heads` of them from first_head on
    i64 length, from, to;                   // of the context; the part of it
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
    // a row of a captured batch that holds no query has length 0: it gets zeros
    const i64 block = p.blocks[work.query * p.most_blocks];
    const bool is_there = block >= 0 && block < p.num_blocks;
    work.length = is_there ? min(p.lengths[work.query], p.most_blocks * p.block_size) : 0;
    const i64 part = max((work.length + p.num_parts - 1) / p.num_parts, LEAST);
    work.from = min(blockIdx.y * part, work.length);
    work.to = min(work.from + part, work.length);
    return work;
}

/* Scores of KEYS keys from `key` on, `step` apart, in powers of two; -inf beyond the part. */
template <typename T, int HEADS>
__device__ inline void score(const DecodeAttention &p, const Work &work, i64 key, i64 step,
                             int team, const float (&query)[HEADS][8],
                             const Eight<T> (&rows)[KEYS], float (&scores)[HEADS][KEYS]) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
            float dot = 0.f;
#pragma unroll
            for (int e = 0; e < 8; ++e) dot += query[h][e] * to_float(rows[u].at[e]);
            for (int offset = team / 2; offset > 0; offset /= 2)
                dot += __shfl_xor_sync(ALL, dot, offset);
            const i64 at = key + u * step;
            if (p.bias && h < work.heads && at < work.to) {
                const i64 distance = max(p.bias_center + at - (work.length - 1), i64(0));
                dot += LOG2_E * p.bias[(work.first_head + h) * p.bias_width + distance];
            }
            scores[h][u] = at < work.to ? dot : minus_infinity();
        }
    }
}

/* The scores become the keys' factors. */
template <int HEADS>
__device__ inline void softmax_step(float (&scores)[HEADS][KEYS], Softmax (&state)[HEADS]) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        Softmax &own = state[h];
        float now = own.most;
#pragma unroll
        for (int u = 0; u < KEYS; ++u) now = fmaxf(now, scores[h][u]);
        const float factor = rescale(own.most, now);
        own.weight *= factor;
#pragma unroll
        for (int e = 0; e < 8; ++e) own.sum[e] *= factor;
        own.most = now;
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
            scores[h][u] = rescale(scores[h][u], now);
            own.weight += scores[h][u];
        }
    }
}

/* Merges the block's softmaxes, the warps' in shared memory [WARPS, HEADS, dim + 2], and writes the
 * heads' rows: whole, or as a part. */
template <typename T, int HEADS>
__device__ inline void finish(const DecodeAttention &p, const Work &work, int team,
                              Softmax (&state)[HEADS]) {
    XGPT_SHARED(shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const i64 width = p.dim + 2;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        for (int offset = team; offset < WARP; offset *= 2) merge(state[h], offset);
        float *row = shared + (warp * HEADS + h) * width;
        if (lane < team) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (lane * 8 + e < p.dim) row[lane * 8 + e] = state[h].sum[e];
        }
        if (lane == 0) {
            row[p.dim] = state[h].most;
            row[p.dim + 1] = state[h].weight;
        }
    }
    __syncthreads();
    for (i64 at = threadIdx.x; at < work.heads * p.dim; at += THREADS) {
        const i64 h = at / p.dim, e = at % p.dim;
        float most = minus_infinity(), weight = 0.f, sum = 0.f;
        for (int w = 0; w < WARPS; ++w) most = fmaxf(most, shared[(w * HEADS + h) * width + p.dim]);
        for (int w = 0; w < WARPS; ++w) {
            const float *row = shared + (w * HEADS + h) * width;
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

/* Grid: (n x kv_heads x chunks of a group, parts). */
template <typename T, int HEADS>
__device__ inline void decode_attention(const DecodeAttention &p) {
    int team = 1;  // lanes that share a key
    while (team * 8 < p.dim) team *= 2;
    const Work work = work_of<HEADS>(p);
    const i64 place = threadIdx.x / team, step = THREADS / team, from = threadIdx.x % team * 8;
    float query[HEADS][8];
    Softmax state[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const T *row = static_cast<const T *>(p.query) + work.query * p.query_stride +
                       (work.first_head + h) * p.dim;
        const Eight<T> eight = load_eight(row, from, h < work.heads ? p.dim : 0, p.is_wide);
        state[h].most = minus_infinity();
        state[h].weight = 0.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            query[h][e] = to_float(eight.at[e]) * (p.scale * LOG2_E);
            state[h].sum[e] = 0.f;
        }
    }
    const Entries entries = {p.blocks + work.query * p.most_blocks, p.kv_heads, work.kv_head,
                             p.block_size, p.block_bits, p.dim};
    const T *keys = static_cast<const T *>(p.keys), *values = static_cast<const T *>(p.values);
    // as many rounds for every team: a shuffle is of whole warps
    for (i64 start = work.from; start < work.to; start += step * KEYS) {
        const i64 key = start + place;
        Eight<T> key_rows[KEYS], value_rows[KEYS];
#pragma unroll
        for (int u = 0; u < KEYS; ++u) {
            const i64 at = key + u * step, size = at < work.to ? p.dim : 0;
            const i64 row = entries.offset(min(at, work.to - 1));
            key_rows[u] = load_eight(keys + row, from, size, p.is_wide);
            value_rows[u] = load_eight(values + row, from, size, p.is_wide);
        }
        float scores[HEADS][KEYS];
        score(p, work, key, step, team, query, key_rows, scores);
        softmax_step(scores, state);
#pragma unroll
        for (int u = 0; u < KEYS; ++u)
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float value = to_float(value_rows[u].at[e]);
#pragma unroll
                for (int h = 0; h < HEADS; ++h) state[h].sum[e] += scores[h][u] * value;
            }
    }
    finish<T>(p, work, team, state);
}

template <typename T>
__device__ inline void decode_attention_1(const DecodeAttention &p) { decode_attention<T, 1>(p); }
template <typename T>
__device__ inline void decode_attention_2(const DecodeAttention &p) { decode_attention<T, 2>(p); }
template <typename T>
__device__ inline void decode_attention_4(const DecodeAttention &p) { decode_attention<T, 4>(p); }

/* The parts of the contexts put together. Grid: (n x heads). */
template <typename T>
__device__ inline void combine_parts(const DecodeAttention &p) {
    const i64 width = p.dim + 2;
    const float *parts = p.parts + blockIdx.x * p.num_parts * width;
    float most = minus_infinity(), weight = 0.f;
    for (i64 i = 0; i < p.num_parts; ++i) most = fmaxf(most, parts[i * width + p.dim]);
    for (i64 i = 0; i < p.num_parts; ++i)
        weight += parts[i * width + p.dim + 1] * rescale(parts[i * width + p.dim], most);
    for (i64 e = threadIdx.x; e < p.dim; e += blockDim.x) {
        float sum = 0.f;
        for (i64 i = 0; i < p.num_parts; ++i)
            sum += parts[i * width + e] * rescale(parts[i * width + p.dim], most);
        from_float(weight > 0.f ? sum / weight : 0.f,
                   static_cast<T *>(p.out) + blockIdx.x * p.dim + e);
    }
}

}  // namespace xgpt

KERNEL(decode_attention_1, xgpt::DecodeAttention)
KERNEL(decode_attention_2, xgpt::DecodeAttention)
KERNEL(decode_attention_4, xgpt::DecodeAttention)
KERNEL(combine_parts, xgpt::DecodeAttention)
