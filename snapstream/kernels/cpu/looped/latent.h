// Attention over rows of latents, absorbed: queries are taken to the space of the latents, meet them as the keys of one
// kv head whose values are their own first R numbers, and what comes back is expanded once per head. The meaning is
// ../../../models/latent.py.
//
// Rows are cut as in rows.h. Heads of a row are shared out in tiles, whose size depends on the batch: a head's result
// does not, since no sum crosses heads.
#pragma once
#include "attention.h"
#include "blocks.h"
#include "dots.h"

namespace looped {

constexpr float LATENT_EPS = 1e-6f;       // of both norms, whatever rms_norm_eps says
constexpr int64_t LATENTS_AT_ONCE = 32;   // of a row, a multiple of W: they stay in a near cache for all heads of a tile
constexpr int64_t ABSORBED_COLUMNS = 64;  // of a task, a multiple of W

class LatentWorker : protected Attention {
  protected:
    LatentWorker(Engine& engine, const Step& step, int index)
        : Attention(engine, step, index), l_(engine.model.latent), a_(engine.absorbed), size_(l_.rank + l_.rope_dim),
          head_(l_.nope_dim + l_.rope_dim) {}

    void norm_narrow(int64_t layer) {
        share(s_.batch, 1, [&](int64_t b) {
            const float *x = a_.narrow + b * l_.q_rank, *weight = l_.q_a_norm + layer * l_.q_rank;
            const float factor = norm_factor(x, l_.q_rank, LATENT_EPS);
            const Packed to(e_.packed, groups_, b, l_.q_rank);
            for (int64_t i = 0; i < l_.q_rank; ++i) to.put(i, x[i] * factor * weight[i]);
            to.end(l_.q_rank);
        });
    }

    // Queries to the space of the latents, and the new latents to their slots.
    void absorb(int64_t layer) {
        const int64_t blocks = (l_.rank + ABSORBED_COLUMNS - 1) / ABSORBED_COLUMNS;
        share(m_.heads * blocks + s_.batch, 1, [&](int64_t task) {
            if (task < m_.heads * blocks) absorb_block(layer, task / blocks, task % blocks);
            else store_latent(layer, task - m_.heads * blocks);
        });
    }

    void attend_latents(int64_t layer) {
        int64_t most = 1;
        for (int64_t b = 0; b < s_.batch; ++b) most = std::max(most, num_parts(b));
        const int64_t wanted = (2 * e_.team.size() + s_.batch * most - 1) / (s_.batch * most);  // tiles of a row
        const int64_t tile = std::max<int64_t>((m_.heads + wanted - 1) / wanted, MOST_DOTS);
        const int64_t tiles = (m_.heads + tile - 1) / tile;
        share(s_.batch * tiles * most, 1, [&](int64_t task) {
            const int64_t part = task % most, b = task / most / tiles, first = task / most % tiles * tile;
            if (part < num_parts(b)) attend_tile(layer, b, first, std::min(tile, m_.heads - first), part);
        });
    }

    // What was attended to the values of each head: packed [B, H U].
    void expand_values(int64_t layer) {
        const int64_t blocks = (l_.value_dim + W - 1) / W, cols = m_.heads * l_.value_dim;
        share(m_.heads * blocks, 1, [&](int64_t task) {
            const int64_t head = task / blocks, first = task % blocks * W;
            const int64_t count = std::min<int64_t>(W, l_.value_dim - first);
            const float* up = up_of(layer, head) + (l_.nope_dim + first) * l_.rank;
            for (int64_t b = 0; b < s_.batch; b += MOST_DOTS) {
                const int64_t tokens = std::min<int64_t>(MOST_DOTS, s_.batch - b);
                const float* mixed = a_.mixed + (b * m_.heads + head) * l_.rank;
                dots(tokens, mixed, m_.heads * l_.rank, up, count, l_.rank, scratch_, W);
                for (int64_t t = 0; t < tokens; ++t) {
                    const Packed to(e_.packed, groups_, b + t, cols);
                    for (int64_t i = 0; i < count; ++i) to.put(head * l_.value_dim + first + i, scratch_[t * W + i]);
                    if (task == m_.heads * blocks - 1) to.end(cols);
                }
            }
        });
    }

  private:
    const float* up_of(int64_t layer, int64_t head) const {
        return l_.up + (layer * m_.heads + head) * (l_.nope_dim + l_.value_dim) * l_.rank;
    }

    // x [P] turned in pairs of its halves.
    void turn_halves(const float* x, int64_t b, float* out) const {
        const int64_t half = l_.rope_dim / 2;
        const float* angle = e_.angles + b * m_.head_dim;
        for (int64_t i = 0; i < half; ++i) {
            out[i] = x[i] * angle[i] - x[half + i] * angle[half + i];
            out[half + i] = x[half + i] * angle[i] + x[i] * angle[half + i];
        }
    }

    void absorb_block(int64_t layer, int64_t head, int64_t block) {
        const int64_t first = block * ABSORBED_COLUMNS, columns = std::min(ABSORBED_COLUMNS, l_.rank - first);
        const int64_t stride = m_.heads * size_;
        const float* up = up_of(layer, head) + first;
        for (int64_t b = 0; b < s_.batch; b += MOST_DOTS) {
            const int64_t tokens = std::min<int64_t>(MOST_DOTS, s_.batch - b);
            float* out = a_.queries + b * stride + head * size_;
            for (int64_t t = 0; t < tokens; ++t) {
                const float* q = a_.wide + ((b + t) * m_.heads + head) * head_;
                for (int64_t i = 0; i < l_.nope_dim; ++i) scratch_[t * l_.nope_dim + i] = q[i] * l_.factor;
                if (block) continue;
                float* turned = out + t * stride + l_.rank;
                turn_halves(q + l_.nope_dim, b + t, turned);
                for (int64_t i = 0; i < l_.rope_dim; ++i) turned[i] *= l_.factor;
            }
            mix_rows(tokens, scratch_, l_.nope_dim, up, l_.rank, l_.nope_dim, columns, out + first, stride, false);
        }
    }

    char* row_of(int64_t layer, int64_t row) const {
        const RowForm form(e_.rows.format);
        return e_.rows.keys + (layer * e_.rows.num_rows + row) * e_.rows.slots * size_ * form.bytes;
    }

    float scale_of(int64_t layer, int64_t row) const {  // of rows in FP8
        return e_.rows.format == FP8 ? e_.rows.key_scales[layer * e_.rows.num_rows + row] : 1.0f;
    }

    void store_latent(int64_t layer, int64_t b) {
        const float *kept = a_.kept + b * size_, *weight = l_.c_norm + layer * l_.rank;
        const float factor = norm_factor(kept, l_.rank, LATENT_EPS);
        const RowForm form(e_.rows.format);
        for (int64_t i = 0; i < l_.rank; ++i) scratch_[i] = kept[i] * factor * weight[i];
        turn_halves(kept + l_.rank, b, scratch_ + l_.rank);
        const int64_t row = s_.rows[b];
        form.narrow(scratch_, size_, scale_of(layer, row), row_of(layer, row) + slot(b) * size_ * form.bytes);
    }

    void attend_tile(int64_t layer, int64_t b, int64_t first_head, int64_t count, int64_t part) {
        const Rows& rows = e_.rows;
        const RowForm form(rows.format);
        const int64_t row = s_.rows[b], begin = part * PART, end = std::min(begin + PART, length(b));
        const float* queries = a_.queries + (b * m_.heads + first_head) * size_;
        if (rows.queries && part == 0) {
            const int64_t kept = rows.next_position[row] % rows.kept_queries;
            const int64_t place = (layer * rows.num_rows + row) * rows.kept_queries + kept;
            std::memcpy(rows.queries + (place * m_.heads + first_head) * size_, queries, count * size_ * 4);
        }
        const auto place = [&](int64_t head, int64_t i) { return (b * m_.heads + first_head + head) * e_.max_parts + i; };
        const char* latents = row_of(layer, row);
        float *wide = scratch_, *scores = scratch_ + LATENTS_AT_ONCE * size_;
        const float scale = scale_of(layer, row), factor = scale / std::sqrt(static_cast<float>(size_));
        for (int64_t head = 0; head < count; ++head) {
            e_.part_peaks[place(head, part)] = -std::numeric_limits<float>::infinity();
            e_.part_totals[place(head, part)] = 0.0f;
            float* mixed = e_.part_mixed + place(head, part) * l_.rank;
            std::fill(mixed, mixed + l_.rank, 0.0f);
        }
        for (int64_t at = begin; at < end; at += LATENTS_AT_ONCE) {
            const int64_t n = std::min(LATENTS_AT_ONCE, end - at);
            const float* own = form.widened(latents + at * size_ * form.bytes, n * size_, wide);
            for (int64_t head = 0; head < count; head += MOST_DOTS) {
                const int64_t heads = std::min<int64_t>(MOST_DOTS, count - head);
                dots(heads, queries + head * size_, size_, own, n, size_, scores, LATENTS_AT_ONCE);
                for (int64_t h = 0; h < heads; ++h) {
                    float* line = scores + h * LATENTS_AT_ONCE;
                    const int64_t to = place(head + h, part);
                    for (int64_t j = 0; j < n; ++j) line[j] *= factor;
                    weigh(line, n, l_.rank, e_.part_peaks[to], e_.part_totals[to], e_.part_mixed + to * l_.rank);
                }
                float* mixed = e_.part_mixed + place(head, part) * l_.rank;
                mix_rows(heads, scores, LATENTS_AT_ONCE, own, size_, n, l_.rank, mixed, e_.max_parts * l_.rank, true);
            }
        }
        const int64_t parts = num_parts(b);
        std::atomic<int>& done = a_.parts_left[b * m_.heads + first_head];
        if (parts > 1 && done.fetch_add(1, std::memory_order_acq_rel) + 1 < parts) return;
        done.store(0, std::memory_order_relaxed);
        for (int64_t head = 0; head < count; ++head) {
            const int64_t from = place(head, 0);
            const Part found{e_.part_peaks + from, e_.part_totals + from, e_.part_mixed + from * l_.rank};
            merge_parts(found, parts, 1, l_.rank, scale, a_.mixed + (b * m_.heads + first_head + head) * l_.rank);
        }
    }

    const Latent& l_;
    const LatentBuffers& a_;
    const int64_t size_, head_;  // numbers of a latent, and of a projected head
};

// Floats that the tasks above keep by the way, of a member.
inline int64_t latent_scratch(const Model& model) {
    const Latent& l = model.latent;
    const int64_t attend = LATENTS_AT_ONCE * (l.rank + l.rope_dim + MOST_DOTS);
    return l.rank ? std::max({attend, MOST_DOTS * l.nope_dim, int64_t{MOST_DOTS * W}}) : 0;
}
inline int64_t mixture_scratch(const Model& model) {  // choice, scores of groups, two marks each; some scores
    return model.mixture.experts ? std::max<int64_t>(3 * model.mixture.experts, MOST_DOTS * W) : 0;
}

}  // namespace looped
