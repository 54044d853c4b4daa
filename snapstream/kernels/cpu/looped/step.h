// What all stages of a decode step share: one thread's work on a step, products with matrices in panels, and what packs
// their inputs.
#pragma once
#include "dots.h"
#include "engine.h"
#include "products.h"

namespace looped {

// One thread's work on a step: what every stage function takes.
struct Work {
    Work(Engine& engine, const Step& step, int thread)
        : engine(engine), model(engine.model), rows(engine.rows), moe(model.mixture), latent(model.latent),
          routed(engine.routed), absorbed(engine.absorbed), pool(engine.pool), ranks(engine.ranks), step(step),
          thread(thread), tokens(step.batch), scratch(engine.scratch[thread]) {
        for (int64_t b = 0; rows.adapters && b < step.batch; ++b) adapts |= rows.adapters[step.rows[b]] != 0;
    }

    // Runs tasks of the stage until none is left.
    template <class Task>
    void share(int64_t count, int64_t grain, Task task) {
        int64_t begin, end;
        while (engine.tasks.take(turn, thread, count, grain, begin, end))
            for (int64_t i = begin; i < end; ++i) task(i);
    }

    void clear_next() { engine.tasks.clear_next(turn, thread); }

    // A barrier within a stage: all threads have finished the part before it.
    void end_part() {
        clear_next();
        pool.barrier();
        ++turn;
    }

    Engine& engine;
    const Model& model;
    const RowTable& rows;
    const Mixture& moe;
    const Latent& latent;
    MixtureBuffers& routed;
    const LatentBuffers& absorbed;
    ThreadPool& pool;
    RankGroup& ranks;
    const Step& step;
    const int thread;
    const Groups tokens;   // of the batch
    float* const scratch;  // of this thread
    int64_t turn = 0;      // of the tasks
    bool adapts = false;   // whether a token has an adapter
};

// Tokens of its row that are fed before it in this step.
inline int64_t ahead_of(const Work& w, int64_t b) { return w.step.ahead ? w.step.ahead[b] : 0; }

inline int64_t position_of(const Work& w, int64_t b) { return w.rows.num_tokens[w.step.rows[b]] + ahead_of(w, b); }

// What the query of an entry is multiplied by for its position (reference: rope in ../../../models/decoder.py).
inline float query_scale(const Work& w, int64_t layer, int64_t b) {
    const int64_t *rotated = w.model.rotated_layers, from = w.model.scaled_from, ahead = w.model.scales_unrotated;
    if (!from || (ahead && (!rotated || rotated[layer]))) return 1.0f;
    return 1.0f + w.model.query_beta * std::log1p(static_cast<float>((position_of(w, b) + ahead) / from));
}

// Adds the norm of own [D], times `share`, to x.
inline void add_norm(const Work& w, const float* own, const float* norm, float* x, float share = 1.0f) {
    const float factor = share * norm_factor(own, w.model.hidden, w.model.out_eps);
    for (int64_t i = 0; i < w.model.hidden; ++i) x[i] += own[i] * factor * norm[i];
}

// The ranks' partial sums of token b, added to `from` unless that is null: out [D], which may be `from`.
inline void sum_parts(Work& w, Turn turn, int64_t b, const float* from, float* out) {
    const RankGroup& ranks = w.ranks;
    const int64_t size = w.model.hidden, first = b * size;
    const auto add = [&](int64_t begin, int64_t count) {
        vec sum = load_some(ranks.part(turn, 0) + first + begin, count);
        for (int64_t rank = 1; rank < ranks.size; ++rank)
            sum += load_some(ranks.part(turn, rank) + first + begin, count);
        return from ? load_some(from + begin, count) + sum : sum;
    };
    for_columns(size, [&](int64_t at, int64_t some) { store_some(out + at, add(at, some), some); });
}

// Adds the ranks' partial sums of token b to the residual stream, before it is read. With the weight of an output norm
// their norm is added; one rank's output then lies in `outputs`.
inline void settle(Work& w, Turn turn, int64_t b, const float* out_norm = nullptr) {
    if (w.ranks.is_alone() && !out_norm) return;
    const int64_t size = w.model.hidden, first = b * size;
    float *x = w.engine.residual + first, *own = out_norm ? w.engine.outputs + first : x;
    if (!w.ranks.is_alone()) sum_parts(w, turn, b, out_norm ? nullptr : x, own);
    if (out_norm) add_norm(w, own, out_norm, x, w.model.residual_multiplier);
}

// Where the ranks' sums of a part of a layer go. Layers of one part take both places in turn: a rank may still read the
// sums of the layer before.
inline Turn turn_of(const Work& w, int64_t layer, Turn part) {
    return !w.model.is_single ? part : layer % 2 ? AFTER_MLP : AFTER_ATTENTION;
}

// The same of what was added last before a layer.
inline Turn turn_before(const Work& w, int64_t layer) { return layer ? turn_of(w, layer - 1, AFTER_MLP) : AFTER_MLP; }

// The same before its MLP.
inline Turn turn_before_mlp(const Work& w, int64_t layer) {
    return w.model.is_single ? turn_before(w, layer) : AFTER_ATTENTION;
}

// This rank's partial sum, [B, D].
inline float* own_part(Work& w, Turn turn) { return w.ranks.part(turn, w.ranks.rank); }

// Whether two matrices, as `qkv` and `qkv_rest`, read the same packed input.
inline bool shares_input(const Stack& one, const Stack& rest) {
    return one.inputs == rest.inputs && (!takes_codes(one) || (one.format == rest.format && one.group == rest.group));
}

// Where otherwise that of the rest begins.
inline int64_t rest_of_input(const Work& w, const Stack& matrix) { return w.step.batch * padded(matrix.cols); }

inline const Stack* rest_of(const LayerParts& parts) { return parts.qkv_rest.rows ? &parts.qkv_rest : nullptr; }
inline int64_t head_numbers(const LayerParts& parts) { return parts.qkv.rows + parts.qkv_rest.rows; }

// -- LoRA adapters (reference: ../../../models/lora.py)
//
// Where the input of a product is made, each piece of its columns is multiplied with those of `down`. Threads that compute
// the product sum the pieces, in their order, and add rows of `up`, so it takes no further barrier.

constexpr int64_t ADAPTED = 4;  // products of a layer, as in Model::low_rank
inline bool activates_at_once(Work& w, int64_t layer);

inline const LowRank* low_rank_of(const Work& w, const Stack& matrix, int64_t b) {  // null: nothing is added
    const int64_t adapter = w.rows.adapters[w.step.rows[b]];
    if (!adapter) return nullptr;
    const LowRank* own = w.model.low_rank + (adapter - 1) * w.model.layers * ADAPTED + matrix.adapted - 1;
    return own->down.rows ? own : nullptr;
}

// Pieces in which the input of a product is made.
inline int64_t pieces_of(Work& w, const Stack& matrix) {
    const int64_t layer = (matrix.adapted - 1) / ADAPTED, kind = (matrix.adapted - 1) % ADAPTED;
    if (kind == 1) return w.model.parts[layer].kv_heads;
    return kind == 3 && activates_at_once(w, layer) ? matrix.cols / PANEL : (matrix.cols + PIECE - 1) / PIECE;
}

inline float* low_parts_of(Work& w, const Stack& matrix, int64_t b) {
    float* parts = matrix.adapted % ADAPTED ? w.engine.low_parts : w.engine.low_parts_down;
    return parts + b * pieces_of(w, matrix) * w.model.most_rank;
}

// x [count]: columns `first` and further of the input of token b, a piece of it.
inline void lower(Work& w, const Stack& matrix, int64_t b, int64_t piece, const float* x, int64_t first, int64_t count) {
    if (!w.adapts || !matrix.adapted) return;
    const LowRank* own = low_rank_of(w, matrix, b);
    if (!own) return;
    float* out = low_parts_of(w, matrix, b) + piece * w.model.most_rank;
    for (int64_t panel = 0; panel < panels_of(own->down); ++panel) {
        const char* data = own->down.data + panel * own->down.panel_bytes;
        const float* numbers = reinterpret_cast<const float*>(data) + first * PANEL;
        vec sums[VECS] = {};
        for (int64_t i = 0; i < count; ++i)
            for (int v = 0; v < VECS; ++v) sums[v] += x[i] * load(numbers + i * PANEL + v * W);
        for (int v = 0; v < VECS; ++v) store(out + panel * PANEL + v * W, sums[v]);
    }
}

// Before `add_low`.
inline void sum_low(Work& w, const Stack& matrix) {
    if (!w.adapts || !matrix.adapted) return;
    const int64_t pieces = pieces_of(w, matrix), rank = w.model.most_rank;
    for (int64_t b = 0; b < w.step.batch; ++b) {
        const LowRank* own = low_rank_of(w, matrix, b);
        const float* parts = own ? low_parts_of(w, matrix, b) : nullptr;
        for (int64_t r = 0; own && r < panels_of(own->down) * PANEL; r += W) {
            vec sum = load(parts + r);
            for (int64_t piece = 1; piece < pieces; ++piece) sum += load(parts + piece * rank + r);
            store(w.engine.low_sums[w.thread] + b * rank + r, sum);
        }
    }
}

// To sums [B][32]: rows from `first` on.
inline void add_low(Work& w, const Stack& matrix, int64_t first, int64_t rows, float* sums) {
    if (!w.adapts || !matrix.adapted) return;
    for (int64_t b = 0; b < w.step.batch; ++b, sums += PANEL) {
        const LowRank* own = low_rank_of(w, matrix, b);
        const float* low = w.engine.low_sums[w.thread] + b * w.model.most_rank;
        for (int64_t i = 0; own && i < own->count; low += own->ups[i].cols, ++i) {
            const Stack& up = own->ups[i];
            const int64_t end = std::min(first + rows - own->firsts[i], up.rows);
            for (int64_t row = std::max<int64_t>(first - own->firsts[i], 0), next; row < end; row = next) {
                next = std::min((row / PANEL + 1) * PANEL, end);
                const float* numbers = reinterpret_cast<const float*>(up.data + row / PANEL * up.panel_bytes);
                vec made[VECS] = {};
                for (int64_t k = 0; k < up.cols; ++k)
                    for (int v = 0; v < VECS; ++v) made[v] += low[k] * load(numbers + k * PANEL + v * W);
                float all_made[PANEL];
                for (int v = 0; v < VECS; ++v) store(all_made + v * W, made[v]);
                for (; row < next; ++row) sums[own->firsts[i] + row - first] += all_made[row % PANEL];
            }
        }
    }
}

template <class Emit>  // emit(first row, rows, sums [B][32]); rest: rows after those of the stack, or null
void product(Work& w, const Stack& stack, const float* packed, Emit emit, const Stack* rest = nullptr) {
    const int64_t at_once = w.step.batch <= PAIR_TOKENS ? 2 : 1, tasks = (panels_of(stack) + at_once - 1) / at_once;
    const int64_t grain = std::max<int64_t>(1, (1 << 15) / (at_once * stack.panel_bytes));
    const auto multiply = [&](const Stack& own, int64_t task, const float* input, int64_t before) {
        const int64_t panel = task * at_once, count = std::min(at_once, panels_of(own) - panel);
        const Products products = products_with(own);
        (count == 2 ? products.of_two : products.of_one)(
            own, own.data + panel * own.panel_bytes, input, w.tokens, w.scratch);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t first = (panel + i) * PANEL, rows = std::min<int64_t>(PANEL, own.rows - first);
            add_low(w, stack, before + first, rows, w.scratch + i * w.step.batch * PANEL);
            emit(before + first, rows, w.scratch + i * w.step.batch * PANEL);
        }
    };
    const float* input = packed ? packed : w.engine.packed;
    sum_low(w, stack);
    w.share(tasks + (rest ? (panels_of(*rest) + at_once - 1) / at_once : 0), grain, [&](int64_t task) {
        if (task < tasks) return multiply(stack, task, input, 0);
        multiply(*rest, task - tasks, shares_input(stack, *rest) ? input : input + rest_of_input(w, stack), stack.rows);
    });
}

// To out [B, rows], times `multiplier`, or each row times its own of `scales`; packed: the input, null for what the
// previous stage packed.
inline void project(Work& w, const Stack& stack, const float* bias, float* out,
                    const float* packed = nullptr, float multiplier = 1.0f, const float* scales = nullptr) {
    product(w, stack, packed, [&](int64_t first, int64_t count, const float* sums) {
        for (int64_t b = 0; b < w.step.batch; ++b)
            for (int64_t i = 0; i < count; ++i)
                out[b * stack.rows + first + i] =
                    (sums[b * PANEL + i] + (bias ? bias[first + i] : 0.0f)) * (scales ? scales[first + i] : multiplier);
    });
}

// Queries, keys and values of a layer: heads [B, qkv and its rest].
inline void project_heads(Work& w, const LayerParts& own) {
    const int64_t rows = head_numbers(own);
    product(w, own.qkv, nullptr, [&](int64_t first, int64_t count, const float* sums) {
        for (int64_t b = 0; b < w.step.batch; ++b)
            for (int64_t i = 0; i < count; ++i)
                w.engine.heads[b * rows + first + i] =
                    sums[b * PANEL + i] + (own.qkv_bias ? own.qkv_bias[first + i] : 0.0f);
    }, rest_of(own));
}

// Times `share` to the residual stream, or to where `settle` takes it from, which norms it with `out_norm` unless that is
// null.
inline void add_product(Work& w, const Stack& stack, const float* bias, const float* out_norm, Turn turn,
                        float share = 1.0f, const float* packed = nullptr) {
    const float multiplier = out_norm ? 1.0f : w.model.residual_multiplier * share;
    if (!w.ranks.is_alone()) return project(w, stack, bias, own_part(w, turn), packed, multiplier);
    if (out_norm || w.model.hyper.streams) return project(w, stack, bias, w.engine.outputs, packed);
    if (w.model.is_parallel && turn == AFTER_ATTENTION)
        return project(w, stack, bias, w.engine.outputs, packed, multiplier);
    product(w, stack, packed, [&](int64_t first, int64_t count, const float* sums) {
        for (int64_t b = 0; b < w.step.batch; ++b)
            for (int64_t i = 0; i < count; ++i)
                w.engine.residual[b * stack.rows + first + i] +=
                    (sums[b * PANEL + i] + (bias ? bias[first + i] : 0.0f)) * multiplier;
    });
}

// -- inputs of products

// The input of a product is made piece by piece of its columns, each for all tokens: they lie side by side there, so
// that threads with tokens of their own would write to the same cache lines.

template <class Make>  // make(token, first column, columns, out)
void make_input(Work& w, const Stack& matrix, Make make, const Stack* rest = nullptr) {
    w.share((matrix.cols + PIECE - 1) / PIECE, 1, [&](int64_t piece) {
        const int64_t first = piece * PIECE, count = std::min(PIECE, matrix.cols - first);
        float made[PIECE];
        Place place(w.tokens, 0);
        for (int64_t b = 0; b < w.step.batch; ++b, place.next()) {
            make(b, first, count, made);
            lower(w, matrix, b, piece, made, first, count);
            put_input(matrix, w.engine.packed, place, made, first, count);
            if (rest && !shares_input(matrix, *rest))
                put_input(*rest, w.engine.packed + rest_of_input(w, matrix), place, made, first, count);
        }
    });
}

// Packs what one of `heads` made of the input of a product, its share of the columns. Quantization groups may span
// heads, and bf16 goes in pairs: there the last head to finish packs all.
inline void pack_heads(Work& w, const Stack& next, int64_t b, int64_t head, int64_t heads, const float* found) {
    const int64_t count = next.cols / heads, first = head * count;
    lower(w, next, b, head, found, first, count);
    if (!takes_codes(next) && count % 2 == 0)
        return put_input(next, w.engine.packed, Place(w.tokens, b), found, first, count);
    float* row = w.engine.attended + b * next.cols;
    std::memcpy(row + first, found, count * 4);
    if (w.engine.heads_done[b].fetch_add(1, std::memory_order_acq_rel) + 1 < heads) return;
    w.engine.heads_done[b].store(0, std::memory_order_relaxed);
    put_input(next, w.engine.packed, Place(w.tokens, b), row, 0, next.cols);
}

// Makes the residual stream of token b what a block reads. A parallel MLP reads what attention did; behind it the outputs
// of both are added. That of attention waits in `outputs`: other ranks overwrite their parts in the next layer.
inline void settle_stream(Work& w, Turn added, int64_t b, const float* out_norm, float scalar) {
    if (w.model.hyper.streams) return;  // read_streams has made it
    float* x = w.engine.residual + b * w.model.hidden;
    if (w.model.is_parallel) {
        float* attended = w.engine.outputs + b * w.model.hidden;
        if (added == AFTER_ATTENTION) {
            if (!w.ranks.is_alone()) sum_parts(w, added, b, nullptr, attended);
            return;
        }
        for (int64_t i = 0; i < w.model.hidden; ++i) x[i] += attended[i];
    }
    settle(w, added, b, out_norm);
    for (int64_t i = 0; scalar != 1.0f && i < w.model.hidden; ++i) x[i] *= scalar;
    if (!w.model.is_centered) return;
    const float mean = mean_of(x, w.model.hidden);
    for (int64_t i = 0; i < w.model.hidden; ++i) x[i] -= mean;
}

// The input of a product: the norm of the residual stream, whose factors are known.
inline void pack_normed(Work& w, const float* weight, const Stack& next, const Stack* rest = nullptr) {
    make_input(w, next, [&](int64_t b, int64_t first, int64_t count, float* out) {
        const float *x = w.engine.residual + b * w.model.hidden, factor = w.engine.factors[b];
        if (!weight) return void(std::copy(x + first, x + first + count, out));
        for (int64_t i = 0; i < count; ++i) out[i] = x[first + i] * factor * weight[first + i];
    }, rest);
}

// weight: null where the residual stream itself is read; settle(b) makes it what is read.
template <class Settle>
void norm_settled(Work& w, const float* weight, const Stack& next, Settle settle, const Stack* rest = nullptr) {
    w.share(w.step.batch, 1, [&](int64_t b) {
        settle(b);
        w.engine.factors[b] = norm_factor(w.engine.residual + b * w.model.hidden, w.model.hidden, w.model.eps);
    });
    w.end_part();
    pack_normed(w, weight, next, rest);
}

// out_norm: of what was added last, or null; scalar: of the sum.
inline void norm_input(Work& w, const float* weight, const Stack& next, Turn added, const float* out_norm = nullptr,
                       float scalar = 1.0f, const Stack* rest = nullptr) {
    norm_settled(w, weight, next, [&](int64_t b) { settle_stream(w, added, b, out_norm, scalar); }, rest);
}

// -- the MLP of dense layers

// Whether gate and up are made panel by panel together with their activation, as the next product takes it.
inline bool activates_at_once(Work& w, int64_t layer) {
    const LayerParts& own = w.model.parts[layer];
    return std::isinf(own.deviations) && own.inner % PANEL == 0 && (!takes_codes(own.down) || PANEL % own.down.group == 0);
}

// Panels of gate and of up, `groups.apart` from it, times the tokens: to scratch, [2][tokens][32].
inline void gate_and_up(Work& w, const Stack& stack, const char* gate, const float* x, const Groups& groups) {
    const Products products = products_with(stack);
    if (groups.tokens <= PAIR_TOKENS) return products.of_two(stack, gate, x, groups, w.scratch);
    products.of_one(stack, gate, x, Groups(groups.tokens, gate + groups.apart), w.scratch);
    products.of_one(stack, gate + groups.apart, x, groups, w.scratch + groups.tokens * PANEL);
}

// The activation of sums [gate, up][tokens][32], or of up alone, times the share of a token where there are shares, as
// routed experts have them: 32 columns of the input of `down` from `first` on. bias: of gate [inner], then of up, or
// null.
inline void activate_panel(Work& w, const Gated& gated, const Stack& down, const float* bias, const float* sums,
                           int64_t first, int64_t tokens, const float* shares, float* packed) {
    Place place(Groups(tokens), 0);
    float gate_bias[PANEL] = {}, up_bias[PANEL] = {}, active[PANEL];
    if (bias) {
        std::copy(bias + first, bias + first + PANEL, gate_bias);
        const int64_t up = first + (has_gate(w.model) ? down.cols : 0);
        std::copy(bias + up, bias + up + PANEL, up_bias);
    }
    const int64_t apart = has_gate(w.model) ? tokens * PANEL : 0;
    for (int64_t t = 0; t < tokens; ++t, place.next()) {
        const float *gates = sums + t * PANEL, *ups = gates + apart;
        const vec share = all(shares ? shares[t] : 1.0f);
        for (int v = 0; v < PANEL; v += W)
            store(active + v, gated(load(gates + v) + load(gate_bias + v), load(ups + v) + load(up_bias + v), share));
        lower(w, down, t, first / PANEL, active, first, PANEL);
        put_input(down, packed, place, active, first, PANEL);
    }
}

inline void expand_tokens(Work& w, int64_t layer) {
    const LayerParts& own = w.model.parts[layer];
    const Gated gated{w.model.activation, own.numbers};
    const Stack& stack = own.gate_up;
    if (!activates_at_once(w, layer)) return project(w, stack, own.gate_up_bias, w.engine.gate_up);
    if (!has_gate(w.model))
        return product(w, stack, nullptr, [&](int64_t first, int64_t, const float* sums) {
            activate_panel(w, gated, own.down, own.gate_up_bias, sums, first, w.step.batch, nullptr, w.engine.gate_up);
        });
    const char* data = stack.data;
    const int64_t grain = std::max<int64_t>(1, (1 << 15) / (2 * stack.panel_bytes));
    sum_low(w, stack);
    w.share(own.inner / PANEL, grain, [&](int64_t i) {
        const char* gate = data + i * stack.panel_bytes;
        const Groups groups(w.step.batch, gate + stack.panel_bytes, own.inner / PANEL * stack.panel_bytes);
        gate_and_up(w, stack, gate, w.engine.packed, groups);
        add_low(w, stack, i * PANEL, PANEL, w.scratch);
        add_low(w, stack, own.inner + i * PANEL, PANEL, w.scratch + w.step.batch * PANEL);
        activate_panel(w, gated, own.down, own.gate_up_bias, w.scratch, i * PANEL, w.step.batch, nullptr,
                       w.engine.gate_up);
    });
}

inline void activate_mlp(Work& w, int64_t layer) {  // where that is a stage of its own
    const LayerParts& own = w.model.parts[layer];
    const Gated gated{w.model.activation, own.numbers};
    const int64_t rows = own.gate_up.rows;
    if (!std::isinf(own.deviations)) {  // reference: SparseGLU in ../../../models/layers.py
        w.share(w.step.batch, 1, [&](int64_t b) {
            float *gates = w.engine.gate_up + b * rows, mean = mean_of(gates, own.inner);
            for (int64_t i = 0; i < own.inner; ++i) gates[i] -= mean;
            const float cutoff = own.deviations * std::sqrt(dot(gates, gates, own.inner) / own.inner);
            for (int64_t i = 0; i < own.inner; ++i) gates[i] = gates[i] < cutoff ? 0.0f : gates[i] - cutoff;
        });
        w.end_part();
    }
    make_input(w, own.down, [&](int64_t b, int64_t first, int64_t count, float* out) {
        const float *gate = w.engine.gate_up + b * rows + first, *up = gate + rows - own.inner;
        for (int64_t i = 0; i < count; i += W) {
            const int64_t some = std::min<int64_t>(W, count - i);
            store(out + i, gated(load_some(gate + i, some), load_some(up + i, some)));
        }
    });
}

}  // namespace looped
