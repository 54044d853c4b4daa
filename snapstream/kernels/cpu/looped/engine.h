// What an engine of looped steps owns: its threads, the addresses of the model and the rows, and the buffers between
// stages. Each kind of buffers is cut from the engine's workspace by one function, which counts what is needed where
// there is no workspace yet.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "panels.h"
#include "threads.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace looped {

struct Cut {  // of a workspace, or with none the sum of what was asked for
    float* base;
    int64_t at = 0;
    float* operator()(int64_t count) {
        float* own = base ? base + at : nullptr;
        at += (count + 15) / 16 * 16;
#ifdef __SANITIZE_ADDRESS__  // the buffers share one allocation: only gaps show that one is overrun
        at += 64;
        if (own) ASAN_POISON_MEMORY_REGION(own + count, (base + at - own - count) * 4);
        if (own) std::fill(own, own + count, NAN);  // and that something is read before it is written
#endif
        return own;
    }
};

struct Span {  // the pairs of one chosen expert, counted among those that lie on this rank
    int64_t expert, begin, count;
};

inline bool has_gate(const Model& model) { return has_gate(model.activation); }

struct MixtureBuffers {  // of a batch of B; a pair is a token and one of its experts, sorted by expert
    // [B, D], rows filled up to ALIGN_K; the same packed; [B, X]; [B, k]; [B k, 2M]; packed by expert [B k, M]
    // [B, D], of experts beside an MLP: what the router reads
    // [B, Z], rows filled up as well: what experts between projections read, then the sum of what they gave
    float *normed, *packed, *scores, *shares, *gate_up, *inner, *routed_by, *latents;
    float *shared_gate_up, *shared_inner, *shared_share;  // [B, 2S]; packed [B, S]; [B]: of the shared gate
    std::vector<float*> own, sums;         // of each thread: packed tokens of an expert; what panels gave, by pair
    std::vector<int64_t> chosen, pair_of;  // [B, k]: experts; their pairs
    std::vector<int64_t> token, span_of;   // [B k], of each pair
    std::vector<float> share_of;           // [B k]
    std::vector<Span> spans;
    std::vector<int64_t> ends;  // [X + 1]
    int64_t num_spans = 0;
    std::atomic<int64_t> left{0};

    MixtureBuffers(const Model& model, int64_t batch, int threads, Cut& cut) {
        const Mixture& m = model.mixture;
        if (!m.experts) return;
        const int64_t wide = padded(model.hidden), pairs = batch * m.top_k, halves = 1 + has_gate(model);
        normed = cut(batch * wide);
        packed = cut(batch * wide);
        routed_by = cut(m.router_scale ? batch * wide : 0);
        latents = cut(batch * padded(m.latent));
        scores = cut(batch * (m.experts + W));
        shares = cut(pairs);
        gate_up = cut(pairs * halves * m.inner);
        inner = cut(pairs * padded(m.inner));
        shared_gate_up = cut(batch * halves * m.shared_inner);
        shared_inner = cut(batch * padded(m.shared_inner));
        shared_share = cut(m.shared_gate ? batch : 0);
        for (int i = 0; i < threads; ++i) own.push_back(cut(batch * wide));
        for (int i = 0; i < threads; ++i) sums.push_back(cut(2 * (pairs + batch) * PANEL));
        if (!cut.base) return;
        for (auto* numbers : {&chosen, &pair_of, &token, &span_of}) numbers->resize(pairs);
        share_of.resize(pairs);
        spans.resize(pairs);
        ends.resize(m.experts + 1);
    }
};

struct LatentBuffers {  // of a batch of B
    // [B, Q]; [B, H (N + P)]; of gates [B, H or H U]; [B, R + P]; absorbed [B, H, R + P]; [B, H, R]
    float *narrow, *wide, *gates, *kept, *queries, *mixed;
    std::unique_ptr<std::atomic<int>[]> parts_left;  // [B, H]: the last to finish a tile of heads merges

    LatentBuffers(const Model& model, int64_t batch, Cut& cut) {
        const Latent& m = model.latent;
        if (!m.rank) return;
        narrow = cut(batch * m.q_rank);
        wide = cut(batch * model.heads * (m.nope_dim + m.rope_dim));
        gates = cut(batch * model.heads * model.gate_dim);
        kept = cut(batch * (m.rank + m.rope_dim));
        queries = cut(batch * model.heads * (m.rank + m.rope_dim));
        mixed = cut(batch * model.heads * m.rank);
        if (cut.base) parts_left.reset(new std::atomic<int>[batch * model.heads]());
    }
};

inline int64_t parts_of(const RowTable& rows) { return (rows.slots + 1023) / 1024; }

// The buffers of every step, cut as those above: what is counted is what is taken.
struct StepBuffers {
    // Of a batch of B:
    //   residual [B, D]; heads [B, gates + (H+2G)E], wider for recurrent layers; mixed: projections of recurrent layers,
    //   the same memory as heads unless layers have attention too; gate_up [B, 2I]; packed: inputs of products
    //   angles [B, E]: cosines, then sines, and again for layers with windows if theirs differ
    //   part_peaks, part_totals, part_mixed: attention over the parts of rows, to be merged
    //   attended: outputs of all heads, where they are packed together: the next product takes codes, or a head's size is
    //   odd; outputs [B, D]: outputs of a layer's parts that are not added to the residual at once
    //   embedded: packed token embeddings that layers project; beside [B, D]: output of an MLP next to experts, or of a
    //   low-rank branch parallel to attention, whose inner numbers are low [B, R]
    //   first_stream [B, D], streams [B, S - 1, D]: the S residual streams of AltUp; of hyper-connections streams [B, S, D],
    //   seen [B, C]: what shares are made of, and shares [B, S + S S]: what is added, and how streams are mixed
    float *residual, *heads, *mixed, *gate_up, *packed, *angles, *part_peaks, *part_totals, *part_mixed, *attended,
        *outputs, *embedded, *beside, *low, *first_stream, *streams, *seen, *shares,
        *drafts;  // of recurrent layers (recurrent.h)
    //   low_parts, low_parts_down [B, pieces, most_rank]: what adapters make of the pieces of an input, that of `down` apart,
    //   which is made while gate and up are read; low_sums [B, most_rank] of each thread
    float *low_parts, *low_parts_down;
    std::vector<float*> low_sums, scratch;  // of each thread

    StepBuffers(const Model& model, const RowTable& rows, int64_t batch, int threads, Cut& cut);
};

struct Engine : StepBuffers {
    // workspace: floats, as many as workspace_floats says
    Engine(const Model& model, const RowTable& rows, const Ranks& ranks, ThreadPool& pool, int64_t max_batch,
           Cut workspace);
    static int64_t workspace_floats(const Model& model, const RowTable& rows, int64_t max_batch, int threads);

    const Model model;
    const RowTable rows;
    RankGroup ranks;  // with other ranks
    ThreadPool& pool;
    Tasks tasks;
    const int64_t max_batch, max_parts;
    std::vector<Likeliest> likeliest;                // [threads, max_batch]: what each thread has seen
    std::unique_ptr<std::atomic<int>[]> parts_left;  // [max_batch, G]: the last to finish merges
    std::vector<float> factors;  // [max_batch]: of the norm in work
    std::unique_ptr<std::atomic<int>[]> heads_done;  // [max_batch]: of kv heads; the last rounds what all found
    MixtureBuffers routed;
    LatentBuffers absorbed;
};

// The stages of a step are numbered: embedding, so many per layer, final norm, head. Of a layer those of its attention
// or recurrence come first; all layers of a model have as many, some of which may be empty.
inline bool recurs(const Model& model, int64_t layer) {
    return model.mixers[layer] == RECURRENT || model.mixers[layer] == BOTH;
}
inline int64_t attention_stages(const Model& model) { return !model.latent.rank ? 4 : model.latent.q_rank ? 9 : 7; }
constexpr int64_t MOST_STREAMS = 16;
constexpr int64_t MLP_STAGES = 4, MIXTURE_STAGES = 6, PER_LAYER_STAGES = 4;
inline bool is_beside_mlp(const Model& model) { return model.mixture.mlp_part_norm; }
// Of the MLP, or of experts in its place, or of both and of the sum.
inline int64_t mlp_stages(const Model& model) {
    return is_beside_mlp(model) ? MLP_STAGES + MIXTURE_STAGES + 1 : model.mixture.experts ? MIXTURE_STAGES : MLP_STAGES;
}
inline int64_t layer_stages(const Model& model) {
    return attention_stages(model) + mlp_stages(model) + (model.per_layer_dim ? PER_LAYER_STAGES : 0);
}
inline int64_t num_stages(const Model& model) { return 1 + model.layers * layer_stages(model) + 2; }

int64_t scratch_floats(const Model& model, int64_t max_batch);  // of a thread

}  // namespace looped
