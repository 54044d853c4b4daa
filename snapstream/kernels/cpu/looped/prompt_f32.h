// Attention of chunks of prompts in fp32 (prompt_f32.cpp).
#pragma once
#include "prompt.h"

namespace looped {

// `count` prompts, each with a chunk, an offset and tensors of its own; their heads are of equal sizes.
void attend_prompts_f32(const Prompt* prompts, int64_t count, int64_t threads);

}  // namespace looped
