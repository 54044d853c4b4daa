// The functions of engine.h that do the work.
#include "step.h"

#include "bf16.h"

namespace looped {

bool step(Engine& engine, const Step& step) {
    engine.tasks.clear();
    engine.team.run([&](int index) { Member(engine, step, index).run(); });
    return !engine.meeting.has_failed;
}

Product prefill_product(const Stack& matrix) {
    return takes_bf16(matrix) ? bf16_product(matrix.format) : products_with(matrix).of_one;
}

void copy_rows(const Stack& matrix, const int64_t* rows, int64_t count, float* out, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) copy_row(matrix, rows[i], out + i * matrix.cols);
}

int64_t scratch_floats(const Model& model, int64_t max_batch) {
    const int64_t group = model.heads / model.kv_heads * model.head_dim;
    const int64_t products = 2 * std::max(max_batch, PAIR_TOKENS) * PANEL;  // a panel of gate and one of up
    const int64_t attention = model.latent.rank ? 0 : group + std::max(group, attend_scratch(model.heads / model.kv_heads));
    return std::max({products, attention, latent_scratch(model), mixture_scratch(model)});
}

}  // namespace looped
