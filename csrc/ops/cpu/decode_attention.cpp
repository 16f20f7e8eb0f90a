/* Attention of decoded tokens: checks the arguments; decode_isa.h does the work. */
#include <new>

#include "attention.h"

namespace xgpt {

/* Arguments of xgpt_decode_attention (native.h). */
struct Decode {
    int dtype, kv_dtype;
    void *out;
    const void *query;
    int64_t query_stride;
    const void *keys, *values;
    const int64_t *lengths;
    int64_t n, heads, kv_heads, dim;
    Blocks blocks;
    float scale;
    const float *bias;
    int64_t bias_width, bias_center;
    int threads;
};

}  // namespace xgpt

#define XGPT_BODY "decode_isa.h"
#include "each_isa.h"

namespace {

int run(const xgpt::Decode &arguments) {
    XGPT_DISPATCH(decode_any(arguments));
}

}  // namespace

extern "C" int xgpt_decode_attention(
    int dtype, int kv_dtype, void *out, const void *query, int64_t query_stride, const void *keys,
    const void *values, const int64_t *blocks, int64_t most_blocks, const int64_t *lengths,
    int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t num_blocks,
    int64_t block_size, float scale, const float *bias, int64_t bias_width, int64_t bias_center,
    int threads) {
    if (xgpt::wrong_dtype(dtype) || xgpt::wrong_dtype(kv_dtype)) return XGPT_WRONG_DTYPE;
    const xgpt::Blocks where{num_blocks, block_size, blocks, most_blocks};
    if (xgpt::wrong_heads(heads, kv_heads, dim) || n < 0 || query_stride < heads * dim || threads < 1 ||
        where.wrong())
        return XGPT_WRONG_SIZE;
    for (int64_t i = 0; i < n; ++i) {
        if (lengths[i] < 1) return XGPT_WRONG_LENGTH;
        if (int code = where.check(i, lengths[i])) return code;
        if (xgpt::wrong_bias(bias, 1 - lengths[i], 0, bias_width, bias_center)) return XGPT_WRONG_BIAS;
    }
    if (n == 0) return XGPT_OK;
    return run(xgpt::Decode{dtype, kv_dtype, out, query, query_stride, keys, values, lengths, n, heads,
                            kv_heads, dim, where, scale, bias, bias_width, bias_center,
                            threads});
}
