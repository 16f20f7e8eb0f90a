/* Attention: the arguments' checks, and how the work is cut; decode_isa.h and encode_isa.h do it. */
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "native.h"
#include "threads.h"

namespace xgpt {

/* The arguments of xgpt_decode_attention (native.h). */
struct Decode {
    int dtype, kv_dtype;
    void *out;
    const void *query;
    int64_t query_stride;
    const void *keys, *values;
    const int64_t *slots, *lengths;
    int64_t n, heads, kv_heads, dim, capacity;
    float scale;
    const float *bias;
    int64_t bias_width, bias_center;
    int threads;
};

/* Tokens [from, from + tokens) of one input, for the heads of one KV head. */
struct Task {
    int64_t packed;     // where the input's first token stands among the packed ones
    int64_t first;      // position of that token: what the cache has before it
    int64_t from, tokens;
    int64_t keys;       // keys that every token sees, where not causal
    int64_t head;       // the KV head
    int64_t kv_offset;  // elements before the input's first key of that head
};

/* What encode and packed attention share. */
struct Encode {
    int dtype, kv_dtype;
    void *out;
    const void *query;
    int64_t query_stride;
    const void *keys, *values;
    int64_t kv_stride, heads, kv_heads, dim;
    float scale;
    bool causal;
    const float *bias;
    int64_t bias_width, bias_center;
    int threads;
    std::vector<Task> tasks;
    mutable std::atomic<size_t> next{0};

    /* Adds the tokens of one input and KV head, cut so that each part costs about `most` scores. */
    void add(Task task, int64_t tokens, double most) {
        const double scores = double(tokens) * double(causal ? task.first + tokens / 2 + 1
                                                             : task.keys);
        const int64_t cuts = std::min<int64_t>(tokens, int64_t(scores / most) + 1);
        for (int64_t cut = 0; cut < cuts; ++cut) {
            task.from = begin(tokens, static_cast<int>(cuts), static_cast<int>(cut));
            task.tokens = begin(tokens, static_cast<int>(cuts), static_cast<int>(cut) + 1) -
                          task.from;
            tasks.push_back(task);
        }
    }
};

}  // namespace xgpt

#define XGPT_BODY "attention_isa.h"
#include "each_isa.h"

namespace {

bool wrong_dtype(int dtype) { return dtype != XGPT_FLOAT32 && dtype != XGPT_BFLOAT16; }

bool wrong_heads(int64_t heads, int64_t kv_heads, int64_t dim) {
    return heads < 1 || kv_heads < 1 || dim < 1 || heads % kv_heads != 0;
}

/* Is every distance low..high inside the bias? */
bool wrong_bias(const float *bias, int64_t low, int64_t high, int64_t width, int64_t center) {
    return bias && (low + center < 0 || high + center >= width);
}

int run(const xgpt::Decode &arguments) { XGPT_DISPATCH(decode_any(arguments)); }
int run(const xgpt::Encode &arguments) { XGPT_DISPATCH(encode_any(arguments)); }

/* Scores a task may cost: so many that the tasks come out even, and few keys are turned twice. */
double most_scores(double all, int threads) { return std::max(all / (8.0 * threads), 65536.0); }

}  // namespace

extern "C" int xgpt_decode_attention(
    int dtype, int kv_dtype, void *out, const void *query, int64_t query_stride, const void *keys,
    const void *values, const int64_t *slots, const int64_t *lengths, int64_t n, int64_t heads,
    int64_t kv_heads, int64_t dim, int64_t num_slots, int64_t capacity, float scale,
    const float *bias, int64_t bias_width, int64_t bias_center, int threads) {
    if (wrong_dtype(dtype) || wrong_dtype(kv_dtype)) return XGPT_WRONG_DTYPE;
    if (wrong_heads(heads, kv_heads, dim) || n < 0 || query_stride < heads * dim || threads < 1)
        return XGPT_WRONG_SIZE;
    for (int64_t i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] >= num_slots) return XGPT_WRONG_SLOT;
        if (lengths[i] < 1 || lengths[i] > capacity) return XGPT_WRONG_LENGTH;
        if (wrong_bias(bias, 1 - lengths[i], 0, bias_width, bias_center)) return XGPT_WRONG_BIAS;
    }
    if (n == 0) return XGPT_OK;
    return run(xgpt::Decode{dtype, kv_dtype, out, query, query_stride, keys, values, slots, lengths, n, heads,
                            kv_heads, dim, capacity, scale, bias, bias_width, bias_center,
                            threads});
}

extern "C" int xgpt_encode_attention(
    int dtype, int kv_dtype, void *out, const void *query, int64_t query_stride, const void *keys,
    const void *values, const int64_t *slots, const int64_t *first, const int64_t *tokens,
    int64_t num_spans, int64_t heads, int64_t kv_heads, int64_t dim, int64_t num_slots,
    int64_t capacity, float scale, int threads) {
    if (wrong_dtype(dtype) || wrong_dtype(kv_dtype)) return XGPT_WRONG_DTYPE;
    if (wrong_heads(heads, kv_heads, dim) || num_spans < 0 || query_stride < heads * dim ||
        threads < 1)
        return XGPT_WRONG_SIZE;
    double scores = 0;
    for (int64_t i = 0; i < num_spans; ++i) {
        if (slots[i] < 0 || slots[i] >= num_slots) return XGPT_WRONG_SLOT;
        if (tokens[i] < 1 || first[i] < 0 || first[i] > capacity - tokens[i])
            return XGPT_WRONG_LENGTH;
        scores += double(tokens[i]) * double(first[i] + tokens[i] / 2 + 1) * double(kv_heads);
    }
    xgpt::Encode encode{dtype, kv_dtype, out, query, query_stride, keys, values, dim, heads, kv_heads, dim,
                        scale, true, nullptr, 0, 0, threads, {}, {}};
    int64_t packed = 0;
    for (int64_t i = 0; i < num_spans; packed += tokens[i++])
        for (int64_t head = 0; head < kv_heads; ++head)
            encode.add({packed, first[i], 0, 0, 0, head,
                        (slots[i] * kv_heads + head) * capacity * dim},
                       tokens[i], most_scores(scores, threads));
    return run(encode);
}

extern "C" int xgpt_packed_attention(
    int dtype, void *out, const void *query, const void *key, const void *value, int64_t stride,
    const int64_t *lengths, int64_t num_inputs, int64_t heads, int64_t dim, float scale,
    const float *bias, int64_t bias_width, int64_t bias_center, int threads) {
    if (wrong_dtype(dtype)) return XGPT_WRONG_DTYPE;
    if (wrong_heads(heads, heads, dim) || num_inputs < 0 || stride < heads * dim || threads < 1)
        return XGPT_WRONG_SIZE;
    double scores = 0;
    for (int64_t i = 0; i < num_inputs; ++i) {
        if (lengths[i] < 1) return XGPT_WRONG_LENGTH;
        if (wrong_bias(bias, 1 - lengths[i], lengths[i] - 1, bias_width, bias_center))
            return XGPT_WRONG_BIAS;
        scores += double(lengths[i]) * double(lengths[i]) * double(heads);
    }
    xgpt::Encode encode{dtype, dtype, out, query, stride, key, value, stride, heads, heads, dim, scale,
                        false, bias, bias_width, bias_center, threads, {}, {}};
    int64_t packed = 0;
    for (int64_t i = 0; i < num_inputs; packed += lengths[i++])
        for (int64_t head = 0; head < heads; ++head)
            encode.add({packed, 0, 0, 0, lengths[i], head, packed * stride + head * dim},
                       lengths[i], most_scores(scores, threads));
    return run(encode);
}
