// Products of tokens in int8 with quantized columns, of tokens in int16 with other ones, and the choice among the
// instructions that sum them.
//
// Invariant: within a group a sum is exact; groups are added from first to last, each times the scale of the weights
// and of the token. So products are batch-invariant, whatever instructions sum.
#include <atomic>
#include <chrono>
#include <vector>

#include "products.h"

namespace looped {

namespace {

constexpr int SPAN = 32;         // columns that are summed at once, unless a group has fewer
constexpr int64_t CODE_BLOCK = 512;  // columns after which a tile lets the next tokens have the same weights

// A unit of a matrix (panels.h) as vectors of four columns each, and what multiplies the sums of a group. GROUP: its
// columns; 0: those of the matrix.
template <class Form>
struct Quads {
    explicit Quads(const Stack&) {}
    static constexpr int COUNT = 8 / Form::BITS, GROUP = 0;
    static constexpr bool IS_SPLIT = false;
    static INLINE bits of(bits unit, int part) {
        if constexpr (Form::BITS == 8) return unit;
        else if constexpr (IS_MXFP4) return Mxfp4::integers((unit >> (4 * part)) & 0x0f0f0f0fu);
        else return (unit >> (4 * part)) & 0x0f0f0f0fu;
    }
    using Factors = NoScale;
    static INLINE Factors factors(const char*, int) { return {}; }
    static INLINE vec scale(Factors, const char* head, int v, int) {
        if constexpr (IS_MXFP4) return Mxfp4::power(head, v) * 0.5f;
        else return load_half(reinterpret_cast<const uint16_t*>(head) + v * W);
    }
    static INLINE vec minimum(Factors own, const char* head, int v, int) { return scale(own, head + 2 * PANEL, v, 0); }

  private:
    static constexpr bool IS_MXFP4 = std::is_same_v<Form, Mxfp4>;
};

template <class Own, int OWN_GROUP, bool MINIMUM, bool PACKED>
struct Quads<Blocks<Own, OWN_GROUP, MINIMUM, PACKED>> {
    using Form = Blocks<Own, OWN_GROUP, MINIMUM, PACKED>;
    explicit Quads(const Stack& stack) : form(form_of<Form>(stack)) {}
    static constexpr int COUNT = Form::COLS / 4, GROUP = OWN_GROUP;
    static constexpr bool IS_SPLIT = Own::IS_SPLIT;
    template <class Unit>
    INLINE bits of(const Unit& unit, int part) const { return form.four(unit, part); }
    using Factors = typename Form::Line;
    INLINE Factors factors(const char* head, int v) const { return form.factors(head, v); }
    INLINE vec scale(const Factors& own, const char* head, int v, int sub) const {
        return form.scale(own, head, v, sub).factor;
    }
    INLINE vec minimum(const Factors& own, const char* head, int v, int sub) const {
        return form.scale(own, head, v, sub).minimum;
    }

  private:
    Form form;
};

// What is made of a block of columns for many tokens: COLUMNS to a unit, with scales in fp32 and minimums behind them.
template <int COLUMNS, int OWN_GROUP, bool MINIMUM>
struct Widened {
    static constexpr int BITS = 8, COLS = COLUMNS, BYTES = 128, GROUP = OWN_GROUP, HEAD = 4 * PANEL * (1 + MINIMUM);
    static constexpr bool HAS_MINIMUM = MINIMUM;
    static INLINE bits stored(const char* unit, int v) { return load_bits(unit + v * W * 4); }
};
template <int COLUMNS, int OWN_GROUP, bool MINIMUM>
struct Quads<Widened<COLUMNS, OWN_GROUP, MINIMUM>> {
    explicit Quads(const Stack&) {}
    static constexpr int COUNT = 1, GROUP = OWN_GROUP;
    static constexpr bool IS_SPLIT = false;
    static INLINE bits of(bits unit, int) { return unit; }
    using Factors = NoScale;
    static INLINE Factors factors(const char*, int) { return {}; }
    static INLINE vec scale(Factors, const char* head, int v, int) {
        return load(reinterpret_cast<const float*>(head) + v * W);
    }
    static INLINE vec minimum(Factors own, const char* head, int v, int) { return scale(own, head + 4 * PANEL, v, 0); }
};
using Shorts = Widened<2, SPAN, false>;  // pairs of columns in int16
template <class Form>
using Bytes = Widened<4, Form::GROUP, Form::HAS_MINIMUM>;

// As `tile` of panels.h: `cols` columns times T tokens, added to sums [P][T][32]. The whole sums stay in registers
// for a group, the sums of groups in the nearest cache.
template <class Form, class Dot, int T, int P, int GROUP>  // GROUP: columns of a group, at most SPAN; 0: several SPANs
INLINE void tile_of_groups(const Stack& stack, const char* weight, const int32_t* x, int64_t cols, int v, float* sums,
                           Prefetch fetch) {
    using Own = std::conditional_t<Dot::NARROW, shorts, ints>;
    constexpr int RUN = GROUP ? GROUP : SPAN, WIDE = wide(T), VECTORS = P * WIDE, UNITS = RUN / Form::COLS;
    constexpr int AT_ONCE = W == 16 ? 1 : UNITS;
    // Whether four columns, which take six operations to put together, are kept for both passes.
    constexpr bool KEEPS = Quads<Form>::IS_SPLIT && Dot::PASSES > 1 && (T + 2) * VECTORS + 2 <= (W == 16 ? 32 : 16);
    const Quads<Form> form(stack);
    const auto lies = [&](const char* from, int i) { return from + i / WIDE * fetch.apart; };
    sums += v * W, weight += v * W * 4;  // of the first vector: further ones lie at distances that are constants
    const auto stored_at = [&](const char* from, int i) {
        if constexpr (Form::BYTES % (4 * PANEL)) return Form::stored(lies(from, i) - v * W * 4, v + i % WIDE);  // half words
        else return Form::stored(lies(from, i), i % WIDE);
    };
    const int64_t group = GROUP ? GROUP : stack.group;
    const auto begin = [](int32_t sum) { return (ints)all_bits(Form::HAS_MINIMUM ? 0 : sum); };
    for (int64_t left = cols; left > 0;) {
        const char* head = weight - v * W * 4;
        weight += Form::HEAD;
        typename Quads<Form>::Factors factors[VECTORS];
        UNROLL for (int i = 0; i < VECTORS; ++i) factors[i] = form.factors(lies(head, i), v + i % WIDE);
        for (int sub = 0; sub < SUBS<Form>; ++sub, left -= group) {
            const int32_t* codes = x + 2 * T;
            ints acc[T][VECTORS];
            for (int64_t first = 0; first < group; first += RUN) {
                Own own[T][VECTORS];
                UNROLL for (int t = 0; t < T; ++t)
                    UNROLL for (int i = 0; i < VECTORS; ++i) {
                        if constexpr (Dot::NARROW) own[t][i] = Own{};
                        else own[t][i] = first ? acc[t][i] : begin(x[T + t]);
                    }
                for (int done = 0; done < UNITS; done += AT_ONCE) UNROLL for (int unit = 0; unit < AT_ONCE; ++unit) {
                    UNROLL for (int part = 0; part < Quads<Form>::COUNT; ++part) {
                        bits quads[VECTORS];
                        if constexpr (KEEPS)
                            UNROLL for (int i = 0; i < VECTORS; ++i)
                                quads[i] = form.of(stored_at(weight, i), part);
                        UNROLL for (int pass = 0; pass < Dot::PASSES; ++pass, codes += T) {
                            bits four[VECTORS];
                            const char* from = weight;  // hidden: loaded again, as no registers could keep them
                            if constexpr (Dot::PASSES > 1) asm volatile("" : "+r"(from));
                            UNROLL for (int i = 0; i < VECTORS; ++i) {
                                if constexpr (!KEEPS) {
                                    four[i] = Dot::pass(form.of(stored_at(from, i), part), pass);
                                } else {
                                    four[i] = Dot::pass(quads[i], pass);
                                }
                            }
                            Dot::template add<T, VECTORS>(own, four, codes);
                        }
                    }
                    fetch.template ask<P, lines_of<Form>(T), T>(fetch.step);
                    weight += Form::BYTES;
                }
                UNROLL for (int t = 0; t < T; ++t)
                    UNROLL for (int i = 0; i < VECTORS; ++i) {
                        if constexpr (Dot::NARROW)
                            acc[t][i] = (first ? acc[t][i] : begin(x[T + t])) + Dot::widen(own[t][i]);
                        else acc[t][i] = own[t][i];
                    }
            }
            fetch.template ask<P, SUBS<Form> == 1 ? 1 : HEAD_LINES<Form>, T>(fetch.head);
            vec scales[VECTORS], minimums[VECTORS];
            UNROLL for (int i = 0; i < VECTORS; ++i) {
                const char* own = lies(head, i);
                scales[i] = form.scale(factors[i], own, v + i % WIDE, sub);
                if constexpr (Form::HAS_MINIMUM) minimums[i] = form.minimum(factors[i], own, v + i % WIDE, sub);
            }
            const auto* numbers = reinterpret_cast<const float*>(x);
            float* lines = sums;  // hidden: they would be kept on the stack, and stored twice
            asm volatile("" : "+r"(lines));
            const auto sum = [&](int t, int i) { return lines + (i / WIDE * T + t) * PANEL + i % WIDE * W; };
            UNROLL for (int t = 0; t < T; ++t)
                UNROLL for (int i = 0; i < VECTORS; ++i) {
                    const vec factor = scales[i] * all(numbers[t]);
                    vec made = load(sum(t, i)) + __builtin_convertvector(acc[t][i], vec) * factor;
                    if constexpr (Form::HAS_MINIMUM) made += minimums[i] * all(numbers[T + t]);
                    store(sum(t, i), made);
                }
            x = codes;
        }
    }
}

template <class Form, class Dot, int T, int P>
void code_tile(const Stack& stack, const char* weight, const int32_t* x, int64_t cols, int v, float* sums,
               Prefetch fetch) {
    constexpr int GROUP = Quads<Form>::GROUP;
    if constexpr (GROUP > 0) return tile_of_groups<Form, Dot, T, P, GROUP>(stack, weight, x, cols, v, sums, fetch);
    else if (stack.group == SPAN) return tile_of_groups<Form, Dot, T, P, SPAN>(stack, weight, x, cols, v, sums, fetch);
    if constexpr (GROUP == 0 && !std::is_same_v<Form, Mxfp4>)
        tile_of_groups<Form, Dot, T, P, 0>(stack, weight, x, cols, v, sums, fetch);
}

using CodeTile = void (*)(const Stack&, const char*, const int32_t*, int64_t, int, float*, Prefetch);

template <class Form, class Dot, int... T>
INLINE CodeTile code_tile_of(int64_t tokens, std::integer_sequence<int, T...>) {
    static constexpr CodeTile tiles[] = {code_tile<Form, Dot, T + 1, 1>...};
    return tiles[tokens - 1];
}

// `cols` columns of blocks as bytes.
template <class Form>
INLINE void widen_blocks(const Stack& stack, const char* from, int64_t cols, char* to) {
    using Wide = Bytes<Form>;
    const auto form = form_of<Form>(stack);
    for (; cols > 0; cols -= Form::BLOCK) {
        const char* head = from;
        from += Form::HEAD;
        for (int sub = 0; sub < Form::SUBS; ++sub) {
            auto* scales = reinterpret_cast<float*>(to);
            for (int v = 0; v < VECS; ++v) {
                const auto line = form.scale(head, v, sub);
                store(scales + v * W, line.factor);
                if constexpr (Form::HAS_MINIMUM) store(scales + PANEL + v * W, line.minimum);
            }
            to += Wide::HEAD;
            for (int64_t col = 0; col < Form::GROUP; col += Form::COLS, from += Form::BYTES) {
                for (int v = 0; v < VECS; ++v) {
                    const auto own = Form::stored(from, v);
                    UNROLL for (int part = 0; part < Form::COLS / 4; ++part) {
                        const bits four = form.four(own, part);
                        std::memcpy(to + part * Wide::BYTES + v * W * 4, &four, sizeof four);
                    }
                }
                to += Form::COLS / 4 * Wide::BYTES;
            }
        }
    }
}

// One panel times all tokens: sums [tokens][32]. More tokens than a tile has take turns at a block of columns, which
// stays in the nearest cache, and meanwhile ask for the next, each for its share. Used: the form of that block.
template <class Form, class Dot, class Used = Form>
void code_panel(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + groups.tokens * PANEL, 0.0f);
    const auto* codes = reinterpret_cast<const int32_t*>(x);
    const bool once = groups.count == 1 && wide(groups.tokens) == VECS;
    const int64_t block = once ? stack.cols : CODE_BLOCK, per_group = 2 + stack.group / 4 * Dot::PASSES;
    constexpr bool WIDENS = !std::is_same_v<Form, Used>;
    if constexpr (WIDENS)
        if (groups.count == 1) return code_panel<Form, Dot>(stack, panel, x, groups, sums);
    constexpr int64_t GROUP = WIDENS ? Quads<Used>::GROUP : CODE_BLOCK;
    alignas(64) char bytes[WIDENS ? CODE_BLOCK / GROUP * (Used::HEAD + GROUP / Used::COLS * Used::BYTES) : 1];
    for (int64_t first = 0; first < stack.cols; first += block) {
        const int64_t count = std::min(block, stack.cols - first), units = count / Used::COLS;
        const char *weight = panel + offset<Form>(stack, first), *used = weight;
        const char* next = panel + offset<Form>(stack, first + count);
        if constexpr (WIDENS) widen_blocks<Form>(stack, weight, count, bytes), used = bytes;
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t begin = groups.begin(group), size = groups.size(group);
            const CodeTile own = code_tile_of<Used, Dot>(size, UpToMost{});
            const int32_t* from = codes + (begin * stack.cols + first * size) / stack.group * per_group;
            for (int v = 0; v < VECS; v += wide(size))
                own(stack, used, from, count, v, sums + begin * PANEL,
                    once ? Prefetch{panel + ahead_of(size), Form::BYTES, 0, HEAD_SHARE<Form>}
                         : share_of(next, next - weight, units, groups, group, v));
        }
    }
}

constexpr int64_t SHORTS_BLOCK = BLOCK_K;  // columns that all tokens use before the next are rounded
constexpr int64_t GROUP_BYTES = Shorts::HEAD + SHORTS_GROUP / Shorts::COLS * Shorts::BYTES;

// What vector v of the rows is multiplied by to be rounded; its scale goes to the head of a group.
INLINE vec invert(vec largest, float missing, char* head, int v) {
    store(reinterpret_cast<float*>(head) + v * W, largest * (missing / MOST_WEIGHT));
    return largest < all(1e-30f) ? vec{} : MOST_WEIGHT / largest;
}

// A number and the next column's, as two of a lane.
INLINE void store_pair(vec first, vec second, vec inverse, char* to) {
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: the last bits of the sum are the rounded number
    const bits both = ((bits)(first * inverse + magic) & 0xffffu) | (bits)(second * inverse + magic) << 16;
    std::memcpy(to, &both, sizeof both);
}

INLINE ints larger(ints a, ints b) { return a > b ? a : b; }

template <class Form>  // void: FP8
INLINE const char* at(const Stack& stack, const char* panel, int64_t col) {
    if constexpr (std::is_void_v<Form>) return panel + col * PANEL;
    else return panel + offset<Form>(stack, col);
}

// Columns `first` and further of a panel, as a group of Shorts.
template <class Form>
INLINE void round_group(const Stack& stack, const char* panel, int64_t first, char* to) {
    const char* from = at<Form>(stack, panel, first);
    char* out = to + Shorts::HEAD;
    float missing = 1.0f;  // factor of the numbers below
    alignas(64) float numbers[SHORTS_GROUP * PANEL];
    if constexpr (std::is_void_v<Form>) missing = widen_columns(stack, panel, first, SHORTS_GROUP, numbers);
    for (int v = 0; v < VECS; ++v) {
        if constexpr (std::is_same_v<Form, PairsBF16>) {  // read twice in place of a copy in fp32
            typedef int16_t halves __attribute__((vector_size(W * 4)));
            halves most = {};
            for (int i = 0; i < SHORTS_GROUP / 2; ++i) {
                const auto own = (halves)(Form::stored(from + i * Form::BYTES, v) & 0x7fff7fffu);
                most = own > most ? own : most;
            }
            const vec largest = (vec)larger((ints)((bits)most << 16), (ints)((bits)most & 0xffff0000u));
            const vec inverse = invert(largest, 1.0f, to, v);
            for (int i = 0; i < SHORTS_GROUP / 2; ++i) {
                const bits both = Form::stored(from + i * Form::BYTES, v);
                const vec first_column = Form::widen(both, 0, {}), second = Form::widen(both, 1, {});
                store_pair(first_column, second, inverse, out + i * Shorts::BYTES + v * W * 4);
            }
        } else {
            ints most = {};
            if constexpr (!std::is_void_v<Form>)
                for_units<Form>(stack, from, SHORTS_GROUP, v, [&](vec own, int64_t col) {
                    store(numbers + col * PANEL + v * W, own);
                    most = larger(most, (ints)((bits)own & 0x7fffffffu));
                });
            else
                for (int col = 0; col < SHORTS_GROUP; ++col)
                    most = larger(most, (ints)(load_bits(numbers + col * PANEL + v * W) & 0x7fffffffu));
            const vec inverse = invert((vec)most, missing, to, v);
            for (int i = 0; i < SHORTS_GROUP / 2; ++i) {
                const float* own = numbers + 2 * i * PANEL + v * W;
                store_pair(load(own), load(own + PANEL), inverse, out + i * Shorts::BYTES + v * W * 4);
            }
        }
    }
}

// One panel of numbers, or of FP8 blocks, times all tokens: sums [tokens][32].
template <class Form, class Dot>
void short_panel(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + groups.tokens * PANEL, 0.0f);
    alignas(64) char rounded[SHORTS_BLOCK / SHORTS_GROUP * GROUP_BYTES];
    const auto* packed = reinterpret_cast<const int32_t*>(x);
    constexpr int64_t PER_GROUP = 2 + SHORTS_GROUP / 2;
    for (int64_t first = 0; first < stack.cols; first += SHORTS_BLOCK) {
        const int64_t count = std::min(SHORTS_BLOCK, stack.cols - first);
        for (int64_t col = 0; col < count; col += SHORTS_GROUP)
            round_group<Form>(stack, panel, first + col, rounded + col / SHORTS_GROUP * GROUP_BYTES);
        const char *weight = at<Form>(stack, panel, first), *next = at<Form>(stack, panel, first + count);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t begin = groups.begin(group), size = groups.size(group);
            const int32_t* from = packed + (begin * stack.cols + first * size) / SHORTS_GROUP * PER_GROUP;
            for (int v = 0; v < VECS; v += wide(size))
                code_tile_of<Shorts, Dot>(size, UpToMost{})(
                    stack, rounded, from, count, v, sums + begin * PANEL,
                    share_of(next, next - weight, count / Shorts::COLS, groups, group, v));
        }
    }
}

// Two panels times up to PAIR_TOKENS tokens: sums [2][tokens][32].
template <class Form, class Dot>
void code_pair(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + 2 * groups.tokens * PANEL, 0.0f);
    const auto* codes = reinterpret_cast<const int32_t*>(x);
    const int64_t apart = groups.apart ? groups.apart : stack.panel_bytes;
    if constexpr (Quads<Form>::IS_SPLIT && W == 8) {  // no registers for both
        for (int i = 0; i < 2; ++i, panel += apart, sums += PANEL)
            code_tile<Form, Dot, 1, 1>(stack, panel, codes, stack.cols, 0, sums,
                                       {panel + AHEAD, Form::BYTES, 0, HEAD_SHARE<Form>});
        return;
    }
    const Prefetch fetch{panel + AHEAD, Form::BYTES, apart, HEAD_SHARE<Form>};
    if (groups.tokens == 1) code_tile<Form, Dot, 1, 2>(stack, panel, codes, stack.cols, 0, sums, fetch);
    if constexpr (PAIR_TOKENS > 1)
        if (groups.tokens == 2) code_tile<Form, Dot, 2, 2>(stack, panel, codes, stack.cols, 0, sums, fetch);
}

// A panel that lies in a cache, to try products with.
Stack panel_of_codes() {
    constexpr int64_t COLS = 2048, GROUP = 32;
    Stack stack{};
    stack.panel_bytes = COLS / GROUP * (2 * PANEL + GROUP * PANEL);
    stack.rows = PANEL, stack.cols = COLS, stack.format = I8, stack.group = GROUP, stack.inputs = I8;
    return stack;
}

template <class Form, class Dot, class Used = Form>
Products products() {
    return {code_panel<Form, Dot, Used>, code_pair<Form, Dot>};
}

template <class Dot8, class Dot4>
Products products_of_codes(int64_t format) {
    switch (format) {
        case I8: return products<Codes<8>, Dot8>();
        case I4: return products<Codes<4>, Dot4>();
        case MXFP4: return products<Mxfp4, Dot8>();
        case Q2K: return products<BlocksQ2, Dot4, Bytes<BlocksQ2>>();
        case Q3K: return products<BlocksQ3, Dot4, Bytes<BlocksQ3>>();
        case Q4K: return products<BlocksQ4, Dot4, Bytes<BlocksQ4>>();
        case Q5K: return products<BlocksQ5, Dot8, Bytes<BlocksQ5>>();
        case Q6K: return products<BlocksQ6, Dot8, Bytes<BlocksQ6>>();
        case IQ2XS: case IQ2S: return products<Places16, Dot8, Bytes<Places16>>();
        case IQ2XXS: case IQ3XXS: case IQ3S: case IQ4XS: return products<Places32, Dot8, Bytes<Places32>>();
        default: return products<Unsigned4, Dot4>();
    }
}

template <class Dot>
Product product_of_shorts(int64_t format) {
    return format == BF16 ? short_panel<PairsBF16, Dot> : format == F16 ? short_panel<HalfF16, Dot> : short_panel<void, Dot>;
}

struct Way {  // to sum: products by the format of the matrix, and words of four codes of a token
    Products (*of_codes)(int64_t);
    Product (*of_shorts)(int64_t);
    int words8, words4;
};
template <class Dot8, class Dot4, class Dot16>
Way way() {
    return {products_of_codes<Dot8, Dot4>, product_of_shorts<Dot16>, Dot8::PASSES, Dot4::PASSES};
}

// Those that this processor can go.
std::vector<Way> ways() {
#if ISA
    std::vector<Way> found = {way<DotPairs, DotNibbles, ShortsInTwo>()};
#else
    std::vector<Way> found = {way<DotPairs, DotPairs, ShortsInTwo>()};
#endif
#ifdef HAS_DOT_BYTES
    if (DotBytes::is_here()) found.push_back(way<DotBytes, DotBytes, ShortsAtOnce>());  // both came with VNNI
#endif
    return found;
}

double seconds_of(const Way& way) {
    const Stack stack = panel_of_codes();
    const Product own = way.of_codes(stack.format).of_one;
    return looped::seconds_of(own, stack, 1) + looped::seconds_of(own, stack, 8);
}

struct Choice {
    const std::vector<Way> ways = looped::ways();
    std::atomic<size_t> chosen{0};
    Choice() {
        for (size_t i = 1; i < ways.size(); ++i)
            if (seconds_of(ways[i]) < seconds_of(ways[chosen])) chosen = i;
    }
    const Way& way() const { return ways[chosen]; }
};
Choice& choice() {
    static Choice own;  // tried once in the life of a process
    return own;
}

}  // namespace

double seconds_of(Product product, const Stack& stack, int64_t tokens, int64_t most) {
    const std::vector<char> panel(stack.panel_bytes + 2 * AHEAD);
    const std::vector<float> x(tokens * 2 * stack.cols);
    std::vector<float> sums(tokens * PANEL);
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 50; ++i) {
        const auto began = std::chrono::steady_clock::now();
        product(stack, panel.data(), x.data(), Groups(tokens, nullptr, 0, most), sums.data());
        least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
    return least;
}

Products code_products(int64_t format) { return choice().way().of_codes(format); }

int64_t words_of_four(int64_t format) {
    const bool has_nibbles = format == I4 || format == U4 || format == Q2K || format == Q3K || format == Q4K;
    return has_nibbles ? choice().way().words4 : choice().way().words8;
}

Product short_product(int64_t format) { return choice().way().of_shorts(format); }

// Whether it is faster than fp32 in prefill of bf16: tried once in the life of a process.
EXPORT bool looped_gains_by_int16() {
    static const bool gains = [] {
        Stack stack{};
        stack.rows = PANEL, stack.cols = 1024, stack.format = BF16, stack.panel_bytes = 1024 * PANEL * 2;
        return seconds_of(short_product(BF16), stack, 48) < seconds_of(products_of(BF16).of_one, stack, 48);
    }();
    return gains;
}

// Whether prefill is faster with tokens in int8 than with any other inputs: the same.
EXPORT bool looped_gains_by_int8() {
    static const bool gains = [] {
        const Stack stack = panel_of_codes();
        const Product other = looped_gains_by_bf16() ? bf16_product(I8) : products_of(I8).of_one;
        return seconds_of(code_products(I8).of_one, stack, 48) < seconds_of(other, stack, 48);
    }();
    return gains;
}

int64_t most_integers() {
    static const int64_t most = [] {
        const Stack stack = panel_of_codes();
        const Product own = code_products(I8).of_one;
        return seconds_of(own, stack, 48, MOST / 2) < seconds_of(own, stack, 48) ? MOST / 2 : MOST;
    }();
    return most;
}

// Which way to sum them is in use: the fastest, or for tests the one that is asked for (simd.h); -1 asks for none.
EXPORT int64_t looped_way(int64_t way) {
    if (way >= 0) choice().chosen = std::min<size_t>(way, choice().ways.size() - 1);
    return choice().chosen;
}

}  // namespace looped
