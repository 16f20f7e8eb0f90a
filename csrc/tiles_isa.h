/* Attention of inputs by tiles of bfloat16 (Intel's AMX), included by encode_isa.h in the namespace
 * of AVX-512 with pairs: keys and values lie as they do there (turned_isa.h), and so are tiles of 16
 * rows of 16 pairs. What a tile's row has of a product is summed by the processor in float32, even
 * elements apart from odd ones, 32 at a time. */
#include "amx_isa.h"

namespace xgpt {
namespace XGPT_ISA {

/* Two tiles of rows, of which the second has none where 16 are enough. */
struct TwoTiles : Tile<pair, 2 * SIDE> {
    Tiles tiles;
    explicit TwoTiles(int64_t width) : Tile<pair, 2 * SIDE>(width) {}
    bool has_second() const { return here > SIDE; }
};

/* Tiles 0, 1 (and 2, 3: of the second 16 rows) += left [rows, stride] x right, whose rows are
 * `right_stride` pairs apart: `depth` elements of a row of `left`, a multiple of DEEP. */
template <bool SECOND>
XGPT_INLINE void add_products(const bfloat16 *left, int64_t stride, const pair *right,
                              int64_t right_stride, int64_t depth) {
    for (int64_t x = 0; x < depth; x += DEEP) {
        const pair *at = right + x / 2 * right_stride;
        load_tile<4>(at, right_stride * sizeof(pair));
        load_tile<5>(at + SIDE, right_stride * sizeof(pair));
        load_tile<6>(left + x, stride * sizeof(bfloat16));
        multiply_tiles<0, 6, 4>();
        multiply_tiles<1, 6, 5>();
        if constexpr (SECOND) {
            load_tile<7>(left + SIDE * stride + x, stride * sizeof(bfloat16));
            multiply_tiles<2, 7, 4>();
            multiply_tiles<3, 7, 5>();
        }
    }
}

template <bool SECOND>
static void score_keys(TwoTiles &tile, const Turned<pair> &turned, int64_t j, int64_t count,
                       int64_t width) {
    const int64_t bytes = CHUNK * sizeof(float);
    for (int64_t i = 0; i < count; i += KEYS) {
        zero_tile<0>();
        zero_tile<1>();
        if constexpr (SECOND) {
            zero_tile<2>();
            zero_tile<3>();
        }
        add_products<SECOND>(tile.query.data(), width, turned.keys.data() + (j + i) * width / 2,
                             KEYS, width);
        store_tile<0>(tile.scores + i, bytes);
        store_tile<1>(tile.scores + i + SIDE, bytes);
        if constexpr (SECOND) {
            store_tile<2>(tile.scores + SIDE * CHUNK + i, bytes);
            store_tile<3>(tile.scores + SIDE * CHUNK + i + SIDE, bytes);
        }
    }
}

static void score_keys(TwoTiles &tile, const Turned<pair> &turned, int64_t j, int64_t count,
                       int64_t, int64_t width, float scale) {
    if (tile.has_second())
        score_keys<true>(tile, turned, j, count, width);
    else
        score_keys<false>(tile, turned, j, count, width);
    for (int64_t r = 0; r < tile.here; ++r)
        for (float *scores = tile.scores + r * CHUNK, *end = scores + count; scores < end;
             scores += W)
            store(scores, load(scores) * scale);
}

template <bool SECOND>
static void add_weighed(TwoTiles &tile, const Turned<pair> &turned, int64_t j, int64_t count,
                        int64_t width) {
    const int64_t bytes = width * sizeof(float);
    for (int64_t x = 0; x < width; x += 2 * SIDE) {
        float *sums = tile.sums.data() + x, *second = sums + SIDE * width;
        load_tile<0>(sums, bytes);
        load_tile<1>(sums + SIDE, bytes);
        if constexpr (SECOND) {
            load_tile<2>(second, bytes);
            load_tile<3>(second + SIDE, bytes);
        }
        add_products<SECOND>(tile.weights, CHUNK, turned.values.data() + j / 2 * width + x, width,
                             rounded(count, DEEP));
        store_tile<0>(sums, bytes);
        store_tile<1>(sums + SIDE, bytes);
        if constexpr (SECOND) {
            store_tile<2>(second, bytes);
            store_tile<3>(second + SIDE, bytes);
        }
    }
}

static void add_weighed(TwoTiles &tile, const Turned<pair> &turned, int64_t j, int64_t count,
                        int64_t width) {
    if (tile.has_second())
        add_weighed<true>(tile, turned, j, count, width);
    else
        add_weighed<false>(tile, turned, j, count, width);
}

/* As encode_any, where queries, keys and values are bfloat16. */
static int encode_by_tiles(const Encode &a) { return encode<bfloat16, pair, TwoTiles>(a); }

}  // namespace XGPT_ISA
}  // namespace xgpt
