/* The native operators of xgpt for CPUs: a plain C interface, loaded by
 * xrunner/ops/cpu/native.py.
 *
 * Arrays are contiguous and row-major unless a stride is named; shapes stand in [brackets].
 * `dtype` is the type of activations, and of the KV cache where no `kv_dtype` is given:
 * XGPT_FLOAT32 or XGPT_BFLOAT16. Sums are in float32. `threads`: number of threads that may
 * work. Every operator returns 0, or an XGPT_WRONG_* code for an unsupported argument; then
 * nothing was written. `xgpt_words(code)` explains a code.
 *
 * Letters: T tokens, n decoding requests, h heads, k KV heads (h / k heads read one), d head
 * size, H hidden size. A layer's cache is two arrays [num_blocks, k, block_size, d]: keys and
 * values.
 *
 * A request's keys and values lie in blocks: token p is number p % block_size of block blocks[p
 * / block_size] of its row of `blocks` [n, most_blocks]. Block numbers beyond its length are not
 * read. If most_blocks is 1 a block is a slot that holds a whole request, of any size. Otherwise
 * it holds 16 tokens or a larger power of two. */
#ifndef XGPT_NATIVE_H
#define XGPT_NATIVE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { XGPT_FLOAT32 = 0, XGPT_BFLOAT16 = 1 };

enum {
    XGPT_OK = 0,
    XGPT_WRONG_DTYPE = 1,    /* neither float32 nor bfloat16 */
    XGPT_WRONG_SIZE = 2,     /* a size below its least, or one that does not divide another */
    XGPT_WRONG_SLOT = 3,     /* a slot or a block outside the cache */
    XGPT_WRONG_LENGTH = 4,   /* a length or a position beyond the capacity, or too small */
    XGPT_WRONG_BIAS = 5,     /* a bias by distance that is too narrow for the lengths */
    XGPT_WRONG_LEVEL = 6,    /* an instruction set that this processor or this build lacks */
};

const char *xgpt_words(int code);

/* Instruction sets, each a superset of those before it. The fastest one of this processor is
 * used until `xgpt_use_level` sets another (as tests do). */
enum { XGPT_PORTABLE = 0, XGPT_AVX2 = 1, XGPT_AVX512 = 2, XGPT_AVX512_BF16 = 3,
       XGPT_NUM_LEVELS = 4 };
int xgpt_best_level(void);
int xgpt_least_level(void);  /* all sets, or those of one kind of processor */
int xgpt_level(void);
int xgpt_use_level(int level);

/* Sets OpenMP's entry `GOMP_parallel` of a library the process already holds (torch's), so that
 * one pool of threads serves both; null: own threads, started for each call. */
void xgpt_use_openmp(void *gomp_parallel);

/* Attention of one new token of each of n requests to its own context. query, out [n, h, d],
 * query rows `query_stride` elements apart; keys, values [num_blocks, k, block_size, d]. Request
 * i reads its first lengths[i] >= 1 tokens. bias (null: none) [h, bias_width] float32 is added
 * to the scaled score of the key at position p: bias[head][p - (lengths[i] - 1) + bias_center]. */
int xgpt_decode_attention(int dtype, int kv_dtype, void *out, const void *query,
                          int64_t query_stride, const void *keys, const void *values,
                          const int64_t *blocks, int64_t most_blocks, const int64_t *lengths,
                          int64_t n, int64_t heads, int64_t kv_heads, int64_t dim,
                          int64_t num_blocks, int64_t block_size, float scale,
                          const float *bias, int64_t bias_width, int64_t bias_center, int threads);

/* Causal attention of packed spans of inputs. Span i has tokens[i] tokens from position first[i]
 * on of a request whose blocks are row i of `blocks` [num_spans, most_blocks]. Their keys and
 * values are in the cache already. query, out [T, h, d], T the sum of `tokens`. */
int xgpt_encode_attention(int dtype, int kv_dtype, void *out, const void *query,
                          int64_t query_stride, const void *keys, const void *values,
                          const int64_t *blocks, int64_t most_blocks, const int64_t *first,
                          const int64_t *tokens, int64_t num_spans, int64_t heads,
                          int64_t kv_heads, int64_t dim, int64_t num_blocks, int64_t block_size,
                          float scale, int threads);

/* Attention of packed whole inputs, each token to all of its input (an encoder without a cache).
 * query, key, value, out [T, heads, d], `stride` elements between the tokens of query, key and
 * value; lengths [inputs]. bias: as above, bias[head][key - token + bias_center]. */
int xgpt_packed_attention(int dtype, void *out, const void *query, const void *key,
                          const void *value, int64_t stride, const int64_t *lengths,
                          int64_t num_inputs, int64_t heads, int64_t dim, float scale,
                          const float *bias, int64_t bias_width, int64_t bias_center, int threads);

/* hidden [T, H] += added [T, H] (null: nothing, and hidden is not written); then normed [T, H] =
 * hidden / sqrt(mean(hidden^2) + eps) * weight [H]. */
int xgpt_add_rms_norm(int dtype, void *normed, void *hidden, const void *added, const void *weight,
                      int64_t tokens, int64_t hidden_size, float eps, int threads);

/* As xgpt_add_rms_norm with layer norm: (hidden - mean) / sqrt(variance + eps) * weight [H] +
 * bias [H]. */
int xgpt_add_layer_norm(int dtype, void *normed, void *hidden, const void *added,
                        const void *weight, const void *bias, int64_t tokens, int64_t hidden_size,
                        float eps, int threads);

/* Rotates query (in place) and key by cos, sin [T, d / 2] float32 (null: no rotation; a head's
 * halves form the pairs). Writes key and value to slots[t], positions[t] of keys, values [slots,
 * k, capacity, d], as kv_dtype. joint [T, (h + 2k) d]: query, key and value of each token. */
int xgpt_place(int dtype, int kv_dtype, void *joint, const float *cos, const float *sin, void *keys,
               void *values, const int64_t *slots, const int64_t *positions, int64_t tokens,
               int64_t heads, int64_t kv_heads, int64_t dim, int64_t num_slots, int64_t capacity,
               int threads);

/* out [T, I] = silu(gate) * up of joint [T, 2 I]: gate, then up, of each token. */
int xgpt_silu_mul(int dtype, void *out, const void *joint, int64_t tokens, int64_t inner,
                  int threads);

/* best [n] float32 and found [n]: the largest logit of each row so far, and its token. logits
 * [n, V] are those of the tokens from first_token on. A larger one replaces best, the first of
 * equal ones. NaN exceeds nothing. */
int xgpt_keep_best(int dtype, float *best, int64_t *found, const void *logits, int64_t n,
                   int64_t vocabulary, int64_t first_token, int threads);

/* Quantises rows [T, K] to codes [T, K] and scales [T]: rows is near (codes - 128) * scales[t],
 * with scales[t] = max |row| / 127. A row with an infinity or a NaN gets the scale NaN. */
int xgpt_quantise_rows(int dtype, uint8_t *codes, float *scales, const void *rows, int64_t tokens,
                       int64_t size, int threads);

/* sums [T, N] = sums * scales [T] + bias [N] (null: none). */
int xgpt_rescale_rows(float *sums, const float *scales, const float *bias, int64_t tokens,
                      int64_t size, int threads);

/* Packs rows [T, K] in 4 bits an element: codes [T, G, 32] of G = ceil(K / 64) groups, element i of
 * a group in the low half of byte i, element 32 + i in the high half; scales [T, G] and minima [T,
 * G] of 16 bits. Codes are 0 to top_code <= 15. The form: xrunner/ops/four_bits.py. */
int xgpt_pack_four_bits(int dtype, uint8_t *packed, const void *rows, int64_t tokens, int64_t size,
                        int top_code, int threads);

/* rows [T, K, columns] of what xgpt_pack_four_bits packed, of any type. Where columns, 1 or a
 * multiple of 16, are more than 1, each has groups of its own: codes [T, G, 32, columns]. */
int xgpt_unpack_four_bits(int dtype, void *rows, const uint8_t *packed, int64_t tokens,
                          int64_t size, int64_t columns, int threads);

/* Whether xgpt_pairs_product is faster here than a library's: 1 on processors with dot products
 * of bfloat16 pairs, except Intel's; else 0. */
int xgpt_has_pairs(void);

/* out [T, N] bfloat16 = x [T, K] bfloat16 times the transposed weight + bias [N] bfloat16 (null:
 * none), then ReLU if `relu`; summed in float32, rounded once. The weight is bfloat16 [N / 48, K
 * / 2, 48, 2], N and K padded with zeros to whole panels and pairs. XGPT_WRONG_LEVEL if the
 * processor or build lacks dot products of pairs. */
int xgpt_pairs_product(uint16_t *out, const uint16_t *weight, const uint16_t *x,
                       const uint16_t *bias, int relu, int64_t tokens, int64_t inputs,
                       int64_t outputs, int threads);

/* out [T, I] bfloat16: xgpt_silu_mul of the product [T, 2 I] with a weight of 2 I outputs, gate
 * first. Panels of the gate, then of the rest, each as in xgpt_pairs_product. */
int xgpt_pairs_gated(uint16_t *out, const uint16_t *weight, const uint16_t *x, int64_t tokens,
                     int64_t inputs, int64_t inner, int threads);

/* Copies KV of all layers at once. `arrays`: addresses of num_arrays arrays [slots, k, capacity,
 * entry_bytes], keys then values of each layer; entry_bytes is d times an element's size, of any
 * type. `slot_stride`: bytes between an array's slots, more than k * capacity * entry_bytes if k
 * are some of its heads.
 *
 * Moves, in order: the first lengths[i] >= 0 tokens of slot sources[i] onto slot targets[i], in
 * every array. A slot may be in several moves: each sees the result of those before it. */
int xgpt_kv_compact(void *const *arrays, int64_t num_arrays, int64_t slot_stride,
                    const int64_t *sources, const int64_t *targets, const int64_t *lengths,
                    int64_t num_moves, int64_t kv_heads, int64_t entry_bytes, int64_t num_slots,
                    int64_t capacity, int threads);

/* Copies KV of n requests between the cache and a block [num_arrays, k, block_tokens,
 * entry_bytes]. The first lengths[i] >= 0 tokens of slot slots[i] are the block's tokens from
 * the sum of the lengths before on. Nothing else is touched. Scatter refuses a slot that is
 * named twice (XGPT_WRONG_SLOT). */
int xgpt_kv_gather(void *block, int64_t block_tokens, const void *const *arrays,
                   int64_t num_arrays, int64_t slot_stride, const int64_t *slots,
                   const int64_t *lengths, int64_t n, int64_t kv_heads, int64_t entry_bytes,
                   int64_t num_slots, int64_t capacity, int threads);
int xgpt_kv_scatter(const void *block, int64_t block_tokens, void *const *arrays,
                    int64_t num_arrays, int64_t slot_stride, const int64_t *slots,
                    const int64_t *lengths, int64_t n, int64_t kv_heads, int64_t entry_bytes,
                    int64_t num_slots, int64_t capacity, int threads);

#ifdef __cplusplus
}
#endif
#endif
