/* What the CUDA sources share: elements, eight of them at once, sums over a warp or a block.
 *
 * nvcc, NVRTC (through cupy; without host headers) and a C++ compiler take the same sources; the
 * last runs them on the CPU (tests/kit/cpu_cuda.h). So no CUDA header is included: float16 and
 * bfloat16 are two bytes, converted here. */
#ifndef XGPT_CUDA_ELEMENTS_H
#define XGPT_CUDA_ELEMENTS_H

#ifndef __CUDACC__
#include "cpu_cuda.h"
#endif

/* A kernel takes one struct by value. Its members have eight bytes each (a float is padded), so
 * that Python describes it in one line. KERNEL(name, Arguments) makes name_float32,
 * name_bfloat16 and name_float16 of the function template `name`. */
#define KERNEL_AS(kernel, Arguments, call)                                               \
    extern "C" __global__ void kernel(const Arguments arguments) { call(arguments); }    \
    XGPT_CPU_ENTRY(kernel, Arguments)
#define KERNEL(name, Arguments)                                            \
    KERNEL_AS(name##_float32, Arguments, xgpt::name<float>)                \
    KERNEL_OF_HALVES(name, Arguments)
#define KERNEL_OF_HALVES(name, Arguments)                                  \
    KERNEL_AS(name##_bfloat16, Arguments, xgpt::name<xgpt::bfloat16>)      \
    KERNEL_AS(name##_float16, Arguments, xgpt::name<xgpt::float16>)
#ifdef __CUDACC__
#define XGPT_CPU_ENTRY(kernel, Arguments)
/* Memory shared by a block's threads, of the size given at the launch. */
#define XGPT_SHARED(name)                                                  \
    extern __shared__ __align__(16) unsigned char xgpt_shared_bytes[];     \
    float *const name = reinterpret_cast<float *>(xgpt_shared_bytes)
#endif

namespace xgpt {

typedef long long i64;
constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

struct bfloat16 {
    unsigned short bits;
};
struct float16 {
    unsigned short bits;
};

/* Tokens of a request in its blocks: token `at` is the lower `block_bits` bits of it in block
 * blocks[at >> block_bits]. Offsets are elements of `arrays` [num_blocks, kv_heads, block_size,
 * dim]. */
struct Entries {
    const i64 *blocks;
    i64 kv_heads, kv_head, block_size, block_bits, dim;

    __device__ i64 offset(i64 at) const {
        const i64 row = blocks[at >> block_bits] * kv_heads + kv_head;
        return (row * block_size + (at & ((i64(1) << block_bits) - 1))) * dim;
    }
};

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

// scores are powers of two; sources without attention do not use this
[[maybe_unused]] constexpr float LOG2_E = 1.4426950408889634f;

/* Factor of a sum whose maximum rises from `old` to `now`. */
__device__ inline float rescale(float old, float now) {
    return old == minus_infinity() ? 0.f : exp2f(old - now);
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bfloat16 x) {
    return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ inline float to_float(float16 x) {
#ifdef __CUDACC__
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
#else
    return cpu_cuda::half_to_float(x.bits);
#endif
}

__device__ inline void from_float(float x, float *out) { *out = x; }
__device__ inline void from_float(float x, bfloat16 *out) {  // to the nearest, ties to even
    const unsigned bits = __float_as_uint(x);
    const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out->bits = static_cast<unsigned short>(x != x ? 0x7fc0u : rounded);
}
__device__ inline void from_float(float x, float16 *out) {
#ifdef __CUDACC__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
    out->bits = cpu_cuda::float_to_half(x);
#endif
}

template <typename T>
__device__ inline float rounded(float x) {
    T out;
    from_float(x, &out);
    return to_float(out);
}

/* Eight neighbouring elements of a row in memory: 16 bytes, or 32 of float. */
template <typename T>
struct alignas(16) Eight {
    T at[8];
};

/* Elements from..from + 7 of a row of `size`, zeros beyond its end (also if from >= size).
 * `is_wide`: the row lies on 16 bytes and its size is a multiple of 8. */
template <typename T>
__device__ inline Eight<T> load_eight(const T *row, i64 from, i64 size, bool is_wide) {
    Eight<T> out;
    if (is_wide && from < size) {
        const uint4 *source = reinterpret_cast<const uint4 *>(row + from);
        uint4 *target = reinterpret_cast<uint4 *>(&out);
#pragma unroll
        for (int part = 0; part < static_cast<int>(sizeof out / sizeof(uint4)); ++part)
            target[part] = source[part];
        return out;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        if (from + e < size) out.at[e] = row[from + e];
        else from_float(0.f, &out.at[e]);
    }
    return out;
}

template <typename T>
__device__ inline void store_eight(const float *values, T *row, i64 from, i64 size, bool is_wide) {
    Eight<T> out;
#pragma unroll
    for (int e = 0; e < 8; ++e) from_float(values[e], &out.at[e]);
    if (is_wide && from < size) {
        const uint4 *source = reinterpret_cast<const uint4 *>(&out);
        uint4 *target = reinterpret_cast<uint4 *>(row + from);
#pragma unroll
        for (int part = 0; part < static_cast<int>(sizeof out / sizeof(uint4)); ++part)
            target[part] = source[part];
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (from + e < size) row[from + e] = out.at[e];
}

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL, x, offset);
    return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL, x, offset));
    return x;
}

/* Sum over a block's threads (at most 1024, whole warps), for all of them. */
__device__ inline float block_sum(float x) {
    __shared__ float of_warp[WARP];
    const int warps = static_cast<int>(blockDim.x) / WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    x = warp_sum(x);
    __syncthreads();  // all have read the result of an earlier sum
    if (lane == 0) of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_sum(lane < warps ? of_warp[lane] : 0.f);
}

}  // namespace xgpt
#endif
