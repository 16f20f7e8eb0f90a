/* Keys and values of one input and KV head in the layout of encode_isa.h, for one instruction
 * set; included by encode_isa.h. */
namespace xgpt {
namespace XGPT_ISA {

constexpr int KEYS = 2 * W;

/* One input and KV head as P, float or a pair of bfloat16 (vec_isa.h): transposed keys [blocks,
 * width, KEYS], and values [keys, width]. Pairs join neighbouring elements of a key, and values
 * of two keys, which halves that side's length; `of` gives the length. */
template <typename P>
struct Turned;

template <>
struct Turned<float> {
    Lined<float> keys, values;

    static int64_t of(int64_t count) { return count; }

    void resize(int64_t count, int64_t width) {
        keys.resize(rounded(count, KEYS) * width);
        values.resize(count * width);
    }
    /* Transposes `count` keys from `first` on, a multiple of W, with zeros up to `room`. */
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

#ifdef XGPT_HAS_DOTS
template <>
struct Turned<pair> {
    Lined<pair> keys, values;

    static int64_t of(int64_t count) { return (count + 1) / 2; }

    void resize(int64_t count, int64_t width) {
        keys.resize(rounded(count, KEYS) * of(width));
        values.resize(of(rounded(count, KEYS)) * width);
    }
    void fill(const bfloat16 *key, const bfloat16 *value, int64_t stride, int64_t first,
              int64_t count, int64_t room, int64_t dim, int64_t width) {
        vec rows[W];
        for (int64_t j = 0; j < room; j += W)
            for (int64_t x = 0; x < dim; x += 2 * W) {
                for (int64_t i = 0; i < W; ++i)
                    rows[i] = j + i < count ? load_pairs(key + (j + i) * stride + x, dim - x)
                                            : vec{};
                turn(rows);
                const int64_t to = first + j;
                pair *block = keys.data() + (to / KEYS * of(width) + x / 2) * KEYS + to % KEYS;
                for (int64_t i = 0; i < W; ++i) memcpy(block + i * KEYS, &rows[i], sizeof(vec));
            }
        for (int64_t j = 0; j < room; j += 2)
            for (int64_t x = 0; x < width; x += 2 * W) {
                const bfloat16 *at = value + j * stride + x;
                vec low, high;
                pair_rows(j < count ? load_pairs(at, dim - x) : vec{},
                          j + 1 < count ? load_pairs(at + stride, dim - x) : vec{}, low, high);
                pair *row = values.data() + (first + j) / 2 * width + x;
                memcpy(row, &low, sizeof low);
                memcpy(row + W, &high, sizeof high);
            }
    }
};
#endif

}  // namespace XGPT_ISA
}  // namespace xgpt
