// Draws one token per row from logits, as ../../../layers/sampler.py defines it, and feeds rows. It knows no model: a
// call takes logits from anywhere, after a step or in a test.
#pragma once
#include <cstdint>

#include "team.h"

namespace looped {

struct Sampling {  // what is kept of rows, [rows + 1] or [rows + 1, a number of each] (../../../layers/row_state.py)
    const bool* is_greedy;
    const double *temperature, *top_p, *min_p;
    const float *presence, *frequency, *repetition;
    const int64_t *top_k, *min_tokens, *stream, *stop_ids, *bias_ids;
    const float* bias_values;
    const bool* prompt_seen;
    int32_t* output_counts;
    const int32_t* allowed;
    int64_t *num_sampled, *last_token, *num_tokens, *next_position;
    int64_t vocab, num_stop_ids, num_bias;
};

struct Draw {  // one call; it is told whether any row may need a bias and so on, so that nobody looks in vain
    const int64_t* rows;  // [batch], distinct
    const float* logits;  // [batch, vocab]
    int64_t* tokens;      // [batch]; -1 where the logits are not finite
    float* logprobs;      // [batch]: of the tokens, by the logits as they are; or null. Then also those of the likeliest:
    int64_t* top_ids;     // [batch, num_top], falling, the lowest id first among equals
    float* top_logprobs;  // [batch, num_top]
    int64_t batch, num_top, bias, min_tokens, penalties, grammar;  // num_top: at most vocab
    int64_t feeds;  // whether rows are fed their tokens and go on
};

int64_t sampling_bytes(int64_t vocab);  // of the workspace of a place; a member of the team that draws needs one

// By as many members of the team as there are places in `workspace`. A row's token depends on neither.
void draw(const Sampling& sampling, const Draw& call, Team& team, char* workspace, int64_t places);

}  // namespace looped
