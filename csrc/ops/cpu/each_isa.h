/* Includes the file XGPT_BODY once for every instruction set of this build, each time in a
 * namespace XGPT_ISA of its own. vec_isa.h comes first and defines `vec`: W floats, as wide as
 * the set's registers. XGPT_DISPATCH chooses one at each call. XGPT_HAS_DOTS: the set has dot
 * products of bfloat16 pairs. */
#include "elements.h"
#include "levels.h"

#include <type_traits>
#include <utility>

// with its checks, heavily inlined code takes minutes to compile
#ifdef __SANITIZE_ADDRESS__
#define XGPT_INLINE static inline
#else
#define XGPT_INLINE static inline __attribute__((always_inline))
#endif

#ifdef XGPT_HAS_X86_LEVELS
#include "intrinsics.h"
#endif

#if XGPT_LEAST_LEVEL <= 0 || !defined(XGPT_HAS_X86_LEVELS)
#define XGPT_ISA portable
#define XGPT_W 4
#include "vec_isa.h"
#include XGPT_BODY
#undef XGPT_ISA
#undef XGPT_W
#endif

#ifdef XGPT_HAS_X86_LEVELS
#if XGPT_LEAST_LEVEL <= 1 && XGPT_MOST_LEVEL >= 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define XGPT_ISA avx2
#define XGPT_W 8
#include "vec_isa.h"
#include XGPT_BODY
#undef XGPT_ISA
#undef XGPT_W
#pragma GCC pop_options
#endif

#if XGPT_MOST_LEVEL >= 2
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define XGPT_ISA avx512
#define XGPT_W 16
#include "vec_isa.h"
#include XGPT_BODY
#undef XGPT_ISA
#undef XGPT_W
#pragma GCC pop_options
#endif

#if XGPT_MOST_LEVEL >= 3
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512")
#define XGPT_ISA avx512_bf16
#define XGPT_W 16
#define XGPT_HAS_DOTS 1
#define XGPT_WIDE avx512  // for code without pairs, so that nothing is compiled twice
#include "vec_isa.h"
#include XGPT_BODY
#undef XGPT_ISA
#undef XGPT_W
#undef XGPT_HAS_DOTS
#undef XGPT_WIDE
#pragma GCC pop_options
#endif
#endif
