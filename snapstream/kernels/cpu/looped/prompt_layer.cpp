// See prompt_layer.h. An input is rounded and packed once, by whoever makes it: a norm, SwiGLU, or a copy.
//
// Tokens go in ranges whose packed input stays in a near cache while one panel after the other is multiplied with it.
// Invariant: a token's result is the same bits alone and beside any others.
#include "prompt_layer.h"

#include <cmath>
#include <cstdlib>
#include <vector>

#include "prompt_input.h"

namespace looped {
namespace {

// Half of a head; the other numbers of its pairs lie `other` further on.
INLINE void rotate(const float* x, const float* cos, const float* sin, int64_t other, float* to) {
    const int64_t count = std::abs(other);
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, load(x + i) * load(cos + i) + load(x + other + i) * load(sin + i));
    for (; i < count; ++i) to[i] = x[i] * cos[i] + x[other + i] * sin[i];
}

// x *= what makes a vector of length sqrt(count), times the weight.
void norm_of(const float* x, const float* weight, int64_t count, float eps, float* out) {
    vec sum = {};
    int64_t i = 0;
    for (; i + W <= count; i += W) sum += load(x + i) * load(x + i);
    const vec rest = load_some(x + i, count - i);
    const float factor = 1.0f / std::sqrt(sum_of(sum + rest * rest) / static_cast<float>(count) + eps);
    for (i = 0; i + W <= count; i += W) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < count; ++i) out[i] = x[i] * factor * weight[i];
}

// Sums [tokens][32] of a panel and its bias to columns `first` and further of out.
void write(const Passing& p, const Stack& matrix, const float* bias, const float* sums, int64_t begin, int64_t tokens,
           int64_t first) {
    const int64_t count = std::min<int64_t>(PANEL, matrix.rows - first);
    float own[PANEL] = {};
    if (bias) std::copy(bias + first, bias + first + count, own);
    for (int64_t t = 0; t < tokens; ++t) {
        float* to = p.out + (begin + t) * matrix.rows + first;
        if (count == PANEL)
            for (int v = 0; v < PANEL; v += W) store(to + v, load(sums + t * PANEL + v) + load(own + v));
        else
            for (int64_t i = 0; i < count; ++i) to[i] = sums[t * PANEL + i] + own[i];
    }
}

}  // namespace

// Prefill's products stand between regions of PyTorch: its threads (OpenMP's) do them, a second team would fight them.
void pass_tokens(const Passing& p, float* buffer, int64_t threads) {
    if (!p.tokens) return;
    const Stack &matrix = p.matrix, &down = p.down;
    const bool gated = down.rows > 0;
    const int64_t cols = matrix.cols, inner = down.cols, panels = gated ? inner / PANEL : panels_of(matrix);
    const Input first(matrix, p.tokens, buffer);
    const Input second(gated ? down : matrix, p.tokens, buffer + p.tokens * padded(cols));
    const Product multiply = prefill_product(matrix), multiply_down = gated ? prefill_product(down) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> normed(p.norm ? cols : 0), sums(2 * std::max(first.most(), second.most()) * PANEL);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p.tokens; ++t) {
            const float* x = p.x ? p.x + t * cols : nullptr;
            if (p.norm) {
                float* own = p.residual + t * cols;
                if (x)
                    for (int64_t i = 0; i < cols; ++i) own[i] += x[i];
                norm_of(own, p.norm, cols, p.eps, normed.data());
                x = normed.data();
            }
            first.put(t, x, 0, cols);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < first.ranges() * panels; ++task) {
            const int64_t range = task / panels, panel = task % panels, begin = first.begin(range);
            const Groups groups = first.groups(range);
            const char* own = matrix.data + panel * matrix.panel_bytes;
            multiply(matrix, own, first.of(range), groups, sums.data());
            if (gated) {
                float* ups = sums.data() + groups.tokens * PANEL;
                multiply(matrix, own + panels * matrix.panel_bytes, first.of(range), groups, ups);
                activate(second, p.bias, inner, sums.data(), ups, nullptr, begin, groups.tokens, panel * PANEL);
            } else {
                write(p, matrix, p.bias, sums.data(), begin, groups.tokens, panel * PANEL);
            }
        }
        if (gated) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < second.ranges() * panels_of(down); ++task) {
                const int64_t range = task / panels_of(down), panel = task % panels_of(down);
                const Groups groups = second.groups(range);
                multiply_down(down, down.data + panel * down.panel_bytes, second.of(range), groups, sums.data());
                write(p, down, p.down_bias, sums.data(), second.begin(range), groups.tokens, panel * PANEL);
            }
        }
    }
}

void linear(const Stack& matrix, const float* x, int64_t tokens, const float* bias, float* out, float* buffer,
            int64_t threads) {
    Passing p{};
    p.x = x, p.matrix = matrix, p.bias = bias, p.out = out, p.tokens = tokens;
    pass_tokens(p, buffer, threads);
}

void stage_heads(const Heads& h, int64_t threads) {
    const int64_t E = h.size, half = E / 2, rotated = h.num_heads + h.kv_heads, all = rotated + h.kv_heads;
    std::vector<std::pair<int64_t, int64_t>> places;  // of each token: among the T, in staging
    for (const int64_t* run = h.runs; run < h.runs + 3 * h.num_runs; run += 3)
        for (int64_t i = 0; i < run[1]; ++i) places.push_back({run[0] + i, run[2] + i});
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> normed(E);
#pragma omp for schedule(static)
        for (size_t i = 0; i < places.size(); ++i) {
            const auto [t, place] = places[i];
            const float *cos = h.cos + t * E, *sin = h.sin + t * E;
            for (int64_t head = 0; head < all; ++head) {
                const float* x = h.heads + (t * all + head) * E;
                if (head >= rotated) {
                    std::copy(x, x + E, h.values + (head - rotated) * h.stride + place * E);
                    continue;
                }
                float* to = head < h.num_heads ? h.queries + (t * h.num_heads + head) * E
                                               : h.keys + (head - h.num_heads) * h.stride + place * E;
                if (h.norm) {
                    norm_of(x, h.norm + head * E, E, h.eps, normed.data());
                    x = normed.data();
                }
                rotate(x, cos, sin, half, to);
                rotate(x + half, cos + half, sin + half, -half, to + half);
            }
        }
    }
}

}  // namespace looped
