// How a matrix lies in memory, and the product of packed tokens with it.
//
// A panel is 32 rows. Within it columns follow each other, some of them to a unit in which each row has its own numbers
// side by side:
//
//   fp32, fp16   a column to a unit
//   bf16         two: the first in the lower, the second in the upper half of 32 bits
//   fp8          a column, in bytes; its scales lie apart (products_fp8.cpp)
//   int8         four to 32 bits, the first in the lowest byte, each stored plus 128
//   int4         eight: byte b has column b in its lower and column 4 + b in its upper half, each stored plus 8
//   five bits    32: the lower four bits as int4, eight columns after eight, then the fifth, byte b those of columns b,
//                4 + b, ... from its lowest bit on
//   six bits     sixteen, in the same way, two bits of each column in the last 32
//   two bits     sixteen: byte b has column b in its lowest bits, then columns 4 + b, 8 + b and 12 + b
//
// so a vector of the weight holds rows, a token's number is broadcast, and no sum crosses lanes. Quantized columns come
// in groups, each headed by the 32 scales in fp16: a number is (stored - offset) * scale, exact in fp32. MXFP4 lies as
// int4, a code is a sign and one of eight magnitudes, and the scales are bytes, the exponents of powers of two. uint4
// lies as int4; behind the scales are as many minimums, and a number is stored * scale + minimum. K-quants have 256
// columns to a group, of which 16 or 32 share a scale, and so have types whose codes are places in a table: see Blocks.
//
// Invariant: the sum of an output is taken over columns from first to last, in one chain of multiply-adds, whatever the
// number of tokens, so products are batch-invariant.
#pragma once
#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "simd.h"

namespace looped {

constexpr int VECS = PANEL / W;  // vectors of 32 rows

inline int64_t panels_of(const Stack& stack) { return (stack.rows + PANEL - 1) / PANEL; }
inline int64_t padded(int64_t cols) { return (cols + ALIGN_K - 1) / ALIGN_K * ALIGN_K; }

// What the forms below have in common: COLS columns and BYTES of a unit, HEAD bytes before the units of a group;
// IS_QUICK where it is cheaper to widen numbers for each of two tiles than once to memory; scale(head, v): what the
// group says of vector v of rows; stored(unit, v): what lies there; widen(stored, c, scale): the numbers of column c of
// the unit.
struct NoScale {};

struct PlainF32 {
    static constexpr int COLS = 1, BYTES = 128, HEAD = 0;
    static constexpr bool IS_QUICK = true;
    static INLINE NoScale scale(const char*, int) { return {}; }
    static INLINE vec stored(const char* unit, int v) { return load(reinterpret_cast<const float*>(unit) + v * W); }
    static INLINE vec widen(vec stored, int, NoScale) { return stored; }
};

struct PairsBF16 {
    static constexpr int COLS = 2, BYTES = 128, HEAD = 0;
    static constexpr bool IS_QUICK = true;
    static INLINE NoScale scale(const char*, int) { return {}; }
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
    static INLINE vec widen(bits both, int c, NoScale) { return as_floats(c ? both & 0xffff0000u : both << 16); }
    static INLINE vec widen_without_mask(bits both, int c) {  // where a mask would take the register that is left
#if ISA == 256
        if (c) asm("vpsrld $16, %0, %0" : "+x"(both));
#endif
        return as_floats(both << 16);
    }
};

struct HalfF16 {
    static constexpr int COLS = 1, BYTES = 64, HEAD = 0;
    static constexpr bool IS_QUICK = true;
    static INLINE NoScale scale(const char*, int) { return {}; }
    static INLINE vec stored(const char* unit, int v) {
        return load_half(reinterpret_cast<const uint16_t*>(unit) + v * W);
    }
    static INLINE vec widen(vec stored, int, NoScale) { return stored; }
};

// A code is moved to the upper end of 32 bits, where its sign is theirs; the power of two is in the scale. Of four bits
// AVX-512 looks the number up instead.
template <int OWN_BITS>
struct Codes {
    static constexpr int BITS = OWN_BITS, COLS = 32 / BITS, BYTES = 128, HEAD = 2 * PANEL;
    static constexpr bool IS_QUICK = false, HAS_MINIMUM = false;
    static constexpr bool LOOKS_UP = ISA == 512 && BITS == 4;
    static INLINE vec scale(const char* head, int v) {
        const float factor = LOOKS_UP ? 1.0f : 1.0f / (1u << (32 - BITS));
        return load_half(reinterpret_cast<const uint16_t*>(head) + v * W) * factor;
    }
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
    static INLINE vec widen(bits codes, int c, vec scale) {
        return number(codes, BITS == 8 ? c : c % 4 * 2 + c / 4) * scale;
    }
    static INLINE vec number(bits codes, int place) {
#if ISA == 512
        if constexpr (LOOKS_UP) {
            const vec numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
            return (vec)_mm512_permutexvar_ps((__m512i)(codes >> (4 * place)), (__m512)numbers);
        }
#endif
        const bits sign = all_bits(0x80000000u);
        const bits moved = (codes << (32 - BITS - BITS * place)) & all_bits(BITS == 8 ? 0xff000000u : 0xf0000000u);
        return __builtin_convertvector((ints)(moved ^ sign), vec);
    }
};

// Codes of blocks, as vectors of four columns each, a byte to a column.
struct Nibbles {
    static constexpr int BITS = 4, COLS = 8, BYTES = 128, OFFSET = 0;
    static constexpr bool IS_SPLIT = false;
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
    static INLINE bits four(bits own, int part) { return (own >> (4 * part)) & 0x0f0f0f0fu; }
};
struct Crumbs {
    static constexpr int BITS = 2, COLS = 16, BYTES = 128, OFFSET = 0;
    static constexpr bool IS_SPLIT = false;
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
    static INLINE bits four(bits own, int part) { return (own >> (2 * part)) & 0x03030303u; }
};

// A third bit lies apart, in half a word: of the bytes of parts that of columns 2 and 3 above that of columns 0 and 1.
struct Crumbs3 {
    static constexpr int BITS = 3, COLS = 16, BYTES = 192, OFFSET = 4;
    static constexpr bool IS_SPLIT = true;
    struct Unit {
        bits low, high;
    };
    static INLINE Unit stored(const char* unit, int v) {
        const bits high = load_halves(unit + 128 + v * W * 2);
        return {load_bits(unit + v * W * 4), high << 2 | high << 14};
    }
    static INLINE bits four(const Unit& own, int part) {
        return ((own.low >> (2 * part)) & 0x03030303u) | ((own.high >> part) & 0x04040404u);
    }
};

template <int HIGH, int OWN_OFFSET>  // HIGH: bits above the lower four
struct SplitCodes {
    static constexpr int BITS = 4 + HIGH, COLS = 32 / HIGH, OFFSET = OWN_OFFSET;
    static constexpr int LOWS = COLS / 8, BYTES = 128 * (LOWS + 1);
    static constexpr bool IS_SPLIT = true;
    struct Unit {
        bits low[LOWS], high;
    };
    static INLINE Unit stored(const char* unit, int v) {
        Unit own;
        unit += v * W * 4;
        UNROLL for (int i = 0; i < LOWS; ++i) own.low[i] = load_bits(unit + i * 128);
        own.high = load_bits(unit + LOWS * 128);
        return own;
    }
    static INLINE bits four(const Unit& own, int part) {
        const int place = HIGH * part;
        const bits high = place < 4 ? own.high << (4 - place) : own.high >> (place - 4);
        const bits low = (own.low[part / 2] >> (4 * (part % 2))) & 0x0f0f0f0fu;
        return low | (high & (HIGH == 1 ? 0x10101010u : 0x30303030u));
    }
};

// Bytes of `own` as places in a table of sixteen.
INLINE bits look_up(const uint8_t* table, bits own) {
#if ISA == 512
    const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return (bits)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(line), (__m512i)own);
#elif ISA == 256
    const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return (bits)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(line), (__m256i)own);
#else
    typedef uint8_t bytes __attribute__((vector_size(W * 4)));
    const bytes places = (bytes)own;
    bytes found;
    for (int i = 0; i < W * 4; ++i) found[i] = table[places[i]];
    return (bits)found;
#endif
}

// What codes of four bits stand for: a number plus 128, times `unit`.
struct Table {
    alignas(16) uint8_t numbers[16];
    float unit;
};
inline const Table& table_of(int64_t format) {
    static constexpr Table TWO{{85, 103, 120, 136, 153, 171}, 1.0f / 8};
    static constexpr Table THREE_XXS{{66, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 190}, 1.0f / 4};
    static constexpr Table THREE_S{{113, 115, 117, 119, 121, 123, 125, 127, 129, 131, 133, 135, 137, 139, 141, 143}, 1};
    static constexpr Table FOUR{{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}, 1};
    switch (format) {
        case IQ3XXS: return THREE_XXS;
        case IQ3S: return THREE_S;
        case IQ4XS: return FOUR;
        default: return TWO;
    }
}

struct Places : Nibbles {  // in a table
    static constexpr int OFFSET = 128;
    explicit Places(const Stack& stack) : table(table_of(stack.format)) {}
    INLINE bits four(bits own, int part) const { return look_up(table.numbers, Nibbles::four(own, part)); }
    const Table& table;
};

// K-quants and IQ types of GGUF files, with their own integers. The head of 256 columns has an fp16 factor of each row, with
// MINIMUM a second one, and then a signed byte per row and OWN_GROUP columns, 32 rows after 32: times the first factor it
// is their scale. As many bytes times the second factor are minimums: number = (stored - offset) * scale + minimum. PACKED:
// both are one byte, the scale its lower four bits.
template <class Own, int OWN_GROUP, bool MINIMUM, bool PACKED = false>
struct Blocks : Own {
    using Own::Own;
    static constexpr int BLOCK = 256, GROUP = OWN_GROUP, SUBS = BLOCK / GROUP;
    static constexpr int FACTORS = 2 * PANEL * (1 + MINIMUM), HEAD = FACTORS + SUBS * PANEL * (1 + (MINIMUM && !PACKED));
    static constexpr bool IS_QUICK = false, HAS_MINIMUM = MINIMUM;
    struct Line {
        vec factor, minimum;
    };
    INLINE Line factors(const char* head, int v) const {
        const auto* own = reinterpret_cast<const uint16_t*>(head) + v * W;
        Line line{load_half(own), {}};
        if constexpr (requires { this->table; }) line.factor *= this->table.unit;
        if constexpr (MINIMUM) line.minimum = load_half(own + PANEL);
        return line;
    }
    INLINE Line scale(const Line& factors, const char* head, int v, int sub) const {
        const auto number = [&](int at) { return load_bytes(head + FACTORS + at * PANEL + v * W); };
        const auto times = [](vec factor, ints number) { return factor * __builtin_convertvector(number, vec); };
        const ints own = number(sub);
        if constexpr (PACKED) return {times(factors.factor, own & 15), times(factors.minimum, (own >> 4) & 15)};
        else if constexpr (MINIMUM) return {times(factors.factor, own), times(factors.minimum, number(SUBS + sub))};
        else return Line{times(factors.factor, own), vec{}};
    }
    INLINE Line scale(const char* head, int v, int sub) const { return scale(factors(head, v), head, v, sub); }
    template <class Unit>
    INLINE vec widen(const Unit& own, int c, Line line) const {
        const ints code = (ints)((this->four(own, c / 4) >> (8 * (c % 4))) & 255u) - Own::OFFSET;
        const vec number = __builtin_convertvector(code, vec) * line.factor;
        if constexpr (MINIMUM) return number + line.minimum;
        else return number;
    }
};
using BlocksQ2 = Blocks<Crumbs, 16, true, true>;
using BlocksQ3 = Blocks<Crumbs3, 16, false>;
using BlocksQ4 = Blocks<Nibbles, 32, true>;
using BlocksQ5 = Blocks<SplitCodes<1, 0>, 32, true>;
using BlocksQ6 = Blocks<SplitCodes<2, 32>, 16, false>;
using Places16 = Blocks<Places, 16, false>;
using Places32 = Blocks<Places, 32, false>;

// Into how many parts with a scale each the columns behind a head fall.
template <class Form>
constexpr int SUBS = 1;
template <class Own, int GROUP, bool MINIMUM, bool PACKED>
constexpr int SUBS<Blocks<Own, GROUP, MINIMUM, PACKED>> = Blocks<Own, GROUP, MINIMUM, PACKED>::SUBS;

template <class Form>
INLINE Form form_of(const Stack& stack) {
    if constexpr (std::is_constructible_v<Form, const Stack&>) return Form(stack);
    else return {};
}
template <class Form>
INLINE auto scale_of(const Form& form, const char* head, int v, int sub) {
    if constexpr (SUBS<Form> > 1) return form.scale(head, v, sub);
    else return form.scale(head, v);
}

// Its numbers are exact products of code and scale, rounded once where the minimum is added.
struct Unsigned4 {
    static constexpr int BITS = 4, COLS = 8, BYTES = 128, HEAD = 4 * PANEL;
    static constexpr bool IS_QUICK = false, HAS_MINIMUM = true;
    struct Line {
        vec factor, minimum;
    };
    static INLINE Line scale(const char* head, int v) {
        const auto* from = reinterpret_cast<const uint16_t*>(head) + v * W;
        return {load_half(from), load_half(from + PANEL)};
    }
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
    static INLINE vec widen(bits codes, int c, Line line) {
        return number(codes >> (4 * (c % 4 * 2 + c / 4))) * line.factor + line.minimum;
    }

  private:
    static INLINE vec number(bits codes) {
#if ISA == 512
        const vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return (vec)_mm512_permutexvar_ps((__m512i)codes, (__m512)numbers);
#else
        return __builtin_convertvector((ints)(codes & all_bits(15)), vec);
#endif
    }
};

// The eight bits of a scale are the exponent of a float. Of a code the first three bits choose a magnitude.
struct Mxfp4 {
    static constexpr int BITS = 4, COLS = 8, BYTES = 128, HEAD = PANEL;
    static constexpr bool IS_QUICK = false, HAS_MINIMUM = false;
    static INLINE vec scale(const char* head, int v) { return power(head, v) * (LOOKS_UP ? 1.0f : 0.5f); }
    static INLINE vec power(const char* head, int v) {  // of two
        const bits exponent = (bits)load_bytes(head + v * W) & 255u;
        const bits least = exponent == all_bits(0) ? all_bits(0x400000u) : all_bits(0);  // 2^-127 is subnormal
        return as_floats(exponent << 23 | least);
    }
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
    static INLINE vec widen(bits codes, int c, vec scale) { return number(codes, c % 4 * 2 + c / 4) * scale; }
    // Of four codes, a byte each: twice the numbers plus ZERO, and what multiplies them.
    static constexpr int ZERO = 12;
    static INLINE bits integers(bits codes) { return look_up(INTEGERS, codes); }

  private:
    alignas(16) static constexpr uint8_t INTEGERS[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    static constexpr bool LOOKS_UP = ISA == 512 || ISA == 256;
    static INLINE vec number(bits codes, int place) {  // twice that where it is not looked up
#if ISA == 512
        const vec numbers = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
        return (vec)_mm512_permutexvar_ps((__m512i)(codes >> (4 * place)), (__m512)numbers);
#else
        const bits sign = (codes << (28 - 4 * place)) & all_bits(0x80000000u);
#if ISA == 256
        const vec numbers = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        const vec found = (vec)_mm256_permutevar8x32_ps((__m256)numbers, (__m256i)(codes >> (4 * place)));
#else
        const bits code = (codes >> (4 * place)) & all_bits(7), exponent = code >> 1, fraction = code & all_bits(1);
        const bits normal = exponent == all_bits(0) ? all_bits(0) : all_bits(1);
        const vec found = __builtin_convertvector((ints)((fraction + 2 * normal) << (exponent - normal)), vec);
#endif
        return as_floats((bits)found | sign);
#endif
    }
};

template <class Form>
INLINE int64_t group_cols(const Stack& stack) {  // behind a head
    if constexpr (SUBS<Form> > 1) return Form::BLOCK;
    return Form::HEAD ? stack.group : padded(stack.cols);
}
template <class Form>
INLINE int64_t group_bytes(const Stack& stack) {
    return Form::HEAD + group_cols<Form>(stack) / Form::COLS * Form::BYTES;
}

// Where column `col` of a panel begins: the first of a group, or with plain numbers of a unit.
template <class Form>
INLINE int64_t offset(const Stack& stack, int64_t col) {
    return Form::HEAD ? col / group_cols<Form>(stack) * group_bytes<Form>(stack) : col / Form::COLS * Form::BYTES;
}

// Calls use(numbers, column) for vector v of rows of `cols` columns from `from` on.
template <class Form, class Use>
INLINE void for_units(const Stack& stack, const char* from, int64_t cols, int v, Use use) {
    const auto form = form_of<Form>(stack);
    const int64_t group = std::min(group_cols<Form>(stack), cols);
    for (int64_t col = 0; col < cols;) {
        const char* head = from;
        from += Form::HEAD;
        for (int sub = 0; sub < SUBS<Form>; ++sub) {
            const auto scale = scale_of(form, head, v, sub);
            for (const int64_t end = col + group / SUBS<Form>; col < end; col += Form::COLS, from += Form::BYTES) {
                const auto stored = Form::stored(from, v);
                UNROLL for (int c = 0; c < Form::COLS; ++c) use(form.widen(stored, c, scale), col + c);
            }
        }
    }
}

// use<its form>() for a matrix of `format`, FP8 blocks excepted; a new format is a form and a line here.
template <class Use>
INLINE auto with_form(int64_t format, Use use) {
    switch (format) {
        case BF16: return use.template operator()<PairsBF16>();
        case F16: return use.template operator()<HalfF16>();
        case I8: return use.template operator()<Codes<8>>();
        case I4: return use.template operator()<Codes<4>>();
        case MXFP4: return use.template operator()<Mxfp4>();
        case U4: return use.template operator()<Unsigned4>();
        case Q2K: return use.template operator()<BlocksQ2>();
        case Q3K: return use.template operator()<BlocksQ3>();
        case Q4K: return use.template operator()<BlocksQ4>();
        case Q5K: return use.template operator()<BlocksQ5>();
        case Q6K: return use.template operator()<BlocksQ6>();
        case IQ2XS: case IQ2S: return use.template operator()<Places16>();
        case IQ2XXS: case IQ3XXS: case IQ3S: case IQ4XS: return use.template operator()<Places32>();
        default: return use.template operator()<PlainF32>();
    }
}

// A row of a matrix as fp32: of an embedding table.
inline void copy_row(const Stack& table, int64_t row, float* out) {
    const char* panel = table.data + row / PANEL * table.panel_bytes;
    const int lane = row % PANEL;
    with_form(table.format, [&]<class Form>() {
        for_units<Form>(table, panel, padded(table.cols), lane / W, [&](vec numbers, int64_t col) {
            if (col < table.cols) out[col] = numbers[lane % W];
        });
    });
}

// -- products

#if ISA == 512
constexpr int MOST = 12;  // tokens of a tile
#else
constexpr int MOST = 6;
#endif
// Vectors of rows that a tile takes at a time: as many as there are registers for their sums.
constexpr int wide(int tokens) { return W == 8 && tokens > 2 ? 2 : VECS < 4 ? VECS : 4; }
constexpr int64_t BLOCK_K = 128;  // columns after which a tile lets the next tokens have the same weights
constexpr int64_t AHEAD = 4096;   // bytes
constexpr int FEW = 4;            // fewer tokens are multiplied as fast as weights arrive
// Bytes ahead that a tile asks for. Many tokens need them later: in the second cache, where more may wait, and then NEAR
// ahead in the first.
constexpr int64_t NEAR = 1024;
constexpr int64_t ahead_of(int64_t tokens) { return tokens < FEW ? AHEAD : 2 * AHEAD; }

// Tokens are packed in groups of nearly equal size: [group][column][token of the group].
struct Groups {
    explicit Groups(int64_t tokens, const char* next = nullptr, int64_t apart = 0, int64_t most = MOST)
        : tokens(tokens), count((tokens + most - 1) / most), next(next), apart(apart) {}
    int64_t begin(int64_t group) const { return tokens * group / count; }
    int64_t size(int64_t group) const { return begin(group + 1) - begin(group); }
    int64_t of(int64_t token) const {
        int64_t group = token * count / tokens;
        while (begin(group + 1) <= token) ++group;
        while (begin(group) > token) --group;
        return group;
    }
    int64_t tokens, count;
    const char* next;  // the panels that are multiplied after these ones; null: those behind them
    int64_t apart;     // bytes from one panel to the other that is multiplied with it; 0: they lie side by side
};

// A token among packed ones. To go from one to the next is much cheaper than to find one.
class Place {
  public:
    Place(const Groups& groups, int64_t token) : groups_(groups), group_(groups.of(token)) {
        enter();
        at = token - begin;
    }
    void next() {
        if (++at < size) return;
        ++group_;
        enter();
    }
    int64_t begin, size, at;  // of its group the first token, and how many; its number among them

  private:
    void enter() { begin = groups_.begin(group_), size = groups_.size(group_), at = 0; }
    Groups groups_;
    int64_t group_;
};

// Where the numbers of a token lie in packed activations: one every `stride`.
struct Packed {
    Packed(float* base, const Place& place, int64_t cols)
        : to(base + place.begin * padded(cols) + place.at), stride(place.size) {}
    Packed(float* base, const Groups& groups, int64_t token, int64_t cols) : Packed(base, Place(groups, token), cols) {}
    void put(int64_t col, float x) const { to[col * stride] = x; }
    void end(int64_t cols) const {
        for (int64_t col = cols; col < padded(cols); ++col) put(col, 0.0f);
    }
    float* to;
    int64_t stride;
};

// What of the memory behind the weights in work is asked for meanwhile: `step` bytes per unit from `from` on, at most
// so many LINES of 64, and `head` bytes per scale.
struct Prefetch {
    const char* from;
    int64_t step, apart = 0;  // apart: from one panel to the other that is multiplied with it
    int64_t head = 0;
    // Of each of P panels.
    template <int P, int LINES, int T>
    INLINE void ask(int64_t bytes) {
        UNROLL for (int p = 0; p < P; ++p)
            UNROLL for (int i = 0; i < LINES; ++i) {
                const char* line = from + p * apart + i * 64;
                __builtin_prefetch(line, 0, T < FEW ? 3 : 2);
                if (T >= FEW) __builtin_prefetch(line - ahead_of(T) + NEAR, 0, 3);
            }
        from += bytes;
    }
};

// Bytes of a head for each of its scales, and their lines.
template <class Form>
constexpr int HEAD_SHARE = Form::HEAD / SUBS<Form>;
template <class Form>
constexpr int HEAD_LINES = (HEAD_SHARE<Form> + 63) / 64;

// A tile of part of a panel has company at its block.
template <class Form>
constexpr int lines_of(int tokens) { return wide(tokens) == VECS ? (Form::BYTES + 63) / 64 : 1; }

// `cols` columns of so many vectors of rows, from vector v on, times T tokens, added to sums [P][T][32]; of P panels at
// once: with few tokens one gives too few sums to keep the units for them busy.
template <class Form, int T, int P = 1>
void tile(const Stack& stack, const char* weight, const float* x, int64_t cols, int v, float* sums, Prefetch fetch) {
    constexpr int WIDE = wide(T), VECTORS = P * WIDE;  // vector i is i % WIDE of panel i / WIDE
    constexpr bool RELOADS = W == 8 && Form::COLS == 2 && T > 1 && (T + 2) * VECTORS > 12;  // for want of registers
    const auto place = [&](int i) { return weight + i / WIDE * fetch.apart; };
    const auto sum = [&](int t, int i) { return sums + (i / WIDE * T + t) * PANEL + (v + i % WIDE) * W; };
    const auto form = form_of<Form>(stack);
    vec acc[T][VECTORS];
    UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int i = 0; i < VECTORS; ++i) acc[t][i] = load(sum(t, i));
    const int64_t group = std::min(group_cols<Form>(stack), cols) / SUBS<Form>;
    for (int64_t left = cols; left > 0;) {
        const char* head = weight;
        weight += Form::HEAD;
        for (int sub = 0; sub < SUBS<Form>; ++sub, left -= group) {
            decltype(scale_of(form, weight, 0, 0)) scales[VECTORS];
            UNROLL for (int i = 0; i < VECTORS; ++i)
                scales[i] = scale_of(form, head + i / WIDE * fetch.apart, v + i % WIDE, sub);
            for (int64_t unit = 0; unit < group / Form::COLS; ++unit) {
                decltype(Form::stored(weight, 0)) stored[VECTORS];
                UNROLL for (int c = 0; c < Form::COLS; ++c) {
                    if constexpr (RELOADS) asm volatile("" : "+r"(weight));  // hidden, or they would be kept
                    if (c == 0 || RELOADS)
                        UNROLL for (int i = 0; i < VECTORS; ++i) stored[i] = Form::stored(place(i), v + i % WIDE);
                    vec w[VECTORS];
                    UNROLL for (int i = 0; i < VECTORS; ++i)
                        if constexpr (RELOADS) w[i] = Form::widen_without_mask(stored[i], c);
                        else w[i] = form.widen(stored[i], c, scales[i]);
                    UNROLL for (int t = 0; t < T; ++t) {
                        const vec own = all(x[c * T + t]);
                        UNROLL for (int i = 0; i < VECTORS; ++i) acc[t][i] += w[i] * own;
                    }
                }
                fetch.template ask<P, lines_of<Form>(T), T>(fetch.step);
                weight += Form::BYTES;
                x += Form::COLS * T;
            }
            if constexpr (Form::HEAD > 0) fetch.template ask<P, HEAD_LINES<Form>, T>(fetch.head);
        }
    }
    UNROLL for (int t = 0; t < T; ++t)
        UNROLL for (int i = 0; i < VECTORS; ++i) store(sum(t, i), acc[t][i]);
}

using Tile = void (*)(const Stack&, const char*, const float*, int64_t, int, float*, Prefetch);

template <class Form, int... T>
INLINE Tile tile_of(int64_t tokens, std::integer_sequence<int, T...>) {
    static constexpr Tile tiles[] = {tile<Form, T + 1>...};
    return tiles[tokens - 1];
}
using UpToMost = std::make_integer_sequence<int, MOST>;

// P whole panels by one tile, which asks for their own later columns; in the last ones for what comes next, so that
// memory neither stalls where panels end nor loads what is not read.
template <class Form, int P, class Own>
INLINE void whole_panels(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums,
                         Own own) {
    const int64_t cols = padded(stack.cols), bytes = offset<Form>(stack, cols);
    const int64_t unit = Form::HEAD ? group_cols<Form>(stack) : Form::COLS;
    const int64_t ahead = ahead_of(groups.tokens), near = std::min(cols, (ahead * cols / bytes + unit - 1) / unit * unit);
    const int64_t split = cols - near;
    const int64_t apart = groups.apart ? groups.apart : stack.panel_bytes;
    if (split)
        own(stack, panel, x, split, 0, sums, {panel + offset<Form>(stack, near), Form::BYTES, apart, HEAD_SHARE<Form>});
    const char* next = groups.next ? groups.next : panel + P * stack.panel_bytes;
    own(stack, panel + offset<Form>(stack, split), x + split * groups.tokens, near, 0, sums,
        {next, Form::BYTES, apart, HEAD_SHARE<Form>});
}

// Few tokens: every weight is read by one tile, as it lies.
template <class Form>
void product_once(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    whole_panels<Form, 1>(stack, panel, x, groups, sums, tile_of<Form>(groups.tokens, UpToMost{}));
}

// What the tile of a group of tokens that begins at vector v asks for, while all use a block of so many units: of the
// `bytes` of the next block its share, so that memory never waits for arithmetic.
inline Prefetch share_of(const char* next, int64_t bytes, int64_t units, const Groups& groups, int64_t group, int v) {
    const int64_t vectors = groups.count * VECS;
    return {next + bytes * (group * VECS + v) / vectors,
            (bytes * wide(groups.size(group)) + units * vectors - 1) / (units * vectors)};
}

// More of them: all tokens use a block of columns before the next, as it lies or widened.
template <class Form, class Used>
void product_in_blocks(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    constexpr bool WIDENS = !std::is_same_v<Form, Used>;
    constexpr int64_t SIZE = SUBS<Form> > 1 ? 2 * BLOCK_K : BLOCK_K;
    alignas(64) float block[WIDENS ? SIZE * PANEL : 1];
    const int64_t cols = padded(stack.cols);
    for (int64_t first = 0; first < cols; first += SIZE) {
        const int64_t count = std::min(SIZE, cols - first);
        const char* weight = panel + offset<Form>(stack, first);
        const char* next = panel + offset<Form>(stack, first + SIZE);
        const char* from = weight;
        if constexpr (WIDENS) {
            for (int v = 0; v < VECS; ++v)
                for_units<Form>(stack, weight, count, v, [&](vec numbers, int64_t col) {
                    store(block + col * PANEL + v * W, numbers);
                });
            from = reinterpret_cast<const char*>(block);
        }
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t begin = groups.begin(group), size = groups.size(group);
            const Tile own = tile_of<Used>(size, UpToMost{});
            for (int v = 0; v < VECS; v += wide(size))
                own(stack, from, x + begin * cols + first * size, count, v, sums + begin * PANEL,
                    share_of(next, next - weight, SIZE / Used::COLS, groups, group, v));
        }
    }
}

// One panel times all tokens: sums [tokens][32].
template <class Form>
void panel_product(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + groups.tokens * PANEL, 0.0f);
    if (groups.count == 1 && wide(groups.tokens) == VECS) return product_once<Form>(stack, panel, x, groups, sums);
    if constexpr (Form::IS_QUICK)
        if (groups.count <= 2) return product_in_blocks<Form, Form>(stack, panel, x, groups, sums);
    product_in_blocks<Form, PlainF32>(stack, panel, x, groups, sums);
}

// Up to so many tokens take two panels at once, where there are registers for all their sums.
constexpr int64_t PAIR_TOKENS = W == 16 ? 2 : W == 8 ? 1 : 0;

// Two panels times up to PAIR_TOKENS tokens: sums [2][tokens][32].
template <class Form>
void pair_product(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + 2 * groups.tokens * PANEL, 0.0f);
    if (groups.tokens == 1) whole_panels<Form, 2>(stack, panel, x, groups, sums, tile<Form, 1, 2>);
    if constexpr (PAIR_TOKENS > 1)
        if (groups.tokens == 2) whole_panels<Form, 2>(stack, panel, x, groups, sums, tile<Form, 2, 2>);
}

using Product = void (*)(const Stack&, const char*, const float*, const Groups&, float*);

struct Products {
    Product of_one, of_two;  // panels; two for up to PAIR_TOKENS tokens
};

inline Products products_of(int64_t format) {
    return with_form(format, []<class Form>() -> Products { return {panel_product<Form>, pair_product<Form>}; });
}

}  // namespace looped
