// Sampling. Each row is a task: compute its scores, cut them, draw a token.
//
// Without top-k and top-p nothing is sorted or gathered: weights are summed group by group, and only the group that
// holds the drawn number is weighed again. Otherwise candidates are gathered first, and the thresholds are found
// among them.
//
// Probabilities are integer weights: 2^42 for the likeliest token, as ../../../exec/sampling.py has them. Sums of
// them do not depend on their order, so a draw depends neither on threads nor on neighbours. The exponential is this
// library's own, within about one unit of the last place of a double, as torch's is; so a weight may differ from
// torch's by one, but only where the exact product lies within 2^-10 or less of an integer. Of a row's total about
// 2^-52 moves in this way, and a draw falls between the two cumulative sums of some token with a chance of at most
// the number of tokens that may be drawn times 2^-52: less than 2^-32 whatever the vocabulary. The likeliest token's
// weight is exact, one of -inf is 0 exactly, and top-k, which compares logits, cannot differ at all.
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "threads.h"

namespace looped {

namespace {

constexpr int64_t WEIGHT_ONE = int64_t{1} << 42;

struct Scale {  // of a row: a weight is 2^42 e^((score - peak) / temperature), rounded down
    double peak, temperature;  // finite; no score is above the peak
    float least;  // scores below it weigh 0; others may, too
};

constexpr int D = W / 2;          // doubles of a vector
constexpr double FLOOR = -29.5;   // e^-29.12 * 2^42 is 1: below, weights are 0
constexpr double MAGIC = 0x1.8p52;  // adding it leaves the rounded number in the last bits
typedef double doubles __attribute__((vector_size(D * 8)));
typedef int64_t longs __attribute__((vector_size(D * 8)));
typedef float some __attribute__((vector_size(D * 4)));

// 2^42 e^x rounded down, of x from FLOOR to 0: whole powers of two first, then a series of what is left.
INLINE longs weight_of(doubles x) {
    const doubles shifted = x * 0x1.71547652b82fep0 + MAGIC, n = shifted - MAGIC;
    const doubles r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;  // |r| <= ln(2) / 2; the first is exact
    doubles p = doubles{} + 1.0 / 6227020800;
    UNROLL for (const double next : {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                     1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5})
        p = p * r + next;
    const longs exponent = ((longs)shifted - (longs)(doubles{} + MAGIC) + (42 + 1023)) << 52;
    const doubles y = (1.0 + (r + r * r * p)) * (doubles)exponent;
    const doubles up = y + 0x1p52, rounded = up - 0x1p52;  // to the nearest whole number
    return (longs)up - (longs)(doubles{} + 0x1p52) + (longs)(rounded > y);
}

INLINE void weigh_half(const float* scores, const Scale& scale, int64_t lowest, int64_t* out) {
    some own;
    std::memcpy(&own, scores, sizeof own);
    const doubles x = (__builtin_convertvector(own, doubles) - scale.peak) / scale.temperature;
    longs weight = weight_of(x < FLOOR ? doubles{} + FLOOR : x);
    weight &= weight >= lowest;
    std::memcpy(out, &weight, sizeof weight);
}

INLINE void weigh_all(const float* scores, const Scale& scale, int64_t lowest, int64_t* out) {
    if (!lanes_of(load(scores) >= all(scale.least))) {
        std::memset(out, 0, W * 8);
        return;
    }
    weigh_half(scores, scale, lowest, out);
    weigh_half(scores + D, scale, lowest, out + D);
}

Scale scale_of(float peak, double temperature) {
    constexpr float MOST = std::numeric_limits<float>::max();
    return {peak, temperature, static_cast<float>(std::max(peak + FLOOR * temperature, -double{MOST}))};
}

// Weights of `count` scores; those below `lowest` become 0. The weight of a score is bitwise equal wherever it stands.
void weigh(const float* scores, int64_t count, const Scale& scale, int64_t lowest, int64_t* out) {
    const int64_t whole = count / W * W, rest = count - whole;
    for (int64_t i = 0; i < whole; i += W) weigh_all(scores + i, scale, lowest, out + i);
    if (!rest) return;
    float own[W];
    int64_t weights[W];
    for (int64_t i = 0; i < W; ++i) own[i] = i < rest ? scores[whole + i] : -std::numeric_limits<float>::infinity();
    weigh_all(own, scale, lowest, weights);
    std::copy(weights, weights + rest, out + whole);
}

constexpr int64_t NO_TOKEN = -1, ALIGN = 64;
constexpr int64_t ALONE = 8192;  // scores of a call that one thread draws from in some microseconds

// SplitMix64's finaliser over stream and counter, as ../../../exec/row_state.py has it: a number in [0, 1).
double uniform(int64_t stream, int64_t counter) {
    uint64_t word = static_cast<uint64_t>(stream) + (static_cast<uint64_t>(counter) + 1) * 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return static_cast<double>((word ^ (word >> 31)) >> 11) * 0x1p-53;
}

int64_t sum(const int64_t* weights, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += weights[i];
    return total;
}

// What of a total a uniform number falls on: less than the total even after rounding, where there is any.
int64_t target_of(double at, int64_t total) { return static_cast<int64_t>(at * static_cast<double>(total)); }

// The first whose cumulative weight is more than `target`.
int64_t first_beyond(const int64_t* weights, int64_t count, int64_t target) {
    constexpr int64_t BLOCK = 64;
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) {
        const int64_t own = sum(weights + i, BLOCK);
        if (own > target) break;
        target -= own;
    }
    while (i < count - 1 && weights[i] <= target) target -= weights[i++];
    return i;
}

struct Place {  // where one thread draws
    float *line, *maxima, *scores;
    int32_t* ids;
    int64_t* weights;

    Place(char* base, int64_t vocab) {
        const auto take = [&](int64_t bytes) {
            char* own = base ? base + bytes_ : nullptr;
            bytes_ += (bytes + ALIGN - 1) / ALIGN * ALIGN;
            return own;
        };
        line = reinterpret_cast<float*>(take(4 * vocab));
        maxima = reinterpret_cast<float*>(take(4 * num_maxima(vocab)));
        scores = reinterpret_cast<float*>(take(4 * (vocab + W)));
        ids = reinterpret_cast<int32_t*>(take(4 * (vocab + W)));
        weights = reinterpret_cast<int64_t*>(take(8 * (vocab + W)));
    }
    int64_t bytes() const { return bytes_; }

  private:
    int64_t bytes_ = 0;
};

class Drawer {
  public:
    Drawer(const Sampling& sampling, const Draw& call, char* workspace)
        : s_(sampling), call_(call), own_(workspace, sampling.vocab) {}

    void draw(int64_t b) {
        const int64_t row = call_.rows[b];
        const float* line = call_.logits + b * s_.vocab;
        Peak peak = find_peak(line, s_.vocab, own_.maxima);
        const Peak raw = peak;
        int64_t token = NO_TOKEN;
        if (peak.is_finite) {
            if (adjust(s_, call_, b, own_.line)) peak = find_peak(line = own_.line, s_.vocab, own_.maxima);
            token = s_.is_greedy[row] ? first_with(peak.score, line, s_.vocab, own_.maxima)
                : drawn(row, line, peak.score);
            if (call_.penalties && has_penalties(s_, row)) ++s_.output_counts[row * s_.vocab + token];
        }
        call_.tokens[b] = token;
        if (call_.logprobs) report(b, raw);
        ++s_.num_sampled[row];
        if (!call_.feeds) return;
        s_.last_token[row] = std::max<int64_t>(token, 0);  // a row that draws none goes on until its end is noticed
        ++s_.num_tokens[row];
    }

  private:
    int64_t drawn(int64_t row, const float* line, float peak) {
        // Where nothing may be drawn, the last token is, as by the reference; penalties may make a score infinite.
        if (!std::isfinite(peak)) return peak < 0.0f ? s_.vocab - 1 : first_with(peak, line, s_.vocab, own_.maxima);
        const double at = uniform(s_.stream[row], s_.num_sampled[row]);
        const Scale scale = scale_of(peak, s_.temperature[row]);
        const int64_t lowest = static_cast<int64_t>(s_.min_p[row] * WEIGHT_ONE), top_k = s_.top_k[row];
        const double top_p = s_.top_p[row];
        if (top_k >= s_.vocab && top_p >= 1.0) return drawn_from_all(line, scale, lowest, at);
        Candidates found = candidates(line, scale, top_k);
        weigh(found.scores, found.count, scale, top_p < 1.0 ? 0 : lowest, own_.weights);
        if (top_p < 1.0) {
            const double total = static_cast<double>(sum(own_.weights, found.count));
            const int64_t limit = std::max<int64_t>(static_cast<int64_t>(std::ceil(total * top_p)), 1);
            auto* places = reinterpret_cast<int32_t*>(own_.line);  // whose scores are candidates by now
            const float least = nucleus_score(found.scores, own_.weights, found.count, limit, places);
            for (int64_t i = 0; i < found.count; ++i)
                if (found.scores[i] < least || own_.weights[i] < lowest) own_.weights[i] = 0;
        }
        const int64_t total = sum(own_.weights, found.count);  // the likeliest is never left out
        return found.ids[first_beyond(own_.weights, found.count, target_of(at, total))];
    }

    // All that weigh anything, but for what top-k leaves out.
    Candidates candidates(const float* line, const Scale& scale, int64_t top_k) {
        auto* copy = reinterpret_cast<float*>(own_.weights);  // which are made later
        float least = scale.least;
        const int64_t maxima = num_maxima(s_.vocab);
        if (top_k <= maxima) least = std::max(least, kth_largest(own_.maxima, maxima, top_k, copy));
        Candidates found{own_.ids, own_.scores, 0};
        found.take(line, s_.vocab, own_.maxima, least);
        if (top_k < found.count) found.keep(kth_largest(found.scores, found.count, top_k, copy));
        return found;
    }

    int64_t drawn_from_all(const float* line, const Scale& scale, int64_t lowest, double at) {
        const int64_t total = sum_groups(line, scale, lowest), *sums = own_.weights;
        int64_t target = target_of(at, total), group = 0;
        while (group < num_groups() - 1 && sums[group] <= target) target -= sums[group++];
        int64_t weights[GROUP];
        return group * GROUP + first_beyond(weights, weigh_group(line, group, scale, lowest, weights), target);
    }

    int64_t num_groups() const { return (s_.vocab + GROUP - 1) / GROUP; }

    // Weights of all tokens; those of each group are added up in `weights`.
    int64_t sum_groups(const float* line, const Scale& scale, int64_t lowest) {
        int64_t weights[GROUP], total = 0;
        for (int64_t group = 0; group < num_groups(); ++group) {
            int64_t& own = own_.weights[group] = 0;
            if (may_hold(own_.maxima, group, scale.least))
                own = sum(weights, weigh_group(line, group, scale, lowest, weights));
            total += own;
        }
        return total;
    }

    int64_t weigh_group(const float* line, int64_t group, const Scale& scale, int64_t lowest, int64_t* out) const {
        const int64_t first = group * GROUP, count = std::min(GROUP, s_.vocab - first);
        weigh(line + first, count, scale, lowest, out);
        return count;
    }

    // Log-probabilities by the logits as the model made them, of the token and of the likeliest. What weights leave out
    // is less than 2^-42 of the likeliest for each token: nothing next to the rounding of fp32.
    void report(int64_t b, const Peak& raw) {
        constexpr double LOG_2 = 0.69314718055994530942;
        const float* line = call_.logits + b * s_.vocab;
        float* top_logprobs = call_.top_logprobs + b * call_.num_top;
        int64_t* top_ids = call_.top_ids + b * call_.num_top;
        if (!raw.is_finite) {  // its request has ended
            call_.logprobs[b] = std::numeric_limits<float>::quiet_NaN();
            std::fill(top_logprobs, top_logprobs + call_.num_top, call_.logprobs[b]);
            return std::fill(top_ids, top_ids + call_.num_top, 0);
        }
        find_peak(line, s_.vocab, own_.maxima);
        const long double total = sum_groups(line, scale_of(raw.score, 1.0), 0);
        // In long double, because the log of a double asks for glibc 2.29.
        const double all = raw.score + static_cast<double>(std::log(total)) - 42 * LOG_2;
        const auto logprob = [&](int64_t token) { return static_cast<float>(line[token] - all); };
        call_.logprobs[b] = logprob(call_.tokens[b]);
        find_top(line, top_ids);
        for (int64_t i = 0; i < call_.num_top; ++i) top_logprobs[i] = logprob(top_ids[i]);
    }

    // The ids of the `num_top` largest scores.
    void find_top(const float* line, int64_t* top_ids) {
        const int64_t wanted = call_.num_top, maxima = num_maxima(s_.vocab);
        if (!wanted) return;
        float least = std::numeric_limits<float>::lowest();
        if (wanted <= maxima)
            least = std::max(least, kth_largest(own_.maxima, maxima, wanted, reinterpret_cast<float*>(own_.weights)));
        Candidates found{own_.ids, own_.scores, 0};
        found.take(line, s_.vocab, own_.maxima, least);
        auto* places = reinterpret_cast<int32_t*>(own_.line);
        const int64_t count = std::min(wanted, found.count);
        for (int64_t i = 0; i < found.count; ++i) places[i] = static_cast<int32_t>(i);
        std::partial_sort(places, places + count, places + found.count, [&](int32_t a, int32_t b) {
            return found.scores[a] != found.scores[b] ? found.scores[a] > found.scores[b] : a < b;
        });
        for (int64_t i = 0; i < count; ++i) top_ids[i] = found.ids[places[i]];
        for (int64_t id = 0, i = count; i < wanted; ++id)  // behind them those that cannot be drawn
            if (line[id] < least) top_ids[i++] = id;
    }

    const Sampling& s_;
    const Draw& call_;
    Place own_;
};

}  // namespace

// Of the workspace of a place; each thread that draws needs one.
EXPORT int64_t looped_sampling_bytes(int64_t vocab) { return Place(nullptr, vocab).bytes(); }

// On as many threads as there are places in `workspace`. A row's token depends on neither.
EXPORT void looped_draw(ThreadPool& pool, const Sampling& sampling, const Draw& call, char* workspace, int64_t places) {
    std::atomic<int64_t> next{0};
    const auto work = [&](int thread) {
        if (thread >= places) return;
        Drawer drawer(sampling, call, workspace + thread * looped_sampling_bytes(sampling.vocab));
        for (int64_t b = next++; b < call.batch; b = next++) drawer.draw(b);
    };
    // not worth waking the others
    if (call.batch == 1 || places == 1 || call.batch * sampling.vocab <= ALONE) return work(0);
    pool.run(work);
}

}  // namespace looped
