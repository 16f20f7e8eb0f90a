/* What attention of decoded tokens (decode_isa.h) and of inputs (encode_isa.h) share, for one
 * instruction set (each_isa.h). All sums are in float32. Both use the online softmax (Milakov
 * and Gimelshein, 2018). */
namespace xgpt {
namespace XGPT_ISA {

constexpr float NOTHING = -3.4e38f;  // a maximum over no keys

static inline int64_t rounded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

/* Memory aligned to a cache line, so that a register, or a tile's row, lies in one line. */
template <typename T>
struct OnLine {
    using value_type = T;
    OnLine() = default;
    template <typename U>
    OnLine(const OnLine<U> &) {}
    T *allocate(size_t count) {
        return static_cast<T *>(::operator new(count * sizeof(T), std::align_val_t(64)));
    }
    void deallocate(T *p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const OnLine &) const { return true; }
    bool operator!=(const OnLine &) const { return false; }
};
template <typename T>
using Lined = std::vector<T, OnLine<T>>;

/* Turns N registers of scores into weights relative to `most`; adds their sum, as stored, to
 * `added`. */
template <int N, typename Weight>
XGPT_INLINE void weigh(const float *scores, float most, Weight *weights, vec &added) {
    vec some[N];
    for (int i = 0; i < N; ++i) some[i] = load(scores + i * W) - most;
    exp(some);
    for (int i = 0; i < N; ++i) {
        store(weights + i * W, some[i]);
        added += as_kept<Weight>(some[i]);
    }
}

/* Turns scores of `count` keys of one head into weights (in place, or elsewhere) relative to the
 * maximum so far, 0 up to a whole register. If the maximum rises, rescales `sums` [width] of the
 * values so far. */
template <typename Weight>
static inline void soften(float *scores, int64_t count, Weight *weights, float &most, float &total,
                          float *sums, int64_t width) {
    for (int64_t i = count; i % W != 0; ++i) scores[i] = -INFINITY;
    vec top = all(most);
    for (int64_t j = 0; j < count; j += W) top = larger(top, load(scores + j));
    const float now = largest(top);
    if (now > most) {
        if (total > 0) {
            const float scale = std::exp(most - now);
            total *= scale;
            for (int64_t x = 0; x < width; x += W) store(sums + x, load(sums + x) * scale);
        }
        most = now;
    }
    vec added{};
    int64_t j = 0;
    for (; j + 4 * W <= count; j += 4 * W) weigh<4>(scores + j, most, weights + j, added);
    for (; j < count; j += W) weigh<1>(scores + j, most, weights + j, added);
    total += sum(added);
}

/* One head of a query as float32 in `row` [width], in the order of keys of type E, 0 beyond dim;
 * `at`: elements before it. */
template <typename Q>
static inline void widen(const Q *head, int64_t dim, float *row, int64_t width) {
    for (int64_t x = 0; x < width; x += W)
        store(row + x, x < dim ? load(head + x, dim - x) : vec{});
}
template <typename E>
static inline void read_head(int dtype, const void *query, int64_t at, int64_t dim, float *row,
                             int64_t width) {
    if (dtype == XGPT_FLOAT32)
        widen(static_cast<const float *>(query) + at, dim, row, width);
    else
        widen(static_cast<const bfloat16 *>(query) + at, dim, row, width);
    for (int64_t x = 0; x + 2 * W <= width; x += 2 * W) ordered<E>(row + x);
}

/* One head of a query that stays bfloat16, as above. */
template <typename E>
static inline void read_head(int, const void *query, int64_t at, int64_t dim, bfloat16 *row,
                             int64_t width) {
    memcpy(row, static_cast<const bfloat16 *>(query) + at, dim * sizeof(bfloat16));
    memset(row + dim, 0, (width - dim) * sizeof(bfloat16));
}

template <typename E, typename Q>
static inline void write_head(Q *out, const float *sums, float total, int64_t dim) {
    const float scale = 1.0f / total;
    for (int64_t x = 0; x < dim; x += 2 * W) {
        vec a = load(sums + x) * scale, b = load(sums + x + W) * scale;
        unordered<E>(a, b);
        store(out + x, a, dim - x);
        if (x + W < dim) store(out + x + W, b, dim - x - W);
    }
}
/* Writes `group` heads of sums / total, from element `at` of `out` on. */
template <typename E>
static void write_out(int dtype, void *out, int64_t at, const float *sums, const float *total,
                      int64_t group, int64_t width, int64_t dim) {
    for (int64_t g = 0; g < group; ++g, at += dim, sums += width)
        if (dtype == XGPT_FLOAT32)
            write_head<E>(static_cast<float *>(out) + at, sums, total[g], dim);
        else
            write_head<E>(static_cast<bfloat16 *>(out) + at, sums, total[g], dim);
}

}  // namespace XGPT_ISA
}  // namespace xgpt
