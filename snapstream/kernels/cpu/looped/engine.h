// What an engine of looped steps owns: the team, the model's and the rows' addresses, and the buffers between stages.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "abi.h"
#include "buffers.h"
#include "ranks.h"
#include "team.h"

namespace looped {

struct Engine {
    // workspace: floats, as many as workspace_floats says
    Engine(const Model& model, const Rows& rows, const Ranks& ranks, Team& team, int64_t max_batch, float* workspace);
    static int64_t workspace_floats(const Model& model, const Rows& rows, int64_t max_batch, int threads);

    const Model model;
    const Rows rows;
    Meeting meeting;  // with other ranks
    Team& team;
    Tasks tasks;
    const int64_t max_batch, max_parts;
    // Of a batch of B: residual stream [B, D], projected heads [B, (H+2G)E], gate and up [B, 2I]; packed activations;
    // angles [B, E]: cosines, then sines; what parts of rows found.
    float *residual, *heads, *gate_up, *packed, *angles, *part_peaks, *part_totals, *part_mixed;
    std::vector<float*> scratch;  // of each member
    std::vector<Likeliest> likeliest;                // [threads, max_batch]: what each member has seen
    std::unique_ptr<std::atomic<int>[]> parts_left;  // [max_batch, G]: the last to finish merges
    std::vector<float> factors;  // [max_batch]: of the norm in work
    std::unique_ptr<std::atomic<int>[]> heads_done;  // [max_batch]: of kv heads; the last rounds what all found
    Cut more;  // of the workspace: what stands behind the above
    float* attended;  // [B, H * E], where the next product takes codes
    MixtureBuffers routed;
    LatentBuffers absorbed;
};

// The stages of a step are numbered: embedding, so many per layer, final norm, head. Of a layer those of its attention
// come first; all layers of a model have as many, some of which may be empty.
inline int64_t attention_stages(const Model& model) { return !model.latent.rank ? 4 : model.latent.q_rank ? 9 : 7; }
inline int64_t layer_stages(const Model& model) { return attention_stages(model) + (model.mixture.experts ? 6 : 4); }
inline int64_t num_stages(const Model& model) { return 1 + model.layers * layer_stages(model) + 2; }

// x [tokens, cols] times a matrix transposed, plus bias or null: out [tokens, rows]; buffer for tokens x (cols + 3)
// (prompt_layer.cpp).
void linear(const Stack& matrix, const float* x, int64_t tokens, const float* bias, float* out, float* buffer,
            int64_t threads);
void copy_rows(const Stack& matrix, const int64_t* rows, int64_t count, float* out, int64_t threads);
// With all tokens of a prompt.
Product prefill_product(const Stack& matrix);
bool step(Engine& engine, const Step& step);  // false: another rank has gone
// Of a member of the team.
int64_t scratch_floats(const Model& model, int64_t max_batch);

}  // namespace looped
