/* Attention by tensor cores. A warp takes 16 keys at a time and COLUMNS x 8 columns; a column is
 * a head of a token, with the last key that it sees. bfloat16 and float16; sums are float32.
 *
 * Both products are mma.m16n8k16 with keys or elements as rows:
 *
 *     scores [16 keys, 8] = keys [16, dim] x queries [dim, 8]
 *     sums [16 elements, 8] += transposed values [16 elements, 16 keys] x factors [16 keys, 8]
 *
 * So a lane holds the same two columns in scores and in sums, and few columns waste little. Lane
 * 4 g + t has rows g and g + 8, columns 2 t and 2 t + 1 of a result. The order of summation, and
 * of elements within results, is chosen so that a lane reads 16 bytes of a row straight into the
 * registers of a product, without shared memory. */
#ifndef XGPT_CUDA_TILES_H
#define XGPT_CUDA_TILES_H

#include "cuda_elements.h"

namespace xgpt {

constexpr int KEYS = 16;  // of a tile

/* sums [16, 8] += a [16, 16] x b [16, 8]. */
__device__ inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                bfloat16) {
#ifdef __CUDACC__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    cpu_cuda::multiply(sums, a, b0, b1, [](unsigned short bits) { return to_float(bfloat16{bits}); });
#endif
}
__device__ inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                float16) {
#ifdef __CUDACC__
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    cpu_cuda::multiply(sums, a, b0, b1, [](unsigned short bits) { return to_float(float16{bits}); });
#endif
}

/* Element of the transposed matrix [8, 8]: lane 4 g + t holds row g, columns 2 t and 2 t + 1,
 * and gets column g, rows 2 t and 2 t + 1. */
__device__ inline unsigned transposed(unsigned pair) {
#ifdef __CUDACC__
    unsigned out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
#else
    return cpu_cuda::transposed(pair);
#endif
}

/* Two elements in a register, the first in its lower half. */
template <typename T>
__device__ inline unsigned paired(float first, float second) {
    T low, high;
    from_float(first, &low);
    from_float(second, &high);
    return low.bits | static_cast<unsigned>(high.bits) << 16;
}

/* 16 bytes of a row as four registers of two elements; zeros beyond its end. */
struct Quad {
    unsigned at[4];
};
template <typename T>
__device__ inline Quad load_quad(const T *row, int from, int size) {
    Quad out = {{0u, 0u, 0u, 0u}};
    if (from < size) {
        const uint4 read = *reinterpret_cast<const uint4 *>(row + from);
        out = {{read.x, read.y, read.z, read.w}};
    }
    return out;
}

/* State of a warp's columns. DIM: elements of a head, at most 64, 128 or 256. */
template <typename T, int DIM, int COLUMNS>
struct Tiles {
    static constexpr int CHUNKS = DIM / 32, HALVES = DIM > 64 ? 2 : 1, SETS = (DIM + 127) / 128;

    // elements 32 chunk + 8 t .. + 7 of column g
    Quad query[CHUNKS][COLUMNS];
    // [.][j]: of element 128 set + 8 g + j columns 2 t and 2 t + 1, then of the one 64 beyond
    float sum[SETS][8][COLUMNS][4];
    float most[COLUMNS][2], weight[COLUMNS][2];  // weight: of this lane's keys
    float scale;
    int dim;

    /* `row_of(c)`: query row of column 8 c + g; null if there is none. */
    template <typename RowOf>
    __device__ inline void begin(const RowOf &row_of, int size, float by) {
        scale = by * LOG2_E;
        dim = size;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const T *row = row_of(c);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                query[chunk][c] = load_quad(row, 32 * chunk + lane() % 4 * 8, row ? dim : 0);
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[set][j][c][i] = 0.f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                most[c][i] = minus_infinity();
                weight[c][i] = 0.f;
            }
        }
    }

    /* Adds 16 keys, of which `count` exist, and their values: rows of `keys`, `values` [16,
     * dim]. `seen(c, i, key)`: whether column 8 c + 2 t + i sees the key, counted from the
     * tile's first. `bias(c, i, key)` is added to its score, in powers of two. */
    template <typename Seen, typename Bias>
    __device__ inline void add(const T *keys, const T *values, int count, const Seen &seen,
                               const Bias &bias) {
        const int g = lane() / 4, t = lane() % 4;
        Quad low[CHUNKS], high[CHUNKS];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            low[chunk] = load_quad(keys + min(g, count - 1) * dim, 32 * chunk + 8 * t, dim);
            high[chunk] = load_quad(keys + min(g + 8, count - 1) * dim, 32 * chunk + 8 * t, dim);
        }
        Quad rows[HALVES][4];  // of one set: keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9
        load_values(values, count, 0, rows);
        unsigned factors[COLUMNS][2];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            float scores[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const unsigned a[4] = {low[chunk].at[i], high[chunk].at[i],
                                           low[chunk].at[i + 1], high[chunk].at[i + 1]};
                    multiply(scores, a, query[chunk][c].at[i], query[chunk][c].at[i + 1], T());
                }
            softmax(scores, c, seen, bias);
            factors[c][0] = transposed(paired<T>(scores[0], scores[1]));
            factors[c][1] = transposed(paired<T>(scores[2], scores[3]));
        }
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            if (set > 0) load_values(values, count, set, rows);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const unsigned half = j % 2 ? 0x7632u : 0x5410u;  // of two registers
                unsigned a[4] = {0u, 0u, 0u, 0u};
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    a[h] = __byte_perm(rows[h][0].at[j / 2], rows[h][1].at[j / 2], half);
                    a[h + 2] = __byte_perm(rows[h][2].at[j / 2], rows[h][3].at[j / 2], half);
                }
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    multiply(sum[set][j][c], a, factors[c][0], factors[c][1], T());
            }
        }
    }

    /* Sums the lanes' weights over the warp, after the last key. */
    __device__ inline void end() {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int offset = 4; offset < WARP; offset *= 2)
                    weight[c][i] += __shfl_xor_sync(ALL, weight[c][i], offset);
    }

    /* Calls put(i, e, eight) with the sums of elements e .. e + 7 of column 8 c + 2 t + i. */
    template <typename Put>
    __device__ inline void each(int c, const Put &put) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) {
                    float eight[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) eight[j] = sum[set][j][c][2 * h + i];
                    const int from = 128 * set + 64 * h + lane() / 4 * 8;
                    if (from < dim) put(i, from, eight);
                }
    }

    __device__ static inline int lane() { return static_cast<int>(threadIdx.x) % WARP; }

  private:
    __device__ inline void load_values(const T *values, int count, int set,
                                       Quad (&rows)[HALVES][4]) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int key = min(lane() % 4 * 2 + k % 2 + k / 2 * 8, count - 1);
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
                rows[h][k] = load_quad(values + key * dim, 128 * set + 64 * h + lane() / 4 * 8, dim);
        }
    }

    /* Turns the scores of the lane's two keys and columns into factors, and rescales the sums so
     * far. */
    template <typename Seen, typename Bias>
    __device__ inline void softmax(float (&scores)[4], int c, const Seen &seen, const Bias &bias) {
        const int key = lane() / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int k = 0; k < 2; ++k)
                scores[2 * k + i] = seen(c, i, key + 8 * k)
                                        ? scores[2 * k + i] * scale + bias(c, i, key + 8 * k)
                                        : minus_infinity();
            float now = fmaxf(scores[i], scores[2 + i]);
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2)
                now = fmaxf(now, __shfl_xor_sync(ALL, now, offset));
            now = fmaxf(now, most[c][i]);
            const float factor = rescale(most[c][i], now);
            most[c][i] = now;
            scores[i] = rescale(scores[i], now);
            scores[2 + i] = rescale(scores[2 + i], now);
            weight[c][i] = weight[c][i] * factor + scores[i] + scores[2 + i];
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    sum[set][j][c][i] *= factor;
                    sum[set][j][c][2 + i] *= factor;
                }
        }
    }
};

}  // namespace xgpt
#endif
