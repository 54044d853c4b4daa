// Attention of chunks of prompts in fp32, flash style: keys block by block, with the softmax corrected as larger scores
// turn up.
//
// The queries of all heads that share keys lie side by side in lanes, query by query, up to MOST_LANES of them to a
// pack. Keys and values are read where they are staged, a number at a time for all lanes: nothing of them is packed,
// scores lie as the next product reads them, and no sum crosses lanes. A task is some packs of one kv head, which use
// a block of keys and values while it is near. Invariant: a lane's sum is taken from the first step to the last, in
// one chain, whatever the other lanes and rows are; blocks begin at multiples of BLOCK_KEYS, and what a query does
// not see adds zeros. So its result is bitwise equal however the prompt is cut into chunks, whatever shares the call,
// and on any number of threads.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "prompt.h"
#include "simd.h"

namespace looped {

namespace {

// -- tiles: some rows of keys or values, as they lie in memory, times queries that lie side by side in lanes

#if ISA == 512 || defined(__aarch64__)
constexpr int WIDEST = 4;  // vectors of queries of a tile, by the number of registers
#else
constexpr int WIDEST = 2;
#endif
constexpr int MOST_LANES = WIDEST * W;

// Rows of a tile so many vectors wide: as many as there are registers for their sums, and pointers.
constexpr int tallest(int vecs) { return vecs == WIDEST ? 6 : vecs == 1 ? 12 : 8; }

// a b + c, in one instruction where there is one: left to the compiler, a sum would depend on the tile it is in.
INLINE vec fused(vec a, vec b, vec c) {
#if ISA == 512
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif ISA == 256
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    vec out;
    UNROLL for (int i = 0; i < W; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
#else
    return a * b + c;
#endif
}

INLINE vec larger(vec a, vec b) {  // b where one is no number
#if ISA == 512
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif ISA == 256
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x of x up to 0, with a relative error below 1e-7: 1 of 0, 0 where that is no normal number, NaN of NaN.
INLINE vec power_of_two(vec x) {
    const auto of_fraction = [](vec f) {  // 2^f for 0 <= f <= 1
        vec p = all(2.17022549e-4f);
        p = fused(p, f, all(1.24396873e-3f));
        p = fused(p, f, all(9.67884064e-3f));
        p = fused(p, f, all(5.54833412e-2f));
        p = fused(p, f, all(0.24022983f));
        p = fused(p, f, all(0.693147004f));
        return fused(p, f, all(1.0f));
    };
#if ISA == 512
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const vec p = of_fraction((vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    return (vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);  // times 2 to the whole number below x
#else
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded number in the last bits
    const vec shifted = (x - 0.5f) + magic;
    const ints whole = (ints)shifted - (ints)magic;
    const vec out = of_fraction(x - (shifted - magic)) * (vec)((whole + 127) << 23);
    return x < all(-125.0f) ? vec{} : out;
#endif
}

// Step d of row i of a tile is from[i * stride + d] of KEYS, from[d * stride + i] of VALUES.
enum Side { KEYS, VALUES };

// sums [R][V W]: R rows times lanes [depth][V W]. Of KEYS they are written, of VALUES added to what is there times
// `factor` [V W].
template <Side SIDE, int R, int V>
void lane_tile(const float* from, int64_t stride, const float* lanes, int64_t depth, const float* factor, float* sums) {
    vec acc[R][V];
    UNROLL for (int v = 0; v < V; ++v) {
        if constexpr (SIDE == VALUES) {
            const vec own = load(factor + v * W);
            UNROLL for (int i = 0; i < R; ++i) acc[i][v] = load(sums + (i * V + v) * W) * own;
        } else {
            UNROLL for (int i = 0; i < R; ++i) acc[i][v] = vec{};
        }
    }
    for (int64_t d = 0; d < depth; ++d) {
        vec own[V];
        UNROLL for (int v = 0; v < V; ++v) own[v] = load(lanes + v * W);
        UNROLL for (int i = 0; i < R; ++i) {
            const vec number = all(SIDE == KEYS ? from[i * stride + d] : from[i]);
            UNROLL for (int v = 0; v < V; ++v) acc[i][v] = fused(own[v], number, acc[i][v]);
        }
        lanes += V * W;
        if constexpr (SIDE == VALUES) from += stride;
    }
    UNROLL for (int i = 0; i < R; ++i)
        UNROLL for (int v = 0; v < V; ++v) store(sums + (i * V + v) * W, acc[i][v]);
}

using LaneTile = void (*)(const float*, int64_t, const float*, int64_t, const float*, float*);

template <Side SIDE, int V, int... R>
INLINE LaneTile lane_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr LaneTile tiles[] = {lane_tile<SIDE, R + 1, V>...};
    return tiles[rows - 1];
}

// Rows of keys or values, `stride` numbers from one to the next.
struct Rows32 {
    const float* from;
    int64_t stride, count, size;
};

// Tiles of all rows one after the other: of VALUES a row is one of their numbers, and `depth` is the count. Meanwhile
// `next` are asked for, so that memory never waits for arithmetic.
template <Side SIDE, int V>
void lane_product(const Rows32& own, const Rows32& next, const float* lanes, const float* factor, float* sums) {
    constexpr int MOST_ROWS = tallest(V);
    const int64_t rows = SIDE == KEYS ? own.count : own.size, depth = SIDE == KEYS ? own.size : own.count;
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        const int64_t count = std::min<int64_t>(MOST_ROWS, rows - first);
        for (int64_t ahead = next.count * first / rows; ahead < next.count * (first + count) / rows; ++ahead)
            for (int64_t i = 0; i < next.size; i += 16) __builtin_prefetch(next.from + ahead * next.stride + i);
        const LaneTile tile = lane_tile_of<SIDE, V>(count, std::make_integer_sequence<int, MOST_ROWS>{});
        tile(own.from + first * (SIDE == KEYS ? own.stride : 1), own.stride, lanes, depth, factor,
             sums + first * V * W);
    }
}

}  // namespace

namespace {

constexpr int64_t BLOCK_KEYS = 96;  // whose scores stay in the nearest cache; a multiple of the rows of all tiles
constexpr int64_t MOST_PACKS = 8;   // of a task
constexpr float NONE = -std::numeric_limits<float>::infinity(), LOG2_E = 1.44269504088896341f;

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Task {
    const Prompt* prompt;
    int64_t kv_head, begin, end;  // lanes of that kv head: lane i is head i % shared of query i / shared
    int64_t work() const {
        const int64_t shared = prompt->heads / prompt->kv_heads, seen = prompt->keys - prompt->queries + end / shared;
        const int64_t in_windows = prompt->window ? prompt->window + (end - begin) / shared : seen;
        return (end - begin) * std::min(seen, in_windows);
    }
};

// Up to MOST_LANES lanes that follow each other; lanes up to a whole vector repeat the last one.
struct Pack {
    int64_t begin, lanes;
    int vecs;
    int64_t all_see, some_see;                // where the keys end that every lane sees, that some lane sees
    int64_t all_from, some_from;              // where they begin, as windows have it
    float *queries, *mixed, *peaks, *totals;  // [E][V W], [U][V W], [V W], [V W]
};

// What a thread needs for any of the tasks.
class Worker {
  public:
    Worker(int64_t size, int64_t value_size)
        : memory_(new float[MOST_PACKS * (size + value_size + 2) * MOST_LANES + 16]) {}

    void run(const Task& task) {
        task_ = &task, p_ = task.prompt, shared_ = p_->heads / p_->kv_heads;
        make_packs();
        const int64_t begin = packs_.front().some_from / BLOCK_KEYS * BLOCK_KEYS;
        for (int64_t first = begin; first < packs_.back().some_see; first += BLOCK_KEYS)
            for (const Pack& pack : packs_)
                if (pack.some_see > first && pack.some_from < first + BLOCK_KEYS) attend(pack, first);
        for (const Pack& pack : packs_) write(pack);
    }

  private:
    int64_t seen_by(int64_t lane) const { return p_->keys - p_->queries + lane / shared_ + 1; }
    int64_t seen_from(int64_t lane) const { return p_->window ? std::max<int64_t>(seen_by(lane) - p_->window, 0) : 0; }

    void make_packs() {
        packs_.clear();
        float* memory = memory_.get();
        memory += (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64 / sizeof(float);
        for (int64_t begin = task_->begin; begin < task_->end; begin += MOST_LANES) {
            const int64_t lanes = std::min<int64_t>(MOST_LANES, task_->end - begin);
            const int vecs = static_cast<int>(divided_up(lanes, W)), width = vecs * W;
            const auto take = [&](int64_t rows) { return std::exchange(memory, memory + rows * width); };
            const int64_t last = begin + lanes - 1;
            packs_.push_back({begin, lanes, vecs, seen_by(begin), seen_by(last), seen_from(last), seen_from(begin),
                              take(p_->size), take(p_->value_size), take(1), take(1)});
            const Pack& pack = packs_.back();
            for (int lane = 0; lane < width; ++lane) {
                const int64_t own = begin + std::min<int64_t>(lane, lanes - 1);
                const int64_t query = own / shared_, head = task_->kv_head * shared_ + own % shared_;
                const float* q = p_->q + query * p_->q_token + head * p_->q_head;
                for (int64_t i = 0; i < p_->size; ++i) pack.queries[i * width + lane] = q[i];
            }
            std::fill(pack.mixed, pack.mixed + p_->value_size * width, 0.0f);
            for (int lane = 0; lane < width; ++lane) {
                const int64_t own = begin + std::min<int64_t>(lane, lanes - 1);
                const float* sink = p_->sinks ? p_->sinks + task_->kv_head * shared_ + own % shared_ : nullptr;
                pack.peaks[lane] = sink ? *sink * LOG2_E : NONE;
                pack.totals[lane] = sink ? 1.0f : 0.0f;
            }
        }
    }

    // To a block that begins at key `first`.
    void attend(const Pack& pack, int64_t first) {
        switch (pack.vecs) {
            case 1: return attend<1>(pack, first);
            case 2: return attend<2>(pack, first);
            case 3: if constexpr (WIDEST > 2) return attend<3>(pack, first); break;
            case 4: if constexpr (WIDEST > 3) return attend<4>(pack, first); break;
        }
    }

    // The first pack asks for the values of the block, the last for the keys of the next one.
    template <int V>
    void attend(const Pack& pack, int64_t block) {
        const int64_t after = block + BLOCK_KEYS, first = std::max(block, pack.some_from);
        const int64_t count = std::min(after, pack.some_see) - first;
        const bool is_first = &pack == &packs_.front(), is_last = &pack == &packs_.back();
        alignas(64) float factors[V * W];
        lane_product<KEYS, V>(keys(first, count), values(first, is_first ? count : 0), pack.queries, nullptr, scores_);
        soften<V>(pack, first, count, factors);
        const int64_t left = is_last ? std::clamp<int64_t>(pack.some_see - after, 0, BLOCK_KEYS) : 0;
        lane_product<VALUES, V>(values(first, count), keys(after, left), scores_, factors, pack.mixed);
    }

    Rows32 keys(int64_t first, int64_t count) const {
        return {p_->k + task_->kv_head * p_->k_head + first * p_->k_token, p_->k_token, count, p_->size};
    }
    Rows32 values(int64_t first, int64_t count) const {
        return {p_->v + task_->kv_head * p_->v_head + first * p_->v_token, p_->v_token, count, p_->value_size};
    }

    // Products to tanh(scale * product / cap), which times the cap are the scores; what is hidden stays so.
    template <int V>
    void cap(int64_t count) {
        const float scale = p_->scale / p_->cap;
        for (float* at = scores_; at < scores_ + count * V * W; at += W) {
            const vec own = load(at);
            store(at, own == all(NONE) ? own : hyperbolic_tangent(own * scale));
        }
    }

    // Scores to shares of the lane's largest score; `factors` correct what was found before to that.
    template <int V>
    void soften(const Pack& pack, int64_t first, int64_t count, float* factors) {
        vec most[V], total[V] = {}, shift[V];
        UNROLL for (int v = 0; v < V; ++v) most[v] = all(NONE);
        const auto score = [&](int64_t key, int v) { return scores_ + (key * V + v) * W; };
        const int64_t whole = std::clamp<int64_t>(pack.all_see - first, 0, count);
        const int64_t early = std::clamp<int64_t>(pack.all_from - first, 0, whole);
        const auto hide = [&](int64_t begin, int64_t end) {
            for (int64_t key = begin; key < end; ++key) {
                // Lanes before `unseen` come before the key; from `left` on it is outside of their windows.
                const int64_t unseen = (first + key - (p_->keys - p_->queries)) * shared_ - pack.begin;
                const int64_t left = p_->window ? unseen + p_->window * shared_ : V * W;
                std::fill(score(key, 0), score(key, 0) + std::clamp<int64_t>(unseen, 0, V * W), NONE);
                std::fill(score(key, 0) + std::clamp<int64_t>(left, 0, V * W), score(key, V), NONE);
            }
        };
        hide(0, early);
        hide(whole, count);
        if (p_->cap != 0.0f) cap<V>(count);
        for (int64_t key = 0; key < count; ++key)
            UNROLL for (int v = 0; v < V; ++v) most[v] = larger(load(score(key, v)), most[v]);
        const vec scale = all((p_->cap == 0.0f ? p_->scale : p_->cap) * LOG2_E);
        UNROLL for (int v = 0; v < V; ++v) {
            // Peaks are kept times the scale: of one that stays, the factor is 1 to the bit.
            const vec before = load(pack.peaks + v * W), peak = larger(most[v] * scale, before);
            shift[v] = peak == all(NONE) ? vec{} : peak;
            store(pack.peaks + v * W, peak);
            store(factors + v * W, power_of_two(before - shift[v]));
        }
        for (int64_t key = 0; key < count; ++key)
            UNROLL for (int v = 0; v < V; ++v) {
                const vec share = power_of_two(fused(load(score(key, v)), scale, -shift[v]));
                store(score(key, v), share);
                total[v] += share;
            }
        UNROLL for (int v = 0; v < V; ++v) {
            float* own = pack.totals + v * W;
            store(own, fused(load(own), load(factors + v * W), total[v]));
        }
    }

    void write(const Pack& pack) const {
        const int width = pack.vecs * W;
        for (int64_t i = 0; i < p_->value_size; ++i)
            for (int v = 0; v < width; v += W)
                store(pack.mixed + i * width + v, load(pack.mixed + i * width + v) / load(pack.totals + v));
        for (int64_t lane = 0; lane < pack.lanes; ++lane) {
            const int64_t own = pack.begin + lane, head = task_->kv_head * shared_ + own % shared_;
            float* out = p_->out + (own / shared_ * p_->heads + head) * p_->value_size;
            for (int64_t i = 0; i < p_->value_size; ++i) out[i] = pack.mixed[i * width + lane];
        }
    }

    const std::unique_ptr<float[]> memory_;
    const Task* task_ = nullptr;
    const Prompt* p_ = nullptr;
    int64_t shared_ = 1;  // query heads of a kv head
    std::vector<Pack> packs_;
    alignas(64) float scores_[BLOCK_KEYS * MOST_LANES];
};

// Tasks of nearly equal numbers of packs, the most work first; as many that each thread gets several.
std::vector<Task> tasks_of(const Prompt* prompts, int64_t count, int64_t threads) {
    int64_t packs = 0;
    for (const Prompt* p = prompts; p < prompts + count; ++p)
        packs += p->kv_heads * divided_up(p->queries * (p->heads / p->kv_heads), MOST_LANES);
    const int64_t most = threads == 1 ? MOST_PACKS : std::clamp<int64_t>(packs / (4 * threads), 1, MOST_PACKS);
    std::vector<Task> tasks;
    for (const Prompt* p = prompts; p < prompts + count; ++p) {
        const int64_t lanes = p->queries * (p->heads / p->kv_heads), own = divided_up(lanes, MOST_LANES);
        const int64_t parts = divided_up(own, most);
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t head = 0; head < p->kv_heads; ++head)
                tasks.push_back({p, head, own * part / parts * MOST_LANES,
                                 std::min(lanes, own * (part + 1) / parts * MOST_LANES)});
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work() > b.work(); });
    return tasks;
}

}  // namespace

void attend_prompts_f32(const Prompt* prompts, int64_t count, int64_t threads) {
    const std::vector<Task> tasks = tasks_of(prompts, count, threads);
    const int64_t used = std::clamp<int64_t>(tasks.size(), 1, threads);
#pragma omp parallel num_threads(used) if (used > 1)
    {
        Worker worker(prompts->size, prompts->value_size);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size(); ++i) worker.run(tasks[i]);
    }
}

}  // namespace looped
