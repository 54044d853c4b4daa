// Decode attention over rows, with the write of the new slot: the meaning of write_slots and decode_attention in
// ../reference.py, for fp32. Compiled for one head size and one number of query heads per kv head (HEAD_DIM, GROUP), so
// that the loops over both are unrolled. A task is one kv head of one batch entry: it writes its own slot and then
// reads each visible key and value once. Slots past a row's length are never read. With IS_FP8 rows hold e4m3fn, whose
// meaning is ../fp8.py: a scale is a factor of q and of the result, so a stored number is looked up and no more.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if IS_FP8
using Stored = uint8_t;

struct Widened {
    float of[256];
    Widened() {
        for (int byte = 0; byte < 256; ++byte) {
            const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
            const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(1.0f * mantissa, -9);
            of[byte] = byte & 128 ? -size : size;
        }
    }
};
const Widened widened;

// One stored vector as fp32; buffer is where it lies afterwards.
const float* widen(const Stored* from, float* buffer) {
    for (int e = 0; e < HEAD_DIM; ++e) buffer[e] = widened.of[from[e]];
    return buffer;
}

// Rounds to nearest even and saturates.
Stored narrow(float x, float scale) {
    x = std::fmin(std::fmax(x / scale, -448.0f), 448.0f);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = (bits >> 24) & 128u;
    bits &= 0x7fffffffu;
    if (bits < (121u << 23)) return sign | static_cast<uint32_t>(std::lrintf(std::fabs(x) * 512.0f));  // below 2^-6
    bits += 0x7ffffu + ((bits >> 20) & 1u);
    return sign | ((bits >> 20) - (120u << 3));
}
#else
using Stored = float;
const float* widen(const Stored* from, float*) { return from; }
Stored narrow(float x, float) { return x; }
#endif

void attend_head(const float* q, const Stored* keys, const Stored* values, float k_scale, float v_scale, int64_t length,
                 float* out, std::vector<float>& scratch) {
    if (scratch.size() < static_cast<size_t>(GROUP * length)) scratch.resize(GROUP * length);
    float* weights = scratch.data();  // [GROUP, length]
    const float scale = k_scale / std::sqrt(static_cast<float>(HEAD_DIM));
    float buffer[HEAD_DIM];
    float scaled[GROUP][HEAD_DIM];
    for (int r = 0; r < GROUP; ++r)
        for (int e = 0; e < HEAD_DIM; ++e) scaled[r][e] = q[r * HEAD_DIM + e] * scale;
    for (int64_t n = 0; n < length; ++n) {
        const float* key = widen(keys + n * HEAD_DIM, buffer);
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
        const float* value = widen(values + n * HEAD_DIM, buffer);
        for (int r = 0; r < GROUP; ++r) {
            const float weight = weights[r * length + n];
#pragma omp simd
            for (int e = 0; e < HEAD_DIM; ++e) mixed[r][e] += weight * value[e];
        }
    }
    for (int r = 0; r < GROUP; ++r)
        for (int e = 0; e < HEAD_DIM; ++e) out[r * HEAD_DIM + e] = mixed[r][e] * (v_scale / total[r]);
}

}  // namespace

extern "C" void attend_rows(const float* q, const float* k, const float* v, Stored* key_cache, Stored* value_cache,
                            const int64_t* rows, const int64_t* slots, const int64_t* lengths, float* out,
                            const float* k_scales, const float* v_scales, int64_t batch, int64_t kv_heads, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                            int64_t row_stride, int64_t head_stride, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scratch;
#pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t g = 0; g < kv_heads; ++g) {
                const int64_t head = rows[b] * row_stride + g * head_stride;
                Stored* keys = key_cache + head;
                Stored* values = value_cache + head;
                const int64_t own = rows[b] * kv_heads + g;
                const float k_scale = k_scales ? k_scales[own] : 1.0f, v_scale = v_scales ? v_scales[own] : 1.0f;
                for (int e = 0; e < HEAD_DIM; ++e) {
                    keys[slots[b] * HEAD_DIM + e] = narrow(k[b * k_stride + g * HEAD_DIM + e], k_scale);
                    values[slots[b] * HEAD_DIM + e] = narrow(v[b * v_stride + g * HEAD_DIM + e], v_scale);
                }
                attend_head(q + b * q_stride + g * GROUP * HEAD_DIM, keys, values, k_scale, v_scale, lengths[b],
                            out + (b * kv_heads + g) * GROUP * HEAD_DIM, scratch);
            }
        }
    }
}
