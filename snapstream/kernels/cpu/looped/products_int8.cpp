// Products of tokens in int8 with quantized columns, and the choice among the instructions that sum them.
//
// Invariant: within a group a sum is exact; groups are added from first to last, each times the scale of the weights
// and of the token. So products are batch-invariant, whatever instructions sum.
#include <atomic>
#include <chrono>
#include <vector>

#include "products.h"

namespace looped {

namespace {

constexpr int64_t CODE_BLOCK = 512;  // columns after which a tile lets the next tokens have the same weights

// A unit of a matrix (panels.h) as vectors of four columns each.
template <int BITS>
struct Quads {
    static constexpr int COUNT = 8 / BITS;
    static INLINE bits of(bits unit, int part) {
        if constexpr (BITS == 8) return unit;
        else return (unit >> (4 * part)) & 0x0f0f0f0fu;
    }
};

// As `tile` of panels.h: `cols` columns times T tokens, added to sums [P][T][32]. The whole sums stay in registers
// for a group, the sums of groups in the nearest cache.
template <int BITS, class Dot, int T, int P>
void code_tile(const Stack& stack, const char* weight, const int32_t* x, int64_t cols, int v, float* sums,
               Prefetch fetch) {
    using Form = Codes<BITS>;
    constexpr int WIDE = wide(T), VECTORS = P * WIDE;
    const auto place = [&](int i) { return weight + i / WIDE * fetch.apart; };
    const auto half = [&](int i) { return reinterpret_cast<const uint16_t*>(place(i)) + (v + i % WIDE) * W; };
    const auto sum = [&](int t, int i) { return sums + (i / WIDE * T + t) * PANEL + (v + i % WIDE) * W; };
    for (int64_t left = cols; left > 0; left -= stack.group) {
        vec scales[VECTORS];
        UNROLL for (int i = 0; i < VECTORS; ++i) scales[i] = load_half(half(i));
        weight += Form::HEAD;
        ints acc[T][VECTORS];
        UNROLL for (int t = 0; t < T; ++t)
            UNROLL for (int i = 0; i < VECTORS; ++i) acc[t][i] = (ints)all_bits(x[T + t]);
        const int32_t* codes = x + 2 * T;
        for (int64_t unit = 0; unit < stack.group / Form::COLS; ++unit) {
            bits stored[VECTORS];
            UNROLL for (int i = 0; i < VECTORS; ++i) stored[i] = Form::stored(place(i), v + i % WIDE);
            UNROLL for (int part = 0; part < Quads<BITS>::COUNT; ++part) {
                typename Dot::Weight own[VECTORS];
                UNROLL for (int i = 0; i < VECTORS; ++i) own[i] = Dot::weight(Quads<BITS>::of(stored[i], part));
                UNROLL for (int t = 0; t < T; ++t) {
                    const typename Dot::Token token = Dot::token(codes[part * T + t]);
                    UNROLL for (int i = 0; i < VECTORS; ++i) Dot::add(acc[t][i], own[i], token);
                }
            }
            UNROLL for (int p = 0; p < P; ++p) {
                __builtin_prefetch(fetch.from + p * fetch.apart);
                __builtin_prefetch(fetch.from + p * fetch.apart + 64);
            }
            fetch.from += fetch.step;
            weight += Form::BYTES;
            codes += Quads<BITS>::COUNT * T;
        }
        UNROLL for (int p = 0; p < P; ++p) __builtin_prefetch(fetch.from + p * fetch.apart);
        fetch.from += fetch.step ? Form::HEAD : 0;
        UNROLL for (int t = 0; t < T; ++t) {
            float own;
            std::memcpy(&own, x + t, 4);
            UNROLL for (int i = 0; i < VECTORS; ++i)
                store(sum(t, i), load(sum(t, i)) + __builtin_convertvector(acc[t][i], vec) * (scales[i] * own));
        }
        x = codes;
    }
}

using CodeTile = void (*)(const Stack&, const char*, const int32_t*, int64_t, int, float*, Prefetch);

template <int BITS, class Dot, int... T>
INLINE CodeTile code_tile_of(int64_t tokens, std::integer_sequence<int, T...>) {
    static constexpr CodeTile tiles[] = {code_tile<BITS, Dot, T + 1, 1>...};
    return tiles[tokens - 1];
}

// One panel times all tokens: sums [tokens][32]. More tokens than a tile has take turns at a block of columns, which
// stays in the nearest cache, and meanwhile ask for the next, each for its share.
template <int BITS, class Dot>
void code_panel(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    using Form = Codes<BITS>;
    std::fill(sums, sums + groups.tokens * PANEL, 0.0f);
    const auto* codes = reinterpret_cast<const int32_t*>(x);
    const bool once = groups.count == 1 && wide(groups.tokens) == VECS;
    const int64_t block = once ? stack.cols : CODE_BLOCK, per_group = 2 + stack.group / 4;
    for (int64_t first = 0; first < stack.cols; first += block) {
        const int64_t count = std::min(block, stack.cols - first), units = count / Form::COLS;
        const char* weight = panel + offset<Form>(stack, first);
        const char* next = panel + offset<Form>(stack, first + count);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t begin = groups.begin(group), size = groups.size(group);
            const CodeTile own = code_tile_of<BITS, Dot>(size, UpToMost{});
            const int32_t* from = codes + begin * packed_ints(stack) + first / stack.group * per_group * size;
            const int64_t bytes = next - weight;
            const Prefetch fetch = once ? Prefetch{panel + AHEAD, Form::BYTES}
                                        : Prefetch{next + bytes * group / groups.count, bytes / (units * groups.count)};
            for (int v = 0; v < VECS; v += wide(size))
                own(stack, weight, from, count, v, sums + begin * PANEL, v ? Prefetch{weight, 0} : fetch);
        }
    }
}

// Two panels times up to PAIR_TOKENS tokens: sums [2][tokens][32].
template <int BITS, class Dot>
void code_pair(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + 2 * groups.tokens * PANEL, 0.0f);
    const auto* codes = reinterpret_cast<const int32_t*>(x);
    const Prefetch fetch{panel + AHEAD, Codes<BITS>::BYTES, groups.apart ? groups.apart : stack.panel_bytes};
    if (groups.tokens == 1) code_tile<BITS, Dot, 1, 2>(stack, panel, codes, stack.cols, 0, sums, fetch);
    if constexpr (PAIR_TOKENS > 1)
        if (groups.tokens == 2) code_tile<BITS, Dot, 2, 2>(stack, panel, codes, stack.cols, 0, sums, fetch);
}

struct Way {  // to sum
    Products int8, int4;
};
template <class Dot>
Way way() {
    return {{code_panel<8, Dot>, code_pair<8, Dot>}, {code_panel<4, Dot>, code_pair<4, Dot>}};
}

// The least time of one panel that lies in a cache, times one token and times eight.
double seconds_of(const Way& way) {
    constexpr int64_t COLS = 2048, GROUP = 32, TOKENS = 8;
    Stack stack{};
    stack.panel_bytes = COLS / GROUP * (2 * PANEL + GROUP * PANEL);
    stack.rows = PANEL, stack.cols = COLS, stack.format = I8, stack.group = GROUP, stack.inputs = I8;
    const std::vector<char> panel(stack.panel_bytes + 2 * AHEAD);
    const std::vector<float> x(TOKENS * packed_ints(stack));
    std::vector<float> sums(TOKENS * PANEL);
    double total = 0.0;
    for (int64_t tokens : {int64_t{1}, TOKENS}) {
        double least = std::numeric_limits<double>::infinity();
        for (int i = 0; i < 100; ++i) {
            const auto began = std::chrono::steady_clock::now();
            way.int8.of_one(stack, panel.data(), x.data(), Groups(tokens), sums.data());
            least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
        }
        total += least;
    }
    return total;
}

// Those that this processor can go.
std::vector<Way> ways() {
    std::vector<Way> found = {way<DotPairs>()};
#ifdef HAS_DOT_BYTES
    if (DotBytes::is_here()) found.push_back(way<DotBytes>());
#endif
    return found;
}

struct Choice {
    const std::vector<Way> ways = looped::ways();
    std::atomic<size_t> chosen{0};
    Choice() {
        for (size_t i = 1; i < ways.size(); ++i)
            if (seconds_of(ways[i]) < seconds_of(ways[chosen])) chosen = i;
    }
};
Choice& choice() {
    static Choice own;  // tried once in the life of a process
    return own;
}

}  // namespace

Products code_products(int64_t format) {
    const Way& way = choice().ways[choice().chosen];
    return format == I8 ? way.int8 : way.int4;
}

int64_t choose_way(int64_t way) {
    if (way >= 0) choice().chosen = std::min<size_t>(way, choice().ways.size() - 1);
    return choice().chosen;
}

}  // namespace looped
