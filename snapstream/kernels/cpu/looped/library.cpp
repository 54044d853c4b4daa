// An engine: its buffers, and how Python makes it and ends it.
#include "recurrent.h"

namespace looped {

namespace {

int64_t widest_input(const Model& model) {  // of a product that all tokens of a step go through
    const Latent& latent = model.latent;
    return std::max({model.hidden, model.inner, model.heads * model.head_dim, model.heads * latent.value_dim,
                     latent.q_rank, model.recurrent.mixed});
}

// Columns of a product's input that are kept until all heads have made theirs; 0: a head's are packed at once.
int64_t whole_input(const Stack& matrix, int64_t heads) {
    return heads && (takes_codes(matrix) || matrix.cols / heads % 2) ? matrix.cols : 0;
}

}  // namespace

StepBuffers::StepBuffers(const Model& model, const RowTable& rows, int64_t batch, int threads, Cut& cut) {
    const int64_t parts = batch * model.heads * parts_of(rows), own = scratch_floats(model, batch);
    residual = cut(batch * model.hidden);
    const bool both = model.mixers[0] == BOTH;  // as all layers are
    int64_t projected = both ? 0 : model.recurrent.projected, whole = 0;
    int64_t expanded = 2 * model.per_layer_dim, widest = widest_input(model);
    if (model.streams) widest = std::max(widest, model.parts[0].laurel_out.cols);
    for (int64_t layer = 0; layer < model.layers; ++layer) {
        const LayerParts& parts = model.parts[layer];
        projected = std::max(projected, head_numbers(parts));
        const int64_t inputs = parts.gates.rows ? 3 : parts.qkv_rest.rows || model.latent.rank ? 2 : 0;
        widest = std::max(widest, inputs * padded(model.hidden));
        expanded = std::max(expanded, parts.gate_up.rows);
        whole = std::max({whole, whole_input(parts.o, parts.kv_heads),
                          whole_input(parts.recurrent_out, model.recurrent.key_heads)});
    }
    heads = cut(batch * projected);
    mixed = both ? cut(batch * model.recurrent.projected) : heads;
    gate_up = cut(batch * expanded);
    packed = cut(batch * padded(widest));
    angles = cut((model.window_frequencies ? 2 : 1) * batch * model.head_dim);
    part_peaks = cut(parts);
    part_totals = cut(parts);
    part_mixed = cut(parts * model.head_dim);
    attended = cut(batch * whole);
    const auto has_out_norm = [](const LayerParts& own) { return own.mlp_out_norm != nullptr; };
    const bool has_outputs = model.is_parallel || model.hyper.streams || std::any_of(model.parts, model.parts + model.layers, has_out_norm);
    outputs = cut(has_outputs ? batch * model.hidden : 0);
    embedded = cut(model.per_layer_dim ? batch * padded(model.hidden) : 0);
    beside = cut(is_beside_mlp(model) || model.streams ? batch * model.hidden : 0);
    low = cut(model.streams ? batch * model.parts[0].laurel_in.rows : 0);
    first_stream = cut(model.streams ? batch * model.hidden : 0);
    const int64_t count = model.hyper.streams;
    streams = cut(batch * (model.streams ? model.streams - 1 : count) * model.hidden);
    seen = cut(batch * model.hyper.shares);
    shares = cut(batch * count * (1 + count));
    const Recurrent& recurrent = model.recurrent;
    int64_t recurring = 0;  // layers
    for (int64_t i = 0; recurrent.drafted && i < model.layers; ++i) recurring += recurs(model, i);
    drafts = cut(recurring * recurrent.drafted * draft_numbers(recurrent));
    int64_t inputs = (model.hidden + PIECE - 1) / PIECE, panels = 0;
    for (int64_t layer = 0; layer < model.layers; ++layer) {
        inputs = std::max(inputs, model.parts[layer].kv_heads);
        panels = std::max(panels, (model.parts[layer].inner + PANEL - 1) / PANEL);
    }
    low_parts = cut(batch * inputs * model.most_rank);
    low_parts_down = cut(batch * panels * model.most_rank);
    for (int i = 0; i < threads; ++i) low_sums.push_back(cut(batch * model.most_rank));
    for (int i = 0; i < threads; ++i) scratch.push_back(cut(own));
}

Engine::Engine(const Model& model, const RowTable& rows, const Ranks& ranks, ThreadPool& pool, int64_t max_batch,
               Cut workspace)
    : StepBuffers(model, rows, max_batch, pool.size(), workspace), model(model), rows(rows),
      ranks(ranks, model, max_batch), pool(pool), tasks(pool.size()), max_batch(max_batch), max_parts(parts_of(rows)),
      likeliest(pool.size() * max_batch), parts_left(new std::atomic<int>[max_batch * model.kv_heads]()),
      factors(max_batch), heads_done(new std::atomic<int>[max_batch]()),
      routed(model, max_batch, pool.size(), workspace), absorbed(model, max_batch, workspace) {}

int64_t Engine::workspace_floats(const Model& model, const RowTable& rows, int64_t max_batch, int threads) {
    Cut count{nullptr};
    StepBuffers(model, rows, max_batch, threads, count);
    MixtureBuffers(model, max_batch, threads, count);
    LatentBuffers(model, max_batch, count);
    return count.at;
}

// Bytes of the structs, in the order of abi.h.
EXPORT const int64_t* looped_struct_bytes() {
    static constexpr int64_t bytes[] = {
        sizeof(Stack), sizeof(LowRank), sizeof(Connection), sizeof(LayerParts), sizeof(Mixture), sizeof(Latent),
        sizeof(Recurrent), sizeof(Hyper), sizeof(Ranks), sizeof(Model), sizeof(RowTable), sizeof(Step),
        sizeof(Sampling), sizeof(Draw), sizeof(Prompt), sizeof(Passing), sizeof(Routed), sizeof(Heads),
        sizeof(Convolving), sizeof(DeltaRule)};
    return bytes;
}

EXPORT ThreadPool* looped_pool(int64_t threads) {  // null: the system gave no more threads
    try {
        return new ThreadPool(static_cast<int>(threads));
    } catch (...) {
        return nullptr;
    }
}
EXPORT void looped_end_pool(ThreadPool* pool) { delete pool; }

EXPORT int64_t looped_workspace(const Model& model, const RowTable& rows, const ThreadPool& pool, int64_t max_batch) {
    return Engine::workspace_floats(model, rows, max_batch, pool.size());
}
EXPORT int64_t looped_shared_bytes(const Model& model, int64_t ranks, int64_t max_batch) {
    return RankGroup::bytes(model, ranks, max_batch);
}
EXPORT Engine* looped_engine(const Model& model, const RowTable& rows, const Ranks& ranks, ThreadPool& pool,
                             int64_t max_batch, float* workspace) {
    return new Engine(model, rows, ranks, pool, max_batch, Cut{workspace});
}
EXPORT void looped_end_engine(Engine* engine) { delete engine; }
EXPORT int64_t looped_stages(const Model& model) { return num_stages(model); }

}  // namespace looped
