// Products of a step with matrices in panels, and what makes their inputs.
#pragma once
#include "blocks.h"
#include "worker.h"

namespace looped {

class ProductWorker : protected Worker {
  protected:
    ProductWorker(Engine& engine, const Step& step, int index) : Worker(engine, step, index) {}

    template <class Emit>  // emit(first row, rows, sums [B][32])
    void product(const Stack& stack, int64_t layer, const float* packed, Emit emit) {
        const char* data = stack.data + layer * stack.layer_bytes;
        const Products multiply = products_with(stack);
        const int64_t panels = (stack.rows + PANEL - 1) / PANEL, at_once = s_.batch <= PAIR_TOKENS ? 2 : 1;
        const int64_t grain = std::max<int64_t>(1, (1 << 15) / (at_once * stack.panel_bytes));
        share((panels + at_once - 1) / at_once, grain, [&](int64_t task) {
            const int64_t panel = task * at_once, count = std::min(at_once, panels - panel);
            (count == 2 ? multiply.of_two : multiply.of_one)(
                stack, data + panel * stack.panel_bytes, packed ? packed : e_.packed, groups_, scratch_);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t first = (panel + i) * PANEL;
                emit(first, std::min<int64_t>(PANEL, stack.rows - first), scratch_ + i * s_.batch * PANEL);
            }
        });
    }

    // To out [B, rows]; packed: the input, null for what the stage before made.
    void project(const Stack& stack, int64_t layer, const float* bias, float* out, const float* packed = nullptr) {
        const float* own = bias ? bias + layer * stack.rows : nullptr;
        product(stack, layer, packed, [&](int64_t first, int64_t count, const float* sums) {
            for (int64_t b = 0; b < s_.batch; ++b)
                for (int64_t i = 0; i < count; ++i)
                    out[b * stack.rows + first + i] = sums[b * PANEL + i] + (own ? own[first + i] : 0.0f);
        });
    }

    // To the residual stream, or to this rank's part of the sum.
    void add(const Stack& stack, int64_t layer, const float* bias, Turn turn, const float* packed = nullptr) {
        if (!e_.meeting.is_alone()) return project(stack, layer, bias, own_part(turn), packed);
        const float* own = bias ? bias + layer * stack.rows : nullptr;
        product(stack, layer, packed, [&](int64_t first, int64_t count, const float* sums) {
            for (int64_t b = 0; b < s_.batch; ++b)
                for (int64_t i = 0; i < count; ++i)
                    e_.residual[b * stack.rows + first + i] += sums[b * PANEL + i] + (own ? own[first + i] : 0.0f);
        });
    }

    // -- inputs of products

    // The input of a product is made piece by piece of its columns, each for all tokens: they lie side by side there, so
    // that members with tokens of their own would write to the same lines of the cache.
    static constexpr int64_t PIECE = MOST_GROUP;  // columns: whole groups of codes

    template <class Make>  // make(token, first column, columns, out)
    void make_input(const Stack& matrix, Make make) {
        share((matrix.cols + PIECE - 1) / PIECE, 1, [&](int64_t piece) {
            const int64_t first = piece * PIECE, count = std::min(PIECE, matrix.cols - first);
            float made[PIECE];
            Place place(groups_, 0);
            for (int64_t b = 0; b < s_.batch; ++b, place.next()) {
                make(b, first, count, made);
                put_input(matrix, e_.packed, place, made, first, count);
            }
        });
    }

    void norm(const float* weight, const Stack& next, Turn added) {
        share(s_.batch, 1, [&](int64_t b) {
            settle(added, b);
            e_.factors[b] = norm_factor(e_.residual + b * m_.hidden, m_.hidden, m_.eps);
        });
        end_part();
        make_input(next, [&](int64_t b, int64_t first, int64_t count, float* out) {
            const float *x = e_.residual + b * m_.hidden, factor = e_.factors[b];
            for (int64_t i = 0; i < count; ++i) out[i] = x[first + i] * factor * weight[first + i];
        });
    }

    // -- the MLP of dense layers

    // Whether gate and up are made panel by panel together with their activation, as the next product takes it.
    bool activates_at_once() const {
        return m_.inner % PANEL == 0 && (!takes_codes(m_.down) || m_.down.group == PANEL);
    }

    void expand_tokens(int64_t layer) {
        const Stack& stack = m_.gate_up;
        const float* bias = m_.gate_up_bias ? m_.gate_up_bias + layer * stack.rows : nullptr;
        if (!activates_at_once()) return project(stack, layer, m_.gate_up_bias, e_.gate_up);
        const char* data = stack.data + layer * stack.layer_bytes;
        const int64_t grain = std::max<int64_t>(1, (1 << 15) / (2 * stack.panel_bytes));
        share(m_.inner / PANEL, grain, [&](int64_t i) {
            const char* gate = data + i * stack.panel_bytes;
            const Groups groups(s_.batch, gate + stack.panel_bytes, m_.inner / PANEL * stack.panel_bytes);
            gate_and_up(stack, gate, e_.packed, groups);
            activate_panel(m_.down, bias, i * PANEL, s_.batch, nullptr, e_.gate_up);
        });
    }

    // Panels of gate and of up, `groups.apart` from it, times the tokens: to scratch, [2][tokens][32].
    void gate_and_up(const Stack& stack, const char* gate, const float* x, const Groups& groups) {
        const Products products = products_with(stack);
        if (groups.tokens <= PAIR_TOKENS) return products.of_two(stack, gate, x, groups, scratch_);
        products.of_one(stack, gate, x, Groups(groups.tokens, gate + groups.apart), scratch_);
        products.of_one(stack, gate + groups.apart, x, groups, scratch_ + groups.tokens * PANEL);
    }

    // silu(gate) * up of what gate_and_up left in scratch, times the share of a token where there are shares: 32 columns
    // of the input of `down` from `first` on. bias: of gate [inner], then of up, or null.
    void activate_panel(const Stack& down, const float* bias, int64_t first, int64_t tokens, const float* shares,
                        float* packed) {
        Place place(Groups(tokens), 0);
        float gate_bias[PANEL] = {}, up_bias[PANEL] = {}, active[PANEL];
        if (bias) {
            std::copy(bias + first, bias + first + PANEL, gate_bias);
            std::copy(bias + down.cols + first, bias + down.cols + first + PANEL, up_bias);
        }
        for (int64_t t = 0; t < tokens; ++t, place.next()) {
            const float *gates = scratch_ + t * PANEL, *ups = gates + tokens * PANEL;
            const vec share = all(shares ? shares[t] : 1.0f);
            for (int v = 0; v < PANEL; v += W)
                store(active + v, swiglu(load(gates + v) + load(gate_bias + v), load(ups + v) + load(up_bias + v)) * share);
            put_input(down, packed, place, active, first, PANEL);
        }
    }

    static INLINE vec swiglu(vec gate, vec up) { return gate / (1.0f + exponential(-gate)) * up; }

    void activate() {  // where that is a stage of its own
        make_input(m_.down, [&](int64_t b, int64_t first, int64_t count, float* out) {
            const float *gate = e_.gate_up + b * 2 * m_.inner + first, *up = gate + m_.inner;
            for (int64_t i = 0; i < count; i += W) {
                const int64_t some = std::min<int64_t>(W, count - i);
                store(out + i, swiglu(load_some(gate + i, some), load_some(up + i, some)));
            }
        });
    }
};

}  // namespace looped
