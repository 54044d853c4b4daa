// Attention of a chunk of a prompt, or of several, whose products are of bf16 (prompt.cpp).
#pragma once
#include <cstdint>

namespace looped {

// q [T, H, E], k [G, N, E] and v [G, N, U] fp32, contiguous in E and U, strides in numbers; out [T, H, U] contiguous.
// Query t sees the keys up to N - T + t.
struct Prompt {
    const float *q, *k, *v;
    float* out;
    int64_t queries, heads, kv_heads, keys, size, value_size;
    int64_t q_token, q_head, k_head, k_token, v_head, v_token;
    float scale;
};

// `count` prompts that lie one after the other in q, k and v: prompt i's queries end at query_ends[i + 1], its keys at
// key_ends[i + 1].
void attend_prompts(const Prompt& all, const int32_t* query_ends, const int32_t* key_ends, int64_t count,
                    int64_t threads);

}  // namespace looped
