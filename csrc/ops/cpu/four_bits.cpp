/* Tensors in 4 bits an element: checks the arguments; four_bits_isa.h does the work. The form, and
 * why it is so, is that of xrunner/ops/four_bits.py, whose results these are to the bit. */

#include <math.h>

#include <algorithm>

#include "elements.h"
#include "native.h"
#include "threads.h"

namespace xgpt {

constexpr int64_t GROUP = 64, HALF = GROUP / 2;
constexpr uint16_t IS_FLOAT16 = 0x8000, NOT_A_NUMBER = 0x7fc0;

/* Arguments of xgpt_pack_four_bits and xgpt_unpack_four_bits: values to pack, or out. */
struct FourBits {
    int dtype;
    const void *values;
    void *out;
    uint8_t *packed;
    int64_t rows, size, inner;
    float top;  // the largest code
    int threads;

    int64_t groups() const { return (size + GROUP - 1) / GROUP; }
};

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float from_float16(uint32_t bits) {  // a finite one
    const uint32_t wide = (bits & 0x7fff) << 13;
    float size;
    memcpy(&size, &wide, sizeof size);
    return size * (bits & 0x8000 ? -0x1p112f : 0x1p112f);
}
inline uint32_t to_float16(float x) {  // to the nearest, ties to even; 0x7c00 where too large
    const float size = fabsf(x);
    const uint32_t bits = bits_of(size), small = bits_of(size + 0.5f) - bits_of(0.5f);
    const uint32_t normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    const uint32_t nearest = size < 0x1p-14f ? small : normal;
    return nearest < 0x7c00 ? nearest | (bits_of(x) >> 16 & 0x8000) : 0x7c00;
}

struct Scale {
    uint16_t scale, minimum;

    float step() const { return fabsf(to_float(bfloat16{scale})); }
    float least() const {
        return scale & IS_FLOAT16 ? from_float16(minimum) : to_float(bfloat16{minimum});
    }
};

inline Scale scale_of(float low, float high, float top) {
    low += 0.0f;  // a zero without a sign
    bfloat16 wide;
    from_float(low, &wide);
    const float spread = high - low, error = fabsf(to_float(wide) - low);
    if (!(spread < INFINITY && error < INFINITY)) return {NOT_A_NUMBER, 0};
    const uint32_t step = bits_of(spread / top) >> 16, narrow = to_float16(low);
    if (narrow != 0x7c00 && fabsf(from_float16(narrow) - low) < error)
        return {static_cast<uint16_t>(step | IS_FLOAT16), static_cast<uint16_t>(narrow)};
    return {static_cast<uint16_t>(step), wide.bits};
}

}  // namespace xgpt

#define XGPT_BODY "four_bits_isa.h"
#include "each_isa.h"

namespace {

int run(const xgpt::FourBits &arguments) { XGPT_DISPATCH(four_bits_any(arguments)); }

int checked(xgpt::FourBits a) {
    if (a.dtype != XGPT_FLOAT32 && a.dtype != XGPT_BFLOAT16) return XGPT_WRONG_DTYPE;
    const bool has_columns = a.inner == 1 || (a.inner > 0 && a.inner % 16 == 0);  // whole vectors
    if (a.rows < 0 || a.size < 1 || !has_columns || a.threads < 1 || a.top < 1 || a.top > 15)
        return XGPT_WRONG_SIZE;
    a.threads = xgpt::threads_for(a.rows * a.size * a.inner, a.threads);
    return run(a);
}

}  // namespace

extern "C" int xgpt_pack_four_bits(int dtype, uint8_t *packed, const void *rows, int64_t tokens,
                                   int64_t size, int top_code, int threads) {
    const float top = static_cast<float>(top_code);
    return checked({dtype, rows, nullptr, packed, tokens, size, 1, top, threads});
}

extern "C" int xgpt_unpack_four_bits(int dtype, void *rows, const uint8_t *packed, int64_t tokens,
                                     int64_t size, int64_t columns, int threads) {
    uint8_t *from = const_cast<uint8_t *>(packed);
    return checked({dtype, nullptr, rows, from, tokens, size, columns, 15, threads});
}
