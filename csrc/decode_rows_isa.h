/* The loops of decode_isa.h over rows of the cache, for one instruction set: products of keys with
 * the heads that share them, and sums of values. A query of float32 is multiplied by keys and values
 * that are widened; one of bfloat16, like them, in dot products of pairs. */
namespace xgpt {
namespace XGPT_ISA {

constexpr int KEPT = 4;                     // heads that read a key together
constexpr int TILE = XGPT_W == 16 ? 2 : 1;  // pairs of registers of a value, summed together

/* Rows of a head: N pairs of registers each where N > 0, which the compiler then knows. */
template <int N>
XGPT_INLINE int64_t row_size(int64_t dim) {
    return N > 0 ? N * 2 * W : dim;
}

/* The dot products of one key with G heads of a query. */
template <int G, int N, typename E>
XGPT_INLINE void dots_of(const float *query, int64_t width, const E *key, int64_t dim, vec *dots) {
    vec a, b;
    for (int g = 0; g < G; ++g) dots[g] = vec{};
    if constexpr (N > 0) {
        for (int i = 0; i < N; ++i) {
            load_two(key + i * 2 * W, a, b);
            for (int g = 0; g < G; ++g) {
                const float *q = query + g * N * 2 * W + i * 2 * W;
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

/* kept [G, 2 N] += weights [G, BLOCK] x one value, 2 N registers of it, of which `left` elements are
 * there; or, of a query of bfloat16, two values, the `next` (null: zeros) beside it. */
template <int G, int N, bool IS_WHOLE, typename E, typename Next>
XGPT_INLINE void add_value(vec (&kept)[G][2 * N], const float *weights, const E *value, Next,
                           int64_t left) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        vec a, b;
        if constexpr (IS_WHOLE)
            load_two(value + i * 2 * W, a, b);
        else
            load_two(value + i * 2 * W, left - i * 2 * W, a, b);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            kept[g][2 * i] += weights[g * BLOCK] * a;
            kept[g][2 * i + 1] += weights[g * BLOCK] * b;
        }
    }
}

#ifdef XGPT_HAS_DOTS
template <int G, int N>
XGPT_INLINE void dots_of(const bfloat16 *query, int64_t width, const bfloat16 *key, int64_t dim,
                         vec *dots) {
    for (int g = 0; g < G; ++g) dots[g] = vec{};
    if constexpr (N > 0) {
        for (int i = 0; i < N; ++i) {
            const vec k = load_pairs(key + i * 2 * W, 2 * W);
            for (int g = 0; g < G; ++g)
                dots[g] = add_dots(dots[g], load_pairs(query + (g * N + i) * 2 * W, 2 * W), k);
        }
    } else {
        for (int64_t x = 0; x < dim; x += 2 * W) {
            const vec k = load_pairs(key + x, dim - x);
            for (int g = 0; g < G; ++g)
                dots[g] = add_dots(dots[g], load_pairs(query + g * width + x, 2 * W), k);
        }
    }
}

template <int G, int N, bool IS_WHOLE, typename Next>
XGPT_INLINE void add_value(vec (&kept)[G][2 * N], const bfloat16 *weights, const bfloat16 *value,
                           Next next, int64_t left) {
    vec pairs[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) pairs[g] = each_pair(weights + g * BLOCK);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        const int64_t here = IS_WHOLE ? 2 * W : left - i * 2 * W;
        vec second{}, low, high;
        if constexpr (!std::is_null_pointer_v<Next>) second = load_pairs(next + i * 2 * W, here);
        pair_rows(load_pairs(value + i * 2 * W, here), second, low, high);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            kept[g][2 * i] = add_dots(kept[g][2 * i], pairs[g], low);
            kept[g][2 * i + 1] = add_dots(kept[g][2 * i + 1], pairs[g], high);
        }
    }
}
#endif

/* dots[g]: lane i is head g's product with key first + i, of COUNT keys. Where not all of W are
 * there, those beyond the last are the last one. `ahead`: as many rows to be asked for. */
template <int G, int N, int COUNT, bool IS_WHOLE, typename Q, typename E>
XGPT_INLINE void dots_of_keys(const Q *query, int64_t width, const E *keys, int64_t first,
                              int64_t last, int64_t dim, const E *ahead, vec *dots) {
    const int64_t row = row_size<N>(dim);
    if constexpr (COUNT == 1) {
        ask_for(ahead, row * sizeof(E));
        dots_of<G, N>(query, width, keys + (IS_WHOLE || first < last ? first : last) * row, dim,
                      dots);
    } else {
        vec low[G], high[G];
        dots_of_keys<G, N, COUNT / 2, IS_WHOLE>(query, width, keys, first, last, dim, ahead, low);
        dots_of_keys<G, N, COUNT / 2, IS_WHOLE>(query, width, keys, first + COUNT / 2, last, dim,
                                                ahead + COUNT / 2 * row, high);
        for (int g = 0; g < G; ++g) dots[g] = add_halves<COUNT / 2>(low[g], high[g]);
    }
}

/* scores [G, BLOCK] of a piece's keys, some more beyond them. */
template <int G, int N, typename Q, typename E>
static void scores_of(const Q *query, int64_t width, const Piece<E> &piece, int64_t dim, float scale,
                      float *scores, Asker<E> *asker) {
    vec dots[G];
    int64_t j = 0;
    for (; j + W <= piece.count; j += W) {
        dots_of_keys<G, N, W, true>(query, width, piece.keys + j * row_size<N>(dim), 0, 0, dim,
                                    asker ? asker->take() : piece.keys, dots);
        for (int g = 0; g < G; ++g) store(scores + g * BLOCK + j, dots[g] * scale);
    }
    if (j == piece.count) return;
    dots_of_keys<G, N, W, false>(query, width, piece.keys, j, piece.count - 1, dim,
                                 asker ? asker->take() : piece.keys, dots);
    for (int g = 0; g < G; ++g) store(scores + g * BLOCK + j, dots[g] * scale);
}

/* sums [G, width] += weights [G, BLOCK] x a piece's values, M pairs of registers at x. */
template <int G, int N, int M, bool IS_WHOLE, typename Q, typename E>
static void add_values(float *sums, int64_t width, const Q *weights, const Piece<E> &piece,
                       int64_t dim, int64_t x, Asker<E> *asker) {
    constexpr int STEP = std::is_same_v<Q, float> ? 1 : 2;  // values at a time
    const int64_t row = row_size<N>(dim);
    vec kept[G][2 * M];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * M; ++i) kept[g][i] = load(sums + g * width + x + i * W);
    for (int64_t j = 0; j < piece.count; j += W) {
        const E *value = piece.values + j * row + x;
        const E *ahead = asker && x == 0 ? asker->take() : value;  // whole rows, with the first
        const int64_t here = std::min<int64_t>(W, piece.count - j);
        int64_t i = 0;
        for (; i + STEP <= here; i += STEP) {
            ask_for(ahead + i * row, row * STEP * sizeof(E));
            add_value<G, M, IS_WHOLE>(kept, weights + j + i, value + i * row,
                                      value + (i + 1) * row, dim - x);
        }
        if (i < here) {
            ask_for(ahead + i * row, row * sizeof(E));
            add_value<G, M, IS_WHOLE>(kept, weights + j + i, value + i * row,
                                      nullptr, dim - x);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * M; ++i) store(sums + g * width + x + i * W, kept[g][i]);
}

}  // namespace XGPT_ISA
}  // namespace xgpt
