// Attention of chunks of prompts in fp32 or in int16, flash style: keys block by block, with the softmax corrected as
// larger scores turn up.
//
// The queries of all heads that share keys lie side by side in lanes, query by query, up to MOST_LANES of them to a
// pack. In fp32 keys and values are read where they are staged, a number at a time for all lanes: nothing of them is
// packed, scores lie as the next product reads them, and no sum crosses lanes. A task is some packs of one kv head,
// which use a block of keys and values while it is near. Invariant: a lane's sum is taken from the first step to the
// last, in one chain, whatever the other lanes and rows are; blocks begin at multiples of BLOCK_KEYS, and what a query
// does not see adds zeros. So its result is bitwise equal however the prompt is cut into chunks, whatever shares the
// call, and on any number of threads.
//
// In int16 a query, a key, a value and the shares of a block are integers of 11 to 13 bits times a scale each, so that
// sums of products fit 32 bits: twice as many products per instruction as in fp32, and in heads of up to 256 a number
// is off by less than a 5,000th of its row's largest. A value's scale is a power of two and part of its share, so a
// share is rounded by what it adds; what is rounded depends on no other query and on no later key.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "simd.h"

namespace looped {

namespace {

// -- tiles: some rows of keys or values, as they lie in memory, times queries that lie side by side in lanes

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

// 2^x of x up to 127: 0 where that is no normal number, NaN of NaN. The relative error is below 1e-7, and it is 1 of 0;
// where a ROUGH one is asked for, the error is below 3e-6.
template <bool ROUGH = false>
INLINE vec power_of_two(vec x) {
    const auto of_fraction = [](vec f) {  // 2^f for 0 <= f <= 1
        if constexpr (ROUGH) {
            vec p = all(1.35341678e-2f);
            p = fused(p, f, all(5.20114661e-2f));
            p = fused(p, f, all(0.241442755f));
            p = fused(p, f, all(0.693003833f));
            return fused(p, f, all(1.0000026f));
        }
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

// What is multiplied. A unit is 32 bits: a number of fp32, or two of int16 that are neighbours in what is summed.
struct Floats {
    static constexpr bool ROUNDS = false;
    using Sum = vec;
    static INLINE vec add(vec own, vec unit, vec sum) { return fused(own, unit, sum); }
};

// Products of int16 added up in 32 bits; written out, as in simd.h.
#if HAS_DOT_BYTES
struct PairsAtOnce {
    static constexpr bool ROUNDS = true;
    using Sum = ints;
    static INLINE ints add(vec own, vec unit, ints sum) {
        DOT("vpdpwssd", sum, own, unit);
        return sum;
    }
};
#endif
struct PairsInTwo {
    static constexpr bool ROUNDS = true;
    using Sum = ints;
    static INLINE ints add(vec own, vec unit, ints sum) {
#if ISA
        ints both;
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(both) : "v"(own), "v"(unit));
        return sum;
#else
        const ints a = (ints)own, b = (ints)unit;
        return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
    }
};

// Step d of row i of a tile is from[i * stride + d] of KEYS, from[d * stride + i] of VALUES.
enum Side { KEYS, VALUES };

// What sums are multiplied by: of KEYS a number per row, of VALUES the lanes of the new ones and of what was there.
struct Factors {
    const float *rows, *added, *before;
};

// sums [R][V W]: R rows times lanes [depth][V W]. Of KEYS they are written, of VALUES added to what is there.
template <class Numbers, Side SIDE, int R, int V>
void lane_tile(const float* from, int64_t stride, const float* lanes, int64_t depth, Factors factors, float* sums) {
    typename Numbers::Sum acc[R][V];
    const auto sum = [&](int i, int v) { return sums + (i * V + v) * W; };
    UNROLL for (int v = 0; v < V; ++v) {
        if constexpr (SIDE == VALUES && !Numbers::ROUNDS) {
            const vec own = load(factors.before + v * W);
            UNROLL for (int i = 0; i < R; ++i) acc[i][v] = load(sum(i, v)) * own;
        } else {
            UNROLL for (int i = 0; i < R; ++i) acc[i][v] = typename Numbers::Sum{};
        }
    }
    for (int64_t d = 0; d < depth; ++d) {
        vec own[V];
        UNROLL for (int v = 0; v < V; ++v) own[v] = load(lanes + v * W);
        UNROLL for (int i = 0; i < R; ++i) {
            const vec unit = all(SIDE == KEYS ? from[i * stride + d] : from[i]);
            UNROLL for (int v = 0; v < V; ++v) acc[i][v] = Numbers::add(own[v], unit, acc[i][v]);
        }
        lanes += V * W;
        if constexpr (SIDE == VALUES) from += stride;
    }
    UNROLL for (int v = 0; v < V; ++v)
        UNROLL for (int i = 0; i < R; ++i) {
            if constexpr (!Numbers::ROUNDS) {
                store(sum(i, v), acc[i][v]);
            } else {
                const vec found = __builtin_convertvector(acc[i][v], vec);
                if constexpr (SIDE == KEYS) {
                    store(sum(i, v), found * factors.rows[i]);
                } else {
                    const vec before = load(sum(i, v)) * load(factors.before + v * W);
                    store(sum(i, v), fused(found, load(factors.added + v * W), before));
                }
            }
        }
}

using LaneTile = void (*)(const float*, int64_t, const float*, int64_t, Factors, float*);

template <class Numbers, Side SIDE, int V, int... R>
INLINE LaneTile lane_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr LaneTile tiles[] = {lane_tile<Numbers, SIDE, R + 1, V>...};
    return tiles[rows - 1];
}

// Rows of keys or values, `stride` numbers from one to the next.
struct Rows32 {
    const float* from;
    int64_t stride, count, size;
};

// Tiles of all rows one after the other: of VALUES a row is one of their numbers, and `depth` is the count. Meanwhile
// `next` are asked for, so that memory never waits for arithmetic.
template <class Numbers, Side SIDE, int V>
void lane_product(const Rows32& own, const Rows32& next, const float* lanes, Factors factors, float* sums) {
    constexpr int MOST_ROWS = tallest(V);
    const int64_t rows = SIDE == KEYS ? own.count : own.size, depth = SIDE == KEYS ? own.size : own.count;
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        const int64_t count = std::min<int64_t>(MOST_ROWS, rows - first);
        for (int64_t ahead = next.count * first / rows; ahead < next.count * (first + count) / rows; ++ahead)
            for (int64_t i = 0; i < next.size; i += 16) __builtin_prefetch(next.from + ahead * next.stride + i);
        const LaneTile tile = lane_tile_of<Numbers, SIDE, V>(count, std::make_integer_sequence<int, MOST_ROWS>{});
        tile(own.from + first * (SIDE == KEYS ? own.stride : 1), own.stride, lanes, depth, factors,
             sums + first * V * W);
        if constexpr (Numbers::ROUNDS && SIDE == KEYS) factors.rows += MOST_ROWS;
    }
}

constexpr int64_t BLOCK_KEYS = 96;  // whose scores stay in the nearest cache; a multiple of the rows of all tiles
constexpr int64_t MOST_PACKS = 8;   // of a task
constexpr float NONE = -std::numeric_limits<float>::infinity(), LOG2_E = 1.44269504088896341f;

// -- rounding to integers

constexpr int64_t MOST_SHARE = 4095, MOST_VALUE = INT32_MAX / (MOST_SHARE * BLOCK_KEYS);
constexpr float LEAST_SCALE = 0x1p-60f;  // of zeros: the share of such a value must not be the largest, nor lost

// The largest numbers of queries and keys of which `size` products fit 32 bits.
int64_t most_of_both(int64_t size) { return std::min<int64_t>(std::sqrt(INT32_MAX / static_cast<double>(size)), 8191); }

INLINE ints nearest(vec x) { return (ints)(x + all(12582912.0f)) - (ints)all(12582912.0f); }  // as in power_of_two

INLINE vec magnitude(vec x) { return (vec)((bits)x & all_bits(0x7fffffffu)); }

INLINE float largest_of(vec x) {
#if ISA == 512
    return _mm512_reduce_max_ps((__m512)x);
#else
    return max_of(x);
#endif
}

// What integers up to `most` in size are to be multiplied by to be this row; NaN if a number is not finite.
INLINE float scale_of(const float* from, int64_t size, int64_t most) {
    vec largest = {}, wrong = {};
    for (int64_t i = 0; i < size; i += W) {
        const vec own = load_some(from + i, size - i);
        largest = larger(magnitude(own), largest);
        wrong = fused(own, vec{}, wrong);
    }
    if (lanes_of(wrong != wrong)) return std::numeric_limits<float>::quiet_NaN();
    return std::max(largest_of(largest) / static_cast<float>(most), LEAST_SCALE);
}

// The power of two above a scale: by its exponent, NaN of NaN, and inverse.
struct Power {
    float log, inverse;
    explicit Power(float scale) {
        int32_t own;
        std::memcpy(&own, &scale, sizeof own);
        const int32_t power = (own >> 23) - 126, inverted = (127 - power) << 23;
        log = scale == scale ? static_cast<float>(power) : scale;
        std::memcpy(&inverse, &inverted, sizeof inverse);
    }
};

INLINE void store_some(void* to, ints own, int64_t n) {
    if (n >= W) std::memcpy(to, &own, sizeof own);
    else std::memcpy(to, &own, n * 4);
}

// A row times its inverse scale: `to` [size].
INLINE void round_numbers(const float* from, int64_t size, float by, int16_t* to) {
    for (int64_t i = 0; i < size; i += W) store_shorts(to + i, nearest(load_some(from + i, size - i) * by), size - i);
}

// Two rows, in pairs of a number of each: `to` [size][2].
INLINE void round_rows(const float* first, const float* second, int64_t size, float by_first, float by_second,
                       int16_t* to) {
    for (int64_t i = 0; i < size; i += W) {
        const ints low = nearest(load_some(first + i, size - i) * by_first);
        const ints high = nearest(load_some(second + i, size - i) * by_second);
        store_some(to + 2 * i, (low & 0xffff) | high << 16, size - i);
    }
}

int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Task {
    const Prompt* prompt;
    int64_t kv_head, begin, end;  // lanes of that kv head: lane i is head i % shared of query i / shared
    int64_t work() const {
        const int64_t shared = prompt->heads / prompt->kv_heads, seen = prompt->keys - prompt->queries + end / shared;
        const int64_t in_windows = prompt->window ? prompt->window + (end - begin) / shared : seen;
        return (end - begin) * std::min(seen, in_windows);
    }
};

// Up to MOST_LANES lanes that follow each other; lanes up to a whole vector repeat the last one.
struct Pack {
    int64_t begin, lanes;
    int vecs;
    int64_t all_see, some_see;                // where the keys end that every lane sees, that some lane sees
    int64_t all_from, some_from;              // where they begin, as windows have it
    float *queries, *mixed, *peaks, *totals;  // [E][V W], [U][V W], [V W], [V W]
    float* scales;                            // [V W]: of queries in int16, which are [E / 2][V W]
};

// What a thread needs for any of the tasks.
template <class Numbers>
class Worker {
  public:
    Worker(int64_t size, int64_t value_size)
        : memory_(new float[MOST_PACKS * (size + value_size + 3) * MOST_LANES + 16]) {
        if constexpr (Numbers::ROUNDS) {
            row_.resize(even(size));
            keys_.resize(BLOCK_KEYS * even(size));
            values_.resize(BLOCK_KEYS * value_size);
            zeros_.resize(std::max(size, value_size));
        }
    }

    void run(const Task& task) {
        task_ = &task, p_ = task.prompt, shared_ = p_->heads / p_->kv_heads;
        make_packs();
        const int64_t begin = packs_.front().some_from / BLOCK_KEYS * BLOCK_KEYS;
        for (int64_t first = begin; first < packs_.back().some_see; first += BLOCK_KEYS) {
            if constexpr (Numbers::ROUNDS) round_block(first);
            for (const Pack& pack : packs_)
                if (pack.some_see > first && pack.some_from < first + BLOCK_KEYS) attend(pack, first);
        }
        for (const Pack& pack : packs_) write(pack);
    }

  private:
    int64_t seen_by(int64_t lane) const { return p_->keys - p_->queries + lane / shared_ + 1; }
    int64_t seen_from(int64_t lane) const { return p_->window ? std::max<int64_t>(seen_by(lane) - p_->window, 0) : 0; }

    void make_packs() {
        packs_.clear();
        float* memory = memory_.get();
        memory += (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64 / sizeof(float);
        for (int64_t begin = task_->begin; begin < task_->end; begin += MOST_LANES) {
            const int64_t lanes = std::min<int64_t>(MOST_LANES, task_->end - begin);
            const int vecs = static_cast<int>(divided_up(lanes, W)), width = vecs * W;
            const auto take = [&](int64_t rows) { return std::exchange(memory, memory + rows * width); };
            const int64_t last = begin + lanes - 1;
            packs_.push_back({begin, lanes, vecs, seen_by(begin), seen_by(last), seen_from(last), seen_from(begin),
                              take(p_->size), take(p_->value_size), take(1), take(1), take(1)});
            const Pack& pack = packs_.back();
            for (int lane = 0; lane < width; ++lane) {
                const int64_t own = begin + std::min<int64_t>(lane, lanes - 1);
                const int64_t query = own / shared_, head = task_->kv_head * shared_ + own % shared_;
                const float* q = p_->q + query * p_->q_token + head * p_->q_head;
                if constexpr (Numbers::ROUNDS) {
                    pack.scales[lane] = round_row(q, p_->size, row_.data());
                    for (int64_t i = 0; i < p_->size; i += 2)
                        std::memcpy(pack.queries + i / 2 * width + lane, &row_[i], sizeof(float));
                } else {
                    for (int64_t i = 0; i < p_->size; ++i) pack.queries[i * width + lane] = q[i];
                }
            }
            std::fill(pack.mixed, pack.mixed + p_->value_size * width, 0.0f);
            for (int lane = 0; lane < width; ++lane) {
                const int64_t own = begin + std::min<int64_t>(lane, lanes - 1);
                const float* sink = p_->sinks ? p_->sinks + task_->kv_head * shared_ + own % shared_ : nullptr;
                pack.peaks[lane] = sink ? *sink * LOG2_E : NONE;
                pack.totals[lane] = sink ? 1.0f : 0.0f;
            }
        }
    }

    // Keys of a block to rows of pairs, values to pairs of keys; zeros where no pack sees.
    void round_block(int64_t block) {
        const int64_t begin = std::max(block, packs_.front().some_from) - block;
        const int64_t end = std::min(BLOCK_KEYS, packs_.back().some_see - block), even_size = even(p_->size);
        for (int64_t key = begin / 2 * 2; key < even(end); key += 2) {
            const float* rows[2];
            for (int64_t i = 0; i < 2; ++i) {
                const bool is_seen = key + i >= begin && key + i < end;
                rows[i] = is_seen ? values(block + key + i, 1).from : zeros_.data();
                const Power power(scale_of(rows[i], p_->value_size, MOST_VALUE));
                value_logs_[key + i] = power.log, value_inverses_[key + i] = power.inverse;
                const float* own = is_seen ? keys(block + key + i, 1).from : zeros_.data();
                key_scales_[key + i] = round_row(own, p_->size, &keys_[(key + i) * even_size]);
            }
            round_rows(rows[0], rows[1], p_->value_size, value_inverses_[key], value_inverses_[key + 1],
                       &values_[key * p_->value_size]);
        }
    }

    // A query or a key to pairs of integers, padded with a zero to a whole pair; its scale.
    static float round_row(const float* from, int64_t size, int16_t* to) {
        const float scale = scale_of(from, size, most_of_both(size));
        to[even(size) - 1] = 0;
        round_numbers(from, size, 1.0f / scale, to);
        return scale;
    }

    // To a block that begins at key `first`.
    void attend(const Pack& pack, int64_t first) {
        switch (pack.vecs) {
            case 1: return attend<1>(pack, first);
            case 2: return attend<2>(pack, first);
            case 3: if constexpr (WIDEST > 2) return attend<3>(pack, first); break;
            case 4: if constexpr (WIDEST > 3) return attend<4>(pack, first); break;
        }
    }

    // In fp32 the first pack asks for the values of the block, the last for the keys of the next one; in int16
    // the first for the keys of the next one, the last for its values.
    template <int V>
    void attend(const Pack& pack, int64_t block) {
        const int64_t after = block + BLOCK_KEYS, begin = std::max(block, pack.some_from);
        const int64_t first = Numbers::ROUNDS ? begin - (begin - block) % 2 : begin;
        const int64_t count = std::min(after, pack.some_see) - first;
        const bool is_first = &pack == &packs_.front(), is_last = &pack == &packs_.back();
        alignas(64) float before[V * W], added[V * W];
        if constexpr (Numbers::ROUNDS) {
            const int64_t next = std::clamp<int64_t>(packs_.back().some_see - after, 0, BLOCK_KEYS);
            const int64_t place = first - block, units = even(p_->size) / 2, pairs = even(count) / 2;
            const auto* own_keys = reinterpret_cast<const float*>(keys_.data()) + place * units;
            const auto* own_values = reinterpret_cast<const float*>(values_.data()) + place / 2 * p_->value_size;
            lane_product<Numbers, KEYS, V>({own_keys, units, count, units}, keys(after, is_first ? next : 0),
                                           pack.queries, {key_scales_ + place}, scores_);
            soften<V>(pack, first, count, place, before, added);
            lane_product<Numbers, VALUES, V>({own_values, p_->value_size, pairs, p_->value_size},
                                             values(after, is_last ? next : 0), scores_, {nullptr, added, before},
                                             pack.mixed);
        } else {
            lane_product<Numbers, KEYS, V>(keys(first, count), values(first, is_first ? count : 0), pack.queries, {},
                                           scores_);
            soften<V>(pack, first, count, 0, before, nullptr);
            const int64_t left = is_last ? std::clamp<int64_t>(pack.some_see - after, 0, BLOCK_KEYS) : 0;
            lane_product<Numbers, VALUES, V>(values(first, count), keys(after, left), scores_,
                                             {nullptr, nullptr, before}, pack.mixed);
        }
    }

    Rows32 keys(int64_t first, int64_t count) const {
        return {p_->k + task_->kv_head * p_->k_head + first * p_->k_token, p_->k_token, count, p_->size};
    }
    Rows32 values(int64_t first, int64_t count) const {
        return {p_->v + task_->kv_head * p_->v_head + first * p_->v_token, p_->v_token, count, p_->value_size};
    }

    // Products to tanh(scale * product / cap), which times the cap are the scores; what is hidden stays so.
    template <int V>
    void cap(const Pack& pack, int64_t count) {
        for (float* at = scores_; at < scores_ + count * V * W; at += W) {
            vec scale = all(p_->scale / p_->cap);
            if constexpr (Numbers::ROUNDS) scale = scale * load(pack.scales + (at - scores_) % (V * W));
            const vec own = load(at);
            store(at, own == all(NONE) ? own : hyperbolic_tangent(own * scale));
        }
    }

    // Scores of a block from its key `place` on to shares of the lane's largest score; `before` corrects what was found
    // until then to that. In int16, `added` is what the new ones are to be multiplied by.
    template <int V>
    void soften(const Pack& pack, int64_t first, int64_t count, int64_t place, float* before, float* added) {
        vec most[V], total[V] = {}, shift[V], scale[V];
        const auto score = [&](int64_t key, int v) { return scores_ + (key * V + v) * W; };
        const int64_t whole = std::clamp<int64_t>(pack.all_see - first, 0, count);
        const int64_t early = std::clamp<int64_t>(pack.all_from - first, 0, whole);
        const auto hide = [&](int64_t begin, int64_t end) {
            for (int64_t key = begin; key < end; ++key) {
                // Lanes before `unseen` come before the key; from `left` on it is outside of their windows.
                const int64_t unseen = (first + key - (p_->keys - p_->queries)) * shared_ - pack.begin;
                const int64_t left = p_->window ? unseen + p_->window * shared_ : V * W;
                std::fill(score(key, 0), score(key, 0) + std::clamp<int64_t>(unseen, 0, V * W), NONE);
                std::fill(score(key, 0) + std::clamp<int64_t>(left, 0, V * W), score(key, V), NONE);
            }
        };
        hide(0, early);
        hide(whole, count);
        if (p_->cap != 0.0f) cap<V>(pack, count);
        UNROLL for (int v = 0; v < V; ++v) {
            scale[v] = all((p_->cap == 0.0f ? p_->scale : p_->cap) * LOG2_E);
            if constexpr (Numbers::ROUNDS)
                if (p_->cap == 0.0f) scale[v] = scale[v] * load(pack.scales + v * W);
        }
        vec scaled_peak[V];  // of shares times the scales of their values
        UNROLL for (int v = 0; v < V; ++v) most[v] = scaled_peak[v] = all(NONE);
        for (int64_t key = 0; key < count; ++key)
            UNROLL for (int v = 0; v < V; ++v) {
                const vec own = load(score(key, v));
                most[v] = larger(own, most[v]);
                if constexpr (Numbers::ROUNDS)
                    scaled_peak[v] = larger(fused(own, scale[v], all(value_logs_[place + key])), scaled_peak[v]);
            }
        UNROLL for (int v = 0; v < V; ++v) {
            // Peaks are kept times the scale: of one that stays, the factor is 1 to the bit.
            const vec earlier = load(pack.peaks + v * W), peak = larger(most[v] * scale[v], earlier);
            shift[v] = peak == all(NONE) ? vec{} : peak;
            store(pack.peaks + v * W, peak);
            store(before + v * W, power_of_two(earlier - shift[v]));
        }
        if constexpr (Numbers::ROUNDS) {
            UNROLL for (int v = 0; v < V; ++v) {
                const vec least = scaled_peak[v] - std::log2(static_cast<float>(MOST_SHARE));
                scaled_peak[v] = scaled_peak[v] == all(NONE) ? shift[v] : least;
            }
            round_shares<V>(count, place, scale, scaled_peak, total);
            UNROLL for (int v = 0; v < V; ++v) {
                const vec own = power_of_two(scaled_peak[v] - shift[v]);
                store(added + v * W, own);
                total[v] = total[v] * own;
            }
        } else {
            for (int64_t key = 0; key < count; ++key)
                UNROLL for (int v = 0; v < V; ++v) {
                    const vec share = power_of_two(fused(load(score(key, v)), scale[v], -shift[v]));
                    store(score(key, v), share);
                    total[v] += share;
                }
        }
        UNROLL for (int v = 0; v < V; ++v) {
            float* own = pack.totals + v * W;
            store(own, fused(load(own), load(before + v * W), total[v]));
        }
    }

    // Scores to shares times the scales of their values, over 2^unit: integers up to MOST_SHARE, in pairs of keys.
    // `total`: the sum of the shares, over 2^unit.
    template <int V>
    void round_shares(int64_t count, int64_t place, const vec (&scale)[V], const vec (&unit)[V], vec (&total)[V]) {
        const float *logs = value_logs_ + place, *inverses = value_inverses_ + place;
        const auto score = [&](int64_t key, int v) { return scores_ + (key * V + v) * W; };
        // The lower half of what comes is the rounded number.
        const auto share = [&](int64_t key, int v) {
            const vec own = power_of_two<true>(fused(load(score(key, v)), scale[v], all(logs[key]) - unit[v]));
            total[v] = fused(own, all(inverses[key]), total[v]);
            return (ints)(own + all(12582912.0f));  // 1.5 * 2^23, as above
        };
        for (int64_t key = 0; key < count; key += 2)
            UNROLL for (int v = 0; v < V; ++v) {
                ints pair = share(key, v) & 0xffff;
                if (key + 1 < count) pair |= share(key + 1, v) << 16;
                store(score(key / 2, v), (vec)pair);
            }
    }

    void write(const Pack& pack) const {
        const int width = pack.vecs * W;
        for (int64_t i = 0; i < p_->value_size; ++i)
            for (int v = 0; v < width; v += W)
                store(pack.mixed + i * width + v, load(pack.mixed + i * width + v) / load(pack.totals + v));
        for (int64_t lane = 0; lane < pack.lanes; ++lane) {
            const int64_t own = pack.begin + lane, head = task_->kv_head * shared_ + own % shared_;
            float* out = p_->out + (own / shared_ * p_->heads + head) * p_->value_size;
            for (int64_t i = 0; i < p_->value_size; ++i) out[i] = pack.mixed[i * width + lane];
        }
    }

    const std::unique_ptr<float[]> memory_;
    const Task* task_ = nullptr;
    const Prompt* p_ = nullptr;
    int64_t shared_ = 1;  // query heads of a kv head
    std::vector<Pack> packs_;
    alignas(64) float scores_[BLOCK_KEYS * MOST_LANES];
    // Of a block in int16: [96][E], with a zero if E is odd; [48][U][2]; and of a row.
    std::vector<int16_t> keys_, values_, row_;
    std::vector<float> zeros_;
    float key_scales_[BLOCK_KEYS], value_logs_[BLOCK_KEYS], value_inverses_[BLOCK_KEYS];
};

// Tasks of nearly equal numbers of packs, the most work first; as many that each thread gets several.
std::vector<Task> tasks_of(const Prompt* prompts, int64_t count, int64_t threads) {
    int64_t packs = 0;
    for (const Prompt* p = prompts; p < prompts + count; ++p)
        packs += p->kv_heads * divided_up(p->queries * (p->heads / p->kv_heads), MOST_LANES);
    const int64_t most = threads == 1 ? MOST_PACKS : std::clamp<int64_t>(packs / (4 * threads), 1, MOST_PACKS);
    std::vector<Task> tasks;
    for (const Prompt* p = prompts; p < prompts + count; ++p) {
        const int64_t lanes = p->queries * (p->heads / p->kv_heads), own = divided_up(lanes, MOST_LANES);
        const int64_t parts = divided_up(own, most);
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t head = 0; head < p->kv_heads; ++head)
                tasks.push_back({p, head, own * part / parts * MOST_LANES,
                                 std::min(lanes, own * (part + 1) / parts * MOST_LANES)});
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work() > b.work(); });
    return tasks;
}

template <class Numbers>
void attend_all(const Prompt* prompts, int64_t count, int64_t threads) {
    const std::vector<Task> tasks = tasks_of(prompts, count, threads);
    const int64_t used = std::clamp<int64_t>(tasks.size(), 1, threads);
#pragma omp parallel num_threads(used) if (used > 1)
    {
        Worker<Numbers> worker(prompts->size, prompts->value_size);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size(); ++i) worker.run(tasks[i]);
    }
}

}  // namespace

// `count` prompts, each with a chunk and tensors of its own; their heads are of equal sizes.
EXPORT void looped_attend_float32(const Prompt* prompts, int64_t count, int64_t threads) {
    attend_all<Floats>(prompts, count, threads);
}

EXPORT void looped_attend_int16(const Prompt* prompts, int64_t count, int64_t threads) {
#if HAS_DOT_BYTES
    static const bool at_once = DotBytes::is_here();  // both came with VNNI
    if (at_once) return attend_all<PairsAtOnce>(prompts, count, threads);
#endif
    attend_all<PairsInTwo>(prompts, count, threads);
}

// Whether int16 is faster, with heads of 128; tried once in the life of a process.
EXPORT bool looped_attends_in_int16() {
    static const bool gains = [] {
        constexpr int64_t SIZE = 128, QUERIES = 2 * MOST_LANES, KEYS = 8 * BLOCK_KEYS;
        const std::vector<float> numbers(2 * KEYS * SIZE, 0.5f);
        std::vector<float> out(QUERIES * SIZE);
        Prompt prompt{};
        prompt.q = prompt.k = numbers.data(), prompt.v = prompt.k + KEYS * SIZE, prompt.out = out.data();
        prompt.queries = QUERIES, prompt.heads = prompt.kv_heads = 1, prompt.keys = KEYS;
        prompt.size = prompt.value_size = prompt.q_token = prompt.q_head = prompt.k_token = prompt.v_token = SIZE;
        prompt.scale = 1.0f / SIZE;
        double least[2] = {1.0, 1.0};
        for (int i = 0; i < 20; ++i) {
            const auto began = std::chrono::steady_clock::now();
            i % 2 ? looped_attend_int16(&prompt, 1, 1) : looped_attend_float32(&prompt, 1, 1);
            const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - began;
            least[i % 2] = std::min(least[i % 2], passed.count());
        }
        return least[1] < least[0];
    }();
    return gains;
}

}  // namespace looped
