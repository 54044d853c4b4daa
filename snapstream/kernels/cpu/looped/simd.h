// Vectors of the instruction set that the library is compiled for - ISA is 512 for AVX-512, 256 for AVX2 with FMA and
// F16C, 0 for what every processor of its kind has - and the operations on them that the compiler's own vectors lack. A
// library holds one set: the linker would mix inline functions compiled for two.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

namespace looped {

#if ISA == 512
constexpr int W = 16;  // lanes
#elif ISA == 256
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ints __attribute__((vector_size(W * 4)));
typedef uint32_t bits __attribute__((vector_size(W * 4)));

INLINE vec load(const float* from) {
    vec out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
INLINE bits load_bits(const void* from) {
    bits out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
INLINE void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }

INLINE vec all(float x) {
#if ISA == 512
    return (vec)_mm512_set1_ps(x);
#elif ISA == 256
    return (vec)_mm256_set1_ps(x);
#else
    return vec{x, x, x, x};
#endif
}
INLINE bits all_bits(uint32_t x) { return bits{} + x; }
INLINE vec as_floats(bits b) { return (vec)b; }
INLINE bits as_bits(vec v) { return (bits)v; }

// The first n of W numbers, zeros after them. (A copy of a size that the compiler does not know is a call.)
INLINE vec load_some(const float* from, int64_t n) {
    if (n >= W) return load(from);
    vec out = {};
    std::memcpy(&out, from, n * 4);
    return out;
}

INLINE void store_some(float* to, vec v, int64_t n) {  // the first n
    if (n >= W) return store(to, v);
    float lanes[W];
    store(lanes, v);
    std::copy(lanes, lanes + n, to);
}

// use(first, how many) for every vector of `count` numbers.
template <class Use>
INLINE void for_columns(int64_t count, Use use) {
    int64_t at = 0;
    for (; at + W <= count; at += W) use(at, W);
    if (at < count) use(at, count - at);
}

// 16-bit numbers, W of them that lie one after the other.
INLINE vec load_half(const uint16_t* from) {
#if ISA == 512
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif ISA == 256
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    vec out;  // exponent and mantissa moved to their places in fp32; the bias of the exponent is a factor
    for (int i = 0; i < W; ++i) {
        const uint32_t h = from[i], moved = (h & 0x7fffu) << 13;
        float x;
        std::memcpy(&x, &moved, 4);
        x *= 0x1p112f;
        out[i] = h & 0x8000u ? -x : x;
    }
    return out;
#endif
}

// Numbers from -128 to 127 as bytes. (GCC 12 converts lane by lane.)
INLINE ints load_bytes(const char* from) {
#if ISA == 512
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif ISA == 256
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    typedef int8_t bytes __attribute__((vector_size(W)));
    typedef int16_t shorts __attribute__((vector_size(W * 2)));
    bytes own;
    std::memcpy(&own, from, sizeof own);
    return __builtin_convertvector(__builtin_convertvector(own, shorts), ints);
#endif
}
INLINE bits load_halves(const char* from) {  // whole numbers of 16 bits
#if ISA == 512
    return (bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif ISA == 256
    return (bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    typedef uint16_t halves __attribute__((vector_size(W * 2)));
    halves own;
    std::memcpy(&own, from, sizeof own);
    return __builtin_convertvector(own, bits);
#endif
}
INLINE void store_bytes(void* to, ints v) {
#if ISA == 512
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v));
#elif ISA == 256
    const __m256i own = (__m256i)v;
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(own), _mm256_extracti128_si256(own, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(pairs, pairs));
#else
    typedef int8_t bytes __attribute__((vector_size(W)));
    const bytes narrow = __builtin_convertvector(v, bytes);
    std::memcpy(to, &narrow, W);
#endif
}

// The first n of W numbers from -32768 to 32767, in 16 bits.
INLINE void store_shorts(int16_t* to, ints own, int64_t n = W) {
    alignas(32) int16_t narrow[W];
    int16_t* const out = n >= W ? to : narrow;
#if ISA == 512
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16((__m512i)own));
#elif ISA == 256
    const __m128i low = _mm256_castsi256_si128((__m256i)own), high = _mm256_extracti128_si256((__m256i)own, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi32(low, high));
#else
    for (int lane = 0; lane < W; ++lane) out[lane] = static_cast<int16_t>(own[lane]);
#endif
    if (n < W) std::memcpy(to, narrow, n * sizeof *to);
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, ints{__VA_ARGS__})
#endif

// Of two vectors, in blocks: the lower (part 0) or upper (part 1) halves of blocks of 2 * half lanes, a's before b's.
constexpr int from_lane(int lane, int half, int part) {
    const int block = lane / (2 * half) * 2 * half, place = lane % (2 * half);
    return place < half ? block + part * half + place : W + block + part * half + place - half;
}
template <int half, int part, int... lane>
INLINE vec halves(vec a, vec b, std::integer_sequence<int, lane...>) {
    return PICK(a, b, from_lane(lane, half, part)...);
}
template <int half>
INLINE void add_pairs(vec* sums) {  // `half` pairs: W lanes of two sums become W / 2 lanes of each
    using Lanes = std::make_integer_sequence<int, W>;
    UNROLL for (int i = 0; i < half; ++i)
        sums[i] = halves<half, 0>(sums[i], sums[i + half], Lanes{}) + halves<half, 1>(sums[i], sums[i + half], Lanes{});
    if constexpr (half > 1) add_pairs<half / 2>(sums);
}
// Lane i of the result is the sum of all lanes of sums[i], W of them, which are overwritten.
INLINE vec add_up(vec* sums) {
    add_pairs<W / 2>(sums);
    return sums[0];
}
// Lane j of vector i becomes lane i of vector j; half: W / 2.
template <int half>
INLINE void transpose(vec (&lines)[W]) {
    using Lanes = std::make_integer_sequence<int, W>;
    UNROLL for (int i = 0; i < W; ++i)
        if (!(i & half)) {
            const vec a = lines[i], b = lines[i + half];
            lines[i] = halves<half, 0>(a, b, Lanes{}), lines[i + half] = halves<half, 1>(a, b, Lanes{});
        }
    if constexpr (half > 1) transpose<half / 2>(lines);
}
// All lanes as one: of(lane i, lane i + half) in halves of halves. (GCC 12 would take lanes one by one.)
template <int half = W / 2, class Vector, class Of>
INLINE auto reduce(Vector v, Of of) {
    if constexpr (half == 0) return v[0];
    else {
        const vec upper = halves<half, 1>((vec)v, (vec)v, std::make_integer_sequence<int, W>{});
        return reduce<half / 2>(of(v, (Vector)upper), of);
    }
}
INLINE float sum_of(vec v) { return reduce(v, [](vec a, vec b) { return a + b; }); }
INLINE int32_t sum_of(ints v) { return reduce(v, [](ints a, ints b) { return a + b; }); }
INLINE float max_of(vec v) { return reduce(v, [](vec a, vec b) { return b > a ? b : a; }); }
INLINE int32_t max_of(ints v) { return reduce(v, [](ints a, ints b) { return b > a ? b : a; }); }

// Bit i tells whether lane i of a comparison holds.
INLINE uint32_t lanes_of(ints found) {
#if ISA == 512
    return _mm512_movepi32_mask((__m512i)found);
#elif ISA == 256
    return _mm256_movemask_ps((__m256)found);
#else
    uint32_t lanes = 0;
    for (int i = 0; i < W; ++i) lanes |= (static_cast<uint32_t>(found[i]) & 1) << i;
    return lanes;
#endif
}

// (e^r - 1 - r) / r^2 of |r| <= ln(2) / 2.
INLINE vec curve_of_rest(vec r) {
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    return p * r + 5.0000001201e-1f;
}

// e^r of what is left when whole powers of two are gone: |r| <= ln(2) / 2.
INLINE vec exponential_of_rest(vec r) { return curve_of_rest(r) * (r * r) + r + 1.0f; }

// e^x within two units of the last place; 0 far below, infinity far above, NaN of NaN.
INLINE vec exponential(vec x) {
    const vec low = all(-87.5f), high = all(88.8f);
    const vec clamped = x < low ? low : (x > high ? high : x);
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded number in the last bits
    const vec shifted = clamped * 1.44269504088896341f + magic;
    const vec n = shifted - magic;
    const vec p = exponential_of_rest((clamped - n * 0.693359375f) + n * 2.12194440e-4f);
    // 2^n in two factors: n reaches 128, which no exponent holds
    const ints whole = (ints)shifted - (ints)magic, part = whole >> 1;
    const vec once = (vec)((part + 127) << 23), twice = (vec)((whole - part + 127) << 23);
    const vec out = p * once * twice;
    return x < low ? vec{} : out;
}

// log(1 + e^x) within three units of the last place: 2 atanh(y / (2 + y)) is log(1 + y), and y = e^-|x| at most 1.
INLINE vec softplus(vec x) {
    const vec y = exponential(x < vec{} ? x : -x), z = y / (2.0f + y), square = z * z;
    vec p = all(1.0f / 13);
    for (int i = 11; i >= 1; i -= 2) p = p * square + 1.0f / static_cast<float>(i);
    return 2.0f * z * p + (x < vec{} ? vec{} : x);
}

// tanh x within four units of the last place (the polynomial is Cephes'); NaN of NaN.
INLINE vec hyperbolic_tangent(vec x) {
    const vec square = x * x, size = x < vec{} ? -x : x;
    vec p = all(-5.70498872745e-3f);
    p = p * square + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const vec near = p * square * x + x, far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    return size < all(0.625f) ? near : (x < vec{} ? -far : far);
}

// xIELU (arXiv 2411.13010) by positive, negative, beta, eps: positive x^2 + beta x above 0, else
// negative (e^min(x, eps) - 1 - x) + beta x, where e^y - 1 - y keeps its digits near 0.
INLINE vec xielu(vec x, const float* of) {
    const vec eps = all(of[3]), y = x < eps ? x : eps;
    const vec curve = y < all(-0.34f) ? exponential(y) - 1.0f - y : curve_of_rest(y) * (y * y);
    return (x > vec{} ? of[0] * x * x : of[1] * (curve + (y - x))) + of[2] * x;
}

// The activation of a gated MLP: silu(gate) * up. With numbers (SwiGLUClamp in ../../../config/model.py) it is
// (up + offset) * gate * sigmoid(alpha * gate), where both are clamped. GELU is gelu(gate) * up by the tanh formula, since
// (1 + tanh(z)) / 2 is sigmoid(2 z). RELU2 takes up for both: relu(up)^2; so do XIELU and UNGATED_GELU.
struct Gated {
    int64_t kind = SILU;
    const float* numbers = nullptr;  // [4], of XIELU or of a clamped SILU
    int64_t scales_inputs = 0;       // by the share of a token, not what it gives
    INLINE vec operator()(vec gate, vec up, vec share) const {
        return scales_inputs ? (*this)(gate * share, up * share) : (*this)(gate, up) * share;
    }
    INLINE vec operator()(vec gate, vec up) const {
        if (kind == RELU2) return (gate > vec{} ? gate : vec{}) * up;
        if (kind == XIELU) return xielu(gate, numbers);
        if (kind == GELU || kind == UNGATED_GELU) {
            const vec z = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
            const vec active = gate / (1.0f + exponential(-z));
            return kind == GELU ? active * up : active;
        }
        if (!numbers) return gate / (1.0f + exponential(-gate)) * up;
        const vec most_gate = all(numbers[0]), most = all(numbers[1]), least = -most;
        gate = gate > most_gate ? most_gate : gate;
        up = up > most ? most : (up < least ? least : up);
        return gate / (1.0f + exponential(-gate * numbers[2])) * (up + numbers[3]);
    }
};

// The same of x up to 0; far below it, a number that is negligible next to 1.
INLINE vec falling(vec x) {
    const vec low = all(-87.0f), clamped = x < low ? low : x, magic = all(12582912.0f);
    const vec shifted = clamped * 1.44269504088896341f + magic, n = shifted - magic;
    const vec p = exponential_of_rest((clamped - n * 0.693359375f) + n * 2.12194440e-4f);
    return p * (vec)((ints)(((bits)shifted - (bits)magic) << 23) + (127 << 23));
}

// -- sums of products of bytes: lane by lane, four unsigned bytes of a weight times four signed bytes of a token. The
// variants differ in instructions, never in the result, which is an integer.
//
// For each of PASSES: add<T, V>(sums, weights, x) with V vectors `pass(b, i)` of weights and of T tokens a word of 32
// bits, `x` [T]. If sums are NARROW, they hold 32 products of a nibble each, and `widen` ends them.

// One instruction for all. Written out, so that a library that is compiled for processors without it can hold it.
#if ISA == 512 || (ISA == 256 && (defined(__clang__) || __GNUC__ >= 11))
#define HAS_DOT_BYTES 1
#if ISA == 512
#define DOT(name, sum, a, b) asm(name " %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
#define DOT(name, sum, a, b) asm("%{vex%} " name " %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b))
#endif
struct DotBytes {
    static constexpr int PASSES = 1;
    static constexpr bool NARROW = false;
    static INLINE bits pass(bits four, int) { return four; }
    template <int T, int V>
    static INLINE void add(ints (&sums)[T][V], const bits (&weights)[V], const int32_t* x) {
        UNROLL for (int t = 0; t < T; ++t) {
            const bits token = all_bits(x[t]);
            UNROLL for (int i = 0; i < V; ++i) DOT("vpdpbusd", sums[t][i], weights[i], token);
        }
    }
    static bool is_here() {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (ISA == 512) return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    }
};
#endif

typedef int16_t shorts __attribute__((vector_size(W * 4)));

// Sums of two products each, in 32 bits.
INLINE ints pairs(bits weight, shorts token) {
#if ISA == 512
    return (ints)_mm512_madd_epi16((__m512i)weight, (__m512i)token);
#elif ISA == 256
    return (ints)_mm256_madd_epi16((__m256i)weight, (__m256i)token);
#elif defined(__SSE2__)
    return (ints)_mm_madd_epi16((__m128i)weight, (__m128i)token);
#else
    const ints low = ((ints)token << 16) >> 16, high = (ints)token >> 16;
    return (ints)(weight & 0xffffu) * low + (ints)(weight >> 16) * high;
#endif
}

// Bytes in even places, then those in odd ones, in 16 bits: those of weights are split here, those of tokens where they
// are packed. (Pairs of products of bytes, AVX2's own way, would overflow.)
struct DotPairs {
    static constexpr int PASSES = 2;
    static constexpr bool NARROW = false;
    static INLINE bits pass(bits four, int odd) {
        typedef uint16_t halves __attribute__((vector_size(W * 4)));
        if (odd) return (bits)((halves)four >> 8);
#if ISA  // by shifts: a mask would take the register that is left
        asm("vpsllw $8, %0, %0\n\tvpsrlw $8, %0, %0" : "+v"(four));
        return four;
#else
        return four & 0x00ff00ffu;
#endif
    }
    template <int T, int V>
    static INLINE void add(ints (&sums)[T][V], const bits (&weights)[V], const int32_t* x) {
        UNROLL for (int t = 0; t < T; ++t) {
            const shorts token = (shorts)all_bits(x[t]);
            UNROLL for (int i = 0; i < V; ++i) {
#if ISA  // written out: a compiler that moves products away from their sums runs out of registers
                bits both;
                asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
                    : "+v"(sums[t][i]), "=&v"(both) : "v"(weights[i]), "v"(token));
#else
                sums[t][i] += pairs(weights[i], token);
#endif
            }
        }
    }
    static void split(int32_t four, int32_t& even, int32_t& odd) {
        const auto both = [](int low, int high) {
            return static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffffu) | static_cast<uint32_t>(high) << 16);
        };
        const auto byte = [&](int i) { return static_cast<int>(static_cast<int8_t>(four >> (8 * i))); };
        even = both(byte(0), byte(2));
        odd = both(byte(1), byte(3));
    }
};

// -- sums of products of int16, of which a lane has two of a weight and two of a token

struct ShortsInTwo : DotPairs {
    static constexpr int PASSES = 1;
    static INLINE bits pass(bits both, int) { return both; }
};
#if HAS_DOT_BYTES
struct ShortsAtOnce : ShortsInTwo {
    template <int T, int V>
    static INLINE void add(ints (&sums)[T][V], const bits (&weights)[V], const int32_t* x) {
        UNROLL for (int t = 0; t < T; ++t) {
            const bits token = all_bits(x[t]);
            UNROLL for (int i = 0; i < V; ++i) DOT("vpdpwssd", sums[t][i], weights[i], token);
        }
    }
};
#endif

// Nibbles of weights: pairs of products and the sum of 16 of them fit 16 bits (15 * 127 * 16 = 30,480).
#if ISA
struct DotNibbles {
    static constexpr int PASSES = 1;
    static constexpr bool NARROW = true;
    static INLINE bits pass(bits four, int) { return four; }
    template <int T, int V>
    static INLINE void add(shorts (&sums)[T][V], const bits (&weights)[V], const int32_t* x) {
        UNROLL for (int t = 0; t < T; ++t) {
            const bits token = all_bits(x[t]);
            UNROLL for (int i = 0; i < V; ++i) {
                bits both;
                asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
                    : "+v"(sums[t][i]), "=&v"(both) : "v"(weights[i]), "v"(token));
            }
        }
    }
    static INLINE ints widen(shorts sum) { return pairs((bits)sum, shorts{} + 1); }
};
#endif

}  // namespace looped
