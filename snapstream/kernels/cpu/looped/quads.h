// Sums of four products each: lane by lane, four unsigned bytes of a weight times the four codes of a token. The ways to
// do it differ in instructions, never in the result, which is a whole number.
//
// add(sum, weight(b), token(q)): `b` a vector of weights, `q` the codes of a token, four to 32 bits.
#pragma once
#include "simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace looped {

// One instruction for all. Written out, so that a library that is compiled for processors without it can hold it.
#if ISA == 512 || (ISA == 256 && (defined(__clang__) || __GNUC__ >= 11))
#define HAS_DOT_BYTES 1
struct DotBytes {
    typedef bits Weight;
    typedef bits Token;
    static INLINE Weight weight(bits b) { return b; }
    static INLINE Token token(int32_t q) { return all_bits(q); }
    static INLINE void add(ints& sum, Weight weight, Token token) {
#if ISA == 512
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(token));
#else
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weight), "x"(token));
#endif
    }
    static bool is_here() {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (ISA == 512) return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    }
};
#endif

// Bytes in even and in odd places, widened to 16 bits. (Pairs of products in 16 bits, AVX2's own way, would overflow.)
struct DotPairs {
    typedef int16_t shorts __attribute__((vector_size(W * 4)));
    struct Weight {
        bits even, odd;
    };
    struct Token {
        shorts even, odd;
    };
    static INLINE Weight weight(bits b) { return {b & 0x00ff00ffu, (b >> 8) & 0x00ff00ffu}; }
    static INLINE Token token(int32_t q) {
        const shorts both = (shorts)all_bits(q);
        return {(both << 8) >> 8, both >> 8};
    }
    static INLINE void add(ints& sum, Weight weight, Token token) {
        sum += pairs(weight.even, token.even) + pairs(weight.odd, token.odd);
    }

  private:
    static INLINE ints pairs(bits weight, shorts token) {
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
};

}  // namespace looped
