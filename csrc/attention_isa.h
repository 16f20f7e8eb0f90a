/* Attention over a KV cache, for one instruction set (each_isa.h). All sums are in float32.
 *
 * Decoding reads each key and value once for all the heads that share them (as many as KEPT at a
 * time), so that it runs at the speed of the memory. The keys of all (query, KV head) pairs stand in
 * one long row that is cut into equal parts, one a thread: a pair that is cut is put together at the
 * end from its parts' maxima, sums and sums of values. Encoding turns the keys of one input and KV
 * head once, and multiplies tiles of ROWS queries by KEYS keys that stay in registers.
 * Both use the softmax that goes on from block to block (Milakov and Gimelshein, 2018).
 */
namespace xgpt {
namespace XGPT_ISA {

constexpr int BLOCK = 64;                  // keys whose scores are held at a time in decoding
constexpr int KEPT = 4;                    // heads that read a key together
constexpr int TILE = XGPT_W == 16 ? 4 : 2; // registers of a value row that are summed together
constexpr int ROWS = XGPT_W == 16 ? 12 : 4, KEYS = 2 * W;
constexpr float NOTHING = -3.4e38f;        // a maximum over no keys

static inline int64_t rounded(int64_t count) { return (count + W - 1) / W * W; }

/* Asks for `bytes` from p on to be brought into the second level cache: the next block's keys are
 * asked for while this block's values are summed, and its values while its keys are read, so that
 * the memory is never waited for with nothing asked. */
static inline void ask_for(const void *p, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(static_cast<const char *>(p) + line, 0, 2);
}

/* The dot products of one key with G heads of a query; N > 0: N registers a row, held meanwhile. */
template <typename E, int G, int N>
static inline void dots_of(const float *query, int64_t width, const E *key, int64_t dim, vec *dots) {
    if constexpr (N > 0) {
        for (int i = 0; i < N; ++i) {
            const vec k = load(key + i * W);
            for (int g = 0; g < G; ++g) dots[g] += load(query + g * width + i * W) * k;
        }
    } else {
        for (int64_t x = 0; x < dim; x += W) {
            const vec k = load(key + x, dim - x);
            for (int g = 0; g < G; ++g) dots[g] += load(query + g * width + x) * k;
        }
    }
}

/* scores [G, BLOCK] of up to W keys [count, dim]; those beyond `count` are 0. */
template <typename E, int G, int N>
static inline void scores_of(const float *query, int64_t width, const E *keys, const E *values,
                             int64_t dim, int64_t count, float *scores) {
    vec dots[G][W];
    for (int64_t j = 0; j < W; ++j) {
        vec each[G] = {};
        ask_for(values + j * dim, dim * sizeof(E));
        if (j < count) dots_of<E, G, N>(query, width, keys + j * dim, dim, each);
        for (int g = 0; g < G; ++g) dots[g][j] = each[g];
    }
    for (int g = 0; g < G; ++g) store(scores + g * BLOCK, row_sums(dots[g]));
}

/* sums [G, width] += weights [G, BLOCK] x values [count, dim], N registers at x. */
template <typename E, int G, int N>
static inline void add_values(float *sums, int64_t width, const float *weights, const E *values,
                              const E *next, int64_t dim, int64_t count, int64_t x) {
    vec kept[G][N];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < N; ++i) kept[g][i] = load(sums + g * width + x + i * W);
    const bool whole = x + N * W <= dim;
    for (int64_t j = 0; j < count; ++j) {
        const E *value = values + j * dim + x;
        ask_for(next + j * dim + x, N * W * sizeof(E));
        vec v[N];
        if (whole)
            for (int i = 0; i < N; ++i) v[i] = load(value + i * W);
        else
            for (int i = 0; i < N; ++i)
                v[i] = i * W < dim - x ? load(value + i * W, dim - x - i * W) : vec{};
        for (int g = 0; g < G; ++g)
            for (int i = 0; i < N; ++i) kept[g][i] += weights[g * BLOCK + j] * v[i];
    }
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < N; ++i) store(sums + g * width + x + i * W, kept[g][i]);
}

/* Scores of `count` keys of one head -> weights against the maximum so far; `sums` [width] of the
 * values so far are scaled to a maximum that rises. */
static inline void soften(float *scores, int64_t count, float &most, float &total, float *sums,
                          int64_t width) {
    vec top = all(most);
    for (int64_t j = 0; j < count; j += W) {
        if (j + W > count)
            for (int64_t i = count; i < j + W; ++i) scores[i] = -INFINITY;
        top = larger(top, load(scores + j));
    }
    const float now = largest(top);
    if (now > most) {
        const float scale = std::exp(most - now);
        total *= scale;
        for (int64_t x = 0; x < width; x += W) store(sums + x, load(sums + x) * scale);
        most = now;
    }
    vec added{};
    for (int64_t j = 0; j < count; j += W) {
        const vec weight = exp(load(scores + j) - most);
        store(scores + j, weight);
        added += weight;
    }
    total += sum(added);
}

/* G heads of one query over `count` keys of one KV head. query [G, width] scaled already; most,
 * total [G] and sums [G, width] go on from what they are; `bias` [G, bias_width] or null. */
template <typename E, int G>
static void attend_heads(const float *query, int64_t width, const E *keys, const E *values,
                         int64_t dim, int64_t count, const float *bias, int64_t bias_width,
                         float *most, float *total, float *sums, const E *after) {
    alignas(64) float scores[G * BLOCK];
    const auto score = dim == 4 * W   ? scores_of<E, G, 4>
                       : dim == 8 * W ? scores_of<E, G, 8>
                                      : scores_of<E, G, 0>;
    for (int64_t from = 0; from < count; from += BLOCK) {
        const int64_t here = count - from < BLOCK ? count - from : BLOCK;
        for (int64_t j = 0; j < here; j += W)
            score(query, width, keys + (from + j) * dim, values + (from + j) * dim, dim, here - j,
                  scores + j);
        for (int g = 0; g < G; ++g) {
            if (bias)
                for (int64_t j = 0; j < here; ++j)
                    scores[g * BLOCK + j] += bias[g * bias_width + from + j];
            soften(scores + g * BLOCK, here, most[g], total[g], sums + g * width, width);
        }
        const E *value = values + from * dim;
        const E *next = from + BLOCK < count ? keys + (from + BLOCK) * dim : after;
        int64_t x = 0;
        for (; x + TILE * W <= width; x += TILE * W)
            add_values<E, G, TILE>(sums, width, scores, value, next, dim, here, x);
        for (; x < width; x += W)
            add_values<E, G, 1>(sums, width, scores, value, next, dim, here, x);
    }
}

/* What one thread has of a (query, KV head) pair that others have parts of. */
struct Part {
    int64_t pair;
    const float *most, *total, *sums;  // [group], [group], [group, width]
};

/* One head of a query, scaled, as float32 in `row` [rounded(dim)], 0 beyond dim; `at`: elements
 * before it. */
template <typename Q>
static inline void read_head(const Q *head, int64_t dim, float scale, float *row) {
    for (int64_t x = 0; x < dim; x += W) store(row + x, load(head + x, dim - x) * scale);
}
static inline void read_head(int dtype, const void *query, int64_t at, int64_t dim, float scale,
                             float *row) {
    if (dtype == XGPT_FLOAT32)
        read_head(static_cast<const float *>(query) + at, dim, scale, row);
    else
        read_head(static_cast<const bfloat16 *>(query) + at, dim, scale, row);
}

template <typename Q>
static inline void write_heads(Q *out, const float *sums, const float *total, int64_t group,
                               int64_t width, int64_t dim) {
    for (int64_t g = 0; g < group; ++g) {
        const float scale = 1.0f / total[g];
        for (int64_t x = 0; x < dim; x += W)
            store(out + g * dim + x, load(sums + g * width + x) * scale, dim - x);
    }
}
/* `group` heads of sums / total, from element `at` of `out` on. */
static void write_out(int dtype, void *out, int64_t at, const float *sums, const float *total,
                      int64_t group, int64_t width, int64_t dim) {
    if (dtype == XGPT_FLOAT32)
        write_heads(static_cast<float *>(out) + at, sums, total, group, width, dim);
    else
        write_heads(static_cast<bfloat16 *>(out) + at, sums, total, group, width, dim);
}

template <typename E>
static int decode(const Decode &a) {
    const int64_t group = a.heads / a.kv_heads, width = rounded(a.dim), pairs = a.n * a.kv_heads;
    std::vector<int64_t> start(pairs + 1, 0);  // where a pair's keys begin in the long row of all
    for (int64_t pair = 0; pair < pairs; ++pair)
        start[pair + 1] = start[pair] + a.lengths[pair / a.kv_heads];
    const int64_t all_keys = start[pairs];
    const int threads = static_cast<int>(std::min<int64_t>(a.threads, all_keys / 256 + 1));
    const int64_t kept = group * (width + 2), room = group * width + 2 * kept;
    std::vector<float> scratch(threads * room);
    std::vector<Part> parts(threads * 2, Part{-1, nullptr, nullptr, nullptr});

    share(threads, [&](int thread) {
        const int64_t first = begin(all_keys, threads, thread);
        const int64_t last = begin(all_keys, threads, thread + 1);
        float *query = scratch.data() + thread * room, *sums = query + group * width;
        int cut = 0;
        int64_t pair = std::upper_bound(start.begin(), start.end(), first) - start.begin() - 1;
        for (; pair < pairs && start[pair] < last; ++pair) {
            const int64_t i = pair / a.kv_heads, head = pair % a.kv_heads;
            const int64_t from = std::max(first, start[pair]) - start[pair];
            const int64_t to = std::min(last, start[pair + 1]) - start[pair];
            const int64_t row = (a.slots[i] * a.kv_heads + head) * a.capacity + from;
            for (int64_t g = 0; g < group; ++g)
                read_head(a.dtype, a.query, i * a.query_stride + (head * group + g) * a.dim, a.dim,
                          a.scale, query + g * width);
            float *most = sums + group * width, *total = most + group;
            std::fill(sums, most, 0.0f);
            std::fill(most, total, NOTHING);
            std::fill(total, total + group, 0.0f);
            const int64_t then = std::min(pair + 1, pairs - 1);  // the pair whose keys come next
            const E *after = static_cast<const E *>(a.keys) +
                             (a.slots[then / a.kv_heads] * a.kv_heads + then % a.kv_heads) *
                                 a.capacity * a.dim;
            for (int64_t g = 0; g < group; g += KEPT) {
                const int64_t heads = std::min<int64_t>(KEPT, group - g);
                const float *bias = a.bias ? a.bias + (head * group + g) * a.bias_width +
                                                 a.bias_center - (a.lengths[i] - 1) + from
                                           : nullptr;
                const E *keys = static_cast<const E *>(a.keys) + row * a.dim;
                const E *values = static_cast<const E *>(a.values) + row * a.dim;
                const auto attend = heads == 1   ? attend_heads<E, 1>
                                    : heads == 2 ? attend_heads<E, 2>
                                    : heads == 3 ? attend_heads<E, 3>
                                                 : attend_heads<E, 4>;
                attend(query + g * width, width, keys, values, a.dim, to - from, bias, a.bias_width,
                       most + g, total + g, sums + g * width, after);
            }
            if (to - from == a.lengths[i]) {
                write_out(a.dtype, a.out, (i * a.heads + head * group) * a.dim, sums, total, group,
                          width, a.dim);
            } else {  // kept until all parts are there; a thread has two of them at most
                parts[thread * 2 + cut++] = Part{pair, most, total, sums};
                sums += kept;
            }
        }
    });

    std::vector<float> whole(kept);
    for (size_t at = 0; at < parts.size();) {
        const int64_t pair = parts[at].pair;
        if (pair < 0) {
            ++at;
            continue;
        }
        float *sums = whole.data(), *most = sums + group * width, *total = most + group;
        std::fill(sums, most, 0.0f);
        std::fill(most, total, NOTHING);
        std::fill(total, total + group, 0.0f);
        for (; at < parts.size() && (parts[at].pair == pair || parts[at].pair < 0); ++at) {
            const Part &part = parts[at];
            if (part.pair < 0) continue;
            for (int64_t g = 0; g < group; ++g) {
                const float now = std::max(most[g], part.most[g]);
                const float old = std::exp(most[g] - now), add = std::exp(part.most[g] - now);
                most[g] = now;
                total[g] = total[g] * old + part.total[g] * add;
                for (int64_t x = g * width; x < (g + 1) * width; x += W)
                    store(sums + x, load(sums + x) * old + load(part.sums + x) * add);
            }
        }
        const int64_t i = pair / a.kv_heads, head = pair % a.kv_heads;
        write_out(a.dtype, a.out, (i * a.heads + head * group) * a.dim, sums, total, group, width,
                  a.dim);
    }
    return XGPT_OK;
}

/* One input and KV head with its keys turned: keys [blocks, width, KEYS], values [keys, width]. */
struct Turned {
    std::vector<float> keys, values;

    template <typename E>
    void fill(const E *key, const E *value, int64_t stride, int64_t count, int64_t dim) {
        const int64_t width = rounded(dim), blocks = (count + KEYS - 1) / KEYS;
        keys.resize(blocks * dim * KEYS);
        values.resize(count * width);
        for (int64_t j = 0; j < blocks * KEYS; ++j) {
            float *block = keys.data() + j / KEYS * dim * KEYS + j % KEYS;
            for (int64_t x = 0; x < dim; ++x)
                block[x * KEYS] = j < count ? to_float(key[j * stride + x]) : 0.0f;
        }
        for (int64_t j = 0; j < count; ++j)
            for (int64_t x = 0; x < width; x += W)
                store(values.data() + j * width + x,
                      x < dim ? load(value + j * stride + x, dim - x) : vec{});
    }
};

/* scores [R, KEYS] of R rows of query [R, dim] with a block of turned keys [dim, KEYS]. */
template <int R>
static inline void tile_scores(const float *query, int64_t width, const float *keys, int64_t dim,
                               float *scores) {
    vec low[R] = {}, high[R] = {};
    for (int64_t x = 0; x < dim; ++x) {
        const vec k0 = load(keys + x * KEYS), k1 = load(keys + x * KEYS + W);
        for (int r = 0; r < R; ++r) {
            low[r] += query[r * width + x] * k0;
            high[r] += query[r * width + x] * k1;
        }
    }
    for (int r = 0; r < R; ++r) {
        store(scores + r * KEYS, low[r]);
        store(scores + r * KEYS + W, high[r]);
    }
}

/* sums [R, width] += weights [R, KEYS] x values [count, width], N registers from x on. */
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
            for (int i = 0; i < N; ++i) kept[r][i] += weights[r * KEYS + j] * v[i];
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(sums + r * width + x + i * W, kept[r][i]);
}

/* Rows [from, to) of an input and KV head; row r is head r % group of token r / group. */
template <typename E>
static void attend_rows(const Encode &a, const Task &task, Turned &turned,
                        std::vector<float> &scratch) {
    const int64_t group = a.heads / a.kv_heads, dim = a.dim, width = rounded(dim);
    const int64_t last = task.from + task.tokens;  // one past the last token's position
    const int64_t num_keys = a.causal ? task.first + last : task.keys;
    turned.fill(static_cast<const E *>(a.keys) + task.kv_offset,
                static_cast<const E *>(a.values) + task.kv_offset, a.kv_stride, num_keys, dim);
    scratch.resize(ROWS * (2 * width + KEYS));
    float *query = scratch.data(), *sums = query + ROWS * width, *scores = sums + ROWS * width;
    float most[ROWS], total[ROWS];
    int64_t limit[ROWS];
    const int64_t rows = task.tokens * group;
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t here = std::min<int64_t>(ROWS, rows - row);
        auto token_of = [&](int64_t r) { return task.from + (row + r) / group; };
        auto offset_of = [&](int64_t r) { return (task.head * group + (row + r) % group) * dim; };
        for (int64_t r = 0; r < ROWS; ++r) {
            if (r < here)
                read_head(a.dtype, a.query,
                          (task.packed + token_of(r)) * a.query_stride + offset_of(r), dim, a.scale,
                          query + r * width);
            else
                std::fill(query + r * width, query + (r + 1) * width, 0.0f);
            most[r] = NOTHING;
            total[r] = 0;
            limit[r] = r >= here ? 0 : a.causal ? task.first + token_of(r) + 1 : task.keys;
        }
        std::fill(sums, sums + ROWS * width, 0.0f);
        for (int64_t j = 0; j < limit[here - 1]; j += KEYS) {
            tile_scores<ROWS>(query, width, turned.keys.data() + j * dim, dim, scores);
            for (int64_t r = 0; r < ROWS; ++r) {
                const int64_t seen = std::min<int64_t>(KEYS, limit[r] - j);
                float *row_scores = scores + r * KEYS;
                if (seen <= 0) {
                    std::fill(row_scores, row_scores + KEYS, 0.0f);
                    continue;
                }
                if (a.bias) {
                    const float *bias = a.bias +
                                        (task.head * group + (row + r) % group) * a.bias_width +
                                        a.bias_center + j - (task.first + token_of(r));
                    for (int64_t i = 0; i < seen; ++i) row_scores[i] += bias[i];
                }
                soften(row_scores, seen, most[r], total[r], sums + r * width, width);
                if (seen <= W) std::fill(row_scores + W, row_scores + KEYS, 0.0f);
            }
            const int64_t count = std::min<int64_t>(KEYS, limit[here - 1] - j);
            const float *values = turned.values.data() + j * width;
            int64_t x = 0;
            for (; x + 2 * W <= width; x += 2 * W)
                tile_values<ROWS, 2>(sums, width, scores, values, count, x);
            for (; x < width; x += W)
                tile_values<ROWS, 1>(sums, width, scores, values, count, x);
        }
        for (int64_t r = 0; r < here; ++r)
            write_out(a.dtype, a.out, (task.packed + token_of(r)) * a.heads * dim + offset_of(r),
                      sums + r * width, total + r, 1, width, dim);
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

static int decode_any(const Decode &a) {
    return a.kv_dtype == XGPT_FLOAT32 ? decode<float>(a) : decode<bfloat16>(a);
}
static int encode_any(const Encode &a) {
    return a.kv_dtype == XGPT_FLOAT32 ? encode<float>(a) : encode<bfloat16>(a);
}

}  // namespace XGPT_ISA
}  // namespace xgpt
