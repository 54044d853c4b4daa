// Attention of chunks of prompts in fp32, flash style: keys block by block, with the softmax corrected as larger scores
// turn up.
//
// The queries of all heads that share keys lie side by side in lanes, query by query, up to MOST_LANES of them to a pack.
// Keys and values are read where they are staged, a number at a time for all lanes: nothing of them is packed, scores lie
// as the next product wants them, and no sum crosses lanes. A task is some packs of one kv head, which use a block of keys
// and values while it is near.
// Invariant: blocks begin at multiples of BLOCK_KEYS, and what a query does not see adds zeros; so its result is the same
// bits however the prompt is cut into chunks, whatever it shares a call with, and by any number of threads.
#include "prompt_f32.h"

#include <limits>
#include <memory>
#include <vector>

#include "f32_tiles.h"

namespace looped {
namespace {

constexpr int64_t BLOCK_KEYS = 96;  // whose scores stay in the nearest cache; a multiple of the rows of all tiles
constexpr int64_t MOST_PACKS = 8;   // of a task
constexpr float NONE = -std::numeric_limits<float>::infinity();

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Task {
    const Prompt* prompt;
    int64_t kv_head, begin, end;  // lanes of that kv head: lane i is head i % shared of query i / shared
    int64_t work() const {
        return (end - begin) * (prompt->keys - prompt->queries + end * prompt->kv_heads / prompt->heads);
    }
};

// Up to MOST_LANES lanes that follow each other; lanes up to a whole vector repeat the last one.
struct Pack {
    int64_t begin, lanes;
    int vecs;
    int64_t all_see, some_see;                // keys: every lane the first ones, some lane no more
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
        for (int64_t first = 0; first < packs_.back().some_see; first += BLOCK_KEYS)
            for (const Pack& pack : packs_)
                if (pack.some_see > first) attend(pack, first);
        for (const Pack& pack : packs_) write(pack);
    }

  private:
    int64_t seen_by(int64_t lane) const { return p_->keys - p_->queries + lane / shared_ + 1; }

    void make_packs() {
        packs_.clear();
        float* memory = memory_.get();
        memory += (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64 / sizeof(float);
        for (int64_t begin = task_->begin; begin < task_->end; begin += MOST_LANES) {
            const int64_t lanes = std::min<int64_t>(MOST_LANES, task_->end - begin);
            const int vecs = static_cast<int>(divided_up(lanes, W)), width = vecs * W;
            const auto take = [&](int64_t rows) { return std::exchange(memory, memory + rows * width); };
            packs_.push_back({begin, lanes, vecs, seen_by(begin), seen_by(begin + lanes - 1), take(p_->size),
                              take(p_->value_size), take(1), take(1)});
            const Pack& pack = packs_.back();
            for (int lane = 0; lane < width; ++lane) {
                const int64_t own = begin + std::min<int64_t>(lane, lanes - 1);
                const int64_t query = own / shared_, head = task_->kv_head * shared_ + own % shared_;
                const float* q = p_->q + query * p_->q_token + head * p_->q_head;
                for (int64_t i = 0; i < p_->size; ++i) pack.queries[i * width + lane] = q[i];
            }
            std::fill(pack.mixed, pack.mixed + p_->value_size * width, 0.0f);
            std::fill(pack.peaks, pack.peaks + width, NONE);
            std::fill(pack.totals, pack.totals + width, 0.0f);
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
    void attend(const Pack& pack, int64_t first) {
        const int64_t count = std::min(BLOCK_KEYS, pack.some_see - first), after = first + BLOCK_KEYS;
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

    // Scores to shares of the lane's largest score; `factors` correct what was found before to that.
    template <int V>
    void soften(const Pack& pack, int64_t first, int64_t count, float* factors) {
        vec most[V], total[V] = {}, shift[V];
        UNROLL for (int v = 0; v < V; ++v) most[v] = all(NONE);
        const auto score = [&](int64_t key, int v) { return scores_ + (key * V + v) * W; };
        const int64_t whole = std::clamp<int64_t>(pack.all_see - first, 0, count);
        for (int64_t key = 0; key < whole; ++key)
            UNROLL for (int v = 0; v < V; ++v) most[v] = larger(load(score(key, v)), most[v]);
        for (int64_t key = whole; key < count; ++key) {
            // Lanes before this one do not see the key.
            const int64_t unseen = (first + key - (p_->keys - p_->queries)) * shared_ - pack.begin;
            std::fill_n(score(key, 0), std::clamp<int64_t>(unseen, 0, V * W), NONE);
            UNROLL for (int v = 0; v < V; ++v) most[v] = larger(load(score(key, v)), most[v]);
        }
        const vec scale = all(p_->scale * 1.44269504088896341f);
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
    const int64_t members = std::clamp<int64_t>(tasks.size(), 1, threads);
#pragma omp parallel num_threads(members) if (members > 1)
    {
        Worker worker(prompts->size, prompts->value_size);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size(); ++i) worker.run(tasks[i]);
    }
}

}  // namespace looped
