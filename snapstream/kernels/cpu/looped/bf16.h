// Products of tokens in bf16: with matrices of bf16, or of codes, as which bf16 holds every whole number exactly.
//
// One instruction adds two products to a lane, twice as many as one of fp32 numbers does. It takes two columns side by
// side in 32 bits, as panels of bf16 have them (forms.h). Packed, the tokens of a group are [padded columns / 2][T] such
// pairs; a number is rounded to the nearest, ties to the even one.
#pragma once
#include "panels.h"

namespace looped {

// Whether this processor has the instruction, and the compiler that made this library knew it.
bool multiplies_bf16();
// And whether that is faster: tried once in the life of a process.
bool gains_by_bf16();
inline bool takes_bf16(const Stack& matrix) { return matrix.inputs == BF16; }
// Of a matrix whose inputs are bf16: x is what pack_bf16 wrote.
Product bf16_product(int64_t format);
// Of a matrix of bf16, for decode: few tokens, or many.
Products bf16_products();
// x [count]: columns `first` and further of a token, of `cols`; both even unless they are the last.
void pack_bf16(const float* x, int64_t first, int64_t count, int64_t cols, float* packed, const Place& place);

}  // namespace looped
