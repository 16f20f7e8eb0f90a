/* CUDA C++ executed on the CPU, for tests: what a kernel of ours uses of it.
 *
 * A launch's blocks run one after the other. The threads of a block are fibers of one OS thread,
 * each with a stack of its own: one runs until it comes to a barrier (__syncthreads or a shuffle),
 * then the next one does. A launch says in which order: rising or falling, all threads in turn or a
 * warp as far as it gets before the next one; a barrier that is missing shows in one of the four. A
 * launch whose threads do not all come to a barrier ends with an error. AddressSanitizer is told of
 * every change of stack; shared memory is of exactly the size asked for, NaN before each block.
 */
#ifndef XGPT_CPU_CUDA_H
#define XGPT_CPU_CUDA_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <vector>

#include "cpu_fiber.h"

#define __global__
#define __device__
#define __shared__ static
#define XGPT_SHARED(name) float *const name = cpu_cuda::block.shared.data()

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace cpu_cuda {

struct Dim {
    unsigned x, y, z;
};

/* How a kernel is launched; `shared_bytes` a multiple of four. `order`: FALLING, BY_WARP or both. */
struct Launch {
    int64_t grid_x, grid_y, grid_z, threads, shared_bytes, order;
};
enum { FALLING = 1, BY_WARP = 2 };
enum { DONE = 0, WRONG_LAUNCH = 1, BARRIER_LEFT_OUT = 2 };

constexpr int LANES = 32;

struct Barrier {
    int expected = 0, arrived = 0;
    unsigned generation = 0;
};

struct Warp {
    Barrier barrier;
    // of two exchanges in turn: one may still be read
    unsigned values[2][LANES];
    unsigned operands[2][LANES][6];  // of a product: four registers of A, two of B
};

struct Thread {
    Fiber fiber;
    int turn;  // which of the warp's values is next
    bool is_done;
};

struct Block {
    Thread *threads;
    int num_threads;
    std::vector<Warp> warps;
    std::vector<float> shared;
    Barrier barrier;
    Fiber scheduler;
    bool has_progressed;
    void (*call)(const void *kernel, const void *arguments);
    const void *kernel, *arguments;
};

inline Block block;
inline std::mutex one_launch;
inline Dim thread_index, block_index, block_size, grid_size;

inline Thread &here() { return block.threads[thread_index.x]; }

/* To the scheduler, until it is this thread's turn again. */
inline void yield() {
    const unsigned own = thread_index.x;
    change(here().fiber, block.scheduler);
    thread_index.x = own;
}

inline void wait(Barrier &barrier) {
    const unsigned generation = barrier.generation;
    block.has_progressed = true;
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) yield();
}

inline Warp &own_warp() { return block.warps[thread_index.x / LANES]; }

inline unsigned shuffle(unsigned bits, int source) {
    Warp &warp = own_warp();
    const int turn = here().turn ^= 1;
    warp.values[turn][thread_index.x % LANES] = bits;
    wait(warp.barrier);
    return warp.values[turn][source];
}

/* mma.sync.m16n8k16: the lane's four of sums [16, 8] += A [16, 16] B [16, 8], of two bytes an element,
 * laid out over the lanes as PTX says. `to_float`: of an element's bits. */
template <typename ToFloat>
inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                     ToFloat to_float) {
    Warp &warp = own_warp();
    const int turn = here().turn ^= 1, lane = static_cast<int>(thread_index.x) % LANES;
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    std::memcpy(warp.operands[turn][lane], own, sizeof own);
    wait(warp.barrier);
    const auto element = [&](int holder, int which, int k) {
        return to_float(static_cast<unsigned short>(
            warp.operands[turn][holder][which] >> (k % 2 ? 16 : 0)));
    };
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            sums[i] += element(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) *
                       element(column * 4 + k % 8 / 2, 4 + k / 8, k);
    }
}

/* movmatrix.m8n8.trans: of a matrix [8, 8] of two bytes an element, two neighbours of a row each. */
inline unsigned transposed(unsigned pair) {
    Warp &warp = own_warp();
    const int turn = here().turn ^= 1, lane = static_cast<int>(thread_index.x) % LANES;
    warp.values[turn][lane] = pair;
    wait(warp.barrier);
    const int shift = lane / 4 % 2 ? 16 : 0, column = lane / 4 / 2;
    const unsigned low = warp.values[turn][lane % 4 * 2 * 4 + column] >> shift & 0xffffu;
    const unsigned high = warp.values[turn][(lane % 4 * 2 + 1) * 4 + column] >> shift & 0xffffu;
    return low | high << 16;
}

inline void thread_main() {
    entered(block.scheduler);
    block.call(block.kernel, block.arguments);
    here().is_done = block.has_progressed = true;
    leave(here().fiber, block.scheduler);
}

inline int run_block(const Launch &launch) {
    const int threads = block.num_threads;
    std::fill(block.shared.begin(), block.shared.end(), std::numeric_limits<float>::quiet_NaN());
    block.barrier = {threads, 0, 0};
    for (Warp &warp : block.warps) warp.barrier = {LANES, 0, 0};
    for (int i = 0; i < threads; ++i) {
        Thread &thread = block.threads[i];
        prepare(thread.fiber, thread_main);
        thread.turn = 0;
        thread.is_done = false;
    }
    const int together = launch.order & BY_WARP ? LANES : threads;
    for (int left = threads; left > 0;) {
        const int before = left;
        bool has_progressed = false;
        for (int first = 0; first < threads; first += together) {
            do {
                block.has_progressed = false;
                for (int i = first; i < first + together; ++i) {
                    thread_index.x = static_cast<unsigned>(
                        launch.order & FALLING ? threads - 1 - i : i);
                    Thread &thread = here();
                    if (thread.is_done) continue;
                    change(block.scheduler, thread.fiber);
                    left -= thread.is_done;
                }
                has_progressed |= block.has_progressed;
            } while (block.has_progressed);
        }
        if (!has_progressed && left == before) return BARRIER_LEFT_OUT;
    }
    return DONE;
}

template <typename Arguments>
int run(void (*kernel)(const Arguments), const Launch &launch, const void *arguments) {
    if (launch.threads < 1 || launch.threads > 1024 || launch.threads % LANES ||
        launch.grid_x < 1 || launch.grid_x > 0x7fffffff || launch.grid_y < 1 ||
        launch.grid_y > 65535 || launch.grid_z < 1 || launch.grid_z > 65535 ||
        launch.shared_bytes < 0 || launch.shared_bytes % 4)
        return WRONG_LAUNCH;
    const std::lock_guard<std::mutex> alone(one_launch);
    block.call = [](const void *function, const void *given) {
        reinterpret_cast<void (*)(const Arguments)>(const_cast<void *>(function))(
            *static_cast<const Arguments *>(given));
    };
    block.kernel = reinterpret_cast<const void *>(kernel);
    block.arguments = arguments;
    static std::vector<Thread> made(1024);  // their stacks are kept
    block.threads = made.data();
    block.num_threads = static_cast<int>(launch.threads);
    block.warps.resize(static_cast<size_t>(launch.threads / LANES));
    block.shared = std::vector<float>(static_cast<size_t>(launch.shared_bytes / 4));
    grid_size = {static_cast<unsigned>(launch.grid_x), static_cast<unsigned>(launch.grid_y),
                 static_cast<unsigned>(launch.grid_z)};
    block_size = {static_cast<unsigned>(launch.threads), 1, 1};
    thread_index = {0, 0, 0};
    for (unsigned z = 0; z < grid_size.z; ++z)
        for (unsigned y = 0; y < grid_size.y; ++y)
            for (unsigned x = 0; x < grid_size.x; ++x) {
                block_index = {x, y, z};
                if (const int wrong = run_block(launch)) return wrong;
            }
    return DONE;
}

inline float half_to_float(unsigned short bits) {
    const int exponent = (bits >> 10) & 31, mantissa = bits & 0x3ff;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.f + static_cast<float>(mantissa),
                                                   exponent - 25)
                                      : std::ldexp(static_cast<float>(mantissa), -24);
    return bits & 0x8000 ? -size : size;
}

inline unsigned short float_to_half(float x) {  // to the nearest, ties to even
    const unsigned sign = std::signbit(x) ? 0x8000u : 0u;
    const float size = std::fabs(x);
    if (x != x) return 0x7e00;
    if (size >= 65520.f) return static_cast<unsigned short>(sign | 0x7c00u);
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);  // below: no leading one
    const float steps = std::nearbyint(std::ldexp(size, 10 - exponent));
    return static_cast<unsigned short>(sign + (static_cast<unsigned>(exponent + 14) << 10) +
                                       static_cast<unsigned>(steps));
}

}  // namespace cpu_cuda

#define threadIdx cpu_cuda::thread_index
#define blockIdx cpu_cuda::block_index
#define blockDim cpu_cuda::block_size
#define gridDim cpu_cuda::grid_size
#define XGPT_CPU_ENTRY(kernel, Arguments)                                                    \
    extern "C" __attribute__((visibility("default"))) int run_##kernel(                      \
        const cpu_cuda::Launch *launch, const void *arguments) {                             \
        return cpu_cuda::run<Arguments>(kernel, *launch, arguments);                         \
    }

using std::max;
using std::min;

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
/* Bytes of two registers, chosen by the digits of `selector`, the lowest first. */
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = uint64_t(high) << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i)
        out |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return out;
}
inline void __syncthreads() { cpu_cuda::wait(cpu_cuda::block.barrier); }
inline float __shfl_xor_sync(unsigned, float x, int offset) {
    const int lane = static_cast<int>(threadIdx.x) % cpu_cuda::LANES;
    return __uint_as_float(cpu_cuda::shuffle(__float_as_uint(x), lane ^ offset));
}
#endif
