/* Attention of decoded tokens, for one instruction set; included by attention_isa.h.
 *
 * Each key and value is read once for all the heads that share them (as many as KEPT at a time), so
 * that it runs at the speed of the memory. The keys of all (query, KV head) pairs stand in one long
 * row that is cut into equal parts, one a thread: a pair that is cut is put together at the end
 * from its parts' maxima, sums and sums of values.
 */
namespace xgpt {
namespace XGPT_ISA {

/* The type in whose order (load_two) values are summed: pairs are summed in that of floats. */
template <typename Q, typename E>
using Kept = std::conditional_t<std::is_same_v<Q, float>, E, float>;

/* G heads of one query over a piece. query [G, width]; most, total [G] and sums [G, width] go on
 * from what they are; `bias` [G, bias_width] or null. */
template <int G, int N, typename Q, typename E>
static void attend_heads(const Q *query, int64_t width, const Piece<E> &piece, int64_t dim,
                         float scale, const float *bias, int64_t bias_width, float *most,
                         float *total, float *sums, Asker<E> *asker) {
    alignas(64) float scores[G * BLOCK];
    alignas(64) Q weights[G * BLOCK];
    scores_of<G, N>(query, width, piece, dim, scale, scores, asker);
    for (int g = 0; g < G; ++g) {
        if (bias)
            for (int64_t j = 0; j < piece.count; ++j)
                scores[g * BLOCK + j] += bias[g * bias_width + j];
        if (asker) asker->ask_early();
        soften(scores + g * BLOCK, piece.count, weights + g * BLOCK, most[g], total[g],
               sums + g * width, width);
    }
    int64_t x = 0;
    for (; x + TILE * 2 * W <= row_size<N>(dim); x += TILE * 2 * W)
        add_values<G, N, TILE, true>(sums, width, weights, piece, dim, x, asker);
    for (; N == 0 && x < dim; x += 2 * W)
        add_values<G, N, 1, false>(sums, width, weights, piece, dim, x, asker);
}

/* What one thread has of a (query, KV head) pair that others have parts of. */
struct Part {
    int64_t pair;
    const float *most, *total, *sums;  // [group], [group], [group, width]
};

template <int G, typename Q, typename E>
static auto attend_of(int64_t dim) {
    return dim == 4 * W   ? attend_heads<G, 2, Q, E>
           : dim == 8 * W ? attend_heads<G, 4, Q, E>
                          : attend_heads<G, 0, Q, E>;
}

/* Heads of one query over a piece, as many as KEPT at a time. */
template <typename Q, typename E>
static void attend(const Decode &a, const Piece<E> &piece, const Q *query, int64_t width,
                   float *most, float *total, float *sums, Asker<E> &asker) {
    const int64_t group = a.heads / a.kv_heads, head = piece.pair % a.kv_heads * group;
    const int64_t length = a.lengths[piece.pair / a.kv_heads];
    for (int64_t g = 0; g < group; g += KEPT) {
        const float *bias = a.bias ? a.bias + (head + g) * a.bias_width + a.bias_center -
                                         (length - 1) + piece.at
                                   : nullptr;
        const int64_t heads = std::min<int64_t>(KEPT, group - g);
        const auto attend = heads == 1   ? attend_of<1, Q, E>(a.dim)
                            : heads == 2 ? attend_of<2, Q, E>(a.dim)
                            : heads == 3 ? attend_of<3, Q, E>(a.dim)
                                         : attend_of<4, Q, E>(a.dim);
        attend(query + g * width, width, piece, a.dim, a.scale, bias, a.bias_width, most + g,
               total + g, sums + g * width, g == 0 ? &asker : nullptr);  // others find it there
    }
}

template <typename Q, typename E>
static int decode(const Decode &a) {
    const int64_t group = a.heads / a.kv_heads, width = rounded(a.dim, 2 * W);
    const int64_t pairs = a.n * a.kv_heads;
    std::vector<int64_t> start(pairs + 1, 0);  // where a pair's keys begin in the long row of all
    for (int64_t pair = 0; pair < pairs; ++pair)
        start[pair + 1] = start[pair] + a.lengths[pair / a.kv_heads];
    const int64_t all_keys = start[pairs];
    const int threads = static_cast<int>(std::min<int64_t>(a.threads, all_keys / 256 + 1));
    const int64_t kept = group * (width + 2);
    std::vector<Q> queries(threads * group * width);
    std::vector<float> scratch(threads * 2 * kept);
    std::vector<Part> parts(threads * 2, Part{-1, nullptr, nullptr, nullptr});

    share(threads, [&](int thread) {
        const int64_t first = begin(all_keys, threads, thread);
        const int64_t last = begin(all_keys, threads, thread + 1);
        Q *query = queries.data() + thread * group * width;
        float *sums = scratch.data() + thread * 2 * kept;
        int cut = 0;
        Walk<E> walk(a, start, first, last);
        Asker<E> asker(walk);
        for (Piece<E> piece; walk.next(piece);) {
            const int64_t i = piece.pair / a.kv_heads, head = piece.pair % a.kv_heads;
            float *most = sums + group * width, *total = most + group;
            if (piece.at == std::max(first - start[piece.pair], int64_t{0})) {  // its first
                for (int64_t g = 0; g < group; ++g)
                    read_head<E>(a.dtype, a.query, i * a.query_stride + (head * group + g) * a.dim,
                                 a.dim, query + g * width, width);
                std::fill(sums, most, 0.0f);
                std::fill(most, total, NOTHING);
                std::fill(total, total + group, 0.0f);
            }
            attend(a, piece, query, width, most, total, sums, asker);
            const int64_t beyond = start[piece.pair] + piece.at + piece.count;
            if (beyond < std::min(last, start[piece.pair + 1])) continue;
            if (first <= start[piece.pair] && start[piece.pair + 1] <= last) {
                write_out<Kept<Q, E>>(a.dtype, a.out, (i * a.heads + head * group) * a.dim, sums,
                                      total, group, width, a.dim);
            } else {  // kept until all parts are there; a thread has two of them at most
                parts[thread * 2 + cut++] = Part{piece.pair, most, total, sums};
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
        write_out<Kept<Q, E>>(a.dtype, a.out, (i * a.heads + head * group) * a.dim, sums, total, group,
                              width, a.dim);
    }
    return XGPT_OK;
}

static int decode_any(const Decode &a) {
#ifdef XGPT_HAS_DOTS
    // a key that one head reads is multiplied in float32 before the next is there
    const bool is_narrow = a.dtype == XGPT_BFLOAT16 && a.kv_dtype == XGPT_BFLOAT16 &&
                           a.heads > a.kv_heads;
    return is_narrow ? decode<bfloat16, bfloat16>(a) : XGPT_WIDE::decode_any(a);
#else
    return a.kv_dtype == XGPT_FLOAT32 ? decode<float, float>(a) : decode<float, bfloat16>(a);
#endif
}

}  // namespace XGPT_ISA
}  // namespace xgpt
