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
inline void widen_fp8(const uint8_t* from, int64_t count, float* to) {
    int64_t i = 0;
#if ISA == 512
    for (; i + W <= count; i += W) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(128)), 8);
        const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(127)), 7);
        store(to + i, (vec)_mm512_cvtph_ps(_mm256_or_si256(sign, rest)) * 256.0f);
    }
#elif ISA == 256
    for (; i + W <= count; i += W) {
        const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i)));
        const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(128)), 8);
        const __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(127)), 7);
        store(to + i, (vec)_mm256_cvtph_ps(_mm_or_si128(sign, rest)) * 256.0f);
    }
#endif
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
inline void widen_bf16(const uint16_t* from, int64_t count, float* to) {
    typedef uint16_t halves __attribute__((vector_size(W * 2)));
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        halves own;
        std::memcpy(&own, from + i, sizeof own);
        store(to + i, as_floats(__builtin_convertvector(own, bits) << 16));
    }
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
inline void widen_int8(const int8_t* from, int64_t count, float scale, float* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load_int8(from + i) * scale);
    for (; i < count; ++i) to[i] = static_cast<float>(from[i]) * scale;
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

struct RowForm {
    int64_t format, bytes;
    explicit RowForm(int64_t format) : format(format), bytes(format == F32 ? 4 : format == BF16 ? 2 : 1) {}
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

    // Of n slots from `first` on, in fp32.
    const float* widened(const char* from, const float* scales, int64_t first, int64_t n, float* buffer) const {
        from += first * head_dim * form.bytes;
        if (form.format != I8) return form.widened(from, n * head_dim, buffer);
        const auto* codes = reinterpret_cast<const int8_t*>(from);
        for (int64_t j = 0; j < n; ++j)
            widen_int8(codes + j * head_dim, head_dim, scales[first + j], buffer + j * head_dim);
        return buffer;
    }
    // One token to a slot; scale: of FP8.
    void put(const float* token, int64_t slot, float scale, char* to, float* scales) const {
        to += slot * head_dim * form.bytes;
        if (form.format == I8) scales[slot] = narrow_int8(token, head_dim, reinterpret_cast<int8_t*>(to));
        else form.narrow(token, head_dim, scale, to);
    }
};

}  // namespace looped
