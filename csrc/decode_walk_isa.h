/* The keys and values that a thread of decode_isa.h reads, piece by piece, and what asks for them
 * before. For one instruction set; included by attention_isa.h. */
namespace xgpt {
namespace XGPT_ISA {

constexpr int BLOCK = 128;             // keys whose scores are held at a time
constexpr int64_t AHEAD_BYTES = 8192;  // how early keys and values are asked for

/* `count` keys and values of one (query, KV head) pair, one after the other, from position `at` of
 * the query on. */
template <typename E>
struct Piece {
    int64_t pair, at, count;
    const E *keys, *values;
};

/* Asks for `bytes` from p on to be brought into the second level cache. */
static inline void ask_for(const void *p, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64)
        __builtin_prefetch(static_cast<const char *>(p) + line, 0, 2);
}

/* The keys first..last-1 of the long row of all, piece by piece. */
template <typename E>
struct Walk {
    const Decode &a;
    const std::vector<int64_t> &start;  // where a pair's keys begin in the long row
    int64_t place, last, pair;

    Walk(const Decode &a, const std::vector<int64_t> &start, int64_t first, int64_t last)
        : a(a), start(start), place(first), last(last),
          pair(std::upper_bound(start.begin(), start.end(), first) - start.begin() - 1) {}

    /* Is there one more? */
    bool next(Piece<E> &piece) {
        if (place >= last) return false;
        while (start[pair + 1] <= place) ++pair;
        const int64_t size = a.blocks.block_size, i = pair / a.kv_heads, at = place - start[pair];
        const int64_t end = std::min(last, start[pair + 1]);
        const int64_t row = ((a.blocks.of(i, at) * a.kv_heads + pair % a.kv_heads) * size +
                             at % size) * a.dim;
        piece = {pair, at, std::min({int64_t{BLOCK}, size - at % size, end - place}),
                 static_cast<const E *>(a.keys) + row, static_cast<const E *>(a.values) + row};
        place += piece.count;
        return true;
    }
};

/* Walks AHEAD_BYTES before the one who reads: what is asked for by then is there. It goes on while
 * weights are made of scores, too, so that memory does not wait meanwhile, and rests that much
 * while rows are read. */
template <typename E>
struct Asker {
    Walk<E> walk;
    Piece<E> piece{};
    const E *rows = nullptr, *from = nullptr;  // of the keys or values it is at
    int64_t left = 0;
    bool in_values = true, rests = false;
    int64_t early = 0;  // times that it asked without being taken from

    explicit Asker(const Walk<E> &walk) : walk(walk) {
        const int64_t bytes = walk.a.dim * sizeof(E);
        for (int64_t asked = 0; asked < AHEAD_BYTES; asked += W * bytes) ask_for(next(), W * bytes);
    }
    /* W rows to be asked for: the next, or in its rests some that have been. */
    const E *take() {
        rests = !rests && early > 0;
        if (!rests) return next();
        --early;
        return from;
    }
    void ask_early() {
        ask_for(next(), W * walk.a.dim * sizeof(E));
        ++early;
    }
    /* The next W rows; where there are fewer, some that have been had already. */
    const E *next() {
        if (left <= 0) move();
        const E *now = left < W ? std::max(from, rows - (W - left) * walk.a.dim) : rows;
        rows += W * walk.a.dim;
        left -= W;
        return now;
    }
    void move() {
        if (in_values && !walk.next(piece)) {  // at the end: the same rows once more
            rows = from;
            left = W;
            return;
        }
        in_values = !in_values;
        rows = from = in_values ? piece.values : piece.keys;
        left = piece.count;
    }
};

}  // namespace XGPT_ISA
}  // namespace xgpt
