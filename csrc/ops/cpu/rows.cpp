/* Passes over rows of tokens: checks the arguments; rows_isa.h does the work. */
#include <cmath>
#include <vector>

#include "native.h"
#include "rows.h"
#include "threads.h"

namespace xgpt {

/* Arguments of xgpt_add_rms_norm and xgpt_add_layer_norm, xgpt_place, xgpt_silu_mul and
 * xgpt_keep_best. */
struct Norm {
    int dtype;
    void *normed, *hidden;
    const void *added, *weight, *bias;  // bias: null for RMS norm
    int64_t tokens, hidden_size;
    float eps;
    int threads;
};

struct Place {
    int dtype, kv_dtype;
    void *joint;
    const float *cos, *sin;
    void *keys, *values;
    const int64_t *slots, *positions;
    int64_t tokens, heads, kv_heads, dim, capacity;
    int threads;
};

struct Gate {
    int dtype;
    void *out;
    const void *joint;
    int64_t tokens, inner;
    int64_t stride, up, out_stride;  // elements between rows; from a row's gate to its up; of out
    int threads;
};

struct Best {
    int dtype;
    float *best;
    int64_t *found;
    const void *logits;
    int64_t tokens, vocabulary, first_token;  // tokens: rows
    int threads;
};

}  // namespace xgpt

#define XGPT_BODY "rows_isa.h"
#include "each_isa.h"

namespace {

using xgpt::threads_for;

bool wrong_dtype(int dtype) { return dtype != XGPT_FLOAT32 && dtype != XGPT_BFLOAT16; }

int run(const xgpt::Norm &arguments) { XGPT_DISPATCH(norm_any(arguments)); }
int run(const xgpt::Place &arguments) { XGPT_DISPATCH(place_any(arguments)); }
int run(const xgpt::Gate &arguments) { XGPT_DISPATCH(gate_any(arguments)); }
int run(const xgpt::Best &arguments) { XGPT_DISPATCH(best_any(arguments)); }

int norm(int dtype, void *normed, void *hidden, const void *added, const void *weight,
         const void *bias, int64_t tokens, int64_t hidden_size, float eps, int threads) {
    if (wrong_dtype(dtype)) return XGPT_WRONG_DTYPE;
    if (tokens < 0 || hidden_size < 1 || threads < 1) return XGPT_WRONG_SIZE;
    return run(xgpt::Norm{dtype, normed, hidden, added, weight, bias, tokens, hidden_size, eps,
                          threads_for(tokens * hidden_size, threads)});
}

}  // namespace

void xgpt::gate_tile(uint16_t *out, int64_t out_stride, const uint16_t *joint, int64_t stride,
                     int64_t up, int64_t rows, int64_t inner) {
    run(xgpt::Gate{XGPT_BFLOAT16, out, joint, rows, inner, stride, up, out_stride, 1});
}

extern "C" int xgpt_add_rms_norm(int dtype, void *normed, void *hidden, const void *added,
                                 const void *weight, int64_t tokens, int64_t hidden_size,
                                 float eps, int threads) {
    return norm(dtype, normed, hidden, added, weight, nullptr, tokens, hidden_size, eps, threads);
}

extern "C" int xgpt_add_layer_norm(int dtype, void *normed, void *hidden, const void *added,
                                   const void *weight, const void *bias, int64_t tokens,
                                   int64_t hidden_size, float eps, int threads) {
    if (!bias) return XGPT_WRONG_SIZE;
    return norm(dtype, normed, hidden, added, weight, bias, tokens, hidden_size, eps, threads);
}

extern "C" int xgpt_place(int dtype, int kv_dtype, void *joint, const float *cos, const float *sin,
                          void *keys, void *values, const int64_t *slots, const int64_t *positions,
                          int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                          int64_t num_slots, int64_t capacity, int threads) {
    if (wrong_dtype(dtype) || wrong_dtype(kv_dtype)) return XGPT_WRONG_DTYPE;
    if (tokens < 0 || heads < 1 || kv_heads < 1 || dim < 1 || threads < 1 ||
        (cos && (!sin || dim % 2)))
        return XGPT_WRONG_SIZE;
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] < 0 || slots[t] >= num_slots) return XGPT_WRONG_SLOT;
        if (positions[t] < 0 || positions[t] >= capacity) return XGPT_WRONG_LENGTH;
    }
    return run(xgpt::Place{dtype, kv_dtype, joint, cos, sin, keys, values, slots, positions, tokens,
                           heads, kv_heads, dim, capacity,
                           threads_for(tokens * (heads + 2 * kv_heads) * dim, threads)});
}

extern "C" int xgpt_silu_mul(int dtype, void *out, const void *joint, int64_t tokens, int64_t inner,
                             int threads) {
    if (wrong_dtype(dtype)) return XGPT_WRONG_DTYPE;
    if (tokens < 0 || inner < 1 || threads < 1) return XGPT_WRONG_SIZE;
    return run(xgpt::Gate{dtype, out, joint, tokens, inner, 2 * inner, inner, inner,
                          threads_for(tokens * inner, threads)});
}

extern "C" int xgpt_keep_best(int dtype, float *best, int64_t *found, const void *logits, int64_t n,
                              int64_t vocabulary, int64_t first_token, int threads) {
    if (wrong_dtype(dtype)) return XGPT_WRONG_DTYPE;
    if (n < 0 || vocabulary < 0 || threads < 1) return XGPT_WRONG_SIZE;
    return run(xgpt::Best{dtype, best, found, logits, n, vocabulary, first_token,
                          threads_for(n * vocabulary, threads)});
}
