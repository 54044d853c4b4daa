// Products with matrices of FP8 (e4m3), of which 128 by 128 numbers share a scale in fp32 (blocks.cpp).
//
// A panel is a byte per number, a column of 32 rows to 32 bytes. Its rows lie in one block each, since 32 divides 128, so
// that a panel has one scale per 128 columns. Scales lie apart, as a checkpoint has them: [layers, ceil(rows / 128),
// ceil(cols / 128)].
#pragma once
#include "codes.h"

namespace looped {

Products block_products();

// Of any matrix that a step multiplies with.
inline Products products_with(const Stack& matrix) {
    return matrix.format == FP8 ? block_products() : products_of(matrix);
}

}  // namespace looped
