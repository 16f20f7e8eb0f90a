/* Attention of inputs, for one instruction set; included by attention_isa.h.
 *
 * The keys of one input and KV head are turned once, so that a tile of ROWS queries by KEYS keys
 * stays in registers; the softmax takes CHUNK keys at a time, so that what it does once a row is
 * little beside the products.
 */
namespace xgpt {
namespace XGPT_ISA {

constexpr int ROWS = XGPT_W == 16 ? 12 : 6, KEYS = 2 * W;
constexpr int CHUNK = 128;

/* One input and KV head as float32: keys turned [blocks, dim, KEYS], values [keys, width]. */
struct Turned {
    std::vector<float> keys, values;

    void resize(int64_t count, int64_t width) {
        keys.resize(rounded(count, KEYS) * width);
        values.resize(count * width);
    }
    /* The keys from `first` on, a multiple of W: `count` of them, with zeros behind up to `room`. */
    template <typename E>
    void fill(const E *key, const E *value, int64_t stride, int64_t first, int64_t count,
              int64_t room, int64_t dim, int64_t width) {
        vec rows[W];
        for (int64_t j = 0; j < room; j += W)
            for (int64_t x = 0; x < dim; x += W) {
                for (int64_t i = 0; i < W; ++i)
                    rows[i] = j + i < count ? load(key + (j + i) * stride + x, dim - x) : vec{};
                turn(rows);
                const int64_t to = first + j;
                float *block = keys.data() + (to / KEYS * width + x) * KEYS + to % KEYS;
                for (int64_t i = 0; i < W; ++i) store(block + i * KEYS, rows[i]);
            }
        for (int64_t j = 0; j < count; ++j)
            for (int64_t x = 0; x < width; x += W)
                store(values.data() + (first + j) * width + x,
                      x < dim ? load(value + j * stride + x, dim - x) : vec{});
    }
};

/* scores [R, N W] of R rows of query [R, width] with N W of a block of turned keys [dim, KEYS]. */
template <int R, int N>
static inline void tile_scores(const float *query, int64_t width, const float *keys, int64_t dim,
                               float *scores) {
    vec dots[R][N] = {};
    for (int64_t x = 0; x < dim; ++x) {
        vec k[N];
        for (int i = 0; i < N; ++i) k[i] = load(keys + x * KEYS + i * W);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < N; ++i) dots[r][i] += query[r * width + x] * k[i];
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(scores + r * CHUNK + i * W, dots[r][i]);
}

/* sums [R, width] += weights [R, CHUNK] x values [count, width], N registers from x on. */
template <int R, int N>
static inline void tile_values(float *sums, int64_t width, const float *weights,
                               const float *values, int64_t count, int64_t x) {
    vec kept[R][N];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) kept[r][i] = load(sums + r * width + x + i * W);
    for (int64_t j = 0; j < count; ++j) {
        vec v[N];
        for (int i = 0; i < N; ++i) v[i] = load(values + j * width + x + i * W);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < N; ++i) kept[r][i] += weights[r * CHUNK + j] * v[i];
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(sums + r * width + x + i * W, kept[r][i]);
}

/* A tile of rows: rows [row, row + here) of the task, row r being head r % group of its token
 * r / group. */
struct Tile {
    float *query, *sums, *scores;  // [ROWS, width] twice, [ROWS, CHUNK]
    float most[ROWS], total[ROWS];
    int64_t limit[ROWS];           // keys that each row sees
};

/* The rows of a tile with keys j .. j + count. */
template <typename Bias>
static void attend_chunk(Tile &tile, const Turned &turned, int64_t j, int64_t count, int64_t dim,
                         int64_t width, Bias &&add_bias) {
    for (int64_t i = 0; i < count; i += KEYS) {
        const float *keys = turned.keys.data() + (j + i) * width;
        if (count - i > W)
            tile_scores<ROWS, 2>(tile.query, width, keys, dim, tile.scores + i);
        else
            tile_scores<ROWS, 1>(tile.query, width, keys, dim, tile.scores + i);
    }
    for (int64_t r = 0; r < ROWS; ++r) {
        const int64_t seen = std::clamp<int64_t>(tile.limit[r] - j, 0, count);
        float *scores = tile.scores + r * CHUNK;
        if (seen > 0) {
            add_bias(r, scores, seen);
            soften(scores, seen, tile.most[r], tile.total[r], tile.sums + r * width, width);
        }
        for (int64_t i = rounded(seen, W); i < count; i += W) store(scores + i, vec{});
    }
    const float *values = turned.values.data() + j * width;
    int64_t x = 0;
    for (; x + 2 * W <= width; x += 2 * W)
        tile_values<ROWS, 2>(tile.sums, width, tile.scores, values, count, x);
    for (; x < width; x += W)
        tile_values<ROWS, 1>(tile.sums, width, tile.scores, values, count, x);
}

/* All keys and values that a task's tokens see, block by block. */
template <typename E>
static void turn_context(const Encode &a, const Task &task, Turned &turned) {
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

/* The tokens of a task. */
template <typename E>
static void attend_rows(const Encode &a, const Task &task, Turned &turned,
                        std::vector<float> &scratch) {
    const int64_t group = a.heads / a.kv_heads, dim = a.dim, width = rounded(dim, 2 * W);
    turn_context<E>(a, task, turned);
    scratch.resize(ROWS * (2 * width + CHUNK));
    Tile tile;
    tile.query = scratch.data();
    tile.sums = tile.query + ROWS * width;
    tile.scores = tile.sums + ROWS * width;
    const int64_t rows = task.tokens * group;
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t here = std::min<int64_t>(ROWS, rows - row);
        auto token_of = [&](int64_t r) { return task.from + (row + r) / group; };
        auto head_of = [&](int64_t r) { return task.head * group + (row + r) % group; };
        std::fill(tile.query, tile.scores, 0.0f);
        for (int64_t r = 0; r < ROWS; ++r) {
            if (r < here)
                read_head<float>(a.dtype, a.query,
                                 (task.packed + token_of(r)) * a.query_stride + head_of(r) * dim,
                                 dim, a.scale, tile.query + r * width, width);
            tile.most[r] = NOTHING;
            tile.total[r] = 0;
            tile.limit[r] = r >= here ? 0 : a.causal ? task.first + token_of(r) + 1 : task.keys;
        }
        const int64_t seen = tile.limit[here - 1];
        for (int64_t j = 0; j < seen; j += CHUNK)
            attend_chunk(tile, turned, j, std::min<int64_t>(CHUNK, seen - j), dim, width,
                         [&](int64_t r, float *scores, int64_t count) {
                if (!a.bias) return;
                const float *bias = a.bias + head_of(r) * a.bias_width + a.bias_center + j -
                                    (task.first + token_of(r));
                for (int64_t i = 0; i < count; ++i) scores[i] += bias[i];
            });
        for (int64_t r = 0; r < here; ++r)
            write_out<float>(a.dtype, a.out,
                             ((task.packed + token_of(r)) * a.heads + head_of(r)) * dim,
                             tile.sums + r * width, tile.total + r, 1, width, dim);
    }
}

template <typename E>
static int encode(const Encode &a) {
    share(std::min<int>(a.threads, static_cast<int>(a.tasks.size())), [&](int) {
        Turned turned;
        std::vector<float> scratch;
        for (size_t i; (i = a.next.fetch_add(1)) < a.tasks.size();)
            attend_rows<E>(a, a.tasks[i], turned, scratch);
    });
    return XGPT_OK;
}

static int encode_any(const Encode &a) {
    return a.kv_dtype == XGPT_FLOAT32 ? encode<float>(a) : encode<bfloat16>(a);
}

}  // namespace XGPT_ISA
}  // namespace xgpt
