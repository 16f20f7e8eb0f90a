/* Matrix products in float16, for processors that multiply twice as many of these as of float32
 * (AVX512-FP16) and have no library's product that does. Rows of weights and of activations are
 * scaled by powers of two, so that nothing overflows or is lost to small exponents; DEPTH products
 * are summed in float16, so are those sums of BLOCK inputs, and these in float32. */

#include "native.h"
#include "levels.h"
#include "threads.h"

#include <string.h>

#include <algorithm>
#include <vector>

#ifdef XGPT_HAS_FLOAT16
#include <immintrin.h>
#endif

namespace xgpt {
namespace {

constexpr int64_t PANEL = 64;  // outputs that lie side by side in a packed weight
constexpr int64_t TILE = 12;   // rows at a time: with two registers of a panel, 24 of 32 hold sums
constexpr int64_t DEPTH = 32;  // products, of at most 16 each, that are summed in float16
constexpr int64_t BLOCK = 192;  // inputs of a panel that stay in a core's first cache; the sums of
                                // DEPTH of them are summed in float16 too
constexpr int64_t CACHED_BYTES = 768 * 1024;  // of activations, beside a panel in a core's cache
constexpr int64_t LEAST_TILES = 24;  // that one reading of the weight serves, though their
                                     // activations may not fit beside it

struct Product {
    float *out;
    const uint16_t *weight;
    const float *weight_scales;
    const float *x, *bias;
    int64_t tokens, inputs, outputs;
    int threads;
};

#ifdef XGPT_HAS_FLOAT16
/* Nothing of the standard library in here: what of it were compiled for these processors would
 * serve, and end, all others. */
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512fp16,prefer-vector-width=512")
namespace avx512_fp16 {

inline __mmask16 first(int64_t count) {
    return count >= 16 ? 0xffff : static_cast<__mmask16>((1 << count) - 1);
}

/* The power of two by which `most` lies between 2 and 4; of a zero or a tiny number a small one. */
inline float scale_of(float most) {
    uint32_t bits;
    memcpy(&bits, &most, sizeof bits);
    const uint32_t exponent = bits >> 23;
    bits = (exponent > 32 ? exponent - 1 : 31) << 23;
    memcpy(&most, &bits, sizeof bits);
    return most;
}

/* One row as float16, each twice side by side: 32 bits are the least that a load spreads over a
 * register without a shuffle. Returns its scale, NaN of a row with an infinity or a NaN. */
float narrow_row(uint32_t *out, const float *row, int64_t size) {
    __m512 most = _mm512_setzero_ps(), finite = most;
    for (int64_t k = 0; k < size; k += 16) {
        const __m512 v = _mm512_maskz_loadu_ps(first(size - k), row + k);
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
        finite = _mm512_fmadd_ps(v, _mm512_setzero_ps(), finite);
    }
    const float scale = scale_of(_mm512_reduce_max_ps(most));
    const __m512 inverse = _mm512_set1_ps(1.0f / scale);
    for (int64_t k = 0; k < size; k += 16) {
        const __m512 v = _mm512_maskz_loadu_ps(first(size - k), row + k);
        const __m512i low = _mm512_cvtepu16_epi32(
            _mm512_cvtps_ph(_mm512_mul_ps(v, inverse), _MM_FROUND_TO_NEAREST_INT));
        _mm512_mask_storeu_epi32(out + k, first(size - k),
                                 _mm512_or_si512(low, _mm512_slli_epi32(low, 16)));
    }
    const float zero = _mm512_reduce_add_ps(finite);
    return zero == zero ? scale : zero;
}

/* sums [R, PANEL] in float16 of R rows of x, `stride` apart, with `depth` <= DEPTH inputs of a
 * panel: to those before, or the first ones. */
template <int R>
inline __attribute__((always_inline)) void add_inputs(_Float16 *sums, const uint16_t *panel,
                                                      const uint32_t *x, int64_t stride,
                                                      int64_t depth, bool is_first) {
    __m512h low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ph();
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; ++k) {
        const __m512h w0 = _mm512_loadu_ph(panel + k * PANEL);
        const __m512h w1 = _mm512_loadu_ph(panel + k * PANEL + 32);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const __m512h v = reinterpret_cast<__m512h>(
                _mm512_set1_epi32(static_cast<int>(x[r * stride + k])));
            low[r] = _mm512_fmadd_ph(w0, v, low[r]);
            high[r] = _mm512_fmadd_ph(w1, v, high[r]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        _Float16 *const to = sums + r * PANEL;
        if (!is_first) {
            low[r] = _mm512_add_ph(low[r], _mm512_load_ph(to));
            high[r] = _mm512_add_ph(high[r], _mm512_load_ph(to + 32));
        }
        _mm512_store_ph(to, low[r]);
        _mm512_store_ph(to + 32, high[r]);
    }
}

/* sums [R, PANEL] of R rows of x with `inputs` <= BLOCK inputs of a panel: to those before, or the
 * first ones. */
template <int R>
void sum_tile(float *sums, const uint16_t *panel, const uint32_t *x, int64_t stride,
              int64_t inputs, bool is_first) {
    alignas(64) _Float16 of_block[R * PANEL];
    for (int64_t k = 0; k < inputs; k += DEPTH)
        add_inputs<R>(of_block, panel + k * PANEL, x + k, stride,
                      inputs - k < DEPTH ? inputs - k : DEPTH, k == 0);
    for (int64_t i = 0; i < R * PANEL; i += 16) {
        __m512 v = _mm512_cvtph_ps(_mm256_load_si256(
            reinterpret_cast<const __m256i *>(of_block + i)));
        if (!is_first) v = _mm512_add_ps(v, _mm512_loadu_ps(sums + i));
        _mm512_storeu_ps(sums + i, v);
    }
}

using SumTile = void (*)(float *, const uint16_t *, const uint32_t *, int64_t, int64_t, bool);
constexpr SumTile SUM_TILE[TILE] = {
    sum_tile<1>, sum_tile<2>, sum_tile<3>, sum_tile<4>, sum_tile<5>, sum_tile<6>,
    sum_tile<7>, sum_tile<8>, sum_tile<9>, sum_tile<10>, sum_tile<11>, sum_tile<12>};

/* A tile's sums, scaled, as its part of `out`; `scales`: of its rows. */
void store_tile(const Product &a, const float *sums, const float *scales, int64_t row,
                int64_t rows, int64_t panel) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < PANEL; j += 16) {
            const int64_t o = panel * PANEL + j;
            if (o >= a.outputs) break;
            const __mmask16 mask = first(a.outputs - o);
            __m512 v = _mm512_mul_ps(_mm512_loadu_ps(sums + r * PANEL + j),
                                     _mm512_set1_ps(scales[r]));
            v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, a.weight_scales + o));
            if (a.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, a.bias + o));
            _mm512_mask_storeu_ps(a.out + (row + r) * a.outputs + o, mask, v);
        }
}

}  // namespace avx512_fp16
#pragma GCC pop_options

/* Between rows: an odd number of cache lines, so that a tile's rows do not fall on one another. */
int64_t stride_of(int64_t inputs) { return ((inputs + 15) / 16 | 1) * 16; }

/* Tiles first..last-1 of `rows` rows, from row `from` of `out` on, with one panel: a block of its
 * inputs serves all of them before the next is read. */
void multiply_panel(const Product &a, float *sums, const uint32_t *rows16, int64_t stride,
                    const float *row_scales, int64_t from, int64_t rows, int64_t panel,
                    int64_t first, int64_t last) {
    const uint16_t *const weight = a.weight + panel * a.inputs * PANEL;
    for (int64_t k = 0; k < a.inputs; k += BLOCK)
        for (int64_t t = first; t < last; ++t) {
            const int64_t row = t * TILE, count = std::min(TILE, rows - row);
            float *const of_tile = sums + row * PANEL;
            avx512_fp16::SUM_TILE[count - 1](of_tile, weight + k * PANEL,
                                             rows16 + row * stride + k, stride,
                                             std::min(BLOCK, a.inputs - k), k == 0);
            if (k + BLOCK >= a.inputs)
                avx512_fp16::store_tile(a, of_tile, row_scales + row, from + row, count, panel);
        }
}

void multiply(const Product &a) {
    static thread_local std::vector<uint32_t> narrow;  // up to CACHED_BYTES, or LEAST_TILES
    static thread_local std::vector<float> scales;
    const int64_t stride = stride_of(a.inputs);
    const int64_t cached = CACHED_BYTES / (stride * static_cast<int64_t>(sizeof(uint32_t)));
    const int64_t most = std::min(std::max(cached / TILE, LEAST_TILES) * TILE, a.tokens);
    if (static_cast<int64_t>(narrow.size()) < most * stride) narrow.resize(most * stride);
    if (static_cast<int64_t>(scales.size()) < most) scales.resize(most);
    uint32_t *const rows16 = narrow.data();
    float *const row_scales = scales.data();
    const int64_t panels = (a.outputs + PANEL - 1) / PANEL;
    for (int64_t from = 0; from < a.tokens; from += most) {
        const int64_t rows = std::min(most, a.tokens - from), tiles = (rows + TILE - 1) / TILE;
        const int parts = threads_for(rows * a.inputs, a.threads);
        share(parts, [&](int i) {
            for (int64_t t = begin(rows, parts, i); t < begin(rows, parts, i + 1); ++t)
                row_scales[t] = avx512_fp16::narrow_row(rows16 + t * stride,
                                                        a.x + (from + t) * a.inputs, a.inputs);
        });
        each_tile(panels, tiles, a.threads, [&](int64_t panel, int64_t first, int64_t last) {
            static thread_local std::vector<float> sums;  // of a panel
            if (static_cast<int64_t>(sums.size()) < tiles * TILE * PANEL)
                sums.resize(tiles * TILE * PANEL);
            multiply_panel(a, sums.data(), rows16, stride, row_scales, from, rows, panel, first,
                           last);
        });
    }
}
#endif

}  // namespace
}  // namespace xgpt

extern "C" int xgpt_float16_product(float *out, const uint16_t *weight,
                                    const float *weight_scales, const float *x,
                                    const float *bias, int64_t tokens, int64_t inputs,
                                    int64_t outputs, int threads) {
    if (tokens < 0 || inputs < 1 || outputs < 1 || threads < 1) return XGPT_WRONG_SIZE;
    if (!xgpt_has_float16()) return XGPT_WRONG_LEVEL;
#ifdef XGPT_HAS_FLOAT16
    if (tokens)
        xgpt::multiply({out, weight, weight_scales, x, bias, tokens, inputs, outputs, threads});
#endif
    return XGPT_OK;
}
