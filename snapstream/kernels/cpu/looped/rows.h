// Attention of the query heads of one kv head over the visible slots of a row. Slots past a row's length are never read.
// row_forms.h has the numbers of rows, attention.h is the stage that calls this.
//
// A row is cut into parts of PART slots, so that few long rows keep many threads busy; a part is read in blocks with a
// running maximum, and parts are merged in their order. Invariant: how a row is cut depends on its length alone, so a
// row's result is the same bits in any batch and on any number of threads.
#pragma once
#include <algorithm>
#include <limits>

#include "row_forms.h"

namespace looped {

constexpr int64_t PART = 1024;         // slots
constexpr int64_t BLOCK_NUMBERS = 4096;  // of keys or values read at a time: widened they fit the nearest cache
constexpr int MAX_HEAD = 256;

inline int64_t block_slots(int64_t head_dim) { return std::max<int64_t>(W, BLOCK_NUMBERS / head_dim / W * W); }

// -- one part of a row

struct Part {  // running maximum and sum of each query head, and what it has mixed so far [heads][E]
    float *peak, *total, *mixed;
};

// q [R, E] times keys [n, E]: scores [R][stride]. E is NV vectors, or with NV = 0 any size.
template <int NV, int R>
void score(const float* q, const float* keys, int64_t n, int64_t head_dim, float* scores, int64_t stride) {
    const int64_t whole = NV ? NV : head_dim / W, rest = NV ? 0 : head_dim % W;
    for (int64_t first = 0; first < n; first += W) {
        vec sums[R][W];
        for (int i = 0; i < W; ++i) {
            const float* key = keys + std::min(first + i, n - 1) * head_dim;
            vec acc[R] = {};
            UNROLL for (int e = 0; e < whole; ++e) {
                const vec own = load(key + e * W);
                UNROLL for (int r = 0; r < R; ++r) acc[r] += load(q + r * head_dim + e * W) * own;
            }
            if (rest) {
                const vec own = load_some(key + whole * W, rest);
                for (int r = 0; r < R; ++r) acc[r] += load_some(q + r * head_dim + whole * W, rest) * own;
            }
            UNROLL for (int r = 0; r < R; ++r) sums[r][i] = acc[r];
        }
        UNROLL for (int r = 0; r < R; ++r) store(scores + r * stride + first, add_up(sums[r]));
    }
}

// mixed [R, E] += weights [R][stride] times values [n, E].
template <int NV, int R>
void mix(const float* weights, int64_t stride, const float* values, int64_t n, int64_t head_dim, float* mixed) {
    if constexpr (NV > 0) {
        constexpr int AT_ONCE = NV < 4 ? NV : (W == 16 && NV >= 8 ? 8 : 4);  // vectors for which there are registers
        for (int start = 0; start < NV; start += AT_ONCE) {
            const float* column = values + start * W;
            float* to = mixed + start * W;
            vec acc[R][AT_ONCE];
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int e = 0; e < AT_ONCE; ++e) acc[r][e] = load(to + r * head_dim + e * W);
            for (int64_t j = 0; j < n; ++j) {
                vec own[R];
                UNROLL for (int r = 0; r < R; ++r) own[r] = all(weights[r * stride + j]);
                UNROLL for (int e = 0; e < AT_ONCE; ++e) {
                    const vec value = load(column + j * head_dim + e * W);
                    UNROLL for (int r = 0; r < R; ++r) acc[r][e] += own[r] * value;
                }
            }
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (int e = 0; e < AT_ONCE; ++e) store(to + r * head_dim + e * W, acc[r][e]);
        }
    } else {
        for (int64_t j = 0; j < n; ++j)
            for (int r = 0; r < R; ++r)
                for (int64_t e = 0; e < head_dim; ++e)
                    mixed[r * head_dim + e] += weights[r * stride + j] * values[j * head_dim + e];
    }
}

// Scores [stride] of n slots become their weights; peak and total go on; mixed [E] is scaled to the new peak.
inline void weigh(float* scores, int64_t n, int64_t head_dim, float& peak, float& total, float* mixed) {
    const int64_t filled = (n + W - 1) / W * W;
    for (int64_t j = n; j < filled; ++j) scores[j] = -std::numeric_limits<float>::infinity();
    vec most = load(scores);
    for (int64_t j = W; j < filled; j += W) {
        const vec own = load(scores + j);
        most = own > most ? own : most;
    }
    const float highest = max_of(most);
    if (highest > peak) {
        const float share = exponential(all(peak - highest))[0];
        total *= share;
        for (int64_t e = 0; e < head_dim; ++e) mixed[e] *= share;
        peak = highest;
    }
    vec sum = {};
    for (int64_t j = 0; j < filled; j += W) {
        const vec own = exponential(load(scores + j) - peak);
        store(scores + j, own);
        sum += own;
    }
    total += sum_of(sum);
}

template <int NV, int R>
void attend_heads(const float* q, const float* keys, const float* values, int64_t n, int64_t head_dim, float* scores,
                  int64_t stride, const Part& part, int64_t first) {
    score<NV, R>(q + first * head_dim, keys, n, head_dim, scores, stride);
    for (int r = 0; r < R; ++r)
        weigh(scores + r * stride, n, head_dim, part.peak[first + r], part.total[first + r],
              part.mixed + (first + r) * head_dim);
    mix<NV, R>(scores, stride, values, n, head_dim, part.mixed + first * head_dim);
}

// Slots [begin, end) of one kv head for its `group` query heads q [group, E], which are scaled already. scratch holds
// two blocks of numbers and two lines of scores.
template <int NV>
void attend_part(const float* q, const StoredHead& stored, int64_t begin, int64_t end, int64_t group, int64_t head_dim,
                 const Part& part, float* scratch) {
    const int64_t slots = block_slots(head_dim);
    float *wide_keys = scratch, *wide_values = scratch + slots * head_dim, *scores = scratch + 2 * slots * head_dim;
    std::fill(part.peak, part.peak + group, -std::numeric_limits<float>::infinity());
    std::fill(part.total, part.total + group, 0.0f);
    std::fill(part.mixed, part.mixed + group * head_dim, 0.0f);
    for (int64_t first = begin; first < end; first += slots) {
        const int64_t n = std::min(slots, end - first);
        const float* own_keys = stored.widened(stored.keys, stored.key_scales, first, n, wide_keys);
        const float* own_values = stored.widened(stored.values, stored.value_scales, first, n, wide_values);
        int64_t head = 0;
        for (; head + 2 <= group; head += 2)
            attend_heads<NV, 2>(q, own_keys, own_values, n, head_dim, scores, slots, part, head);
        if (head < group) attend_heads<NV, 1>(q, own_keys, own_values, n, head_dim, scores, slots, part, head);
    }
}

using AttendPart = void (*)(const float*, const StoredHead&, int64_t, int64_t, int64_t, int64_t, const Part&, float*);

inline AttendPart attend_part_of(int64_t head_dim) {
    if (head_dim == 128) return attend_part<128 / W>;
    if (head_dim == 64) return attend_part<64 / W>;
    if (head_dim == 32) return attend_part<32 / W>;
    return attend_part<0>;
}

inline int64_t attend_scratch(int64_t head_dim) { return 2 * block_slots(head_dim) * (head_dim + 1); }

// Parts in their order, `count` of them that lie one after the other from `parts` on; out [group, E].
inline void merge_parts(const Part& parts, int64_t count, int64_t group, int64_t head_dim, float scale, float* out) {
    for (int64_t r = 0; r < group; ++r) {
        float peak = parts.peak[r], total = 0.0f;
        for (int64_t i = 1; i < count; ++i) peak = std::max(peak, parts.peak[i * group + r]);
        float* own = out + r * head_dim;
        std::fill(own, own + head_dim, 0.0f);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t place = i * group + r;
            const float share = count == 1 ? 1.0f : exponential(all(parts.peak[place] - peak))[0];
            total += parts.total[place] * share;
            for (int64_t e = 0; e < head_dim; ++e) own[e] += parts.mixed[place * head_dim + e] * share;
        }
        const float factor = scale / total;
        for (int64_t e = 0; e < head_dim; ++e) own[e] *= factor;
    }
}

}  // namespace looped
