// Products of whole numbers: tokens in int8 times a matrix of codes (codes.cpp), and how tokens become int8.
//
// Whoever makes the input of such a product rounds it, per token and group of columns that share a scale in the matrix:
// the largest magnitude becomes 127 (../../groups.py means the same). Packed, a group of the matrix is, of T tokens,
//
//   [T] scales fp32, [T] int32: what unsigned codes add too much, negated; then [group / 4][T] four codes to 32 bits
//
// and the groups of a tile's tokens follow each other. NaN and infinities make a scale that is not finite.
#pragma once
#include <limits>

#include "bf16.h"

namespace looped {

constexpr int64_t MOST_GROUP = 128;  // columns of a group

inline bool takes_codes(const Stack& matrix) { return matrix.inputs == I8; }
inline int64_t packed_ints(const Stack& matrix) { return matrix.cols / matrix.group * (2 + matrix.group / 4); }

// Where the codes of one token go.
class PackedCodes {
  public:
    PackedCodes(float* base, const Place& place, const Stack& matrix)
        : group_(matrix.group), offset_(matrix.format == I8 ? 128 : 8), stride_(place.size) {
        to_ = reinterpret_cast<int32_t*>(base) + place.begin * packed_ints(matrix) + place.at;
    }

    // x [count]: whole groups from column `col` on.
    void put(int64_t col, const float* x, int64_t count) const {
        for (int64_t done = 0; done < count; done += group_) put_group((col + done) / group_, x + done);
    }

  private:
    typedef int8_t bytes __attribute__((vector_size(W)));

    void put_group(int64_t index, const float* x) const {
        int32_t* to = to_ + index * stride_ * (2 + group_ / 4);
        const float scale = scale_of(x);
        const vec divisor = all(scale == 0.0f ? 1.0f : scale), magic = all(12582912.0f);  // 1.5 * 2^23: see simd.h
        int32_t codes[32];  // four to each
        ints sum = {};
        for (int64_t i = 0; i < group_; i += W) {
            const ints own = (ints)(load(x + i) / divisor + magic) - (ints)magic;
            const bytes narrow = __builtin_convertvector(own, bytes);
            std::memcpy(reinterpret_cast<char*>(codes) + i, &narrow, W);
            sum += own;
        }
        int32_t total = 0;
        for (int i = 0; i < W; ++i) total += sum[i];
        std::memcpy(to, &scale, 4);
        to[stride_] = -offset_ * total;
        for (int64_t i = 0; i < group_ / 4; ++i) to[(2 + i) * stride_] = codes[i];
    }

    float scale_of(const float* x) const {  // as whole numbers, magnitudes have their order, NaN above infinity
        ints most = {};
        for (int64_t i = 0; i < group_; i += W) {
            const ints own = (ints)(load_bits(x + i) & all_bits(0x7fffffffu));
            most = own > most ? own : most;
        }
        int32_t largest = 0;
        for (int i = 0; i < W; ++i) largest = std::max<int32_t>(largest, most[i]);
        float magnitude;
        std::memcpy(&magnitude, &largest, 4);
        const float scale = magnitude / 127.0f;
        return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
    }

    const int64_t group_;
    const int32_t offset_;
    const int64_t stride_;
    int32_t* to_;
};

// Of a matrix of codes whose inputs are codes: x is what PackedCodes wrote.
Products code_products(int64_t format);
// Which way to sum them is in use: the fastest, or for tests the one that is asked for (quads.h); -1 asks for none.
int64_t choose_way(int64_t way);
// The sums alone, for bounds.cpp: DOT_CHAINS vectors of four products each, so many times.
constexpr int DOT_CHAINS = W == 16 ? 24 : 10;
int32_t add_codes(int64_t rounds, int32_t from);

// Of any matrix.
inline Products products_of(const Stack& matrix) {
    if (takes_codes(matrix)) return code_products(matrix.format);
    return takes_bf16(matrix) && matrix.format == BF16 ? bf16_products() : products_of(matrix.format);
}

// Columns `first` and further of a token to where a product with that matrix takes its input: codes in whole groups, other
// numbers an even count, unless they are the last.
inline void put_input(const Stack& matrix, float* packed, const Place& place, const float* x, int64_t first,
                      int64_t count) {
    if (takes_bf16(matrix)) return pack_bf16(x, first, count, matrix.cols, packed, place);
    if (takes_codes(matrix)) return PackedCodes(packed, place, matrix).put(first, x, count);
    const Packed to(packed, place, matrix.cols);
    for (int64_t i = 0; i < count; ++i) to.put(first + i, x[i]);
    if (first + count == matrix.cols) to.end(matrix.cols);
}

}  // namespace looped
