// The experts of a layer, for many tokens at once (prompt_experts.cpp).
#pragma once
#include "abi.h"

namespace looped {

// A pair is a token and one of its experts. Pairs are sorted by expert; those whose expert is not stored here come last.
struct Routed {
    const float* x;           // [T, D]
    Stack gate_up, down;      // of all experts; M is a multiple of 32
    const int64_t* order;     // [T k]: of each pair in that order, token * k + which of its experts
    const int32_t* ends;      // [X']: the pair before which those of an expert end
    const float* weights;     // [T, k]
    float* out;               // [T, D]
    int64_t tokens, top_k, experts;
};

// buffer: T k x (D + M + 6) numbers.
void pass_experts(const Routed& routed, float* buffer, int64_t threads);

}  // namespace looped
