// The stage of a step that attends.
#pragma once
#include "products.h"
#include "rows.h"

namespace looped {

class Attention : protected ProductWorker {
  protected:
    Attention(Engine& engine, const Step& step, int index) : ProductWorker(engine, step, index) {}

    void attend(int64_t layer) {
        int64_t most = 1;
        for (int64_t b = 0; b < s_.batch; ++b)
            for (int64_t head = 0; head < m_.kv_heads; ++head) most = std::max(most, region(layer, b, head).parts());
        share(s_.batch * m_.kv_heads * most, 1, [&](int64_t task) {
            const int64_t part = task % most, head = task / most, b = head / m_.kv_heads;
            const Region own = region(layer, b, head % m_.kv_heads);
            if (part < own.parts()) attend_task(layer, b, head % m_.kv_heads, part, own);
        });
    }

    struct Region {  // the slots of a kv head of a row: the first of them, those that are seen, the new token's
        int64_t first, length, slot;
        int64_t parts() const { return (length + PART - 1) / PART; }
    };

    Region region(int64_t layer, int64_t b, int64_t kv_head) const {  // ../../../cache/layout.py, head_rows.py
        const Rows& rows = e_.rows;
        const int64_t row = s_.rows[b], head = layer * m_.kv_heads + kv_head;
        int64_t token = rows.num_tokens[row], start = rows.ring_start[row], capacity = rows.capacity[row];
        int64_t first = ((layer * rows.num_rows + row) * m_.kv_heads + kv_head) * rows.slots;
        if (rows.head_starts) {
            first = row * rows.row_slots + rows.head_starts[head];
            const int64_t place = (layer * rows.num_rows + row) * m_.kv_heads + kv_head;
            const int64_t behind = rows.head_behind ? rows.head_behind[place] : 0;
            start = behind ? rows.head_ends[head] : std::min(start, rows.head_ends[head]);
            token -= behind;
            capacity = rows.head_ends[head] + rows.ring;
        }
        const int64_t turn = token < start ? 0 : (token - start) % std::max<int64_t>(capacity - start, 1);
        return {first, std::min(token + 1, capacity), token < start ? token : start + turn};
    }

    // Of a row whose heads are all alike.
    int64_t length(int64_t b) const { return region(0, b, 0).length; }
    int64_t num_parts(int64_t b) const { return region(0, b, 0).parts(); }
    int64_t slot(int64_t b) const { return region(0, b, 0).slot; }

  private:
    // One head normed and turned: out [E].
    void turned(const float* head, const float* weight, const float* angle, float* out) const {
        const int64_t size = m_.head_dim, half = size / 2;
        const float factor = weight ? norm_factor(head, size, m_.eps) : 1.0f;
        for (int64_t i = 0; i < half; ++i) {
            const float low = weight ? head[i] * factor * weight[i] : head[i];
            const float high = weight ? head[half + i] * factor * weight[half + i] : head[half + i];
            out[i] = low * angle[i] - high * angle[half + i];
            out[half + i] = high * angle[i] + low * angle[half + i];
        }
    }

    StoredHead stored_head(int64_t first) const {  // from that slot of all rows on
        const Rows& rows = e_.rows;
        const RowForm form(rows.format);
        const int64_t bytes = first * m_.head_dim * form.bytes;
        const auto scales = [&](float* all) { return rows.format == I8 ? all + first : nullptr; };
        return {form, m_.head_dim, rows.keys + bytes, rows.values + bytes, scales(rows.key_scales),
                scales(rows.value_scales)};
    }

    void attend_task(int64_t layer, int64_t b, int64_t kv_head, int64_t part, const Region& seen) {
        const Rows& rows = e_.rows;
        const int64_t size = m_.head_dim, group = m_.heads / m_.kv_heads, row = s_.rows[b];
        const int64_t head = (layer * rows.num_rows + row) * m_.kv_heads + kv_head;
        const StoredHead stored = stored_head(seen.first);
        const float k_scale = rows.format == FP8 ? rows.key_scales[head] : 1.0f;
        const float v_scale = rows.format == FP8 ? rows.value_scales[head] : 1.0f;
        const float *own = e_.heads + b * (m_.heads + 2 * m_.kv_heads) * size, *angle = e_.angles + b * size;
        float *q = scratch_, *rest = scratch_ + group * size;
        const float* q_norm = m_.q_norm ? m_.q_norm + layer * size : nullptr;
        const float* k_norm = m_.k_norm ? m_.k_norm + layer * size : nullptr;
        for (int64_t r = 0; r < group; ++r) turned(own + (kv_head * group + r) * size, q_norm, angle, q + r * size);
        if (rows.queries && part == 0) {
            const int64_t kept = rows.next_position[row] % rows.kept_queries;
            const int64_t place = (layer * rows.num_rows + row) * rows.kept_queries + kept;
            std::memcpy(rows.queries + (place * m_.heads + kv_head * group) * size, q, group * size * 4);
        }
        const float factor = k_scale * stored.form.unit() / std::sqrt(static_cast<float>(size));
        for (int64_t i = 0; i < group * size; ++i) q[i] *= factor;
        const int64_t at = seen.slot, begin = part * PART, end = std::min(begin + PART, seen.length);
        if (begin <= at && at < end) {
            turned(own + (m_.heads + kv_head) * size, k_norm, angle, rest);
            const float* value = own + (m_.heads + m_.kv_heads + kv_head) * size;
            stored.put(rest, at, k_scale, stored.keys, stored.key_scales);
            stored.put(value, at, v_scale, stored.values, stored.value_scales);
        }
        const int64_t first = (b * m_.kv_heads + kv_head) * e_.max_parts;
        const auto found = [&](int64_t i) {
            const int64_t place = (first + i) * group;
            return Part{e_.part_peaks + place, e_.part_totals + place, e_.part_mixed + place * size};
        };
        attend_part_of(rows.format)(q, stored, begin, end, group, found(part), rest);
        const int64_t count = seen.parts();
        std::atomic<int>& done = e_.parts_left[b * m_.kv_heads + kv_head];
        if (count > 1 && done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
        done.store(0, std::memory_order_relaxed);
        merge_parts(found(0), count, group, size, v_scale * stored.form.unit(), rest);
        hand_on(b, kv_head, rest);
    }

    // What the query heads of a kv head found, [group * E], to the product of the next stage. Groups of its codes may
    // reach across heads, so the last of them rounds.
    void hand_on(int64_t b, int64_t kv_head, const float* found) {
        const int64_t cols = m_.heads * m_.head_dim, count = cols / m_.kv_heads, first = kv_head * count;
        if (takes_codes(m_.o)) {
            float* row = e_.attended + b * cols;
            std::memcpy(row + first, found, count * 4);
            if (e_.heads_done[b].fetch_add(1, std::memory_order_acq_rel) + 1 < m_.kv_heads) return;
            e_.heads_done[b].store(0, std::memory_order_relaxed);
            return put_input(m_.o, e_.packed, Place(groups_, b), row, 0, cols);
        }
        put_input(m_.o, e_.packed, Place(groups_, b), found, first, count);
    }
};

}  // namespace looped
