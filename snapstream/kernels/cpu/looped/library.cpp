// The functions that Python calls (library.py), and the buffers of an engine.
#include "bf16.h"
#include "codes.h"
#include "engine.h"
#include "prompt_experts.h"
#include "prompt_f32.h"
#include "prompt_layer.h"
#include "sample.h"

namespace looped {

double read(const char* from, int64_t bytes, Team& team);  // bounds.cpp
double multiply(int64_t rounds, Team& team);
double multiply_bf16(int64_t rounds, Team& team);
double multiply_codes(int64_t rounds, Team& team);
int64_t choose_way(int64_t way);  // codes.cpp
void wait_for_all(int64_t rounds, Team& team);

namespace {

float* take(float*& from, int64_t count) {
    float* own = from;
    from += (count + 15) / 16 * 16;
    return own;
}

int64_t attended_floats(const Model& model, int64_t max_batch) {
    return takes_codes(model.o) ? max_batch * model.heads * model.head_dim : 0;
}

int64_t parts_of(const Rows& rows) { return (rows.slots + 1023) / 1024; }

int64_t widest_input(const Model& model) {  // of a product that all tokens of a step go through
    return std::max({model.hidden, model.inner, model.heads * model.head_dim, model.latent.q_rank}) + ALIGN_K;
}

int64_t own_floats(const Model& model, const Rows& rows, int64_t max_batch, int threads) {
    const int64_t parts = max_batch * model.heads * parts_of(rows);
    const int64_t heads = (model.heads + 2 * model.kv_heads) * model.head_dim;
    const int64_t entry = model.hidden + heads + 2 * model.inner + widest_input(model) + model.head_dim;
    const int64_t own = looped::scratch_floats(model, max_batch);
    return max_batch * entry + parts * (2 + model.head_dim) + threads * own + 16 * (8 + threads);
}

}  // namespace

Engine::Engine(const Model& model, const Rows& rows, const Ranks& ranks, Team& team, int64_t max_batch,
               float* workspace)
    : model(model), rows(rows), meeting(ranks, model, max_batch), team(team), tasks(team.size()), max_batch(max_batch), max_parts(parts_of(rows)),
      likeliest(team.size() * max_batch), parts_left(new std::atomic<int>[max_batch * model.kv_heads]()),
      factors(max_batch), heads_done(new std::atomic<int>[max_batch]()),
      more{workspace + own_floats(model, rows, max_batch, team.size())},
      attended(more(attended_floats(model, max_batch))), routed(model, max_batch, team.size(), more),
      absorbed(model, max_batch, more) {
    const int64_t own = looped::scratch_floats(model, max_batch);
    const int64_t parts = max_batch * model.heads * max_parts;
    residual = take(workspace, max_batch * model.hidden);
    heads = take(workspace, max_batch * (model.heads + 2 * model.kv_heads) * model.head_dim);
    gate_up = take(workspace, max_batch * 2 * model.inner);
    packed = take(workspace, max_batch * widest_input(model));
    angles = take(workspace, max_batch * model.head_dim);
    part_peaks = take(workspace, parts);
    part_totals = take(workspace, parts);
    part_mixed = take(workspace, parts * model.head_dim);
    for (int i = 0; i < team.size(); ++i) scratch.push_back(take(workspace, own));
}

int64_t Engine::workspace_floats(const Model& model, const Rows& rows, int64_t max_batch, int threads) {
    Cut more{nullptr};
    more(attended_floats(model, max_batch));
    MixtureBuffers(model, max_batch, threads, more);
    LatentBuffers(model, max_batch, more);
    return own_floats(model, rows, max_batch, threads) + more.at;
}

}  // namespace looped

using namespace looped;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT Team* looped_team(int64_t threads) {
    try {
        return new Team(static_cast<int>(threads));
    } catch (...) {
        return nullptr;
    }
}
EXPORT void looped_end_team(Team* team) { delete team; }

EXPORT int64_t looped_workspace(const Model* model, const Rows* rows, Team* team, int64_t max_batch) {
    return Engine::workspace_floats(*model, *rows, max_batch, team->size());
}
EXPORT int64_t looped_shared_bytes(const Model* model, int64_t ranks, int64_t max_batch) {
    return Meeting::bytes(*model, ranks, max_batch);
}
EXPORT Engine* looped_engine(const Model* model, const Rows* rows, const Ranks* ranks, Team* team, int64_t max_batch,
                             float* workspace) {
    return new Engine(*model, *rows, *ranks, *team, max_batch, workspace);
}
EXPORT void looped_end_engine(Engine* engine) { delete engine; }

EXPORT int64_t looped_step(Engine* engine, const Step* step) { return looped::step(*engine, *step); }
EXPORT int64_t looped_sampling_bytes(int64_t vocab) { return sampling_bytes(vocab); }
EXPORT void looped_draw(Team* team, const Sampling* sampling, const Draw* call, char* workspace, int64_t places) {
    draw(*sampling, *call, *team, workspace, places);
}
EXPORT int64_t looped_stages(const Model* model) { return num_stages(*model); }

EXPORT void looped_linear(const Stack* matrix, const float* x, int64_t tokens, const float* bias, float* out,
                   float* buffer, int64_t threads) {
    looped::linear(*matrix, x, tokens, bias, out, buffer, threads);
}
EXPORT void looped_copy_rows(const Stack* matrix, const int64_t* rows, int64_t count, float* out,
                             int64_t threads) {
    looped::copy_rows(*matrix, rows, count, out, threads);
}
EXPORT void looped_pass_tokens(const Passing* passing, float* buffer, int64_t threads) {
    pass_tokens(*passing, buffer, threads);
}
EXPORT void looped_pass_experts(const Routed* routed, float* buffer, int64_t threads) {
    pass_experts(*routed, buffer, threads);
}
EXPORT void looped_stage_heads(const Heads* heads, int64_t threads) { stage_heads(*heads, threads); }
EXPORT int64_t looped_way(int64_t way) { return choose_way(way); }
EXPORT void looped_attend_prompts(const Prompt* all, const int32_t* query_ends, const int32_t* key_ends, int64_t count,
                                  int64_t threads) {
    attend_prompts(*all, query_ends, key_ends, count, threads);
}
EXPORT void looped_attend_prompts_f32(const Prompt* prompts, int64_t count, int64_t threads) {
    attend_prompts_f32(prompts, count, threads);
}
EXPORT int64_t looped_multiplies_bf16() { return multiplies_bf16(); }
EXPORT int64_t looped_gains_by_bf16() { return gains_by_bf16(); }
EXPORT double looped_read(Team* team, const char* from, int64_t bytes) { return looped::read(from, bytes, *team); }
EXPORT void looped_wait_for_all(Team* team, int64_t rounds) { looped::wait_for_all(rounds, *team); }
EXPORT double looped_multiply_bf16(Team* team, int64_t rounds) { return looped::multiply_bf16(rounds, *team); }
EXPORT double looped_multiply_codes(Team* team, int64_t rounds) { return looped::multiply_codes(rounds, *team); }
EXPORT double looped_multiply(Team* team, int64_t rounds) { return looped::multiply(rounds, *team); }
}
