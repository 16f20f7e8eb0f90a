/* Attention of decoded tokens, for one instruction set; included by decode_attention.cpp.
 *
 * Each key and value is read once for all heads that share it (up to KEPT at a time), so that it
 * runs at the memory's speed. The keys of all (request, KV head) pairs form one long row that is
 * cut into equal parts, one per thread. A pair that is cut is combined at the end from its
 * parts' maxima, sums and sums of values. */
#include "attention_isa.h"

namespace xgpt {
namespace XGPT_ISA {

constexpr int BLOCK = 128;                  // keys whose scores are held at a time
template <typename E>
constexpr int AHEAD = 128 / sizeof(E);      // keys or values to prefetch ahead
constexpr int KEPT = 4;                     // heads that read a key together
constexpr int TILE = XGPT_W == 16 ? 2 : 1;  // pairs of registers of a value, summed together

/* Prefetches `bytes` from p on into the second-level cache. The order is: keys of a block, its
 * values, the next block's keys. */
static inline void ask_for(const void *p, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(static_cast<const char *>(p) + line, 0, 2);
}

/* Dot products of one key with G heads of a query; N > 0: N pairs of registers a row. */
template <typename E, int G, int N>
XGPT_INLINE void dots_of(const float *query, int64_t width, const E *key, int64_t dim, vec *dots) {
    vec a, b;
    for (int g = 0; g < G; ++g) dots[g] = vec{};
    if constexpr (N > 0) {
        for (int i = 0; i < N; ++i) {
            load_two(key + i * 2 * W, a, b);
            for (int g = 0; g < G; ++g) {
                const float *q = query + g * width + i * 2 * W;
                dots[g] = dots[g] + load(q) * a + load(q + W) * b;
            }
        }
    } else {
        for (int64_t x = 0; x < dim; x += 2 * W) {
            load_two(key + x, dim - x, a, b);
            for (int g = 0; g < G; ++g) {
                const float *q = query + g * width + x;
                dots[g] = dots[g] + load(q) * a + load(q + W) * b;
            }
        }
    }
}

/* Lane i of dots[g]: product of head g with key first + i, of COUNT keys. Keys beyond the last
 * equal the last. `ahead`: keys or values to prefetch. */
template <typename E, int G, int N, int COUNT>
XGPT_INLINE void dots_of_keys(const float *query, int64_t width, const E *keys, int64_t first,
                              int64_t last, int64_t dim, const E *ahead, vec *dots) {
    if constexpr (COUNT == 1) {
        ask_for(ahead, (N ? N * 2 * W : dim) * sizeof(E));
        dots_of<E, G, N>(query, width, keys + (first < last ? first : last) * dim, dim, dots);
    } else {
        vec low[G], high[G];
        dots_of_keys<E, G, N, COUNT / 2>(query, width, keys, first, last, dim, ahead, low);
        dots_of_keys<E, G, N, COUNT / 2>(query, width, keys, first + COUNT / 2, last, dim,
                                         ahead + COUNT / 2 * dim, high);
        for (int g = 0; g < G; ++g) dots[g] = add_halves<COUNT / 2>(low[g], high[g]);
    }
}

/* Scores [G, BLOCK] of `count` keys [count, dim], and some beyond; `values` are read next. */
template <typename E, int G, int N>
static void scores_of(const float *query, int64_t width, const E *keys, const E *values,
                      int64_t dim, int64_t count, float scale, float *scores) {
    // measured: a register's keys in one piece are no faster, and take longer to compile; for other
    // sizes, halves are 6 to 9 % faster only for a single head of size 80
    constexpr int PARTS = N || G == 1 ? 2 : 4, KEYS = W / PARTS;
    const int64_t whole = rounded(count, W);
    for (int64_t j = 0; j < count; j += W) {
        const E *ahead = j + AHEAD<E> < whole ? keys + (j + AHEAD<E>) * dim
                                           : values + (j + AHEAD<E> - whole) * dim;
        vec parts[PARTS][G];
#pragma GCC unroll 1
        for (int part = 0; part < PARTS; ++part)
            dots_of_keys<E, G, N, KEYS>(query, width, keys, j + part * KEYS, count - 1, dim,
                                        ahead + part * KEYS * dim, parts[part]);
        for (int g = 0; g < G; ++g) {
            vec low = parts[0][g], high = parts[PARTS / 2][g];
            if constexpr (PARTS == 4) {
                low = add_halves<KEYS>(low, parts[1][g]);
                high = add_halves<KEYS>(high, parts[3][g]);
            }
            store(scores + g * BLOCK + j, add_halves<W / 2>(low, high) * scale);
        }
    }
}

/* sums [G, width] += weights [G, BLOCK] x values [count, dim], N pairs of registers at x; the
 * keys `next` are read next. */
template <typename E, int G, int N>
static void add_values(float *sums, int64_t width, const float *weights, const E *values,
                       const E *next, int64_t dim, int64_t count, int64_t x) {
    vec kept[G][2 * N];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < 2 * N; ++i) kept[g][i] = load(sums + g * width + x + i * W);
    const bool whole = x + N * 2 * W <= dim;
    for (int64_t j = 0; j < count; ++j) {
        const E *value = values + j * dim + x;
        ask_for(j + AHEAD<E> < count ? value + AHEAD<E> * dim : next + (j + AHEAD<E> - count) * dim + x,
                N * 2 * W * sizeof(E));
        for (int i = 0; i < N; ++i) {
            vec a, b;
            if (whole)
                load_two(value + i * 2 * W, a, b);
            else
                load_two(value + i * 2 * W, dim - x - i * 2 * W, a, b);
            for (int g = 0; g < G; ++g) {
                kept[g][2 * i] += weights[g * BLOCK + j] * a;
                kept[g][2 * i + 1] += weights[g * BLOCK + j] * b;
            }
        }
    }
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < 2 * N; ++i) store(sums + g * width + x + i * W, kept[g][i]);
}

/* Attends with G heads of one query to `count` keys of one KV head. query [G, width]; most,
 * total [G] and sums [G, width] are updated; `bias` [G, bias_width] or null. */
template <typename E, int G>
static void attend_heads(const float *query, int64_t width, const E *keys, const E *values,
                         int64_t dim, int64_t count, float scale, const float *bias,
                         int64_t bias_width, float *most, float *total, float *sums,
                         const E *after) {
    alignas(64) float scores[G * BLOCK];
    const auto score = dim == 4 * W   ? scores_of<E, G, 2>
                       : dim == 8 * W ? scores_of<E, G, 4>
                                      : scores_of<E, G, 0>;
    for (int64_t from = 0; from < count; from += BLOCK) {
        const int64_t here = count - from < BLOCK ? count - from : BLOCK;
        score(query, width, keys + from * dim, values + from * dim, dim, here, scale,
              scores);
        for (int g = 0; g < G; ++g) {
            if (bias)
                for (int64_t j = 0; j < here; ++j)
                    scores[g * BLOCK + j] += bias[g * bias_width + from + j];
            soften(scores + g * BLOCK, here, scores + g * BLOCK, most[g], total[g],
                   sums + g * width, width);
        }
        const E *value = values + from * dim;
        const E *next = from + BLOCK < count ? keys + (from + BLOCK) * dim : after;
        int64_t x = 0;
        for (; x + TILE * 2 * W <= width; x += TILE * 2 * W)
            add_values<E, G, TILE>(sums, width, scores, value, next, dim, here, x);
        for (; x < width; x += 2 * W)
            add_values<E, G, 1>(sums, width, scores, value, next, dim, here, x);
    }
}

/* The heads of one query that share a KV head, as attend_heads takes them; sums are in E's order
 * (vec_isa.h). */
template <typename E>
struct HeadsOf {
    const Decode &a;
    int64_t width;
    Lined<float> query;  // [group, width]

    HeadsOf(const Decode &decode, int64_t group, int64_t wide)
        : a(decode), width(wide), query(group * wide) {}

    /* Reads the heads from element `at` of the queries on. */
    void read(int64_t at, int64_t group) {
        for (int64_t g = 0; g < group; ++g)
            read_head<E>(a.dtype, a.query, at + g * a.dim, a.dim, query.data() + g * width, width);
    }
    /* Attends with all of them to `count` keys; those at `after` are read next. most, total
     * [group] and sums [group, width] are updated; `bias` [group, a.bias_width] or null. */
    void attend(const E *keys, const E *values, int64_t group, int64_t count, const float *bias,
                float *most, float *total, float *sums, const E *after) {
        for (int64_t g = 0; g < group; g += KEPT) {
            const int64_t heads = std::min<int64_t>(KEPT, group - g);
            const auto some = heads == 1   ? attend_heads<E, 1>
                              : heads == 2 ? attend_heads<E, 2>
                              : heads == 3 ? attend_heads<E, 3>
                                           : attend_heads<E, 4>;
            some(query.data() + g * width, width, keys, values, a.dim, count, a.scale,
                 bias ? bias + g * a.bias_width : nullptr, a.bias_width, most + g, total + g,
                 sums + g * width, after);
        }
    }
};

/* One thread's part of a (request, KV head) pair that other threads share. */
struct Part {
    int64_t pair;
    const float *most, *total, *sums;  // [group], [group], [group, width]
};

template <typename E>
static int decode(const Decode &a) {
    const int64_t group = a.heads / a.kv_heads, width = rounded(a.dim, 2 * W);
    const int64_t pairs = a.n * a.kv_heads;
    std::vector<int64_t> start(pairs + 1, 0);  // where each pair's keys begin in the long row
    for (int64_t pair = 0; pair < pairs; ++pair)
        start[pair + 1] = start[pair] + a.lengths[pair / a.kv_heads];
    const int64_t all_keys = start[pairs];
    const int threads = static_cast<int>(std::min<int64_t>(a.threads, all_keys / 256 + 1));
    const int64_t kept = rounded(group * (width + 2), 16), room = 2 * kept;
    Lined<float> scratch(threads * room);
    std::vector<Part> parts(threads * 2, Part{-1, nullptr, nullptr, nullptr});

    share(threads, [&](int thread) {
        const int64_t first = begin(all_keys, threads, thread);
        const int64_t last = begin(all_keys, threads, thread + 1);
        float *sums = scratch.data() + thread * room;
        HeadsOf<E> heads(a, group, width);
        int cut = 0;
        int64_t pair = std::upper_bound(start.begin(), start.end(), first) - start.begin() - 1;
        for (; pair < pairs && start[pair] < last; ++pair) {
            const int64_t i = pair / a.kv_heads, head = pair % a.kv_heads;
            const int64_t from = std::max(first, start[pair]) - start[pair];
            const int64_t to = std::min(last, start[pair + 1]) - start[pair];
            heads.read(i * a.query_stride + head * group * a.dim, group);
            float *most = sums + group * width, *total = most + group;
            std::fill(sums, most, 0.0f);
            std::fill(most, total, NOTHING);
            std::fill(total, total + group, 0.0f);
            const int64_t then = std::min(pair + 1, pairs - 1);  // the pair whose keys come next
            // elements before a head's keys in a block
            auto start_of = [&](int64_t block, int64_t of_head) {
                return (block * a.kv_heads + of_head) * a.blocks.block_size * a.dim;
            };
            const int64_t next = start_of(a.blocks.of(then / a.kv_heads, 0),
                                          then % a.kv_heads);
            a.blocks.each(i, from, to,
                          [&](int64_t block, int64_t offset, int64_t at, int64_t count) {
                const int64_t row = start_of(block, head) + offset * a.dim;
                const E *keys = static_cast<const E *>(a.keys) + row;
                const E *values = static_cast<const E *>(a.values) + row;
                const int64_t beyond = at + count;  // keys that are read next
                const E *after = static_cast<const E *>(a.keys) + (
                    beyond < to ? start_of(a.blocks.of(i, beyond), head) : next);
                heads.attend(keys, values, group, count,
                             a.bias ? a.bias + head * group * a.bias_width + a.bias_center -
                                          (a.lengths[i] - 1) + at
                                    : nullptr,
                             most, total, sums, after);
            });
            if (to - from == a.lengths[i]) {
                write_out<E>(a.dtype, a.out, (i * a.heads + head * group) * a.dim, sums, total,
                             group, width, a.dim);
            } else {  // kept until all parts are there; a thread has at most two
                parts[thread * 2 + cut++] = Part{pair, most, total, sums};
                sums += kept;
            }
        }
    });

    Lined<float> whole(kept);
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
        write_out<E>(a.dtype, a.out, (i * a.heads + head * group) * a.dim, sums, total, group, width,
                     a.dim);
    }
    return XGPT_OK;
}

static int decode_any(const Decode &a) {
#ifdef XGPT_HAS_DOTS  // measured: pairs are no faster (0.91 to 0.97), since this waits for memory
    return XGPT_WIDE::decode_any(a);
#else
    return a.kv_dtype == XGPT_FLOAT32 ? decode<float>(a) : decode<bfloat16>(a);
#endif
}

}  // namespace XGPT_ISA
}  // namespace xgpt
