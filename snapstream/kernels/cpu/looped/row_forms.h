// How numbers lie in rows: fp32, bf16, FP8 with a scale per row and kv head, or int8 with one per slot and kv head.
#pragma once
#include <limits>

#include "abi.h"
#include "simd.h"

namespace looped {

// FP8 is e4m3fn, whose meaning is ../../fp8.py. As fp16 its bits lie 7 higher and count 2^-8.
inline float widen_fp8(uint8_t byte) {
    const uint32_t moved = static_cast<uint32_t>(byte & 127) << 20;
    if ((byte & 127) < 8) return (byte & 128 ? -1.0f : 1.0f) * static_cast<float>(byte & 7) * 0x1p-9f;
    float x;
    const uint32_t up = moved + (120u << 23);
    std::memcpy(&x, &up, 4);
    return byte & 128 ? -x : x;
}
// W numbers, each a part of FP8_UNIT of what it stands for: that factor is left to the scales.
constexpr float FP8_UNIT = 256.0f;
INLINE vec load_fp8(const uint8_t* from) {
    // Sign-extended and moved up, the sign stands in the upper two bits of fp16, of which it needs the first.
#if ISA == 512
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
#elif ISA == 256
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return (vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
#else
    vec out;
    for (int i = 0; i < W; ++i) out[i] = widen_fp8(from[i]) / FP8_UNIT;
    return out;
#endif
}
inline void widen_fp8(const uint8_t* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load_fp8(from + i) * FP8_UNIT);
    for (; i < count; ++i) to[i] = widen_fp8(from[i]);
}
// Rounds to nearest even and saturates.
inline uint8_t narrow_fp8(float x, float scale) {
    x /= scale;
    x = x < -448.0f ? -448.0f : (x > 448.0f ? 448.0f : x);
    uint32_t number;
    std::memcpy(&number, &x, 4);
    const uint32_t sign = (number >> 24) & 128u;
    number &= 0x7fffffffu;
    if (number > 0x7f800000u) return sign | 127u;  // NaN
    if (number < (121u << 23)) return sign | static_cast<uint32_t>(std::lrintf(std::fabs(x) * 512.0f));  // below 2^-6
    number += 0x7ffffu + ((number >> 20) & 1u);
    return sign | ((number >> 20) - (120u << 3));
}

// bf16: the upper half of fp32, rounded to nearest even.
INLINE vec load_bf16(const uint16_t* from) {
    typedef uint16_t halves __attribute__((vector_size(W * 2)));
    halves own;
    std::memcpy(&own, from, sizeof own);
    return as_floats(__builtin_convertvector(own, bits) << 16);
}
inline void widen_bf16(const uint16_t* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load_bf16(from + i));
    for (; i < count; ++i) {
        const uint32_t number = static_cast<uint32_t>(from[i]) << 16;
        std::memcpy(to + i, &number, 4);
    }
}
inline uint16_t narrow_bf16(float x) {
    uint32_t number;
    std::memcpy(&number, &x, 4);
    if ((number & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN
    return (number + 0x7fffu + (number >> 16 & 1u)) >> 16;
}

// int8, whose meaning is ../../int8.py: a slot's largest magnitude is 127.
inline vec load_int8(const int8_t* from) {
    // Of a conversion to numbers of four times the size GCC 12 makes one for each lane, so bytes are widened by hand.
#if ISA == 512
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif ISA == 256
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    typedef int8_t bytes __attribute__((vector_size(W)));
    typedef int16_t shorts __attribute__((vector_size(W * 2)));
    bytes own;
    std::memcpy(&own, from, sizeof own);
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(own, shorts), ints), vec);
#endif
}
inline float narrow_int8(const float* from, int64_t count, int8_t* to) {  // the scale
    float most = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float own = std::fabs(from[i]);
        if (own > most || own != own) most = own;
        if (most != most) break;
    }
    float scale = most / 127.0f;
    if (scale < std::numeric_limits<float>::min()) scale = 0.0f;
    const float divisor = scale == 0.0f ? 1.0f : scale;
    const bool is_finite = std::isfinite(scale);
    for (int64_t i = 0; i < count; ++i) to[i] = is_finite ? static_cast<int8_t>(std::lrintf(from[i] / divisor)) : 0;
    return scale;
}

// How attention reads W numbers of a row, without their scales: BYTES of a number; at(address).
struct RowF32 {
    static constexpr int64_t BYTES = 4;
    static INLINE vec at(const char* from) { return load(reinterpret_cast<const float*>(from)); }
};
struct RowBF16 {
    static constexpr int64_t BYTES = 2;
    static INLINE vec at(const char* from) { return load_bf16(reinterpret_cast<const uint16_t*>(from)); }
};
struct RowFP8 {
    static constexpr int64_t BYTES = 1;
    static INLINE vec at(const char* from) { return load_fp8(reinterpret_cast<const uint8_t*>(from)); }
};
struct RowI8 {
    static constexpr int64_t BYTES = 1;
    static INLINE vec at(const char* from) { return load_int8(reinterpret_cast<const int8_t*>(from)); }
};
// The first `count` of W numbers, zeros after them.
template <class Form>
INLINE vec some_at(const char* from, int64_t count) {
    char own[W * Form::BYTES] = {};
    std::memcpy(own, from, count * Form::BYTES);
    return Form::at(own);
}

struct RowForm {
    int64_t format, bytes;
    explicit RowForm(int64_t format) : format(format), bytes(format == F32 ? 4 : format == BF16 ? 2 : 1) {}
    float unit() const { return format == FP8 ? FP8_UNIT : 1.0f; }  // of what attention reads
    // Of any form but int8, without the scales of FP8.
    const float* widened(const char* from, int64_t count, float* buffer) const {
        if (format == F32) return reinterpret_cast<const float*>(from);
        if (format == BF16) widen_bf16(reinterpret_cast<const uint16_t*>(from), count, buffer);
        else widen_fp8(reinterpret_cast<const uint8_t*>(from), count, buffer);
        return buffer;
    }
    void narrow(const float* from, int64_t count, float scale, char* to) const {
        if (format == F32) std::memcpy(to, from, count * 4);
        else if (format == BF16)
            for (int64_t i = 0; i < count; ++i) reinterpret_cast<uint16_t*>(to)[i] = narrow_bf16(from[i]);
        else
            for (int64_t i = 0; i < count; ++i) reinterpret_cast<uint8_t*>(to)[i] = narrow_fp8(from[i], scale);
    }
};

struct StoredHead {  // keys and values of one kv head of a row, and of int8 the scales of its slots
    RowForm form;
    int64_t head_dim;
    char *keys, *values;
    float *key_scales, *value_scales;

    // One token to a slot; scale: of FP8.
    void put(const float* token, int64_t slot, float scale, char* to, float* scales) const {
        to += slot * head_dim * form.bytes;
        if (form.format == I8) scales[slot] = narrow_int8(token, head_dim, reinterpret_cast<int8_t*>(to));
        else form.narrow(token, head_dim, scale, to);
    }
};

}  // namespace looped
