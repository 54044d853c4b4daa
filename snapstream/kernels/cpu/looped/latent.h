// Attention over rows of latents, absorbed: queries are projected to the space of the latents, where a latent is the
// key of one kv head whose value is its own first R numbers, and the result is expanded once per head. Reference:
// ../../../models/latent.py.
//
// Rows are cut as in rows.h. Heads of a row are split into tiles, whose size depends on the batch: a head's result does
// not, since no sum crosses heads.
#pragma once
#include "attention.h"
#include "dots.h"

namespace looped {

// of a row, a multiple of W: they stay in a near cache for all heads of a tile
constexpr int64_t LATENTS_AT_ONCE = 32;
constexpr int64_t ABSORBED_COLUMNS = 64;  // of a task, a multiple of W

inline int64_t latent_size(Work& w) { return w.latent.rank + w.latent.rope_dim; }
inline int64_t query_size(Work& w) { return w.latent.nope_dim + w.latent.rope_dim; }  // of a projected head

inline const float* up_of(Work& w, int64_t layer, int64_t head) {
    return w.latent.up + (place_of(w, layer) * w.model.heads + head) * (w.latent.nope_dim + w.latent.value_dim) * w.latent.rank;
}

// x [P] turned in pairs of its halves, in layers with rotary embedding.
inline void rotate_halves(Work& w, int64_t layer, const float* x, int64_t b, float* out) {
    const int64_t half = w.latent.rope_dim / 2;
    if (w.model.rotated_layers && !w.model.rotated_layers[layer]) return void(std::copy(x, x + 2 * half, out));
    const float* angle = w.engine.angles + b * w.model.head_dim;
    for (int64_t i = 0; i < half; ++i) {
        out[i] = x[i] * angle[i] - x[half + i] * angle[half + i];
        out[half + i] = x[half + i] * angle[i] + x[i] * angle[half + i];
    }
}

inline char* row_of(Work& w, int64_t layer, int64_t row) {
    const RowForm form{w.rows.key_format};
    return reinterpret_cast<char*>(w.rows.keys[layer]) + form.bytes(row * w.rows.layer_slots[layer] * latent_size(w));
}

inline float scale_of(Work& w, int64_t layer, int64_t row) {  // of a row
    return w.rows.key_scales ? reinterpret_cast<const float*>(w.rows.key_scales[layer])[row] : 1.0f;
}

// Latents, and the gates of what is attended, if there are any: to `kept` and `gates`.
inline void project_latents(Work& w, int64_t layer) {
    const LayerParts& own = w.model.parts[layer];
    const int64_t rows = own.gates.rows;
    const bool is_shared = rows && shares_input(own.kv_a, own.gates);
    product(w, own.kv_a, nullptr, [&](int64_t first, int64_t count, const float* sums) {
        const bool is_gate = first >= own.kv_a.rows;
        float* to = is_gate ? w.absorbed.gates + first - own.kv_a.rows : w.absorbed.kept + first;
        for (int64_t b = 0; b < w.step.batch; ++b)
            std::memcpy(to + b * (is_gate ? rows : own.kv_a.rows), sums + b * PANEL, count * 4);
    }, is_shared ? &own.gates : nullptr);
    if (!rows || is_shared) return;
    w.end_part();
    float* packed = w.engine.packed + 2 * rest_of_input(w, own.kv_a);  // behind what queries are made of
    w.share(w.step.batch, 1, [&](int64_t b) {
        const float* x = w.engine.residual + b * w.model.hidden;
        float made[PIECE];
        for (int64_t first = 0; first < w.model.hidden; first += PIECE) {
            const int64_t count = std::min(PIECE, w.model.hidden - first);
            for (int64_t i = 0; i < count; ++i) made[i] = x[first + i] * w.engine.factors[b] * own.input_norm[first + i];
            put_input(own.gates, packed, Place(w.tokens, b), made, first, count);
        }
    });
    w.end_part();
    project(w, own.gates, nullptr, w.absorbed.gates, packed);
}

inline void norm_narrow(Work& w, int64_t layer) {
    w.share(w.step.batch, 1, [&](int64_t b) {
        float* x = w.absorbed.narrow + b * w.latent.q_rank;
        const float* weight = w.latent.q_a_norm + place_of(w, layer) * w.latent.q_rank;
        const float factor = norm_factor(x, w.latent.q_rank, w.latent.eps);
        for (int64_t i = 0; i < w.latent.q_rank; ++i) x[i] = x[i] * factor * weight[i];
        put_input(w.model.parts[layer].q, w.engine.packed, Place(w.tokens, b), x, 0, w.latent.q_rank);
    });
}

inline void absorb_block(Work& w, int64_t layer, int64_t head, int64_t block) {
    const int64_t first = block * ABSORBED_COLUMNS, columns = std::min(ABSORBED_COLUMNS, w.latent.rank - first);
    const int64_t stride = w.model.heads * latent_size(w);
    const float* up = up_of(w, layer, head) + first;
    for (int64_t b = 0; b < w.step.batch; b += MOST_DOTS) {
        const int64_t tokens = std::min<int64_t>(MOST_DOTS, w.step.batch - b);
        float* out = w.absorbed.queries + b * stride + head * latent_size(w);
        for (int64_t t = 0; t < tokens; ++t) {
            const float* q = w.absorbed.wide + (b + t) * w.model.parts[layer].q.rows + head * query_size(w);
            const float factor = w.latent.factor * query_scale(w, layer, b + t);
            for (int64_t i = 0; i < w.latent.nope_dim; ++i) w.scratch[t * w.latent.nope_dim + i] = q[i] * factor;
            if (block) continue;
            float* turned = out + t * stride + w.latent.rank;
            rotate_halves(w, layer, q + w.latent.nope_dim, b + t, turned);
            for (int64_t i = 0; i < w.latent.rope_dim; ++i) turned[i] *= factor;
        }
        mix_rows(tokens, w.scratch, w.latent.nope_dim, up, w.latent.rank, w.latent.nope_dim, columns, out + first,
                 stride, false);
    }
}

inline void store_latent(Work& w, int64_t layer, int64_t b) {
    const float *kept = w.absorbed.kept + b * latent_size(w), *weight = w.latent.c_norm + place_of(w, layer) * w.latent.rank;
    const float factor = norm_factor(kept, w.latent.rank, w.latent.eps);
    const RowForm form{w.rows.key_format};
    for (int64_t i = 0; i < w.latent.rank; ++i) w.scratch[i] = kept[i] * factor * weight[i];
    rotate_halves(w, layer, kept + w.latent.rank, b, w.scratch + w.latent.rank);
    const int64_t row = w.step.rows[b];
    form.put(w.scratch, latent_size(w), scale_of(w, layer, row),
             row_of(w, layer, row) + form.bytes(slot(w, b) * latent_size(w)));
}

// Queries to the space of the latents, and the new latents to their slots.
inline void absorb(Work& w, int64_t layer) {
    const int64_t blocks = (w.latent.rank + ABSORBED_COLUMNS - 1) / ABSORBED_COLUMNS;
    w.share(w.model.heads * blocks + w.step.batch, 1, [&](int64_t task) {
        if (task < w.model.heads * blocks) absorb_block(w, layer, task / blocks, task % blocks);
        else store_latent(w, layer, task - w.model.heads * blocks);
    });
}

// Scores [stride] of n slots become their weights; peak and total go on; mixed [E] is scaled to the new peak.
inline void weigh(float* scores, int64_t n, int64_t head_dim, float& peak, float& total, float* mixed) {
    const int64_t filled = (n + W - 1) / W * W;
    for (int64_t j = n; j < filled; ++j) scores[j] = -std::numeric_limits<float>::infinity();
    vec most = load(scores);
    for (int64_t j = W; j < filled; j += W) {
        const vec own = load(scores + j);
        most = own > most ? own : most;
    }
    const float highest = max_of(most);
    if (highest > peak) {
        const float share = exponential(all(peak - highest))[0];
        total *= share;
        for (int64_t e = 0; e < head_dim; ++e) mixed[e] *= share;
        peak = highest;
    }
    vec sum = {};
    for (int64_t j = 0; j < filled; j += W) {
        const vec own = exponential(load(scores + j) - peak);
        store(scores + j, own);
        sum += own;
    }
    total += sum_of(sum);
}

inline void attend_tile(Work& w, int64_t layer, int64_t b, int64_t first_head, int64_t count, int64_t part) {
    const RowTable& rows = w.rows;
    const RowForm form{rows.key_format};
    const int64_t row = w.step.rows[b], begin = part * PART, end = std::min(begin + PART, length(w, b));
    const float* queries = w.absorbed.queries + (b * w.model.heads + first_head) * latent_size(w);
    if (rows.queries && part == 0) {
        const int64_t kept = rows.num_tokens[row] % rows.kept_queries;
        const int64_t place = (layer * rows.num_rows + row) * rows.kept_queries + kept;
        std::memcpy(rows.queries + (place * w.model.heads + first_head) * latent_size(w), queries,
                    count * latent_size(w) * 4);
    }
    const auto place = [&](int64_t head, int64_t i) { return (b * w.model.heads + first_head
                                                              + head) * w.engine.max_parts + i; };
    const char* latents = row_of(w, layer, row);
    float *wide = w.scratch, *scores = w.scratch + LATENTS_AT_ONCE * latent_size(w);
    const float scale = scale_of(w, layer, row), factor = scale / std::sqrt(static_cast<float>(latent_size(w)));
    for (int64_t head = 0; head < count; ++head) {
        w.engine.part_peaks[place(head, part)] = -std::numeric_limits<float>::infinity();
        w.engine.part_totals[place(head, part)] = 0.0f;
        float* mixed = w.engine.part_mixed + place(head, part) * w.latent.rank;
        std::fill(mixed, mixed + w.latent.rank, 0.0f);
    }
    for (int64_t at = begin; at < end; at += LATENTS_AT_ONCE) {
        const int64_t n = std::min(LATENTS_AT_ONCE, end - at);
        const float* own = form.widened(latents + form.bytes(at * latent_size(w)), n * latent_size(w), wide);
        for (int64_t head = 0; head < count; head += MOST_DOTS) {
            const int64_t heads = std::min<int64_t>(MOST_DOTS, count - head);
            dots(heads, queries + head * latent_size(w), latent_size(w), own, n, latent_size(w), scores,
                 LATENTS_AT_ONCE);
            for (int64_t h = 0; h < heads; ++h) {
                float* line = scores + h * LATENTS_AT_ONCE;
                const int64_t to = place(head + h, part);
                for (int64_t j = 0; j < n; ++j) line[j] *= factor;
                weigh(line, n, w.latent.rank, w.engine.part_peaks[to], w.engine.part_totals[to],
                      w.engine.part_mixed + to * w.latent.rank);
            }
            float* mixed = w.engine.part_mixed + place(head, part) * w.latent.rank;
            mix_rows(heads, scores, LATENTS_AT_ONCE, own, latent_size(w), n, w.latent.rank, mixed,
                     w.engine.max_parts * w.latent.rank, true);
        }
    }
    const int64_t parts = num_parts(w, b);
    std::atomic<int>& done = w.absorbed.parts_left[b * w.model.heads + first_head];
    if (parts > 1 && done.fetch_add(1, std::memory_order_acq_rel) + 1 < parts) return;
    done.store(0, std::memory_order_relaxed);
    for (int64_t head = 0; head < count; ++head) {
        const int64_t from = place(head, 0);
        const Part found{w.engine.part_peaks + from, w.engine.part_totals + from,
                         w.engine.part_mixed + from * w.latent.rank};
        const float* sinks = w.model.sinks;
        if (sinks) sinks += place_of(w, layer) * w.model.heads + first_head + head;
        merge_parts(found, parts, 1, w.latent.rank, scale, sinks,
                    w.absorbed.mixed + (b * w.model.heads + first_head + head) * w.latent.rank);
    }
}

inline void attend_latents(Work& w, int64_t layer) {
    int64_t most = 1;
    for (int64_t b = 0; b < w.step.batch; ++b) most = std::max(most, num_parts(w, b));
    const int64_t wanted = (2 * w.pool.size() + w.step.batch * most - 1) / (w.step.batch * most);  // tiles of a row
    const int64_t tile = std::max<int64_t>((w.model.heads + wanted - 1) / wanted, MOST_DOTS);
    const int64_t tiles = (w.model.heads + tile - 1) / tile;
    w.share(w.step.batch * tiles * most, 1, [&](int64_t task) {
        const int64_t part = task % most, b = task / most / tiles, first = task / most % tiles * tile;
        if (part < num_parts(w, b)) attend_tile(w, layer, b, first, std::min(tile, w.model.heads - first), part);
    });
}

// Expands the mixed latents to the values of each head: packed [B, H U]. Groups of codes may span them.
inline void expand_values(Work& w, int64_t layer) {
    const Stack& next = w.model.parts[layer].o;
    const int64_t blocks = (w.latent.value_dim + W - 1) / W, cols = w.model.heads * w.latent.value_dim;
    const int64_t of_head = w.model.gate_dim;
    w.share(w.model.heads * blocks, 1, [&](int64_t task) {
        const int64_t head = task / blocks, first = task % blocks * W;
        const int64_t count = std::min<int64_t>(W, w.latent.value_dim - first);
        const float* up = up_of(w, layer, head) + (w.latent.nope_dim + first) * w.latent.rank;
        for (int64_t b = 0; b < w.step.batch; b += MOST_DOTS) {
            const int64_t tokens = std::min<int64_t>(MOST_DOTS, w.step.batch - b);
            const float* mixed = w.absorbed.mixed + (b * w.model.heads + head) * w.latent.rank;
            dots(tokens, mixed, w.model.heads * w.latent.rank, up, count, w.latent.rank, w.scratch, W);
            for (int64_t t = 0; t < tokens; ++t) {
                Packed to(w.engine.packed, w.tokens, b + t, cols);
                if (takes_codes(next)) to.to = w.engine.attended + (b + t) * cols, to.stride = 1;
                const float* gates = w.absorbed.gates + ((b + t) * w.model.heads + head) * of_head;
                for (int64_t i = 0; i < count; ++i) {
                    float value = w.scratch[t * W + i];
                    if (of_head) value /= 1.0f + std::exp(-gates[of_head == 1 ? 0 : first + i]);
                    to.put(head * w.latent.value_dim + first + i, value);
                }
                if (task == w.model.heads * blocks - 1 && !takes_codes(next)) to.end(cols);
            }
        }
    });
    if (!takes_codes(next)) return;
    w.end_part();
    make_input(w, next, [&](int64_t b, int64_t first, int64_t count, float* out) {
        std::copy_n(w.engine.attended + b * cols + first, count, out);
    });
}

// Scratch of a thread, in floats.
inline int64_t latent_scratch(const Model& model) {
    const Latent& l = model.latent;
    const int64_t attend = LATENTS_AT_ONCE * (l.rank + l.rope_dim + MOST_DOTS);
    return l.rank ? std::max({attend, MOST_DOTS * l.nope_dim, int64_t{MOST_DOTS * W}}) : 0;
}

}  // namespace looped
