// A decode step, stage by stage, on every member of the team. A stage hands out tasks whose results do not depend on
// who does them; a barrier ends it. engine.h has the buffers; worker.h, products.h and attention.h the stages of a dense
// layer, over panels.h and rows.h; mixture.h and latent.h what layers with experts and with latents do instead.
#pragma once
#include <limits>

#include "mixture.h"

namespace looped {

class Member : private MixtureWorker {
  public:
    Member(Engine& engine, const Step& step, int index) : MixtureWorker(engine, step, index) {}

    void run() {
        for (int64_t stage = s_.first; stage < s_.last; ++stage) {
            if (is_empty(stage)) continue;
            if (stage == 0) embed();
            else if (stage <= m_.layers * layer_stages(m_))
                layer_stage((stage - 1) / layer_stages(m_), (stage - 1) % layer_stages(m_));
            else if (stage == num_stages(m_) - 2) norm(m_.final_norm, m_.head, AFTER_MLP);
            else head();
            clear_next();
            if (s_.touch_bytes) touch(stage + 1);
            wait(stage);
            if (e_.meeting.has_failed) return;
            ++turn_;
        }
        if (me_ == 0 && s_.tokens && s_.last == num_stages(m_)) choose();
    }

  private:
    // Whether a stage has no task, for any member: then nobody waits for it.
    bool is_empty(int64_t stage) const {
        if (stage == 0 || stage > m_.layers * layer_stages(m_)) return false;
        const int64_t layer = (stage - 1) / layer_stages(m_), own = (stage - 1) % layer_stages(m_) - attention_stages(m_);
        return is_mixture(layer) ? is_mixture_stage_empty(own) : own > 3 || (own == 2 && activates_at_once());
    }

    void layer_stage(int64_t layer, int64_t stage) {
        const int64_t attention = attention_stages(m_);
        if (stage < attention) return m_.latent.rank ? latent_stage(layer, stage) : attention_stage(layer, stage);
        return is_mixture(layer) ? mixture_stage(layer, stage - attention) : mlp_stage(layer, stage - attention);
    }

    void attention_stage(int64_t layer, int64_t stage) {
        switch (stage) {
            case 0: return norm(m_.input_norm + layer * m_.hidden, m_.qkv, AFTER_MLP);
            case 1: return project(m_.qkv, layer, m_.qkv_bias, e_.heads);
            case 2: return attend(layer);
            default: return add(m_.o, layer, m_.o_bias, AFTER_ATTENTION);
        }
    }

    void latent_stage(int64_t layer, int64_t stage) {
        const Latent& own = m_.latent;
        if (!own.q_rank && stage > 2) stage += 2;
        switch (stage) {
            case 0: return norm(m_.input_norm + layer * m_.hidden, own.kv_a, AFTER_MLP);
            case 1: return project(own.kv_a, layer, nullptr, e_.absorbed.kept);
            case 2: return own.q_rank ? project(own.q_a, layer, nullptr, e_.absorbed.narrow)
                                      : project(own.q, layer, nullptr, e_.absorbed.wide);
            case 3: return norm_narrow(layer);
            case 4: return project(own.q, layer, nullptr, e_.absorbed.wide);
            case 5: return absorb(layer);
            case 6: return attend_latents(layer);
            case 7: return expand_values(layer);
            default: return add(m_.o, layer, nullptr, AFTER_ATTENTION);
        }
    }

    void mlp_stage(int64_t layer, int64_t stage) {
        switch (stage) {
            case 0: return norm(m_.post_norm + layer * m_.hidden, m_.gate_up, AFTER_ATTENTION);
            case 1: return expand_tokens(layer);
            case 2: return activate();
            default: return add(m_.down, layer, m_.down_bias, AFTER_MLP, activates_at_once() ? e_.gate_up : e_.packed);
        }
    }

    // -- other threads, other ranks

    void wait(int64_t stage) {
        if (e_.meeting.is_alone() || !ends_with_all(stage)) return e_.team.barrier();
        e_.team.barrier([&] {
            if (stage == num_stages(m_) - 1 && s_.tokens) {
                Likeliest* own = e_.meeting.likeliest(e_.meeting.rank);
                for (int64_t b = 0; b < s_.batch; ++b) own[b] = likeliest_here(b);
            }
            e_.meeting.meet();
        });
    }

    // Whether the next stage reads what all ranks have made in this one.
    bool ends_with_all(int64_t stage) const {
        if (stage == 0 || stage == num_stages(m_) - 1) return true;
        if (stage == num_stages(m_) - 2) return false;
        const int64_t layer = (stage - 1) / layer_stages(m_), own = (stage - 1) % layer_stages(m_);
        return own == attention_stages(m_) - 1 || own == attention_stages(m_) + (is_mixture(layer) ? 5 : 3);
    }

    // -- products

    // Asks for the first bytes of the member's share of the weights of a stage, before it waits for the others.
    void touch(int64_t stage) {
        if (m_.latent.rank || m_.mixture.experts) return;  // which of them, is known too late to be worth it
        const Stack* stack = nullptr;
        const int64_t layer = (stage - 1) / layer_stages(m_);
        if (stage == num_stages(m_) - 1) stack = &m_.head;
        else if (stage < num_stages(m_) - 2) {
            const int64_t own = (stage - 1) % layer_stages(m_);
            stack = own == 1 ? &m_.qkv : own == 3 ? &m_.o : own == 5 ? &m_.gate_up : own == 7 ? &m_.down : nullptr;
        }
        if (!stack) return;
        const int64_t panels = (stack->rows + PANEL - 1) / PANEL, team = e_.team.size();
        const char* data = stack->data + (stack == &m_.head ? 0 : layer * stack->layer_bytes);
        const int64_t begin = panels * me_ / team * stack->panel_bytes;
        const int64_t end = panels * (me_ + 1) / team * stack->panel_bytes;
        for (int64_t i = begin; i < std::min(end, begin + s_.touch_bytes); i += 64) __builtin_prefetch(data + i);
    }

    void head() {
        Likeliest* best = &e_.likeliest[me_ * e_.max_batch];
        const int64_t before = e_.meeting.rank * m_.head.rows;  // tokens of the ranks before this one
        for (int64_t b = 0; b < s_.batch; ++b) best[b] = {-std::numeric_limits<float>::infinity(), true, 0};
        product(m_.head, 0, e_.packed, [&](int64_t line, int64_t lines, const float* sums) {
            const int64_t first = before + line, count = std::min(lines, m_.vocab - first);  // then come lines of no token
            if (count <= 0) return;
            for (int64_t b = 0; b < s_.batch; ++b) {
                const float* own = sums + b * PANEL;
                std::memcpy(s_.logits + b * m_.vocab + first, own, count * 4);
                if (!s_.tokens) continue;
                bool is_better = false, is_number = true;
                for (int64_t i = 0; i < count; ++i) {
                    is_better |= own[i] >= best[b].score;
                    is_number &= own[i] == own[i];
                }
                best[b].is_finite &= is_number;
                if (is_better) look(best[b], own, first, count);
            }
        });
    }

    static void look(Likeliest& best, const float* scores, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; ++i)
            if (scores[i] > best.score || (scores[i] == best.score && first + i < best.token))
                best = {scores[i], best.is_finite, first + i};
    }

    static void merge(Likeliest& best, const Likeliest& other) {
        best.is_finite &= other.is_finite;
        if (other.score > best.score || (other.score == best.score && other.token < best.token)) {
            best.score = other.score;
            best.token = other.token;
        }
    }

    Likeliest likeliest_here(int64_t b) const {  // of this rank
        Likeliest best = e_.likeliest[b];
        for (int i = 1; i < e_.team.size(); ++i) merge(best, e_.likeliest[i * e_.max_batch + b]);
        return best;
    }

    // Greedy sampling as ../../../layers/sampler.py means it: the lowest id among equals; and the counters of the rows.
    void choose() {
        for (int64_t b = 0; b < s_.batch; ++b) {
            Likeliest best = likeliest_here(b);
            for (int64_t rank = 0; rank < e_.meeting.size && e_.meeting.waits; ++rank)
                merge(best, e_.meeting.likeliest(rank)[b]);
            const bool is_finite = best.is_finite && std::isfinite(best.score);
            s_.tokens[b] = is_finite ? best.token : -1;
            const int64_t row = s_.rows[b];
            e_.rows.last_token[row] = is_finite ? best.token : 0;
            ++e_.rows.num_tokens[row];
            ++e_.rows.next_position[row];
            ++e_.rows.num_sampled[row];
        }
    }

    // -- what stands between products

    void embed() {
        share(s_.batch, 1, [&](int64_t b) {
            const int64_t row = s_.rows[b];
            embed_token(e_.rows.last_token[row], b * m_.hidden);
            turn(e_.rows.next_position[row], e_.angles + b * m_.head_dim);
        });
    }

    // The rank that has the token's line lays it down, the others zeros.
    void embed_token(int64_t token, int64_t at) {
        float* x = e_.residual + at;
        if (e_.meeting.is_alone()) return copy_row(m_.embed, token, x);
        float* part = own_part(AFTER_MLP) + at;
        const int64_t line = token - e_.meeting.rank * m_.embed.rows;
        std::fill(x, x + m_.hidden, 0.0f);
        if (line >= 0 && line < m_.embed.rows) return copy_row(m_.embed, line, part);
        std::fill(part, part + m_.hidden, 0.0f);
    }

    // Cosines and sines of a position, as ../../../layers/rope.py makes them.
    void turn(int64_t position, float* out) {
        const int64_t half = (m_.latent.rank ? m_.latent.rope_dim : m_.head_dim) / 2;
        float base = 0.0f;
        if (m_.dynamic_original) {
            const float length = static_cast<float>(std::max(position + 1, m_.dynamic_original));
            const float growth = m_.dynamic_factor * length / m_.dynamic_original - (m_.dynamic_factor - 1.0f);
            base = m_.dynamic_theta * std::pow(growth, static_cast<float>(m_.rotated) / (m_.rotated - 2));
        }
        for (int64_t i = 0; i < half; ++i) {
            if (i >= m_.rotated / 2) {
                out[i] = 1.0f;
                out[half + i] = 0.0f;
                continue;
            }
            const float share = 2.0f * i / m_.rotated;
            const float frequency = m_.dynamic_original ? 1.0f / std::pow(base, share) : m_.frequencies[i];
            const float angle = static_cast<float>(position) * frequency;
            out[i] = std::cos(angle) * m_.rope_scale;
            out[half + i] = std::sin(angle) * m_.rope_scale;
        }
    }
};

}  // namespace looped
