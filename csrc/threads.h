/* Work shared among threads: those of the OpenMP library that torch brought, or our own.
 *
 * Two pools would keep each other from the cores (OpenMP's threads spin at every barrier), so the
 * library is not linked with an OpenMP of its own: it is handed the entry of torch's.
 */
#ifndef XGPT_THREADS_H
#define XGPT_THREADS_H

#include <stdint.h>

#include <algorithm>
#include <atomic>

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

/* Calls body(panel, first, last) until each of `panels` panels has had all its tiles: tiles
 * first..last-1 of one panel at a time, a panel's one after the other. Threads take pieces of the
 * work as they come free, each about PIECES of them: one whose core others took does fewer. */
template <typename Body>
void each_tile(int64_t panels, int64_t tiles, int threads, Body &&body) {
    constexpr int64_t PIECES = 16;
    const int64_t units = panels * tiles;
    const int64_t piece = std::max(units / (PIECES * threads), int64_t{1});
    std::atomic<int64_t> next{0};
    share(threads, [&](int) {
        int64_t unit;
        while ((unit = next.fetch_add(piece, std::memory_order_relaxed)) < units)
            for (const int64_t end = std::min(unit + piece, units); unit < end;) {
                const int64_t panel = unit / tiles, first = unit % tiles;
                const int64_t last = std::min(first + end - unit, tiles);
                unit += last - first;
                body(panel, first, last);
            }
    });
}

}  // namespace xgpt
#endif
