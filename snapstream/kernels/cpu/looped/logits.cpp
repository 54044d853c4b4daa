// Logits processors, and the candidates of a draw.
//
// Arithmetic of the processors is the reference's, rounded to fp32 after every operation: a product and a sum must not
// become one instruction there, which the numbers in memory (volatile) keep the compiler from.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "sampling.h"

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
                found = (word >> (i - first) & 1)
                    && std::find(stops(), stops() + s_.num_stop_ids, i) == stops() + s_.num_stop_ids;
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

// -- candidates

namespace {

#if ISA == 512
constexpr ints FROM_ZERO = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

// The scores of a group as vectors, behind the last token NONE: use(first token, scores).
template <class Use>
INLINE void for_group(const float* scores, int64_t vocab, int64_t group, Use use) {
    const int64_t first = group * GROUP, last = std::min(first + GROUP, vocab), whole = first + (last - first) / W * W;
    for (int64_t i = first; i < whole; i += W) use(i, load(scores + i));
    if (whole == last) return;
    float own[W];
    for (int64_t i = 0; i < W; ++i) own[i] = whole + i < last ? scores[whole + i] : NONE;
    use(whole, load(own));
}

struct Range {
    float most = NONE, least = -NONE;
    void take(float score) {
        most = score > most ? score : most;
        least = score < least ? score : least;
    }
};

Range range_of(const float* scores, int64_t count) {
    vec most = all(NONE), least = all(-NONE);
    const int64_t whole = count / W * W;
    for (int64_t i = 0; i < whole; i += W) {
        const vec own = load(scores + i);
        most = own > most ? own : most;
        least = own < least ? own : least;
    }
    Range range{max_of(most), -max_of(-least)};
    for (int64_t i = whole; i < count; ++i) range.take(scores[i]);
    return range;
}

// Of a range that is no point: its greatest score lies in the first bucket, its least in the last. The number of a
// bucket never falls as scores fall, and equal scores share one; so each round of a search leaves fewer scores than
// it had.
struct Buckets {
    static constexpr int32_t COUNT = 1024;
    const double top, factor;

    explicit Buckets(const Range& range) : top(range.most), factor(COUNT / (top - range.least)) {}
    int32_t of(float score) const { return static_cast<int32_t>(std::min((top - score) * factor, COUNT - 1.0)); }
};

// The bucket in which the limit is crossed, and what is left of the limit within; COUNT where it is not.
int32_t crossing(const int64_t* sums, int64_t& limit) {
    int32_t bucket = 0;
    while (bucket < Buckets::COUNT && sums[bucket] < limit) limit -= sums[bucket++];
    return bucket;
}

}  // namespace

Peak find_peak(const float* scores, int64_t vocab, float* maxima) {
    vec peak = all(NONE);
    ints is_number = ~ints{};
    for (int64_t group = 0; group * GROUP < vocab; ++group) {
        vec most = all(NONE);
        for_group(scores, vocab, group, [&](int64_t, vec own) {
            most = own > most ? own : most;
            is_number &= own == own;
        });
        store(maxima + group * W, most);
        peak = most > peak ? most : peak;
    }
    const float score = max_of(peak);
    return {score, !lanes_of(~is_number) && std::isfinite(score)};
}

int64_t first_with(float score, const float* scores, int64_t vocab, const float* maxima) {
    for (int64_t group = 0; group * GROUP < vocab; ++group) {
        if (!may_hold(maxima, group, score)) continue;
        const int64_t last = std::min((group + 1) * GROUP, vocab);
        const float* found = std::find(scores + group * GROUP, scores + last, score);
        if (found != scores + last) return found - scores;
    }
    return 0;
}

float kth_largest(const float* numbers, int64_t count, int64_t k, float* copy) {
    std::copy(numbers, numbers + count, copy);
    std::nth_element(copy, copy + k - 1, copy + count, std::greater<float>());
    return copy[k - 1];
}

void Candidates::take(const float* line, int64_t vocab, const float* maxima, float least) {
    count = 0;
    for (int64_t group = 0; group * GROUP < vocab; ++group) {
        if (!may_hold(maxima, group, least)) continue;
        for_group(line, vocab, group, [&](int64_t first, vec own) {
            uint32_t lanes = lanes_of(own >= all(least));
#if ISA == 512
            const __m512i next = (__m512i)(FROM_ZERO + static_cast<int32_t>(first));
            _mm512_storeu_ps(scores + count, _mm512_maskz_compress_ps(lanes, (__m512)own));
            _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(lanes, next));
            count += __builtin_popcount(lanes);
#else
            for (; lanes; lanes &= lanes - 1) {
                const int lane = __builtin_ctz(lanes);
                ids[count] = static_cast<int32_t>(first + lane);
                scores[count++] = own[lane];
            }
#endif
        });
    }
}

void Candidates::keep(float least) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
        ids[kept] = ids[i];
        scores[kept] = scores[i];
        kept += scores[i] >= least;
    }
    count = kept;
}

float nucleus_score(const float* scores, const int64_t* weights, int64_t count, int64_t limit, int32_t* places) {
    constexpr int64_t FEW = 128;
    // Only what lies in the bucket where the limit is crossed is looked at again.
    if (count > FEW) {
        const Range range = range_of(scores, count);
        if (range.most == range.least) return range.least;
        const Buckets buckets(range);
        int64_t sums[Buckets::COUNT] = {}, kept = 0;
        for (int64_t i = 0; i < count; ++i) places[i] = buckets.of(scores[i]);
        for (int64_t i = 0; i < count; ++i) sums[places[i]] += weights[i];
        const int32_t crossed = crossing(sums, limit);
        for (int64_t i = 0; i < count; ++i) {
            const bool is_inside = places[i] == crossed;
            places[kept] = static_cast<int32_t>(i);
            kept += is_inside;
        }
        count = kept;
    } else {
        for (int64_t i = 0; i < count; ++i) places[i] = static_cast<int32_t>(i);
    }
    while (count > FEW) {
        Range range;
        for (int64_t i = 0; i < count; ++i) range.take(scores[places[i]]);
        if (range.most == range.least) return range.least;
        const Buckets buckets(range);
        int64_t sums[Buckets::COUNT] = {}, kept = 0;
        for (int64_t i = 0; i < count; ++i) sums[buckets.of(scores[places[i]])] += weights[places[i]];
        const int32_t crossed = crossing(sums, limit);
        for (int64_t i = 0; i < count; ++i) {
            const int32_t place = places[i];
            places[kept] = place;
            kept += buckets.of(scores[place]) == crossed;
        }
        count = kept;
    }
    std::sort(places, places + count, [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
    for (int64_t i = 0; i < count; ++i) {
        limit -= weights[places[i]];
        if (limit <= 0) return scores[places[i]];
    }
    return NONE;
}

}  // namespace looped
