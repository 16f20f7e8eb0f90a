/* Causal attention of packed spans of inputs to their requests' KV in the cache; shapes as in
 * native.h. A block of 128 threads takes 16 tokens of one span and head, four per warp. Keys
 * come 32 at a time into shared memory. A lane first has one key and all of the head's elements
 * (scores), then every 32nd element and all keys (the sum of values). */
#include "cuda_encode.h"

namespace xgpt {

constexpr int TOKENS = 16;           // chosen: of a block
constexpr int OWN = TOKENS / WARPS;  // of a warp
constexpr int TILE = WARP;           // keys at a time
constexpr int ELEMENTS = 8;          // elements of a head, 32 apart, that a lane sums: up to 256

/* Shared memory, floats: queries [TOKENS, dim], factors [TOKENS, TILE], and keys or values
 * [TILE, dim + 1], padded by one so that 32 rows lie in 32 banks. */
struct Tiles {
    float *query, *factor, *row;
};

/* Loads rows from..from + TILE - 1 of keys or values, zeros from `to` on. */
template <typename T>
__device__ inline void load_tile(const T *array, const Entries &entries, i64 from, i64 to,
                                 bool is_wide, float *tile) {
    const i64 dim = entries.dim, eights = (dim + 7) / 8;
    for (i64 at = threadIdx.x; at < TILE * eights; at += THREADS) {
        const i64 key = at / eights, e = at % eights * 8;
        const Eight<T> eight = load_eight(array + entries.offset(min(from + key, to - 1)), e,
                                          from + key < to ? dim : 0, is_wide);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (e + i < dim) tile[key * (dim + 1) + e + i] = to_float(eight.at[i]);
    }
}

/* A warp's tokens: the last key that each sees, and its running softmax. */
struct Tokens {
    i64 last[OWN];
    float most[OWN], weight[OWN], sum[OWN][ELEMENTS];
};

/* Turns scores of the tile's keys into factors 2^(score - most) in shared memory, and rescales
 * the sums so far. */
__device__ inline void score_tile(const Tiles &tiles, i64 from, int dim, Tokens &own) {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN;
    float score[OWN] = {};
    for (int e = 0; e < dim; ++e) {
        const float key = tiles.row[lane * (dim + 1) + e];
#pragma unroll
        for (int t = 0; t < OWN; ++t) score[t] += key * tiles.query[(first + t) * dim + e];
    }
#pragma unroll
    for (int t = 0; t < OWN; ++t) {
        const float mine = from + lane <= own.last[t] ? score[t] : minus_infinity();
        const float now = fmaxf(own.most[t], warp_max(mine));
        const float fading = rescale(own.most[t], now), factor = rescale(mine, now);
        own.most[t] = now;
        own.weight[t] = own.weight[t] * fading + factor;  // of this lane's keys
        tiles.factor[(first + t) * TILE + lane] = factor;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) own.sum[t][i] *= fading;
    }
}

__device__ inline void add_values(const Tiles &tiles, int dim, Tokens &own) {
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const int e = lane + i * WARP;
        if (e >= dim) break;
#pragma unroll 8
        for (int key = 0; key < TILE; ++key) {
            const float value = tiles.row[key * (dim + 1) + e];
#pragma unroll
            for (int t = 0; t < OWN; ++t)
                own.sum[t][i] += tiles.factor[(first + t) * TILE + key] * value;
        }
    }
}

/* Grid: (tiles of the longest span, heads, spans). */
template <typename T>
__device__ inline void encode_attention(const EncodeAttention &p) {
    const OwnSpan span = span_of(p, blockIdx.z);
    const i64 head = blockIdx.y, from = blockIdx.x * TOKENS;
    const i64 tokens = span.tokens, before = span.before;
    if (from >= tokens || !span.is_there) return;  // all of the block
    XGPT_SHARED(shared);
    const Tiles tiles = {shared, shared + TOKENS * p.dim, shared + TOKENS * (p.dim + TILE)};
    const i64 start = span.start + from;
    for (i64 at = threadIdx.x; at < TOKENS * p.dim; at += THREADS) {
        const i64 t = at / p.dim, e = at % p.dim;
        const T *row = static_cast<const T *>(p.query) + (start + t) * p.query_stride +
                       head * p.dim;
        tiles.query[at] = from + t < tokens ? to_float(row[e]) * (p.scale * LOG2_E) : 0.f;
    }
    const int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * OWN;
    const int dim = static_cast<int>(p.dim);
    Tokens own;
#pragma unroll
    for (int t = 0; t < OWN; ++t) {
        own.last[t] = before + from + first + t;
        own.most[t] = minus_infinity();
        own.weight[t] = 0.f;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) own.sum[t][i] = 0.f;
    }
    const Entries entries = {span.blocks, p.kv_heads, head / (p.heads / p.kv_heads), p.block_size,
                             p.block_bits, p.dim};
    const T *keys = static_cast<const T *>(p.keys), *values = static_cast<const T *>(p.values);
    const i64 end = before + min(from + TOKENS, tokens);  // keys that the last token sees
    for (i64 key = 0; key < end; key += TILE) {
        __syncthreads();
        load_tile(keys, entries, key, end, p.is_wide, tiles.row);
        __syncthreads();
        score_tile(tiles, key, dim, own);
        __syncthreads();
        load_tile(values, entries, key, end, p.is_wide, tiles.row);
        __syncthreads();
        add_values(tiles, dim, own);
    }
#pragma unroll
    for (int t = 0; t < OWN; ++t) {
        const float weight = warp_sum(own.weight[t]);
        if (from + first + t >= tokens) continue;
        T *out = static_cast<T *>(p.out) + ((start + first + t) * p.heads + head) * p.dim;
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i)
            if (lane + i * WARP < p.dim) from_float(own.sum[t][i] / weight, out + lane + i * WARP);
    }
}

}  // namespace xgpt

KERNEL(encode_attention, xgpt::EncodeAttention)
