// x [groups * TOKENS, num_in] times weight [num_out, num_in] transposed, fp32, for a few tokens: the weight is read once,
// in its own order, by all tokens. Sixteen sums are in work at once - TOKENS of them for each of 16 / TOKENS rows of the
// weight - and are added up across their lanes together, which a product with a short inner size feels.
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
constexpr int ROWS = LANES / TOKENS;
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef int lanes __attribute__((vector_size(LANES * sizeof(int))));

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, lanes{__VA_ARGS__})
#endif

inline vec load(const float* from) {
    vec out;
    std::memcpy(&out, from, sizeof(vec));
    return out;
}

// Lane i of the result is the sum of all lanes of sums[i]: four rounds, each halves the vectors and the lanes per sum.
inline vec add_up(vec* sums) {
    for (int i = 0; i < 8; ++i)
        sums[i] = PICK(sums[i], sums[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  PICK(sums[i], sums[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; ++i)
        sums[i] = PICK(sums[i], sums[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                  PICK(sums[i], sums[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; ++i)
        sums[i] = PICK(sums[i], sums[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  PICK(sums[i], sums[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return PICK(sums[0], sums[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           PICK(sums[0], sums[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

}  // namespace

// num_out is a multiple of ROWS, num_in of LANES; bias may be null.
extern "C" void linear(const float* x, const float* weight, const float* bias, float* out, int64_t groups,
                       int64_t num_in, int64_t num_out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < num_out / ROWS; ++block) {
        const float* own = weight + block * ROWS * num_in;
        for (int64_t group = 0; group < groups; ++group) {
            const float* tokens = x + group * TOKENS * num_in;
            vec sums[LANES] = {};
            for (int64_t i = 0; i < num_in; i += LANES) {
                for (int row = 0; row < ROWS; ++row) {
                    const vec w = load(own + row * num_in + i);
                    for (int t = 0; t < TOKENS; ++t) sums[row * TOKENS + t] += w * load(tokens + t * num_in + i);
                }
            }
            const vec total = add_up(sums);
            for (int row = 0; row < ROWS; ++row) {
                const int64_t o = block * ROWS + row;
                for (int t = 0; t < TOKENS; ++t)
                    out[(group * TOKENS + t) * num_out + o] = total[row * TOKENS + t] + (bias ? bias[o] : 0.0f);
            }
        }
    }
}
