/* 8-bit activations: checks the arguments; quantise_isa.h does the work. */

#include "native.h"
#include "threads.h"

namespace xgpt {

/* Arguments of xgpt_quantise_rows and xgpt_rescale_rows. */
struct Quantise {
    int dtype;
    uint8_t *codes;
    float *scales;
    const void *rows;
    int64_t tokens, size;
    int threads;
};

struct Rescale {
    float *sums;
    const float *scales, *bias;
    int64_t tokens, size;
    int threads;
};

}  // namespace xgpt

#define XGPT_BODY "quantise_isa.h"
#include "each_isa.h"

namespace {

using xgpt::threads_for;

int refusal(int dtype, int64_t tokens, int64_t size, int threads) {
    if (dtype != XGPT_FLOAT32 && dtype != XGPT_BFLOAT16) return XGPT_WRONG_DTYPE;
    return tokens < 0 || size < 1 || threads < 1 ? XGPT_WRONG_SIZE : XGPT_OK;
}

int run(const xgpt::Quantise &arguments) { XGPT_DISPATCH(quantise_any(arguments)); }
int run(const xgpt::Rescale &arguments) { XGPT_DISPATCH(rescale_any(arguments)); }

}  // namespace

extern "C" int xgpt_quantise_rows(int dtype, uint8_t *codes, float *scales, const void *rows,
                                  int64_t tokens, int64_t size, int threads) {
    if (const int code = refusal(dtype, tokens, size, threads)) return code;
    return run(xgpt::Quantise{dtype, codes, scales, rows, tokens, size,
                              threads_for(tokens * size, threads)});
}

extern "C" int xgpt_rescale_rows(float *sums, const float *scales, const float *bias,
                                 int64_t tokens, int64_t size, int threads) {
    if (const int code = refusal(XGPT_FLOAT32, tokens, size, threads)) return code;
    return run(xgpt::Rescale{sums, scales, bias, tokens, size,
                             threads_for(tokens * size, threads)});
}
