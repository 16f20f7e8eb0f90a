/* `vec`: XGPT_W floats in a register, in namespace xgpt::XGPT_ISA. Included by each_isa.h alone,
 * once for each instruction set; arithmetic is GCC's own on vectors. */
namespace xgpt {
namespace XGPT_ISA {

constexpr int W = XGPT_W;
typedef float vec __attribute__((vector_size(4 * XGPT_W)));
typedef int32_t ivec __attribute__((vector_size(4 * XGPT_W)));
typedef uint32_t uvec __attribute__((vector_size(4 * XGPT_W)));
typedef uint16_t hvec __attribute__((vector_size(2 * XGPT_W)));

static inline vec all(float x) { return vec{} + x; }

static inline vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
/* GCC turns a conversion between vectors of other widths into several steps: these are one each. */
static inline vec load(const bfloat16 *p) {
#if XGPT_W == 16
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    return reinterpret_cast<vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
#elif XGPT_W == 8
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return reinterpret_cast<vec>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
#else
    hvec h;
    memcpy(&h, p, sizeof h);
    return reinterpret_cast<vec>(__builtin_convertvector(h, uvec) << 16);
#endif
}
static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
static inline void store(bfloat16 *p, vec v) {  // to the nearest, ties to even
    const uvec bits = reinterpret_cast<uvec>(v);
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uvec whole = v != v ? uvec{} + 0x7fc0 : rounded;
#if XGPT_W == 16
    const __m256i h = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(whole));
#else
    const hvec h = __builtin_convertvector(whole, hvec);
#endif
    memcpy(p, &h, sizeof h);
}

/* The first `count` <= W elements; the others are 0 (or are left as they are). */
template <typename E>
static inline vec load(const E *p, int64_t count) {
    if (count >= W) return load(p);
    E some[W] = {};
    memcpy(some, p, count * sizeof(E));
    return load(some);
}
template <typename E>
static inline void store(E *p, vec v, int64_t count) {
    if (count >= W) return store(p, v);
    E some[W];
    store(some, v);
    memcpy(p, some, count * sizeof(E));
}

static inline vec larger(vec a, vec b) { return a > b ? a : b; }

static inline float sum(vec v) {
    float out = 0;
    for (int i = 0; i < W; ++i) out += v[i];
    return out;
}
static inline float largest(vec v) {
    float out = v[0];
    for (int i = 1; i < W; ++i) out = v[i] > out ? v[i] : out;
    return out;
}

/* Lane i is i. */
static inline ivec lanes() {
    ivec v{};
    for (int i = 0; i < W; ++i) v[i] = i;
    return v;
}

/* e to the x, within 2 units in the last place for x <= 88; 0 below -87 (and for -infinity).
 * x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial of e^r is that of the Cephes library. */
static inline vec exp(vec x) {
    const vec bounded = larger(x, all(-87.0f));
    const vec shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to whole n
    const vec n = shifted - 12582912.0f;
    const vec r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ivec exponent = (reinterpret_cast<ivec>(shifted) - 0x4b400000 + 127) << 23;
    return x < -87.0f ? vec{} : p * reinterpret_cast<vec>(exponent);
}

/* rows[i] -> lane i of the result is the sum of row i's lanes, W rows. */
static inline vec row_sums(vec *rows) {
#if XGPT_W == 4
    constexpr int count = 4;
    const ivec low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
    const ivec low2 = {0, 1, 4, 5}, high2 = {2, 3, 6, 7};
#elif XGPT_W == 8
    constexpr int count = 8;
    const ivec low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const ivec low2 = {0, 1, 8, 9, 4, 5, 12, 13}, high2 = {2, 3, 10, 11, 6, 7, 14, 15};
    const ivec low4 = {0, 1, 2, 3, 8, 9, 10, 11}, high4 = {4, 5, 6, 7, 12, 13, 14, 15};
#else
    constexpr int count = 16;
    const ivec low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const ivec high = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const ivec low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const ivec high2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    const ivec low4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const ivec high4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
#endif
    auto halve = [rows](int left, ivec first, ivec second) {  // `left` rows -> half as many
        for (int i = 0; i < left / 2; ++i)
            rows[i] = __builtin_shuffle(rows[2 * i], rows[2 * i + 1], first) +
                      __builtin_shuffle(rows[2 * i], rows[2 * i + 1], second);
    };
    halve(count, low, high);
    halve(count / 2, low2, high2);
#if XGPT_W >= 8
    halve(count / 4, low4, high4);
#endif
#if XGPT_W == 16
    halve(count / 8, low4, high4);
#endif
    return rows[0];
}

}  // namespace XGPT_ISA
}  // namespace xgpt
