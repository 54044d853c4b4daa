// A member of the team at work on one step: what all its stages have in common.
#pragma once
#include "codes.h"
#include "engine.h"

namespace looped {

class Worker {
  protected:
    Worker(Engine& engine, const Step& step, int index)
        : e_(engine), m_(engine.model), s_(step), me_(index), groups_(step.batch), scratch_(engine.scratch[index]) {}

    template <class Work>
    void share(int64_t count, int64_t grain, Work work) {
        int64_t begin, end;
        while (e_.tasks.take(turn_, me_, count, grain, begin, end))
            for (int64_t i = begin; i < end; ++i) work(i);
    }

    void clear_next() { e_.tasks.clear_next(turn_, me_); }

    // Within a stage: all members have done what came before.
    void end_part() {
        clear_next();
        e_.team.barrier();
        ++turn_;
    }

    // Of token b of a batch: what the ranks have laid down is added to the residual stream, by who reads it next.
    void settle(Turn turn, int64_t b) {
        const Meeting& meeting = e_.meeting;
        if (meeting.is_alone()) return;
        const int64_t size = m_.hidden, first = b * size;
        float* x = e_.residual + first;
        const auto add = [&](int64_t begin, int64_t count) {
            vec sum = load_some(meeting.part(turn, 0) + first + begin, count);
            for (int64_t rank = 1; rank < meeting.size; ++rank)
                sum += load_some(meeting.part(turn, rank) + first + begin, count);
            return load_some(x + begin, count) + sum;
        };
        int64_t i = 0;
        for (; i + W <= size; i += W) store(x + i, add(i, W));
        float rest[W];
        store(rest, add(i, size - i));
        std::copy(rest, rest + size - i, x + i);
    }

    // Where this rank lays its part of a sum, [B, D].
    float* own_part(Turn turn) const { return e_.meeting.part(turn, e_.meeting.rank); }

    static float norm_factor(const float* x, int64_t count, float eps) {
        vec sum = {};
        int64_t i = 0;
        for (; i + W <= count; i += W) sum += load(x + i) * load(x + i);
        const vec rest = load_some(x + i, count - i);
        return 1.0f / std::sqrt(sum_of(sum + rest * rest) / static_cast<float>(count) + eps);
    }

    Engine& e_;
    const Model& m_;
    const Step& s_;
    const int me_;
    const Groups groups_;
    float* scratch_;
    int64_t turn_ = 0;
};

}  // namespace looped
