// Products of tokens in bf16 with a panel, and whether they are faster here than those of fp32.
#include "bf16_tiles.h"

namespace looped {

#if HAS_BF16
namespace {

constexpr int64_t LEAST_GROUP = 32;  // columns of a group of codes
constexpr int64_t BLOCK = 256;  // columns, whole groups, after which a tile lets the next tokens have the same weights

// Codes as whole numbers in bf16, times a power of two that is missing in the scales (panels.h).
template <int BITS>
void widen(const Stack& stack, const char* from, int64_t cols, uint32_t* pairs, float* scales) {
    using Form = Codes<BITS>;
    for (int64_t first = 0; first < cols; first += stack.group, scales += PANEL) {
        for (int v = 0; v < VECS; ++v) store(scales + v * W, Form::scale(from, v));
        from += Form::HEAD;
        for (int64_t col = 0; col < stack.group; col += Form::COLS, from += Form::BYTES)
            for (int v = 0; v < VECS; ++v) {
                const bits stored = Form::stored(from, v);
                UNROLL for (int c = 0; c < Form::COLS; c += 2) {
                    const bits both = as_bits(Form::widen(stored, c, all(1.0f))) >> 16 |
                                      (as_bits(Form::widen(stored, c + 1, all(1.0f))) & 0xffff0000u);
                    std::memcpy(pairs + c / 2 * PANEL + v * W, &both, sizeof both);
                }
                if (v == VECS - 1) pairs += Form::COLS / 2 * PANEL;
            }
    }
}

// One panel times all tokens: sums [tokens][32].
template <class Form>
void panel(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    constexpr bool SCALED = Form::HEAD > 0;
    std::fill(sums, sums + groups.tokens * PANEL, 0.0f);
    alignas(64) uint32_t widened[SCALED ? BLOCK / 2 * PANEL : 1];
    alignas(64) float scales[SCALED ? BLOCK / LEAST_GROUP * PANEL : 1];
    const auto* packed = reinterpret_cast<const uint32_t*>(x);
    const int64_t cols = padded(stack.cols);
    for (int64_t first = 0; first < cols; first += BLOCK) {
        const int64_t count = std::min(BLOCK, cols - first);
        const char *weight = panel + offset<Form>(stack, first), *next = panel + offset<Form>(stack, first + count);
        if constexpr (SCALED) widen<32 / Form::COLS>(stack, weight, count, widened, scales);
        const CodePairs block{reinterpret_cast<const char*>(widened), scales, stack.group};
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t begin = groups.begin(group), size = groups.size(group), bytes = next - weight;
            const Prefetch fetch{next + bytes * group / groups.count, bytes / (count / 2 * groups.count)};
            const uint32_t* from = packed + begin * (cols / 2) + first / 2 * size;
            if constexpr (SCALED) {
                add_groups(block, from, size, count, sums + begin * PANEL, fetch,
                           std::make_integer_sequence<int, MOST_IN_GROUPS>{});
            } else {
                pair_tile_of<ON>(size, UpToMost{})(weight, from, count, sums + begin * PANEL, fetch);
            }
        }
    }
}

// P panels of a decode step, whose few tokens read every weight as it lies: as `whole_panels` of panels.h.
template <int P>
void whole_pairs(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums,
                 PairTile own) {
    const auto* packed = reinterpret_cast<const uint32_t*>(x);
    const int64_t cols = padded(stack.cols), ahead = ahead_of(groups.tokens);
    const int64_t near = std::min(cols, ahead / PairsBF16::BYTES * PairsBF16::COLS);
    const int64_t split = cols - near, apart = groups.apart ? groups.apart : stack.panel_bytes;
    if (split) own(panel, packed, split, sums, {panel + offset<PairsBF16>(stack, near), PairsBF16::BYTES, apart});
    const char* next = groups.next ? groups.next : panel + P * stack.panel_bytes;
    own(panel + offset<PairsBF16>(stack, split), packed + split / 2 * groups.tokens, near, sums,
        {next, PairsBF16::BYTES, apart});
}

void few_or_many(const Stack& stack, const char* own, const float* x, const Groups& groups, float* sums) {
    if (groups.count > 1) return panel<PairsBF16>(stack, own, x, groups, sums);
    std::fill(sums, sums + groups.tokens * PANEL, 0.0f);
    whole_pairs<1>(stack, own, x, groups, sums, pair_tile_of<ON>(groups.tokens, UpToMost{}));
}

void two_panels(const Stack& stack, const char* own, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + 2 * groups.tokens * PANEL, 0.0f);
    whole_pairs<2>(stack, own, x, groups, sums, groups.tokens == 1 ? pair_tile<1, ON, 0, 2> : pair_tile<2, ON, 0, 2>);
}

}  // namespace

// Whether this processor has the instruction, and the compiler that made this library knew it.
EXPORT bool looped_multiplies_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
EXPORT bool looped_gains_by_bf16() {
    static const bool gains = [] {
        Stack stack{};
        stack.rows = PANEL, stack.cols = 1024, stack.format = BF16, stack.panel_bytes = 1024 * PANEL * 2;
        return looped_multiplies_bf16() &&
               seconds_of(panel<PairsBF16>, stack, 48) < seconds_of(products_of(BF16).of_one, stack, 48);
    }();
    return gains;
}
Product bf16_product(int64_t format) {
    return format == I8 ? panel<Codes<8>> : format == I4 ? panel<Codes<4>> : panel<PairsBF16>;
}

Products bf16_products() { return {few_or_many, two_panels}; }

void pack_bf16(const float* x, int64_t first, int64_t count, int64_t cols, float* packed, const Place& place) {
    auto* to = reinterpret_cast<uint32_t*>(packed) + place.begin * (padded(cols) / 2) + first / 2 * place.size
        + place.at;
    pack_row(x, count, first + count == cols ? padded(cols) - first : count, to, place.size);
}

#else

EXPORT bool looped_multiplies_bf16() { return false; }
EXPORT bool looped_gains_by_bf16() { return false; }
Product bf16_product(int64_t) { return nullptr; }
Products bf16_products() { return {nullptr, nullptr}; }
void pack_bf16(const float*, int64_t, int64_t, int64_t, float*, const Place&) {}

#endif

}  // namespace looped
