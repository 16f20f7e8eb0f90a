/* Tensors in 4 bits an element and back, for one instruction set (each_isa.h). */
namespace xgpt {
namespace XGPT_ISA {

#ifdef XGPT_HAS_DOTS  // their conversion to bfloat16 makes zeros of the smallest numbers
static int four_bits_any(const FourBits &a) { return XGPT_WIDE::four_bits_any(a); }
#else

/* Packs a group of `count` values, the last one repeated. */
template <typename E>
static Scale pack_group(uint8_t *codes, const E *values, int64_t count, float top) {
    float x[GROUP];
    for (int64_t i = 0; i < count; i += W) store(x + i, load(values + i, count - i));
    std::fill(x + count, x + GROUP, x[count - 1]);
    vec most = load(x), least = -most, finite{};
    for (int64_t i = 0; i < GROUP; i += W) {
        const vec v = load(x + i);
        most = larger(most, v), least = larger(least, -v);
        finite += v * 0.0f;  // NaN once there was an infinity or a NaN
    }
    const Scale scale = scale_of(-largest(least), largest(most) + sum(finite), top);
    const vec minimum = all(scale.least()), step = all(scale.step() == 0 ? 1.0f : scale.step());
    const auto code = [&](const float *p) {
        const vec within = -larger(-larger((load(p) - minimum) / step, vec{}), all(-top));
        return reinterpret_cast<ivec>(within + 12582912.0f) - 0x4b400000;  // 1.5 * 2^23: rounds
    };
    for (int64_t i = 0; i < HALF; i += W)
        store_bytes(codes + i, code(x + i) | code(x + HALF + i) << 4);
    return scale;
}

/* Unpacks W codes' bytes: up to low_count elements at `low`, high_count at `high`. */
template <typename E>
XGPT_INLINE void unpack_bytes(E *low, E *high, const uint8_t *codes, vec step, vec minimum,
                              int64_t low_count, int64_t high_count) {
    const ivec both = load_bytes(codes);
    if (low_count > 0)
        store(low, __builtin_convertvector(both & 15, vec) * step + minimum, low_count);
    if (high_count > 0)
        store(high, __builtin_convertvector(both >> 4, vec) * step + minimum, high_count);
}

/* Unpacks a group of `count` elements. */
template <typename E>
static void unpack_group(E *out, const uint8_t *codes, int64_t count, const Scale &scale) {
    const vec step = all(scale.step()), minimum = all(scale.least());
    for (int64_t i = 0; i < HALF; i += W)
        unpack_bytes(out + i, out + HALF + i, codes + i, step, minimum, count - i,
                     count - HALF - i);
}

/* Unpacks `inner` groups side by side, each of `count` elements. */
template <typename E>
static void unpack_columns(E *out, const uint8_t *codes, int64_t count, int64_t inner,
                           const uint16_t *scales, const uint16_t *minima) {
    float steps[W], least[W];
    for (int64_t c = 0; c < inner; c += W) {
        for (int i = 0; i < W; ++i) {
            const Scale scale{scales[c + i], minima[c + i]};
            steps[i] = scale.step(), least[i] = scale.least();
        }
        for (int64_t r = 0, at = c; r < std::min(count, HALF); ++r, at += inner)
            unpack_bytes(out + at, out + at + HALF * inner, codes + at, load(steps), load(least),
                         W, r + HALF < count ? W : 0);
    }
}

/* Groups from..to-1 of all rows; `inner` ones side by side count as one. */
template <typename E>
static void groups_of(const FourBits &a, int64_t from, int64_t to) {
    const int64_t groups = a.groups(), all_groups = a.rows * groups;
    int64_t row = from / groups, group = from % groups;
    auto *scales = reinterpret_cast<uint16_t *>(a.packed + all_groups * HALF * a.inner);
    uint16_t *minima = scales + all_groups * a.inner;
    for (int64_t i = from; i < to; ++i) {
        const int64_t before = group * GROUP, first = (row * a.size + before) * a.inner;
        const int64_t count = std::min(a.size - before, GROUP), at = i * a.inner;
        uint8_t *codes = a.packed + at * HALF;
        if (a.out) {
            E *out = static_cast<E *>(a.out) + first;
            a.inner == 1 ? unpack_group(out, codes, count, {scales[i], minima[i]})
                         : unpack_columns(out, codes, count, a.inner, scales + at, minima + at);
        } else {
            const auto *values = static_cast<const E *>(a.values) + first;
            const Scale scale = pack_group(codes, values, count, a.top);
            scales[i] = scale.scale, minima[i] = scale.minimum;
        }
        if (++group == groups) group = 0, ++row;
    }
}

static int four_bits_any(const FourBits &a) {
    share(a.threads, [&](int i) {
        const int64_t groups = a.rows * a.groups();
        const int64_t from = begin(groups, a.threads, i), to = begin(groups, a.threads, i + 1);
        a.dtype == XGPT_FLOAT32 ? groups_of<float>(a, from, to) : groups_of<bfloat16>(a, from, to);
    });
    return XGPT_OK;
}
#endif

}  // namespace XGPT_ISA
}  // namespace xgpt
