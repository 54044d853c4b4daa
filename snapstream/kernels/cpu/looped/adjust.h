// The scores of a row after logit bias, stop ids that are held back, penalties and a grammar, in that order.
#pragma once
#include "sample.h"

namespace looped {

// Of the b-th row of a call: writes all scores to `line` and returns true, or leaves it alone where they are the logits.
bool adjust(const Sampling& sampling, const Draw& call, int64_t b, float* line);

bool has_penalties(const Sampling& sampling, int64_t row);

}  // namespace looped
