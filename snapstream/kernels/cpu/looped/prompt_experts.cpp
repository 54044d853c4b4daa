// See prompt_experts.h. What ../../../models/experts.py means, in one call: the tokens of an expert are packed where they are
// read, gate and up are multiplied panel by panel, and SwiGLU writes the input of down.
//
// Invariant: a token's result is the same bits alone and beside any others: its experts are summed in the order of its own
// choice.
#include "prompt_experts.h"

#include <vector>

#include "prompt_input.h"

namespace looped {
namespace {

struct Expert {  // one that some tokens chose
    int64_t index, begin, count;
    Input first, second;
};

struct Task {
    const Expert* expert;
    int64_t range, panel;
};

std::vector<Task> tasks_of(const std::vector<Expert>& experts, const Input Expert::*input, int64_t panels) {
    std::vector<Task> tasks;
    for (const Expert& expert : experts)
        for (int64_t range = 0; range < (expert.*input).ranges(); ++range)
            for (int64_t panel = 0; panel < panels; ++panel) tasks.push_back({&expert, range, panel});
    return tasks;
}

}  // namespace

void pass_experts(const Routed& r, float* buffer, int64_t threads) {
    const Stack &matrix = r.gate_up, &down = r.down;
    const int64_t cols = matrix.cols, inner = down.cols, pairs = r.tokens * r.top_k, panels = inner / PANEL;
    float* packed = buffer;
    float* active = packed + pairs * padded(cols);
    float* lines = buffer;  // [pairs, D]: what each pair gave, written when nobody reads the packed tokens any more
    std::vector<Expert> experts;
    int64_t begin = 0, most = 0;
    for (int64_t index = 0; index < r.experts; begin = r.ends[index++]) {
        const int64_t count = r.ends[index] - begin;
        if (!count) continue;
        experts.push_back({index, begin, count, Input(matrix, count, packed + begin * padded(cols)),
                           Input(down, count, active + begin * padded(inner))});
        most = std::max({most, experts.back().first.most(), experts.back().second.most()});
    }
    const int64_t held = begin;  // pairs whose expert is stored here
    std::vector<int64_t> expert_of(held), place_of(pairs);
    std::vector<float> shares(held);
    for (size_t i = 0; i < experts.size(); ++i)
        std::fill_n(expert_of.begin() + experts[i].begin, experts[i].count, static_cast<int64_t>(i));
    for (int64_t pair = 0; pair < pairs; ++pair) place_of[r.order[pair]] = pair;
    for (int64_t pair = 0; pair < held; ++pair) shares[pair] = r.weights[r.order[pair]];
    const std::vector<Task> up_tasks = tasks_of(experts, &Expert::first, panels);
    const std::vector<Task> down_tasks = tasks_of(experts, &Expert::second, panels_of(down));
    const Product multiply = prefill_product(matrix), multiply_down = prefill_product(down);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> sums(2 * most * PANEL);
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < held; ++pair) {
            const Expert& own = experts[expert_of[pair]];
            own.first.put(pair - own.begin, r.x + r.order[pair] / r.top_k * cols, 0, cols);
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < up_tasks.size(); ++i) {
            const auto [expert, range, panel] = up_tasks[i];
            const Groups groups = expert->first.groups(range);
            const char* data = matrix.data + expert->index * matrix.layer_bytes + panel * matrix.panel_bytes;
            float* ups = sums.data() + groups.tokens * PANEL;
            multiply(matrix, data, expert->first.of(range), groups, sums.data());
            multiply(matrix, data + panels * matrix.panel_bytes, expert->first.of(range), groups, ups);
            activate(expert->second, nullptr, inner, sums.data(), ups, shares.data() + expert->begin,
                     expert->first.begin(range), groups.tokens, panel * PANEL);
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < down_tasks.size(); ++i) {
            const auto [expert, range, panel] = down_tasks[i];
            const Groups groups = expert->second.groups(range);
            const char* data = down.data + expert->index * down.layer_bytes + panel * down.panel_bytes;
            multiply_down(down, data, expert->second.of(range), groups, sums.data());
            const int64_t row = panel * PANEL, count = std::min<int64_t>(PANEL, down.rows - row);
            float* to = lines + (expert->begin + expert->second.begin(range)) * down.rows + row;
            for (int64_t t = 0; t < groups.tokens; ++t)
                std::copy_n(sums.data() + t * PANEL, count, to + t * down.rows);
        }
#pragma omp for schedule(static)
        for (int64_t token = 0; token < r.tokens; ++token) {
            float* out = r.out + token * down.rows;
            std::fill(out, out + down.rows, 0.0f);
            for (int64_t i = token * r.top_k; i < (token + 1) * r.top_k; ++i) {
                if (place_of[i] >= held) continue;  // another rank's
                const float* line = lines + place_of[i] * down.rows;
                for (int64_t row = 0; row < down.rows; ++row) out[row] += line[row];
            }
        }
    }
}

}  // namespace looped
