/* Tiles of bfloat16 (Intel's AMX): their sizes and their instructions, included by tiles_isa.h and
 * decode_tiles_isa.h in the namespace of AVX-512 with pairs.
 *
 * Instructions are written out: GCC's own functions for them do not tell it that a tile is read from
 * memory, which it may then write too late. */
namespace xgpt {
namespace XGPT_ISA {

constexpr int SIDE = 16;           // rows of a tile, and floats or pairs in one
constexpr int DEEP = 2 * SIDE;     // bfloat16 in a row of a tile

/* The memory from which tiles are configured, in the processor's own layout: eight of 16 rows of 64
 * bytes. */
struct alignas(64) TileSizes {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
};

template <int T>
XGPT_INLINE void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}
/* Tile T = 16 rows of 64 bytes, `stride` bytes apart. */
template <int T>
XGPT_INLINE void load_tile(const void *p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
XGPT_INLINE void store_tile(void *p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(T) : "memory");
}
/* Tile T [16, 16] += A [16, 16 pairs] x B [16 pairs, 16]. */
template <int T, int A, int B>
XGPT_INLINE void multiply_tiles() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(T), "i"(A), "i"(B));
}

/* While there is one, the thread's tiles are those of this file. */
struct Tiles {
    Tiles() {
        const TileSizes sizes;
        __asm__ volatile("ldtilecfg %0" : : "m"(sizes));
    }
    ~Tiles() { __asm__ volatile("tilerelease" : : : "memory"); }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
};

}  // namespace XGPT_ISA
}  // namespace xgpt
