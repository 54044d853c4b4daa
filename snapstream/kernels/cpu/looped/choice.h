// Which experts the tokens of a step pass: the formula of ../../../layers/router.py in C++, and the pairs sorted by expert.
#pragma once
#include "latent.h"

namespace looped {

class ChoiceWorker : protected LatentWorker {
  protected:
    ChoiceWorker(Engine& engine, const Step& step, int index)
        : LatentWorker(engine, step, index), x_(engine.model.mixture), r_(engine.routed), pairs_(step.batch * x_.top_k) {}

    static constexpr int64_t ELSEWHERE = -1;  // the span of a pair whose expert lies on another rank

    // Of the layer-th of those with experts: token b by its scores.
    void choose_of(int64_t layer, int64_t b) {
        choose_by(r_.scores + b * (x_.experts + W), x_.correction ? x_.correction + layer * x_.experts : nullptr, b);
    }

    void sort_pairs() {
        std::fill(r_.ends.begin(), r_.ends.end(), 0);
        for (int64_t i = 0; i < pairs_; ++i) ++r_.ends[r_.chosen[i] + 1];
        r_.num_spans = 0;
        for (int64_t expert = 0; expert < x_.experts; ++expert) {
            const int64_t count = r_.ends[expert + 1], begin = r_.ends[expert];
            r_.ends[expert + 1] += begin;
            if (count && is_held(expert)) r_.spans[r_.num_spans++] = {expert - x_.first_held, begin, count};
        }
        for (int64_t i = 0; i < pairs_; ++i) {  // by token: those of an expert keep that order
            const int64_t pair = r_.ends[r_.chosen[i]]++;
            r_.pair_of[i] = pair;
            r_.token[pair] = i / x_.top_k;
            r_.share_of[pair] = r_.shares[i];
            r_.span_of[pair] = ELSEWHERE;
        }
        for (int64_t span = 0; span < r_.num_spans; ++span)
            for (int64_t i = 0; i < r_.spans[span].count; ++i) r_.span_of[r_.spans[span].begin + i] = span;
    }

    const Mixture& x_;
    MixtureBuffers& r_;
    const int64_t pairs_;  // of this step

  private:
    bool is_held(int64_t expert) const { return expert >= x_.first_held && expert < x_.first_held + x_.held; }

    void weigh_scores(float* scores) const {
        const int64_t count = x_.experts;
        const float lowest = -std::numeric_limits<float>::infinity();
        float most = x_.is_sigmoid ? 0.0f : lowest, total = 0.0f;
        if (!x_.is_sigmoid)
            for (int64_t i = 0; i < count; ++i) most = scores[i] > most ? scores[i] : most;
        for (int64_t i = 0; i < count; i += W) {
            const vec own = load(scores + i);  // a line has room for a vector behind the last score
            store(scores + i, x_.is_sigmoid ? 1.0f / (1.0f + exponential(-own)) : exponential(own - most));
        }
        if (x_.is_sigmoid) return;
        for (int64_t i = 0; i < count; ++i) total += scores[i];
        for (int64_t i = 0; i < count; ++i) scores[i] /= total;
    }

    // `count` of the numbers, greatest first and the first among equals; each goes to take(index) and is then out.
    template <class Take>
    static void take_best(float* numbers, char* is_taken, int64_t size, int64_t count, Take take) {
        std::fill(is_taken, is_taken + size, 0);
        for (int64_t j = 0; j < count; ++j) {
            int64_t best = -1;
            for (int64_t i = 0; i < size; ++i)
                if (!is_taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
            is_taken[best] = 1;
            take(best);
        }
    }

    void choose_by(float* scores, const float* correction, int64_t b) {
        constexpr float TINY = 1e-20f;
        const int64_t count = x_.experts;
        float *choice = scratch_, *group_scores = scratch_ + count;
        char *is_taken = reinterpret_cast<char*>(scratch_ + 2 * count), *is_inside = is_taken + count;
        weigh_scores(scores);
        for (int64_t i = 0; i < count; ++i) choice[i] = scores[i] + (correction ? correction[i] : 0.0f);
        if (x_.groups > 1) {
            const int64_t size = count / x_.groups;
            for (int64_t g = 0; g < x_.groups; ++g) {
                float sum = 0.0f;
                float* own = choice + g * size;
                take_best(own, is_taken, size, x_.best_of_group, [&](int64_t i) { sum += own[i]; });
                group_scores[g] = sum;
            }
            std::fill(is_inside, is_inside + x_.groups, 0);
            take_best(group_scores, is_taken, x_.groups, x_.top_groups, [&](int64_t g) { is_inside[g] = 1; });
            for (int64_t i = 0; i < count; ++i)
                if (!is_inside[i / size]) choice[i] = -std::numeric_limits<float>::infinity();
        }
        int64_t* chosen = r_.chosen.data() + b * x_.top_k;
        float *shares = r_.shares + b * x_.top_k, total = 0.0f;
        int64_t next = 0;
        take_best(choice, is_taken, count, x_.top_k, [&](int64_t expert) { chosen[next++] = expert; });
        for (int64_t j = 0; j < x_.top_k; ++j) total += scores[chosen[j]];
        for (int64_t j = 0; j < x_.top_k; ++j)
            shares[j] = (x_.normalises ? scores[chosen[j]] / (total + TINY) : scores[chosen[j]]) * x_.scale;
    }
};

}  // namespace looped
