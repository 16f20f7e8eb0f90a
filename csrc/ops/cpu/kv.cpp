/* Copies of KV, all layers in one call: onto other slots (compaction), and into or out of one
 * block of memory (handover between pools). Any element type. */
#include <string.h>

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "native.h"
#include "threads.h"

namespace {

constexpr int64_t CHUNK_BYTES = 256 << 10;  // chosen: bytes that a thread takes at a time
constexpr int64_t MIN_BYTES = 128 << 10;    // chosen: below, waking a thread takes longer
constexpr int64_t PIECES = 8;               // chosen: chunks per thread
constexpr int64_t PAST_BYTES = 32 << 20;    // chosen: above, writes would not stay in caches
constexpr int64_t AHEAD_BYTES = 8192;       // chosen: bytes to prefetch ahead

/* The arrays of a cache, in bytes; a head's tokens of a slot are contiguous. */
struct Cache {
    void *const *arrays;
    int64_t num_arrays, slot_stride, heads, entry, num_slots, capacity;

    char *row(int64_t array, int64_t slot, int64_t head) const {
        return static_cast<char *>(arrays[array]) + slot * slot_stride + head * capacity * entry;
    }
    int wrong() const {
        return num_arrays < 0 || heads < 1 || entry < 1 || num_slots < 0 || capacity < 0 ||
               slot_stride < heads * capacity * entry;
    }
    bool has(int64_t slot) const { return 0 <= slot && slot < num_slots; }
};

int64_t sum(const int64_t *lengths, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += lengths[i];
    return total;
}

int check(const Cache &cache, const int64_t *lengths, int64_t n, int threads) {
    if (cache.wrong() || n < 0 || threads < 1) return XGPT_WRONG_SIZE;
    for (int64_t i = 0; i < n; ++i)
        if (lengths[i] < 0 || lengths[i] > cache.capacity) return XGPT_WRONG_LENGTH;
    return XGPT_OK;
}

/* Copies runs of bytes. If all of them exceed the caches, writes bypass these, so that memory
 * need not be read first. */
struct Copier {
    bool is_past;

    explicit Copier(int64_t all_bytes) : is_past(all_bytes > PAST_BYTES) {}

    /* `then`: start of the run that is copied next. */
    void copy(char *to, const char *from, int64_t bytes, const char *then) const {
#ifdef __SSE2__
        if (is_past && bytes >= 256) return copy_past(to, from, bytes, then);
#endif
        memcpy(to, from, static_cast<size_t>(bytes));
    }
    /* Makes this thread's writes visible to others. */
    void finish() const {
#ifdef __SSE2__
        if (is_past) _mm_sfence();
#endif
    }

#ifdef __SSE2__
    static void copy_past(char *to, const char *from, int64_t bytes, const char *then) {
        const int64_t before = -reinterpret_cast<uintptr_t>(to) % 64;  // to the next line
        memcpy(to, from, static_cast<size_t>(before));
        int64_t at = before;
        for (; at + 64 <= bytes; at += 64) {
            const int64_t ahead = at + AHEAD_BYTES - bytes;
            __builtin_prefetch(ahead < 0 ? from + at + AHEAD_BYTES : then + ahead, 0, 2);
            const auto *source = reinterpret_cast<const __m128i *>(from + at);
            auto *target = reinterpret_cast<__m128i *>(to + at);
            const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
            const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
            _mm_stream_si128(target, a);
            _mm_stream_si128(target + 1, b);
            _mm_stream_si128(target + 2, c);
            _mm_stream_si128(target + 3, d);
        }
        memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
    }
#endif
};

/* Calls body(array, head, first, last) for tokens first..last-1 of one head in one array.
 * Threads take equal chunks in turn, as they get done, since cores differ in speed. A position
 * belongs to the same thread for every slot. */
template <typename Body>
void each_chunk(const Cache &cache, int64_t tokens, int64_t longest, int threads,
                const Copier &copier, Body &&body) {
    const int64_t rows = cache.num_arrays * cache.heads, row_bytes = tokens * cache.entry;
    if (rows == 0 || row_bytes == 0) return;
    const int64_t needed = (PIECES * threads + rows - 1) / rows;  // long runs are faster
    const int64_t cuts = std::min({longest, std::max<int64_t>(row_bytes / CHUNK_BYTES, 1), needed});
    const int64_t joined = std::max<int64_t>(CHUNK_BYTES / row_bytes, 1);  // rows of a chunk
    const int64_t chunks = (rows * cuts + joined - 1) / joined;
    const int64_t useful = std::min(chunks, rows * row_bytes / MIN_BYTES + 1);
    std::atomic<int64_t> next{0};
    xgpt::share(static_cast<int>(std::min<int64_t>(threads, useful)), [&](int) {
        for (int64_t chunk; (chunk = next.fetch_add(1)) < chunks;)
            for (int64_t i = chunk * joined; i < std::min((chunk + 1) * joined, rows * cuts); ++i) {
                const int64_t row = i / cuts, cut = i % cuts;
                body(row / cache.heads, row % cache.heads, longest * cut / cuts,
                     longest * (cut + 1) / cuts);
            }
        copier.finish();
    });
}

/* Asks for large pages for memory that is written for the first time: faulting small ones takes
 * longer than the copy. Existing pages stay. */
void in_large_pages(void *memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 2 << 20, start = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t first = (start + page - 1) / page * page, last = (start + bytes) / page * page;
    if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)bytes;
#endif
}

/* Copies between a cache and a block [arrays, heads, block_tokens, entry] of the requests'
 * tokens, one after the other. */
template <typename Copy>
int each_query(const Cache &cache, int64_t block_tokens, const int64_t *slots,
               const int64_t *lengths, int64_t n, int threads, Copy &&copy) {
    if (int code = check(cache, lengths, n, threads)) return code;
    for (int64_t i = 0; i < n; ++i)
        if (!cache.has(slots[i])) return XGPT_WRONG_SLOT;
    const int64_t tokens = sum(lengths, n);
    if (tokens > block_tokens) return XGPT_WRONG_LENGTH;
    const Copier copier(tokens * cache.num_arrays * cache.heads * cache.entry);
    each_chunk(cache, tokens, tokens, threads, copier,
               [&](int64_t array, int64_t head, int64_t begin, int64_t end) {
        int64_t start = 0;  // of request i among the tokens
        for (int64_t i = 0; i < n && start < end; start += lengths[i++]) {
            const int64_t from = std::max(begin, start), to = std::min(end, start + lengths[i]);
            if (from >= to) continue;
            const int64_t place = (array * cache.heads + head) * block_tokens + from;
            copy(copier, cache.row(array, slots[i], head) + (from - start) * cache.entry,
                 place * cache.entry, (to - from) * cache.entry,
                 cache.row(array, slots[i + 1 < n ? i + 1 : i], head));
        }
    });
    return XGPT_OK;
}

}  // namespace

extern "C" {

int xgpt_kv_compact(void *const *arrays, int64_t num_arrays, int64_t slot_stride,
                    const int64_t *sources, const int64_t *targets, const int64_t *lengths,
                    int64_t num_moves, int64_t kv_heads, int64_t entry_bytes, int64_t num_slots,
                    int64_t capacity, int threads) {
    const Cache cache{arrays, num_arrays, slot_stride, kv_heads, entry_bytes, num_slots, capacity};
    if (int code = check(cache, lengths, num_moves, threads)) return code;
    int64_t longest = 0;
    for (int64_t i = 0; i < num_moves; ++i) {
        if (!cache.has(sources[i]) || !cache.has(targets[i])) return XGPT_WRONG_SLOT;
        longest = std::max(longest, lengths[i]);
    }
    const int64_t tokens = sum(lengths, num_moves);
    const Copier copier(tokens * num_arrays * kv_heads * entry_bytes);
    each_chunk(cache, tokens, longest, threads, copier,
               [&](int64_t array, int64_t head, int64_t begin, int64_t end) {
        for (int64_t i = 0; i < num_moves; ++i) {
            const int64_t count = std::min(end, lengths[i]) - begin;
            if (count > 0 && sources[i] != targets[i])
                copier.copy(cache.row(array, targets[i], head) + begin * entry_bytes,
                            cache.row(array, sources[i], head) + begin * entry_bytes,
                            count * entry_bytes,
                            cache.row(array, sources[i + 1 < num_moves ? i + 1 : i], head) +
                                begin * entry_bytes);
        }
    });
    return XGPT_OK;
}

int xgpt_kv_gather(void *block, int64_t block_tokens, const void *const *arrays,
                   int64_t num_arrays, int64_t slot_stride, const int64_t *slots,
                   const int64_t *lengths, int64_t n, int64_t kv_heads, int64_t entry_bytes,
                   int64_t num_slots, int64_t capacity, int threads) {
    const Cache cache{const_cast<void *const *>(arrays), num_arrays, slot_stride, kv_heads,
                      entry_bytes, num_slots, capacity};
    if (!cache.wrong() && block_tokens > 0)
        in_large_pages(block, num_arrays * kv_heads * block_tokens * entry_bytes);
    return each_query(cache, block_tokens, slots, lengths, n, threads,
                      [block](const Copier &copier, const char *row, int64_t place, int64_t bytes,
                              const char *then) {
                          copier.copy(static_cast<char *>(block) + place, row, bytes, then);
                      });
}

int xgpt_kv_scatter(const void *block, int64_t block_tokens, void *const *arrays,
                    int64_t num_arrays, int64_t slot_stride, const int64_t *slots,
                    const int64_t *lengths, int64_t n, int64_t kv_heads, int64_t entry_bytes,
                    int64_t num_slots, int64_t capacity, int threads) {
    const Cache cache{arrays, num_arrays, slot_stride, kv_heads, entry_bytes, num_slots, capacity};
    std::vector<int64_t> sorted(slots, slots + std::max<int64_t>(n, 0));
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return XGPT_WRONG_SLOT;
    return each_query(cache, block_tokens, slots, lengths, n, threads,
                      [block](const Copier &copier, char *row, int64_t place, int64_t bytes,
                              const char *) {
                          const char *from = static_cast<const char *>(block) + place;
                          copier.copy(row, from, bytes, from + bytes);
                      });
}

}  // extern "C"
