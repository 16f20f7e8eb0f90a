/* Which instruction set serves a call: the best of this processor, or a lesser one asked for. What
 * has no loop by tiles (AMX) has that of AVX-512 beside those that have one. */
#ifndef XGPT_LEVELS_H
#define XGPT_LEVELS_H

#include "native.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define XGPT_HAS_X86_LEVELS 1
#if __GNUC__ >= 11 && defined(__linux__)  // whose assembler knows tiles; whose kernel is asked
#define XGPT_HAS_TILES 1
#endif
#define XGPT_DISPATCH(call)                                     \
    switch (xgpt_level()) {                                     \
        case XGPT_AVX512_BF16: return xgpt::avx512_bf16::call;  \
        case XGPT_AVX512_AMX: return xgpt::avx512::call;        \
        case XGPT_AVX512: return xgpt::avx512::call;            \
        case XGPT_AVX2: return xgpt::avx2::call;                \
        default: return xgpt::portable::call;                   \
    }
#else
#define XGPT_DISPATCH(call) return xgpt::portable::call
#endif
#endif
