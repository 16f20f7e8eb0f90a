/* Intel's tiles (AMX) on a processor without them, for tests: it refuses such an instruction, and the
 * handler of that signal does what the instruction would have done. So what is tested is the code
 * that a processor with tiles gets, encodings included.
 *
 * Done: ldtilecfg, tilerelease, tilezero, tileloadd, tilestored, tdpbf16ps, as in Intel's manual
 * ("Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2; products of even and
 * of odd elements summed apart, without denormal numbers, then added). Whatever else is refused
 * goes to whoever had the signal before. */
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>

namespace {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;

struct Tile {
    int rows, bytes;
    alignas(64) uint8_t data[ROWS][BYTES];
};

thread_local Tile tiles[TILES];
thread_local bool is_configured = false;

std::atomic<int64_t> done{0};
std::atomic<int> is_faulty{0};
struct sigaction before;

[[noreturn]] void fault(const char *what) {
    fprintf(stderr, "tiles: a processor would refuse %s\n", what);
    abort();
}

void configure(const uint8_t *from) {
    is_configured = from[0] != 0;
    if (from[0] > 1) fault("this palette");
    for (int i = 1; i < 16; ++i)
        if (from[i]) fault("a configuration with reserved bytes, or begun in the middle");
    for (int i = 0; i < 16; ++i) {
        uint16_t bytes;
        memcpy(&bytes, from + 16 + 2 * i, 2);
        const int rows = from[48 + i];
        if (i >= TILES ? bytes || rows : bytes > BYTES || rows > ROWS || (bytes == 0) != (rows == 0))
            fault("these sizes of a tile");
        if (i < TILES) {
            tiles[i].rows = rows;
            tiles[i].bytes = bytes;
            memset(tiles[i].data, 0, sizeof tiles[i].data);
        }
    }
}

Tile &tile_of(int number) {
    if (number >= TILES || !is_configured || tiles[number].rows == 0)
        fault("a tile that is not configured");
    return tiles[number];
}

float widened(uint16_t bits) {
    const uint32_t whole = static_cast<uint32_t>(bits) << 16;
    float x;
    memcpy(&x, &whole, sizeof x);
    return x;
}

void multiply(Tile &to, const Tile &a, const Tile &b) {
    if (a.bytes / 4 != b.rows || a.rows != to.rows || b.bytes != to.bytes || a.bytes % 4 ||
        b.bytes % 4 || &to == &a || &to == &b || &a == &b)
        fault("a product of such tiles");
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040);  // to the nearest, no exceptions, denormals are zero
    for (int m = 0; m < to.rows; ++m)
        for (int n = 0; n < to.bytes / 4; ++n) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < a.bytes / 4; ++k) {
                uint16_t x[2], y[2];
                memcpy(x, a.data[m] + 4 * k, sizeof x);
                memcpy(y, b.data[k] + 4 * n, sizeof y);
                even = __builtin_fmaf(widened(x[0]), widened(y[0]), even);
                odd = __builtin_fmaf(widened(x[1]), widened(y[1]), odd);
            }
            memcpy(&sum, to.data[m] + 4 * n, sizeof sum);
            sum += even + odd;
            if (is_faulty.load(std::memory_order_relaxed) && m == 3) sum *= 1.25f;
            memcpy(to.data[m] + 4 * n, &sum, sizeof sum);
        }
    _mm_setcsr(mode);
}

/* What an instruction names: three-byte VEX, its opcode, ModRM, and a place in memory. */
struct Instruction {
    int opcode, prefix, reg, rm, other, size;
    bool is_memory;
    uint8_t *address;
    int64_t stride;
};

constexpr int NUMBERED[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

Instruction read(const uint8_t *code, const greg_t *registers) {
    Instruction found{};
    // VEX of the map 0F38, 128 bits, W 0
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return found;
    const int x = code[1] & 0x40 ? 0 : 8, b = code[1] & 0x20 ? 0 : 8;
    const int mod = code[4] >> 6, rm = code[4] & 7;
    found.opcode = code[3];
    found.prefix = code[2] & 3;  // none, 66, F3, F2
    found.other = ~(code[2] >> 3) & 15;
    found.reg = (code[4] >> 3 & 7) | (code[1] & 0x80 ? 0 : 8);
    found.rm = rm | b;
    found.is_memory = mod != 3;
    int size = 5;
    if (found.is_memory) {
        int64_t at = 0;
        int base = rm;
        if (rm == 4) {
            const int sib = code[size++], index = (sib >> 3 & 7) | x;
            base = sib & 7;
            if (index != 4) found.stride = registers[NUMBERED[index]] * (1 << (sib >> 6));
        }
        const bool is_far = mod == 2 || (mod == 0 && base == 5);
        if (!(mod == 0 && base == 5)) at = registers[NUMBERED[base | b]];
        int32_t apart = 0;
        if (is_far) memcpy(&apart, code + size, 4);
        if (mod == 1) apart = static_cast<int8_t>(code[size]);
        size += is_far ? 4 : mod == 1;
        if (mod == 0 && rm == 5) at = reinterpret_cast<int64_t>(code) + size;  // after the instruction
        found.address = reinterpret_cast<uint8_t *>(at + apart);
    }
    found.size = size;
    return found;
}

/* Whether it was one of tiles. */
bool carry_out(const Instruction &one) {
    enum { NONE, P66, PF3, PF2 };
    if (one.opcode == 0x49 && one.prefix == NONE && one.is_memory) {
        configure(one.address + one.stride);
    } else if (one.opcode == 0x49 && one.prefix == NONE && one.reg == 0 && one.rm == 0) {
        is_configured = false;
    } else if (one.opcode == 0x49 && one.prefix == PF2 && !one.is_memory) {
        memset(tile_of(one.reg).data, 0, sizeof tiles[0].data);
    } else if (one.opcode == 0x4b && one.prefix == PF2 && one.is_memory) {
        Tile &to = tile_of(one.reg);
        for (int row = 0; row < to.rows; ++row)
            memcpy(to.data[row], one.address + row * one.stride, to.bytes);
    } else if (one.opcode == 0x4b && one.prefix == PF3 && one.is_memory) {
        const Tile &from = tile_of(one.reg);
        for (int row = 0; row < from.rows; ++row)
            memcpy(one.address + row * one.stride, from.data[row], from.bytes);
    } else if (one.opcode == 0x5c && one.prefix == PF3 && !one.is_memory) {
        multiply(tile_of(one.reg), tile_of(one.rm), tile_of(one.other));
    } else {
        return false;
    }
    return true;
}

void refused(int, siginfo_t *, void *context) {
    greg_t *const registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
    const auto *code = reinterpret_cast<const uint8_t *>(registers[REG_RIP]);
    const Instruction one = read(code, registers);
    if (one.size == 0 || !carry_out(one)) {  // it is refused once more, to whoever was here before
        sigaction(SIGILL, &before, nullptr);
        return;
    }
    done.fetch_add(1, std::memory_order_relaxed);
    registers[REG_RIP] += one.size;
}

}  // namespace

extern "C" int tiles_begin(void) {
    struct sigaction own {};
    own.sa_sigaction = refused;
    own.sa_flags = SA_SIGINFO;
    return sigaction(SIGILL, &own, &before);
}
extern "C" int tiles_end(void) { return sigaction(SIGILL, &before, nullptr); }
/* Instructions carried out so far. */
extern "C" int64_t tiles_done(void) { return done.load(); }
/* Whether products come out wrong from now on. */
extern "C" void tiles_be_faulty(int yes) { is_faulty.store(yes); }
/* Whether this thread's tiles are configured. */
extern "C" int tiles_in_use(void) { return is_configured; }
