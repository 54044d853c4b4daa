// What a machine can do at most, for benchmarks: reading memory, multiply-adds in registers, and waiting. By the team.
#include <vector>

#include "bf16_tiles.h"
#include "codes.h"
#include "team.h"

namespace looped {

double read(const char* from, int64_t bytes, Team& team) {
    std::vector<double> sums(team.size());
    team.run([&](int member) {
        const int64_t lines = bytes / 256;
        const int64_t begin = lines * member / team.size(), end = lines * (member + 1) / team.size();
        vec sum[4] = {};
        for (int64_t i = begin; i < end; ++i) {
            const float* own = reinterpret_cast<const float*>(from + i * 256);
            __builtin_prefetch(from + i * 256 + AHEAD);
            __builtin_prefetch(from + i * 256 + AHEAD + 64);
            __builtin_prefetch(from + i * 256 + AHEAD + 128);
            __builtin_prefetch(from + i * 256 + AHEAD + 192);
            UNROLL for (int j = 0; j < 64; j += W) sum[j / W % 4] += load(own + j);
        }
        sums[member] = sum_of(sum[0] + sum[1] + sum[2] + sum[3]);
    });
    double total = 0.0;
    for (double sum : sums) total += sum;
    return total;
}

void wait_for_all(int64_t rounds, Team& team) {
    team.run([&](int) {
        for (int64_t i = 0; i < rounds; ++i) team.barrier();
    });
}

double multiply(int64_t rounds, Team& team) {
    // Twice as many chains as cover the latency of two units. They must stay in registers, so every loop over them is
    // unrolled: an index that is known only at run time would put them in memory, and the rate below that of products.
    constexpr int CHAINS = W == 16 ? 24 : 12;
    std::vector<float> ends(team.size());
    team.run([&](int member) {
        vec sums[CHAINS];
        UNROLL for (int j = 0; j < CHAINS; ++j) sums[j] = all(static_cast<float>(j + member));  // equal ones would merge
        const vec factor = all(0.5f), one = all(1.0f);
        for (int64_t i = 0; i < rounds; ++i) {
            UNROLL for (int j = 0; j < CHAINS; ++j) {
                sums[j] = sums[j] * factor + one;
            }
        }
        float end = 0.0f;
        UNROLL for (int j = 0; j < CHAINS; ++j) end += sum_of(sums[j]);
        ends[member] = end;
    });
    return ends[0] != ends[0] ? 0.0 : 2.0 * CHAINS * W * rounds * team.size();
}

double multiply_bf16(int64_t rounds, Team& team) {
    if (!multiplies_bf16()) return multiply(rounds, team);  // of fp32, as products of bf16 are then made
#if HAS_BF16
    constexpr int CHAINS = 24;
    std::vector<float> ends(team.size());
    team.run([&](int member) {
        vec sums[CHAINS];
        UNROLL for (int j = 0; j < CHAINS; ++j) sums[j] = all(static_cast<float>(j + member));
        const bits token = all_bits(0x3f803f80u);
        for (int64_t i = 0; i < rounds; ++i) {
            const bits weight = all_bits(static_cast<uint32_t>(i) & 0x00ff00ffu);
            UNROLL for (int j = 0; j < CHAINS; ++j) add_pairs(sums[j], weight, token);
        }
        float end = 0.0f;
        UNROLL for (int j = 0; j < CHAINS; ++j) end += sum_of(sums[j]);
        ends[member] = end;
    });
    return ends[0] != ends[0] ? 0.0 : 2.0 * 2 * CHAINS * W * rounds * team.size();
#else
    return 0.0;
#endif
}

double multiply_codes(int64_t rounds, Team& team) {
    std::vector<int32_t> ends(team.size());
    team.run([&](int member) { ends[member] = add_codes(rounds, 0x01010101 + member); });
    return ends[0] == 1 ? 0.0 : 2.0 * 4 * DOT_CHAINS * W * rounds * team.size();
}

}  // namespace looped
