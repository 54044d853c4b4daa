// A mixture of experts in the place of a layer's MLP: norm; the router's scores beside gate and up of the shared experts; the
// choice, which with few tokens is made by whoever scores last; gate and up of the chosen; activation, which is made with
// them where both are whole panels; down and the weighted sum.
//
// The chosen matrices are read where they lie, once for all tokens that chose them. Invariant: what a token gets does not
// depend on its neighbours: its experts are summed in the order of its own choice, the shared ones behind them.
#pragma once
#include "choice.h"

namespace looped {

class MixtureWorker : protected ChoiceWorker {
  protected:
    MixtureWorker(Engine& engine, const Step& step, int index) : ChoiceWorker(engine, step, index) {}

    bool is_mixture(int64_t layer) const { return x_.experts && layer >= x_.first_layer; }

    // Whether a stage of a layer has nothing to do in a step: then nobody waits for it.
    bool is_mixture_stage_empty(int64_t stage) const {
        return (stage == 2 && chooses_at_once()) || (stage == 4 && activates_experts_at_once());
    }

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

    // -- gate and up that are made with their activation

    bool activates_experts_at_once() const { return x_.inner % PANEL == 0 && x_.shared_inner % PANEL == 0; }

    // The i-th panels of gate and of up of a matrix, activated, times shares where there are any: columns of packed `out`,
    // the input of `down`.
    void active_gate_up(const Stack& stack, int64_t matrix, int64_t i, const float* x, int64_t tokens, const char* next,
                        const float* shares, const Stack& down, float* out) {
        const int64_t apart = stack.rows / 2 / PANEL * stack.panel_bytes;
        gate_and_up(stack, panels_at(stack, matrix, i), x, Groups(tokens, next, apart));
        activate_panel(down, nullptr, i * PANEL, tokens, shares, out);
    }

    // -- the router

    bool chooses_at_once() const { return s_.batch <= 4; }  // more choices than that are worth a stage of their own

    void score(int64_t layer) {
        const int64_t blocks = (x_.experts + W - 1) / W;
        const int64_t shared = x_.shared_inner ? (panels_of(x_.shared_gate_up) + 1) / 2 : 0;
        share(blocks + shared, 1, [&](int64_t task) {
            const int64_t own = task - blocks;
            if (own >= 0 && activates_experts_at_once())
                return active_gate_up(x_.shared_gate_up, layer, own, r_.packed, s_.batch,
                                      panels_at(x_.shared_gate_up, layer, own + 1), nullptr, x_.shared_down,
                                      r_.shared_inner);
            if (own >= 0)
                return raw_gate_up(x_.shared_gate_up, layer, own * 2, r_.packed, groups_, r_.shared_gate_up);
            score_block(layer, task * W);
            if (!chooses_at_once() || r_.left.fetch_add(1, std::memory_order_acq_rel) + 1 < blocks) return;
            r_.left.store(0, std::memory_order_relaxed);
            for (int64_t b = 0; b < s_.batch; ++b) choose_of(layer, b);
            sort_pairs();
        });
    }

    void score_block(int64_t layer, int64_t first) {
        const int64_t wide = padded(m_.hidden), line = x_.experts + W, count = std::min<int64_t>(W, x_.experts - first);
        const float* router = x_.router + (layer * x_.experts + first) * m_.hidden;
        for (int64_t b = 0; b < s_.batch; b += MOST_DOTS) {
            const int64_t tokens = std::min<int64_t>(MOST_DOTS, s_.batch - b);
            dots(tokens, r_.normed + b * wide, wide, router, count, m_.hidden, scratch_, W);
            for (int64_t t = 0; t < tokens; ++t)
                std::memcpy(r_.scores + (b + t) * line + first, scratch_ + t * W, count * 4);
        }
    }

    void choose(int64_t layer) {
        share(s_.batch, 1, [&](int64_t b) {
            choose_of(layer, b);
            if (r_.left.fetch_add(1, std::memory_order_acq_rel) + 1 < s_.batch) return;
            r_.left.store(0, std::memory_order_relaxed);
            sort_pairs();
        });
    }

    // -- the chosen experts

    void expand(int64_t layer) {
        const int64_t tasks = (panels_of(x_.gate_up) + 1) / 2, all = r_.num_spans * tasks, wide = padded(m_.hidden);
        const bool is_whole = activates_experts_at_once();
        const int64_t own_last = all * (me_ + 1) / e_.team.size() - 1, panel = first_down(me_);
        int64_t held = -1;  // the span whose tokens this member has packed
        share(all, 1, [&](int64_t task) {
            const int64_t place = task / tasks, i = task % tasks;
            const Span& span = r_.spans[place];
            const char* next = panels_at(x_.gate_up, layer * x_.held + span.expert, is_whole ? i + 1 : 2 * i + 2);
            if (task == own_last) next = panels_at(x_.down, layer * x_.held + r_.spans[0].expert, panel);
            else if (i + 1 == tasks && task + 1 < all)
                next = panels_at(x_.gate_up, layer * x_.held + r_.spans[place + 1].expert, 0);
            const float* x = r_.normed + r_.token[span.begin] * wide;  // one token is packed as it lies
            if (span.count > 1) {
                x = r_.own[me_];
                const Groups groups(span.count);
                for (int64_t t = 0; t < span.count && held != place; ++t)
                    pack(r_.normed + r_.token[span.begin + t] * wide, r_.own[me_], groups, t, m_.hidden);
                held = place;
            }
            const int64_t matrix = layer * x_.held + span.expert;
            if (is_whole)
                return active_gate_up(x_.gate_up, matrix, i, x, span.count, next, r_.share_of.data() + span.begin,
                                      x_.down, r_.inner + span.begin * padded(x_.inner));
            raw_gate_up(x_.gate_up, matrix, i * 2, x, Groups(span.count, next), r_.gate_up + span.begin * 2 * x_.inner);
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

    // Panels of a task that adds up, and the first one of a member's own tasks.
    int64_t down_at_once() const { return panels_of(x_.down) >= 4 * e_.team.size() ? 2 : 1; }
    int64_t first_down(int64_t member) const {
        const int64_t tasks = (panels_of(x_.down) + down_at_once() - 1) / down_at_once();
        return tasks * member / e_.team.size() * down_at_once();
    }

    void add_up_experts(int64_t layer) {
        const int64_t panels = panels_of(x_.down), at_once = down_at_once();
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
};

}  // namespace looped
