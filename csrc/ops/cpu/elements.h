/* bfloat16 and float, one element at a time. */
#ifndef XGPT_ELEMENTS_H
#define XGPT_ELEMENTS_H

#include <stdint.h>
#include <string.h>

namespace xgpt {

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

inline void from_float(float x, float *out) { *out = x; }
inline void from_float(float x, bfloat16 *out) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

}  // namespace xgpt
#endif
