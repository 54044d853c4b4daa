// Recurrences over prompts: causal convolutions, the gated delta rule, and the scan of Mamba-2, which is the same without
// what the state tells of a key (reference: ../../reference.py).
//
// Invariant: a task goes through the tokens of its own channels or columns in order, and every sum is taken in one
// order, so results do not depend on where a prompt is cut, nor on other prompts.
//
// The delta rule runs token by token instead of in chunks (arXiv 2412.06464, section 3.2): columns of a state need
// nothing of each other, so those of a task stay in the nearest cache for a whole prompt, and one pass over them applies
// a token and multiplies with the key of the next. That is 8 operations for each number of the state and token, about
// what chunks of 64 take, and nothing is stored between.
#include <vector>

#include "simd.h"

namespace looped {

namespace {

constexpr int64_t CHANNELS = 256;  // of a task of a convolution
constexpr int COLUMNS = 2;         // vectors of columns of a task of the delta rule

// K: the taps, where they are known when this is compiled; else 0.
template <int K>
void convolve(const Convolving& own, int64_t sequence, int64_t begin, int64_t end) {
    const int64_t size = own.channels, last = (K ? K : own.kernel) - 1;
    const float* x = own.x + sequence * own.tokens * own.stride;
    float *state = own.state + sequence * last * size, *out = own.out + sequence * own.tokens * size;
    const auto input = [&](int64_t token) { return token < 0 ? state + (last + token) * size : x + token * own.stride; };
    const Gated silu;
    std::vector<const float*> inputs(last + 1);
    for (int64_t token = 0; token < own.tokens; ++token) {
        for (int64_t i = 0; i <= last; ++i) inputs[i] = input(token - last + i);
        const auto run = [&](int64_t at, int64_t left) __attribute__((always_inline)) {
            vec sum = own.bias ? load_some(own.bias + at, left) : vec{};
            UNROLL for (int64_t i = 0; i < (K ? K : own.kernel); ++i)
                sum += load_some(own.taps + i * size + at, left) * load_some(inputs[i] + at, left);
            store_some(out + token * size + at, own.is_silu ? silu(sum, all(1.0f)) : sum, left);
        };
        int64_t at = begin;
        for (; at + W <= end; at += W) run(at, W);
        if (at < end) run(at, end - at);
    }
    for (int64_t i = 0; i < last; ++i) {  // in this order none is overwritten before it has moved
        const float* from = input(own.tokens - last + i);
        std::copy(from + begin, from + end, state + i * size + begin);
    }
}

// Columns [first, first + N W) of a value head's state, or fewer with N = 1. block: [keys][N W]. BY_CHANNEL: decays per
// element of a key, with which the keys that a state is asked for are multiplied beforehand.
template <int N, bool IS_DELTA, bool BY_CHANNEL = false>
void run_columns(const DeltaRule& own, int64_t sequence, int64_t head, int64_t first, float* block) {
    const int64_t keys = own.key_dim, values = own.value_dim, heads = own.value_heads;
    const int64_t left = values - first, key_head = head / (heads / own.key_heads);
    const auto get = [&](const float* from) { return N > 1 ? load(from) : load_some(from, left); };
    const auto put = [&](float* to, vec x) { N > 1 ? store(to, x) : store_some(to, x, left); };
    const auto key_of = [&](const float* of, int64_t token) {
        return of + ((sequence * own.tokens + token) * own.key_heads + key_head) * keys;
    };
    const auto asked_of = [&](int64_t token) {
        return BY_CHANNEL ? own.decayed + ((sequence * own.tokens + token) * heads + head) * keys : key_of(own.k, token);
    };
    float* state = own.state + (sequence * heads + head) * keys * values + first;
    const vec scale = all(IS_DELTA ? 1.0f / std::sqrt(static_cast<float>(keys)) : 1.0f);

    // Sums of even and of odd rows, which are added at the end: twice as many chains as vectors.
    vec recalled[2][N] = {};
    const float* asked = asked_of(0);
    for (int64_t i = 0; i < keys; ++i)
        for (int n = 0; n < N; ++n) {
            const vec x = get(state + i * values + n * W);
            store(block + (i * N + n) * W, x);
            if (IS_DELTA) recalled[i % 2][n] += x * asked[i];
        }
    for (int64_t token = 0; token < own.tokens; ++token) {
        const int64_t gate = (sequence * own.tokens + token) * heads + head;
        const float decay = BY_CHANNEL ? 1.0f : own.decay[gate], beta = IS_DELTA ? own.beta[gate] : 1.0f;
        const float* decays = own.decay + gate * keys;  // only by channel
        const float *q = key_of(own.q, token), *k = key_of(own.k, token), *v = own.v + gate * values + first;
        const float* next = asked_of(std::min(token + 1, own.tokens - 1));
        vec u[N], sums[2][N] = {};
        for (int n = 0; n < N; ++n) {
            u[n] = IS_DELTA ? (get(v + n * W) - (recalled[0][n] + recalled[1][n]) * decay) * beta : get(v + n * W);
            recalled[0][n] = recalled[1][n] = vec{};
        }
        const auto row = [&](int64_t i, int part) __attribute__((always_inline)) {
            UNROLL for (int n = 0; n < N; ++n) {
                float* at = block + (i * N + n) * W;
                const vec x = load(at) * (BY_CHANNEL ? decays[i] : decay) + u[n] * k[i];
                store(at, x);
                sums[part][n] += x * q[i];
                if (IS_DELTA) recalled[part][n] += x * next[i];
            }
        };
        int64_t i = 0;
        for (; i + 2 <= keys; i += 2) row(i, 0), row(i + 1, 1);
        if (i < keys) row(i, 0);
        float* out = own.out + gate * values + first;
        for (int n = 0; n < N; ++n) put(out + n * W, (sums[0][n] + sums[1][n]) * scale);
    }
    for (int64_t i = 0; i < keys; ++i)
        for (int n = 0; n < N; ++n) put(state + i * values + n * W, load(block + (i * N + n) * W));
}

}  // namespace

EXPORT void looped_convolve(const Convolving& own, int64_t threads) {
    const int64_t parts = (own.channels + CHANNELS - 1) / CHANNELS, tasks = own.sequences * parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (tasks > 1 && threads > 1)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t begin = task % parts * CHANNELS;
        const int64_t end = std::min(begin + CHANNELS, own.channels);
        if (own.kernel == 3) convolve<3>(own, task / parts, begin, end);
        else if (own.kernel == 4) convolve<4>(own, task / parts, begin, end);
        else convolve<0>(own, task / parts, begin, end);
    }
}

EXPORT void looped_delta_rule(const DeltaRule& own, int64_t threads) {
    constexpr int64_t WIDTH = COLUMNS * W;
    const int64_t whole = own.value_dim / WIDTH, left = own.value_dim - whole * WIDTH;
    const int64_t parts = whole + (left + W - 1) / W, tasks = own.sequences * own.value_heads * parts;
#pragma omp parallel num_threads(threads) if (tasks > 1 && threads > 1)
    {
        std::vector<float> memory(own.key_dim * WIDTH + 16);
        float* block = memory.data();
        block += (64 - reinterpret_cast<uintptr_t>(block) % 64) % 64 / sizeof(float);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t part = task % parts, heads = task / parts, head = heads % own.value_heads;
            const int64_t sequence = heads / own.value_heads, first = whole * WIDTH + (part - whole) * W;
            if (part < whole && own.decayed) run_columns<COLUMNS, true, true>(own, sequence, head, part * WIDTH, block);
            else if (own.decayed) run_columns<1, true, true>(own, sequence, head, first, block);
            else if (part < whole && own.beta) run_columns<COLUMNS, true>(own, sequence, head, part * WIDTH, block);
            else if (part < whole) run_columns<COLUMNS, false>(own, sequence, head, part * WIDTH, block);
            else if (own.beta) run_columns<1, true>(own, sequence, head, first, block);
            else run_columns<1, false>(own, sequence, head, first, block);
        }
    }
}

}  // namespace looped
