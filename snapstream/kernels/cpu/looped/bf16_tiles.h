// Tiles of tokens in bf16, and the rounding of numbers to bf16.
//
// Invariant: the sum of an output is taken over columns from first to last, in one chain, of codes group by group: a
// token's result is the same bits alone and in any batch.
#pragma once
#include "bf16.h"

#if ISA == 512 && (defined(__clang__) || __GNUC__ >= 10)
#define HAS_BF16 1
#endif

namespace looped {

// To the nearest number of bf16, in the upper halves, ties to the even one; what is no number keeps its upper half, with
// a bit that stays set. The lower halves are rubbish.
INLINE bits round_bf16(bits own) {
    const bits rounded = own + 0x7fffu + ((own >> 16) & 1u), quiet = own | 0x00400000u;
    return (own & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}

// x [cols], zeros up to `padded` of them, as pairs: one every `stride`.
inline void pack_row(const float* x, int64_t cols, int64_t padded, uint32_t* to, int64_t stride) {
    for (int64_t col = 0; col < padded; col += W) {
        const bits all = round_bf16(as_bits(load_some(x + col, std::clamp<int64_t>(cols - col, 0, W))));
        uint32_t numbers[W];
        std::memcpy(numbers, &all, sizeof all);
        for (int64_t i = 0; i < std::min<int64_t>(W, padded - col); i += 2)
            to[(col + i) / 2 * stride] = numbers[i] >> 16 | (numbers[i + 1] & 0xffff0000u);
    }
}

#if HAS_BF16

// Written out, so that a library that is compiled for processors without it can hold it.
INLINE void add_pairs(vec& sum, bits weight, bits token) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(token));
}

// Columns of a panel as pairs: [cols / 2][32], and of codes the scales [groups][32] that their numbers lack.
struct Pairs {
    const char* pairs;
    const float* scales;  // null: none
    int64_t group;        // columns that share a scale, or all
};

enum Sums {
    NEW,     // sums are written
    ON,      // added to
    GROUPS,  // added to, of codes each group summed for itself
};

// `cols` columns of a panel times T tokens: sums [T][32].
template <int T, Sums HOW>
void pair_tile(const Pairs& block, const uint32_t* x, int64_t cols, float* sums, Prefetch fetch) {
    const char* weight = block.pairs;
    const float* scale = block.scales;
    const auto sum = [&](int t, int v) { return sums + t * PANEL + v * W; };
    for (int64_t left = cols; left > 0; left -= block.group) {
        vec acc[T][VECS];
        UNROLL for (int t = 0; t < T; ++t)
            UNROLL for (int v = 0; v < VECS; ++v) acc[t][v] = HOW == ON ? load(sum(t, v)) : vec{};
        for (int64_t unit = 0; unit < block.group / 2; ++unit) {
            bits own[VECS];
            UNROLL for (int v = 0; v < VECS; ++v) own[v] = load_bits(weight + v * W * 4);
            UNROLL for (int t = 0; t < T; ++t) {
                const bits token = all_bits(x[t]);
                UNROLL for (int v = 0; v < VECS; ++v) add_pairs(acc[t][v], own[v], token);
            }
            __builtin_prefetch(fetch.from);
            fetch.from += fetch.step;
            weight += PairsBF16::BYTES;
            x += T;
        }
        UNROLL for (int v = 0; v < VECS; ++v) {
            if constexpr (HOW == GROUPS) {
                const vec factor = load(scale + v * W);
                UNROLL for (int t = 0; t < T; ++t) acc[t][v] = load(sum(t, v)) + acc[t][v] * factor;
            }
            UNROLL for (int t = 0; t < T; ++t) store(sum(t, v), acc[t][v]);
        }
        scale += HOW == GROUPS ? PANEL : 0;
    }
}

using PairTile = void (*)(const Pairs&, const uint32_t*, int64_t, float*, Prefetch);

template <Sums HOW, int... T>
INLINE PairTile pair_tile_of(int64_t tokens, std::integer_sequence<int, T...>) {
    static constexpr PairTile tiles[] = {pair_tile<T + 1, HOW>...};
    return tiles[tokens - 1];
}

#endif

}  // namespace looped
