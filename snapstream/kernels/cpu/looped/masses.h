// Probabilities as integer weights: 2^42 for the likeliest token, as ../../../layers/sampler.py has them. Sums of them do
// not depend on their order, so neither does a draw on threads or on neighbours.
//
// The exponential is this library's own, within about one unit of the last place of a double, as torch's is; so a weight
// may differ from torch's by one, but only where the exact product lies within 2^-10 or less of a whole number. Of a
// row's total about 2^-52 moves in this way, and a draw falls between the two cumulative sums of some token with a
// chance of at most the number of tokens that may be drawn times 2^-52: less than 2^-32 whatever the vocabulary. The
// likeliest token's weight is exact, one of -inf is 0 exactly, and top-k, which looks at logits, cannot differ at all.
#pragma once
#include <cstdint>

namespace looped {

constexpr int64_t WEIGHT_ONE = int64_t{1} << 42;

struct Scale {  // of a row: a weight is 2^42 e^((score - peak) / temperature), rounded down
    double peak, temperature;  // finite; no score is above the peak
    float least;  // scores below it weigh 0; others may, too
};

Scale scale_of(float peak, double temperature);

// Weights of `count` scores; those below `lowest` become 0. The weight of a score is the same bits wherever it stands.
void weigh(const float* scores, int64_t count, const Scale& scale, int64_t lowest, int64_t* out);

}  // namespace looped
