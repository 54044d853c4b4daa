// See adjust.h. Arithmetic is the reference's, rounded to fp32 after every operation: a product and a sum must not become
// one instruction here, which the numbers in memory (volatile) keep the compiler from.
#include "adjust.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace looped {

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int64_t BITS = 32;  // tokens of a word of a grammar; of as many, none may need a penalty

class Adjusted {
  public:
    Adjusted(const Sampling& sampling, int64_t row, float* line) : s_(sampling), row_(row), line_(line) {}

    void add_bias() {
        const int64_t* ids = s_.bias_ids + row_ * s_.num_bias;
        const float* values = s_.bias_values + row_ * s_.num_bias;
        for (int64_t i = 0; i < s_.num_bias; ++i) line_[ids[i]] += values[i];
    }

    void hold_back_stops() {
        for (int64_t i = 0; i < s_.num_stop_ids; ++i) line_[stops()[i]] = NONE;
    }

    void penalise() {
        const int32_t* counts = s_.output_counts + row_ * s_.vocab;
        const bool* seen = s_.prompt_seen + row_ * s_.vocab;
        for (int64_t first = 0; first < s_.vocab; first += BITS) {
            const int64_t last = std::min(first + BITS, s_.vocab);
            int32_t any = 0;
            for (int64_t i = first; i < last; ++i) any |= counts[i] | seen[i];
            for (int64_t i = first; any && i < last; ++i)
                if (counts[i] || seen[i]) line_[i] = penalised(line_[i], counts[i]);
        }
    }

    void forbid() {
        for_words([&](int64_t first, int64_t last, uint32_t word) {
            if (word == ~0u) return;
            for (int64_t i = first; i < last; ++i)
                if (!(word >> (i - first) & 1)) line_[i] = NONE;
        });
    }

    // Whether a grammar allows a token that is no stop id.
    bool allows_more_than_stops() const {
        bool found = false;
        for_words([&](int64_t first, int64_t last, uint32_t word) {
            for (int64_t i = first; word && !found && i < last; ++i)
                found = (word >> (i - first) & 1) && std::find(stops(), stops() + s_.num_stop_ids, i) == stops() + s_.num_stop_ids;
        });
        return found;
    }

  private:
    const int64_t* stops() const { return s_.stop_ids + row_ * s_.num_stop_ids; }

    float penalised(float score, int32_t count) const {  // of a token of the prompt or the output
        volatile float scaled = score > 0.0f ? score / s_.repetition[row_] : score * s_.repetition[row_];
        if (!count) return scaled;
        volatile float product = s_.frequency[row_] * static_cast<float>(count);
        return scaled - (product + s_.presence[row_]);
    }

    template <class Use>
    void for_words(Use use) const {
        const int32_t* words = s_.allowed + row_ * ((s_.vocab + BITS - 1) / BITS);
        for (int64_t first = 0; first < s_.vocab; first += BITS)
            use(first, std::min(first + BITS, s_.vocab), static_cast<uint32_t>(words[first / BITS]));
    }

    const Sampling& s_;
    const int64_t row_;
    float* line_;
};

}  // namespace

bool has_penalties(const Sampling& sampling, int64_t row) {
    return sampling.repetition[row] != 1.0f || sampling.frequency[row] != 0.0f || sampling.presence[row] != 0.0f;
}

bool adjust(const Sampling& sampling, const Draw& call, int64_t b, float* line) {
    const int64_t row = call.rows[b], words = (sampling.vocab + BITS - 1) / BITS;
    const float* bias = sampling.bias_values + row * sampling.num_bias;
    const int32_t* allowed = sampling.allowed + row * words;
    const auto is_no_bias = [](float value) { return value == 0.0f; };
    const auto allows_all = [](int32_t word) { return word == -1; };
    const bool is_biased = call.bias && !std::all_of(bias, bias + sampling.num_bias, is_no_bias);
    const bool is_early = call.min_tokens && sampling.num_sampled[row] < sampling.min_tokens[row];
    const bool is_penalised = call.penalties && has_penalties(sampling, row);
    const bool is_masked = call.grammar && !std::all_of(allowed, allowed + words, allows_all);
    if (!is_biased && !is_early && !is_penalised && !is_masked) return false;
    const float* logits = call.logits + b * sampling.vocab;
    std::copy(logits, logits + sampling.vocab, line);
    Adjusted scores(sampling, row, line);
    if (is_biased) scores.add_bias();
    if (is_early && (!call.grammar || scores.allows_more_than_stops())) scores.hold_back_stops();
    if (is_penalised) scores.penalise();
    if (is_masked) scores.forbid();
    return true;
}

}  // namespace looped
