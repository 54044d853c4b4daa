// Draws one token per row from logits, as ../../../exec/sampling.py defines it, and advances rows. It knows no model: a
// call takes logits from anywhere, after a step or in a test. logits.cpp has what happens to scores before
// probabilities.
#pragma once
#include <cstdint>

#include "abi.h"
#include "simd.h"

namespace looped {

// -- logits processors: logit bias, stop ids held back by min_tokens, penalties and a grammar, in that order

// Of the b-th row of a call: writes all scores to `line` and returns true, or leaves it alone where they are the
// logits.
bool adjust(const Sampling& sampling, const Draw& call, int64_t b, float* line);

bool has_penalties(const Sampling& sampling, int64_t row);

// -- which tokens of a row may be drawn: its maximum, the k-th largest score, the nucleus. Everything is a threshold on
// the score, exact, and equal scores are treated alike, as in ../../../exec/sampling.py.
//
// One pass keeps the largest score of every lane of a group of vectors. The k-th largest of these is a bound of the
// k-th largest score, since each of them is the score of a token: what lies below is no candidate, and most groups
// hold none.

constexpr int64_t GROUP = 64 * W;  // tokens that share W maxima

inline int64_t num_maxima(int64_t vocab) { return (vocab + GROUP - 1) / GROUP * W; }

struct Peak {
    float score;  // the largest; -infinity where there is none
    bool is_finite;  // it is finite, and no score is NaN
};

// Of a row; the largest score of each lane of each group goes to `maxima`.
Peak find_peak(const float* scores, int64_t vocab, float* maxima);

// Whether a group may hold a score of at least `least`.
INLINE bool may_hold(const float* maxima, int64_t group, float least) {
    return lanes_of(load(maxima + group * W) >= all(least)) != 0;
}

// The first token with that score; 0 where none has it.
int64_t first_with(float score, const float* scores, int64_t vocab, const float* maxima);

// The k-th largest of `count` numbers, 1 <= k <= count; `copy` has room for all.
float kth_largest(const float* numbers, int64_t count, int64_t k, float* copy);

struct Candidates {  // in the order of the vocabulary; each has room for all tokens and a vector more
    int32_t* ids;
    float* scores;
    int64_t count;

    void take(const float* line, int64_t vocab, const float* maxima, float least);  // those of at least `least`
    void keep(float least);
};

// The score at which the largest scores hold `limit` of the weight; -infinity where all hold less. `places` has room
// for `count`.
float nucleus_score(const float* scores, const int64_t* weights, int64_t count, int64_t limit, int32_t* places);

}  // namespace looped
