// Norms, products, SwiGLU and experts of many tokens. An input is rounded and packed once, by what makes it: a norm,
// SwiGLU, or a copy.
//
// OpenMP's threads do it, here and in the other files of prompts, since these calls stand between regions of PyTorch: a
// second pool would compete for the cores.
//
// Tokens go in ranges whose packed input stays in a near cache while one panel after the other is multiplied with it.
// Invariant: results are batch-invariant. A token's experts are summed in the order of its own choice.
#include <cmath>
#include <cstdlib>
#include <vector>

#include "dots.h"
#include "products.h"

namespace looped {

constexpr int64_t NEAR_BYTES = 768 * 1024;  // of packed input, beside a panel and its sums

// The input of a matrix, packed in ranges of tokens.
class Input {
  public:
    Input(const Stack& matrix, int64_t tokens, float* packed)
        : matrix_(matrix), tokens_(tokens), most_(takes_integers(matrix) ? most_integers() : MOST), packed_(packed) {
        const int64_t bytes = takes_integers(matrix) ? tokens * packed_ints(matrix) * 4
            : tokens * matrix.cols * (takes_bf16(matrix) ? 2 : 4);
        const int64_t near = takes_shorts(matrix) ? 2 * NEAR_BYTES : NEAR_BYTES;  // each range rounds the weights
        const int64_t ranges = std::max<int64_t>(1, (bytes + near - 1) / near);
        size_ = std::max<int64_t>(1, ((tokens + ranges - 1) / ranges + most_ - 1) / most_ * most_);
    }

    int64_t ranges() const { return (tokens_ + size_ - 1) / size_; }
    int64_t begin(int64_t range) const { return range * size_; }
    int64_t most() const { return std::min(size_, tokens_); }
    Groups groups(int64_t range) const { return Groups(std::min(size_, tokens_ - begin(range)), nullptr, 0, most_); }
    float* of(int64_t range) const { return packed_ + begin(range) * padded(matrix_.cols); }

    // Columns `first` and further of a token; codes in whole groups.
    void put(int64_t token, const float* x, int64_t first, int64_t count) const {
        At(*this, token).put(x, first, count);
    }

    // A token, from which the next is cheaper to find than by its number.
    class At {
      public:
        At(const Input& input, int64_t token)
            : input_(input), range_(token / input.size_), place_(input.groups(range_), token - input.begin(range_)),
              left_(std::min(input.begin(range_ + 1), input.tokens_) - token) {}
        void put(const float* x, int64_t first, int64_t count) const {
            put_input(input_.matrix_, input_.of(range_), place_, x, first, count);
        }
        void next() {
            if (--left_ > 0) return place_.next();
            if (++range_ == input_.ranges()) return;
            const Groups groups = input_.groups(range_);
            place_ = Place(groups, 0), left_ = groups.tokens;
        }

      private:
        const Input& input_;
        int64_t range_;
        Place place_;
        int64_t left_;
    };

  private:
    const Stack& matrix_;
    int64_t tokens_, most_, size_;
    float* packed_;
};

inline int64_t halves_of(int64_t activation) { return has_gate(activation) ? 2 : 1; }

// The activations of `cols` columns from `first` on, whole panels of gate and of up, or of up alone, times the share of a
// token where there are shares: columns of the next input. sums [panels][gate, up][tokens][32].
inline void activate(const Input& input, const Gated& gated, const float* bias, int64_t inner, const float* sums,
                     const float* shares, int64_t begin, int64_t tokens, int64_t first, int64_t cols) {
    float gate_bias[MOST_GROUP] = {}, up_bias[MOST_GROUP] = {}, active[MOST_GROUP];
    const int64_t halves = halves_of(gated.kind), apart = (halves - 1) * tokens * PANEL;
    if (bias) {
        const int64_t up = first + (halves - 1) * inner;
        std::copy(bias + first, bias + first + cols, gate_bias);
        std::copy(bias + up, bias + up + cols, up_bias);
    }
    Input::At at(input, begin);
    for (int64_t t = 0; t < tokens; ++t, at.next()) {
        const vec share = all(shares ? shares[begin + t] : 1.0f);
        for (int64_t i = 0; i < cols; i += W) {
            const float* own = sums + (i / PANEL * halves * tokens + t) * PANEL + i % PANEL;
            const vec gate = load(own) + load(gate_bias + i), up = load(own + apart) + load(up_bias + i);
            store(active + i, gated(gate, up, share));
        }
        at.put(active, first, cols);
    }
}

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
    const float factor = norm_factor(x, count, eps);
    int64_t i = 0;
    for (; i + W <= count; i += W) store(out + i, load(x + i) * factor * load(weight + i));
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

Product product_of(const Stack& matrix) {
    if (takes_shorts(matrix)) return short_product(matrix.format);
    return takes_bf16(matrix) ? bf16_product(matrix.format) : products_with(matrix).of_one;
}

}  // namespace

// buffer: tokens x (in + 3), and for down tokens x inner more.
EXPORT void looped_pass_tokens(const Passing& p, float* buffer, int64_t threads) {
    if (!p.tokens) return;
    const Stack &matrix = p.matrix, &down = p.down;
    const bool gated = down.rows > 0;
    const int64_t cols = matrix.cols, inner = down.cols, panels = gated ? inner / PANEL : panels_of(matrix);
    const Input first(matrix, p.tokens, buffer);
    const Input second(gated ? down : matrix, p.tokens, buffer + p.tokens * padded(cols));
    const Product multiply = product_of(matrix), multiply_down = gated ? product_of(down) : nullptr;
    // A task's panels: codes of a group of the next input share a scale.
    const int64_t together = gated && takes_codes(down) ? std::max<int64_t>(down.group / PANEL, 1) : 1;
    const int64_t tasks = panels / together;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> normed(p.norm ? cols : 0);
        std::vector<float> sums(2 * together * std::max(first.most(), second.most()) * PANEL);
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
        for (int64_t task = 0; task < first.ranges() * tasks; ++task) {
            const int64_t range = task / tasks, panel = task % tasks * together, begin = first.begin(range);
            const Groups groups = first.groups(range);
            const char* own = matrix.data + panel * matrix.panel_bytes;
            if (!gated) {
                multiply(matrix, own, first.of(range), groups, sums.data());
                write(p, matrix, p.bias, sums.data(), begin, groups.tokens, panel * PANEL);
                continue;
            }
            float* to = sums.data();
            for (int64_t i = 0; i < together; ++i, own += matrix.panel_bytes)
                for (int64_t half = 0; half < halves_of(p.activation); ++half, to += groups.tokens * PANEL)
                    multiply(matrix, own + half * panels * matrix.panel_bytes, first.of(range), groups, to);
            activate(second, Gated{p.activation, p.numbers}, p.bias, inner, sums.data(), nullptr, begin,
                     groups.tokens, panel * PANEL, together * PANEL);
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

EXPORT void looped_stage_heads(const Heads& h, int64_t threads) {
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

// -- experts: the tokens of one are packed where they are read, gate and up are multiplied panel by panel, and SwiGLU
// writes the input of down.

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

// buffer: T k x (D + M + 6) numbers.
EXPORT void looped_pass_experts(const Routed& r, float* buffer, int64_t threads) {
    const Stack &matrix = r.gate_up, &down = r.down;
    const int64_t cols = matrix.cols, inner = down.cols, pairs = r.tokens * r.top_k, panels = inner / PANEL;
    float* packed = buffer;
    float* active = packed + pairs * padded(cols);
    float* lines = buffer;  // [pairs, D]: what each pair gave, written after the last read of the packed tokens
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
    const Product multiply = product_of(matrix), multiply_down = product_of(down);
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
            if (halves_of(r.activation) == 2)
                multiply(matrix, data + panels * matrix.panel_bytes, expert->first.of(range), groups, ups);
            const float* bias = r.gate_up_bias ? r.gate_up_bias + expert->index * 2 * inner : nullptr;
            activate(expert->second, {r.activation, r.numbers, r.scales_inputs}, bias, inner, sums.data(),
                     shares.data() + expert->begin, expert->first.begin(range), groups.tokens, panel * PANEL, PANEL);
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
                if (!r.down_bias) continue;
                const float* bias = r.down_bias + experts[expert_of[place_of[i]]].index * down.rows;
                for (int64_t row = 0; row < down.rows; ++row) out[row] += bias[row] * r.weights[i];
            }
        }
    }
}

}  // namespace looped
