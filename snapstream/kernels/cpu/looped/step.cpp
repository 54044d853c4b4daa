// The functions of engine.h that do the work.
#include "step.h"

#include "bf16.h"

namespace looped {

bool step(Engine& engine, const Step& step) {
    engine.tasks.clear();
    engine.team.run([&](int index) { Member(engine, step, index).run(); });
    return !engine.meeting.has_failed;
}

// Prefill's products stand between regions of PyTorch: its threads (OpenMP's) do them, a second team would fight them.
void linear(const Stack& matrix, const float* x, int64_t tokens, const float* bias, float* out, float* buffer,
            int64_t threads) {
    const Groups groups(tokens);
    const int64_t panels = (matrix.rows + PANEL - 1) / PANEL, cols = matrix.cols;
    const Product multiply = takes_bf16(matrix) ? bf16_product(matrix.format) : products_with(matrix).of_one;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t) {
            if (takes_bf16(matrix)) {
                pack_bf16(x + t * cols, cols, buffer, groups, t);
                continue;
            }
            if (takes_codes(matrix)) {
                PackedCodes(buffer, groups, t, matrix).put(0, x + t * cols, cols);
                continue;
            }
            const Packed to(buffer, groups, t, cols);
            for (int64_t i = 0; i < cols; ++i) to.put(i, x[t * cols + i]);
            to.end(cols);
        }
        std::vector<float> sums(tokens * PANEL);
#pragma omp for schedule(dynamic, 1)
        for (int64_t panel = 0; panel < panels; ++panel) {
            multiply(matrix, matrix.data + panel * matrix.panel_bytes, buffer, groups, sums.data());
            const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, matrix.rows - first);
            float own[PANEL] = {};
            if (bias) std::copy(bias + first, bias + first + count, own);
            for (int64_t t = 0; t < tokens; ++t) {
                float* to = out + t * matrix.rows + first;
                if (count == PANEL)
                    for (int v = 0; v < PANEL; v += W) store(to + v, load(&sums[t * PANEL + v]) + load(own + v));
                else
                    for (int64_t i = 0; i < count; ++i) to[i] = sums[t * PANEL + i] + own[i];
            }
        }
    }
}

void copy_rows(const Stack& matrix, const int64_t* rows, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i) copy_row(matrix, rows[i], out + i * matrix.cols);
}

int64_t scratch_floats(const Model& model, int64_t max_batch) {
    const int64_t group = model.heads / model.kv_heads * model.head_dim;
    const int64_t products = std::max(max_batch, 2 * PAIR_TOKENS) * PANEL;
    const int64_t attention = model.latent.rank ? 0 : group + std::max(group, attend_scratch(model.heads / model.kv_heads));
    return std::max({products, attention, latent_scratch(model), mixture_scratch(model)});
}

}  // namespace looped
