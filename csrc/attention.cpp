/* Attention: the arguments' checks, and how the work is cut; decode_isa.h and encode_isa.h do it. */
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "native.h"
#include "threads.h"

namespace xgpt {

/* Where the entries of queries, or of spans, lie: arrays [num_blocks, k, block_size, d], and the
 * blocks of each [n, width]. */
struct Blocks {
    int64_t num_blocks, block_size;
    const int64_t *table;
    int64_t width;

    int64_t of(int64_t i, int64_t position) const {
        return table[i * width + position / block_size];
    }
    /* XGPT_OK where query i has room for `length` entries, in blocks that are there. */
    int check(int64_t i, int64_t length) const {
        if (length > block_size * width) return XGPT_WRONG_LENGTH;
        for (int64_t at = 0; at < length; at += block_size)
            if (of(i, at) < 0 || of(i, at) >= num_blocks) return XGPT_WRONG_SLOT;
        return XGPT_OK;
    }
    bool wrong() const { return width < 1 || block_size < 0 || (width > 1 && odd()); }
    /* Keys are taken a register at a time, of 16 at most: none of those divides two blocks. */
    bool odd() const { return block_size < 16 || (block_size & (block_size - 1)) != 0; }

    /* body(block, offset, first, count): the entries from..to-1 of query i, block by block: `count`
     * of them from `offset` of the block on, the first of which is the query's `first`. */
    template <typename Body>
    void each(int64_t i, int64_t from, int64_t to, Body &&body) const {
        for (int64_t at = from; at < to;) {
            const int64_t offset = at % block_size;
            const int64_t count = std::min(block_size - offset, to - at);
            body(of(i, at), offset, at, count);
            at += count;
        }
    }
};

/* The arguments of xgpt_decode_attention (native.h). */
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

/* Tokens [from, from + tokens) of one input, for the heads of one KV head. */
struct Task {
    int64_t packed;     // where the input's first token stands among the packed ones
    int64_t first;      // position of that token: what the cache has before it
    int64_t from, tokens;
    int64_t keys;       // keys that every token sees, where not causal
    int64_t head;       // the KV head
    int64_t place;      // causal: the span; else elements before the input's first key of that head
};

/* What encode and packed attention share. */
struct Encode {
    int dtype, kv_dtype;
    void *out;
    const void *query;
    int64_t query_stride;
    const void *keys, *values;
    int64_t kv_stride, heads, kv_heads, dim;
    Blocks blocks;  // where causal
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
int run(const xgpt::Encode &arguments) {
#ifdef XGPT_HAS_TILES
    const bool is_narrow = arguments.dtype == XGPT_BFLOAT16 && arguments.kv_dtype == XGPT_BFLOAT16;
    if (is_narrow && xgpt_level() == XGPT_AVX512_AMX)
        return xgpt::avx512_bf16::encode_by_tiles(arguments);
#endif
    XGPT_DISPATCH(encode_any(arguments));
}

/* Scores a task may cost: so many that the tasks come out even, and few keys are turned twice. */
double most_scores(double all, int threads) { return std::max(all / (8.0 * threads), 65536.0); }

}  // namespace

extern "C" int xgpt_decode_attention(
    int dtype, int kv_dtype, void *out, const void *query, int64_t query_stride, const void *keys,
    const void *values, const int64_t *blocks, int64_t most_blocks, const int64_t *lengths,
    int64_t n, int64_t heads, int64_t kv_heads, int64_t dim, int64_t num_blocks,
    int64_t block_size, float scale, const float *bias, int64_t bias_width, int64_t bias_center,
    int threads) {
    if (wrong_dtype(dtype) || wrong_dtype(kv_dtype)) return XGPT_WRONG_DTYPE;
    const xgpt::Blocks where{num_blocks, block_size, blocks, most_blocks};
    if (wrong_heads(heads, kv_heads, dim) || n < 0 || query_stride < heads * dim || threads < 1 ||
        where.wrong())
        return XGPT_WRONG_SIZE;
    for (int64_t i = 0; i < n; ++i) {
        if (lengths[i] < 1) return XGPT_WRONG_LENGTH;
        if (int code = where.check(i, lengths[i])) return code;
        if (wrong_bias(bias, 1 - lengths[i], 0, bias_width, bias_center)) return XGPT_WRONG_BIAS;
    }
    if (n == 0) return XGPT_OK;
    return run(xgpt::Decode{dtype, kv_dtype, out, query, query_stride, keys, values, lengths, n, heads,
                            kv_heads, dim, where, scale, bias, bias_width, bias_center,
                            threads});
}

extern "C" int xgpt_encode_attention(
    int dtype, int kv_dtype, void *out, const void *query, int64_t query_stride, const void *keys,
    const void *values, const int64_t *blocks, int64_t most_blocks, const int64_t *first,
    const int64_t *tokens, int64_t num_spans, int64_t heads, int64_t kv_heads, int64_t dim,
    int64_t num_blocks, int64_t block_size, float scale, int threads) {
    if (wrong_dtype(dtype) || wrong_dtype(kv_dtype)) return XGPT_WRONG_DTYPE;
    const xgpt::Blocks where{num_blocks, block_size, blocks, most_blocks};
    if (wrong_heads(heads, kv_heads, dim) || num_spans < 0 || query_stride < heads * dim ||
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
    xgpt::Encode encode{dtype, dtype, out, query, stride, key, value, stride, heads, heads, dim, {}, scale,
                        false, bias, bias_width, bias_center, threads, {}, {}};
    int64_t packed = 0;
    for (int64_t i = 0; i < num_inputs; packed += lengths[i++])
        for (int64_t head = 0; head < heads; ++head)
            encode.add({packed, 0, 0, 0, lengths[i], head, packed * stride + head * dim},
                       lengths[i], most_scores(scores, threads));
    return run(encode);
}
