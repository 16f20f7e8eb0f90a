/* Attention of inputs: checks the arguments and divides the work; encode_isa.h does it. */
#include <atomic>
#include <new>

#include "attention.h"

namespace xgpt {

/* Tokens [from, from + tokens) of one input, for the heads of one KV head. */
struct Task {
    int64_t packed;     // packed tokens before the input's first one
    int64_t first;      // position of that token: tokens in the cache before it
    int64_t from, tokens;
    int64_t keys;       // keys that every token sees, if not causal
    int64_t head;       // the KV head
    int64_t place;      // causal: the span; else elements before the input's first key of that head
};

/* Arguments shared by encode and packed attention. */
struct Encode {
    int dtype, kv_dtype;
    void *out;
    const void *query;
    int64_t query_stride;
    const void *keys, *values;
    int64_t kv_stride, heads, kv_heads, dim;
    Blocks blocks;  // if causal
    float scale;
    bool causal;
    const float *bias;
    int64_t bias_width, bias_center;
    int threads;
    std::vector<Task> tasks;
    mutable std::atomic<size_t> next{0};

    /* Adds the tokens of one input and KV head, cut so that each task costs about `most` scores. */
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

#define XGPT_BODY "encode_isa.h"
#include "each_isa.h"

namespace {

int run(const xgpt::Encode &arguments) {
    XGPT_DISPATCH(encode_any(arguments));
}

/* Most scores of a task, so that tasks are even and few keys are transposed twice. Chosen. */
double most_scores(double all, int threads) { return std::max(all / (8.0 * threads), 65536.0); }

}  // namespace

extern "C" int xgpt_encode_attention(
    int dtype, int kv_dtype, void *out, const void *query, int64_t query_stride, const void *keys,
    const void *values, const int64_t *blocks, int64_t most_blocks, const int64_t *first,
    const int64_t *tokens, int64_t num_spans, int64_t heads, int64_t kv_heads, int64_t dim,
    int64_t num_blocks, int64_t block_size, float scale, int threads) {
    if (xgpt::wrong_dtype(dtype) || xgpt::wrong_dtype(kv_dtype)) return XGPT_WRONG_DTYPE;
    const xgpt::Blocks where{num_blocks, block_size, blocks, most_blocks};
    if (xgpt::wrong_heads(heads, kv_heads, dim) || num_spans < 0 || query_stride < heads * dim ||
        threads < 1 || where.wrong())
        return XGPT_WRONG_SIZE;
    double scores = 0;
    for (int64_t i = 0; i < num_spans; ++i) {
        if (tokens[i] < 1 || first[i] < 0 || first[i] > INT64_MAX - tokens[i])
            return XGPT_WRONG_LENGTH;
        if (int code = where.check(i, first[i] + tokens[i])) return code;
        scores += double(tokens[i]) * double(first[i] + tokens[i] / 2 + 1) * double(kv_heads);
    }
    xgpt::Encode encode{dtype, kv_dtype, out, query, query_stride, keys, values, dim, heads, kv_heads, dim,
                        where, scale, true, nullptr, 0, 0, threads, {}, {}};
    int64_t packed = 0;
    for (int64_t i = 0; i < num_spans; packed += tokens[i++])
        for (int64_t head = 0; head < kv_heads; ++head)
            encode.add({packed, first[i], 0, 0, 0, head, i}, tokens[i],
                       most_scores(scores, threads));
    return run(encode);
}

extern "C" int xgpt_packed_attention(
    int dtype, void *out, const void *query, const void *key, const void *value, int64_t stride,
    const int64_t *lengths, int64_t num_inputs, int64_t heads, int64_t dim, float scale,
    const float *bias, int64_t bias_width, int64_t bias_center, int threads) {
    if (xgpt::wrong_dtype(dtype)) return XGPT_WRONG_DTYPE;
    if (xgpt::wrong_heads(heads, heads, dim) || num_inputs < 0 || stride < heads * dim || threads < 1)
        return XGPT_WRONG_SIZE;
    double scores = 0;
    for (int64_t i = 0; i < num_inputs; ++i) {
        if (lengths[i] < 1) return XGPT_WRONG_LENGTH;
        if (xgpt::wrong_bias(bias, 1 - lengths[i], lengths[i] - 1, bias_width, bias_center))
            return XGPT_WRONG_BIAS;
        scores += double(lengths[i]) * double(lengths[i]) * double(heads);
    }
    xgpt::Encode encode{dtype, dtype, out, query, stride, key, value, stride, heads, heads, dim, {}, scale,
                        false, bias, bias_width, bias_center, threads, {}, {}};
    int64_t packed = 0;
    for (int64_t i = 0; i < num_inputs; packed += lengths[i++])
        for (int64_t head = 0; head < heads; ++head)
            encode.add({packed, 0, 0, 0, lengths[i], head, packed * stride + head * dim},
                       lengths[i], most_scores(scores, threads));
    return run(encode);
}
