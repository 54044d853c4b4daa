// Products of panels by format of the matrix and of the tokens, and how tokens are packed for each.
//
//   tokens fp32           any matrix: panels.h; FP8 blocks: products_fp8.cpp
//   tokens bf16           bf16, or quantized columns, whose integers bf16 holds exactly: products_bf16.cpp
//   tokens int8           quantized columns: products_integers.cpp
//   tokens int16          other matrices, in prefill: the same
#pragma once
#include <limits>

#include "panels.h"

namespace looped {

// The least seconds of one panel of zeros, which lies in a cache, times so many tokens in groups of at most `most`.
double seconds_of(Product product, const Stack& stack, int64_t tokens, int64_t most = MOST);

// -- tokens in bf16
//
// One instruction adds two products to a lane, twice as many as one of fp32 numbers does. It takes two columns side by
// side in 32 bits, as panels of bf16 have them. Packed, the tokens of a group are [padded columns / 2][T] such pairs; a
// number is rounded to the nearest, ties to even.

// Whether this processor has the instruction, the compiler that made this library knew it, and that is faster: tried once
// in the life of a process.
EXPORT bool looped_gains_by_bf16();
inline bool takes_bf16(const Stack& matrix) { return matrix.inputs == BF16; }
// Of a matrix whose inputs are bf16: x is what pack_bf16 wrote.
Product bf16_product(int64_t format);
// Of a matrix of bf16, for decode: few tokens, or many.
Products bf16_products();
// x [count]: columns `first` and further of a token, of `cols`; both even unless they are the last.
void pack_bf16(const float* x, int64_t first, int64_t count, int64_t cols, float* packed, const Place& place);

// -- tokens in int8
//
// The code that packs the input of such a product rounds it, per token and group of columns that share a scale in the matrix:
// the largest magnitude becomes 127 (reference: ../../groups.py). Packed, a group of the matrix is, of T tokens,
//
//   [T] scales fp32; [T] int32: what the unsigned storage adds too much, negated; where there are minimums the sum of
//   the numbers, fp32;
//   [group / 4][T] four bytes in 32 bits
//
// or [group / 4][2][T], those in even and those in odd places, 16 bits each, if the instructions in use take them so,
// and the groups of a tile's tokens follow each other. NaN and infinities make a scale that is not finite.

constexpr int64_t MOST_GROUP = 128;  // columns of a group
constexpr int64_t PIECE = MOST_GROUP;  // columns of an input that are made at a time (step.h): whole groups

inline bool takes_codes(const Stack& matrix) { return matrix.inputs == I8; }

// -- tokens in int16, of matrices that are not quantized, or FP8 blocks
//
// Both sides are rounded, per row or token and 32 columns, weights where a product reads them. The largest magnitude of
// a weight becomes 4095 and of a token 16383, so no sum of a group overflows. Packed like int8, [16][T] pairs of columns.

constexpr int64_t SHORTS_GROUP = 32;
constexpr int MOST_WEIGHT = 4095, MOST_TOKEN = 16383;
static_assert(SHORTS_GROUP * MOST_WEIGHT * MOST_TOKEN <= std::numeric_limits<int32_t>::max());
inline bool takes_shorts(const Stack& matrix) { return matrix.inputs == I16; }
Product short_product(int64_t format);

// -- either

inline bool takes_integers(const Stack& matrix) { return takes_codes(matrix) || takes_shorts(matrix); }
inline int64_t input_group(const Stack& matrix) { return takes_shorts(matrix) ? SHORTS_GROUP : matrix.group; }
// How many tokens prefill packs together: as many as there are registers for, or half, if that is faster (some
// processors need registers for the sums of the next group of columns): tried once in the life of a process.
int64_t most_integers();
// Words of 32 bits for four codes of a token: 2 if they are split.
int64_t words_of_four(int64_t format);
inline int64_t words_of_four(const Stack& matrix) { return takes_shorts(matrix) ? 2 : words_of_four(matrix.format); }
inline int64_t packed_ints(const Stack& matrix) {
    return matrix.cols / input_group(matrix) * (2 + input_group(matrix) / 4 * words_of_four(matrix));
}

// Where the codes of one token go.
class PackedCodes {
  public:
    PackedCodes(float* base, const Place& place, const Stack& matrix)
        : group_(input_group(matrix)), words_(words_of_four(matrix)), is_short_(takes_shorts(matrix)),
          offset_(is_short_ ? 0 : offset_of(matrix.format)), stride_(place.size) {
        to_ = reinterpret_cast<int32_t*>(base) + place.begin * packed_ints(matrix) + place.at;
    }

    // x [count]: whole groups from column `col` on.
    void put(int64_t col, const float* x, int64_t count) const {
        for (int64_t done = 0; done < count; done += group_) put_group((col + done) / group_, x + done);
    }

  private:
    static int32_t offset_of(int64_t format) {
        switch (format) {
            case I8: return 128;
            case I4: return 8;
            case MXFP4: return Mxfp4::ZERO;
            case Q3K: return BlocksQ3::OFFSET;
            case Q6K: return BlocksQ6::OFFSET;
            case IQ2XXS: case IQ2XS: case IQ2S: case IQ3XXS: case IQ3S: case IQ4XS: return Places::OFFSET;
            default: return 0;
        }
    }

    void put_group(int64_t index, const float* x) const {
        int32_t* to = to_ + index * stride_ * (2 + group_ / 4 * words_);
        const float scale = scale_of(x);
        const vec divisor = all(scale == 0.0f ? 1.0f : scale), magic = all(12582912.0f);  // 1.5 * 2^23: see simd.h
        const bits kept = all_bits(std::isfinite(scale) ? ~0u : 0u);  // sums of what a NaN becomes would overflow
        int32_t codes[MOST_GROUP / 4];  // four to each, or two
        ints sums = {};
        for (int64_t i = 0; i < group_; i += W) {
            const ints own = (ints)((bits)((ints)(load(x + i) / divisor + magic) - (ints)magic) & kept);
            if (is_short_) store_shorts(reinterpret_cast<int16_t*>(codes) + i, own);
            else store_bytes(reinterpret_cast<char*>(codes) + i, own);
            sums += own;
        }
        const int32_t total = sum_of(sums);
        std::memcpy(to, &scale, 4);
        const float numbers = scale * static_cast<float>(total);
        if (offset_ || is_short_) to[stride_] = -offset_ * total;
        else std::memcpy(to + stride_, &numbers, 4);
        to += 2 * stride_;
        if (words_ == 1 || is_short_) {
            for (int64_t i = 0; i < group_ / 4 * words_; ++i) to[i * stride_] = codes[i];
        } else {
            for (int64_t i = 0; i < group_ / 4; ++i, to += 2 * stride_) DotPairs::split(codes[i], to[0], to[stride_]);
        }
    }

    float scale_of(const float* x) const {  // as whole numbers, magnitudes have their order, NaN above infinity
        ints most = {};
        for (int64_t i = 0; i < group_; i += W) {
            const ints own = (ints)(load_bits(x + i) & all_bits(0x7fffffffu));
            most = own > most ? own : most;
        }
        const int32_t largest = max_of(most);
        float magnitude;
        std::memcpy(&magnitude, &largest, 4);
        const float scale = magnitude / (is_short_ ? MOST_TOKEN : 127);
        return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
    }

    const int64_t group_, words_;
    const bool is_short_;
    const int32_t offset_;  // of stored codes; 0: those that have a minimum
    const int64_t stride_;
    int32_t* to_;
};

// Of a matrix of codes whose inputs are codes: x is what PackedCodes wrote.
Products code_products(int64_t format);
// Of any matrix.
inline Products products_of(const Stack& matrix) {
    if (takes_codes(matrix)) return code_products(matrix.format);
    return takes_bf16(matrix) && matrix.format == BF16 ? bf16_products() : products_of(matrix.format);
}

// Columns `first` and further of a token to where a product with that matrix takes its input: codes in whole groups,
// other numbers an even count, unless they are the last.
inline void put_input(const Stack& matrix, float* packed, const Place& place, const float* x, int64_t first,
                      int64_t count) {
    if (takes_bf16(matrix)) return pack_bf16(x, first, count, matrix.cols, packed, place);
    if (takes_integers(matrix)) return PackedCodes(packed, place, matrix).put(first, x, count);
    const Packed to(packed, place, matrix.cols);
    for (int64_t i = 0; i < count; ++i) to.put(first + i, x[i]);
    if (first + count == matrix.cols) to.end(matrix.cols);
}

// -- matrices of FP8 (e4m3), of which 128 by 128 numbers share a scale in fp32
//
// A panel is a byte per number, a column of 32 rows to 32 bytes. Its rows lie in one block each, since 32 divides
// 128, so a panel has one scale per 128 columns. Scales lie apart, as in a checkpoint: [layers, ceil(rows / 128),
// ceil(cols / 128)].

Products block_products();
// Columns of a panel from `first` on, `count` of one block, as [count][32] numbers; returns the factor still to apply.
float widen_columns(const Stack& stack, const char* panel, int64_t first, int64_t count, float* to);

// Of any matrix that a step multiplies with.
inline Products products_with(const Stack& matrix) {
    return matrix.format == FP8 ? block_products() : products_of(matrix);
}

}  // namespace looped
