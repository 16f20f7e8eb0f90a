/* Operations on each token's row between a layer's products, one pass each, for one instruction
 * set (each_isa.h). Values have the run's type; sums are in float32. */
namespace xgpt {
namespace XGPT_ISA {

/* hidden += added, if any; the row as float32 in `row` [rounded(H)], 0 beyond H. Adds the
 * stored, rounded values to `total` and `squares`. */
template <typename E>
static inline void read_row(E *hidden, const E *added, int64_t size, float *row, vec &total,
                            vec &squares) {
    for (int64_t x = 0; x < size; x += W) {
        const int64_t count = size - x;
        vec v = load(hidden + x, count);
        if (added) {
            v = as_kept<E>(v + load(added + x, count));
            store(hidden + x, v, count);
        }
        store(row + x, v);
        total += v;
        squares += v * v;
    }
}

/* Rows [from, to) of xgpt_add_rms_norm or, with `bias`, of xgpt_add_layer_norm. */
template <typename E>
static void norm_rows(const Norm &a, int64_t from, int64_t to) {
    const int64_t size = a.hidden_size, room = (size + W - 1) / W * W;
    std::vector<float> scratch(3 * room);
    float *row = scratch.data(), *weight = row + room, *bias = weight + room;
    for (int64_t x = 0; x < size; x += W) {
        store(weight + x, load(static_cast<const E *>(a.weight) + x, size - x));
        if (a.bias) store(bias + x, load(static_cast<const E *>(a.bias) + x, size - x));
    }
    for (int64_t t = from; t < to; ++t) {
        E *normed = static_cast<E *>(a.normed) + t * size;
        vec total{}, squares{};
        read_row(static_cast<E *>(a.hidden) + t * size,
                 a.added ? static_cast<const E *>(a.added) + t * size : nullptr, size, row, total,
                 squares);
        float mean = 0;
        if (a.bias) {  // of deviations: squares of large numbers lose them
            mean = sum(total) / static_cast<float>(size);
            squares = vec{};
            for (int64_t x = 0; x < size; x += W) {
                vec off = load(row + x) - mean;
                if (x + W > size) off = lanes() < static_cast<int32_t>(size - x) ? off : vec{};
                squares += off * off;
            }
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + a.eps);
        for (int64_t x = 0; x < size; x += W) {
            vec out = (load(row + x) - mean) * scale * load(weight + x);
            if (a.bias) out += load(bias + x);
            store(normed + x, out, size - x);
        }
    }
}

/* Rotates one head onto `out` (which may be the same); its halves form the pairs. Copies it
 * without cos. */
template <typename From, typename To>
static inline void turn(const From *head, To *out, const float *cos, const float *sin,
                        int64_t dim) {
    if (!cos) {
        for (int64_t x = 0; x < dim; x += W) store(out + x, load(head + x, dim - x), dim - x);
        return;
    }
    const int64_t half = dim / 2;
    for (int64_t x = 0; x < half; x += W) {
        const int64_t count = half - x;
        const vec c = load(cos + x, count), s = load(sin + x, count);
        const vec low = load(head + x, count), high = load(head + half + x, count);
        store(out + x, low * c - high * s, count);
        store(out + half + x, high * c + low * s, count);
    }
}

template <typename E, typename Kept>
static void place_rows(const Place &a, int64_t from, int64_t to) {
    const int64_t heads = a.heads, kv_heads = a.kv_heads, dim = a.dim;
    for (int64_t t = from; t < to; ++t) {
        E *query = static_cast<E *>(a.joint) + t * (heads + 2 * kv_heads) * dim;
        const E *key = query + heads * dim, *value = key + kv_heads * dim;
        const float *cos = a.cos ? a.cos + t * (dim / 2) : nullptr;
        const float *sin = a.cos ? a.sin + t * (dim / 2) : nullptr;
        if (cos)
            for (int64_t head = 0; head < heads; ++head)
                turn(query + head * dim, query + head * dim, cos, sin, dim);
        for (int64_t head = 0; head < kv_heads; ++head) {
            const int64_t at =
                ((a.slots[t] * kv_heads + head) * a.capacity + a.positions[t]) * dim;
            turn(key + head * dim, static_cast<Kept *>(a.keys) + at, cos, sin, dim);
            turn(value + head * dim, static_cast<Kept *>(a.values) + at, nullptr, nullptr, dim);
        }
    }
}

/* out = silu(gate) * up of N registers at once, `count` elements in all. */
template <int N, typename E>
XGPT_INLINE void gate_some(E *out, const E *gate, const E *up, int64_t count) {
    vec g[N], e[N];
    for (int i = 0; i < N; ++i) g[i] = load(gate + i * W, count - i * W);
    for (int i = 0; i < N; ++i) e[i] = -larger(g[i], all(-88.0f));  // more exceeds float32
    exp(e);
    for (int i = 0; i < N; ++i)
        store(out + i * W, g[i] / (e[i] + 1.0f) * load(up + i * W, count - i * W), count - i * W);
}
template <typename E>
static void gate_rows(const Gate &a, int64_t from, int64_t to) {
    constexpr int AT_ONCE = 4;
    for (int64_t t = from; t < to; ++t) {
        const E *gate = static_cast<const E *>(a.joint) + t * a.stride, *up = gate + a.up;
        E *out = static_cast<E *>(a.out) + t * a.out_stride;
        int64_t x = 0;
        for (; x + AT_ONCE * W <= a.inner; x += AT_ONCE * W)
            gate_some<AT_ONCE>(out + x, gate + x, up + x, AT_ONCE * W);
        for (; x < a.inner; x += W) gate_some<1>(out + x, gate + x, up + x, a.inner - x);
    }
}

/* Compares the largest element of each block of a row with the best so far. Its place is
 * searched once, at the row's end, in the block that holds it. */
template <typename E>
static void best_rows(const Best &a, int64_t from, int64_t to) {
    constexpr int64_t BLOCK = 64 * W, AT_ONCE = 4;
    for (int64_t t = from; t < to; ++t) {
        const E *logits = static_cast<const E *>(a.logits) + t * a.vocabulary;
        float best = a.best[t];
        int64_t block = -1;
        for (int64_t start = 0; start < a.vocabulary; start += BLOCK) {
            const int64_t end = std::min(start + BLOCK, a.vocabulary);
            vec top[AT_ONCE];
            for (vec &part : top) part = all(best);
            int64_t x = start;
            for (; x + AT_ONCE * W <= end; x += AT_ONCE * W)
                for (int64_t i = 0; i < AT_ONCE; ++i)
                    top[i] = larger(load(logits + x + i * W), top[i]);
            for (; x + W <= end; x += W) top[0] = larger(load(logits + x), top[0]);
            float found = largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
            for (; x < end; ++x) found = std::max(found, to_float(logits[x]));
            if (found > best) {
                best = found;
                block = start;
            }
        }
        if (block < 0) continue;
        a.best[t] = best;
        while (to_float(logits[block]) != best) ++block;
        a.found[t] = a.first_token + block;
    }
}

/* Runs any of these operations on its rows, shared among threads in contiguous parts. */
template <typename Arguments>
static int shared_rows(const Arguments &a, void (*floats)(const Arguments &, int64_t, int64_t),
                       void (*bfloats)(const Arguments &, int64_t, int64_t)) {
    share(a.threads, [&](int i) {
        (a.dtype == XGPT_FLOAT32 ? floats : bfloats)(a, begin(a.tokens, a.threads, i),
                                                     begin(a.tokens, a.threads, i + 1));
    });
    return XGPT_OK;
}

/* Code without bfloat16 is the same with and without pairs: compiled once. */
#ifdef XGPT_HAS_DOTS
namespace plain = xgpt::XGPT_WIDE;
#else
namespace plain = xgpt::XGPT_ISA;
#endif

static int norm_any(const Norm &a) {
    return shared_rows(a, plain::norm_rows<float>, norm_rows<bfloat16>);
}
static int place_any(const Place &a) {
    if (a.kv_dtype == XGPT_FLOAT32)
        return shared_rows(a, plain::place_rows<float, float>, place_rows<bfloat16, float>);
    return shared_rows(a, place_rows<float, bfloat16>, place_rows<bfloat16, bfloat16>);
}
static int best_any(const Best &a) {
    return shared_rows(a, plain::best_rows<float>, plain::best_rows<bfloat16>);
}
static int gate_any(const Gate &a) {
    return shared_rows(a, plain::gate_rows<float>, gate_rows<bfloat16>);
}

}  // namespace XGPT_ISA
}  // namespace xgpt
