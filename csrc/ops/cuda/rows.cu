/* Operations on rows of a layer: norms after the residual is added, rotary positions with the
 * write into the cache, SwiGLU. Shapes as in native.h. */
#include "cuda_elements.h"

namespace xgpt {

struct AddNorm {
    void *normed, *hidden;  // [tokens, size]
    const void *added;      // [tokens, size]; null: nothing is added, and hidden is only read
    const void *weight;     // [size]
    const void *bias;       // [size]; for layer norm only
    i64 tokens, size, is_wide;
    float eps;
};

/* Adds `added` to one row of hidden, rounded as stored; returns this thread's part of the sum. */
template <typename T, bool SQUARED>
__device__ inline float add_row(const AddNorm &p, T *hidden, const T *added) {
    float sum = 0.f;
    for (i64 from = threadIdx.x * 8; from < p.size; from += blockDim.x * 8) {
        const Eight<T> here = load_eight(hidden, from, p.size, p.is_wide);
        Eight<T> more;
        if (added) more = load_eight(added, from, p.size, p.is_wide);
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] = to_float(here.at[e]);
            if (added) x[e] = rounded<T>(x[e] + to_float(more.at[e]));
            sum += SQUARED ? x[e] * x[e] : x[e];
        }
        if (added) store_eight(x, hidden, from, p.size, p.is_wide);
    }
    return sum;
}

/* A block for each token. A thread reads again only what it wrote itself. */
template <typename T, bool IS_LAYER_NORM>
__device__ inline void add_norm(const AddNorm &p) {
    const i64 start = static_cast<i64>(blockIdx.x) * p.size;
    T *hidden = static_cast<T *>(p.hidden) + start;
    const T *added = p.added ? static_cast<const T *>(p.added) + start : nullptr;
    const float size = static_cast<float>(p.size);
    const float first = block_sum(add_row<T, !IS_LAYER_NORM>(p, hidden, added)) / size;
    const float mean = IS_LAYER_NORM ? first : 0.f;
    float variance = first;  // around 0 without a mean
    if (IS_LAYER_NORM) {
        float sum = 0.f;
        for (i64 from = threadIdx.x * 8; from < p.size; from += blockDim.x * 8) {
            const Eight<T> here = load_eight(hidden, from, p.size, p.is_wide);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float x = from + e < p.size ? to_float(here.at[e]) - mean : 0.f;
                sum += x * x;
            }
        }
        variance = block_sum(sum) / size;
    }
    const float factor = 1.f / sqrtf(variance + p.eps);
    for (i64 from = threadIdx.x * 8; from < p.size; from += blockDim.x * 8) {
        const Eight<T> here = load_eight(hidden, from, p.size, p.is_wide);
        const Eight<T> weight = load_eight(static_cast<const T *>(p.weight), from, p.size,
                                           p.is_wide);
        Eight<T> bias;
        if (IS_LAYER_NORM)
            bias = load_eight(static_cast<const T *>(p.bias), from, p.size, p.is_wide);
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] = (to_float(here.at[e]) - mean) * factor * to_float(weight.at[e]);
            if (IS_LAYER_NORM) x[e] += to_float(bias.at[e]);
        }
        store_eight(x, static_cast<T *>(p.normed) + start, from, p.size, p.is_wide);
    }
}

template <typename T>
__device__ inline void add_rms_norm(const AddNorm &p) { add_norm<T, false>(p); }
template <typename T>
__device__ inline void add_layer_norm(const AddNorm &p) { add_norm<T, true>(p); }

struct Place {
    void *joint;             // [tokens, (heads + 2 kv_heads) dim]
    const float *cos, *sin;  // [tokens, dim / 2]; null: no rotation
    void *keys, *values;     // [num_slots, kv_heads, capacity, dim]
    const i64 *slots, *positions;
    i64 tokens, heads, kv_heads, dim, num_slots, capacity, is_wide;
};

/* Element e of a head, rotated: its partner is half a head away. */
template <typename T>
__device__ inline float rotated(const T *head, i64 e, i64 dim, const float *cos, const float *sin) {
    if (!cos) return to_float(head[e]);
    const i64 half = dim / 2, pair = e < half ? e : e - half;
    const float first = to_float(head[pair]), second = to_float(head[pair + half]);
    return e < half ? first * cos[pair] - second * sin[pair]
                    : second * cos[pair] + first * sin[pair];
}

/* Eight elements of a head's first half and their partners in the second, rotated. */
template <typename T>
__device__ inline void rotate_eight(const T *head, int from, int half, const float *cos,
                                    const float *sin, float (&first)[8], float (&second)[8]) {
    const Eight<T> one = load_eight(head, from, half, true);
    const Eight<T> other = load_eight(head + half, from, half, true);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float x = to_float(one.at[e]), y = to_float(other.at[e]);
        first[e] = x * cos[from + e] - y * sin[from + e];
        second[e] = y * cos[from + e] + x * sin[from + e];
    }
}

/* Rotates `heads` neighbouring heads of a token, in place or into another array, `stride` apart. */
template <typename T>
__device__ inline void rotate_heads(const T *from_row, T *to_row, i64 stride, int heads, int dim,
                                    const float *cos, const float *sin) {
    const int half = dim / 2, pieces = half / 8;
    for (int at = threadIdx.x; at < heads * pieces; at += blockDim.x) {
        const int head = at / pieces, from = at % pieces * 8;
        float first[8], second[8];
        rotate_eight(from_row + head * dim, from, half, cos, sin, first, second);
        store_eight(first, to_row + head * stride, from, half, true);
        store_eight(second, to_row + head * stride + half, from, half, true);
    }
}

template <typename T>
__device__ inline void copy_heads(const T *from_row, T *to_row, i64 stride, int heads, int dim) {
    const int pieces = dim / 8;
    for (int at = threadIdx.x; at < heads * pieces; at += blockDim.x) {
        const int head = at / pieces, from = at % pieces * 8;
        *reinterpret_cast<Eight<T> *>(to_row + head * stride + from) =
            load_eight(from_row + head * dim, from, dim, true);
    }
}

/* As `place`, 16 bytes at a time. */
template <typename T>
__device__ inline void place_wide(const Place &p, const float *cos, const float *sin, i64 slot,
                                  i64 position) {
    const int dim = static_cast<int>(p.dim), kv_heads = static_cast<int>(p.kv_heads);
    T *query = static_cast<T *>(p.joint) + blockIdx.x * (p.heads + 2 * p.kv_heads) * p.dim;
    const T *key = query + p.heads * p.dim, *value = key + p.kv_heads * p.dim;
    if (cos) rotate_heads(query, query, p.dim, static_cast<int>(p.heads), dim, cos, sin);
    if (slot < 0 || slot >= p.num_slots || position < 0 || position >= p.capacity) return;
    const i64 target = (slot * p.kv_heads * p.capacity + position) * p.dim;
    const i64 stride = p.capacity * p.dim;
    T *keys = static_cast<T *>(p.keys) + target, *values = static_cast<T *>(p.values) + target;
    if (cos) rotate_heads(key, keys, stride, kv_heads, dim, cos, sin);
    else copy_heads(key, keys, stride, kv_heads, dim);
    copy_heads(value, values, stride, kv_heads, dim);
}

/* A block for each token. A token whose slot or position lies outside the cache is not written. */
template <typename T>
__device__ inline void place(const Place &p) {
    const i64 token = blockIdx.x, slot = p.slots[token], position = p.positions[token];
    const float *cos = p.cos ? p.cos + token * (p.dim / 2) : nullptr;
    const float *sin = p.sin ? p.sin + token * (p.dim / 2) : nullptr;
    if (p.is_wide) return place_wide<T>(p, cos, sin, slot, position);
    T *query = static_cast<T *>(p.joint) + token * (p.heads + 2 * p.kv_heads) * p.dim;
    const T *key = query + p.heads * p.dim, *value = key + p.kv_heads * p.dim;
    const i64 half = p.dim / 2;
    if (cos) {
        for (i64 at = threadIdx.x; at < p.heads * half; at += blockDim.x) {
            T *head = query + at / half * p.dim;
            const i64 pair = at % half;
            const float first = rotated(head, pair, p.dim, cos, sin);
            const float second = rotated(head, pair + half, p.dim, cos, sin);
            from_float(first, head + pair);
            from_float(second, head + pair + half);
        }
    }
    if (slot < 0 || slot >= p.num_slots || position < 0 || position >= p.capacity) return;
    for (i64 at = threadIdx.x; at < p.kv_heads * p.dim; at += blockDim.x) {
        const i64 head = at / p.dim, e = at % p.dim;
        const i64 target = ((slot * p.kv_heads + head) * p.capacity + position) * p.dim + e;
        from_float(rotated(key + head * p.dim, e, p.dim, cos, sin),
                   static_cast<T *>(p.keys) + target);
        static_cast<T *>(p.values)[target] = value[at];
    }
}

struct SiluMul {
    void *out;          // [tokens, inner]
    const void *joint;  // [tokens, 2 inner]
    i64 tokens, inner, is_wide;
};

/* A row of blocks for each token: blockIdx.x the token, blockIdx.y its part. */
template <typename T>
__device__ inline void silu_mul(const SiluMul &p) {
    const i64 token = blockIdx.x;
    const T *gate = static_cast<const T *>(p.joint) + token * 2 * p.inner;
    const i64 step = static_cast<i64>(gridDim.y) * blockDim.x * 8;
    for (i64 from = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * 8; from < p.inner;
         from += step) {
        const Eight<T> gates = load_eight(gate, from, p.inner, p.is_wide);
        const Eight<T> ups = load_eight(gate + p.inner, from, p.inner, p.is_wide);
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float g = to_float(gates.at[e]);
            x[e] = g / (1.f + expf(-g)) * to_float(ups.at[e]);
        }
        store_eight(x, static_cast<T *>(p.out) + token * p.inner, from, p.inner, p.is_wide);
    }
}

}  // namespace xgpt

KERNEL(add_rms_norm, xgpt::AddNorm)
KERNEL(add_layer_norm, xgpt::AddNorm)
KERNEL(place, xgpt::Place)
KERNEL(silu_mul, xgpt::SiluMul)
