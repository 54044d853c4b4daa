// Vectors of the instruction set that the library is compiled for - ISA is 512 for AVX-512, 256 for AVX2 with FMA and
// F16C, 0 for what every processor of its kind has - and the few operations on them that the compiler's own vectors do
// not have. One library holds one set: code for two in one library would be mixed by the linker.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if ISA
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

// The first n of W numbers, zeros after them.
INLINE vec load_some(const float* from, int64_t n) {
    vec out = {};
    std::memcpy(&out, from, n * 4);
    return out;
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
INLINE float sum_of(vec v) {
    float lanes[W], sum = 0.0f;
    store(lanes, v);
    for (int half = W / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    sum = lanes[0];
    return sum;
}
INLINE float max_of(vec v) {
    float lanes[W];
    store(lanes, v);
    float most = lanes[0];
    for (int i = 1; i < W; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

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

// e^r of what is left when whole powers of two are gone: |r| <= ln(2) / 2.
INLINE vec exponential_of_rest(vec r) {
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r + 1.0f;
}

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

// The same of x up to 0; far below it, a number that is as good as 0 beside 1.
INLINE vec falling(vec x) {
    const vec low = all(-87.0f), clamped = x < low ? low : x, magic = all(12582912.0f);
    const vec shifted = clamped * 1.44269504088896341f + magic, n = shifted - magic;
    const vec p = exponential_of_rest((clamped - n * 0.693359375f) + n * 2.12194440e-4f);
    return p * (vec)((ints)(((bits)shifted - (bits)magic) << 23) + (127 << 23));
}

}  // namespace looped
