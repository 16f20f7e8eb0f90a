#include "levels.h"

#include <algorithm>
#include <atomic>

namespace {

int processors_best() {
#ifdef XGPT_HAS_X86_LEVELS
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return XGPT_PORTABLE;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!wide) return XGPT_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? XGPT_AVX512_BF16 : XGPT_AVX512;
#else
    return XGPT_PORTABLE;
#endif
}

int best_level() { return std::min(processors_best(), XGPT_MOST_LEVEL); }

/* The best level, except on Intel's processors, whose dot products of bfloat16 pairs reach half
 * the rate of their float32 (AMD's twice). */
int quickest_level() {
    const int best = xgpt_best_level();
#ifdef XGPT_HAS_X86_LEVELS
    if (best == XGPT_AVX512_BF16 && __builtin_cpu_is("intel")) return XGPT_AVX512;
#endif
    return best;
}

std::atomic<int> level_in_use{-1};

}  // namespace

extern "C" {

int xgpt_best_level(void) {
    static const int best = best_level();
    return best;
}

int xgpt_level(void) {
    const int level = level_in_use.load(std::memory_order_relaxed);
    static const int quickest = quickest_level();
    return level < 0 ? quickest : level;
}

int xgpt_least_level(void) {
#ifdef XGPT_HAS_X86_LEVELS
    return XGPT_LEAST_LEVEL;
#else
    return XGPT_PORTABLE;
#endif
}

int xgpt_use_level(int level) {
    if (level < xgpt_least_level() || level > xgpt_best_level()) return XGPT_WRONG_LEVEL;
    level_in_use.store(level);
    return XGPT_OK;
}

int xgpt_has_pairs(void) {
#ifdef XGPT_HAS_PAIRS
    static const bool is_intel = __builtin_cpu_is("intel");  // half of the rate, as above
    return xgpt_best_level() == XGPT_AVX512_BF16 && !is_intel ? 1 : 0;
#else
    return 0;
#endif
}

const char *xgpt_words(int code) {
    switch (code) {
        case XGPT_OK: return "served";
        case XGPT_WRONG_DTYPE: return "the elements are neither float32 nor bfloat16";
        case XGPT_WRONG_SIZE: return "a size is below its least, or does not divide another";
        case XGPT_WRONG_SLOT: return "a slot or a block lies outside the cache";
        case XGPT_WRONG_LENGTH: return "a length or position is beyond the capacity or too small";
        case XGPT_WRONG_BIAS: return "the bias by distance is narrower than the lengths need";
        case XGPT_WRONG_LEVEL: return "this processor or build lacks the instruction set";
        default: return "an unknown code";
    }
}

}  // extern "C"
