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

}  // namespace faulty

KERNEL_AS(next_thread, faulty::Numbers, faulty::next<true>)
KERNEL_AS(next_without_barrier, faulty::Numbers, faulty::next<false>)
KERNEL_AS(overwritten, faulty::Numbers, faulty::overwritten)
KERNEL_AS(barrier_left_out, faulty::Numbers, faulty::only_some_wait)
