// What Python hands to the library: plain structs, mirrored field by field in library.py. Sizes are in elements unless
// a name says bytes. A matrix is cut into panels of 32 rows; panels.h says how a panel lies in memory.
#pragma once
#include <cstdint>

namespace looped {

constexpr int PANEL = 32;   // rows of a panel
constexpr int ALIGN_K = 4;  // the columns of a panel are filled up with zeros to a multiple of this

enum Format : int64_t { F32 = 0, BF16 = 1, F16 = 2, FP8 = 3, I8 = 4, I4 = 5 };

struct Stack {  // matrices [layers, rows, cols], or one of them
    const char* data;
    int64_t layer_bytes, panel_bytes;
    int64_t rows, cols;
    int64_t format, group;  // group: columns that share a scale, of codes
    int64_t inputs;         // I8: tokens are rounded to codes in those groups before they are multiplied; BF16: to bf16
    const float* scales;    // of FP8 (blocks.h)
};

struct Mixture {  // of experts, in the layers from first_layer on; no experts: none (mixture.h)
    Stack gate_up, down;                // [L' held, 2M or D, D or M]: expert e of the i-th such layer is matrix i held + e - first_held
    Stack shared_gate_up, shared_down;  // [L', ...], where shared_inner is not 0
    const float *router, *correction;   // [L', X, D]; [L', X] or null
    int64_t experts, top_k, inner, shared_inner, first_layer;
    int64_t groups, top_groups, best_of_group, is_sigmoid, normalises;
    int64_t first_held, held;  // the experts that lie on this rank, whose matrices are stored; alone: 0 and X
    float scale;
};

struct Latent {  // attention over latents; rank 0: none (latent.h)
    Stack q_a, q, kv_a;              // q_a where q_rank is not 0
    const float *q_a_norm, *c_norm;  // [L, Q], [L, R]
    const float* up;                 // [L, H, N + U, R]: what expands c to the key and the value of each head
    int64_t q_rank, rank, nope_dim, rope_dim, value_dim;
    float factor;  // of the queries: what turns 1 / sqrt(R + P) into the model's scale of the softmax
};

struct Ranks {  // processes of one machine that compute every step together, each with a share of the model (ranks.h)
    char* shared;          // memory that all have mapped; null for one
    int64_t rank, size;    // of this process; of all
    int64_t waits;         // 0: nobody else is there, as where one rank's share is measured alone
};

struct Model {  // of a rank: heads, inner sizes and the lines of embed and head are its share, all else is whole
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocab;
    Stack embed, qkv, o, gate_up, down, head;
    const float *input_norm, *post_norm;                        // [L, D]
    const float* final_norm;                                    // [D]
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // [L, out], or null
    const float *q_norm, *k_norm;                               // [L, E], or null
    const float* frequencies;                                   // [rotated / 2]
    int64_t rotated;                                            // numbers of a head; the pairs after them stand still
    int64_t dynamic_original;                                   // of dynamic stretching: the original context, else 0
    float dynamic_factor, dynamic_theta, rope_scale, eps;
    Mixture mixture;
    Latent latent;
};

struct Rows {  // the persistent state of rows, [rows + 1] each, and their keys and values [L, rows + 1, G, C, E]
    int64_t *last_token, *num_tokens, *next_position, *ring_start, *capacity;
    int64_t* num_sampled;
    char *keys, *values;
    float *key_scales, *value_scales;  // [L, rows + 1, G], of FP8; [L, rows + 1, G, C], of int8
    float* queries;                    // [L, rows + 1, kept, H, E], or null
    // Where kv heads have slots of their own: keys and values are [rows + 1, row_slots, E]; of a head [L, G] its first
    // slot in a row and the end of its top-k region, behind which a ring of `ring` slots ends it. Else null. Where such
    // rows choose again: of a head [L, rows + 1, G] the tokens that refreshes have set it back; else null.
    const int64_t *head_starts, *head_ends, *head_behind;
    int64_t num_rows, slots, kept_queries, row_slots, ring;  // slots: of the largest head
    int64_t format;
};

struct Step {  // one call: the stages [first, last) of a step over `batch` rows
    const int64_t* rows;
    float* logits;    // [batch, vocab]
    int64_t* tokens;  // [batch]: the likeliest tokens, -1 where the logits are not finite, and rows go on; or null
    int64_t batch, first, last, touch_bytes;
};

}  // namespace looped
