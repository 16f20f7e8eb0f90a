/* Work shared among threads: those of torch's OpenMP library, or our own.
 *
 * Two pools would compete for the cores, since OpenMP's threads spin at every barrier. So the
 * library is not linked with an OpenMP of its own, and gets the entry of torch's. */
#ifndef XGPT_THREADS_H
#define XGPT_THREADS_H

#include <stdint.h>

#include <algorithm>
#include <atomic>

namespace xgpt {

/* Calls body(data, i) for every i of 0..parts-1, each on a thread of its own if there are
 * enough. */
void share(int parts, void (*body)(void *data, int part), void *data);

template <typename Body>
void share(int parts, Body &&body) {
    auto call = [](void *data, int part) { (*static_cast<Body *>(data))(part); };
    share(parts, static_cast<void (*)(void *, int)>(call), const_cast<void *>(
              static_cast<const void *>(&body)));
}

/* Part i of `parts` of `count` items is [begin(i), begin(i + 1)). */
inline int64_t begin(int64_t count, int parts, int i) { return count * i / parts; }

/* Number of threads that share a pass over so many elements of rows. */
inline int threads_for(int64_t elements, int threads) {
    constexpr int64_t LEAST = 16384;  // chosen: elements per thread; fewer are not worth waking it
    return static_cast<int>(std::clamp<int64_t>(elements / LEAST, 1, threads));
}

/* The rest of a thread's units of work, all below 2^32. The thread takes from the front; others,
 * once theirs is done, from the back. */
class Share {
  public:
    void set(int64_t first, int64_t end) { left_.store(packed(first, end), RELAXED); }

    /* Takes at most `most` units, [first, end); false if none is left. Takes fewer and fewer
     * towards the end, so that all threads end together. */
    bool take(int64_t most, bool is_own, int64_t &first, int64_t &end) {
        for (uint64_t now = left_.load(RELAXED), then;;) {
            int64_t from = static_cast<uint32_t>(now), to = static_cast<int64_t>(now >> 32);
            if (from >= to) return false;
            const int64_t count = std::clamp<int64_t>((to - from) / 2, 1, most);
            first = is_own ? from : to - count, end = first + count;
            then = is_own ? packed(end, to) : packed(from, first);
            if (left_.compare_exchange_weak(now, then, RELAXED)) return true;
        }
    }

  private:
    static constexpr auto RELAXED = std::memory_order_relaxed;
    static uint64_t packed(int64_t first, int64_t end) {
        return static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(first);
    }

    alignas(64) std::atomic<uint64_t> left_;  // end above, first below
};

/* Calls body(panel, first, last) until each of `panels` panels has had all its tiles: tiles
 * first..last-1 of one panel at a time. Each thread has a share of neighbouring panels, so that
 * it usually knows its next one. A thread that is done early takes parts of others' shares,
 * whose core another process may be using. */
template <typename Body>
void each_tile(int64_t panels, int64_t tiles, int threads, Body &&body) {
    constexpr int64_t PIECES = 16, MOST_SHARES = 512;
    const int64_t units = panels * tiles, piece = std::max(units / (PIECES * threads), int64_t{1});
    const int shares = static_cast<int>(std::min<int64_t>({threads, units, MOST_SHARES}));
    Share left[MOST_SHARES];
    for (int i = 0; i < shares; ++i)
        left[i].set(begin(units, shares, i), begin(units, shares, i + 1));
    share(shares, [&](int own) {
        for (int i = 0; i < shares; ++i)
            for (int64_t unit, end; left[(own + i) % shares].take(piece, i == 0, unit, end);)
                while (unit < end) {
                    const int64_t panel = unit / tiles, first = unit % tiles;
                    const int64_t last = std::min(first + end - unit, tiles);
                    unit += last - first;
                    body(panel, first, last);
                }
    });
}

}  // namespace xgpt
#endif
