// Tiles of attention in fp32: some rows of keys or values, as they lie in memory, times queries that lie side by side in
// lanes. And powers of two as exact as fp32.
//
// Invariant: a lane's sum is taken from the first step to the last, in one chain, whatever the other lanes and rows are.
#pragma once
#include <algorithm>

#include "simd.h"

namespace looped {

#if ISA == 512 || defined(__aarch64__)
constexpr int WIDEST = 4;  // vectors of queries of a tile, by the number of registers
#else
constexpr int WIDEST = 2;
#endif
constexpr int MOST_LANES = WIDEST * W;

// Rows of a tile so many vectors wide: as many as there are registers for their sums, and pointers.
constexpr int tallest(int vecs) { return vecs == WIDEST ? 6 : vecs == 1 ? 12 : 8; }

// a b + c, in one instruction where there is one: left to the compiler, a sum would depend on the tile it is in.
INLINE vec fused(vec a, vec b, vec c) {
#if ISA == 512
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif ISA == 256
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    vec out;
    UNROLL for (int i = 0; i < W; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
#else
    return a * b + c;
#endif
}

INLINE vec larger(vec a, vec b) {  // b where one is no number
#if ISA == 512
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif ISA == 256
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x of x up to 0, with a relative error below 1e-7: 1 of 0, 0 where that is no normal number, NaN of NaN.
INLINE vec power_of_two(vec x) {
    const auto of_fraction = [](vec f) {  // 2^f for 0 <= f <= 1
        vec p = all(2.17022549e-4f);
        p = fused(p, f, all(1.24396873e-3f));
        p = fused(p, f, all(9.67884064e-3f));
        p = fused(p, f, all(5.54833412e-2f));
        p = fused(p, f, all(0.24022983f));
        p = fused(p, f, all(0.693147004f));
        return fused(p, f, all(1.0f));
    };
#if ISA == 512
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const vec p = of_fraction((vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    return (vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);  // times 2 to the whole number below x
#else
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded number in the last bits
    const vec shifted = (x - 0.5f) + magic;
    const ints whole = (ints)shifted - (ints)magic;
    const vec out = of_fraction(x - (shifted - magic)) * (vec)((whole + 127) << 23);
    return x < all(-125.0f) ? vec{} : out;
#endif
}

// Step d of row i of a tile is from[i * stride + d] of KEYS, from[d * stride + i] of VALUES.
enum Side { KEYS, VALUES };

// sums [R][V W]: R rows times lanes [depth][V W]. Of KEYS they are written, of VALUES added to what is there times
// `factor` [V W].
template <Side SIDE, int R, int V>
void lane_tile(const float* from, int64_t stride, const float* lanes, int64_t depth, const float* factor, float* sums) {
    vec acc[R][V];
    UNROLL for (int v = 0; v < V; ++v) {
        if constexpr (SIDE == VALUES) {
            const vec own = load(factor + v * W);
            UNROLL for (int i = 0; i < R; ++i) acc[i][v] = load(sums + (i * V + v) * W) * own;
        } else {
            UNROLL for (int i = 0; i < R; ++i) acc[i][v] = vec{};
        }
    }
    for (int64_t d = 0; d < depth; ++d) {
        vec own[V];
        UNROLL for (int v = 0; v < V; ++v) own[v] = load(lanes + v * W);
        UNROLL for (int i = 0; i < R; ++i) {
            const vec number = all(SIDE == KEYS ? from[i * stride + d] : from[i]);
            UNROLL for (int v = 0; v < V; ++v) acc[i][v] = fused(own[v], number, acc[i][v]);
        }
        lanes += V * W;
        if constexpr (SIDE == VALUES) from += stride;
    }
    UNROLL for (int i = 0; i < R; ++i)
        UNROLL for (int v = 0; v < V; ++v) store(sums + (i * V + v) * W, acc[i][v]);
}

using LaneTile = void (*)(const float*, int64_t, const float*, int64_t, const float*, float*);

template <Side SIDE, int V, int... R>
INLINE LaneTile lane_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr LaneTile tiles[] = {lane_tile<SIDE, R + 1, V>...};
    return tiles[rows - 1];
}

// Rows of keys or values, `stride` numbers from one to the next.
struct Rows32 {
    const float* from;
    int64_t stride, count, size;
};

// Tiles of all rows one after the other: of VALUES a row is one of their numbers, and `depth` is the count. Meanwhile
// `next` are asked for, so that memory never waits for arithmetic.
template <Side SIDE, int V>
void lane_product(const Rows32& own, const Rows32& next, const float* lanes, const float* factor, float* sums) {
    constexpr int MOST_ROWS = tallest(V);
    const int64_t rows = SIDE == KEYS ? own.count : own.size, depth = SIDE == KEYS ? own.size : own.count;
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        const int64_t count = std::min<int64_t>(MOST_ROWS, rows - first);
        for (int64_t ahead = next.count * first / rows; ahead < next.count * (first + count) / rows; ++ahead)
            for (int64_t i = 0; i < next.size; i += 16) __builtin_prefetch(next.from + ahead * next.stride + i);
        const LaneTile tile = lane_tile_of<SIDE, V>(count, std::make_integer_sequence<int, MOST_ROWS>{});
        tile(own.from + first * (SIDE == KEYS ? own.stride : 1), own.stride, lanes, depth, factor, sums + first * V * W);
    }
}

}  // namespace looped
