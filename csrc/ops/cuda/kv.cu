/* Copies of KV: within the cache after requests have ended, and into or out of one contiguous
 * block for the handover. All layers in one launch; any element type. */
#include "cuda_elements.h"

namespace xgpt {

/* Where a request's KV lies: row (array, head, slot) begins at arrays[array] + head * head_bytes
 * + slot * slot_bytes, its tokens one after the other. An array is the keys or the values of one
 * layer; `arrays` lies on the GPU. */
struct Rows {
    const i64 *arrays;
    i64 num_arrays, heads, head_bytes, slot_bytes, token_bytes;
};

struct KvCompact {
    Rows rows;
    const i64 *sources, *targets, *lengths;  // [moves] slots; tokens of each
    i64 moves;
};

struct KvPack {
    Rows rows;
    const i64 *slots, *lengths, *starts;  // [requests]; tokens of the block before each request's
    void *block;                          // [num_arrays, heads, tokens, token_bytes]
    i64 queries, tokens;
};

__device__ inline char *row_of(const Rows &rows, i64 array, i64 head, i64 slot) {
    return reinterpret_cast<char *>(rows.arrays[array]) + head * rows.head_bytes +
           slot * rows.slot_bytes;
}

/* Copies part blockIdx.z of `bytes` (even) bytes by a whole block of threads: 16 at a time if
 * both ends lie on 16, else two. */
__device__ inline void copy(char *target, const char *source, i64 bytes) {
    const i64 first = static_cast<i64>(blockIdx.z) * blockDim.x + threadIdx.x;
    const i64 step = static_cast<i64>(gridDim.z) * blockDim.x;
    const bool is_wide = (reinterpret_cast<i64>(target) | reinterpret_cast<i64>(source)) % 16 == 0;
    const i64 chunks = is_wide ? bytes / 16 : 0;
    for (i64 i = first; i < chunks; i += step)
        reinterpret_cast<uint4 *>(target)[i] = reinterpret_cast<const uint4 *>(source)[i];
    for (i64 i = chunks * 8 + first; i < bytes / 2; i += step)
        reinterpret_cast<unsigned short *>(target)[i] =
            reinterpret_cast<const unsigned short *>(source)[i];
}

/* Grid: (arrays x heads, moves, parts). No move's source is another's target (the host ensures
 * it). */
__device__ inline void kv_compact(const KvCompact &p) {
    const i64 array = blockIdx.x / p.rows.heads, head = blockIdx.x % p.rows.heads;
    const i64 move = blockIdx.y;
    copy(row_of(p.rows, array, head, p.targets[move]), row_of(p.rows, array, head, p.sources[move]),
         p.lengths[move] * p.rows.token_bytes);
}

/* Grid: (arrays x heads, requests, parts). */
template <bool INTO_BLOCK>
__device__ inline void pack(const KvPack &p) {
    const i64 array = blockIdx.x / p.rows.heads, head = blockIdx.x % p.rows.heads;
    const i64 query = blockIdx.y;
    char *row = row_of(p.rows, array, head, p.slots[query]);
    char *packed = static_cast<char *>(p.block) +
                   (static_cast<i64>(blockIdx.x) * p.tokens + p.starts[query]) *
                       p.rows.token_bytes;
    copy(INTO_BLOCK ? packed : row, INTO_BLOCK ? row : packed,
         p.lengths[query] * p.rows.token_bytes);
}

}  // namespace xgpt

KERNEL_AS(kv_compact, xgpt::KvCompact, xgpt::kv_compact)
KERNEL_AS(kv_gather, xgpt::KvPack, xgpt::pack<true>)
KERNEL_AS(kv_scatter, xgpt::KvPack, xgpt::pack<false>)
