// The attention stage of layers with keys and values of their own.
#pragma once
#include "recurrent.h"
#include "rows.h"

namespace looped {

struct Region {  // the slots of a kv head of a row: the first of them, those that are seen, the new token's
    int64_t first, length, slot;
    int64_t parts() const { return (length + PART - 1) / PART; }
};

inline Region region(Work& w, int64_t layer, int64_t b, int64_t kv_head) {  // ../../../kv/layout.py
    const RowTable& rows = w.rows;
    const int64_t row = w.step.rows[b], heads = w.model.parts[layer].kv_heads, token = position_of(w, b);
    int64_t start = rows.ring_start[row], capacity = rows.capacity[row];
    int64_t first = (row * heads + kv_head) * rows.layer_slots[layer];
    if (rows.windows[layer]) {
        start = 0;
        capacity = rows.windows[layer];
    } else if (rows.head_starts) {
        const int64_t place = (layer * rows.num_rows + row) * w.model.kv_heads + kv_head;
        first = row * rows.row_slots + rows.head_starts[place];
        start = std::min(start, rows.head_ends[place]);
        capacity = rows.head_capacities[place];
    }
    const int64_t turn = token < start ? 0 : (token - start) % std::max<int64_t>(capacity - start, 1);
    const bool is_chunk = rows.windows[layer] && w.model.has_chunks;
    return {first, is_chunk ? turn + 1 : std::min(token + 1, capacity), token < start ? token : start + turn};
}

// Of a row whose heads have equal slots.
inline int64_t length(Work& w, int64_t b) { return region(w, 0, b, 0).length; }
inline int64_t num_parts(Work& w, int64_t b) { return region(w, 0, b, 0).parts(); }
inline int64_t slot(Work& w, int64_t b) { return region(w, 0, b, 0).slot; }

// One head normed and, unless angle is null, rotated: out [E]. With a `scale` [E] it is multiplied by that last, not by the
// weight of the norm before. all: the heads that are normed together, `heads` of them.
inline void rotated_head(Work& w, const float* head, int64_t size, const float* weight, const float* angle, float* out,
                         const float* all, int64_t heads, const float* scale) {
    const int64_t half = size / 2;
    const bool whole = w.model.has_whole_qk_norm, apart = w.model.norms_heads_apart;
    if (weight && (whole || apart)) weight += head - all;
    if (apart) {
        const float mean = mean_of(head, size);
        for (int64_t i = 0; i < size; ++i) out[i] = head[i] - mean;
        head = out;
    }
    const float factor = weight ? norm_factor(whole ? all : head, whole ? heads * size : size, w.model.eps) : 1.0f;
    if (scale) weight = nullptr;  // which it is made of
    for (int64_t i = 0; i < half; ++i) {
        const float low = head[i] * factor * (weight ? weight[i] : 1.0f);
        const float high = head[half + i] * factor * (weight ? weight[half + i] : 1.0f);
        if (!angle) {
            out[i] = low * w.model.unrotated_scale;
            out[half + i] = high * w.model.unrotated_scale;
            continue;
        }
        out[i] = low * angle[i] - high * angle[half + i];
        out[half + i] = high * angle[i] + low * angle[half + i];
    }
    for (int64_t i = 0; scale && i < size; ++i) out[i] *= scale[i];
}

inline StoredHead stored_head(Work& w, int64_t layer, int64_t first) {  // from that slot of a layer of all rows on
    const RowTable& rows = w.rows;
    const RowForm keys{rows.key_format}, values{rows.value_format};
    const int64_t size = w.model.parts[layer].head_dim;
    const auto at = [&](RowForm form, const int64_t* all) {
        return reinterpret_cast<char*>(all[layer]) + form.bytes(first * size);
    };
    const auto scales = [&](RowForm form, const int64_t* all) {
        return form.has_slot_scales() ? reinterpret_cast<float*>(all[layer]) + first : nullptr;
    };
    return {keys, values, size, at(keys, rows.keys), at(values, rows.values), scales(keys, rows.key_scales),
            scales(values, rows.value_scales)};
}

// The learned gate of a kv head's outputs, [group * E].
inline void gate_attended(Work& w, int64_t layer, int64_t b, int64_t kv_head, float* found) {
    const LayerParts& own = w.model.parts[layer];
    const int64_t group = own.heads / own.kv_heads, size = own.head_dim, each = w.model.gate_dim;
    const float* gates = w.engine.heads + b * head_numbers(own) + kv_head * group * each;
    for (int64_t r = 0; r < group; ++r, gates += each, found += size)
        for_columns(size, [&](int64_t at, int64_t some) {
            const vec gate = each == 1 ? all(gates[0]) : load_some(gates + at, some);
            const vec share = w.model.has_softplus_gates ? softplus(gate) : 1.0f / (1.0f + exponential(-gate));
            store_some(found + at, load_some(found + at, some) * share, some);
        });
}

inline void attend_task(Work& w, int64_t layer, int64_t b, int64_t kv_head, int64_t part, const Region& seen) {
    const RowTable& rows = w.rows;
    const LayerParts& parts = w.model.parts[layer];
    const int64_t size = parts.head_dim, kv_heads = parts.kv_heads, group = parts.heads / kv_heads;
    const int64_t row = w.step.rows[b], head = row * w.model.kv_heads + kv_head;
    const StoredHead stored = stored_head(w, layer, seen.first);
    const bool has_head_scales = rows.key_scales && !stored.key_scales;
    const auto head_scale = [&](const int64_t* all) {
        return has_head_scales ? reinterpret_cast<const float*>(all[layer])[head] : 1.0f;
    };
    const float k_scale = head_scale(rows.key_scales), v_scale = head_scale(rows.value_scales);
    const int64_t gates = parts.heads * w.model.gate_dim, place = place_of(w, layer);
    const bool is_windowed = w.model.window_frequencies && rows.windows[layer];
    const float *own = w.engine.heads + b * head_numbers(parts) + gates,
        *angle = w.engine.angles + (is_windowed ? w.step.batch + b : b) * w.model.head_dim;
    if (w.model.rotated_layers && !w.model.rotated_layers[layer]) angle = nullptr;
    const float *queries = own, *keys = own + parts.heads * size;
    float *q = w.scratch, *rest = w.scratch + group * size;
    const bool whole = w.model.has_whole_qk_norm;
    const int64_t q_normed = whole ? parts.heads : 1, k_normed = whole ? kv_heads : 1;
    for (int64_t r = 0; r < group; ++r)
        rotated_head(w, queries + (kv_head * group + r) * size, size, parts.q_norm, angle, q + r * size, queries,
                     q_normed, parts.turned_scale);
    if (const float stretch = query_scale(w, layer, b); stretch != 1.0f)
        for (int64_t i = 0; i < group * size; ++i) q[i] *= stretch;
    if (rows.queries && part == 0) {
        const int64_t kept = rows.num_tokens[row] % rows.kept_queries;
        const int64_t line = (place * rows.num_rows + row) * rows.kept_queries + kept;
        std::memcpy(rows.queries + (line * w.model.heads + kv_head * group) * size, q, group * size * 4);
    }
    const float factor = k_scale * stored.key_form.unit() * parts.score_scale;
    for (int64_t i = 0; i < group * size; ++i) q[i] *= factor;
    const bool has_rotated_keys = stored.key_form.is_rotated(), has_rotated_values = stored.value_form.is_rotated();
    for (int64_t r = 0; has_rotated_keys && r < group; ++r) rotate_blocks(q + r * size, size);
    const int64_t at = seen.slot, begin = part * PART, end = std::min(begin + PART, seen.length);
    if (begin <= at && at < end && parts.source == layer) {
        rotated_head(w, keys + kv_head * size, size, parts.k_norm, angle, rest, keys, k_normed, parts.turned_scale);
        const float* value = keys + (parts.values_are_keys ? kv_head : kv_heads + kv_head) * size;
        if (has_rotated_keys) rotate_blocks(rest, size);
        stored.put_key(rest, at, k_scale);
        if (has_rotated_values || w.model.norms_values) {
            const float norm = w.model.norms_values ? norm_factor(value, size, w.model.eps) : 1.0f;
            for (int64_t i = 0; i < size; ++i) rest[i] = value[i] * norm;
            if (has_rotated_values) rotate_blocks(rest, size);
            value = rest;
        }
        stored.put_value(value, at, v_scale);
    }
    const int64_t first = (b * kv_heads + kv_head) * w.engine.max_parts;
    const auto found = [&](int64_t i) {
        const int64_t line = (first + i) * group;
        return Part{w.engine.part_peaks + line, w.engine.part_totals + line, w.engine.part_mixed + line * size};
    };
    attend_part_of(stored)(q, stored, begin, end, group, w.model.score_cap, found(part), rest);
    const int64_t count = seen.parts();
    std::atomic<int>& done = w.engine.parts_left[b * w.model.kv_heads + kv_head];
    if (count > 1 && done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    done.store(0, std::memory_order_relaxed);
    const float* sinks = w.model.sinks ? w.model.sinks + place * w.model.heads + kv_head * group : nullptr;
    merge_parts(found(0), count, group, size, v_scale * stored.value_form.unit(), sinks, rest);
    for (int64_t r = 0; has_rotated_values && r < group; ++r) rotate_blocks(rest + r * size, size);
    if (gates) gate_attended(w, layer, b, kv_head, rest);
    const int64_t given = parts.o.cols / parts.heads;  // numbers of a value, behind which zeros are stored
    for (int64_t r = 1; given < size && r < group; ++r) std::memmove(rest + r * given, rest + r * size, given * 4);
    pack_heads(w, parts.o, b, kv_head, kv_heads, rest);
}

inline void attend_rows(Work& w, int64_t layer) {
    const int64_t kv_heads = w.model.parts[layer].kv_heads;
    int64_t most = 1;
    for (int64_t b = 0; b < w.step.batch; ++b)
        for (int64_t head = 0; head < kv_heads; ++head) most = std::max(most, region(w, layer, b, head).parts());
    w.share(w.step.batch * kv_heads * most, 1, [&](int64_t task) {
        const int64_t part = task % most, head = task / most % kv_heads, first = task / most / kv_heads;
        if (ahead_of(w, first)) return;
        // One task for all entries of a row, in order: each reads the slots that the later ones overwrite.
        for (int64_t b = first; b < w.step.batch && (b == first || ahead_of(w, b)); ++b) {
            const Region own = region(w, layer, b, head);
            if (part < own.parts()) attend_task(w, layer, b, head, part, own);
        }
    });
}

}  // namespace looped
