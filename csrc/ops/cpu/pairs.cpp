/* Matrix products of bfloat16 by dot products of pairs, for processors that compute these twice
 * as fast as float32 products (AMD's with AVX512-BF16). A weight lies in panels of as many
 * outputs as three registers hold, with pairs of inputs side by side. It is read from a core's
 * second-level cache once for every eight rows, whose sums stay in registers. Nothing else is
 * copied or blocked, so few rows are multiplied at nearly the rate of many. A row is summed in
 * the order of its inputs, whatever rows are beside it. */

#include "native.h"
#include "levels.h"
#include "rows.h"
#include "threads.h"

#include <string.h>

#include <algorithm>
#include <vector>

#ifdef XGPT_HAS_PAIRS
#include "intrinsics.h"
#endif

namespace xgpt {
namespace {

constexpr int64_t PANEL = 48;  // outputs that lie side by side: three registers of sums a row
constexpr int64_t TILE = 8;    // rows at a time: sums take 24 of 32 registers
constexpr int64_t CACHED_BYTES = 512 * 1024;  // of activations, beside a panel in a core's cache
constexpr int64_t LEAST_TILES = 8;  // chosen: tiles that share one read of the weight in any case
constexpr int64_t LINE = 64;  // bytes of a cache line
constexpr int64_t PAIR_BYTES = PANEL * 4;  // of a pair of inputs in a panel: three lines
constexpr int64_t SPREAD = 12;  // chosen: most tiles over which the next panel is prefetched
constexpr int64_t SET_BYTES = 2048;  // rows so far apart share a set of the first-level cache

struct Product {
    uint16_t *out;
    const uint16_t *weight, *x, *bias;
    int64_t tokens, inputs, outputs;
    bool relu, gated;
    int threads;
};

#ifdef XGPT_HAS_PAIRS
/* NOTE: nothing of the standard library in here: code of it compiled for these processors would
 * be linked for all others, and crash there. */
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
namespace avx512_pairs {

inline __mmask32 first(int64_t count) {
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}

/* The first 16 elements of `bias` as float32, zeros beyond `count`. */
inline __m512 wide(const uint16_t *bias, int64_t count) {
    const auto some = static_cast<__mmask16>(first(count));
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, bias)), 16));
}

/* out [R, `count` <= PANEL] of R rows of x, `stride` apart, with `pairs` pairs of a panel.
 * `ahead`: memory to prefetch, `step` bytes per pair; null: none. */
template <int R>
void multiply_tile(const Product &a, uint16_t *out, const uint16_t *panel, const uint16_t *x,
                   int64_t stride, int64_t pairs, int64_t output, const char *ahead,
                   int64_t step) {
    __m512 sums[R][3];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = sums[r][2] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int64_t k = 0; k < pairs; ++k) {
        const uint16_t *const at = panel + k * 2 * PANEL;
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(at);
        const __m512bh w1 = (__m512bh)_mm512_loadu_si512(at + 32);
        const __m512bh w2 = (__m512bh)_mm512_loadu_si512(at + 64);
        if (ahead) {
            const char *const line = ahead + k * step;
            _mm_prefetch(line, _MM_HINT_T1);
            if (step > LINE) {
                _mm_prefetch(line + LINE, _MM_HINT_T1);
                _mm_prefetch(line + 2 * LINE, _MM_HINT_T1);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            int32_t both;
            memcpy(&both, x + r * stride + 2 * k, sizeof both);
            const __m512bh v = (__m512bh)_mm512_set1_epi32(both);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, v);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, v);
            sums[r][2] = _mm512_dpbf16_ps(sums[r][2], w2, v);
        }
    }
    const int64_t count = a.outputs - output;
#pragma GCC unroll 3
    for (int i = 0; i < 3; ++i) {
        const auto some = static_cast<__mmask16>(first(count - 16 * i));
        const __m512 bias = a.bias ? wide(a.bias + output + 16 * i, count - 16 * i)
                                   : _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            __m512 v = _mm512_add_ps(sums[r][i], bias);
            // the second operand is returned if it is NaN
            if (a.relu) v = _mm512_max_ps(_mm512_setzero_ps(), v);
            _mm256_mask_storeu_epi16(out + r * a.outputs + 16 * i, some,
                                     (__m256i)_mm512_cvtneps_pbh(v));
        }
    }
}

using MultiplyTile = void (*)(const Product &, uint16_t *, const uint16_t *, const uint16_t *,
                              int64_t, int64_t, int64_t, const char *, int64_t);
constexpr MultiplyTile MULTIPLY_TILE[TILE] = {
    multiply_tile<1>, multiply_tile<2>, multiply_tile<3>, multiply_tile<4>,
    multiply_tile<5>, multiply_tile<6>, multiply_tile<7>, multiply_tile<8>};

}  // namespace avx512_pairs
#pragma GCC pop_options

/* Rows of x as the tiles read them: whole pairs, and not so far apart that they share a cache
 * set. */
struct Rows {
    const uint16_t *x;
    int64_t stride, count;
};

Rows rows_of(const Product &a, int64_t from, int64_t count, std::vector<uint16_t> &copy) {
    const uint16_t *x = a.x + from * a.inputs;
    const bool is_odd = a.inputs % 2;
    if (!is_odd && (a.inputs * 2 % SET_BYTES || count < 3)) return {x, a.inputs, count};
    const int64_t stride = ((a.inputs + 31) / 32 | 1) * 32;  // an odd number of cache lines
    if (static_cast<int64_t>(copy.size()) < count * stride) copy.resize(count * stride);
    const int parts = threads_for(count * a.inputs, a.threads);
    share(parts, [&](int i) {
        for (int64_t t = begin(count, parts, i); t < begin(count, parts, i + 1); ++t) {
            memcpy(copy.data() + t * stride, x + t * a.inputs, a.inputs * sizeof *x);
            if (is_odd) copy[t * stride + a.inputs] = 0;
        }
    });
    return {copy.data(), stride, count};
}

/* One of `tiles` tiles of rows, of nearly equal sizes. */
struct Tile {
    int64_t index, row, count;

    Tile(const Rows &rows, int64_t tiles, int64_t t)
        : index(t), row(rows.count * t / tiles), count(rows.count * (t + 1) / tiles - row) {}
};

/* Number of elements of a panel. */
int64_t panel_size(const Product &a) { return (a.inputs + 1) / 2 * 2 * PANEL; }

/* out = `tile` of the rows times a panel, for the outputs that exist from `output` on.
 * Prefetches the next panel, a part with each of the first tiles: all with the first would need
 * twice the memory's rate. */
void multiply_one(const Product &a, const Rows &rows, uint16_t *out, const Tile &tile,
                  const uint16_t *panel, int64_t output, int64_t tiles, bool has_next) {
    const int64_t spread = std::min(tiles, SPREAD), step = PAIR_BYTES / spread;
    const int64_t pairs = (a.inputs + 1) / 2;
    const auto *const next = reinterpret_cast<const char *>(panel + panel_size(a));
    avx512_pairs::MULTIPLY_TILE[tile.count - 1](
        a, out, panel, rows.x + tile.row * rows.stride, rows.stride, pairs, output,
        has_next && tile.index < spread ? next + tile.index * pairs * step : nullptr, step);
}

/* Multiplies tiles first..last-1 of `tiles` by one panel. */
void multiply_panel(const Product &a, const Rows &rows, int64_t from, int64_t panel, int64_t tiles,
                    int64_t first, int64_t last) {
    const int64_t output = panel * PANEL;
    for (int64_t t = first; t < last; ++t) {
        const Tile tile(rows, tiles, t);
        multiply_one(a, rows, a.out + (from + tile.row) * a.outputs + output, tile,
                     a.weight + panel * panel_size(a), output, tiles,
                     output + PANEL < a.outputs);
    }
}

/* As multiply_panel, for panels of a gate and its up; applies the gate at once. */
void multiply_gated(const Product &a, const Rows &rows, int64_t from, int64_t panel, int64_t tiles,
                    int64_t first, int64_t last) {
    const int64_t panels = (a.outputs + PANEL - 1) / PANEL, output = panel * PANEL;
    const uint16_t *const gate = a.weight + panel * panel_size(a);
    const uint16_t *const up = gate + panels * panel_size(a);
    Product within = a;
    within.outputs = 2 * PANEL;
    for (int64_t t = first; t < last; ++t) {
        const Tile tile(rows, tiles, t);
        uint16_t joint[TILE * 2 * PANEL];
        const bool has_next = panel + 1 < panels;
        multiply_one(within, rows, joint, tile, gate, 0, tiles, has_next);
        multiply_one(within, rows, joint + PANEL, tile, up, PANEL, tiles, has_next);
        gate_tile(a.out + (from + tile.row) * a.outputs + output, a.outputs, joint, 2 * PANEL,
                  PANEL, tile.count, std::min(PANEL, a.outputs - output));
    }
}

void multiply(const Product &a) {
    static thread_local std::vector<uint16_t> copy;
    const int64_t cached = CACHED_BYTES / (a.inputs * 2) / TILE;
    const int64_t most = std::max(cached, LEAST_TILES) * TILE;
    const int64_t panels = (a.outputs + PANEL - 1) / PANEL;
    for (int64_t from = 0; from < a.tokens; from += most) {
        const Rows rows = rows_of(a, from, std::min(most, a.tokens - from), copy);
        const int64_t tiles = (rows.count + TILE - 1) / TILE;
        each_tile(panels, tiles, a.threads, [&](int64_t panel, int64_t first, int64_t last) {
            (a.gated ? multiply_gated : multiply_panel)(a, rows, from, panel, tiles, first, last);
        });
    }
}
#endif

}  // namespace
}  // namespace xgpt

extern "C" int xgpt_pairs_product(uint16_t *out, const uint16_t *weight, const uint16_t *x,
                                  const uint16_t *bias, int relu, int64_t tokens, int64_t inputs,
                                  int64_t outputs, int threads) {
    if (tokens < 0 || inputs < 1 || outputs < 1 || threads < 1) return XGPT_WRONG_SIZE;
#ifdef XGPT_HAS_PAIRS
    if (xgpt_best_level() < XGPT_AVX512_BF16) return XGPT_WRONG_LEVEL;
    if (tokens)
        xgpt::multiply({out, weight, x, bias, tokens, inputs, outputs, relu != 0, false, threads});
    return XGPT_OK;
#else
    return XGPT_WRONG_LEVEL;
#endif
}

extern "C" int xgpt_pairs_gated(uint16_t *out, const uint16_t *weight, const uint16_t *x,
                                int64_t tokens, int64_t inputs, int64_t inner, int threads) {
    if (tokens < 0 || inputs < 1 || inner < 1 || threads < 1) return XGPT_WRONG_SIZE;
#ifdef XGPT_HAS_PAIRS
    if (xgpt_best_level() < XGPT_AVX512_BF16) return XGPT_WRONG_LEVEL;
    if (tokens)
        xgpt::multiply({out, weight, x, nullptr, tokens, inputs, inner, false, true, threads});
    return XGPT_OK;
#else
    return XGPT_WRONG_LEVEL;
#endif
}
