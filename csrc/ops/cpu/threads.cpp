#include "threads.h"

#include <atomic>
#include <thread>
#include <vector>

#include "native.h"

namespace {

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
std::atomic<GompParallel> gomp_parallel{nullptr};

struct Region {
    int parts;
    void (*body)(void *, int);
    void *data;
    std::atomic<int> next{0};
};

/* Takes parts until none is left: an OpenMP library may start fewer threads than asked for. */
void work(void *argument) {
    auto &region = *static_cast<Region *>(argument);
    for (int part; (part = region.next.fetch_add(1)) < region.parts;) region.body(region.data, part);
}

}  // namespace

void xgpt::share(int parts, void (*body)(void *, int), void *data) {
    if (parts <= 1) {
        if (parts == 1) body(data, 0);
        return;
    }
    Region region{parts, body, data};
    if (GompParallel parallel = gomp_parallel.load()) {
        parallel(work, &region, static_cast<unsigned>(parts), 0);
        return;
    }
    std::vector<std::thread> threads;
    for (int i = 1; i < parts; ++i) threads.emplace_back(work, &region);
    work(&region);
    for (auto &thread : threads) thread.join();
}

extern "C" void xgpt_use_openmp(void *entry) {
    gomp_parallel.store(reinterpret_cast<GompParallel>(entry));
}
