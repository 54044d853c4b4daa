// A mixture of experts in the place of a layer's MLP, in six stages: norm; the router's scores, and gate and up of the
// shared experts; the choice; gate and up of the chosen; activation; down and the weighted sum.
//
// The chosen matrices are read where they lie, once for all tokens that chose them. Invariant: what a token gets does not
// depend on its neighbours: its experts are summed in the order of its own choice, the shared ones behind them. The
// router is ../../../layers/router.py in C++.
#pragma once
#include "latent.h"

namespace looped {

class MixtureWorker : protected LatentWorker {
  protected:
    MixtureWorker(Engine& engine, const Step& step, int index)
        : LatentWorker(engine, step, index), x_(engine.model.mixture), r_(engine.routed), pairs_(step.batch * x_.top_k) {}

    bool is_mixture(int64_t layer) const { return x_.experts && layer >= x_.first_layer; }

    void mixture_stage(int64_t layer, int64_t stage) {
        const int64_t own = layer - x_.first_layer;
        switch (stage) {
            case 0: return norm_tokens(m_.post_norm + layer * m_.hidden);
            case 1: return score(own);
            case 2: return choose(own);
            case 3: return expand(own);
            case 4: return activate_pairs();
            default: return add_up_experts(own);
        }
    }

  private:
    static constexpr int64_t ELSEWHERE = -1;  // the span of a pair whose expert lies on another rank

    bool is_held(int64_t expert) const { return expert >= x_.first_held && expert < x_.first_held + x_.held; }

    void norm_tokens(const float* weight) {
        const int64_t wide = padded(m_.hidden);
        share(s_.batch, 1, [&](int64_t b) {
            settle(AFTER_ATTENTION, b);
            const float* from = e_.residual + b * m_.hidden;
            const float factor = norm_factor(from, m_.hidden, m_.eps);
            float* to = r_.normed + b * wide;
            for (int64_t i = 0; i < m_.hidden; ++i) to[i] = from[i] * factor * weight[i];
            std::fill(to + m_.hidden, to + wide, 0.0f);
            if (x_.shared_inner) pack(to, r_.packed, groups_, b, m_.hidden);
        });
    }

    static void pack(const float* from, float* base, const Groups& groups, int64_t token, int64_t cols) {
        const Packed to(base, groups, token, cols);
        for (int64_t i = 0; i < cols; ++i) to.put(i, from[i]);
        to.end(cols);
    }

    static const char* panels_at(const Stack& stack, int64_t matrix, int64_t first) {
        return stack.data + matrix * stack.layer_bytes + first * stack.panel_bytes;
    }

    // `count` panels from `first` on of one matrix, one or two at once; emit(i of count, sums [tokens][32]).
    template <class Emit>
    void multiply(const Stack& stack, int64_t matrix, int64_t first, int64_t count, const float* x, const Groups& groups,
                  Emit emit) {
        const char* data = panels_at(stack, matrix, first);
        const Products products = products_with(stack);
        if (count == 2 && groups.tokens <= PAIR_TOKENS) {
            products.of_two(stack, data, x, groups, scratch_);
            emit(0, scratch_);
            return emit(1, scratch_ + groups.tokens * PANEL);
        }
        for (int64_t i = 0; i < count; ++i) {
            products.of_one(stack, data + i * stack.panel_bytes, x, i + 1 < count ? Groups(groups.tokens) : groups, scratch_);
            emit(i, scratch_);
        }
    }

    static int64_t panels_of(const Stack& stack) { return (stack.rows + PANEL - 1) / PANEL; }
    static int64_t panels_left(const Stack& stack, int64_t first) { return std::min<int64_t>(2, panels_of(stack) - first); }

    // One or two panels of a matrix with gate and up, of tokens that go to lines [count][rows] of `out`.
    void raw_gate_up(const Stack& stack, int64_t matrix, int64_t first, const float* x, const Groups& groups, float* out) {
        multiply(stack, matrix, first, panels_left(stack, first), x, groups, [&](int64_t i, const float* sums) {
            const int64_t row = (first + i) * PANEL, count = std::min<int64_t>(PANEL, stack.rows - row);
            for (int64_t t = 0; t < groups.tokens; ++t)
                std::memcpy(out + t * stack.rows + row, sums + t * PANEL, count * 4);
        });
    }

    void score(int64_t layer) {
        const int64_t blocks = (x_.experts + W - 1) / W, wide = padded(m_.hidden), line = x_.experts + W;
        const int64_t shared = x_.shared_inner ? (panels_of(x_.shared_gate_up) + 1) / 2 : 0;
        share(blocks + shared, 1, [&](int64_t task) {
            if (task >= blocks)
                return raw_gate_up(x_.shared_gate_up, layer, (task - blocks) * 2, r_.packed, groups_, r_.shared_gate_up);
            const int64_t first = task * W, count = std::min<int64_t>(W, x_.experts - first);
            const float* router = x_.router + (layer * x_.experts + first) * m_.hidden;
            for (int64_t b = 0; b < s_.batch; b += MOST_DOTS) {
                const int64_t tokens = std::min<int64_t>(MOST_DOTS, s_.batch - b);
                dots(tokens, r_.normed + b * wide, wide, router, count, m_.hidden, scratch_, W);
                for (int64_t t = 0; t < tokens; ++t)
                    std::memcpy(r_.scores + (b + t) * line + first, scratch_ + t * W, count * 4);
            }
        });
    }

    // -- the choice

    void choose(int64_t layer) {
        const float* correction = x_.correction ? x_.correction + layer * x_.experts : nullptr;
        share(s_.batch, 1, [&](int64_t b) {
            choose_of(r_.scores + b * (x_.experts + W), correction, b);
            if (r_.left.fetch_add(1, std::memory_order_acq_rel) + 1 < s_.batch) return;
            r_.left.store(0, std::memory_order_relaxed);
            sort_pairs();
        });
    }

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

    void choose_of(float* scores, const float* correction, int64_t b) {
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

    // -- the chosen experts

    void expand(int64_t layer) {
        const int64_t tasks = (panels_of(x_.gate_up) + 1) / 2, wide = padded(m_.hidden);
        int64_t held = -1;  // the span whose tokens this member has packed
        share(r_.num_spans * tasks, 1, [&](int64_t task) {
            const Span& span = r_.spans[task / tasks];
            const bool goes_on = (task + 1) % tasks || task + 1 == r_.num_spans * tasks;  // behind its own panels
            const int64_t next = layer * x_.held + r_.spans[goes_on ? 0 : task / tasks + 1].expert;
            const Groups groups(span.count, goes_on ? nullptr : panels_at(x_.gate_up, next, 0));
            const float* x = r_.normed + r_.token[span.begin] * wide;  // one token is packed as it lies
            if (span.count > 1) {
                x = r_.own[me_];
                for (int64_t i = 0; i < span.count && held != task / tasks; ++i)
                    pack(r_.normed + r_.token[span.begin + i] * wide, r_.own[me_], groups, i, m_.hidden);
                held = task / tasks;
            }
            float* out = r_.gate_up + span.begin * 2 * x_.inner;
            raw_gate_up(x_.gate_up, layer * x_.held + span.expert, task % tasks * 2, x, groups, out);
        });
    }

    void activate_pairs() {
        constexpr int64_t PIECE = 16 * W;
        const int64_t pieces = (x_.inner + PIECE - 1) / PIECE, shared = (x_.shared_inner + PIECE - 1) / PIECE;
        share(pairs_ * pieces + s_.batch * shared, 4, [&](int64_t task) {
            if (task < pairs_ * pieces) {
                const int64_t pair = task / pieces;
                if (r_.span_of[pair] == ELSEWHERE) return;
                const Span& span = r_.spans[r_.span_of[pair]];
                float* base = r_.inner + span.begin * padded(x_.inner);
                const Packed to(base, Groups(span.count), pair - span.begin, x_.inner);
                activate_piece(r_.gate_up + pair * 2 * x_.inner, x_.inner, task % pieces * PIECE, r_.share_of[pair], to);
            } else {
                const int64_t rest = task - pairs_ * pieces, b = rest / shared;
                const Packed to(r_.shared_inner, groups_, b, x_.shared_inner);
                const float* gate = r_.shared_gate_up + b * 2 * x_.shared_inner;
                activate_piece(gate, x_.shared_inner, rest % shared * PIECE, 1.0f, to);
            }
        });
    }

    static void activate_piece(const float* gate, int64_t inner, int64_t first, float share, const Packed& to) {
        const float* up = gate + inner;
        const int64_t last = std::min<int64_t>(first + 16 * W, inner);
        for (int64_t i = first; i < last; i += W) {
            const int64_t count = std::min<int64_t>(W, last - i);
            const vec own = load_some(gate + i, count);
            float lanes[W];
            store(lanes, own / (1.0f + exponential(-own)) * load_some(up + i, count) * share);
            for (int64_t j = 0; j < count; ++j) to.put(i + j, lanes[j]);
        }
        if (last == inner) to.end(inner);
    }

    void add_up_experts(int64_t layer) {
        const int64_t panels = panels_of(x_.down), at_once = panels >= 4 * e_.team.size() ? 2 : 1;
        const int64_t lines = pairs_ + s_.batch;  // of a panel: those of the pairs, then those of the shared experts
        float* own = r_.sums[me_];
        share((panels + at_once - 1) / at_once, 1, [&](int64_t task) {
            const int64_t first = task * at_once, count = std::min(at_once, panels - first);
            const auto keep = [&](int64_t line, int64_t num) {
                return [=](int64_t i, const float* sums) {
                    std::memcpy(own + (i * lines + line) * PANEL, sums, num * PANEL * 4);
                };
            };
            for (int64_t i = 0; i < r_.num_spans; ++i) {
                const Span& span = r_.spans[i];
                const bool is_last = i + 1 == r_.num_spans;  // then come the next panels of the first
                const int64_t next = layer * x_.held + r_.spans[is_last ? 0 : i + 1].expert;
                const Groups groups(span.count, panels_at(x_.down, next, first + (is_last ? count : 0)));
                multiply(x_.down, layer * x_.held + span.expert, first, count,
                         r_.inner + span.begin * padded(x_.inner), groups, keep(span.begin, span.count));
            }
            if (x_.shared_inner)
                multiply(x_.shared_down, layer, first, count, r_.shared_inner, groups_, keep(pairs_, s_.batch));
            for (int64_t i = 0; i < count; ++i) add_panel(own + i * lines * PANEL, (first + i) * PANEL);
        });
    }

    // The lines of one panel to the residual stream, or to this rank's part of the sum, from row `first` on.
    void add_panel(const float* sums, int64_t first) {
        const int64_t rows = std::min<int64_t>(PANEL, m_.hidden - first);
        for (int64_t b = 0; b < s_.batch; ++b) {
            float total[PANEL] = {};
            for (int64_t j = 0; j < x_.top_k; ++j) {
                const int64_t pair = r_.pair_of[b * x_.top_k + j];
                if (r_.span_of[pair] == ELSEWHERE) continue;
                const float* own = sums + pair * PANEL;
                for (int i = 0; i < PANEL; ++i) total[i] += own[i];
            }
            const float* shared = sums + (pairs_ + b) * PANEL;
            for (int i = 0; i < PANEL && x_.shared_inner; ++i) total[i] += shared[i];
            const int64_t at = b * m_.hidden + first;
            if (e_.meeting.is_alone())
                for (int64_t i = 0; i < rows; ++i) e_.residual[at + i] += total[i];
            else std::copy(total, total + rows, own_part(AFTER_MLP) + at);
        }
    }

    const Mixture& x_;
    MixtureBuffers& r_;
    const int64_t pairs_;  // of this step
};

}  // namespace looped
