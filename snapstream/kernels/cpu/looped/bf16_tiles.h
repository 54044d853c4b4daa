// Tiles of tokens in bf16, and the rounding of numbers to bf16.
//
// Invariant: the sum of an output is taken over columns from first to last, in one chain, of quantized columns group by
// group: products are batch-invariant.
#pragma once
#include "products.h"

#if ISA == 512 && (defined(__clang__) || __GNUC__ >= 10)
#define HAS_BF16 1
#endif

namespace looped {

#if HAS_BF16

// Instructions are written out, so that a library that is compiled for processors without them can hold them. They
// round to the nearest number of bf16, ties to the even one; what is smaller than any normal number becomes zero.

typedef uint32_t half_bits __attribute__((vector_size(W * 2)));

// As numbers of bf16, two to 32 bits, the first in the lower half.
INLINE half_bits narrow(vec x) {
    half_bits out;
    asm("vcvtneps2bf16 %1, %0" : "=v"(out) : "v"(x));
    return out;
}

INLINE bits narrow(vec low, vec high) {  // 2 W numbers
    bits out;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(out) : "v"(low), "v"(high));
    return out;
}

INLINE void add_pairs(vec& sum, bits weight, bits token) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(token));
}

// Up to W numbers of a row of which `left` are still there, zeros after them.
INLINE vec load_left(const float* from, int64_t left) {
    return left >= W ? load(from) : load_some(from, std::max<int64_t>(left, 0));
}

// x [cols], zeros up to `padded` of them, as pairs: one every `stride`.
inline void pack_row(const float* x, int64_t cols, int64_t padded, uint32_t* to, int64_t stride) {
    for (int64_t col = 0; col < padded; col += W) {
        const half_bits own = narrow(load_left(x + col, cols - col));
        uint32_t pairs[W / 2];
        std::memcpy(pairs, &own, sizeof own);
        for (int64_t i = 0; i < std::min<int64_t>(W, padded - col) / 2; ++i) to[(col / 2 + i) * stride] = pairs[i];
    }
}

enum Sums {
    NEW,  // sums are written
    ON,   // added to
};

// `cols` columns of P panels times T tokens: sums [P][T][32]. The tokens' pairs lie as [cols / 2][T], or with a
// STRIDE as [T][STRIDE].
template <int T, Sums HOW, int STRIDE, int P = 1>
void pair_tile(const char* weight, const uint32_t* x, int64_t cols, float* sums, Prefetch fetch) {
    constexpr int VECTORS = P * VECS;  // vector i is i % VECS of panel i / VECS
    const auto sum = [&](int t, int i) { return sums + (i / VECS * T + t) * PANEL + i % VECS * W; };
    vec acc[T][VECTORS];
    UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int i = 0; i < VECTORS; ++i) acc[t][i] = HOW == ON ? load(sum(t, i)) : vec{};
    for (int64_t unit = 0; unit < cols / 2; ++unit) {
        bits own[VECTORS];
        UNROLL for (int i = 0; i < VECTORS; ++i) own[i] = load_bits(weight + i / VECS * fetch.apart + i % VECS * W * 4);
        UNROLL for (int t = 0; t < T; ++t) {
            const bits token = all_bits(x[STRIDE ? t * STRIDE : t]);
            UNROLL for (int i = 0; i < VECTORS; ++i) add_pairs(acc[t][i], own[i], token);
        }
        UNROLL for (int p = 0; p < P; ++p) {
            __builtin_prefetch(fetch.from + p * fetch.apart);
            if constexpr (!STRIDE) __builtin_prefetch(fetch.from + p * fetch.apart + 64);
        }
        fetch.from += fetch.step;
        weight += PairsBF16::BYTES;
        x += STRIDE ? 1 : T;
    }
    UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int i = 0; i < VECTORS; ++i) store(sum(t, i), acc[t][i]);
}

using PairTile = void (*)(const char*, const uint32_t*, int64_t, float*, Prefetch);

template <Sums HOW, int STRIDE = 0, int... T>
INLINE PairTile pair_tile_of(int64_t tokens, std::integer_sequence<int, T...>) {
    static constexpr PairTile tiles[] = {pair_tile<T + 1, HOW, STRIDE>...};
    return tiles[tokens - 1];
}

// Columns of codes as pairs [cols / 2][32], and the scales [groups][32] that their numbers lack.
struct CodePairs {
    const char* pairs;
    const float* scales;
    int64_t group;  // columns that share a scale
};

// The same of codes, added: a group's sum begins at zero and is added, times its scale, to those before. Tokens'
// pairs lie as [cols / 2][stride], of which these are T; there are registers for the sums of a group and for those of
// all groups.
template <int T>
void group_tile(const CodePairs& block, const uint32_t* x, int64_t stride, int64_t cols, float* sums, Prefetch fetch) {
    const char* weight = block.pairs;
    const float* scale = block.scales;
    vec all_groups[T][VECS];
    UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int v = 0; v < VECS; ++v) all_groups[t][v] = load(sums + t * PANEL + v * W);
    for (int64_t left = cols; left > 0; left -= block.group) {
        vec acc[T][VECS] = {};
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
            x += stride;
        }
        UNROLL for (int v = 0; v < VECS; ++v) {
            const vec factor = load(scale + v * W);
            UNROLL for (int t = 0; t < T; ++t) all_groups[t][v] = all_groups[t][v] + acc[t][v] * factor;
        }
        scale += PANEL;
    }
    UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int v = 0; v < VECS; ++v) store(sums + t * PANEL + v * W, all_groups[t][v]);
}

constexpr int MOST_IN_GROUPS = 6;  // tokens of such a tile

// Of any number of tokens.
template <int... T>
INLINE void add_groups(const CodePairs& block, const uint32_t* x, int64_t tokens, int64_t cols, float* sums,
                       Prefetch fetch, std::integer_sequence<int, T...>) {
    using GroupTile = void (*)(const CodePairs&, const uint32_t*, int64_t, int64_t, float*, Prefetch);
    static constexpr GroupTile tiles[] = {group_tile<T + 1>...};
    const int64_t most = sizeof...(T), parts = (tokens + most - 1) / most;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = tokens * part / parts, count = tokens * (part + 1) / parts - first;
        tiles[count - 1](block, x + first, tokens, cols, sums + first * PANEL, part ? Prefetch{block.pairs, 0} : fetch);
    }
}

#endif

}  // namespace looped
