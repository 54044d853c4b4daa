// What a machine can do at most: reading memory, multiply-adds in registers, and barriers, by the threads of an engine.
// Compiled by bounds.py with the flags of the library and its thread pool.
#include <vector>

#include "bf16_tiles.h"
#include "threads.h"

namespace looped {

double read(const char* from, int64_t bytes, ThreadPool& pool) {
    std::vector<double> sums(pool.size());
    pool.run([&](int thread) {
        const int64_t lines = bytes / 256;
        const int64_t begin = lines * thread / pool.size(), end = lines * (thread + 1) / pool.size();
        vec sum[4] = {};
        for (int64_t i = begin; i < end; ++i) {
            const float* own = reinterpret_cast<const float*>(from + i * 256);
            __builtin_prefetch(from + i * 256 + AHEAD);
            __builtin_prefetch(from + i * 256 + AHEAD + 64);
            __builtin_prefetch(from + i * 256 + AHEAD + 128);
            __builtin_prefetch(from + i * 256 + AHEAD + 192);
            UNROLL for (int j = 0; j < 64; j += W) sum[j / W % 4] += load(own + j);
        }
        sums[thread] = sum_of(sum[0] + sum[1] + sum[2] + sum[3]);
    });
    double total = 0.0;
    for (double sum : sums) total += sum;
    return total;
}

void barriers(int64_t rounds, ThreadPool& pool) {
    pool.run([&](int) {
        for (int64_t i = 0; i < rounds; ++i) pool.barrier();
    });
}

double multiply(int64_t rounds, ThreadPool& pool) {
    // Twice as many chains as cover the latency of two units. They must stay in registers, so every loop over them is
    // unrolled: an index that is known only at run time would put them in memory, and the rate below that of products.
    constexpr int CHAINS = W == 16 ? 24 : 12;
    std::vector<float> ends(pool.size());
    pool.run([&](int thread) {
        vec sums[CHAINS];
        // equal ones would merge
        UNROLL for (int j = 0; j < CHAINS; ++j) sums[j] = all(static_cast<float>(j + thread));
        const vec factor = all(0.5f), one = all(1.0f);
        for (int64_t i = 0; i < rounds; ++i) {
            UNROLL for (int j = 0; j < CHAINS; ++j) {
                sums[j] = sums[j] * factor + one;
            }
        }
        float end = 0.0f;
        UNROLL for (int j = 0; j < CHAINS; ++j) end += sum_of(sums[j]);
        ends[thread] = end;
    });
    return ends[0] != ends[0] ? 0.0 : 2.0 * CHAINS * W * rounds * pool.size();
}

bool has_bf16() {
#if HAS_BF16
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
    return false;
#endif
}

double multiply_bf16(int64_t rounds, ThreadPool& pool) {
    if (!has_bf16()) return multiply(rounds, pool);  // products of bf16 are then made in fp32
#if HAS_BF16
    constexpr int CHAINS = 24;
    std::vector<float> ends(pool.size());
    pool.run([&](int thread) {
        vec sums[CHAINS];
        UNROLL for (int j = 0; j < CHAINS; ++j) sums[j] = all(static_cast<float>(j + thread));
        const bits token = all_bits(0x3f803f80u);
        for (int64_t i = 0; i < rounds; ++i) {
            const bits weight = all_bits(static_cast<uint32_t>(i) & 0x00ff00ffu);
            UNROLL for (int j = 0; j < CHAINS; ++j) add_pairs(sums[j], weight, token);
        }
        float end = 0.0f;
        UNROLL for (int j = 0; j < CHAINS; ++j) end += sum_of(sums[j]);
        ends[thread] = end;
    });
    return ends[0] != ends[0] ? 0.0 : 2.0 * 2 * CHAINS * W * rounds * pool.size();
#else
    return 0.0;
#endif
}

// The sums of int8 products alone.
template <class Dot>
double multiply_int8(int64_t rounds, ThreadPool& pool) {
    constexpr int CHAINS = W == 16 ? 24 : 10;
    std::vector<int32_t> ends(pool.size());
    pool.run([&](int thread) {
        const int32_t from[1] = {0x01010101 + thread};
        ints sums[1][CHAINS];
        UNROLL for (int j = 0; j < CHAINS; ++j) sums[0][j] = (ints)all_bits(from[0] + j);
        for (int64_t i = 0; i < rounds; ++i) {
            UNROLL for (int pass = 0; pass < Dot::PASSES; ++pass) {
                bits weights[CHAINS];  // constant ones would be hoisted
                UNROLL for (int j = 0; j < CHAINS; ++j) weights[j] = Dot::pass(all_bits(static_cast<uint32_t>(i)), pass);
                Dot::template add<1, CHAINS>(sums, weights, from);
            }
        }
        ints sum = {};
        UNROLL for (int j = 0; j < CHAINS; ++j) sum ^= sums[0][j];
        ends[thread] = sum[0];
    });
    return ends[0] == 1 ? 0.0 : 2.0 * 4 * CHAINS * W * rounds * pool.size();
}

}  // namespace looped

using namespace looped;

#define EXPORT __attribute__((visibility("default")))

extern "C" {
EXPORT double bounds_read(ThreadPool* pool, const char* from,
                          int64_t bytes) { return looped::read(from, bytes, *pool); }
EXPORT void bounds_barriers(ThreadPool* pool, int64_t rounds) { barriers(rounds, *pool); }
EXPORT double bounds_multiply(ThreadPool* pool, int64_t rounds) { return multiply(rounds, *pool); }
EXPORT double bounds_multiply_bf16(ThreadPool* pool, int64_t rounds) { return multiply_bf16(rounds, *pool); }
EXPORT double bounds_multiply_int8(ThreadPool* pool, int64_t rounds) {
#ifdef HAS_DOT_BYTES
    if (DotBytes::is_here()) return multiply_int8<DotBytes>(rounds, *pool);
#endif
    return multiply_int8<DotPairs>(rounds, *pool);
}
}
