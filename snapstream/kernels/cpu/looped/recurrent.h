// The stages of layers that keep a state in the place of keys and values: gated short convolutions, gated DeltaNet, Mamba-2
// (reference: ../../../models/recurrent.py). A task reads and writes the state of its own row and channels or heads, so
// results do not depend on other rows.
#pragma once
#include "dots.h"
#include "step.h"

namespace looped {

// Of a layer in the stacks of its mixer's kind.
inline int64_t place_of(const Work& w, int64_t layer) { return w.model.mixer_places[layer]; }

template <class State>  // of a row in a layer
float* state_of(const Work& w, const State* states, int64_t layer, int64_t b, int64_t size) {
    return reinterpret_cast<float*>(states[layer]) + w.step.rows[b] * size;
}

// One token of a causal depthwise convolution, `some` channels from `channel` on of input x. Its state, the K - 1
// inputs before, moves on by a token.
inline vec convolve(const Work& w, float* state, const float* taps, int64_t channel, int64_t some, vec x) {
    const int64_t size = w.model.recurrent.channels, last = w.model.recurrent.kernel - 1;
    const auto put = [&](float* to, vec v) {
        if (some == W) return store(to, v);
        float lanes[W];
        store(lanes, v);
        std::copy(lanes, lanes + some, to);
    };
    vec sum = {};
    for (int64_t i = 0; i < last; ++i) {
        float* own = state + i * size + channel;
        sum += load_some(taps + i * size + channel, some) * load_some(own, some);
        put(own, i + 1 < last ? load_some(own + size, some) : x);
    }
    return sum + load_some(taps + last * size + channel, some) * x;
}

// The input of the next product: c * conv(b * x) of b | c | x.
inline void short_conv(Work& w, int64_t layer) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer), size = own.channels;
    const float* taps = own.taps + place * own.kernel * size;
    const float* bias = own.conv_bias ? own.conv_bias + place * size : nullptr;
    make_input(w, own.out, [&](int64_t b, int64_t first, int64_t count, float* out) {
        const float *gate = w.engine.heads + b * own.in.rows, *out_gate = gate + size, *x = out_gate + size;
        float* state = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * size);
        for (int64_t i = 0; i < count; i += W) {
            const int64_t some = std::min<int64_t>(W, count - i), at = first + i;
            vec sum = convolve(w, state, taps, at, some, load_some(gate + at, some) * load_some(x + at, some));
            if (bias) sum += load_some(bias + at, some);
            store(out + i, sum * load_some(out_gate + at, some));
        }
    });
}

// Columns [first, first + N W) of a head's state S [keys, values], or `some` of them: out = S^T q after
// S <- decay S, u = beta (v - S^T k), S <- S + k u^T. v is overwritten. The columns stay in the nearest cache between
// both passes. BY_CHANNEL: with a decay per element of a key, by which `decayed` are the keys.
template <int N, bool BY_CHANNEL>
inline void delta_columns(float* state, int64_t keys, int64_t values, const float* q, const float* k,
                          const float* decays, const float* decayed, float beta, float* v, float* out,
                          int64_t some = W) {
    vec recalled[N] = {}, sums[N] = {};
    const auto get = [&](const float* from) { return N > 1 ? load(from) : load_some(from, some); };
    const auto put = [&](float* to, vec x) {
        if (N > 1 || some == W) return store(to, x);
        float lanes[W];
        store(lanes, x);
        std::copy(lanes, lanes + some, to);
    };
    const float decay = BY_CHANNEL ? 1.0f : *decays, *asked = BY_CHANNEL ? decayed : k;
    for (int64_t i = 0; i < keys; ++i)
        for (int n = 0; n < N; ++n) recalled[n] += get(state + i * values + n * W) * asked[i];
    for (int n = 0; n < N; ++n) recalled[n] = (get(v + n * W) - recalled[n] * decay) * beta;
    for (int64_t i = 0; i < keys; ++i)
        for (int n = 0; n < N; ++n) {
            float* at = state + i * values + n * W;
            const vec next = get(at) * (BY_CHANNEL ? decays[i] : decay) + recalled[n] * k[i];
            put(at, next);
            sums[n] += next * q[i];
        }
    for (int n = 0; n < N; ++n) put(out + n * W, sums[n]);
}

// One token of the gated delta rule for one value head (arXiv 2412.06464, section 3.1).
template <bool BY_CHANNEL>
inline void delta_rule(float* state, int64_t keys, int64_t values, const float* q, const float* k, const float* decays,
                       const float* decayed, float beta, float* v, float* out) {
    int64_t i = 0;
    for (; i + 4 * W <= values; i += 4 * W)
        delta_columns<4, BY_CHANNEL>(state + i, keys, values, q, k, decays, decayed, beta, v + i, out + i);
    for (; i < values; i += W)
        delta_columns<1, BY_CHANNEL>(state + i, keys, values, q, k, decays, decayed, beta, v + i, out + i,
                                     std::min<int64_t>(W, values - i));
}

// Of the normed input of a layer with a row of its gates.
inline float gate_logit(const Work& w, int64_t layer, int64_t b, const float* row) {
    const float *x = w.engine.residual + b * w.model.hidden, *norm = norm_of_layer(w, w.model.input_norm, layer);
    vec sum = {};
    for (int64_t i = 0; i < w.model.hidden; i += W) {
        const int64_t some = std::min<int64_t>(W, w.model.hidden - i);
        sum += load_some(x + i, some) * w.engine.factors[b] * load_some(norm + i, some) * load_some(row + i, some);
    }
    return sum_of(sum);
}

// q, k, v and the output of a key head; of KDA decays and decayed keys, and the gates of outputs.
inline int64_t delta_scratch(const Model& model) {
    const Recurrent& own = model.recurrent;
    const int64_t more = own.gate_rank ? 2 * own.key_dim + own.value_dim + 2 * W : 0;
    return own.value_heads ? 2 * own.key_dim + 2 * own.value_heads / own.key_heads * own.value_dim + more : 0;
}

// Value heads of one key head: convolution of their channels, the delta rule, norm and gate of the output.
inline void delta_head(Work& w, int64_t layer, int64_t b, int64_t head) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer), keys = own.key_dim, values = own.value_dim, hidden = w.model.hidden;
    const int64_t each = own.value_heads / own.key_heads, all_keys = own.key_heads * keys;
    const float *x = w.engine.heads + b * own.in.rows, *taps = own.taps + place * own.kernel * own.channels;
    float* inputs = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * own.channels);
    float *q = w.scratch, *k = q + keys, *v = k + keys, *out = v + each * values;
    const Gated silu;
    const auto channels = [&](int64_t first, int64_t count, float* to) {
        for (int64_t i = 0; i < count; i += W) {
            const int64_t some = std::min<int64_t>(W, count - i);
            float lanes[W];
            store(lanes, silu(convolve(w, inputs, taps, first + i, some, load_some(x + first + i, some)), all(1.0f)));
            std::copy(lanes, lanes + some, to + i);
        }
    };
    const auto to_unit = [&](float* of, float scale) {
        float sum = 0.0f;
        for (int64_t i = 0; i < keys; ++i) sum += of[i] * of[i];
        const float factor = scale / std::sqrt(sum + 1e-6f);
        for (int64_t i = 0; i < keys; ++i) of[i] *= factor;
    };
    channels(head * keys, keys, q);
    channels(all_keys + head * keys, keys, k);
    channels(2 * all_keys + head * each * values, each * values, v);
    to_unit(q, 1.0f / std::sqrt(static_cast<float>(keys)));
    to_unit(k, 1.0f);
    const int64_t rank = own.gate_rank;
    const float* gates = own.gates + place * (rank ? 1 : 2) * own.value_heads * hidden;
    float *decayed = out + each * values, *decays = decayed + keys, *gated = decays + (keys + W - 1) / W * W;
    float* memory = state_of(w, w.rows.memories, layer, b, own.value_heads * keys * values);
    for (int64_t i = 0; i < each; ++i) {
        const int64_t value_head = head * each + i, at = place * own.value_heads + value_head;
        const float beta = gate_logit(w, layer, b, gates + value_head * hidden);
        const auto decay_of = [&](float step) {
            return std::exp(own.rate[at] * (step > 20.0f ? step : std::log1p(std::exp(step))));
        };
        float *found = out + i * values, *state = memory + value_head * keys * values, *own_v = v + i * values;
        const float share = 1.0f / (1.0f + std::exp(-beta)), *z = x + own.channels + value_head * values;
        if (rank) {
            const float *first = x + own.channels, *steps = own.step + at * keys;
            dots(1, first, rank, own.decay_up + at * keys * rank, keys, rank, decays, 0);
            for (int64_t j = 0; j < keys; ++j) decays[j] = decay_of(decays[j] + steps[j]), decayed[j] = decays[j] * k[j];
            delta_rule<true>(state, keys, values, q, k, decays, decayed, share, own_v, found);
            dots(1, first + rank, rank, own.gate_up + at * values * rank, values, rank, gated, 0);
            z = gated;
        } else {
            const float step = gate_logit(w, layer, b, gates + (own.value_heads + value_head) * hidden);
            const float decay = decay_of(step + own.step[at]);
            delta_rule<false>(state, keys, values, q, k, &decay, nullptr, share, own_v, found);
        }
        const float factor = norm_factor(found, values, w.model.eps), *norm = own.norm + place * values;
        for (int64_t j = 0; j < values; ++j)
            found[j] *= factor * norm[j] * ((rank ? 1.0f : z[j]) / (1.0f + std::exp(-z[j])));
    }
    pack_heads(w, own.out, b, head, own.key_heads, out);
}

// Columns [first, first + W) of a head's state S [states, size], or `some` of them: S <- decay S + b x^T, out = S^T c.
inline vec scan_columns(float* state, int64_t states, int64_t size, const float* b, const float* c, float decay, vec x,
                        int64_t some) {
    vec sums[2] = {};
    if (some == W) {
        for (int64_t i = 0; i < states; ++i) {
            const vec next = load(state + i * size) * decay + x * b[i];
            store(state + i * size, next);
            sums[i % 2] += next * c[i];
        }
        return sums[0] + sums[1];
    }
    for (int64_t i = 0; i < states; ++i) {
        const vec next = load_some(state + i * size, some) * decay + x * b[i];
        float lanes[W];
        store(lanes, next);
        std::copy(lanes, lanes + some, state + i * size);
        sums[i % 2] += next * c[i];
    }
    return sums[0] + sums[1];
}

// Of one token: norm per group of what its heads made, times the gates; then the convolution of B and C moves on.
inline void finish_scan(Work& w, int64_t layer, int64_t b) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer), inner = own.value_heads * own.value_dim, each = inner / own.key_heads;
    float *z = w.engine.heads + b * own.in.rows, *found = z + inner;
    const float* norm = own.norm + place * inner;
    for (int64_t j = 0; j < inner; ++j) found[j] *= z[j] / (1.0f + std::exp(-z[j]));
    for (int64_t first = 0; first < inner; first += each) {
        const float factor = norm_factor(found + first, each, w.model.eps);
        for (int64_t j = first; j < first + each; ++j) z[j] = found[j] * factor * norm[j];
    }
    put_input(own.out, w.engine.packed, Place(w.tokens, b), z, 0, inner);
    float* inputs = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * own.channels);
    for (int64_t i = 0; i + 1 < own.kernel; ++i) {
        float* to = inputs + i * own.channels;
        const float* from = i + 2 < own.kernel ? to + own.channels : found;  // of this token, all channels
        std::copy(from + inner, from + own.channels, to + inner);
    }
}

// One head of Mamba-2 and token: convolution of its channels and of its group's B and C, the scan (arXiv 2405.21060). Its
// output takes the place of its inputs; who ends last of a token goes on with all of them.
inline void scan_head(Work& w, int64_t layer, int64_t b, int64_t head) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer), states = own.key_dim, size = own.value_dim, heads = own.value_heads;
    const int64_t inner = heads * size, group = head / (heads / own.key_heads), at = place * heads + head;
    float* x = w.engine.heads + b * own.in.rows + inner;
    const float* taps = own.taps + place * own.kernel * own.channels;
    const float* bias = own.conv_bias ? own.conv_bias + place * own.channels : nullptr;
    float* inputs = state_of(w, w.rows.conv_inputs, layer, b, (own.kernel - 1) * own.channels);
    float *in = w.scratch, *out = in + states;
    const Gated silu;
    const auto activated = [&](vec sum, int64_t channel, int64_t some) {
        return silu(bias ? sum + load_some(bias + channel, some) : sum, all(1.0f));
    };
    const auto shared = [&](int64_t first, float* to) {  // of the group: read by all its heads, moved on by the last
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
    const float logit = x[own.channels + head] + own.step[at];
    const float step = logit > 20.0f ? logit : std::log1p(std::exp(logit)), decay = std::exp(own.rate[at] * step);
    float* state = state_of(w, w.rows.memories, layer, b, inner * states) + head * states * size;
    for (int64_t i = 0; i < size; i += W) {
        const int64_t some = std::min<int64_t>(W, size - i), channel = head * size + i;
        const vec own_x = activated(convolve(w, inputs, taps, channel, some, load_some(x + channel, some)), channel, some);
        const vec found = scan_columns(state + i, states, size, in, out, decay, own_x * step, some) + own_x * own.skip[at];
        float lanes[W];
        store(lanes, found);
        std::copy(lanes, lanes + some, x + channel);
    }
    if (w.engine.heads_done[b].fetch_add(1, std::memory_order_acq_rel) + 1 < heads) return;
    w.engine.heads_done[b].store(0, std::memory_order_relaxed);
    finish_scan(w, layer, b);
}

// The last of a layer's stages of attention is also the last here; those before it from 3 on are empty.
inline bool is_recurrent_stage_empty(Work& w, int64_t stage) {
    return stage > 2 && stage + 1 < attention_stages(w.model);
}

inline void recurrent_stage(Work& w, int64_t layer, int64_t stage) {
    const Recurrent& own = w.model.recurrent;
    const int64_t place = place_of(w, layer);
    switch (stage) {
        case 0: return norm_input(w, norm_of_layer(w, w.model.input_norm, layer), own.in, turn_before(w, layer));
        case 1: return project(w, own.in, place, own.in_bias, w.engine.heads);
        case 2:
            if (!own.value_heads) return short_conv(w, layer);
            if (own.skip)
                return w.share(w.step.batch * own.value_heads, 1, [&](int64_t task) {
                    scan_head(w, layer, task / own.value_heads, task % own.value_heads);
                });
            return w.share(w.step.batch * own.key_heads, 1,
                           [&](int64_t task) { delta_head(w, layer, task / own.key_heads, task % own.key_heads); });
        default: return add_product(w, own.out, place, own.out_bias, turn_of(w, layer, AFTER_ATTENTION));
    }
}

}  // namespace looped
