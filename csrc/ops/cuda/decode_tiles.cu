/* decode_attention by tensor cores, for bfloat16 and float16, heads of a multiple of 8 elements
 * and blocks of at least 16 tokens; shapes as in native.h.
 *
 * A block of four warps takes one request, up to eight of the heads that read one KV head, and
 * one part of the context. Its warps take 16 keys each in turn (cuda_tiles.h) and are merged in
 * shared memory; combine_parts (decode_attention.cu) merges the parts of the context. */
#include "cuda_decode.h"
#include "cuda_tiles.h"

namespace xgpt {

constexpr int HEADS = 8;

/* Grid: (n x kv_heads x chunks of a group, parts). */
template <typename T, int DIM>
__device__ inline void decode_tiles(const DecodeAttention &p) {
    const Work work = work_of<HEADS>(p);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, dim = static_cast<int>(p.dim);
    Tiles<T, DIM, 1> tiles;
    const T *query = static_cast<const T *>(p.query) + work.query * p.query_stride +
                     work.first_head * p.dim;
    tiles.begin([&](int) { return lane / 4 < work.heads ? query + lane / 4 * dim : nullptr; }, dim,
                p.scale);
    const T *keys = static_cast<const T *>(p.keys), *values = static_cast<const T *>(p.values);
    const Entries entries = {p.blocks + work.query * p.most_blocks, p.kv_heads, work.kv_head,
                             p.block_size, p.block_bits, p.dim};
    for (i64 from = work.from + warp * KEYS; from < work.to; from += WARPS * KEYS) {
        const i64 row = entries.offset(from);  // its 16 tokens lie in one block
        const int count = static_cast<int>(min(work.to - from, i64(KEYS)));
        tiles.add(keys + row, values + row, count,
                  [&](int, int, int key) { return key < count; },
                  [&](int, int i, int key) {
                      const int h = lane % 4 * 2 + i;
                      if (!p.bias || h >= work.heads) return 0.f;
                      const i64 distance = max(p.bias_center + from + key - (work.length - 1), i64(0));
                      return LOG2_E * p.bias[(work.first_head + h) * p.bias_width + distance];
                  });
    }
    tiles.end();
    XGPT_SHARED(shared);
    float *own = shared + warp * work.heads * (p.dim + 2);
    tiles.each(0, [&](int i, int from, const float (&eight)[8]) {
        const int h = lane % 4 * 2 + i;
        if (h >= work.heads) return;
        float *row = own + h * (p.dim + 2);
#pragma unroll
        for (int e = 0; e < 8; ++e) row[from + e] = eight[e];
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int h = lane % 4 * 2 + i;
        if (lane >= 4 || h >= work.heads) continue;
        own[h * (p.dim + 2) + p.dim] = tiles.most[0][i];
        own[h * (p.dim + 2) + p.dim + 1] = tiles.weight[0][i];
    }
    merge_warps<T>(p, work, shared);
}

template <typename T>
__device__ inline void decode_tiles_64(const DecodeAttention &p) { decode_tiles<T, 64>(p); }
template <typename T>
__device__ inline void decode_tiles_128(const DecodeAttention &p) { decode_tiles<T, 128>(p); }
template <typename T>
__device__ inline void decode_tiles_256(const DecodeAttention &p) { decode_tiles<T, 256>(p); }

}  // namespace xgpt

KERNEL_OF_HALVES(decode_tiles_64, xgpt::DecodeAttention)
KERNEL_OF_HALVES(decode_tiles_128, xgpt::DecodeAttention)
KERNEL_OF_HALVES(decode_tiles_256, xgpt::DecodeAttention)
