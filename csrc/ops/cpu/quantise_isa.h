/* Rows of activations as 8-bit codes and back, for one instruction set (each_isa.h). */
namespace xgpt {
namespace XGPT_ISA {

template <typename E>
static void quantise_rows(const Quantise &a, int64_t from, int64_t to) {
    const int64_t size = a.size;
    for (int64_t t = from; t < to; ++t) {
        const E *row = static_cast<const E *>(a.rows) + t * size;
        uint8_t *codes = a.codes + t * size;
        vec most{}, finite{};
        for (int64_t x = 0; x < size; x += W) {
            const vec v = load(row + x, size - x);
            most = larger(most, larger(v, -v));
            finite += v * 0.0f;  // NaN once there was an infinity or a NaN
        }
        const float largest_one = largest(most), zero = sum(finite);
        const bool is_finite = zero == zero;
        a.scales[t] = is_finite ? largest_one / 127.0f : zero;
        const float inverse = is_finite && largest_one > 0 ? 127.0f / largest_one : 0.0f;
        for (int64_t x = 0; x < size; x += W) {
            const int64_t count = size - x;
            vec v = load(row + x, count);
            v = is_finite ? v * inverse : vec{};
            const vec shifted = v + 12582912.0f;  // 1.5 * 2^23: rounds to whole numbers
            const ivec code = reinterpret_cast<ivec>(shifted) - 0x4b400000 + 128;
            store_bytes(codes + x, code, count);
        }
    }
}

static void rescale_rows(const Rescale &a, int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
        float *row = a.sums + t * a.size;
        for (int64_t x = 0; x < a.size; x += W) {
            const int64_t count = a.size - x;
            vec v = load(row + x, count) * a.scales[t];
            if (a.bias) v += load(a.bias + x, count);
            store(row + x, v, count);
        }
    }
}

static int quantise_any(const Quantise &a) {
    share(a.threads, [&](int i) {
        const int64_t from = begin(a.tokens, a.threads, i), to = begin(a.tokens, a.threads, i + 1);
        a.dtype == XGPT_FLOAT32 ? quantise_rows<float>(a, from, to)
                                : quantise_rows<bfloat16>(a, from, to);
    });
    return XGPT_OK;
}
static int rescale_any(const Rescale &a) {
    share(a.threads, [&](int i) {
        rescale_rows(a, begin(a.tokens, a.threads, i), begin(a.tokens, a.threads, i + 1));
    });
    return XGPT_OK;
}

}  // namespace XGPT_ISA
}  // namespace xgpt
