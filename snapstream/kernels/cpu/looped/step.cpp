// A decode step, stage by stage, on every thread of the pool. A stage is cut into tasks whose results do not depend on
// the thread that runs them; a barrier ends it. engine.h has the buffers, step.h what all stages share, attention.h,
// latent.h, recurrent.h and experts.h the stages that layers differ in.
#include <limits>

#include "experts.h"
#include "streams.h"

namespace looped {

namespace {

void copy_embedding(Work& w, int64_t line, float* out) {
    copy_row(w.model.embed, line, out);
    if (w.model.embed_multiplier == 1.0f) return;
    for (int64_t i = 0; i < w.model.hidden; ++i) out[i] *= w.model.embed_multiplier;
}

// The rank that has the token's row of the table writes it, the others zeros.
void embed_token(Work& w, int64_t token, int64_t at) {
    float* x = w.engine.residual + at;
    if (w.model.is_parallel) {  // no attention before the first layer
        float* attended = w.engine.outputs + at;
        std::fill(attended, attended + w.model.hidden, 0.0f);
    }
    if (w.ranks.is_alone()) return copy_embedding(w, token, x);
    float* part = own_part(w, AFTER_MLP) + at;
    const int64_t line = token - w.ranks.rank * w.model.embed.rows;
    std::fill(x, x + w.model.hidden, 0.0f);
    if (line >= 0 && line < w.model.embed.rows) return copy_embedding(w, line, part);
    std::fill(part, part + w.model.hidden, 0.0f);
}

// Cosines and sines of a position (reference: ../../../models/rope.py).
void angles_of(Work& w, int64_t position, bool is_window, float* out) {
    const int64_t head_dim = is_window ? w.model.window_head_dim : w.model.full_head_dim;
    const int64_t half = (w.latent.rank ? w.latent.rope_dim : head_dim) / 2;
    const int64_t rotated = is_window ? w.model.window_rotated : w.model.rotated;
    const bool is_long = w.model.long_original && position + 1 > w.model.long_original;
    const float* frequencies = is_long ? w.model.long_frequencies : w.model.frequencies;
    if (is_window) frequencies = w.model.window_frequencies;
    const float scale = is_window ? w.model.window_rope_scale : w.model.rope_scale;
    const bool is_dynamic = w.model.dynamic_original && !is_window;
    float base = 0.0f;
    if (is_dynamic) {
        const float length = static_cast<float>(std::max(position + 1, w.model.dynamic_original));
        const float factor = w.model.dynamic_factor;
        const float growth = factor * length / w.model.dynamic_original - (factor - 1.0f);
        base = w.model.dynamic_theta * std::pow(growth, static_cast<float>(rotated) / (rotated - 2));
    }
    for (int64_t i = 0; i < half; ++i) {
        if (i >= rotated / 2) {
            out[i] = 1.0f;
            out[half + i] = 0.0f;
            continue;
        }
        const float share = 2.0f * i / rotated;
        const float frequency = is_dynamic ? 1.0f / std::pow(base, share) : frequencies[i];
        const float angle = static_cast<float>(position) * frequency;
        out[i] = std::cos(angle) * scale;
        out[half + i] = std::sin(angle) * scale;
    }
}

int64_t token_of(Work& w, int64_t b) { return w.step.inputs ? w.step.inputs[b] : w.rows.last_token[w.step.rows[b]]; }

void embed(Work& w) {
    w.share(w.step.batch, 1, [&](int64_t b) {
        embed_token(w, token_of(w, b), b * w.model.hidden);
        if (w.model.per_layer_dim)
            put_input(w.model.parts[0].per_layer_in, w.engine.embedded, Place(w.tokens, b),
                      w.engine.residual + b * w.model.hidden, 0, w.model.hidden);
        const int64_t position = position_of(w, b);
        angles_of(w, position, false, w.engine.angles + b * w.model.head_dim);
        if (w.model.window_frequencies)
            angles_of(w, position, true, w.engine.angles + (w.step.batch + b) * w.model.head_dim);
    });
    if (w.model.streams) split_streams(w);
}

void look(Likeliest& best, const float* scores, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        if (scores[i] > best.score || (scores[i] == best.score && first + i < best.token))
            best = {scores[i], best.is_finite, first + i};
}

void merge(Likeliest& best, const Likeliest& other) {
    best.is_finite &= other.is_finite;
    if (other.score > best.score || (other.score == best.score && other.token < best.token)) {
        best.score = other.score;
        best.token = other.token;
    }
}

Likeliest likeliest_here(Work& w, int64_t b) {  // of this rank
    Likeliest best = w.engine.likeliest[b];
    for (int i = 1; i < w.pool.size(); ++i) merge(best, w.engine.likeliest[i * w.engine.max_batch + b]);
    return best;
}

void cap_logits(float cap, float* own, int64_t count) {  // NaN stays NaN
    for (int64_t i = 0; i < count; i += W) {
        const int64_t some = std::min<int64_t>(W, count - i);
        const vec capped = cap * hyperbolic_tangent(load_some(own + i, some) / cap);
        std::memcpy(own + i, &capped, some * 4);
    }
}

void head_stage(Work& w) {
    Likeliest* best = &w.engine.likeliest[w.thread * w.engine.max_batch];
    const int64_t before = w.ranks.rank * w.model.head.rows;  // tokens of the ranks before this one
    for (int64_t b = 0; b < w.step.batch; ++b) best[b] = {-std::numeric_limits<float>::infinity(), true, 0};
    product(w, w.model.head, w.engine.packed, [&](int64_t line, int64_t lines, const float* sums) {
        // then come lines of no token
        const int64_t first = before + line, count = std::min(lines, w.model.vocab - first);
        if (count <= 0) return;
        for (int64_t b = 0; b < w.step.batch; ++b) {
            float* own = w.step.logits + b * w.model.vocab + first;
            std::memcpy(own, sums + b * PANEL, count * 4);
            for (int64_t i = 0; w.model.lm_head_bias && i < count; ++i) own[i] += w.model.lm_head_bias[line + i];
            if (w.model.logits_multiplier != 1.0f)
                for (int64_t i = 0; i < count; ++i) own[i] *= w.model.logits_multiplier;
            if (w.model.logit_cap != 0.0f) cap_logits(w.model.logit_cap, own, count);
            if (!w.step.tokens) continue;
            bool is_better = false, is_number = true;
            for (int64_t i = 0; i < count; ++i) {
                is_better |= own[i] >= best[b].score;
                is_number &= own[i] == own[i];
            }
            best[b].is_finite &= is_number;
            if (is_better) look(best[b], own, first, count);
        }
    });
}

// Greedy sampling, the lowest id among equals (reference: ../../../exec/sampling.py), and the counters of the rows.
void choose_tokens(Work& w) {
    for (int64_t b = 0; b < w.step.batch; ++b) {
        if (ahead_of(w, b) && w.step.tokens[b - 1] != w.step.inputs[b]) {
            w.step.tokens[b] = REJECTED;
            continue;
        }
        Likeliest best = likeliest_here(w, b);
        for (int64_t rank = 0; rank < w.ranks.size && w.ranks.waits; ++rank)
            merge(best, w.ranks.likeliest(rank)[b]);
        const bool is_finite = best.is_finite && std::isfinite(best.score);
        w.step.tokens[b] = is_finite ? best.token : -1;
        const int64_t row = w.step.rows[b];
        w.rows.last_token[row] = is_finite ? best.token : 0;
        ++w.rows.num_tokens[row];
        ++w.rows.num_sampled[row];
    }
}

// The norm of what a layer adds last, or null.
const float* last_norm(Work& w, int64_t layer) {
    const LayerParts& own = w.model.parts[layer];
    return w.model.per_layer_dim ? own.per_layer_norm : own.mlp_out_norm;
}

void attention_stage(Work& w, int64_t layer, int64_t stage) {
    const LayerParts& own = w.model.parts[layer];
    switch (stage) {
        case 0:
            return norm_input(w, own.input_norm, own.qkv, turn_before(w, layer),
                              layer ? last_norm(w, layer - 1) : nullptr,
                              layer ? w.model.parts[layer - 1].scalar : 1.0f, rest_of(own));
        case 1: return project_heads(w, own);
        case 2: return attend_rows(w, layer);
        default:
            return add_product(w, own.o, own.o_bias, own.attention_out_norm, turn_of(w, layer, AFTER_ATTENTION),
                               w.model.attention_multiplier);
    }
}

// Attention over the first of several streams, and a low-rank branch of the same input, to `beside`.
void streams_stage(Work& w, int64_t layer, int64_t stage) {
    const LayerParts& own = w.model.parts[layer];
    if (stage == 0)
        return norm_settled(w, own.input_norm, own.qkv, [&](int64_t b) { predict_streams(w, layer, b); }, rest_of(own));
    attention_stage(w, layer, stage);
    const auto low = [&](int64_t b) { return w.engine.low + b * own.laurel_in.rows; };
    if (stage == 3) project_rows(w, own.laurel_out, low, w.engine.beside);
    if (stage != 1) return;
    w.end_part();
    pack_normed(w, own.input_norm, own.laurel_in);
    w.end_part();
    project(w, own.laurel_in, nullptr, w.engine.low);
}

// Attention and recurrence over one normed input, each added to the residual stream, which neither reads by then.
void both_stage(Work& w, int64_t layer, int64_t stage) {
    if (stage == 3) return recurrent_stage(w, layer, stage);
    attention_stage(w, layer, stage);
    if (stage == 0) return;
    w.end_part();
    if (stage == 1) pack_normed(w, w.model.parts[layer].input_norm, w.model.parts[layer].recurrent_in);
    else attention_stage(w, layer, 3);
    w.end_part();
    recurrent_stage(w, layer, stage);
}

void latent_stage(Work& w, int64_t layer, int64_t stage) {
    const LayerParts& own = w.model.parts[layer];
    const bool is_direct = !w.latent.q_rank;
    const Stack& first = is_direct ? own.q : own.q_a;  // besides that of the latents
    if (is_direct && stage > 2) stage += 2;
    switch (stage) {
        case 0:
            return norm_input(w, own.input_norm, own.kv_a, turn_before(w, layer),
                              layer ? last_norm(w, layer - 1) : nullptr, 1.0f, &first);
        case 1: return project_latents(w, layer);
        case 2: {
            const int64_t apart = shares_input(own.kv_a, first) ? 0 : rest_of_input(w, own.kv_a);
            float* to = is_direct ? w.absorbed.wide : w.absorbed.narrow;
            return project(w, first, nullptr, to, w.engine.packed + apart);
        }
        case 3: return norm_narrow(w, layer);
        case 4: return project(w, own.q, nullptr, w.absorbed.wide);
        case 5: return absorb(w, layer);
        case 6: return attend_latents(w, layer);
        case 7: return expand_values(w, layer);
        default: return add_product(w, own.o, nullptr, own.attention_out_norm, AFTER_ATTENTION);
    }
}

void mlp_stage(Work& w, int64_t layer, int64_t stage) {
    const LayerParts& own = w.model.parts[layer];
    const float* packed = activates_at_once(w, layer) ? w.engine.gate_up : w.engine.packed;
    if (stage == 0 && w.model.streams)
        return norm_settled(w, own.post_norm, own.gate_up, [&](int64_t b) { join_branches(w, layer, b); });
    if (stage == 3 && is_beside_mlp(w.model)) return project(w, own.down, own.down_bias, w.engine.beside, packed);
    switch (stage) {
        case 0:
            return norm_input(w, own.post_norm, own.gate_up, turn_before_mlp(w, layer), own.attention_out_norm);
        case 1: return expand_tokens(w, layer);
        case 2: return activate_mlp(w, layer);
        default:
            return add_product(w, own.down, own.down_bias, own.mlp_out_norm, turn_of(w, layer, AFTER_MLP),
                               w.model.mlp_multiplier, packed);
    }
}

// What a token's embedding for this layer adds (reference: LayerEnd in ../../../models/layers.py). Of a batch of B,
// gate_up has the gates [B, P], then the embeddings.
void per_layer_stage(Work& w, int64_t layer, int64_t stage) {
    const LayerParts& own = w.model.parts[layer];
    const int64_t size = w.model.per_layer_dim;
    float *gates = w.engine.gate_up, *embedded = gates + w.step.batch * size;
    switch (stage) {
        case 0:
            return norm_settled(w, nullptr, own.per_layer_gate, [&](int64_t b) {
                if (w.model.streams) return correct_streams(w, layer, b);
                settle_stream(w, AFTER_MLP, b, own.mlp_out_norm, 1.0f);
            });
        case 1:
            project(w, own.per_layer_gate, nullptr, gates);
            w.end_part();
            return project(w, own.per_layer_in, nullptr, embedded, w.engine.embedded,
                           1.0f / std::sqrt(static_cast<float>(w.model.hidden)));
        case 2:
            w.share(w.step.batch, 1, [&](int64_t b) {
                float* x = embedded + b * size;
                const float factor = norm_factor(x, size, w.model.eps), root = std::sqrt(static_cast<float>(size));
                const int64_t token = token_of(w, b);
                copy_row(own.per_layer_table, token < own.per_layer_table.rows ? token : 0, w.scratch);
                for (int64_t i = 0; i < size; ++i)
                    x[i] = (x[i] * factor * w.model.per_layer_in_norm[i] + w.scratch[i] * root) * 0.70710678f;
            });
            w.end_part();
            return make_input(w, own.per_layer_out, [&](int64_t b, int64_t first, int64_t count, float* out) {
                const Gated gated{GELU};
                for (int64_t i = 0; i < count; i += W) {
                    const int64_t some = std::min<int64_t>(W, count - i), at = b * size + first + i;
                    store(out + i, gated(load_some(gates + at, some), load_some(embedded + at, some)));
                }
            });
        default:
            add_product(w, own.per_layer_out, nullptr, own.per_layer_norm, AFTER_MLP);
            if (!w.model.streams) return;
            w.end_part();
            w.share(w.step.batch, 1, [&](int64_t b) {
                const float* added = w.engine.outputs + b * w.model.hidden;
                for (int64_t s = 1; s < w.model.streams; ++s) add_norm(w, added, own.per_layer_norm, stream_of(w, b, s));
            });
    }
}

void layer_stage(Work& w, int64_t layer, int64_t stage) {
    const int64_t attention = attention_stages(w.model);
    if (w.model.hyper.streams && stage == 0)
        read_streams(w, w.model.parts[layer].before_attention, w.model.hyper.shares, AFTER_MLP, layer == 0);
    if (w.model.hyper.streams && stage == attention)
        read_streams(w, w.model.parts[layer].before_mlp, w.model.hyper.shares, AFTER_ATTENTION);
    if (stage < attention && w.model.mixers[layer] == RECURRENT) return recurrent_stage(w, layer, stage);
    if (stage < attention && w.model.mixers[layer] == BOTH) return both_stage(w, layer, stage);
    if (stage < attention && w.model.streams) return streams_stage(w, layer, stage);
    if (stage < attention) return w.latent.rank ? latent_stage(w, layer, stage) : attention_stage(w, layer, stage);
    const int64_t own = stage - attention, last = mlp_stages(w.model);
    if (own >= last) return per_layer_stage(w, layer, own - last);
    if (is_beside_mlp(w.model)) {
        if (own < MLP_STAGES) return mlp_stage(w, layer, own);
        return own + 1 == last ? add_beside(w, layer) : mixture_stage(w, layer, own - MLP_STAGES);
    }
    return w.model.mlps[layer] == EXPERTS ? mixture_stage(w, layer, own) : mlp_stage(w, layer, own);
}

// Whether a stage has no task for any thread; it then has no barrier either.
bool is_empty(Work& w, int64_t stage) {
    if (stage == 0 || stage > w.model.layers * layer_stages(w.model)) return false;
    const int64_t layer = (stage - 1) / layer_stages(w.model), attention = attention_stages(w.model),
        own = (stage - 1) % layer_stages(w.model) - attention, last = mlp_stages(w.model);
    if (own < 0) {
        if (w.model.mixers[layer] == RECURRENT) return is_recurrent_stage_empty(w, own + attention);
        return w.model.mixers[layer] == NO_MIXER;
    }
    if (own >= last) return false;
    if (w.model.mlps[layer] == NO_MLP) return true;
    if (is_beside_mlp(w.model) && own >= MLP_STAGES)
        return own + 1 < last && is_mixture_stage_empty(w, layer, own - MLP_STAGES);
    if (w.model.mlps[layer] == EXPERTS && !is_beside_mlp(w.model)) return is_mixture_stage_empty(w, layer, own);
    return own > 3 || (own == 2 && activates_at_once(w, layer));
}

// Whether the next stage reads what all ranks have made in this one.
bool ends_with_all(Work& w, int64_t stage) {
    if (stage == 0 || stage == num_stages(w.model) - 1) return true;
    if (stage == num_stages(w.model) - 2) return false;
    const int64_t layer = (stage - 1) / layer_stages(w.model), own = (stage - 1) % layer_stages(w.model);
    return own == attention_stages(w.model) - 1 || own == attention_stages(w.model) + (w.model.mlps[layer] == EXPERTS ? 5 : 3);
}

void end_stage(Work& w, int64_t stage) {
    if (w.ranks.is_alone() || !ends_with_all(w, stage)) return w.pool.barrier();
    w.pool.barrier([&] {
        if (stage == num_stages(w.model) - 1 && w.step.tokens) {
            Likeliest* own = w.ranks.likeliest(w.ranks.rank);
            for (int64_t b = 0; b < w.step.batch; ++b) own[b] = likeliest_here(w, b);
        }
        w.ranks.barrier();
    });
}

void run(Work& w) {
    for (int64_t stage = w.step.first; stage < w.step.last; ++stage) {
        if (is_empty(w, stage)) continue;
        if (stage == 0) embed(w);
        else if (stage <= w.model.layers * layer_stages(w.model))
            layer_stage(w, (stage - 1) / layer_stages(w.model), (stage - 1) % layer_stages(w.model));
        else if (stage == num_stages(w.model) - 2 && w.model.streams) merge_streams(w);
        else if (stage == num_stages(w.model) - 2) {
            const Hyper& hyper = w.model.hyper;
            if (hyper.streams) read_streams(w, hyper.head, hyper.head.weights ? hyper.streams : 0, AFTER_MLP);
            norm_input(w, w.model.final_norm, w.model.head, turn_before(w, w.model.layers),
                       last_norm(w, w.model.layers - 1), w.model.parts[w.model.layers - 1].scalar);
        }
        else head_stage(w);
        w.clear_next();
        end_stage(w, stage);
        if (w.ranks.has_failed) return;
        ++w.turn;
    }
    if (w.thread == 0 && w.step.tokens && w.step.last == num_stages(w.model)) choose_tokens(w);
}

}  // namespace

EXPORT bool looped_step(Engine& engine, const Step& step) {  // false: another rank has gone
    engine.tasks.clear();
    engine.pool.run([&](int index) {
        Work work(engine, step, index);
        run(work);
    });
    return !engine.ranks.has_failed;
}

// After a step with drafts: the states of its rows go on by the entries that they accepted, counts [rows].
EXPORT void looped_accept(Engine& engine, const Step& step, const int64_t* counts) {
    engine.tasks.clear();
    engine.pool.run([&](int index) {
        Work work(engine, step, index);
        accept_drafts(work, counts);
    });
}

// What the last layer gave the first entries of the last step, before the final norm: out [count, D].
EXPORT void looped_hidden(const Engine& engine, int64_t count, float* out) {
    std::copy(engine.residual, engine.residual + count * engine.model.hidden, out);
}

EXPORT void looped_copy_rows(const Stack& matrix, const int64_t* rows, int64_t count, float* out,
                             int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) copy_row(matrix, rows[i], out + i * matrix.cols);
}

// From neighbours in a byte to columns that lie four apart.
INLINE uint32_t apart(uint32_t eight) {
    uint32_t changed = (eight >> 8 ^ eight) & 0xff00u;
    eight ^= changed ^ changed << 8;
    changed = (eight >> 4 ^ eight) & 0xf000f0u;
    return eight ^ changed ^ changed << 4;
}

// `count` numbers of each of `lanes` rows that lie `stride` bytes apart.
template <class Number, class Change>
INLINE void interleave(const char* from, int64_t stride, int64_t count, int64_t lanes, char* to, Change change) {
    for (int64_t i = 0; i < count; ++i, from += sizeof(Number), to += PANEL * sizeof(Number))
        for (int64_t lane = 0; lane < lanes; ++lane) {
            Number own;
            std::memcpy(&own, from + lane * stride, sizeof own);
            own = change(own);
            std::memcpy(to + lane * sizeof own, &own, sizeof own);
        }
}

// Stores rows from `first` on in panels of quantized blocks: a row's codes, blocks x code bytes, and scales, blocks x
// scale_bytes, of which the first `halves` bytes are numbers of two.
EXPORT void looped_fill_codes(char* panels, int64_t blocks, int64_t block_bytes, int64_t first, int64_t rows,
                              const char* codes, const char* scales, int64_t scale_bytes, int64_t halves,
                              int64_t bits, int64_t threads) {
    const int64_t code_bytes = block_bytes / PANEL - scale_bytes;
    const auto same = [](auto own) { return own; };
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = first / PANEL; panel <= (first + rows - 1) / PANEL; ++panel) {
        const int64_t begin = std::max(first, panel * PANEL), lane = begin % PANEL;
        const int64_t lanes = std::min(first + rows, (panel + 1) * PANEL) - begin;
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t at = (begin - first) * blocks + block, stride = blocks * scale_bytes;
            const char *own_scales = scales + at * scale_bytes, *own = codes + at * code_bytes;
            char* to = panels + (panel * blocks + block) * block_bytes;
            interleave<uint16_t>(own_scales, stride, halves / 2, lanes, to + 2 * lane, same);
            interleave<uint8_t>(own_scales + halves, stride, scale_bytes - halves, lanes, to + PANEL * halves + lane, same);
            to += PANEL * scale_bytes;
            const int64_t apart_by = blocks * code_bytes;
            if (bits == 4) interleave<uint32_t>(own, apart_by, code_bytes / 4, lanes, to + 4 * lane, apart);
            else if (bits != 3) interleave<uint32_t>(own, apart_by, code_bytes / 4, lanes, to + 4 * lane, same);
            else for (int64_t unit = 0; unit < code_bytes; unit += 6, to += 6 * PANEL) {
                interleave<uint32_t>(own + unit, apart_by, 1, lanes, to + 4 * lane, same);
                interleave<uint16_t>(own + unit + 4, apart_by, 1, lanes, to + 4 * PANEL + 2 * lane, same);
            }
        }
    }
}

int64_t scratch_floats(const Model& model, int64_t max_batch) {
    const int64_t products = 2 * std::max(max_batch, PAIR_TOKENS) * PANEL;  // a panel of gate and one of up
    int64_t attention = 0;
    for (int64_t layer = 0; layer < model.layers && !model.latent.rank; ++layer) {
        const LayerParts& own = model.parts[layer];
        const int64_t shared = own.heads / own.kv_heads, group = shared * own.head_dim;
        attention = std::max(attention, group + std::max(group, attend_scratch(shared)));
    }
    return std::max({products, attention, model.per_layer_dim, latent_scratch(model), mixture_scratch(model), recurrent_scratch(model)});
}

}  // namespace looped
