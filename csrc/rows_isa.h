/* What a layer does to each token's row between its products, one pass each, for one instruction
 * set (each_isa.h). Values are read and written in the run's type; sums are in float32. */
namespace xgpt {
namespace XGPT_ISA {

/* hidden += added, where there is any; the row as float32 in `row` [rounded(H)], 0 beyond H. */
template <typename E>
static inline void read_row(E *hidden, const E *added, int64_t size, float *row) {
    for (int64_t x = 0; x < size; x += W) {
        const int64_t count = size - x;
        vec v = load(hidden + x, count);
        if (added) {
            store(hidden + x, v + load(added + x, count), count);
            v = load(hidden + x, count);  // as it is kept: rounded to the run's type
        }
        store(row + x, v);
    }
}

/* Rows [from, to) of xgpt_add_rms_norm and, where `bias` is given, of xgpt_add_layer_norm. */
template <typename E>
static void norm_rows(const Norm &a, int64_t from, int64_t to) {
    const int64_t size = a.hidden_size;
    std::vector<float> row((size + W - 1) / W * W);
    const E *weight = static_cast<const E *>(a.weight), *bias = static_cast<const E *>(a.bias);
    for (int64_t t = from; t < to; ++t) {
        E *hidden = static_cast<E *>(a.hidden) + t * size;
        const E *added = a.added ? static_cast<const E *>(a.added) + t * size : nullptr;
        E *normed = static_cast<E *>(a.normed) + t * size;
        read_row(hidden, added, size, row.data());
        float mean = 0;
        if (bias) {
            vec total{};
            for (int64_t x = 0; x < size; x += W) total += load(row.data() + x);
            mean = sum(total) / static_cast<float>(size);
        }
        vec squares{};
        for (int64_t x = 0; x < size; x += W) {
            vec off = load(row.data() + x) - mean;
            if (x + W > size) off = lanes() < static_cast<int32_t>(size - x) ? off : vec{};
            squares += off * off;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + a.eps);
        for (int64_t x = 0; x < size; x += W) {
            const int64_t count = size - x;
            vec out = (load(row.data() + x) - mean) * scale * load(weight + x, count);
            if (bias) out += load(bias + x, count);
            store(normed + x, out, count);
        }
    }
}

/* One head, onto `out` (which may be the same); the halves form the pairs that are turned. Without
 * cos it is copied. */
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

template <typename E>
static void gate_rows(const Gate &a, int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
        const E *gate = static_cast<const E *>(a.joint) + t * 2 * a.inner, *up = gate + a.inner;
        E *out = static_cast<E *>(a.out) + t * a.inner;
        for (int64_t x = 0; x < a.inner; x += W) {
            const int64_t count = a.inner - x;
            const vec g = load(gate + x, count);
            const vec e = exp(-larger(g, all(-88.0f)));  // more is beyond float32
            store(out + x, g / (e + 1.0f) * load(up + x, count), count);
        }
    }
}

/* The largest of each block of a row is compared with the best so far; which one it is is looked for
 * once, at the row's end, in the one block that holds it. */
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

/* The rows of any of these, shared among threads in contiguous parts. */
template <typename Arguments>
static int shared_rows(const Arguments &a, void (*floats)(const Arguments &, int64_t, int64_t),
                       void (*bfloats)(const Arguments &, int64_t, int64_t)) {
    share(a.threads, [&](int i) {
        (a.dtype == XGPT_FLOAT32 ? floats : bfloats)(a, begin(a.tokens, a.threads, i),
                                                     begin(a.tokens, a.threads, i + 1));
    });
    return XGPT_OK;
}

static int norm_any(const Norm &a) {
    return shared_rows(a, norm_rows<float>, norm_rows<bfloat16>);
}
static int place_any(const Place &a) {
    if (a.kv_dtype == XGPT_FLOAT32)
        return shared_rows(a, place_rows<float, float>, place_rows<bfloat16, float>);
    return shared_rows(a, place_rows<float, bfloat16>, place_rows<bfloat16, bfloat16>);
}
static int best_any(const Best &a) {
    return shared_rows(a, best_rows<float>, best_rows<bfloat16>);
}
static int gate_any(const Gate &a) {
    return shared_rows(a, gate_rows<float>, gate_rows<bfloat16>);
}

}  // namespace XGPT_ISA
}  // namespace xgpt
