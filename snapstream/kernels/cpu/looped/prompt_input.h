// The input of products with many tokens, packed and rounded by whoever makes it, in ranges that stay in a near cache
// (prompt_layer.cpp, prompt_experts.cpp).
#pragma once
#include "bf16.h"
#include "codes.h"
#include "engine.h"

namespace looped {

constexpr int64_t NEAR_BYTES = 768 * 1024;  // of packed input, beside a panel and its sums

// The input of a matrix, packed in ranges of tokens.
class Input {
  public:
    Input(const Stack& matrix, int64_t tokens, float* packed) : matrix_(matrix), tokens_(tokens), packed_(packed) {
        const int64_t bytes = tokens * matrix.cols * (takes_bf16(matrix) ? 2 : 4);
        const int64_t ranges = std::max<int64_t>(1, (bytes + NEAR_BYTES - 1) / NEAR_BYTES);
        size_ = std::max<int64_t>(1, ((tokens + ranges - 1) / ranges + MOST - 1) / MOST * MOST);
    }

    int64_t ranges() const { return (tokens_ + size_ - 1) / size_; }
    int64_t begin(int64_t range) const { return range * size_; }
    int64_t most() const { return std::min(size_, tokens_); }
    Groups groups(int64_t range) const { return Groups(std::min(size_, tokens_ - begin(range))); }
    float* of(int64_t range) const { return packed_ + begin(range) * padded(matrix_.cols); }

    // Columns `first` and further of a token; codes in whole groups.
    void put(int64_t token, const float* x, int64_t first, int64_t count) const { At(*this, token).put(x, first, count); }

    // A token, from which the next is cheaper to find than by its number.
    class At {
      public:
        At(const Input& input, int64_t token)
            : input_(input), range_(token / input.size_), place_(input.groups(range_), token - input.begin(range_)),
              left_(std::min(input.begin(range_ + 1), input.tokens_) - token) {}
        void put(const float* x, int64_t first, int64_t count) const {
            put_input(input_.matrix_, input_.of(range_), place_, x, first, count);
        }
        void next() {
            if (--left_ > 0) return place_.next();
            if (++range_ == input_.ranges()) return;
            const Groups groups = input_.groups(range_);
            place_ = Place(groups, 0), left_ = groups.tokens;
        }

      private:
        const Input& input_;
        int64_t range_;
        Place place_;
        int64_t left_;
    };

  private:
    const Stack& matrix_;
    int64_t tokens_, size_;
    float* packed_;
};

inline int64_t panels_of(const Stack& matrix) { return (matrix.rows + PANEL - 1) / PANEL; }

// silu(gate) * up of a panel of each, times the share of a token where there are shares: columns of the next input.
inline void activate(const Input& input, const float* bias, int64_t inner, const float* gates, const float* ups,
                     const float* shares, int64_t begin, int64_t tokens, int64_t first) {
    float gate_bias[PANEL] = {}, up_bias[PANEL] = {}, active[PANEL];
    if (bias) {
        std::copy(bias + first, bias + first + PANEL, gate_bias);
        std::copy(bias + inner + first, bias + inner + first + PANEL, up_bias);
    }
    Input::At at(input, begin);
    for (int64_t t = 0; t < tokens; ++t, at.next()) {
        const vec share = all(shares ? shares[begin + t] : 1.0f);
        for (int v = 0; v < PANEL; v += W) {
            const vec gate = load(gates + t * PANEL + v) + load(gate_bias + v);
            const vec up = load(ups + t * PANEL + v) + load(up_bias + v);
            store(active + v, gate / (1.0f + exponential(-gate)) * up * share);
        }
        at.put(active, first, PANEL);
    }
}

}  // namespace looped
