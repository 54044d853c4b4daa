// The buffers between the stages of a mixture of experts (mixture.h) and of attention over latents (latent.h).
//
// They are cut from the engine's workspace by one function each, which counts what is needed where there is no
// workspace yet.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "forms.h"
#include "panels.h"

namespace looped {

struct Cut {  // of a workspace, or with none the sum of what was asked for
    float* base;
    int64_t at = 0;
    float* operator()(int64_t count) {
        float* own = base ? base + at : nullptr;
        at += (count + 15) / 16 * 16;
        return own;
    }
};

struct Span {  // the pairs of one chosen expert, counted among those that lie on this rank
    int64_t expert, begin, count;
};

struct MixtureBuffers {  // of a batch of B; a pair is a token and one of its experts, sorted by expert
    // [B, D], rows filled up to ALIGN_K; the same packed; [B, X]; [B, k]; [B k, 2M]; packed by expert [B k, M]
    float *normed, *packed, *scores, *shares, *gate_up, *inner;
    float *shared_gate_up, *shared_inner;  // [B, 2S]; packed [B, S]
    std::vector<float*> own, sums;         // of each member: packed tokens of an expert; what panels gave, by pair
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
        const int64_t wide = padded(model.hidden), pairs = batch * m.top_k;
        normed = cut(batch * wide);
        packed = cut(batch * wide);
        scores = cut(batch * (m.experts + W));
        shares = cut(pairs);
        gate_up = cut(pairs * 2 * m.inner);
        inner = cut(pairs * padded(m.inner));
        shared_gate_up = cut(batch * 2 * m.shared_inner);
        shared_inner = cut(batch * padded(m.shared_inner));
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
    // [B, Q]; [B, H (N + U)]; [B, R + P]; absorbed [B, H, R + P]; [B, H, R]
    float *narrow, *wide, *kept, *queries, *mixed;
    std::unique_ptr<std::atomic<int>[]> parts_left;  // [B, H]: the last to finish a tile of heads merges

    LatentBuffers(const Model& model, int64_t batch, Cut& cut) {
        const Latent& m = model.latent;
        if (!m.rank) return;
        narrow = cut(batch * m.q_rank);
        wide = cut(batch * model.heads * (m.nope_dim + m.rope_dim));
        kept = cut(batch * (m.rank + m.rope_dim));
        queries = cut(batch * model.heads * (m.rank + m.rope_dim));
        mixed = cut(batch * model.heads * m.rank);
        if (cut.base) parts_left.reset(new std::atomic<int>[batch * model.heads]());
    }
};

}  // namespace looped
