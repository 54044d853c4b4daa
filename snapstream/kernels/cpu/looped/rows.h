// How numbers lie in rows, and attention of the query heads of one kv head over the visible slots of a row. Slots
// past a row's length are never read.
//
// A row is cut into parts of PART slots, so that few long rows keep many threads busy. A part is read twice, its keys
// and then its values, each number once from memory: it is widened in a register, where up to HEADS_AT_ONCE query
// heads use it; further heads find it in a near cache. Scales of slots multiply scores and probabilities, not
// numbers.
//
// Invariant: how a row is cut and in which order it is summed depends on its length alone, so a row's result is bitwise
// equal in any batch and on any number of threads.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "abi.h"
#include "simd.h"

namespace looped {

// -- formats, reference: ../../formats.py

// FP8 is e4m3fn. As fp16 its bits lie 7 higher and count 2^-8.
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
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7),
                                                 _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
#elif ISA == 256
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return (vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
#else
    vec out;
    for (int i = 0; i < W; ++i) out[i] = widen_fp8(from[i]) / FP8_UNIT;
    return out;
#endif
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
    // Widened by hand: of the conversion GCC 12 makes two halves.
#if ISA == 512
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#elif ISA == 256
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
    typedef uint16_t halves __attribute__((vector_size(W * 2)));
    halves own;
    std::memcpy(&own, from, sizeof own);
    return as_floats(__builtin_convertvector(own, bits) << 16);
#endif
}
inline uint16_t narrow_bf16(float x) {
    uint32_t number;
    std::memcpy(&number, &x, 4);
    if ((number & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN
    return (number + 0x7fffu + (number >> 16 & 1u)) >> 16;
}

inline float widen_half(const char* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
#if ISA
    return _cvtsh_ss(half);
#else
    const uint32_t moved = (half & 0x7fffu) << 13;
    float x;
    std::memcpy(&x, &moved, 4);
    if ((half & 0x7c00u) == 0x7c00u) return half & 0x3ffu ? NAN : (half & 0x8000u ? -INFINITY : INFINITY);
    x *= 0x1p112f;
    return half & 0x8000u ? -x : x;
#endif
}
// fp16, rounded to nearest even; finite numbers of at most 65504.
inline uint16_t narrow_half(float x) {
    uint32_t number;
    std::memcpy(&number, &x, 4);
    const uint32_t sign = (number >> 16) & 0x8000u;
    number &= 0x7fffffffu;
    if (number > 0x7f800000u) return 0x7e00;  // NaN
    if (number < (113u << 23)) return sign | static_cast<uint32_t>(std::lrintf(std::fabs(x) * 0x1p24f));  // below 2^-14
    number += 0xfffu + ((number >> 13) & 1u);
    return sign | ((number >> 13) - (112u << 10));
}

// x [size] by the Walsh-Hadamard matrix, block by block; `hadamard` of ../../formats.py adds in this order too.
inline void rotate_blocks(float* x, int64_t size) {
    const int64_t block = size & -size;
    for (int64_t half = 1; half < block; half *= 2)
        for (int64_t first = 0; first < size; first += 2 * half)
            for (int64_t i = first; i < first + half; ++i) {
                const float low = x[i], high = x[i + half];
                x[i] = low + high;
                x[i + half] = low - high;
            }
    const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
    for (int64_t i = 0; i < size; ++i) x[i] *= factor;
}

// Integers, of which a slot's largest magnitude is the largest code.
template <int... lane>
INLINE vec load_int4(const char* from, std::integer_sequence<int, lane...>) {
    uint32_t eight[2] = {};  // numbers each
    std::memcpy(eight, from, W / 2);
    const bits all_eight = {eight[lane / 8]...}, up = {static_cast<uint32_t>(28 - lane % 8 * 4)...};
    return __builtin_convertvector((ints)(all_eight << up) >> 28, vec);
}
// put(i, the code of number i); returns the scale: the largest magnitude over `levels`.
template <class Put>
inline float narrow_to_codes(const float* from, int64_t count, float levels, Put put) {
    float most = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float own = std::fabs(from[i]);
        if (own > most || own != own) most = own;
        if (most != most) break;
    }
    float scale = most / levels;
    if (scale < std::numeric_limits<float>::min()) scale = 0.0f;
    const float divisor = scale == 0.0f ? 1.0f : scale;
    const bool is_finite = std::isfinite(scale);
    for (int64_t i = 0; i < count; ++i) put(i, is_finite ? static_cast<int>(std::lrintf(from[i] / divisor)) : 0);
    return scale;
}

// A row format: how numbers are stored, and a scale per row and kv head or per slot and kv head, if it has scales.
//   at(token, e)               W numbers of a head from number e on, each a part of `unit` of what it stands for,
//                              without the scale of its slot or head
//   put(token, n, scale, to)   stores the n numbers of a slot; returns the slot's scale, if slots have one
//   at_part(token, e, part)    with PARTS of 2, those of 2 W numbers in even or in odd places, which are widened sooner
template <int64_t BITS>
struct RowOf {
    static constexpr bool has_slot_scales = false;
    static constexpr bool is_rotated = false;  // by rotate_blocks, before put and after at
    static constexpr float unit = 1.0f;
    static constexpr int PARTS = 1;
    static constexpr int64_t bytes(int64_t numbers) { return numbers * BITS / 8; }
};
struct RowF32 : RowOf<32> {
    static INLINE vec at(const char* token, int64_t e) {
        return load(reinterpret_cast<const float*>(token) + e);
    }
    static float put(const float* token, int64_t n, float, char* to) {
        std::memcpy(to, token, n * 4);
        return 1.0f;
    }
};
struct RowBF16 : RowOf<16> {
    static constexpr int PARTS = 2;
    static INLINE vec at_part(const char* token, int64_t e, int part) {
        const bits both = load_bits(token + 2 * e);
        return as_floats(part ? both & 0xffff0000u : both << 16);
    }
    static INLINE vec at(const char* token, int64_t e) {
        return load_bf16(reinterpret_cast<const uint16_t*>(token) + e);
    }
    static float put(const float* token, int64_t n, float, char* to) {
        for (int64_t i = 0; i < n; ++i) reinterpret_cast<uint16_t*>(to)[i] = narrow_bf16(token[i]);
        return 1.0f;
    }
};
struct RowFP8 : RowOf<8> {
    static constexpr float unit = FP8_UNIT;
    static INLINE vec at(const char* token, int64_t e) {
        return load_fp8(reinterpret_cast<const uint8_t*>(token) + e);
    }
    static float put(const float* token, int64_t n, float scale, char* to) {
        for (int64_t i = 0; i < n; ++i) reinterpret_cast<uint8_t*>(to)[i] = narrow_fp8(token[i], scale);
        return 1.0f;
    }
};
struct RowI8 : RowOf<8> {
    static constexpr bool has_slot_scales = true;
    static INLINE vec at(const char* token, int64_t e) {
        return __builtin_convertvector(load_bytes(token + e), vec);
    }
    static float put(const float* token, int64_t n, float, char* to) {
        return narrow_to_codes(token, n, 127.0f, [&](int64_t i, int code) { to[i] = static_cast<char>(code); });
    }
};
// Groups of 32 numbers: an fp16 scale, then the codes in two's complement, the first of two in the low half of a byte.
struct RowI4 : RowOf<4> {
    static constexpr bool is_rotated = true;
    static constexpr int64_t GROUP = 32, GROUP_BYTES = 2 + GROUP / 2;
    static constexpr int64_t bytes(int64_t numbers) { return numbers / GROUP * GROUP_BYTES; }
    static INLINE vec at(const char* token, int64_t e) {
        const char* group = token + e / GROUP * GROUP_BYTES;
        return load_int4(group + 2 + e % GROUP / 2, std::make_integer_sequence<int, W>{}) * all(widen_half(group));
    }
    static float put(const float* token, int64_t n, float, char* to) {
        for (int64_t first = 0; first < n; first += GROUP, to += GROUP_BYTES) put_group(token + first, to);
        return 1.0f;
    }
    static void put_group(const float* x, char* to) {
        float most = x[0], least = x[0];
        bool is_number = true;
        for (int i = 0; i < GROUP; ++i) {
            most = std::max(most, x[i]);
            least = std::min(least, x[i]);
            is_number = is_number && std::isfinite(x[i]);
        }
        const float first = (most >= -least ? most : least) / -8.0f;
        double weighted = 0.0, error = 0.0;
        for (int i = 0; i < GROUP; ++i) {
            int code = 0;
            if (is_number && first != 0.0f) {
                const float own = x[i] / first;
                code = static_cast<int>(std::lrintf(own < -8.0f ? -8.0f : (own > 7.0f ? 7.0f : own)));
            }
            const double number = x[i], both = number * code;
            weighted += both * number * number;
            error += both * both;
            to[2 + i / 2] = static_cast<char>(i % 2 ? to[2 + i / 2] | code << 4 : code & 15);
        }
        float scale = error == 0.0 ? 0.0f : static_cast<float>(weighted / error);
        scale = scale < -65504.0f ? -65504.0f : (scale > 65504.0f ? 65504.0f : scale);
        const uint16_t stored = narrow_half(is_number ? scale : std::numeric_limits<float>::quiet_NaN());
        std::memcpy(to, &stored, 2);
    }
};

// use(the struct of `format`); a new row format is a struct and a line here.
template <class Use>
INLINE auto with_row_format(int64_t format, Use use) {
    switch (format) {
        case BF16: return use(RowBF16{});
        case FP8: return use(RowFP8{});
        case I8: return use(RowI8{});
        case I4: return use(RowI4{});
        default: return use(RowF32{});
    }
}

// The first `count` of W numbers from number e on, zeros after them. A head of groups ends with a whole vector.
template <class Form>
INLINE vec some_at(const char* token, int64_t e, int64_t count) {
    if constexpr (Form::is_rotated) return vec{};
    else {
        char own[Form::bytes(W)] = {};
        std::memcpy(own, token + Form::bytes(e), Form::bytes(count));
        return Form::at(own, 0);
    }
}

struct RowForm {
    int64_t format;
    int64_t bytes(int64_t numbers) const {
        return with_row_format(format, [&](auto form) { return form.bytes(numbers); });
    }
    bool has_slot_scales() const { return with_row_format(format, [](auto form) { return form.has_slot_scales; }); }
    bool is_rotated() const { return with_row_format(format, [](auto form) { return form.is_rotated; }); }
    float unit() const { return with_row_format(format, [](auto form) { return form.unit; }); }
    float put(const float* token, int64_t n, float scale, char* to) const {
        return with_row_format(format, [&](auto form) { return form.put(token, n, scale, to); });
    }
    // Numbers as fp32, without their scales; in `buffer` unless they are stored so.
    const float* widened(const char* from, int64_t count, float* buffer) const {
        return with_row_format(format, [&]<class Form>(Form) -> const float* {
            if constexpr (std::is_same_v<Form, RowF32>) return reinterpret_cast<const float*>(from);
            int64_t i = 0;
            for (; i + W <= count; i += W) store(buffer + i, Form::at(from, i) * Form::unit);
            const vec rest = some_at<Form>(from, i, count - i) * Form::unit;
            std::memcpy(buffer + i, &rest, (count - i) * 4);
            return buffer;
        });
    }
};

struct StoredHead {  // keys and values of one kv head of a row, and the scales of its slots or null
    RowForm key_form, value_form;
    int64_t head_dim;
    char *keys, *values;
    float *key_scales, *value_scales;

    // A token to a slot; scale: of the head, if it has one.
    void put_key(const float* token, int64_t slot, float scale) const {
        const float own = key_form.put(token, head_dim, scale, keys + key_form.bytes(slot * head_dim));
        if (key_scales) key_scales[slot] = own;
    }
    void put_value(const float* token, int64_t slot, float scale) const {
        const float own = value_form.put(token, head_dim, scale, values + value_form.bytes(slot * head_dim));
        if (value_scales) value_scales[slot] = own;
    }
};

// -- attention

constexpr int64_t PART = 1024;                         // slots
constexpr int64_t SCORE_LINE = PART + 16;              // so that lines of several heads do not share places of a cache
constexpr int64_t BLOCK_BYTES = 16384;                 // of keys or values, which all heads use while they are near
constexpr int64_t ROW_AHEAD = 8192;                    // bytes
constexpr int HEADS_AT_ONCE = W == 16 ? 4 : W == 8 ? 3 : 2;  // for which there are registers
constexpr int SLOTS_AT_ONCE = 4, COLUMNS_AT_ONCE = 4;  // vectors of different slots; of one slot

// -- one part of a row

struct Part {  // largest score and sum of shares of each query head, and what it has mixed [heads][E]
    float *peak, *total, *mixed;
};

// Two vectors become one: sums of neighbouring units of the first, then of the second. A unit is a block of four
// lanes, or it is a lane, and that in each block.
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

// sums [R][N] += heads(r) * stored(i).
template <int R, int N, class Heads, class Stored>
INLINE void multiply_all(vec (&sums)[R][N], Heads heads, Stored stored) {
    if constexpr (W == 8 && R == 3) {  // all registers: a stored vector lives for three products
        vec x[R];
        UNROLL for (int r = 0; r < R; ++r) x[r] = heads(r);
        UNROLL for (int i = 0; i < N; ++i) {
            const vec own = stored(i);
            UNROLL for (int r = 0; r < R; ++r) sums[r][i] += x[r] * own;
        }
    } else {
        vec own[N];
        UNROLL for (int i = 0; i < N; ++i) own[i] = stored(i);
        UNROLL for (int r = 0; r < R; ++r) {
            const vec x = heads(r);
            UNROLL for (int i = 0; i < N; ++i) sums[r][i] += x * own[i];
        }
    }
}

// q [R, E] times keys [n, E], and times the scales [n] of slots if they have them: scores [R][SCORE_LINE], -infinity up
// to a multiple of W; most [R][W]: the largest of each lane so far.
template <class Form, int R>
void score(const float* q, const char* keys, const float* scales, int64_t n, int64_t head_dim, float* scores,
           float* most) {
    constexpr int PARTS = Form::PARTS;
    const int64_t token = Form::bytes(head_dim), whole = head_dim / (PARTS * W) * (PARTS * W);
    for (int64_t first = 0; first < n; first += W) {
        const int64_t left = n - first;
        const char* ahead = keys + first * token + ROW_AHEAD;
        const char* const behind = ahead + W * token;
        vec sums[R][4];
        for (int group = 0; group < BLOCKS; ++group) {
            const char* key[SLOTS_AT_ONCE];
            UNROLL for (int k = 0; k < SLOTS_AT_ONCE; ++k)
                key[k] = keys + (first + std::min<int64_t>(slot_of(group, k), left - 1)) * token;
            vec acc[R][SLOTS_AT_ONCE] = {};
            for (int64_t e = 0; e < whole; e += PARTS * W) {
                // a few lines at a time: while many are asked for at once, nothing is computed
                for (int i = 0; i < Form::bytes(SLOTS_AT_ONCE * PARTS * W) && ahead < behind; i += 64, ahead += 64)
                    __builtin_prefetch(ahead);
                UNROLL for (int part = 0; part < PARTS; ++part) {
                    int64_t at = e;
                    if constexpr (PARTS > 1 && W == 8) asm volatile("" : "+r"(at));  // loads again, for want of registers
                    const auto number = [&](int k) {
                        if constexpr (PARTS > 1) return Form::at_part(key[k], at, part);
                        else return Form::at(key[k], at);
                    };
                    const auto query = [&](int r) { return load(q + r * head_dim + at + part * W); };
                    multiply_all<R, SLOTS_AT_ONCE>(acc, query, number);
                }
            }
            for (int64_t e = whole; e < head_dim; e += W) {
                const int64_t count = std::min<int64_t>(W, head_dim - e);
                UNROLL for (int k = 0; k < SLOTS_AT_ONCE; ++k) {
                    const vec own = some_at<Form>(key[k], e, count);
                    UNROLL for (int r = 0; r < R; ++r) acc[r][k] += load_some(q + r * head_dim + e, count) * own;
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

// Scores [n] of a head, -infinity up to a multiple of W, to cap * tanh(score / cap); returns the largest.
inline float cap_scores(float* scores, int64_t n, float cap) {
    vec most = all(-std::numeric_limits<float>::infinity());
    const vec lowest = all(std::numeric_limits<float>::lowest());
    for (int64_t j = 0; j < n; j += W) {
        const vec given = load(scores + j), own = given < lowest ? given : cap * hyperbolic_tangent(given / cap);
        store(scores + j, own);
        most = own > most ? own : most;
    }
    return max_of(most);
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

// COLUMNS vectors of mixed [R, E] from number e on, `count` numbers in the last, += shares [R][SCORE_LINE] times those
// of values [n, E].
template <class Form, int R, int COLUMNS>
INLINE void mix_columns(const float* shares, const char* values, int64_t e, int64_t n, int64_t head_dim, float* mixed,
                        int64_t count) {
    const int64_t token = Form::bytes(head_dim);
    const auto read = [&](int v) {
        if constexpr (Form::PARTS > 1 && COLUMNS > 1) return Form::at_part(values, e + v / 2 * 2 * W, v % 2);
        return count < W ? some_at<Form>(values, e + v * W, count) : Form::at(values, e + v * W);
    };
    mixed += e;
    vec acc[R][COLUMNS];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < COLUMNS; ++v) acc[r][v] = load_some(mixed + r * head_dim + v * W, count);
    for (int64_t j = 0; j < n; ++j, values += token) {
        for (int i = 0; i < Form::bytes(COLUMNS * W); i += 64)  // one to four turns
            __builtin_prefetch(values + Form::bytes(e) + ROW_AHEAD + i);
        multiply_all<R, COLUMNS>(acc, [&](int r) { return all(shares[r * SCORE_LINE + j]); }, read);
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
    int64_t e = 0;
    for (; e + COLUMNS_AT_ONCE * W <= head_dim; e += COLUMNS_AT_ONCE * W)
        mix_columns<Form, R, COLUMNS_AT_ONCE>(shares, values, e, n, head_dim, mixed, W);
    for (; e + 2 * W <= head_dim; e += 2 * W) mix_columns<Form, R, 2>(shares, values, e, n, head_dim, mixed, W);
    if (e + W <= head_dim) mix_columns<Form, R, 1>(shares, values, e, n, head_dim, mixed, W), e += W;
    if (e < head_dim) mix_columns<Form, R, 1>(shares, values, e, n, head_dim, mixed, head_dim - e);
}

// Numbers in even places before those in odd ones, in blocks of 2 W, or back; behind whole blocks as they are.
template <bool BACK>
INLINE void take_apart(float* x, int64_t size) {
    for (; size >= 2 * W; size -= 2 * W, x += 2 * W) {
        float own[2 * W];
        std::memcpy(own, x, sizeof own);
        for (int i = 0; i < W; ++i) {
            x[BACK ? 2 * i : i] = own[BACK ? i : 2 * i];
            x[BACK ? 2 * i + 1 : W + i] = own[BACK ? W + i : 2 * i + 1];
        }
    }
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
            if (HEADS_AT_ONCE == 3 || count == 3) use.template operator()<3>(first);
            else use.template operator()<HEADS_AT_ONCE>(first);
        }
    }
}

// Slots [begin, end) of one kv head for its `group` query heads q [group, E], which are scaled already and may change
// their order; scores are capped unless `cap` is 0. scratch: attend_scratch.
template <class Keys, class Values>
void attend_part(float* q, const StoredHead& stored, int64_t begin, int64_t end, int64_t group, float cap,
                 const Part& part, float* scratch) {
    const int64_t size = stored.head_dim, key = Keys::bytes(size), value = Values::bytes(size), n = end - begin;
    const auto block_of = [](int64_t token) { return std::max<int64_t>(W, BLOCK_BYTES / token / W * W); };
    const int64_t key_block = block_of(key), value_block = block_of(value);
    const char *keys = stored.keys + begin * key, *values = stored.values + begin * value;
    float *scores = scratch, *most = scratch + group * SCORE_LINE;
    const auto scales = [&](const float* all, int64_t first) { return all ? all + begin + first : nullptr; };
    std::fill(most, most + group * W, -std::numeric_limits<float>::infinity());
    for (int64_t r = 0; Keys::PARTS > 1 && r < group; ++r) take_apart<false>(q + r * size, size);
    for (int64_t first = 0; first < n; first += key_block)
        for_heads(group, [&]<int R>(int64_t head) {
            score<Keys, R>(q + head * size, keys + first * key, scales(stored.key_scales, first),
                           std::min(key_block, n - first), size, scores + head * SCORE_LINE + first, most + head * W);
        });
    for (int64_t r = 0; r < group; ++r) {
        part.peak[r] = cap == 0.0f ? max_of(load(most + r * W)) : cap_scores(scores + r * SCORE_LINE, n, cap);
        soften(scores + r * SCORE_LINE, n, scales(stored.value_scales, 0), part.peak[r], part.total[r]);
    }
    std::fill(part.mixed, part.mixed + group * size, 0.0f);
    for (int64_t first = 0; first < n; first += value_block)
        for_heads(group, [&]<int R>(int64_t head) {
            mix<Values, R>(scores + head * SCORE_LINE + first, values + first * value,
                           std::min(value_block, n - first), size, part.mixed + head * size);
        });
    for (int64_t r = 0; Values::PARTS > 1 && r < group; ++r) take_apart<true>(part.mixed + r * size, size);
}

using AttendPart = void (*)(float*, const StoredHead&, int64_t, int64_t, int64_t, float, const Part&, float*);

inline AttendPart attend_part_of(const StoredHead& stored) {
    if (stored.key_form.format == I8 && stored.value_form.format == I4) return attend_part<RowI8, RowI4>;
    return with_row_format(stored.key_form.format,
                           []<class Form>(Form) -> AttendPart { return attend_part<Form, Form>; });
}

inline int64_t attend_scratch(int64_t group) { return group * (SCORE_LINE + 16); }

// Parts in their order, `count` of them that lie one after the other from `parts` on; out [group, E]. sinks [group]:
// logits that count in the denominators alone, or null.
inline void merge_parts(const Part& parts, int64_t count, int64_t group, int64_t head_dim, float scale,
                        const float* sinks, float* out) {
    for (int64_t r = 0; r < group; ++r) {
        float peak = parts.peak[r], total = 0.0f;
        for (int64_t i = 1; i < count; ++i) peak = std::max(peak, parts.peak[i * group + r]);
        if (sinks && sinks[r] > peak) peak = sinks[r];
        if (sinks) total = exponential(all(sinks[r] - peak))[0];
        float* own = out + r * head_dim;
        std::fill(own, own + head_dim, 0.0f);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t place = i * group + r;
            const float share = count == 1 && !sinks ? 1.0f : exponential(all(parts.peak[place] - peak))[0];
            total += parts.total[place] * share;
            for (int64_t e = 0; e < head_dim; ++e) own[e] += parts.mixed[place * head_dim + e] * share;
        }
        const float factor = scale / total;
        for (int64_t e = 0; e < head_dim; ++e) own[e] *= factor;
    }
}

}  // namespace looped
