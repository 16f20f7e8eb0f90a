/* Kernels with faults, which cpu_cuda.h must show. */
#include "cuda_elements.h"

namespace faulty {

struct Numbers {
    float *out;
    xgpt::i64 count;
};

/* out[i] = the number of the next thread; without the barrier, what lay there before. */
template <bool HAS_BARRIER>
__device__ inline void next(const Numbers &p) {
    XGPT_SHARED(shared);
    shared[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (HAS_BARRIER) __syncthreads();
    p.out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

/* The same, and then the shared memory is used anew: without a barrier before that, a warp that runs
 * ahead, past a shuffle, takes from another what it has not read yet. */
__device__ inline void overwritten(const Numbers &p) {
    XGPT_SHARED(shared);
    shared[threadIdx.x] = static_cast<float>(threadIdx.x);
    __syncthreads();
    const float next = shared[(threadIdx.x + 1) % blockDim.x];
    const float sum = xgpt::warp_sum(next);
    shared[threadIdx.x] = sum - sum - 1.f;
    p.out[threadIdx.x] = next;
}

__device__ inline void only_some_wait(const Numbers &p) {
    if (threadIdx.x > 3) __syncthreads();
    p.out[threadIdx.x] = 1.f;
}

/* Writes where `count` says, within the memory that it was given or beyond it. */
__device__ inline void write_at(const Numbers &p) {
    if (threadIdx.x == 0) p.out[p.count] = 1.f;
}
__device__ inline void write_shared_at(const Numbers &p) {
    XGPT_SHARED(shared);
    if (threadIdx.x == 0) shared[p.count] = 1.f;
}

/* out[i] = the sum over the block, and how a float16 comes back. */
__device__ inline void sums(const Numbers &p) {
    const float x = p.out[threadIdx.x];
    xgpt::float16 half;
    xgpt::from_float(x, &half);
    const float sum = xgpt::block_sum(x);
    p.out[threadIdx.x] = sum;
    p.out[blockDim.x + threadIdx.x] = xgpt::to_float(half);
}

}  // namespace faulty

KERNEL_AS(next_thread, faulty::Numbers, faulty::next<true>)
KERNEL_AS(next_without_barrier, faulty::Numbers, faulty::next<false>)
KERNEL_AS(overwritten, faulty::Numbers, faulty::overwritten)
KERNEL_AS(barrier_left_out, faulty::Numbers, faulty::only_some_wait)
KERNEL_AS(write_at, faulty::Numbers, faulty::write_at)
KERNEL_AS(write_shared_at, faulty::Numbers, faulty::write_shared_at)
KERNEL_AS(sums, faulty::Numbers, faulty::sums)
