/* `vec`: XGPT_W floats in a register, in namespace xgpt::XGPT_ISA. Included only by each_isa.h,
 * once for each instruction set; arithmetic is GCC's on vectors. */
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
/* NOTE: GCC converts between vectors of different widths in several steps; these take one. */
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
#ifdef XGPT_HAS_DOTS
    const auto h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
    memcpy(p, &h, sizeof h);
#else
    const uvec bits = reinterpret_cast<uvec>(v);
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uvec whole = v != v ? uvec{} + 0x7fc0 : rounded;
#if XGPT_W == 16
    const __m256i h = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(whole));
#else
    const hvec h = __builtin_convertvector(whole, hvec);
#endif
    memcpy(p, &h, sizeof h);
#endif
}

/* The value of v after it is stored as an E. */
template <typename E>
static inline vec as_kept(vec v) {
    if constexpr (std::is_same_v<E, float>) return v;
#ifdef XGPT_HAS_DOTS
    const __m256i h = (__m256i)_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
    return reinterpret_cast<vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
#else
    E kept[W];
    store(kept, v);
    return load(kept);
#endif
}

/* The first `count` <= W elements; the others are 0 (or stay unchanged). */
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

/* W bytes as whole numbers of 32 bits; and the low bytes of such numbers. */
typedef uint8_t bytes __attribute__((vector_size(XGPT_W)));
static inline ivec load_bytes(const uint8_t *p) {
    bytes v;
    memcpy(&v, p, sizeof v);
#if XGPT_W == 16
    return reinterpret_cast<ivec>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(v)));
#elif XGPT_W == 8
    return reinterpret_cast<ivec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(
        reinterpret_cast<const __m128i *>(p))));
#else
    return __builtin_convertvector(v, ivec);
#endif
}
static inline void store_bytes(uint8_t *p, ivec v, int64_t count = W) {
#if XGPT_W == 16
    const __m128i low = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v));
#else
    const bytes low = __builtin_convertvector(v, bytes);
#endif
    memcpy(p, &low, count < W ? count : W);
}

static inline vec larger(vec a, vec b) {  // b if either is NaN
#if XGPT_W == 16
    return reinterpret_cast<vec>(_mm512_max_ps(reinterpret_cast<__m512>(a),
                                               reinterpret_cast<__m512>(b)));
#elif XGPT_W == 8
    return reinterpret_cast<vec>(_mm256_max_ps(reinterpret_cast<__m256>(a),
                                               reinterpret_cast<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}

/* Lane i of the result is lane I[i] of a and b, one after the other. */
template <int... I>
XGPT_INLINE vec pick(vec a, vec b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, ivec{I...});
#endif
}
template <int... I>
using Lanes = std::integer_sequence<int, I...>;
using EachLane = std::make_integer_sequence<int, W>;

/* Adds lanes that are S apart: of a for lanes without bit S in their number, else of b. */
template <int S, int... I>
XGPT_INLINE vec add_halves(vec a, vec b, Lanes<I...>) {
    return pick<(I & S ? I + W : I)...>(a, b) + pick<((I ^ S) + (I & S ? W : 0))...>(a, b);
}
template <int S>
XGPT_INLINE vec add_halves(vec a, vec b) {
    return add_halves<S>(a, b, EachLane{});
}

/* Splits pairs (first, second) in low and high into all firsts and all seconds; and back. */
template <int... I>
XGPT_INLINE void split(vec low, vec high, vec &first, vec &second, Lanes<I...>) {
    first = pick<2 * I...>(low, high);
    second = pick<2 * I + 1 ...>(low, high);
}
template <int... I>
XGPT_INLINE void join(vec first, vec second, vec &low, vec &high, Lanes<I...>) {
    low = pick<(I / 2 + I % 2 * W)...>(first, second);
    high = pick<(W / 2 + I / 2 + I % 2 * W)...>(first, second);
}

/* Transposes W rows of W lanes in place. */
template <int S, int... I>
XGPT_INLINE void turn_by(vec *rows, Lanes<I...> lanes) {
    for (int i = 0; i < W; ++i)
        if (!(i & S)) {
            const vec a = rows[i], b = rows[i + S];
            rows[i] = pick<(I & S ? (I ^ S) + W : I)...>(a, b);
            rows[i + S] = pick<(I & S ? I + W : I ^ S)...>(a, b);
        }
    if constexpr (S > 1) turn_by<S / 2>(rows, lanes);
}
XGPT_INLINE void turn(vec *rows) { turn_by<W / 2>(rows, EachLane{}); }

/* Loads 2 W elements at once in the fastest order: floats in their own, bfloat16 those at even,
 * then at odd places. `ordered` turns 2 W floats into E's order, `unordered` back. */
XGPT_INLINE void load_two(const float *p, vec &a, vec &b) {
    a = load(p);
    b = load(p + W);
}
XGPT_INLINE void load_two(const bfloat16 *p, vec &a, vec &b) {
    uvec both;
    memcpy(&both, p, sizeof both);
    a = reinterpret_cast<vec>(both << 16);
    b = reinterpret_cast<vec>(both & 0xffff0000u);
}
template <typename E>
XGPT_INLINE void load_two(const E *p, int64_t count, vec &a, vec &b) {  // 0 beyond `count`
    if (count >= 2 * W) return load_two(p, a, b);
    E some[2 * W] = {};
    memcpy(some, p, count * sizeof(E));
    load_two(some, a, b);
}
template <typename E>
XGPT_INLINE void ordered(float *p) {
    if constexpr (std::is_same_v<E, bfloat16>) {
        vec a, b;
        split(load(p), load(p + W), a, b, EachLane{});
        store(p, a);
        store(p + W, b);
    }
}
template <typename E>
XGPT_INLINE void unordered(vec &a, vec &b) {
    if constexpr (std::is_same_v<E, bfloat16>) join(vec(a), vec(b), a, b, EachLane{});
}

#ifdef XGPT_HAS_DOTS
/* 2 W bfloat16 in their order, 0 beyond `count`: W pairs. */
static inline vec load_pairs(const bfloat16 *p, int64_t count) {
    if (count >= 2 * W) return load(reinterpret_cast<const float *>(p));
    const __mmask32 some = (__mmask32{1} << count) - 1;
    return reinterpret_cast<vec>(_mm512_maskz_loadu_epi16(some, p));
}
/* The pair at p in every lane. */
XGPT_INLINE vec each_pair(const void *p) {
    float bits;
    memcpy(&bits, p, sizeof bits);
    return reinterpret_cast<vec>(_mm512_set1_ps(bits));
}
/* Adds the products of the pairs in lane i of a and b to lane i of the sums. */
XGPT_INLINE vec add_dots(vec sums, vec a, vec b) {
    return reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums),
                                                  (__m512bh)(a), (__m512bh)(b)));
}
/* Joins two rows of 2 W bfloat16: lane i of `low` is the pair of both rows' element i, lane i of
 * `high` that of their element W + i. */
XGPT_INLINE void pair_rows(vec first, vec second, vec &low, vec &high) {
    typedef uint16_t many __attribute__((vector_size(4 * XGPT_W)));
    many at, then;
    for (int i = 0; i < 2 * W; ++i) {
        at[i] = static_cast<uint16_t>(i / 2 + i % 2 * 2 * W);
        then[i] = static_cast<uint16_t>(W + i / 2 + i % 2 * 2 * W);
    }
    low = reinterpret_cast<vec>(_mm512_permutex2var_epi16(
        reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(at),
        reinterpret_cast<__m512i>(second)));
    high = reinterpret_cast<vec>(_mm512_permutex2var_epi16(
        reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(then),
        reinterpret_cast<__m512i>(second)));
}
#endif

/* Factors of products: a float, or a pair of bfloat16 whose products are summed. */
struct pair {
    bfloat16 first, second;
};
XGPT_INLINE vec add_product(vec sums, float one, vec many) { return sums + one * many; }
#ifdef XGPT_HAS_DOTS
XGPT_INLINE vec add_product(vec sums, const pair &one, vec many) {
    return add_dots(sums, each_pair(&one), many);
}
#endif

template <int S, int... I>
XGPT_INLINE vec swapped(vec v, Lanes<I...>) {
    return pick<(I ^ S)...>(v, v);
}
template <int S = W / 2>
XGPT_INLINE float sum(vec v) {
    v += swapped<S>(v, EachLane{});
    if constexpr (S > 1) return sum<S / 2>(v);
    return v[0];
}
template <int S = W / 2>
XGPT_INLINE float largest(vec v) {
    v = larger(v, swapped<S>(v, EachLane{}));
    if constexpr (S > 1) return largest<S / 2>(v);
    return v[0];
}

/* Lane i is i. */
static inline ivec lanes() {
    ivec v{};
    for (int i = 0; i < W; ++i) v[i] = i;
    return v;
}

/* e to the x, within 2 units in the last place for x <= 88; 0 below -87 (and for -infinity). x =
 * n ln 2 + r with |r| <= ln 2 / 2; the polynomial of e^r is that of the Cephes library. N at
 * once, step by step: alone, each step would wait for the one before. */
template <int N>
XGPT_INLINE void exp(vec (&x)[N]) {
    constexpr float C[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                           5.0000001201e-1f};
    vec shifted[N], r[N], p[N];
    for (int i = 0; i < N; ++i) r[i] = larger(x[i], all(-87.0f));
    for (int i = 0; i < N; ++i)  // 1.5 * 2^23: rounds to whole n
        shifted[i] = r[i] * 1.44269504f + 12582912.0f;
    for (int i = 0; i < N; ++i) r[i] -= (shifted[i] - 12582912.0f) * 0.693359375f;
    for (int i = 0; i < N; ++i) r[i] += (shifted[i] - 12582912.0f) * 2.12194440e-4f;
    for (int i = 0; i < N; ++i) p[i] = r[i] * 1.9875691500e-4f + C[0];
    for (int c = 1; c < 5; ++c)
        for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + C[c];
    for (int i = 0; i < N; ++i) p[i] = p[i] * r[i];
    for (int i = 0; i < N; ++i) p[i] = p[i] * r[i] + r[i] + 1.0f;
    for (int i = 0; i < N; ++i) {
        const ivec exponent = (reinterpret_cast<ivec>(shifted[i]) - 0x4b400000 + 127) << 23;
        x[i] = x[i] < -87.0f ? vec{} : p[i] * reinterpret_cast<vec>(exponent);
    }
}
static inline vec exp(vec x) {
    vec one[1] = {x};
    exp(one);
    return one[0];
}

}  // namespace XGPT_ISA
}  // namespace xgpt
