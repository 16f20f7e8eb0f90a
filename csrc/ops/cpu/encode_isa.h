/* Attention of inputs, for one instruction set; included by encode_attention.cpp.
 *
 * The keys of one input and KV head are transposed once, so that a tile of ROWS queries by KEYS
 * keys stays in registers. The softmax takes CHUNK keys at a time, so that its work per row is
 * small beside the products. */
#include "attention_isa.h"
#include "turned_isa.h"

namespace xgpt {
namespace XGPT_ISA {

constexpr int ROWS = XGPT_W == 16 ? 12 : 6;
constexpr int CHUNK = 128;

template <typename P>
XGPT_INLINE vec load_many(const P *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Scores [R, N W] of R rows of query [R, width] with N W keys of a block of transposed keys
 * [steps, KEYS]. */
template <int R, int N, typename P>
static inline void tile_scores(const P *query, int64_t width, const P *keys, int64_t steps,
                               float scale, float *scores) {
    vec dots[R][N] = {};
    for (int64_t x = 0; x < steps; ++x) {
        vec k[N];
        for (int i = 0; i < N; ++i) k[i] = load_many(keys + x * KEYS + i * W);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < N; ++i)
                dots[r][i] = add_product(dots[r][i], query[r * width + x], k[i]);
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(scores + r * CHUNK + i * W, dots[r][i] * scale);
}

/* sums [R, width] += weights [R, stride] x values [steps, width], N registers from x on. */
template <int R, int N, typename P>
static inline void tile_values(float *sums, int64_t width, const P *weights, int64_t stride,
                               const P *values, int64_t steps, int64_t x) {
    vec kept[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) kept[r][i] = load(sums + r * width + x + i * W);
    for (int64_t j = 0; j < steps; ++j) {
        vec v[N];
        for (int i = 0; i < N; ++i) v[i] = load_many(values + j * width + x + i * W);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < N; ++i)
                kept[r][i] = add_product(kept[r][i], weights[r * stride + j], v[i]);
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(sums + r * width + x + i * W, kept[r][i]);
}

/* A tile: rows [row, row + ROWS) of the task, as far as they exist; row r is head r % group of
 * token r / group. Element: of queries and weights, which are multiplied as P. */
template <typename P>
struct Tile {
    using Element = std::conditional_t<std::is_same_v<P, float>, float, bfloat16>;
    Lined<float> sums;            // [ROWS, width]
    Lined<Element> query;         // [ROWS, width]
    alignas(64) float scores[ROWS * CHUNK];
    alignas(64) Element weights[ROWS * CHUNK];
    float most[ROWS], total[ROWS];
    int64_t limit[ROWS];          // keys that each row sees

    explicit Tile(int64_t width) : sums(ROWS * width), query(ROWS * width) {}
};

template <typename P, typename Element>
static inline const P *products_of(const Element *elements) {
    return reinterpret_cast<const P *>(elements);
}

/* Scores of a tile's rows with keys j .. j + count. */
template <typename P>
static void score_keys(Tile<P> &tile, const Turned<P> &turned, int64_t j, int64_t count,
                       int64_t dim, int64_t width, float scale) {
    const int64_t steps = Turned<P>::of(dim), wide = Turned<P>::of(width);
    const P *query = products_of<P>(tile.query.data());
    for (int64_t i = 0; i < count; i += KEYS) {
        const P *keys = turned.keys.data() + (j + i) * wide;
        if (count - i > W)
            tile_scores<ROWS, 2>(query, wide, keys, steps, scale, tile.scores + i);
        else
            tile_scores<ROWS, 1>(query, wide, keys, steps, scale, tile.scores + i);
    }
}

/* Adds a tile's weights times the values j .. j + count to its sums. */
template <typename P>
static void add_weighed(Tile<P> &tile, const Turned<P> &turned, int64_t j, int64_t count,
                        int64_t width) {
    const P *values = turned.values.data() + Turned<P>::of(j) * width;
    const P *weights = products_of<P>(tile.weights);
    const int64_t stride = Turned<P>::of(CHUNK), steps = Turned<P>::of(count);
    int64_t x = 0;
    for (; x + 2 * W <= width; x += 2 * W)
        tile_values<ROWS, 2>(tile.sums.data(), width, weights, stride, values, steps, x);
    for (; x < width; x += W)
        tile_values<ROWS, 1>(tile.sums.data(), width, weights, stride, values, steps, x);
}

/* Attends with a tile's rows to keys j .. j + count. */
template <typename P, typename Bias>
static void attend_chunk(Tile<P> &tile, const Turned<P> &turned, int64_t j, int64_t count,
                         int64_t dim, int64_t width, float scale, Bias &&add_bias) {
    score_keys(tile, turned, j, count, dim, width, scale);
    for (int64_t r = 0; r < ROWS; ++r) {
        const int64_t seen = std::clamp<int64_t>(tile.limit[r] - j, 0, count);
        float *scores = tile.scores + r * CHUNK;
        auto *weight = tile.weights + r * CHUNK;
        if (seen > 0) {
            add_bias(r, scores, seen);
            soften(scores, seen, weight, tile.most[r], tile.total[r], tile.sums.data() + r * width,
                   width);
        }
        for (int64_t i = rounded(seen, W); i < rounded(count, KEYS); i += W)
            store(weight + i, vec{});
    }
    add_weighed(tile, turned, j, count, width);
}

/* Visits all keys and values that a task's tokens see, block by block. */
template <typename E, typename P>
static void turn_context(const Encode &a, const Task &task, Turned<P> &turned) {
    const int64_t width = rounded(a.dim, 2 * W);
    const int64_t count = a.causal ? task.first + task.from + task.tokens : task.keys;
    turned.resize(count, width);
    auto fill = [&](int64_t place, int64_t first, int64_t here) {
        const bool is_last = first + here == count;
        turned.fill(static_cast<const E *>(a.keys) + place,
                    static_cast<const E *>(a.values) + place, a.kv_stride, first, here,
                    is_last ? rounded(count, KEYS) - first : here, a.dim, width);
    };
    if (!a.causal) return fill(task.place, 0, count);
    a.blocks.each(task.place, 0, count, [&](int64_t block, int64_t, int64_t first, int64_t here) {
        fill((block * a.kv_heads + task.head) * a.blocks.block_size * a.dim, first, here);
    });
}

/* Attends with all tokens of a task. */
template <typename E, typename P>
static void attend_rows(const Encode &a, const Task &task, Turned<P> &turned, Tile<P> &tile) {
    const int64_t group = a.heads / a.kv_heads, dim = a.dim, width = rounded(dim, 2 * W);
    turn_context<E>(a, task, turned);
    const int64_t rows = task.tokens * group;
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t here = std::min<int64_t>(ROWS, rows - row);
        auto token_of = [&](int64_t r) { return task.from + (row + r) / group; };
        auto head_of = [&](int64_t r) { return task.head * group + (row + r) % group; };
        std::fill(tile.sums.begin(), tile.sums.end(), 0.0f);
        for (int64_t r = 0; r < ROWS; ++r) {
            if (r < here)
                read_head<float>(a.dtype, a.query,
                                 (task.packed + token_of(r)) * a.query_stride + head_of(r) * dim,
                                 dim, tile.query.data() + r * width, width);
            tile.most[r] = NOTHING;
            tile.total[r] = 0;
            tile.limit[r] = r >= here ? 0 : a.causal ? task.first + token_of(r) + 1 : task.keys;
        }
        const int64_t seen = tile.limit[here - 1];
        for (int64_t j = 0; j < seen; j += CHUNK)
            attend_chunk(tile, turned, j, std::min<int64_t>(CHUNK, seen - j), dim, width, a.scale,
                         [&](int64_t r, float *scores, int64_t count) {
                if (!a.bias) return;
                const float *bias = a.bias + head_of(r) * a.bias_width + a.bias_center + j -
                                    (task.first + token_of(r));
                for (int64_t i = 0; i < count; ++i) scores[i] += bias[i];
            });
        for (int64_t r = 0; r < here; ++r)
            write_out<float>(a.dtype, a.out,
                             ((task.packed + token_of(r)) * a.heads + head_of(r)) * dim,
                             tile.sums.data() + r * width, tile.total + r, 1, width, dim);
    }
}

template <typename E, typename P>
static int encode(const Encode &a) {
    share(std::min<int>(a.threads, static_cast<int>(a.tasks.size())), [&](int) {
        Turned<P> turned;
        Tile<P> tile(rounded(a.dim, 2 * W));
        for (size_t i; (i = a.next.fetch_add(1)) < a.tasks.size();)
            attend_rows<E>(a, a.tasks[i], turned, tile);
    });
    return XGPT_OK;
}

static int encode_any(const Encode &a) {
#ifdef XGPT_HAS_DOTS
    const bool is_narrow = a.dtype == XGPT_BFLOAT16 && a.kv_dtype == XGPT_BFLOAT16;
    return is_narrow ? encode<bfloat16, pair>(a) : XGPT_WIDE::encode_any(a);
#else
    return a.kv_dtype == XGPT_FLOAT32 ? encode<float, float>(a) : encode<bfloat16, float>(a);
#endif
}

}  // namespace XGPT_ISA
}  // namespace xgpt
