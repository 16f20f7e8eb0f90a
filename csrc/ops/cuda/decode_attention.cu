/* Attention of one new token of each of n requests to its own context; shapes as in native.h.
 *
 * A block of 128 threads takes one request, up to HEADS of the heads that read one KV head, and
 * one part of the context. In a warp a key belongs to a team of neighbouring lanes, one per 8
 * elements of the head (a power of two). Each team keeps a softmax over the keys it met. These
 * are merged at the end: over the warp by shuffles, over the block in shared memory, over the
 * parts of the context by a second kernel. */
#include "cuda_decode.h"

namespace xgpt {

constexpr int KEYS = 4;  // keys of a team whose loads are under way at once

/* Running softmax of one head: `sum` of values, each times 2^(score - most), and `weight`, the
 * sum of those factors. `most` is -inf before the first key. */
struct Softmax {
    float sum[8];
    float most, weight;
};

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

/* Turns the scores into factors. */
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

/* Merges the block's softmaxes, and writes the heads' rows. */
template <typename T, int HEADS>
__device__ inline void finish(const DecodeAttention &p, const Work &work, int team,
                              Softmax (&state)[HEADS]) {
    XGPT_SHARED(shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        for (int offset = team; offset < WARP; offset *= 2) merge(state[h], offset);
        if (h >= work.heads) continue;
        float *row = shared + (warp * work.heads + h) * (p.dim + 2);
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
    merge_warps<T>(p, work, shared);
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
    // equally many rounds for every team: shuffles need whole warps
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

/* Merges the parts of the contexts. Grid: (n x heads). */
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
