// See masses.h.
#include "masses.h"

#include <algorithm>
#include <limits>

#include "simd.h"

namespace looped {

namespace {

constexpr int D = W / 2;          // doubles of a vector
constexpr double FLOOR = -29.5;   // e^-29.12 * 2^42 is 1: below, weights are 0
constexpr double MAGIC = 0x1.8p52;  // adding it leaves the rounded number in the last bits
typedef double doubles __attribute__((vector_size(D * 8)));
typedef int64_t longs __attribute__((vector_size(D * 8)));
typedef float some __attribute__((vector_size(D * 4)));

// 2^42 e^x rounded down, of x from FLOOR to 0: whole powers of two first, then a series of what is left.
INLINE longs weight_of(doubles x) {
    const doubles shifted = x * 0x1.71547652b82fep0 + MAGIC, n = shifted - MAGIC;
    const doubles r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;  // |r| <= ln(2) / 2; the first is exact
    doubles p = doubles{} + 1.0 / 6227020800;
    UNROLL for (const double next : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                     1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5})
        p = p * r + next;
    const longs exponent = ((longs)shifted - (longs)(doubles{} + MAGIC) + (42 + 1023)) << 52;
    const doubles y = (1.0 + (r + r * r * p)) * (doubles)exponent;
    const doubles up = y + 0x1p52, rounded = up - 0x1p52;  // to the nearest whole number
    return (longs)up - (longs)(doubles{} + 0x1p52) + (longs)(rounded > y);
}

INLINE void weigh_half(const float* scores, const Scale& scale, int64_t lowest, int64_t* out) {
    some own;
    std::memcpy(&own, scores, sizeof own);
    const doubles x = (__builtin_convertvector(own, doubles) - scale.peak) / scale.temperature;
    longs weight = weight_of(x < FLOOR ? doubles{} + FLOOR : x);
    weight &= weight >= lowest;
    std::memcpy(out, &weight, sizeof weight);
}

INLINE void weigh_all(const float* scores, const Scale& scale, int64_t lowest, int64_t* out) {
    if (!lanes_of(load(scores) >= all(scale.least))) {
        std::memset(out, 0, W * 8);
        return;
    }
    weigh_half(scores, scale, lowest, out);
    weigh_half(scores + D, scale, lowest, out + D);
}

}  // namespace

Scale scale_of(float peak, double temperature) {
    constexpr float MOST = std::numeric_limits<float>::max();
    return {peak, temperature, static_cast<float>(std::max(peak + FLOOR * temperature, -double{MOST}))};
}

void weigh(const float* scores, int64_t count, const Scale& scale, int64_t lowest, int64_t* out) {
    const int64_t whole = count / W * W, rest = count - whole;
    for (int64_t i = 0; i < whole; i += W) weigh_all(scores + i, scale, lowest, out + i);
    if (!rest) return;
    float own[W];
    int64_t weights[W];
    for (int64_t i = 0; i < W; ++i) own[i] = i < rest ? scores[whole + i] : -std::numeric_limits<float>::infinity();
    weigh_all(own, scale, lowest, weights);
    std::copy(weights, weights + rest, out + whole);
}

}  // namespace looped
