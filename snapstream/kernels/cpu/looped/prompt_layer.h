// What of a layer stands around attention while prompts are read (prompt_layer.cpp): norms, products and SwiGLU in one
// call, heads normed, rotated and staged in another.
#pragma once
#include "abi.h"

namespace looped {

struct Passing {  // tokens that pass one matrix, or the two of an MLP; numbers of a token lie side by side
    const float* x;   // [T, in]; with a norm what is first added to residual, or null
    float* residual;  // [T, in], where there is a norm: the norm of this is multiplied
    const float* norm;   // [in], or null
    Stack matrix, down;  // down.rows 0: none; else the halves of what matrix gives are gate and up, and this is next
    const float *bias, *down_bias;  // or null
    float* out;                     // [T, out]
    int64_t tokens;
    float eps;
};

struct Heads {  // of tokens, as projected: q | k | v
    const float* heads;      // [T, H + 2G, E]
    const float* norm;       // [H + G, E], or null
    const float *cos, *sin;  // [T, E]; the minus of the rotation is in the sine
    float* queries;          // [T, H, E]
    float *keys, *values;    // of staging: [G, P, E], a kv head every `stride` numbers
    const int64_t* runs;     // [runs, 3]: first token of the T, how many follow it, where in staging they begin
    int64_t num_runs, num_heads, kv_heads, size, stride;
    float eps;
};

// buffer: tokens x (in + 3), and for down tokens x inner more.
void pass_tokens(const Passing& passing, float* buffer, int64_t threads);
void stage_heads(const Heads& heads, int64_t threads);

}  // namespace looped
