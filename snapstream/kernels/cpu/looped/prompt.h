// What a layer computes while prompts are read: attention of chunks, products with norms and SwiGLU, the experts, the
// staging of heads, and recurrences. OpenMP's threads do it, since these calls stand between regions of PyTorch.
#pragma once
#include <cstdint>

#include "abi.h"

namespace looped {

// -- attention in products of bf16 (prompt_attention_bf16.cpp)

// `count` prompts that lie one after the other in q, k and v: prompt i's queries end at query_ends[i + 1], its keys at
// key_ends[i + 1].
void attend_prompts(const Prompt& all, const int32_t* query_ends, const int32_t* key_ends, int64_t count,
                    int64_t threads);

// -- attention in fp32, or in products of int16 (prompt_attention.cpp)

// `count` prompts, each with a chunk, an offset and tensors of its own; their heads are of equal sizes.
void attend_prompts_f32(const Prompt* prompts, int64_t count, int64_t threads);
void attend_prompts_int16(const Prompt* prompts, int64_t count, int64_t threads);
bool attends_in_int16();  // whether int16 is faster, with heads of 128; measured once

// -- layers (prompt_products.cpp)

// buffer: tokens x (in + 3), and for down tokens x inner more.
void pass_tokens(const Passing& passing, float* buffer, int64_t threads);
void stage_heads(const Heads& heads, int64_t threads);

// buffer: T k x (D + M + 6) numbers.
void pass_experts(const Routed& routed, float* buffer, int64_t threads);

// -- recurrent layers (prompt_recurrent.cpp)

void convolve(const Convolving& own, int64_t threads);
void apply_delta_rule(const DeltaRule& own, int64_t threads);

}  // namespace looped
