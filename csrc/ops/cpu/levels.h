/* Choice of the instruction set for a call: the best of this processor, or a lower one on
 * request. */
#ifndef XGPT_LEVELS_H
#define XGPT_LEVELS_H

#include "native.h"

/* The sets of this build, by their numbers in native.h: all, or those of one processor. The
 * least is at most XGPT_AVX512, which those after it fall back to. */
#ifndef XGPT_LEAST_LEVEL
#define XGPT_LEAST_LEVEL 0
#endif
#ifndef XGPT_MOST_LEVEL
#define XGPT_MOST_LEVEL 3
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define XGPT_HAS_X86_LEVELS 1
/* Our own products; left out of a library for a processor that does not support them. */
#ifndef XGPT_NO_PAIRS
#define XGPT_HAS_PAIRS 1
#endif
#define XGPT_DISPATCH(call)                                \
    switch (xgpt_level()) {                                \
        XGPT_BF16_CASE(call)                               \
        XGPT_AVX512_CASE(call)                             \
        XGPT_AVX2_CASE(call)                               \
        default: return xgpt::XGPT_LEAST_ISA::call;        \
    }
#else
#define XGPT_DISPATCH(call) return xgpt::portable::call
#endif

#if XGPT_LEAST_LEVEL <= 0
#define XGPT_LEAST_ISA portable
#elif XGPT_LEAST_LEVEL == 1
#define XGPT_LEAST_ISA avx2
#else
#define XGPT_LEAST_ISA avx512
#endif
#if XGPT_LEAST_LEVEL < 1 && XGPT_MOST_LEVEL >= 1
#define XGPT_AVX2_CASE(call) case XGPT_AVX2: return xgpt::avx2::call;
#else
#define XGPT_AVX2_CASE(call)
#endif
#if XGPT_LEAST_LEVEL < 2 && XGPT_MOST_LEVEL >= 2
#define XGPT_AVX512_CASE(call) case XGPT_AVX512: return xgpt::avx512::call;
#else
#define XGPT_AVX512_CASE(call)
#endif
#if XGPT_MOST_LEVEL >= 3
#define XGPT_BF16_CASE(call) case XGPT_AVX512_BF16: return xgpt::avx512_bf16::call;
#else
#define XGPT_BF16_CASE(call)
#endif
#endif
