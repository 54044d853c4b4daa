// The stages of layers that keep a state in the place of keys and values: gated short convolutions, gated DeltaNet, Mamba-2
// (reference: ../../../models/recurrent.py). A task reads and writes the state of its own row and channels or heads, so
// results do not depend on other rows.
#pragma once
#include "step.h"

namespace looped {

// Of a layer in the stacks of its mixer's kind.
inline int64_t place_of(const Work& w, int64_t layer) { return w.model.mixer_places[layer]; }

template <class State>  // of a row in a layer
float* state_of(const Work& w, const State* states, int64_t layer, int64_t b, int64_t size) {
    return reinterpret_cast<float*>(states[layer]) + w.step.rows[b] * size;
}

// One token of a causal depthwise convolution, `some` channels of input x; taps: of these channels. Their state, the
// K - 1 inputs before, each `stride` after the one before it, moves on by a token.
inline vec convolve(const Recurrent& own, float* state, int64_t stride, const float* taps, int64_t some, vec x) {
    const int64_t last = own.kernel - 1;
    vec sum = {};
    for (int64_t i = 0; i < last; ++i) {
        float* at = state + i * stride;
        sum += load_some(taps + i * own.channels, some) * load_some(at, some);
        store_some(at, i + 1 < last ? load_some(at + stride, some) : x, some);
    }
    return sum + load_some(taps + last * own.channels, some) * x;
}

// Speculative decoding. The first entry of a row in a step is certain, and its state moves on by it; drafted ones go on
// from a copy. Of each the inputs of the convolution and its gates are kept, so that a row can go on by those that are
// accepted (accept_drafts): [L', drafted, draft_numbers], a small part of the states.
inline int64_t draft_numbers(const Recurrent& own) {
    const int64_t gates = own.skip ? 1 : 1 + (own.gate_rank ? own.key_dim : 1);  // of a head: its step, or beta and decays
    return own.channels + gates * own.value_heads;
}

inline int64_t drafted_memory(const Recurrent& own) {  // copy of the states of a task
    const int64_t each = own.skip || !own.key_heads ? 1 : own.value_heads / own.key_heads;
    return own.drafted ? each * own.key_dim * own.value_dim : 0;
}

// Of the entry b, whose `ahead` is not 0.
inline float* kept_of_draft(Work& w, int64_t layer, int64_t b) {
    const Recurrent& own = w.model.recurrent;
    int64_t nth = 0;
    for (int64_t i = 0; i < b; ++i) nth += w.step.ahead[i] != 0;
    return w.engine.drafts + (place_of(w, layer) * own.drafted + nth) * draft_numbers(own);
}

inline bool goes_on(const Work& w, int64_t b) { return b + 1 < w.step.batch && w.step.ahead[b + 1]; }

// Where the inputs of the convolution are in what a token is projected to.
inline int64_t conv_offset(const Recurrent& own) {
    return !own.value_heads ? 2 * own.channels : own.skip ? own.value_heads * own.value_dim : 0;
}

// Of a vector of channels: the convolution with what follows it.
inline vec convolved(const Work& w, int64_t layer, float* state, int64_t stride, int64_t channel, int64_t some, vec x) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer);
    vec sum = convolve(own, state, stride, own.taps + place * own.kernel * own.channels + channel, some, x);
    if (own.conv_bias) sum += load_some(own.conv_bias + place * own.channels + channel, some);
    return own.value_heads ? Gated{}(sum, all(1.0f)) : sum;
}

constexpr int64_t DRAFT_CHANNELS = 256;  // of a task
constexpr int64_t MOST_TAPS = 64;

// In a step with drafts: the convolution of all channels takes the place of its inputs.
inline void convolve_entries(Work& w, int64_t layer) {
    const Recurrent& own = w.model.recurrent;
    const int64_t blocks = (own.channels + DRAFT_CHANNELS - 1) / DRAFT_CHANNELS, last = own.kernel - 1;
    w.share(w.step.batch * blocks, 1, [&](int64_t task) {
        const int64_t first = task / blocks, begin = task % blocks * DRAFT_CHANNELS;
        const int64_t end = std::min(begin + DRAFT_CHANNELS, own.channels);
        if (ahead_of(w, first)) return;
        float* state = state_of(w, w.rows.conv_inputs, layer, first, last * own.channels);
        for (int64_t at = begin; at < end; at += W) {
            const int64_t some = std::min<int64_t>(W, end - at);
            float copy[MOST_TAPS * W];
            for (int64_t b = first; b == first || (b < w.step.batch && ahead_of(w, b)); ++b) {
                float* x = w.engine.mixed + b * own.projected + conv_offset(own) + at;
                vec in = load_some(x, some);
                if (!own.value_heads) in = load_some(x - 2 * own.channels, some) * in;
                if (b == first + 1)
                    for (int64_t i = 0; i < last; ++i) store(copy + i * W, load_some(state + i * own.channels + at, some));
                if (b > first) store_some(kept_of_draft(w, layer, b) + at, in, some);
                const bool is_certain = b == first;
                store_some(x, convolved(w, layer, is_certain ? state + at : copy, is_certain ? own.channels : W, at, some, in),
                           some);
            }
        }
        if (begin || !own.skip) return;
        for (int64_t b = first; goes_on(w, b); ++b) {
            const float* steps = w.engine.mixed + (b + 1) * own.projected + conv_offset(own) + own.channels;
            std::copy(steps, steps + own.value_heads, kept_of_draft(w, layer, b + 1) + own.channels);
        }
    });
    w.end_part();
}

// The input of the next product: c * conv(b * x) of b | c | x.
inline void short_conv(Work& w, int64_t layer) {
    const Recurrent& own = w.model.recurrent;
    const int64_t size = own.channels;
    if (w.step.ahead) convolve_entries(w, layer);
    make_input(w, w.model.parts[layer].recurrent_out, [&](int64_t b, int64_t first, int64_t count, float* out) {
        const float *gate = w.engine.mixed + b * own.projected, *out_gate = gate + size, *x = out_gate + size;
        float* state = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * size);
        for (int64_t i = 0; i < count; i += W) {
            const int64_t some = std::min<int64_t>(W, count - i), at = first + i;
            const vec in = load_some(x + at, some);
            const vec sum = w.step.ahead ? in : convolved(w, layer, state + at, size, at, some, load_some(gate + at, some) * in);
            store(out + i, sum * load_some(out_gate + at, some));
        }
    });
}

constexpr int ROWS = 2;  // of a state at once, all of them in the order of memory, so that a cold state is prefetched

// R rows of a head's state S [keys, values]: found += S^T k.
template <int R>
INLINE void recall_rows(const float* state, int64_t values, const float* k, float* found) {
    for_columns(values, [&](int64_t at, int64_t some) __attribute__((always_inline)) {
        vec sum = load_some(found + at, some);
        UNROLL for (int r = 0; r < R; ++r) sum += load_some(state + r * values + at, some) * k[r];
        store_some(found + at, sum, some);
    });
}

// The same rows: S <- decay S + k u^T, found += S^T q. BY_CHANNEL: with a decay per row.
template <int R, bool BY_CHANNEL>
INLINE void advance_rows(float* state, int64_t values, const float* q, const float* k, const float* decays,
                         const float* u, float* found) {
    for_columns(values, [&](int64_t at, int64_t some) __attribute__((always_inline)) {
        const vec own = load_some(u + at, some);
        vec sum = load_some(found + at, some);
        UNROLL for (int r = 0; r < R; ++r) {
            float* row = state + r * values + at;
            const vec next = load_some(row, some) * decays[BY_CHANNEL ? r : 0] + own * k[r];
            store_some(row, next, some);
            sum += next * q[r];
        }
        store_some(found + at, sum, some);
    });
}

// One token of a head: S <- decay S + k u^T, found = S^T q.
template <bool BY_CHANNEL>
inline void advance(float* state, int64_t keys, int64_t values, const float* q, const float* k, const float* decays,
                    const float* u, float* found) {
    std::fill(found, found + values, 0.0f);
    int64_t i = 0;
    for (; i + ROWS <= keys; i += ROWS)
        advance_rows<ROWS, BY_CHANNEL>(state + i * values, values, q + i, k + i, decays + i * BY_CHANNEL, u, found);
    for (; i < keys; ++i)
        advance_rows<1, BY_CHANNEL>(state + i * values, values, q + i, k + i, decays + i * BY_CHANNEL, u, found);
}

// One token of the gated delta rule for one value head (arXiv 2412.06464, section 3.1): u = beta (v - decay S^T k). v is
// overwritten. BY_CHANNEL: with a decay per element of a key, by which `decayed` are the keys.
template <bool BY_CHANNEL>
inline void delta_rule(float* state, int64_t keys, int64_t values, const float* q, const float* k, const float* decays,
                       const float* decayed, float beta, float* v, float* out) {
    const float decay = BY_CHANNEL ? 1.0f : *decays, *asked = BY_CHANNEL ? decayed : k;
    std::fill(out, out + values, 0.0f);
    int64_t i = 0;
    for (; i + ROWS <= keys; i += ROWS) recall_rows<ROWS>(state + i * values, values, asked + i, out);
    for (; i < keys; ++i) recall_rows<1>(state + i * values, values, asked + i, out);
    for (int64_t j = 0; j < values; ++j) v[j] = (v[j] - out[j] * decay) * beta;
    advance<BY_CHANNEL>(state, keys, values, q, k, decays, v, out);
}

// Of the normed input of a layer with a row of its gates.
inline float gate_logit(const Work& w, int64_t layer, int64_t b, const float* row) {
    const float *x = w.engine.residual + b * w.model.hidden, *norm = w.model.parts[layer].input_norm;
    vec sum = {};
    for (int64_t i = 0; i < w.model.hidden; i += W) {
        const int64_t some = std::min<int64_t>(W, w.model.hidden - i);
        sum += load_some(x + i, some) * w.engine.factors[b] * load_some(norm + i, some) * load_some(row + i, some);
    }
    return sum_of(sum);
}

// q, k, v and the output of a key head; of KDA decays and decayed keys, and the gates of outputs.
inline int64_t head_scratch(const Recurrent& own) {
    const int64_t more = own.gate_rank ? 2 * own.key_dim + own.value_dim + 2 * W : 0;
    return own.value_heads ? 2 * own.key_dim + 2 * own.value_heads / own.key_heads * own.value_dim + more : 0;
}
inline int64_t recurrent_scratch(const Model& model) {
    return head_scratch(model.recurrent) + drafted_memory(model.recurrent);
}

inline void to_unit(float* x, int64_t count, float scale) {
    vec sum = {};
    for_columns(count, [&](int64_t at, int64_t some) { sum += load_some(x + at, some) * load_some(x + at, some); });
    const float factor = scale / std::sqrt(sum_of(sum) + 1e-6f);
    for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

inline float step_of(float logit) { return logit > 20.0f ? logit : std::log1p(std::exp(logit)); }

// Of the heads from `head` on: [keys, values] each.
inline float* memory_of(Work& w, int64_t layer, int64_t b, int64_t head) {
    const Recurrent& own = w.model.recurrent;
    const int64_t size = own.key_dim * own.value_dim;
    return state_of(w, w.rows.memories, layer, b, own.value_heads * size) + head * size;
}

// Value heads of one key head, whose states `memory` has: convolution of their channels, unless a step with drafts has
// made it, the delta rule, norm and gate of the output.
inline void delta_head(Work& w, int64_t layer, int64_t b, int64_t head, float* memory) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer), keys = own.key_dim, values = own.value_dim, hidden = w.model.hidden;
    const int64_t each = own.value_heads / own.key_heads, all_keys = own.key_heads * keys;
    const float* x = w.engine.mixed + b * own.projected;
    float* inputs = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * own.channels);
    float *q = w.scratch, *k = q + keys, *v = k + keys, *out = v + each * values;
    const auto channels = [&](int64_t first, int64_t count, float* to) {
        if (w.step.ahead) return void(std::copy(x + first, x + first + count, to));
        for (int64_t i = 0; i < count; i += W) {
            const int64_t some = std::min<int64_t>(W, count - i), at = first + i;
            store_some(to + i, convolved(w, layer, inputs + at, own.channels, at, some, load_some(x + at, some)), some);
        }
    };
    channels(head * keys, keys, q);
    channels(all_keys + head * keys, keys, k);
    channels(2 * all_keys + head * each * values, each * values, v);
    to_unit(q, keys, 1.0f / std::sqrt(static_cast<float>(keys)));
    to_unit(k, keys, 1.0f);
    const int64_t rank = own.gate_rank;
    const float* gates = own.gates + place * (rank ? 1 : 2) * own.value_heads * hidden;
    float *decayed = out + each * values, *decays = decayed + keys, *gated = decays + (keys + W - 1) / W * W;
    float* kept = ahead_of(w, b) ? kept_of_draft(w, layer, b) + own.channels : nullptr;
    for (int64_t i = 0; i < each; ++i) {
        const int64_t value_head = head * each + i, at = place * own.value_heads + value_head;
        const float beta = own.most_beta / (1.0f + std::exp(-gate_logit(w, layer, b, gates + value_head * hidden)));
        float *found = out + i * values, *state = memory + i * keys * values, *own_v = v + i * values;
        const float* z = x + own.channels + value_head * values;
        if (kept) kept[value_head] = beta;
        if (rank) {
            const float *first = x + own.channels, *steps = own.step + at * keys;
            if (own.decay_up) dots(1, first, rank, own.decay_up + at * keys * rank, keys, rank, decays, 0);
            else std::copy(first + value_head * keys, first + (value_head + 1) * keys, decays);
            for_columns(keys, [&](int64_t j, int64_t some) {
                const vec logits = load_some(decays + j, some) + load_some(steps + j, some);
                const vec power = own.decay_floor ? own.decay_floor / (1.0f + exponential(logits * own.rate[at]))
                                                  : softplus(logits) * own.rate[at];
                const vec decay = exponential(power);
                store_some(decays + j, decay, some);
                store_some(decayed + j, decay * load_some(k + j, some), some);
            });
            if (kept) std::copy(decays, decays + keys, kept + own.value_heads + value_head * keys);
            delta_rule<true>(state, keys, values, q, k, decays, decayed, beta, own_v, found);
            z = own.gate_up ? gated : first + rank + value_head * values;
            if (own.gate_up) dots(1, first + rank, rank, own.gate_up + at * values * rank, values, rank, gated, 0);
        } else {
            const float logit = gate_logit(w, layer, b, gates + (own.value_heads + value_head) * hidden);
            const float decay = std::exp(own.rate[at] * step_of(logit + own.step[at]));
            if (kept) kept[own.value_heads + value_head] = decay;
            delta_rule<false>(state, keys, values, q, k, &decay, nullptr, beta, own_v, found);
        }
        const float factor = norm_factor(found, values, own.eps), *norm = own.norm + place * values;
        for_columns(values, [&](int64_t j, int64_t some) {
            const vec gate = load_some(z + j, some), up = rank ? all(1.0f) : gate;
            store_some(found + j, load_some(found + j, some) * factor * load_some(norm + j, some) *
                                      (up / (1.0f + exponential(-gate))), some);
        });
    }
    pack_heads(w, w.model.parts[layer].recurrent_out, b, head, own.key_heads, out);
}

// Of one token: norm per group of what its heads made, times the gates; then the convolution of B and C moves on, unless
// a step with drafts has moved it.
inline void finish_scan(Work& w, int64_t layer, int64_t b) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer), inner = own.value_heads * own.value_dim, each = inner / own.key_heads;
    float *z = w.engine.mixed + b * own.projected, *found = z + inner;
    for_columns(inner, [&](int64_t j, int64_t some) {
        store_some(found + j, Gated{}(load_some(z + j, some), load_some(found + j, some)), some);
    });
    for (int64_t first = 0; own.norm && first < inner; first += each) {
        const float factor = norm_factor(found + first, each, w.model.eps), *norm = own.norm + place * inner;
        for (int64_t j = first; j < first + each; ++j) z[j] = found[j] * factor * norm[j];
    }
    put_input(w.model.parts[layer].recurrent_out, w.engine.packed, Place(w.tokens, b), own.norm ? z : found, 0, inner);
    if (w.step.ahead) return;
    float* inputs = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * own.channels);
    for (int64_t i = 0; i + 1 < own.kernel; ++i) {
        float* to = inputs + i * own.channels;
        const float* from = i + 2 < own.kernel ? to + own.channels : found;  // of this token, all channels
        std::copy(from + inner, from + own.channels, to + inner);
    }
}

// One head of Mamba-2, with its state, and token: convolution of its channels and of its group's B and C, unless a step
// with drafts has made it, and the scan (arXiv 2405.21060). Its output takes the place of its inputs; who ends last of a
// token goes on with all of them.
inline void scan_head(Work& w, int64_t layer, int64_t b, int64_t head, float* state) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer), states = own.key_dim, size = own.value_dim, heads = own.value_heads;
    const int64_t inner = heads * size, group = head / (heads / own.key_heads), at = place * heads + head;
    float* x = w.engine.mixed + b * own.projected + inner;
    const float* taps = own.taps + place * own.kernel * own.channels;
    const float* bias = own.conv_bias ? own.conv_bias + place * own.channels : nullptr;
    float* inputs = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * own.channels);
    float *in = w.scratch, *out = in + states, *own_x = out + states, *found = own_x + size;
    const Gated silu;
    const auto activated = [&](vec sum, int64_t channel, int64_t some) {
        return silu(bias ? sum + load_some(bias + channel, some) : sum, all(1.0f));
    };
    const auto shared = [&](int64_t first, float* to) {  // of the group: read by all its heads, moved on by the last
        if (w.step.ahead) return void(std::copy(x + first, x + first + states, to));
        for (int64_t i = 0; i < states; i += W) {
            const int64_t some = std::min<int64_t>(W, states - i), channel = first + i;
            vec sum = {};
            for (int64_t k = 0; k < own.kernel; ++k) {
                const float* from = k + 1 < own.kernel ? inputs + k * own.channels + channel : x + channel;
                sum += load_some(taps + k * own.channels + channel, some) * load_some(from, some);
            }
            float lanes[W];
            store(lanes, activated(sum, channel, some));
            std::copy(lanes, lanes + some, to + i);
        }
    };
    shared(inner + group * states, in);
    shared(inner + (own.key_heads + group) * states, out);
    const float step = step_of(x[own.channels + head] + own.step[at]), decay = std::exp(own.rate[at] * step);
    for (int64_t i = 0; i < size; i += W) {
        const int64_t some = std::min<int64_t>(W, size - i), channel = head * size + i;
        const vec raw = load_some(x + channel, some);
        const vec made = w.step.ahead ? raw : convolved(w, layer, inputs + channel, own.channels, channel, some, raw);
        store_some(x + channel, made * own.skip[at], some);
        store_some(own_x + i, made * step, some);
    }
    advance<false>(state, states, size, out, in, &decay, own_x, found);
    for (int64_t i = 0; i < size; ++i) x[head * size + i] += found[i];
    if (w.engine.heads_done[b].fetch_add(1, std::memory_order_acq_rel) + 1 < heads) return;
    w.engine.heads_done[b].store(0, std::memory_order_relaxed);
    finish_scan(w, layer, b);
}

// The last of a layer's stages of attention is also the last here; those before it from 3 on are empty.
inline bool is_recurrent_stage_empty(Work& w, int64_t stage) {
    return stage > 2 && stage + 1 < attention_stages(w.model);
}

// All heads of all entries; task(b, head, its states). Drafted entries of a row go on from a copy of its states.
template <class Head>
void share_heads(Work& w, int64_t layer, int64_t heads, Head run) {
    const Recurrent& own = w.model.recurrent;
    const int64_t each = own.value_heads / heads, size = each * own.key_dim * own.value_dim;
    if (w.step.ahead) convolve_entries(w, layer);
    w.share(w.step.batch * heads, 1, [&](int64_t task) {
        const int64_t first = task / heads, head = task % heads;
        if (ahead_of(w, first)) return;
        float *memory = memory_of(w, layer, first, head * each), *copy = w.scratch + head_scratch(own);
        run(first, head, memory);
        if (!w.step.ahead || !goes_on(w, first)) return;
        std::copy(memory, memory + size, copy);
        for (int64_t b = first; goes_on(w, b); ++b) run(b + 1, head, copy);
    });
}

// The row of entry b has accepted the `count` drafted entries after it: its states go on by them.
inline void accept_channels(Work& w, int64_t layer, int64_t b, int64_t count, int64_t begin) {
    const Recurrent& own = w.model.recurrent;
    const int64_t end = std::min(begin + DRAFT_CHANNELS, own.channels);
    float* state = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * own.channels);
    for (int64_t e = 1; e <= count; ++e) {
        float* kept = kept_of_draft(w, layer, b + e);
        for (int64_t at = begin; at < end; at += W) {
            const int64_t some = std::min<int64_t>(W, end - at);
            store_some(kept + at, convolved(w, layer, state + at, own.channels, at, some, load_some(kept + at, some)), some);
        }
    }
}

inline void accept_head(Work& w, int64_t layer, int64_t b, int64_t count, int64_t value_head) {  // after accept_channels
    const Recurrent& own = w.model.recurrent;
    const int64_t keys = own.key_dim, values = own.value_dim, heads = own.value_heads;
    const int64_t key_head = value_head / (heads / own.key_heads), at = place_of(w, layer) * heads + value_head;
    float *k = w.scratch, *v = k + keys, *out = v + values, *decayed = out + values;
    float* memory = memory_of(w, layer, b, value_head);
    for (int64_t e = 1; e <= count; ++e) {
        const float *kept = kept_of_draft(w, layer, b + e), *gates = kept + own.channels;
        if (!own.skip) {
            const float *key = kept + (own.key_heads + key_head) * keys;
            const float *value = kept + 2 * own.key_heads * keys + value_head * values;
            std::copy(key, key + keys, k);
            std::copy(value, value + values, v);
            to_unit(k, keys, 1.0f);
            if (own.gate_rank) {
                const float* decays = gates + heads + value_head * keys;
                for (int64_t j = 0; j < keys; ++j) decayed[j] = decays[j] * k[j];
                delta_rule<true>(memory, keys, values, k, k, decays, decayed, gates[value_head], v, out);
            } else {
                delta_rule<false>(memory, keys, values, k, k, gates + heads + value_head, nullptr, gates[value_head], v, out);
            }
            continue;
        }
        const float *x = kept + value_head * values, *in = kept + heads * values + key_head * keys;
        const float step = step_of(gates[value_head] + own.step[at]), decay = std::exp(own.rate[at] * step);
        for (int64_t i = 0; i < values; ++i) v[i] = x[i] * step;
        advance<false>(memory, keys, values, in, in, &decay, v, out);
    }
}

// counts: of each row of the step the entries that it has accepted, its first among them.
inline void accept_drafts(Work& w, const int64_t* counts) {
    const Recurrent& own = w.model.recurrent;
    const int64_t blocks = (own.channels + DRAFT_CHANNELS - 1) / DRAFT_CHANNELS;
    const auto for_rows = [&](int64_t parts, auto accept) {
        w.share(w.model.layers * w.step.batch * parts, 1, [&](int64_t task) {
            const int64_t part = task % parts, b = task / parts % w.step.batch, layer = task / parts / w.step.batch;
            if (ahead_of(w, b) || !recurs(w.model, layer)) return;
            int64_t row = -1;
            for (int64_t i = 0; i <= b; ++i) row += w.step.ahead[i] == 0;
            if (counts[row] > 1) accept(layer, b, counts[row] - 1, part);
        });
    };
    for_rows(blocks, [&](int64_t layer, int64_t b, int64_t count, int64_t part) {
        accept_channels(w, layer, b, count, part * DRAFT_CHANNELS);
    });
    w.end_part();
    if (own.value_heads)
        for_rows(own.value_heads, [&](int64_t layer, int64_t b, int64_t count, int64_t head) {
            accept_head(w, layer, b, count, head);
        });
}

inline void recurrent_stage(Work& w, int64_t layer, int64_t stage) {
    const Recurrent& own = w.model.recurrent;
    const LayerParts& parts = w.model.parts[layer];
    const auto bias_of = [&](const float* all, int64_t rows) { return all ? all + place_of(w, layer) * rows : nullptr; };
    switch (stage) {
        case 0:
            return norm_input(w, parts.input_norm, parts.recurrent_in, turn_before(w, layer),
                              layer ? w.model.parts[layer - 1].mlp_out_norm : nullptr);
        case 1: return project(w, parts.recurrent_in, bias_of(own.in_bias, own.projected), w.engine.mixed, nullptr, 1.0f,
                               own.in_scales);
        case 2:
            if (!own.value_heads) return short_conv(w, layer);
            if (own.skip)
                return share_heads(w, layer, own.value_heads, [&](int64_t b, int64_t head, float* state) {
                    scan_head(w, layer, b, head, state);
                });
            return share_heads(w, layer, own.key_heads, [&](int64_t b, int64_t head, float* memory) {
                delta_head(w, layer, b, head, memory);
            });
        default:
            return add_product(w, parts.recurrent_out, bias_of(own.out_bias, w.model.hidden), parts.attention_out_norm,
                               turn_of(w, layer, AFTER_ATTENTION), own.out_multiplier);
    }
}

}  // namespace looped
