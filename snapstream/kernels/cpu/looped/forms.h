// How a matrix lies in memory. A panel is 32 rows; within it columns follow each other, some of them to a unit in which
// each row has its own numbers side by side:
//
//   fp32, fp16   a column to a unit
//   bf16         two: the first in the lower, the second in the upper half of 32 bits
//   fp8          a column, in bytes; its scales lie apart (blocks.h)
//   int8         four to 32 bits, the first in the lowest byte; a code is 128 more than it stands for
//   int4         eight: byte b has column b in its lower and column 4 + b in its upper half; a code is 8 more
//
// so a vector of the weight holds rows, a token's number is broadcast, and no sum crosses lanes. Codes come in groups
// of columns, each headed by the 32 scales in fp16: a number is (code - offset) * scale, which fp32 holds exactly.
#pragma once
#include <algorithm>

#include "abi.h"
#include "simd.h"

namespace looped {

constexpr int VECS = PANEL / W;  // vectors of 32 rows

inline int64_t padded(int64_t cols) { return (cols + ALIGN_K - 1) / ALIGN_K * ALIGN_K; }

// What the forms below have in common: COLS columns and BYTES of a unit, HEAD bytes before the units of a group;
// scale(head, v): what the group says of vector v of rows; stored(unit, v): what lies there; widen(stored, c, scale): the
// numbers of column c of the unit.
struct NoScale {};

struct PlainF32 {
    static constexpr int COLS = 1, BYTES = 128, HEAD = 0;
    static INLINE NoScale scale(const char*, int) { return {}; }
    static INLINE vec stored(const char* unit, int v) { return load(reinterpret_cast<const float*>(unit) + v * W); }
    static INLINE vec widen(vec stored, int, NoScale) { return stored; }
};

struct PairsBF16 {
    static constexpr int COLS = 2, BYTES = 128, HEAD = 0;
    static INLINE NoScale scale(const char*, int) { return {}; }
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
    static INLINE vec widen(bits both, int c, NoScale) { return as_floats(c ? both & 0xffff0000u : both << 16); }
};

struct HalfF16 {
    static constexpr int COLS = 1, BYTES = 64, HEAD = 0;
    static INLINE NoScale scale(const char*, int) { return {}; }
    static INLINE vec stored(const char* unit, int v) {
        return load_half(reinterpret_cast<const uint16_t*>(unit) + v * W);
    }
    static INLINE vec widen(vec stored, int, NoScale) { return stored; }
};

// A code is moved to the upper end of 32 bits, where its sign is theirs; the power of two is in the scale. Of four bits
// AVX-512 looks the number up instead.
template <int BITS>
struct Codes {
    static constexpr int COLS = 32 / BITS, BYTES = 128, HEAD = 2 * PANEL;
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

template <class Form>
INLINE int64_t group_cols(const Stack& stack) { return Form::HEAD ? stack.group : padded(stack.cols); }
template <class Form>
INLINE int64_t group_bytes(const Stack& stack) {
    return Form::HEAD + group_cols<Form>(stack) / Form::COLS * Form::BYTES;
}

// Where column `col` of a panel begins: the first of a group, or with plain numbers of a unit.
template <class Form>
INLINE int64_t offset(const Stack& stack, int64_t col) {
    return Form::HEAD ? col / stack.group * group_bytes<Form>(stack) : col / Form::COLS * Form::BYTES;
}

// Calls use(numbers, column) for vector v of rows of `cols` columns from `from` on.
template <class Form, class Use>
INLINE void for_units(const Stack& stack, const char* from, int64_t cols, int v, Use use) {
    const int64_t group = std::min(group_cols<Form>(stack), cols);
    for (int64_t first = 0; first < cols; first += group) {
        const auto scale = Form::scale(from, v);
        from += Form::HEAD;
        for (int64_t col = first; col < first + group; col += Form::COLS, from += Form::BYTES) {
            const auto stored = Form::stored(from, v);
            UNROLL for (int c = 0; c < Form::COLS; ++c) use(Form::widen(stored, c, scale), col + c);
        }
    }
}

// A row of a matrix as fp32: of an embedding table.
template <class Form>
void copy_row(const Stack& table, int64_t row, float* out) {
    const char* panel = table.data + row / PANEL * table.panel_bytes;
    const int lane = row % PANEL;
    for_units<Form>(table, panel, padded(table.cols), lane / W, [&](vec numbers, int64_t col) {
        if (col < table.cols) out[col] = numbers[lane % W];
    });
}

inline void copy_row(const Stack& table, int64_t row, float* out) {
    switch (table.format) {
        case BF16: return copy_row<PairsBF16>(table, row, out);
        case F16: return copy_row<HalfF16>(table, row, out);
        case I8: return copy_row<Codes<8>>(table, row, out);
        case I4: return copy_row<Codes<4>>(table, row, out);
        default: return copy_row<PlainF32>(table, row, out);
    }
}

}  // namespace looped
