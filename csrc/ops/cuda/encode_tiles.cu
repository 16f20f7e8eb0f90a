/* encode_attention by tensor cores, for bfloat16 and float16, heads of a multiple of 8 elements
 * and blocks of at least 16 tokens; shapes as in native.h.
 *
 * A warp takes COLUMNS x 8 tokens of one span and head, and 16 keys at a time (cuda_tiles.h).
 * The four warps of a block take neighbouring tokens, and so read the same keys. */
#include "cuda_encode.h"
#include "cuda_tiles.h"

namespace xgpt {

/* Grid: (tiles of the longest span, heads, spans). */
template <typename T, int DIM, int COLUMNS>
__device__ inline void encode_tiles(const EncodeAttention &p) {
    const OwnSpan span = span_of(p, blockIdx.z);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, dim = static_cast<int>(p.dim);
    const i64 head = blockIdx.y, from = (i64(blockIdx.x) * WARPS + warp) * COLUMNS * 8;
    if (from >= span.tokens || !span.is_there) return;  // all of the warp
    const int own = static_cast<int>(min(span.tokens - from, i64(COLUMNS * 8)));
    const T *query = static_cast<const T *>(p.query) + (span.start + from) * p.query_stride +
                     head * p.dim;
    Tiles<T, DIM, COLUMNS> tiles;
    tiles.begin([&](int c) {
        const int token = 8 * c + lane / 4;
        return token < own ? query + token * p.query_stride : nullptr;
    }, dim, p.scale);
    const T *keys = static_cast<const T *>(p.keys), *values = static_cast<const T *>(p.values);
    const Entries entries = {span.blocks, p.kv_heads, head / (p.heads / p.kv_heads), p.block_size,
                             p.block_bits, p.dim};
    const i64 first = span.before + from, end = first + own;  // keys that the last token sees
    for (i64 at = 0; at < end; at += KEYS) {
        const i64 row = entries.offset(at);  // its 16 tokens lie in one block
        const int count = static_cast<int>(min(end - at, i64(KEYS)));
        const int last = static_cast<int>(min(first - at, i64(KEYS)));  // that token 0 sees
        tiles.add(keys + row, values + row, count,
                  [&](int c, int i, int key) {
                      return key < count && key <= last + 8 * c + lane % 4 * 2 + i;
                  },
                  [](int, int, int) { return 0.f; });
    }
    tiles.end();
    T *out = static_cast<T *>(p.out) + ((span.start + from) * p.heads + head) * p.dim;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        tiles.each(c, [&](int i, int e, float (&eight)[8]) {
            const int token = 8 * c + lane % 4 * 2 + i;
            if (token >= own) return;
#pragma unroll
            for (int j = 0; j < 8; ++j) eight[j] /= tiles.weight[c][i];
            store_eight(eight, out + token * p.heads * p.dim, e, p.dim, true);
        });
}

template <typename T>
__device__ inline void encode_tiles_64(const EncodeAttention &p) { encode_tiles<T, 64, 2>(p); }
template <typename T>
__device__ inline void encode_tiles_128(const EncodeAttention &p) { encode_tiles<T, 128, 2>(p); }
template <typename T>
__device__ inline void encode_tiles_256(const EncodeAttention &p) { encode_tiles<T, 256, 1>(p); }

}  // namespace xgpt

KERNEL_OF_HALVES(encode_tiles_64, xgpt::EncodeAttention)
KERNEL_OF_HALVES(encode_tiles_128, xgpt::EncodeAttention)
KERNEL_OF_HALVES(encode_tiles_256, xgpt::EncodeAttention)
