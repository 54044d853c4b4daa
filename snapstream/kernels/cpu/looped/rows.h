// Attention of the query heads of one kv head over the visible slots of a row. Slots past a row's length are never read.
// row_forms.h has the numbers of rows, attention.h is the stage that calls this.
//
// A row is cut into parts of PART slots, so that few long rows keep many threads busy. A part is read twice, its keys and
// then its values, each number once from memory: it is widened in a register, where up to HEADS_AT_ONCE query heads use
// it; what more heads there are find it in a near cache. Scales of slots meet scores and shares, not numbers.
//
// Invariant: how a row is cut and in which order it is summed depends on its length alone, so a row's result is the same
// bits in any batch and on any number of threads.
#pragma once
#include <algorithm>
#include <limits>

#include "row_forms.h"

namespace looped {

constexpr int64_t PART = 1024;                         // slots
constexpr int64_t SCORE_LINE = PART + 16;              // so that lines of several heads do not share places of a cache
constexpr int64_t BLOCK_BYTES = 16384;                 // of keys or values, which all heads use while they are near
constexpr int64_t ROW_AHEAD = 4096;                    // bytes
constexpr int HEADS_AT_ONCE = W == 16 ? 4 : 2;         // for which there are registers
constexpr int SLOTS_AT_ONCE = 4, COLUMNS_AT_ONCE = 4;  // vectors of different slots; of one slot

// -- one part of a row

struct Part {  // largest score and sum of shares of each query head, and what it has mixed [heads][E]
    float *peak, *total, *mixed;
};

// Two vectors become one: sums of neighbouring units of the first, then of the second. A unit is a block of four lanes, or
// it is a lane, and that in each block.
constexpr int joined_lane(int lane, int size, int odd) {
    const int span = size == 1 ? 4 : W, place = lane % span / size, half = span / size / 2;
    const int from = lane / span * span + (place % half * 2 + odd) * size + lane % size;
    return place < half ? from : W + from;
}
template <int size, int... lane>
INLINE vec joined(vec a, vec b, std::integer_sequence<int, lane...>) {
    return PICK(a, b, joined_lane(lane, size, 0)...) + PICK(a, b, joined_lane(lane, size, 1)...);
}
template <int size>
INLINE vec join(vec a, vec b) {
    return joined<size>(a, b, std::make_integer_sequence<int, W>{});
}

constexpr int BLOCKS = W / 4;  // of a vector
// Which of W slots the sums `at` of group `group` belong to.
constexpr int slot_of(int group, int at) { return 4 * (at % BLOCKS) + group * (4 / BLOCKS) + at / BLOCKS; }
// Sums of SLOTS_AT_ONCE slots to 4 / BLOCKS vectors, a block to each slot.
INLINE void join_blocks(const vec* sums, vec* to) {
    if constexpr (BLOCKS == 4) to[0] = join<4>(join<4>(sums[0], sums[1]), join<4>(sums[2], sums[3]));
    else if constexpr (BLOCKS == 2) to[0] = join<4>(sums[0], sums[1]), to[1] = join<4>(sums[2], sums[3]);
    else std::copy(sums, sums + 4, to);
}

// q [R, E] times keys [n, E], and times the scales [n] of slots if they have them: scores [R][SCORE_LINE], -infinity up
// to a multiple of W; most [R][W]: the largest of each lane so far.
template <class Form, int R>
void score(const float* q, const char* keys, const float* scales, int64_t n, int64_t head_dim, float* scores,
           float* most) {
    const int64_t token = head_dim * Form::BYTES, whole = head_dim / W * W, rest = head_dim - whole;
    for (int64_t first = 0; first < n; first += W) {
        const int64_t left = n - first;
        const char* ahead = keys + first * token + ROW_AHEAD;
        for (int64_t i = 0; i < W * token; i += 64) __builtin_prefetch(ahead + i);
        vec sums[R][4];
        for (int group = 0; group < BLOCKS; ++group) {
            const char* key[SLOTS_AT_ONCE];
            UNROLL for (int k = 0; k < SLOTS_AT_ONCE; ++k)
                key[k] = keys + (first + std::min<int64_t>(slot_of(group, k), left - 1)) * token;
            vec acc[R][SLOTS_AT_ONCE] = {};
            for (int64_t e = 0; e < whole; e += W) {
                vec own[SLOTS_AT_ONCE];
                UNROLL for (int k = 0; k < SLOTS_AT_ONCE; ++k) own[k] = Form::at(key[k] + e * Form::BYTES);
                UNROLL for (int r = 0; r < R; ++r) {
                    const vec x = load(q + r * head_dim + e);
                    UNROLL for (int k = 0; k < SLOTS_AT_ONCE; ++k) acc[r][k] += x * own[k];
                }
            }
            if (rest) {
                UNROLL for (int k = 0; k < SLOTS_AT_ONCE; ++k) {
                    const vec own = some_at<Form>(key[k] + whole * Form::BYTES, rest);
                    UNROLL for (int r = 0; r < R; ++r) acc[r][k] += load_some(q + r * head_dim + whole, rest) * own;
                }
            }
            UNROLL for (int r = 0; r < R; ++r) join_blocks(acc[r], sums[r] + group * (4 / BLOCKS));
        }
        UNROLL for (int r = 0; r < R; ++r) {
            vec found = join<1>(join<1>(sums[r][0], sums[r][1]), join<1>(sums[r][2], sums[r][3]));
            if (scales) found *= load_some(scales + first, std::min<int64_t>(W, left));
            store(scores + r * SCORE_LINE + first, found);
            if (left < W) {
                float* own = scores + r * SCORE_LINE + first;
                std::fill(own + left, own + W, -std::numeric_limits<float>::infinity());
                found = load(own);
            }
            const vec before = load(most + r * W);
            store(most + r * W, found > before ? found : before);
        }
    }
}

// Scores [n] of a head to shares of the largest of them; then, if slots have scales, times those of the values.
inline void soften(float* scores, int64_t n, const float* scales, float peak, float& total) {
    vec sum = {};
    for (int64_t j = 0; j < n; j += W) {
        const vec own = falling(load(scores + j) - peak);
        store(scores + j, own);
        sum += own;
    }
    total = sum_of(sum);
    for (int64_t j = 0; scales && j < n; ++j) scores[j] *= scales[j];
}

// COLUMNS vectors of mixed [R, E], `count` numbers in the last, += shares [R][SCORE_LINE] times those of values [n, E].
template <class Form, int R, int COLUMNS>
INLINE void mix_columns(const float* shares, const char* values, int64_t token, int64_t n, int64_t head_dim,
                        float* mixed, int64_t count) {
    const auto read = [&](const char* from) { return count < W ? some_at<Form>(from, count) : Form::at(from); };
    vec acc[R][COLUMNS];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < COLUMNS; ++v) acc[r][v] = load_some(mixed + r * head_dim + v * W, count);
    for (int64_t j = 0; j < n; ++j, values += token) {
        UNROLL for (int i = 0; i < COLUMNS * W * Form::BYTES; i += 64) __builtin_prefetch(values + ROW_AHEAD + i);
        vec own[COLUMNS];
        UNROLL for (int v = 0; v < COLUMNS; ++v) own[v] = read(values + v * W * Form::BYTES);
        UNROLL for (int r = 0; r < R; ++r) {
            const vec share = all(shares[r * SCORE_LINE + j]);
            UNROLL for (int v = 0; v < COLUMNS; ++v) acc[r][v] += share * own[v];
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < COLUMNS; ++v) {
            float* to = mixed + r * head_dim + v * W;
            if (count < W) std::memcpy(to, &acc[r][v], count * 4);
            else store(to, acc[r][v]);
        }
}

// mixed [R, E] += shares [R][SCORE_LINE] times values [n, E], from the first slot to the last.
template <class Form, int R>
void mix(const float* shares, const char* values, int64_t n, int64_t head_dim, float* mixed) {
    const int64_t token = head_dim * Form::BYTES;
    int64_t e = 0;
    for (; e + COLUMNS_AT_ONCE * W <= head_dim; e += COLUMNS_AT_ONCE * W)
        mix_columns<Form, R, COLUMNS_AT_ONCE>(shares, values + e * Form::BYTES, token, n, head_dim, mixed + e, W);
    for (; e < head_dim; e += W)
        mix_columns<Form, R, 1>(shares, values + e * Form::BYTES, token, n, head_dim, mixed + e,
                                std::min<int64_t>(W, head_dim - e));
}

// Calls use<R>(first) for the heads [first, first + R) of a group, R of about the same size.
template <class Use>
INLINE void for_heads(int64_t group, Use use) {
    const int64_t tiles = (group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t first = group * i / tiles, count = group * (i + 1) / tiles - first;
        if (count == 1) use.template operator()<1>(first);
        else if (count == 2) use.template operator()<2>(first);
        else if constexpr (HEADS_AT_ONCE > 2) {
            if (count == 3) use.template operator()<3>(first);
            else use.template operator()<4>(first);
        }
    }
}

// Slots [begin, end) of one kv head for its `group` query heads q [group, E], which are scaled already. scratch:
// attend_scratch.
template <class Form>
void attend_part(const float* q, const StoredHead& stored, int64_t begin, int64_t end, int64_t group, const Part& part,
                 float* scratch) {
    const int64_t size = stored.head_dim, token = size * Form::BYTES, n = end - begin;
    const int64_t block = std::max<int64_t>(W, BLOCK_BYTES / token / W * W);
    const char *keys = stored.keys + begin * token, *values = stored.values + begin * token;
    float *scores = scratch, *most = scratch + group * SCORE_LINE;
    const auto scales = [&](const float* all, int64_t first) { return all ? all + begin + first : nullptr; };
    std::fill(most, most + group * W, -std::numeric_limits<float>::infinity());
    for (int64_t first = 0; first < n; first += block)
        for_heads(group, [&]<int R>(int64_t head) {
            score<Form, R>(q + head * size, keys + first * token, scales(stored.key_scales, first),
                           std::min(block, n - first), size, scores + head * SCORE_LINE + first, most + head * W);
        });
    for (int64_t r = 0; r < group; ++r) {
        part.peak[r] = max_of(load(most + r * W));
        soften(scores + r * SCORE_LINE, n, scales(stored.value_scales, 0), part.peak[r], part.total[r]);
    }
    std::fill(part.mixed, part.mixed + group * size, 0.0f);
    for (int64_t first = 0; first < n; first += block)
        for_heads(group, [&]<int R>(int64_t head) {
            mix<Form, R>(scores + head * SCORE_LINE + first, values + first * token, std::min(block, n - first), size,
                         part.mixed + head * size);
        });
}

using AttendPart = void (*)(const float*, const StoredHead&, int64_t, int64_t, int64_t, const Part&, float*);

inline AttendPart attend_part_of(int64_t format) {
    switch (format) {
        case BF16: return attend_part<RowBF16>;
        case FP8: return attend_part<RowFP8>;
        case I8: return attend_part<RowI8>;
        default: return attend_part<RowF32>;
    }
}

inline int64_t attend_scratch(int64_t group) { return group * (SCORE_LINE + 16); }

// For rows of latents, which are read in blocks (latent.h).
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
