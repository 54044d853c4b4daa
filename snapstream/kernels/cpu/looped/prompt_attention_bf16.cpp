// Attention of a chunk of a prompt in bf16, flash style: keys block by block, with the softmax corrected as larger
// scores turn up. Queries, keys, values and the probabilities are rounded to bf16, scores and sums are fp32.
//
// A task is one kv head and some queries of each head that shares it: keys and values of a block are packed once for
// all of them, as panels (panels.h) of 32 keys by E and of 32 numbers by keys, and both products are those of tiles.
// Invariant: blocks of keys begin at multiples of BLOCK_KEYS, and what a query does not see adds zeros; so its result
// is bitwise equal however the prompt is cut into chunks.
#include <limits>
#include <vector>

#include "bf16_tiles.h"

namespace looped {

#if HAS_BF16
namespace {

constexpr int64_t BLOCK_KEYS = 256;
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int SHARES = BLOCK_KEYS / 2 + 16;  // of a query, and some room so that those of all do not fight for a line
constexpr int64_t TASK_QUERIES = 768;  // of all heads; fewer would pack keys too often

int64_t panels_of(int64_t count) { return (count + PANEL - 1) / PANEL; }
int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

// Keys [n, size] as panels [n / 32][size / 2][32] of pairs; zeros where there is no key. W keys are transposed at once.
void pack_keys(const float* keys, int64_t stride, int64_t n, int64_t size, uint32_t* to) {
    const int64_t units = even(size) / 2;
    for (int64_t first = 0; first < panels_of(n) * PANEL; first += W)
        for (int64_t unit = 0; unit < units; unit += W) {
            vec lines[W];  // of a key 2 W numbers, then of 2 numbers W keys
            for (int64_t i = 0; i < W; ++i) {
                const float* own = keys + (first + i) * stride + 2 * unit;
                const int64_t left = first + i < n ? size - 2 * unit : 0;
                lines[i] = (vec)narrow(load_left(own, left), load_left(own + W, left - W));
            }
            transpose<W / 2>(lines);
            uint32_t* line = to + (first / PANEL * units + unit) * PANEL + first % PANEL;
            for (int64_t i = 0; i < std::min<int64_t>(W, units - unit); ++i, line += PANEL)
                std::memcpy(line, &lines[i], sizeof lines[i]);
        }
}

// Each number of bf16 in the lower half of 32 bits.
INLINE bits widened(half_bits own) {
    typedef uint16_t shorts __attribute__((vector_size(W * 2)));
    return __builtin_convertvector((shorts)own, bits);
}

// Values [n, size] as panels [size / 32][n / 2][32] of pairs of neighbouring keys.
void pack_values(const float* values, int64_t stride, int64_t n, int64_t size, uint32_t* to) {
    for (int64_t panel = 0; panel < panels_of(size); ++panel)
        for (int64_t key = 0; key < even(n); key += 2)
            for (int v = 0; v < VECS; ++v, to += W) {
                const int64_t at = panel * PANEL + v * W;
                const float* own = values + key * stride + at;
                const vec low = load_left(own, size - at);
                const vec high = key + 1 < n ? load_left(own + stride, size - at) : vec{};
                const bits both = widened(narrow(low)) | widened(narrow(high)) << 16;
                std::memcpy(to, &both, sizeof both);
            }
}

// Up to MOST queries of one head that follow each other.
struct Some {
    const float* q;     // of the first
    int64_t first, count;
    uint32_t* packed;   // [E / 2][count]
    float *peak, *total, *mixed;  // [count], [count], [U / 32][count][32]
};

// 2^x of x up to 0, and of what is no number; less exact than simd.h's e^x, more than bf16 is. Zero in place of what
// would be subnormal, which some processors take long to make.
INLINE vec power(vec x) {
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-125.0f), _CMP_NLT_UQ);  // NaN does
    const vec n = (vec)_mm512_roundscale_ps((__m512)x, 0), f = x - n;
    vec p = all(9.5700998e-3f);
    p = p * f + 5.5917860e-2f;
    p = p * f + 2.4024745e-1f;
    p = p * f + 6.9312181e-1f;
    p = p * f + 0.99999926f;
    return (vec)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
}

class Task {
  public:
    Task(const Prompt& prompt, int64_t kv_head, int64_t begin, int64_t end) : p_(prompt), kv_head_(kv_head) {
        const int64_t shared = p_.heads / p_.kv_heads, count = end - begin, units = even(p_.size) / 2;
        const int64_t value_panels = panels_of(p_.value_size), queries = shared * count;
        const Groups groups(count);
        packed_.resize(queries * units);
        state_.resize(queries * (2 + value_panels * PANEL));
        keys_.resize(BLOCK_KEYS * units);
        values_.resize(BLOCK_KEYS / 2 * value_panels * PANEL);
        uint32_t* packed = packed_.data();
        float* state = state_.data();
        for (int64_t head = 0; head < shared; ++head)
            for (int64_t group = 0; group < groups.count; ++group) {
                const int64_t first = begin + groups.begin(group), size = groups.size(group);
                const float* q = p_.q + first * p_.q_token + (kv_head * shared + head) * p_.q_head;
                some_.push_back({q, first, size, packed, state, state + size, state + 2 * size});
                for (int64_t t = 0; t < size; ++t)
                    pack_row(q + t * p_.q_token, p_.size, even(p_.size), packed + t, size);
                const float* sink = p_.sinks ? p_.sinks + kv_head * shared + head : nullptr;
                std::fill(state, state + size, sink ? *sink : -std::numeric_limits<float>::infinity());
                std::fill(state + size, state + 2 * size, sink ? 1.0f : 0.0f);
                std::fill(state + 2 * size, state + size * (2 + value_panels * PANEL), 0.0f);
                packed += units * size;
                state += size * (2 + value_panels * PANEL);
            }
        first_ = seen_from(begin), last_ = seen_by(end - 1);
    }

    void run() {
        for (int64_t first = first_ / BLOCK_KEYS * BLOCK_KEYS; first < last_; first += BLOCK_KEYS) {
            const int64_t count = std::min(BLOCK_KEYS, p_.keys - first);
            pack_keys(p_.k + kv_head_ * p_.k_head + first * p_.k_token, p_.k_token, count, p_.size, keys_.data());
            pack_values(p_.v + kv_head_ * p_.v_head + first * p_.v_token, p_.v_token, count, p_.value_size,
                        values_.data());
            for (const Some& some : some_) {
                const int64_t seen = seen_by(some.first + some.count - 1) - first;  // by the last of them
                if (seen > 0 && seen_from(some.first) < first + count)
                    attend(some, first, std::min(seen, count), even(count) / 2);
            }
        }
        const int64_t shared = p_.heads / p_.kv_heads, per_head = some_.size() / shared;
        for (size_t i = 0; i < some_.size(); ++i) write(some_[i], kv_head_ * shared + i / per_head);
    }

  private:
    int64_t seen_by(int64_t query) const { return p_.keys - p_.queries + query + 1; }
    int64_t seen_from(int64_t query) const { return p_.window ? std::max<int64_t>(seen_by(query) - p_.window, 0) : 0; }

    // Of a block that begins at key `first` the `count` keys that some of the queries see; `pairs` of them are packed.
    void attend(const Some& some, int64_t first, int64_t count, int64_t pairs) {
        const int64_t T = some.count, units = even(p_.size) / 2, panels = panels_of(count);
        const PairTile score = pair_tile_of<NEW>(T, UpToMost{}), mix = pair_tile_of<ON, SHARES>(T, UpToMost{});
        const int64_t hidden = std::max<int64_t>(seen_from(some.first) - first, 0) / PANEL;  // panels before the windows
        for (int64_t panel = hidden; panel < panels; ++panel) {
            const char* own = reinterpret_cast<const char*>(keys_.data() + panel * units * PANEL);
            score(own, some.packed, 2 * units, scores_ + panel * T * PANEL, {own, 0});
        }
        soften(some, first, count, panels);
        for (int64_t panel = 0; panel < panels_of(p_.value_size); ++panel) {
            const char* own = reinterpret_cast<const char*>(values_.data() + panel * pairs * PANEL);
            mix(own, shares_, even(count), some.mixed + panel * T * PANEL, {own, 0});
        }
    }

    // Scores of each query to shares of its largest score; what was found before is corrected to that. All queries take
    // each step before the next, so that none waits for the sum over the lanes of another.
    void soften(const Some& some, int64_t first, int64_t count, int64_t panels) {
        static_assert(MOST <= W);
        const int64_t T = some.count, apart = T * PANEL;  // from panel to panel
        const vec none = all(-std::numeric_limits<float>::infinity());
        alignas(64) float found[W] = {}, shifts[W], factors[W];
        for (int64_t t = 0; t < T; ++t) {
            hide(some, t, first, count, panels);
            vec largest = none;
            for (int64_t panel = 0; panel < panels; ++panel)
                for (int v = 0; v < VECS; ++v) {
                    const vec own = load(scores_ + panel * apart + t * PANEL + v * W);
                    largest = own > largest ? own : largest;
                }
            found[t] = max_of(largest);
        }
        const float scale = scale_of_scores();
        const vec before = load_some(some.peak, T), own = load(found) * scale, peak = own > before ? own : before;
        const vec shift = peak == none ? vec{} : peak;
        store(shifts, shift * LOG2_E);
        store(factors, exponential(before - shift));
        std::memcpy(some.peak, &peak, T * sizeof(float));
        for (int64_t t = 0; t < T; ++t) {
            const vec by = all(scale * LOG2_E), less = all(shifts[t]);
            vec sum = {};
            for (int64_t panel = 0; panel < panels; ++panel)
                for (int v = 0; v < VECS; ++v) {
                    const vec share = power(load(scores_ + panel * apart + t * PANEL + v * W) * by - less);
                    const half_bits pairs = narrow(share);
                    std::memcpy(shares_ + t * SHARES + (panel * PANEL + v * W) / 2, &pairs, sizeof pairs);
                    sum += share;
                }
            some.total[t] = some.total[t] * factors[t] + sum_of(sum);
        }
        for (int64_t panel = 0; panel < panels_of(p_.value_size); ++panel)
            for (int64_t t = 0; t < T; ++t)
                for (int v = 0; v < VECS && factors[t] != 1.0f; ++v) {
                    float* to = some.mixed + panel * apart + t * PANEL + v * W;
                    store(to, load(to) * factors[t]);
                }
    }

    float scale_of_scores() const { return p_.cap == 0.0f ? p_.scale : p_.cap; }  // with a cap they are tanh(...)

    // What query t does not see to -infinity; scores that have a cap to tanh(scale * product / cap).
    void hide(const Some& some, int64_t t, int64_t first, int64_t count, int64_t panels) {
        const int64_t query = some.first + t, seen = std::clamp<int64_t>(seen_by(query) - first, 0, count);
        const int64_t hidden = std::clamp<int64_t>(seen_from(query) - first, 0, count);
        const auto place = [&](int64_t at) { return scores_ + (at / PANEL * some.count + t) * PANEL + at % PANEL; };
        const auto leave_out = [&](int64_t from, int64_t to) {
            for (int64_t at = from; at < to; ++at) *place(at) = -std::numeric_limits<float>::infinity();
        };
        leave_out(seen, panels * PANEL);
        leave_out(0, hidden);
        for (int64_t at = 0; p_.cap != 0.0f && at < panels * PANEL; at += W) {
            const vec own = load(place(at));
            store(place(at), own == all(-std::numeric_limits<float>::infinity())
                                 ? own : hyperbolic_tangent(own * (p_.scale / p_.cap)));
        }
    }

    void write(const Some& some, int64_t head) const {
        for (int64_t t = 0; t < some.count; ++t) {
            float* out = p_.out + ((some.first + t) * p_.heads + head) * p_.value_size;
            for (int64_t i = 0; i < p_.value_size; i += W) {
                const vec own = load(some.mixed + (i / PANEL * some.count + t) * PANEL + i % PANEL) / some.total[t];
                std::memcpy(out + i, &own, std::min<int64_t>(W, p_.value_size - i) * sizeof(float));
            }
        }
    }

    const Prompt& p_;
    const int64_t kv_head_;
    int64_t first_, last_;  // keys that some query sees
    std::vector<uint32_t> packed_, keys_, values_;
    std::vector<float> state_;
    std::vector<Some> some_;
    alignas(64) float scores_[MOST * (BLOCK_KEYS + PANEL)];
    alignas(64) uint32_t shares_[MOST * SHARES];  // pairs of neighbouring keys
};

}  // namespace

// As looped_attend_float32.
EXPORT void looped_attend_bfloat16(const Prompt* prompts, int64_t count, int64_t threads) {
    struct Part {
        const Prompt& prompt;
        int64_t kv_head, begin, end;
    };
    std::vector<Part> parts;
    for (const Prompt* p = prompts; p < prompts + count; ++p) {
        // Queries further down see more keys: parts of equal length would not be of equal work, so there are several
        // per thread, the long ones first.
        const int64_t total = p->queries * (p->heads / p->kv_heads), tasks = count * p->kv_heads;
        const int64_t wanted = std::max((total + TASK_QUERIES - 1) / TASK_QUERIES, (2 * threads + tasks - 1) / tasks);
        const int64_t cuts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, p->queries / MOST));
        for (int64_t part = cuts - 1; part >= 0; --part)
            for (int64_t head = 0; head < p->kv_heads; ++head)
                parts.push_back({*p, head, p->queries * part / cuts, p->queries * (part + 1) / cuts});
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < parts.size(); ++i)
        if (parts[i].begin < parts[i].end) Task(parts[i].prompt, parts[i].kv_head, parts[i].begin, parts[i].end).run();
}

#else

EXPORT void looped_attend_bfloat16(const Prompt*, int64_t, int64_t) {}

#endif

}  // namespace looped
