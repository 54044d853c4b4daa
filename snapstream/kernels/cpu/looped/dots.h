// Products of vectors in row-major order: q [T, size] times keys [n, size], for what is not stored in panels.
//
// Invariant: a product is summed lane by lane from the first number to the last, then over lanes, whatever T is, so
// it is bitwise equal for any batch.
#pragma once
#include "simd.h"

namespace looped {

inline float dot(const float* x, const float* y, int64_t count) {
    vec sum = {};
    int64_t i = 0;
    for (; i + W <= count; i += W) sum += load(x + i) * load(y + i);
    return sum_of(sum + load_some(x + i, count - i) * load_some(y + i, count - i));
}

inline float mean_of(const float* x, int64_t count) {
    vec sum = {};
    int64_t i = 0;
    for (; i + W <= count; i += W) sum += load(x + i);
    return sum_of(sum + load_some(x + i, count - i)) / static_cast<float>(count);
}

inline float norm_factor(const float* x, int64_t count, float eps) {
    return 1.0f / std::sqrt(dot(x, x, count) / static_cast<float>(count) + eps);
}

constexpr int MOST_DOTS = W == 8 ? 2 : 4;  // queries for which there are registers
constexpr int KEYS_AT_ONCE = 4;            // a divisor of W

// out [T][out_stride]: n products each, and room for those up to a multiple of W.
template <int T>
void dots_of(const float* q, int64_t q_stride, const float* keys, int64_t n, int64_t size, float* out,
             int64_t out_stride) {
    const int64_t whole = size / W, rest = size % W;
    for (int64_t first = 0; first < n; first += W) {
        vec sums[T][W];
        for (int i = 0; i < W; i += KEYS_AT_ONCE) {
            const float* key[KEYS_AT_ONCE];
            UNROLL for (int k = 0; k < KEYS_AT_ONCE; ++k) key[k] = keys + std::min(first + i + k, n - 1) * size;
            vec acc[T][KEYS_AT_ONCE] = {};
            for (int64_t e = 0; e < whole * W; e += W) {
                vec own[KEYS_AT_ONCE];
                UNROLL for (int k = 0; k < KEYS_AT_ONCE; ++k) own[k] = load(key[k] + e);
                UNROLL for (int t = 0; t < T; ++t) {
                    const vec x = load(q + t * q_stride + e);
                    UNROLL for (int k = 0; k < KEYS_AT_ONCE; ++k) acc[t][k] += x * own[k];
                }
            }
            if (rest) {
                UNROLL for (int t = 0; t < T; ++t) {
                    const vec x = load_some(q + t * q_stride + whole * W, rest);
                    UNROLL for (int k = 0; k < KEYS_AT_ONCE; ++k) acc[t][k] += x * load_some(key[k] + whole * W, rest);
                }
            }
            UNROLL for (int t = 0; t < T; ++t)
                UNROLL for (int k = 0; k < KEYS_AT_ONCE; ++k) sums[t][i + k] = acc[t][k];
        }
        UNROLL for (int t = 0; t < T; ++t) store(out + t * out_stride + first, add_up(sums[t]));
    }
}

// The same of up to MOST_DOTS queries.
inline void dots(int64_t count, const float* q, int64_t q_stride, const float* keys, int64_t n, int64_t size,
                 float* out, int64_t out_stride) {
    if (count == 1) return dots_of<1>(q, q_stride, keys, n, size, out, out_stride);
    if (count == 2) return dots_of<2>(q, q_stride, keys, n, size, out, out_stride);
    if constexpr (MOST_DOTS > 2) {
        if (count == 3) return dots_of<3>(q, q_stride, keys, n, size, out, out_stride);
        dots_of<4>(q, q_stride, keys, n, size, out, out_stride);
    }
}

// out [T, columns] (+)= weights [T, n] times rows [n, columns of `stride`], summed over rows from first to last; from
// what out holds, or from zero.
template <int T, int VECTORS>
INLINE void mix_columns(const float* weights, int64_t weight_stride, const float* rows, int64_t stride, int64_t n,
                        float* out, int64_t out_stride, bool goes_on) {
    vec acc[T][VECTORS] = {};
    if (goes_on)
        UNROLL for (int t = 0; t < T; ++t)
            UNROLL for (int v = 0; v < VECTORS; ++v) acc[t][v] = load(out + t * out_stride + v * W);
    for (int64_t j = 0; j < n; ++j) {
        vec own[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; ++v) own[v] = load(rows + j * stride + v * W);
        UNROLL for (int t = 0; t < T; ++t) {
            const vec weight = all(weights[t * weight_stride + j]);
            UNROLL for (int v = 0; v < VECTORS; ++v) acc[t][v] += weight * own[v];
        }
    }
    UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int v = 0; v < VECTORS; ++v) store(out + t * out_stride + v * W, acc[t][v]);
}

template <int T>
void mix_of(const float* weights, int64_t weight_stride, const float* rows, int64_t stride, int64_t n, int64_t columns,
            float* out, int64_t out_stride, bool goes_on) {
    int64_t first = 0;
    for (; first + 4 * W <= columns; first += 4 * W)
        mix_columns<T, 4>(weights, weight_stride, rows + first, stride, n, out + first, out_stride, goes_on);
    for (; first + W <= columns; first += W)
        mix_columns<T, 1>(weights, weight_stride, rows + first, stride, n, out + first, out_stride, goes_on);
    for (; first < columns; ++first)
        for (int t = 0; t < T; ++t) {
            float sum = goes_on ? out[t * out_stride + first] : 0.0f;
            for (int64_t j = 0; j < n; ++j) sum += weights[t * weight_stride + j] * rows[j * stride + first];
            out[t * out_stride + first] = sum;
        }
}

// The same of up to MOST_DOTS lines of weights.
inline void mix_rows(int64_t count, const float* weights, int64_t weight_stride, const float* rows, int64_t stride,
                     int64_t n, int64_t columns, float* out, int64_t out_stride, bool goes_on) {
    const auto call = [&](auto of) { of(weights, weight_stride, rows, stride, n, columns, out, out_stride, goes_on); };
    if (count == 1) return call(mix_of<1>);
    if (count == 2) return call(mix_of<2>);
    if constexpr (MOST_DOTS > 2) {
        if (count == 3) return call(mix_of<3>);
        call(mix_of<4>);
    }
}

}  // namespace looped
