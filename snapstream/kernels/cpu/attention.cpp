// Decode attention over rows, with the write of the new slot: the meaning of write_slots and decode_attention in
// ../reference.py, for fp32. Compiled for one head size and one number of query heads per kv head (HEAD_DIM, GROUP), so
// that the loops over both are unrolled. A task is one kv head of one batch entry: it writes its own slot and then
// reads each visible key and value once. Slots past a row's length are never read.
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

void attend_head(const float* q, const float* keys, const float* values, int64_t length, float* out,
                 std::vector<float>& scratch) {
    if (scratch.size() < static_cast<size_t>(GROUP * length)) scratch.resize(GROUP * length);
    float* weights = scratch.data();  // [GROUP, length]
    const float scale = 1.0f / std::sqrt(static_cast<float>(HEAD_DIM));
    float scaled[GROUP][HEAD_DIM];
    for (int r = 0; r < GROUP; ++r)
        for (int e = 0; e < HEAD_DIM; ++e) scaled[r][e] = q[r * HEAD_DIM + e] * scale;
    for (int64_t n = 0; n < length; ++n) {
        const float* key = keys + n * HEAD_DIM;
        for (int r = 0; r < GROUP; ++r) {
            float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int e = 0; e < HEAD_DIM; ++e) dot += scaled[r][e] * key[e];
            weights[r * length + n] = dot;
        }
    }
    float total[GROUP];
    for (int r = 0; r < GROUP; ++r) {
        float* own = weights + r * length;
        float peak = own[0];
#pragma omp simd reduction(max : peak)
        for (int64_t n = 0; n < length; ++n) peak = own[n] > peak ? own[n] : peak;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t n = 0; n < length; ++n) {
            own[n] = std::exp(own[n] - peak);
            sum += own[n];
        }
        total[r] = sum;
    }
    float mixed[GROUP][HEAD_DIM] = {};
    for (int64_t n = 0; n < length; ++n) {
        const float* value = values + n * HEAD_DIM;
        for (int r = 0; r < GROUP; ++r) {
            const float weight = weights[r * length + n];
#pragma omp simd
            for (int e = 0; e < HEAD_DIM; ++e) mixed[r][e] += weight * value[e];
        }
    }
    for (int r = 0; r < GROUP; ++r)
        for (int e = 0; e < HEAD_DIM; ++e) out[r * HEAD_DIM + e] = mixed[r][e] / total[r];
}

}  // namespace

extern "C" void attend_rows(const float* q, const float* k, const float* v, float* key_cache, float* value_cache,
                            const int64_t* rows, const int64_t* slots, const int64_t* lengths, float* out,
                            int64_t batch, int64_t kv_heads, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                            int64_t row_stride, int64_t head_stride, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scratch;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t g = 0; g < kv_heads; ++g) {
                const int64_t head = rows[b] * row_stride + g * head_stride;
                float* keys = key_cache + head;
                float* values = value_cache + head;
                for (int e = 0; e < HEAD_DIM; ++e) {
                    keys[slots[b] * HEAD_DIM + e] = k[b * k_stride + g * HEAD_DIM + e];
                    values[slots[b] * HEAD_DIM + e] = v[b * v_stride + g * HEAD_DIM + e];
                }
                attend_head(q + b * q_stride + g * GROUP * HEAD_DIM, keys, values, lengths[b],
                            out + (b * kv_heads + g) * GROUP * HEAD_DIM, scratch);
            }
        }
    }
}
