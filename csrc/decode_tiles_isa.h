/* Attention of decoded tokens by tiles of bfloat16 (amx_isa.h), included by decode_isa.h, for many
 * heads that share a KV head: AVX-512 multiplies each key by each of them, and falls behind the
 * memory. Keys are rows of tiles as they lie in the cache, SIDE heads the columns; so the softmax has
 * a head in each lane. Values are laid side by side by pairs, PASS of them at a time; weights are
 * turned to stand before them. */
#include "amx_isa.h"

namespace xgpt {
namespace XGPT_ISA {

constexpr int PASS = 4 * SIDE;             // keys at a time
constexpr int64_t LEAST_TILED_HEADS = 6;   // below that memory is waited for

/* The heads of one query that share a KV head, by tiles; as HeadsOf. The thread's tiles are those of
 * amx_isa.h while there is one. */
struct TiledHeads {
    using Order = float;
    static constexpr int64_t together = SIDE;
    const Decode &a;
    int64_t width;
    Lined<pair> query;              // [group / SIDE, width / 2, SIDE]: turned
    Lined<bfloat16> last;           // [SIDE, width]: keys, of which some are beyond the last
    Lined<pair> side;               // [PASS / 2, width]: values, pairs of keys
    alignas(64) float scores[PASS * SIDE];       // [keys, heads]
    alignas(64) bfloat16 weights[SIDE * PASS];   // [heads, keys]
    Tiles tiles;

    TiledHeads(const Decode &decode, int64_t group, int64_t wide)
        : a(decode), width(wide), query(group * wide / 2), last(SIDE * wide),
          side(PASS / 2 * wide) {}

    void read(int64_t at, int64_t group) {
        const auto *from = static_cast<const bfloat16 *>(a.query) + at;
        for (int64_t first = 0; first < group; first += SIDE)
            for (int64_t x = 0; x < width; x += DEEP) {
                vec rows[SIDE];
                for (int64_t g = 0; g < SIDE; ++g)
                    rows[g] = first + g < group
                                  ? load_pairs(from + (first + g) * a.dim + x, a.dim - x)
                                  : vec{};
                turn(rows);
                pair *to = query.data() + (first * width + x * SIDE) / 2;
                for (int64_t p = 0; p < SIDE; ++p) memcpy(to + p * SIDE, &rows[p], sizeof(vec));
            }
    }

    void attend(const bfloat16 *keys, const bfloat16 *values, int64_t group, int64_t count,
                const float *, float *most, float *total, float *sums, const bfloat16 *after) {
        for (int64_t from = 0; from < count; from += PASS) {
            const int64_t here = std::min<int64_t>(PASS, count - from);
            const bfloat16 *next = from + PASS < count ? keys + (from + PASS) * a.dim : after;
            lay_side(values + from * a.dim, here, next);
            for (int64_t g = 0; g < group; g += SIDE) {
                score(query.data() + g * width / 2, keys + from * a.dim, here);
                soften_lanes(here, most + g, total + g, sums + g * width);
                add_values(sums + g * width, here);
            }
        }
    }

private:
    /* Values [count, dim] by pairs of keys, zeros up to a whole tile; the keys `next` are read after
     * those of these values. */
    void lay_side(const bfloat16 *values, int64_t count, const bfloat16 *next) {
        const int64_t bytes = a.dim * sizeof(bfloat16);
        for (int64_t j = 0; j < rounded(count, DEEP); j += 2) {
            if (j < count) {
                ask_for(values + (j + 16) * a.dim, 2 * bytes);
                ask_for(next + j * a.dim, 2 * bytes);
            }
            for (int64_t x = 0; x < width; x += DEEP) {
                const bfloat16 *at = values + j * a.dim + x;
                vec low, high;
                pair_rows(j < count ? load_pairs(at, a.dim - x) : vec{},
                          j + 1 < count ? load_pairs(at + a.dim, a.dim - x) : vec{}, low, high);
                pair *row = side.data() + j / 2 * width + x;
                memcpy(row, &low, sizeof low);
                memcpy(row + SIDE, &high, sizeof high);
            }
        }
    }

    /* Tile T of the sums += keys [SIDE, dim] from `key` on, times the heads in tile 4. */
    template <int T>
    void add_keys(const bfloat16 *key, int64_t stride) {
        load_tile<5>(key, stride * sizeof(bfloat16));
        multiply_tiles<T, 5, 4>();
    }

    /* scores of `count` keys; what stands behind them is no key's. */
    void score(const pair *heads, const bfloat16 *keys, int64_t count) {
        const int64_t whole = count / SIDE, over = count % SIDE;
        if (over) {
            memcpy(last.data(), keys + whole * SIDE * a.dim, over * a.dim * sizeof(bfloat16));
            memset(last.data() + over * a.dim, 0, (SIDE - over) * a.dim * sizeof(bfloat16));
        }
        const auto tile_of = [&](int64_t t) {
            return t < whole ? keys + t * SIDE * a.dim : last.data();
        };
        const int64_t some = whole + (over ? 1 : 0);
        zero_tile<0>();
        zero_tile<1>();
        zero_tile<2>();
        zero_tile<3>();
        for (int64_t x = 0; x < a.dim; x += DEEP) {
            load_tile<4>(heads + x / 2 * SIDE, SIDE * sizeof(pair));
            add_keys<0>(tile_of(0) + x, a.dim);
            if (some > 1) add_keys<1>(tile_of(1) + x, a.dim);
            if (some > 2) add_keys<2>(tile_of(2) + x, a.dim);
            if (some > 3) add_keys<3>(tile_of(3) + x, a.dim);
        }
        const int64_t bytes = SIDE * sizeof(float);
        store_tile<0>(scores, bytes);
        store_tile<1>(scores + SIDE * SIDE, bytes);
        store_tile<2>(scores + 2 * SIDE * SIDE, bytes);
        store_tile<3>(scores + 3 * SIDE * SIDE, bytes);
    }

    /* scores -> weights against the maximum so far, as `soften` does it for one head. */
    void soften_lanes(int64_t count, float *most, float *total, float *sums) {
        const vec before = load(most);
        vec top = before;
        for (int64_t j = 0; j < count; ++j) {
            const vec scaled = load(scores + j * SIDE) * a.scale;
            store(scores + j * SIDE, scaled);
            top = larger(top, scaled);
        }
        vec shrunk = load(total);
        alignas(64) float by[SIDE];
        store(by, exp(before - top));
        for (int64_t g = 0; g < SIDE; ++g)
            if (by[g] != 1.0f)
                for (int64_t x = g * width; x < (g + 1) * width; x += W)
                    store(sums + x, load(sums + x) * by[g]);
        shrunk = shrunk * load(by);
        store(most, top);
        vec added{};
        for (int64_t j = 0; j < rounded(count, DEEP); j += DEEP) {
            vec rows[SIDE];
            for (int64_t p = 0; p < SIDE; ++p) rows[p] = weighed(j + 2 * p, count, top, added);
            turn(rows);
            for (int64_t g = 0; g < SIDE; ++g)
                memcpy(weights + g * PASS + j, &rows[g], sizeof(vec));
        }
        store(total, shrunk + added);
    }

    /* The weights of keys j and j + 1, pairs of bfloat16 in each lane; their sum is added. */
    vec weighed(int64_t j, int64_t count, vec top, vec &added) {
        vec two[2] = {};
        if (j < count) {
            two[0] = load(scores + j * SIDE) - top;
            two[1] = j + 1 < count ? load(scores + (j + 1) * SIDE) - top : all(-INFINITY);
            exp(two);
            two[0] = as_kept<bfloat16>(two[0]);
            two[1] = as_kept<bfloat16>(two[1]);
            added += two[0] + two[1];
        }
        return reinterpret_cast<vec>(reinterpret_cast<uvec>(two[0]) >> 16 |
                                     reinterpret_cast<uvec>(two[1]));
    }

    /* Tile T of the sums += the weights in tile 4 times values from `value` on. */
    template <int T>
    void add_side(const pair *value) {
        load_tile<5>(value, width * sizeof(pair));
        multiply_tiles<T, 4, 5>();
    }

    /* sums [SIDE, width] += weights times the values at the side. */
    void add_values(float *sums, int64_t count) {
        const int64_t bytes = width * sizeof(float);
        for (int64_t x = 0; x < width; x += DEEP) {
            load_tile<0>(sums + x, bytes);
            load_tile<1>(sums + x + SIDE, bytes);
            for (int64_t j = 0; j < rounded(count, DEEP); j += DEEP) {
                load_tile<4>(weights + j, PASS * sizeof(bfloat16));
                add_side<0>(side.data() + j / 2 * width + x);
                add_side<1>(side.data() + j / 2 * width + x + SIDE);
            }
            store_tile<0>(sums + x, bytes);
            store_tile<1>(sums + x + SIDE, bytes);
        }
    }
};

/* Whether these are many heads on heads that are whole rows of tiles, bfloat16 all. */
static inline bool suits_tiles(const Decode &a) {
    return a.dtype == XGPT_BFLOAT16 && a.kv_dtype == XGPT_BFLOAT16 && a.dim % DEEP == 0 &&
           !a.bias && a.heads / a.kv_heads >= LEAST_TILED_HEADS;
}

/* As decode_any, where `suits_tiles`. */
static int decode_by_tiles(const Decode &a) { return decode<bfloat16, TiledHeads>(a); }

}  // namespace XGPT_ISA
}  // namespace xgpt
