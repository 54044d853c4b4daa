// A mixture of experts in the place of a layer's MLP: norm; the router's scores, with gate and up of the shared
// experts; the choice, which in small batches is made by the thread that scores last; gate and up of the chosen;
// activation, fused with them where both are whole panels; down and the weighted sum. Between two projections experts
// read and give fewer numbers: the first is computed with the scores, the second with the shared experts. The choice
// is the formula of route() in ../../../models/layers.py.
//
// The chosen matrices are read where they lie, once for all tokens that chose them. Invariant: batch-invariant: a
// token's experts are summed in the order of its own choice, the shared ones after them.
#pragma once
#include "latent.h"

namespace looped {

inline int64_t num_pairs(Work& w) { return w.step.batch * w.moe.top_k; }
constexpr int64_t ELSEWHERE = -1;  // the span of a pair whose expert lies on another rank

// -- the choice

inline void weigh_scores(Work& w, float* scores) {
    const int64_t count = w.moe.experts;
    const float lowest = -std::numeric_limits<float>::infinity();
    float most = w.moe.is_sigmoid ? 0.0f : lowest, total = 0.0f;
    if (!w.moe.is_sigmoid)
        for (int64_t i = 0; i < count; ++i) most = scores[i] > most ? scores[i] : most;
    for (int64_t i = 0; i < count; i += W) {
        const vec own = load(scores + i);  // a line has room for a vector behind the last score
        store(scores + i, w.moe.is_sigmoid ? 1.0f / (1.0f + exponential(-own)) : exponential(own - most));
    }
    if (w.moe.is_sigmoid) return;
    for (int64_t i = 0; i < count; ++i) total += scores[i];
    for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// `count` of the numbers, greatest first and the first among equals; each goes to take(index) and is then out.
template <class Take>
void take_best(float* numbers, char* is_taken, int64_t size, int64_t count, Take take) {
    std::fill(is_taken, is_taken + size, 0);
    for (int64_t j = 0; j < count; ++j) {
        int64_t best = -1;
        for (int64_t i = 0; i < size; ++i)
            if (!is_taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
        is_taken[best] = 1;
        take(best);
    }
}

// Two experts one after the other, each weighed among those left that are near (reference: _sparsemixer in
// ../../../models/layers.py).
inline void mix_two(Work& w, const float* logits, int64_t b) {
    int64_t* chosen = w.routed.chosen.data() + 2 * b;
    for (int64_t j = 0; j < 2; ++j) {
        const int64_t count = w.moe.experts, before = j ? chosen[0] : -1;
        int64_t best = -1;
        for (int64_t i = 0; i < count; ++i)
            if (i != before && (best < 0 || logits[i] > logits[best])) best = i;
        float total = 0.0f;
        for (int64_t i = 0; i < count; ++i) {
            const float apart = logits[best] - logits[i], factor = std::max(std::abs(logits[i]), logits[best]);
            if (i != before && !(apart / factor > 2.0f * w.moe.jitter)) total += std::exp(-apart);
        }
        chosen[j] = best;
        w.routed.shares[2 * b + j] = w.moe.scale / total;
    }
}

inline void choose_by(Work& w, float* scores, const float* logit_bias, const float* correction,
                      const float* expert_scale, int64_t b) {
    const int64_t count = w.moe.experts;
    float *choice = w.scratch, *group_scores = w.scratch + count;
    char *is_taken = reinterpret_cast<char*>(w.scratch + 2 * count), *is_inside = is_taken + count;
    for (int64_t i = 0; logit_bias && i < count; ++i) scores[i] += logit_bias[i];
    if (w.moe.jitter >= 0.0f) return mix_two(w, scores, b);
    if (w.moe.chooses_by_logits) std::copy(scores, scores + count, choice);
    weigh_scores(w, scores);
    if (!w.moe.chooses_by_logits) std::copy(scores, scores + count, choice);
    for (int64_t i = 0; correction && i < count; ++i) choice[i] += correction[i];
    if (w.moe.groups > 1) {
        const int64_t size = count / w.moe.groups;
        for (int64_t g = 0; g < w.moe.groups; ++g) {
            float sum = 0.0f;
            float* own = choice + g * size;
            take_best(own, is_taken, size, w.moe.best_of_group, [&](int64_t i) { sum += own[i]; });
            group_scores[g] = sum;
        }
        std::fill(is_inside, is_inside + w.moe.groups, 0);
        take_best(group_scores, is_taken, w.moe.groups, w.moe.top_groups, [&](int64_t g) { is_inside[g] = 1; });
        for (int64_t i = 0; i < count; ++i)
            if (!is_inside[i / size]) choice[i] = -std::numeric_limits<float>::infinity();
    }
    int64_t* chosen = w.routed.chosen.data() + b * w.moe.top_k;
    float *shares = w.routed.shares + b * w.moe.top_k, total = 0.0f;
    int64_t next = 0;
    take_best(choice, is_taken, count, w.moe.top_k, [&](int64_t expert) { chosen[next++] = expert; });
    for (int64_t j = 0; j < w.moe.top_k; ++j) total += scores[chosen[j]];
    for (int64_t j = 0; j < w.moe.top_k; ++j) {
        shares[j] = (w.moe.normalises ? scores[chosen[j]] / (total + w.moe.least_sum) : scores[chosen[j]]) * w.moe.scale;
        if (expert_scale) shares[j] *= expert_scale[chosen[j]];
    }
}

// Its place among the layers with experts.
inline int64_t mixture_place(const Work& w, int64_t layer) { return w.model.mlp_places[layer]; }

// Token b by its scores.
inline void choose_of(Work& w, int64_t layer, int64_t b) {
    const auto own = [&](const float* all) { return all ? all + mixture_place(w, layer) * w.moe.experts : nullptr; };
    choose_by(w, w.routed.scores + b * (w.moe.experts + W), own(w.moe.router_bias), own(w.moe.correction),
              own(w.moe.expert_scale), b);
}

inline bool is_held(Work& w, int64_t expert) {
    return expert >= w.moe.first_held && expert < w.moe.first_held + w.moe.held;
}

inline void sort_pairs(Work& w) {
    std::fill(w.routed.ends.begin(), w.routed.ends.end(), 0);
    for (int64_t i = 0; i < num_pairs(w); ++i) ++w.routed.ends[w.routed.chosen[i] + 1];
    w.routed.num_spans = 0;
    for (int64_t expert = 0; expert < w.moe.experts; ++expert) {
        const int64_t count = w.routed.ends[expert + 1], begin = w.routed.ends[expert];
        w.routed.ends[expert + 1] += begin;
        if (count && is_held(w, expert))
            w.routed.spans[w.routed.num_spans++] = {expert - w.moe.first_held, begin, count};
    }
    for (int64_t i = 0; i < num_pairs(w); ++i) {  // by token: those of an expert keep that order
        const int64_t pair = w.routed.ends[w.routed.chosen[i]]++;
        w.routed.pair_of[i] = pair;
        w.routed.token[pair] = i / w.moe.top_k;
        w.routed.share_of[pair] = w.routed.shares[i];
        w.routed.span_of[pair] = ELSEWHERE;
    }
    for (int64_t span = 0; span < w.routed.num_spans; ++span)
        for (int64_t i = 0; i < w.routed.spans[span].count; ++i)
            w.routed.span_of[w.routed.spans[span].begin + i] = span;
}

// -- products with the matrices of experts

inline const char* panels_at(const Stack& stack, int64_t matrix, int64_t first) {
    return stack.data + matrix * stack.layer_bytes + first * stack.panel_bytes;
}

inline int64_t panels_left(const Stack& stack, int64_t first) { return std::min<int64_t>(2, panels_of(stack) - first); }

// `count` panels from `first` on of one matrix, one or two at once; emit(i of count, sums [tokens][32]).
template <class Emit>
void multiply_panels(Work& w, const Stack& stack, int64_t matrix, int64_t first, int64_t count, const float* x,
                     const Groups& groups, Emit emit) {
    const char* data = panels_at(stack, matrix, first);
    const Products products = products_with(stack);
    if (count == 2 && groups.tokens <= PAIR_TOKENS) {
        products.of_two(stack, data, x, groups, w.scratch);
        emit(0, w.scratch);
        return emit(1, w.scratch + groups.tokens * PANEL);
    }
    for (int64_t i = 0; i < count; ++i) {
        products.of_one(stack, data + i * stack.panel_bytes, x, i + 1 < count ? Groups(groups.tokens) : groups,
                        w.scratch);
        emit(i, w.scratch);
    }
}

// One or two panels of a matrix with gate and up, of tokens that go to lines [count][rows] of `out`.
inline void raw_gate_up(Work& w, const Stack& stack, int64_t matrix, int64_t first, const float* x,
                        const Groups& groups, float* out) {
    multiply_panels(w, stack, matrix, first, panels_left(stack, first), x, groups, [&](int64_t i, const float* sums) {
        const int64_t row = (first + i) * PANEL, count = std::min<int64_t>(PANEL, stack.rows - row);
        for (int64_t t = 0; t < groups.tokens; ++t)
            std::memcpy(out + t * stack.rows + row, sums + t * PANEL, count * 4);
    });
}

// Of `biases` [L' held, size], or null, that of a stored expert.
inline const float* expert_bias(Work& w, const float* biases, int64_t layer, int64_t expert, int64_t size) {
    return biases ? biases + (mixture_place(w, layer) * w.moe.held + expert) * size : nullptr;
}

inline bool activates_experts_at_once(Work& w, int64_t layer) {
    const LayerParts& own = w.model.parts[layer];
    const auto is_whole = [](const Stack& down) {
        return down.cols % PANEL == 0 && (!takes_codes(down) || PANEL % down.group == 0);
    };
    return is_whole(own.experts_down) && is_whole(own.shared_down);
}

// Of the experts that are routed to; the shared ones are activated as MLPs.
inline Gated routed_activation(Work& w, int64_t layer) {
    return {w.model.activation, w.model.parts[layer].experts_numbers, w.moe.scales_inputs};
}
inline Gated shared_activation(Work& w, int64_t layer) { return {w.model.activation, w.model.parts[layer].numbers}; }

// The i-th panels of gate and of up of a matrix, or without gate its i-th two panels, activated, times shares where there
// are any: columns of packed `out`, the input of `down`.
inline void active_gate_up(Work& w, const Gated& gated, const Stack& stack, int64_t matrix, int64_t i, const float* x,
                           int64_t tokens, const char* next, const float* shares, const Stack& down, const float* bias,
                           float* out) {
    if (!has_gate(w.model))
        return multiply_panels(w, stack, matrix, 2 * i, panels_left(stack, 2 * i), x, Groups(tokens, next),
                               [&](int64_t own, const float* sums) {
                                   const int64_t first = (2 * i + own) * PANEL;
                                   activate_panel(w, gated, down, bias, sums, first, tokens, shares, out);
                               });
    const int64_t apart = stack.rows / 2 / PANEL * stack.panel_bytes;
    gate_and_up(w, stack, panels_at(stack, matrix, i), x, Groups(tokens, next, apart));
    activate_panel(w, gated, down, bias, w.scratch, i * PANEL, tokens, shares, out);
}

// Whether a task of gate and up goes on a panel after it, not two.
inline bool goes_by_panel(Work& w, int64_t layer) { return activates_experts_at_once(w, layer) && has_gate(w.model); }

// -- the stages

// The sigmoid by which the output of the shared experts is multiplied, of a normed token.
inline float shared_share(Work& w, int64_t layer, const float* x) {
    const float* gate = w.moe.shared_gate + mixture_place(w, layer) * w.model.hidden;
    return 1.0f / (1.0f + std::exp(-dot(x, gate, w.model.hidden)));
}

inline void norm_tokens(Work& w, int64_t layer) {
    const LayerParts& own = w.model.parts[layer];
    const int64_t wide = padded(w.model.hidden);
    w.share(w.step.batch, 1, [&](int64_t b) {
        settle_stream(w, turn_before_mlp(w, layer), b, own.attention_out_norm, 1.0f);
        const float* from = w.engine.residual + b * w.model.hidden;
        const float factor = norm_factor(from, w.model.hidden, w.model.eps);
        float* to = w.routed.normed + b * wide;
        for (int64_t i = 0; i < w.model.hidden; ++i) to[i] = from[i] * factor * own.post_norm[i];
        std::fill(to + w.model.hidden, to + wide, 0.0f);
        if (w.moe.shared_gate) w.routed.shared_share[b] = shared_share(w, layer, to);
        if (w.moe.shared_inner)
            put_input(own.shared_gate_up, w.routed.packed, Place(w.tokens, b), to, 0, w.model.hidden);
        if (w.moe.latent) put_input(own.latent_in, w.engine.packed, Place(w.tokens, b), to, 0, w.model.hidden);
    });
}

// more choices than that are worth a stage of their own
inline bool chooses_at_once(Work& w) { return w.step.batch <= 4; }

inline void score_block(Work& w, int64_t layer, int64_t first) {
    const int64_t wide = padded(w.model.hidden), line = w.moe.experts + W,
        count = std::min<int64_t>(W, w.moe.experts - first);
    const float* router = w.moe.router + (mixture_place(w, layer) * w.moe.experts + first) * w.model.hidden;
    for (int64_t b = 0; b < w.step.batch; b += MOST_DOTS) {
        const int64_t tokens = std::min<int64_t>(MOST_DOTS, w.step.batch - b);
        const float* read = is_beside_mlp(w.model) ? w.routed.routed_by : w.routed.normed;
        dots(tokens, read + b * wide, wide, router, count, w.model.hidden, w.scratch, W);
        for (int64_t t = 0; t < tokens; ++t)
            std::memcpy(w.routed.scores + (b + t) * line + first, w.scratch + t * W, count * 4);
    }
}

// One or two panels of what experts read in the place of the normed tokens.
inline void project_latents(Work& w, const Stack& stack, int64_t first) {
    const int64_t wide = padded(stack.rows), panels = panels_left(stack, first);
    multiply_panels(w, stack, 0, first, panels, w.engine.packed, w.tokens, [&](int64_t i, const float* sums) {
        const int64_t row = (first + i) * PANEL, count = std::min<int64_t>(PANEL, stack.rows - row);
        for (int64_t b = 0; b < w.step.batch; ++b) {
            float* to = w.routed.latents + b * wide;
            std::memcpy(to + row, sums + b * PANEL, count * 4);
            if (row + count == stack.rows) std::fill(to + stack.rows, to + wide, 0.0f);
        }
    });
}

inline void score_experts(Work& w, int64_t layer) {
    const int64_t blocks = (w.moe.experts + W - 1) / W;
    const Stack &stack = w.model.parts[layer].shared_gate_up, &latents = w.model.parts[layer].latent_in;
    const int64_t shared = (panels_of(stack) + 1) / 2;
    w.share(blocks + shared + (panels_of(latents) + 1) / 2, 1, [&](int64_t task) {
        const int64_t own = task - blocks;
        if (own >= shared) return project_latents(w, latents, 2 * (own - shared));
        if (own >= 0 && activates_experts_at_once(w, layer))
            return active_gate_up(w, shared_activation(w, layer), stack, 0, own, w.routed.packed, w.step.batch,
                                  panels_at(stack, 0, goes_by_panel(w, layer) ? own + 1 : 2 * own + 2),
                                  w.moe.shared_gate ? w.routed.shared_share : nullptr,
                                  w.model.parts[layer].shared_down, nullptr, w.routed.shared_inner);
        if (own >= 0) return raw_gate_up(w, stack, 0, own * 2, w.routed.packed, w.tokens, w.routed.shared_gate_up);
        score_block(w, layer, task * W);
        if (!chooses_at_once(w) || w.routed.left.fetch_add(1, std::memory_order_acq_rel) + 1 < blocks) return;
        w.routed.left.store(0, std::memory_order_relaxed);
        for (int64_t b = 0; b < w.step.batch; ++b) choose_of(w, layer, b);
        sort_pairs(w);
    });
}

inline void choose_experts(Work& w, int64_t layer) {
    w.share(w.step.batch, 1, [&](int64_t b) {
        choose_of(w, layer, b);
        if (w.routed.left.fetch_add(1, std::memory_order_acq_rel) + 1 < w.step.batch) return;
        w.routed.left.store(0, std::memory_order_relaxed);
        sort_pairs(w);
    });
}

// A piece of the input of `down`; bias: of gate [inner], then of up, or null.
inline void activate_piece(const Gated& gated, const float* gate, const float* bias, const Stack& down, int64_t first,
                           float share, float* base, const Place& place) {
    const int64_t inner = down.cols, last = std::min<int64_t>(first + PIECE, inner);
    const float* up = has_gate(gated.kind) ? gate + inner : gate;
    float made[PIECE + W];
    for (int64_t i = first; i < last; i += W) {
        const int64_t count = std::min<int64_t>(W, last - i);
        vec own = load_some(gate + i, count), other = load_some(up + i, count);
        if (bias) own += load_some(bias + i, count), other += load_some(bias + inner + i, count);
        store(made + i - first, gated(own, other, all(share)));
    }
    put_input(down, base, place, made, first, last - first);
}

inline void activate_pairs(Work& w, int64_t layer) {
    const LayerParts& parts = w.model.parts[layer];
    const int64_t pieces = (w.moe.inner + PIECE - 1) / PIECE, shared = (w.moe.shared_inner + PIECE - 1) / PIECE;
    w.share(num_pairs(w) * pieces + w.step.batch * shared, 4, [&](int64_t task) {
        if (task < num_pairs(w) * pieces) {
            const int64_t pair = task / pieces;
            if (w.routed.span_of[pair] == ELSEWHERE) return;
            const Span& span = w.routed.spans[w.routed.span_of[pair]];
            float* base = w.routed.inner + span.begin * padded(w.moe.inner);
            activate_piece(routed_activation(w, layer), w.routed.gate_up + pair * parts.experts_gate_up.rows,
                           expert_bias(w, w.moe.gate_up_bias, layer, span.expert, 2 * w.moe.inner), parts.experts_down,
                           task % pieces * PIECE, w.routed.share_of[pair], base,
                           Place(Groups(span.count), pair - span.begin));
        } else {
            const int64_t rest = task - num_pairs(w) * pieces, b = rest / shared;
            const float* gate = w.routed.shared_gate_up + b * parts.shared_gate_up.rows;
            activate_piece(shared_activation(w, layer), gate, nullptr, parts.shared_down, rest % shared * PIECE,
                           w.moe.shared_gate ? w.routed.shared_share[b] : 1.0f, w.routed.shared_inner,
                           Place(w.tokens, b));
        }
    });
}

// Panels of a task of the down product, and the first one of a thread's own tasks.
inline int64_t down_at_once(Work& w, const Stack& down) { return panels_of(down) >= 4 * w.pool.size() ? 2 : 1; }
inline int64_t first_down(Work& w, const Stack& down, int64_t thread) {
    const int64_t at_once = down_at_once(w, down), tasks = (panels_of(down) + at_once - 1) / at_once;
    return tasks * thread / w.pool.size() * at_once;
}

inline void expand_experts(Work& w, int64_t layer) {
    const Stack &gate_up = w.model.parts[layer].experts_gate_up, &down = w.model.parts[layer].experts_down;
    const int64_t tasks = (panels_of(gate_up) + 1) / 2, all = w.routed.num_spans * tasks, wide = padded(gate_up.cols);
    const float* read = w.moe.latent ? w.routed.latents : w.routed.normed;
    const bool is_whole = activates_experts_at_once(w, layer), by_panel = goes_by_panel(w, layer);
    const int64_t own_last = all * (w.thread + 1) / w.pool.size() - 1, panel = first_down(w, down, w.thread);
    int64_t held = -1;  // the span, or of a span of one the token behind all spans, that this thread has packed
    w.share(all, 1, [&](int64_t task) {
        const int64_t place = task / tasks, i = task % tasks;
        const Span& span = w.routed.spans[place];
        const char* next = panels_at(gate_up, span.expert, by_panel ? i + 1 : 2 * i + 2);
        if (task == own_last) next = panels_at(down, w.routed.spans[0].expert, panel);
        else if (i + 1 == tasks && task + 1 < all) next = panels_at(gate_up, w.routed.spans[place + 1].expert, 0);
        const float* x = read + w.routed.token[span.begin] * wide;  // one token is packed as it lies
        if (span.count > 1 || takes_codes(gate_up)) {
            const int64_t packed = span.count > 1 ? place : w.routed.num_spans + w.routed.token[span.begin];
            x = w.routed.own[w.thread];
            Place to(Groups(span.count), 0);
            for (int64_t t = 0; t < span.count && held != packed; ++t, to.next())
                put_input(gate_up, w.routed.own[w.thread], to, read + w.routed.token[span.begin + t] * wide, 0,
                          gate_up.cols);
            held = packed;
        }
        if (is_whole)
            return active_gate_up(w, routed_activation(w, layer), gate_up, span.expert, i, x, span.count, next,
                                  w.routed.share_of.data() + span.begin, down,
                                  expert_bias(w, w.moe.gate_up_bias, layer, span.expert, 2 * w.moe.inner),
                                  w.routed.inner + span.begin * padded(w.moe.inner));
        raw_gate_up(w, gate_up, span.expert, i * 2, x, Groups(span.count, next),
                    w.routed.gate_up + span.begin * gate_up.rows);
    });
}

// What the experts of token b gave, of a panel from row `first` on; sums: of the pairs.
inline void sum_pairs(Work& w, int64_t layer, const float* sums, int64_t b, int64_t first, float* total) {
    const int64_t size = w.model.parts[layer].experts_down.rows, rows = std::min<int64_t>(PANEL, size - first);
    for (int64_t j = 0; j < w.moe.top_k; ++j) {
        const int64_t pair = w.routed.pair_of[b * w.moe.top_k + j];
        if (w.routed.span_of[pair] == ELSEWHERE) continue;
        const float* own = sums + pair * PANEL;
        for (int i = 0; i < PANEL; ++i) total[i] += own[i];
        if (!w.moe.down_bias) continue;
        const int64_t expert = w.routed.spans[w.routed.span_of[pair]].expert;
        const float *bias = expert_bias(w, w.moe.down_bias, layer, expert, size) + first, share = w.routed.share_of[pair];
        for (int64_t i = 0; i < rows; ++i) total[i] += bias[i] * share;
    }
}

// Adds it, and a panel of the shared experts, to the residual stream, or to this rank's partial sum.
inline void add_panel(Work& w, int64_t layer, int64_t b, int64_t first, float* total, const float* shared) {
    const int64_t rows = std::min<int64_t>(PANEL, w.model.hidden - first), at = b * w.model.hidden + first;
    for (int i = 0; i < PANEL && w.moe.shared_inner; ++i) total[i] += shared[i] * w.moe.shared_scale;
    for (int64_t i = 0; i < rows; ++i) total[i] *= w.model.residual_multiplier;
    const bool is_alone = w.ranks.is_alone();
    if (is_alone && !w.model.parts[layer].mlp_out_norm && !is_beside_mlp(w.model) && !w.model.hyper.streams)
        for (int64_t i = 0; i < rows; ++i) w.engine.residual[at + i] += total[i];
    else
        std::copy(total, total + rows,
                  (is_alone || is_beside_mlp(w.model) ? w.engine.outputs : own_part(w, turn_of(w, layer, AFTER_MLP))) + at);
}

// finish(b, first, total, shared): a panel of token b, what its experts gave and what the shared ones did.
template <class Finish>
void add_up_pairs(Work& w, int64_t layer, const Stack& shared, Finish finish) {
    const Stack& down = w.model.parts[layer].experts_down;
    const int64_t panels = panels_of(down), at_once = down_at_once(w, down);
    // of a panel: those of the pairs, then those of the shared experts
    const int64_t lines = num_pairs(w) + w.step.batch;
    float* own = w.routed.sums[w.thread];
    w.share((panels + at_once - 1) / at_once, 1, [&](int64_t task) {
        const int64_t first = task * at_once, count = std::min(at_once, panels - first);
        const auto keep = [&](int64_t line, int64_t num) {
            return [=](int64_t i, const float* sums) {
                std::memcpy(own + (i * lines + line) * PANEL, sums, num * PANEL * 4);
            };
        };
        for (int64_t i = 0; i < w.routed.num_spans; ++i) {
            const Span& span = w.routed.spans[i];
            const bool is_last = i + 1 == w.routed.num_spans;  // then come the next panels of the first
            const int64_t next = w.routed.spans[is_last ? 0 : i + 1].expert;
            const Groups groups(span.count, panels_at(down, next, first + (is_last ? count : 0)));
            multiply_panels(w, down, span.expert, first, count, w.routed.inner + span.begin * padded(w.moe.inner), groups,
                            keep(span.begin, span.count));
        }
        if (shared.rows)
            multiply_panels(w, shared, 0, first, count, w.routed.shared_inner, w.tokens, keep(num_pairs(w), w.step.batch));
        for (int64_t i = 0; i < count; ++i)
            for (int64_t b = 0; b < w.step.batch; ++b) {
                const float* sums = own + i * lines * PANEL;
                float total[PANEL] = {};
                sum_pairs(w, layer, sums, b, (first + i) * PANEL, total);
                finish(b, (first + i) * PANEL, total, sums + (num_pairs(w) + b) * PANEL);
            }
    });
}

// Their sum is projected, and the shared experts are added.
inline void add_up_latents(Work& w, int64_t layer) {
    const LayerParts& parts = w.model.parts[layer];
    const int64_t size = parts.latent_out.cols, wide = padded(size);
    add_up_pairs(w, layer, Stack{}, [&](int64_t b, int64_t first, const float* total, const float*) {
        std::copy(total, total + std::min<int64_t>(PANEL, size - first), w.routed.latents + b * wide + first);
    });
    w.end_part();
    make_input(w, parts.latent_out, [&](int64_t b, int64_t first, int64_t count, float* out) {
        std::copy_n(w.routed.latents + b * wide + first, count, out);
    });
    w.end_part();
    float *own = w.routed.sums[w.thread], *shared = own + w.step.batch * PANEL;
    w.share(panels_of(parts.latent_out), 1, [&](int64_t panel) {
        const auto keep = [&](float* to) {
            return [=, &w](int64_t, const float* sums) { std::memcpy(to, sums, w.step.batch * PANEL * 4); };
        };
        multiply_panels(w, parts.latent_out, 0, panel, 1, w.engine.packed, w.tokens, keep(own));
        if (w.moe.shared_inner)
            multiply_panels(w, parts.shared_down, 0, panel, 1, w.routed.shared_inner, w.tokens, keep(shared));
        for (int64_t b = 0; b < w.step.batch; ++b)
            add_panel(w, layer, b, panel * PANEL, own + b * PANEL, shared + b * PANEL);
    });
}

inline void add_up_experts(Work& w, int64_t layer) {
    if (w.moe.latent) return add_up_latents(w, layer);
    add_up_pairs(w, layer, w.model.parts[layer].shared_down,
                 [&](int64_t b, int64_t first, float* total, const float* shared) {
                     add_panel(w, layer, b, first, total, shared);
                 });
}

// Beside an MLP: what the experts and the router read of the residual stream, whose norms are in `factors`.
inline void norm_beside(Work& w, int64_t layer) {
    const int64_t size = w.model.hidden, wide = padded(size);
    const float *own = w.moe.experts_norm + layer * size, *scale = w.moe.router_scale + layer * size;
    const float root = 1.0f / std::sqrt(static_cast<float>(size));
    w.share(w.step.batch, 1, [&](int64_t b) {
        const float *x = w.engine.residual + b * size, factor = w.engine.factors[b];
        float *normed = w.routed.normed + b * wide, *read = w.routed.routed_by + b * wide;
        for (int64_t i = 0; i < size; ++i) {
            normed[i] = x[i] * factor * own[i];
            read[i] = x[i] * factor * scale[i] * root;
        }
        std::fill(normed + size, normed + wide, 0.0f);
        std::fill(read + size, read + wide, 0.0f);
    });
}

// The norms of what the MLP and the experts gave, added up.
inline void add_beside(Work& w, int64_t layer) {
    const int64_t size = w.model.hidden;
    const float *first = w.moe.mlp_part_norm + layer * size, *second = w.moe.experts_part_norm + layer * size;
    w.share(w.step.batch, 1, [&](int64_t b) {
        float *mlp = w.engine.beside + b * size, *experts = w.engine.outputs + b * size;
        const float own = norm_factor(mlp, size, w.model.eps), other = norm_factor(experts, size, w.model.eps);
        for (int64_t i = 0; i < size; ++i)
            experts[i] = mlp[i] * own * first[i] + experts[i] * other * second[i];
    });
}

// Whether a stage has no task in this step; it then has no barrier either.
inline bool is_mixture_stage_empty(Work& w, int64_t layer, int64_t stage) {
    return (stage == 2 && chooses_at_once(w)) || (stage == 4 && activates_experts_at_once(w, layer));
}

inline void mixture_stage(Work& w, int64_t layer, int64_t stage) {
    switch (stage) {
        case 0: return is_beside_mlp(w.model) ? norm_beside(w, layer) : norm_tokens(w, layer);
        case 1: return score_experts(w, layer);
        case 2: return choose_experts(w, layer);
        case 3: return expand_experts(w, layer);
        case 4: return activate_pairs(w, layer);
        default: return add_up_experts(w, layer);
    }
}

// Scratch of a thread, in floats.
inline int64_t mixture_scratch(const Model& model) {  // choice, scores of groups, two marks each; some scores
    return model.mixture.experts ? std::max<int64_t>(3 * model.mixture.experts, MOST_DOTS * W) : 0;
}

}  // namespace looped
