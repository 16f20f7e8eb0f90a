/* Work shared among threads: those of the OpenMP library that torch brought, or our own.
 *
 * Two pools would keep each other from the cores (OpenMP's threads spin at every barrier), so the
 * library is not linked with an OpenMP of its own: it is handed the entry of torch's.
 */
#ifndef XGPT_THREADS_H
#define XGPT_THREADS_H

#include <stdint.h>

#include <algorithm>

namespace xgpt {

/* Calls body(data, i) for every i of 0..parts-1, each on a thread of its own where there are. */
void share(int parts, void (*body)(void *data, int part), void *data);

template <typename Body>
void share(int parts, Body &&body) {
    auto call = [](void *data, int part) { (*static_cast<Body *>(data))(part); };
    share(parts, static_cast<void (*)(void *, int)>(call), const_cast<void *>(
              static_cast<const void *>(&body)));
}

/* Part i of `parts` of `count` items is [begin(i), begin(i + 1)). */
inline int64_t begin(int64_t count, int parts, int i) { return count * i / parts; }

/* How many threads a pass over so many elements of rows is shared among. */
inline int threads_for(int64_t elements, int threads) {
    constexpr int64_t LEAST = 16384;  // that a thread should have: less is not worth waking it
    return static_cast<int>(std::clamp<int64_t>(elements / LEAST, 1, threads));
}

}  // namespace xgpt
#endif
