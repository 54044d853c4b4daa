// The structs that Python passes to the library. library.py reads their fields from this file, so a field is declared
// here and nowhere else: `int64_t`, `float`, one of these structs, or a pointer. Sizes are in elements unless a name
// says bytes. Matrices are stored in panels of 32 rows (panels.h).
#pragma once
#include <cstdint>

// Of a function that Python calls by its name (library.py); structs come by their address.
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace looped {

constexpr int PANEL = 32;   // rows of a panel
constexpr int64_t REJECTED = -2;  // in tokens
constexpr int ALIGN_K = 4;  // the columns of a panel are filled up with zeros to a multiple of this

// What a layer has of each part, and how its MLP or experts are activated: RELU2 (relu(up)^2) and those after it have no gate.
enum MixerKind : int64_t { ATTENTION = 0, RECURRENT = 1, NO_MIXER = 2, BOTH = 3 };
enum MlpKind : int64_t { DENSE = 0, EXPERTS = 1, NO_MLP = 2 };
enum Activation : int64_t { SILU = 0, GELU = 1, RELU2 = 2, XIELU = 3, UNGATED_GELU = 4 };
constexpr bool has_gate(int64_t activation) { return activation < RELU2; }

// Of matrices; I8, BF16 and I16 also of inputs, I16 of nothing else.
enum Format : int64_t {
    F32 = 0, BF16 = 1, F16 = 2, FP8 = 3, I8 = 4, I4 = 5, MXFP4 = 6, U4 = 7, I16 = 8,
    Q3K = 9, Q4K = 10, Q5K = 11, Q6K = 12, IQ4XS = 13, Q2K = 14,
    IQ2XXS = 15, IQ2XS = 16, IQ2S = 17, IQ3XXS = 18, IQ3S = 19,
};

struct Stack {  // matrices [layers, rows, cols], or one of them
    const char* data;
    int64_t layer_bytes, panel_bytes;
    int64_t rows, cols;
    int64_t format, group;  // group: quantized columns that share a scale
    int64_t inputs;         // tokens are first rounded, I8: to int8 in those groups; I16, BF16: to these; F32: not
    const float* scales;    // of FP8 (products.h)
    int64_t adapted;        // 1 + its place in Model::low_rank of an adapter; 0: no adapter adds to its product
};

struct LowRank {  // what a LoRA adapter adds to a product: to the rows from `firsts` on what is up (down x); all fp32
    Stack down;  // [R, cols] of all ups, one below the other; rows 0: it adds nothing
    const Stack* ups;
    const int64_t* firsts;
    int64_t count;
};

struct Connection {  // of a part of a layer to S residual streams (streams.h): [C, S D], [C], [2 or 3]; of the head [1]
    const float *weights, *base, *scale;
};

struct LayerParts {  // of one layer: its own matrices, and what layers may differ in
    Stack qkv, o, gate_up, down;                                // rows 0: it has none
    Stack qkv_rest;  // rows after those of qkv, in another format; rows 0: none
    // [held, 2M (without gate M) or D, D or M]: expert e is matrix e - first_held; the shared ones in one, or none.
    Stack experts_gate_up, experts_down, shared_gate_up, shared_down;
    Stack latent_in, latent_out;  // [Z, D], [D, Z]: around the experts, which then have Z in the place of D; rows 0: none
    Stack recurrent_in, recurrent_out;  // to b | c | x, or to q | k | v | z; of what the layer makes
    Stack q_a, q, kv_a;                 // of latents; q_a where q_rank is not 0
    Stack gates;  // of latents [H or H U, D]: a sigmoid of these multiplies what is attended; rows 0: none
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // [out], or null
    const float *numbers, *experts_numbers;                     // [4], of activations (Gated in simd.h), or null
    const float *q_norm, *k_norm;                               // [E], whole [H E] and [G E], or null
    const float* turned_scale;                                  // [E]: of queries and keys once rotated, or null
    // [D]: before each part, and of its output before it is added; or null. Parts that read one norm both have it.
    const float *input_norm, *attention_out_norm, *post_norm, *mlp_out_norm;
    int64_t heads, kv_heads, head_dim, inner;
    int64_t source;           // the layer whose slots it attends to: itself, or one that shares them with it
    int64_t values_are_keys;  // as projected
    float score_scale;        // of products of queries and keys
    float scalar;             // of the residual stream behind the layer
    // Of an embedding of each token for this layer, see Model: its table [V, P], the projection of that of layer 0
    // [P, D], and the gate [P, D] and projection [D, P] of what it adds, which has the norm [D].
    Stack per_layer_table, per_layer_in, per_layer_gate, per_layer_out;
    const float* per_layer_norm;
    // Of models with S residual streams: a low-rank branch parallel to attention [R, D], [D, R] and its norm [D]; the router
    // [S, D], times its norm and 1 / D; coefficients [S S, S] and [S, S]; [D], of what the embedding above is gated by.
    Stack laurel_in, laurel_out;
    const float *laurel_norm, *stream_router, *stream_prediction, *stream_correction, *stream_scale;
    Connection before_attention, before_mlp;  // of models with hyper-connections
    float deviations;  // gates lose their mean and so many deviations, and are 0 below; -infinity: they lose nothing
};

struct Mixture {  // of experts, in the L' layers that have them; no experts: none (experts.h). LayerParts has the matrices.
    const float *router, *correction;   // [L', X, D]; [L', X] or null
    int64_t experts, top_k, inner, shared_inner;
    int64_t groups, top_groups, best_of_group, is_sigmoid, normalises;
    int64_t chooses_by_logits;  // the correction is added to the logits in place of the scores
    int64_t first_held, held;  // the experts that lie on this rank, whose matrices are stored; alone: 0 and X
    const float *router_bias, *gate_up_bias, *down_bias;  // [L', X], [L' held, 2M], [L' held, D], or null
    const float* shared_gate;  // [L', D]: a sigmoid of the token, times the output of the shared experts; or null
    float scale, least_sum;    // what the sum of the chosen scores is increased by before it divides them
    float shared_scale;        // of the output of the shared experts
    float jitter;           // of sparsemixer, see route() in ../../../models/layers.py; below 0: another choice
    int64_t scales_inputs;  // shares multiply what an expert reads, not what it gives
    int64_t latent;         // Z; 0: none
    // Experts beside every MLP: norms of the output of the MLP, and of the input and the output of the experts; what the
    // router's input is multiplied with behind the norm, [L, D]; of the shares of experts, [L, X]. Null: in its place.
    const float *mlp_part_norm, *experts_norm, *experts_part_norm, *router_scale, *expert_scale;
};

struct Latent {  // attention over latents; rank 0: none (latent.h)
    const float *q_a_norm, *c_norm;  // [L, Q], [L, R]
    const float* up;                 // [L, H, N + U, R]: what expands c to the key and the value of each head
    int64_t q_rank, rank, nope_dim, rope_dim, value_dim;
    float eps;     // of both norms
    float factor;  // of the queries: what turns 1 / sqrt(R + P) into the model's scale of the softmax
};

struct Recurrent {  // layers with a state in the place of keys and values (recurrent.h); kernel 0: none
    const float *in_bias, *out_bias;       // [L', rows], or null
    const float *taps, *conv_bias;         // [L', K, C]; [L', C] or null
    // Of gated DeltaNet: [L', 2 H, D], of beta and of the decay of each value head; [L', H] each; [L', V]
    const float *gates, *rate, *step, *norm;
    // Of KDA: gates [L', H, D] of beta alone, step [L', H K]; to decays per element of a key [L', H K, R] and to the gates
    // of outputs [L', H V, R], from two times R numbers in the place of z; null: these numbers are decays and gates themselves.
    // gate_rank 0: not KDA.
    const float *decay_up, *gate_up;
    // Of Mamba-2 instead: no gates, norm [L', I], and what inputs add to outputs [L', H]; key heads are groups, with B and
    // C of key_dim numbers, value heads its heads. Null: not Mamba-2.
    const float* skip;
    int64_t kernel, channels, key_heads, value_heads, key_dim, value_dim, gate_rank;  // value_heads 0: short convolutions
    int64_t drafted;  // entries of a step that may be drafted; 0: none
    int64_t projected, mixed;  // rows of recurrent_in; columns of recurrent_out
    const float* in_scales;    // [projected]: what it projects is multiplied by; or null
    float out_multiplier;    // of what out gives, in layers that have attention too
    float decay_floor;       // of KDA: decays are e to this times a sigmoid; 0: not
    float most_beta, eps;    // of gated DeltaNet: what a sigmoid is times; of the norms of outputs
};

struct Hyper {  // hyper-connections (streams.h); streams 0: none
    Connection head;  // read behind the last layer; weights null: the mean of the streams is
    // S and C, the numbers that a token decides: 2 S, and if streams are mixed, in so many iterations, S S more.
    int64_t streams, shares, iterations;
    float most_added, eps;
};

struct Ranks {  // processes of one machine that compute every step together, each with a share of the model (threads.h)
    char* shared;          // memory that all have mapped; null for one
    int64_t rank, size;    // of this process; of all
    int64_t waits;         // 0: the other ranks are absent, where one rank's share is measured alone
};

struct Model {  // of a rank: heads, inner sizes and the lines of embed and head are its share, all else is whole
    int64_t layers, hidden, vocab;
    int64_t heads, kv_heads, head_dim, inner;  // where layers differ, the most
    // [L]: the kinds of a layer's parts, and its places in the stacks of those kinds; its matrices.
    const int64_t *mixers, *mixer_places, *mlps, *mlp_places;
    const LayerParts* parts;
    int64_t is_single;  // layers have one part each
    Stack embed, head;
    const float *final_norm, *lm_head_bias;                     // [D]; [rows of head] or null
    int64_t is_parallel;  // attention and MLP read one norm, and both outputs are added
    int64_t is_centered;  // the mean of a token is taken off the residual stream before it is read
    int64_t has_whole_qk_norm;                                  // one norm over all heads of q, and one of k
    int64_t norms_heads_apart;                                  // LayerNorms with weights for each, [H, E] and [G, E]
    int64_t norms_values;                                       // each head of v, without weights
    int64_t per_layer_dim;                                      // P, of embeddings for each layer; 0: none
    const float* per_layer_in_norm;                             // [P]
    // S residual streams, 0 where there is one: what makes the others of the embedding [(S - 1) D, D], and [S - 1] of
    // [D, D], of what each adds to the last.
    int64_t streams;
    Stack streams_in;
    const Stack* streams_out;
    int64_t activation;                                         // of MLPs and experts
    // qkv begins with gates [H, 1 or E], whose sigmoid multiplies the output of attention; of latents see LayerParts; 0: not
    int64_t gate_dim;
    int64_t has_softplus_gates;  // in its place log(1 + e^x)
    const float* window_frequencies;                            // [window_rotated / 2], of layers with windows; or null
    int64_t window_rotated, window_head_dim, full_head_dim;     // full: of the other layers
    float window_rope_scale;
    const float* sinks;                                         // [L, H]: a logit in each softmax, or null
    const float* frequencies;                                   // [rotated / 2]
    int64_t rotated;                                            // numbers of a head; the pairs after them stand still
    const int64_t* rotated_layers;                              // [L]: 0 in layers without rotary embedding; or null
    int64_t dynamic_original;                                   // of dynamic stretching: the original context, else 0
    // Beyond long_original tokens, where that is not 0, the frequencies are these (longrope), [rotated / 2] or null.
    const float* long_frequencies;
    int64_t long_original;
    int64_t scaled_from;  // queries at positions from here on are multiplied (query_scale in step.h); 0: none are
    float query_beta;
    int64_t scales_unrotated;  // in layers without rotary embedding alone, whose positions count from 1
    int64_t has_chunks;  // windows are chunks: the slots since the last multiple of one are seen
    float dynamic_factor, dynamic_theta, rope_scale, eps;
    float out_eps;  // of norms of outputs
    float unrotated_scale;  // of queries and keys in layers without rotary embedding
    // Of hidden states that enter layer 0; of outputs before they are added to the residual stream; of logits.
    float embed_multiplier, residual_multiplier, logits_multiplier;
    float attention_multiplier, mlp_multiplier;  // of the outputs of each part, times residual_multiplier
    float logit_cap;  // c of c tanh(logits / c); 0: none
    float score_cap;  // the same of products of queries and keys, before the softmax
    Mixture mixture;
    Latent latent;
    Recurrent recurrent;
    Hyper hyper;
    const LowRank* low_rank;  // [adapters, L, 4]: of qkv, o, gate_up and down; null: there are none
    int64_t most_rank;        // rows of a `down`, in whole panels
};

struct RowTable {  // the persistent state of rows, [rows + 1] each, and their keys and values [slots of all rows, E]
    int64_t *last_token, *num_tokens, *ring_start, *capacity;
    int64_t* num_sampled;
    // [L]: addresses of the keys and values of each layer, and of their scales, [rows + 1, G] or one per slot; or null.
    // Of a layer that shares the slots of another: that one's.
    const int64_t *keys, *values, *key_scales, *value_scales;
    float* queries;                    // [L, rows + 1, kept, H, E] of a draft, or null
    // [L]: C of the slots [rows + 1, G, C] that each layer attends to; of a sliding window C again, else 0.
    const int64_t *layer_slots, *windows;
    // With per-head budgets a row is [row_slots], else these are null. [L, rows + 1, G]: a head's first slot in its row;
    // of the head's slots the end of the top-k region, and that of the ring which follows.
    const int64_t *head_starts, *head_ends, *head_capacities;
    // [L]: addresses of the states of recurrent layers, [rows + 1, K - 1, C] and [rows + 1, H, keys, values] fp32; or null
    const int64_t *conv_inputs, *memories;
    int64_t num_rows, slots, kept_queries, row_slots;  // slots: of the head that has most
    int64_t key_format, value_format;  // one format, or I8 and I4
    const int64_t* adapters;  // counted from 1, 0: none; or null
};

struct Step {  // one call: the stages [first, last) of a step over `batch` rows
    const int64_t* rows;
    float* logits;    // [batch, vocab]
    int64_t* tokens;  // [batch]: the likeliest tokens, -1 where the logits are not finite, and rows go on; or null
    // [batch], or null where rows are distinct. Speculative decoding: a row's entries follow each other, first its last
    // token, then drafted ones; ahead counts them from 0, and inputs are the tokens. An entry whose draft is not the
    // token before it gets REJECTED, and the row continues with the others.
    const int64_t *ahead, *inputs;
    int64_t batch, first, last;
};

struct Sampling {  // what is kept of rows, [rows + 1] or [rows + 1, a number of each] (../../../exec/sampling_state.py)
    const bool* is_greedy;
    const double *temperature, *top_p, *min_p;
    const float *presence, *frequency, *repetition;
    const int64_t *top_k, *min_tokens, *stream, *stop_ids, *bias_ids;
    const float* bias_values;
    const bool* prompt_seen;
    int32_t* output_counts;
    const int32_t* allowed;
    int64_t *num_sampled, *last_token, *num_tokens;
    int64_t vocab, num_stop_ids, num_bias;
};

struct Draw {  // one call; bias, min_tokens, penalties, grammar: whether any row may need them
    const int64_t* rows;  // [batch], distinct
    const float* logits;  // [batch, vocab]
    int64_t* tokens;      // [batch]; -1 where the logits are not finite
    float* logprobs;      // [batch]: of the tokens, by the raw logits, or null; then also those of the likeliest:
    int64_t* top_ids;     // [batch, num_top], falling, the lowest id first among equals
    float* top_logprobs;  // [batch, num_top]
    int64_t batch, num_top, bias, min_tokens, penalties, grammar;  // num_top: at most vocab
    int64_t feeds;  // whether rows are fed their tokens and go on
};

// q [T, H, E], k [G, N, E] and v [G, N, U] fp32, contiguous in E and U, strides in numbers; out [T, H, U] contiguous.
// Query t sees the keys up to N - T + t; with a window only the last `window` of those.
struct Prompt {
    const float *q, *k, *v;
    float* out;
    int64_t queries, heads, kv_heads, keys, size, value_size;
    int64_t q_token, q_head, k_head, k_token, v_head, v_token;
    int64_t window;  // 0: none
    float scale, cap;    // scores are cap * tanh(scale * product / cap); cap 0: scale * product
    const float* sinks;  // [H]: a logit of each softmax that no value belongs to, or null
};

struct Passing {  // tokens that pass one matrix, or the two of an MLP; numbers of a token lie side by side
    const float* x;   // [T, in]; with a norm what is first added to residual, or null
    float* residual;  // [T, in], where there is a norm: the norm of this is multiplied
    const float* norm;   // [in], or null
    Stack matrix, down;  // down.rows 0: none; else matrix gives gate and up, or up alone, and this is next
    const float *bias, *down_bias;  // or null
    const float* numbers;           // [4], of the activation, or null
    float* out;                     // [T, out]
    int64_t tokens, activation;
    float eps;
};

// A pair is a token and one of its experts. Pairs are sorted by expert; those whose expert is not stored here come
// last.
struct Routed {
    const float* x;           // [T, D]
    Stack gate_up, down;      // of all experts; M is a multiple of 32
    const int64_t* order;     // [T k]: of each pair in that order, token * k + which of its experts
    const int32_t* ends;      // [X']: the pair before which those of an expert end
    const float* weights;     // [T, k]
    float* out;               // [T, D]
    const float *gate_up_bias, *down_bias;  // [X', 2M], [X', D], or null
    int64_t tokens, top_k, experts, activation, scales_inputs;
    const float* numbers;  // [4], of the activation, or null
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

struct Convolving {  // sequences [S, T, C], a token every `stride` numbers; state [S, K - 1, C], taps [K, C], out [S, T, C]
    const float* x;
    float* state;
    const float *taps, *bias;  // bias [C], or null
    float* out;
    int64_t sequences, tokens, channels, kernel, stride, is_silu;
};

struct DeltaRule {  // q, k [S, T, G, K], v [S, T, H, V], decay, beta [S, T, H]; decay is a factor
    const float *q, *k, *v, *decay, *beta;
    const float* decayed;  // [S, T, H, K]: keys times decays, which then are [S, T, H, K] too; null: a decay per head
    float *state, *out;    // [S, H, K, V]; [S, T, H, V]
    int64_t sequences, tokens, key_heads, value_heads, key_dim, value_dim;
};

}  // namespace looped
