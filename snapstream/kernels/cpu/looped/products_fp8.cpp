// Products with FP8 blocks. A byte becomes a number of fp16 by shifts - the exponent of e4m3 has a bias less by eight
// - and that one of fp32; both are exact, subnormal numbers too.
//
// Invariant: the numbers of a block are summed over columns from first to last in one chain, then the blocks of a row,
// each times its scale: products are batch-invariant.
#include "products.h"

namespace looped {

namespace {

constexpr int64_t SIDE = 128;      // rows and columns of a block
constexpr float MISSING = 256.0f;  // times what widen() gives
constexpr int FEW = W == 16 ? MOST : W == 8 ? 2 : 1;  // tokens, for whose sums there are registers
static_assert(SIDE == BLOCK_K && SIDE % PANEL == 0);

int64_t blocks_of(int64_t size) { return (size + SIDE - 1) / SIDE; }

// The scales of a panel, one per block of columns.
const float* scales_of(const Stack& stack, const char* panel) {
    const int64_t at = panel - stack.data, matrix = at / stack.layer_bytes;
    const int64_t row = at % stack.layer_bytes / stack.panel_bytes * PANEL / SIDE;
    return stack.scales + (matrix * blocks_of(stack.rows) + row) * blocks_of(stack.cols);
}

// 32 bytes of a column as numbers [VECS], each a 2^8th of what it stands for.
INLINE void widen(const char* column, vec* numbers) {
#if ISA == 512
    const __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(column)));
    const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(bytes, 7), _mm512_set1_epi16(static_cast<short>(0xbfff)));
    numbers[0] = (vec)_mm512_cvtph_ps(_mm512_castsi512_si256(moved));
    numbers[1] = (vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(moved, 1));
#elif ISA == 256
    UNROLL for (int v = 0; v < VECS; ++v) {
        const __m128i bytes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(column + v * W)));
        const __m128i kept = _mm_set1_epi16(static_cast<short>(0xbfff));
        numbers[v] = (vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(bytes, 7), kept));
    }
#else
    typedef int8_t bytes __attribute__((vector_size(W)));
    for (int v = 0; v < VECS; ++v) {
        bytes own;
        std::memcpy(&own, column + v * W, W);
        const bits moved = ((bits)__builtin_convertvector(own, ints) << 20) & 0x87f00000u;
        numbers[v] = as_floats(moved) * 0x1p112f;
    }
#endif
}

INLINE void add_block(float* sum, vec block, float scale) { store(sum, load(sum) + block * all(scale * MISSING)); }

// P panels, so many bytes apart, times T tokens: added to sums [P][T][32]. A block asks for the next one, the last
// for the beginning of what comes next.
template <int T, int P>
void tile(const Stack& stack, const char* panel, const float* x, const char* next, int64_t apart, float* sums) {
    const float* scales[P];
    UNROLL for (int p = 0; p < P; ++p) scales[p] = scales_of(stack, panel + p * apart);
    const char* column = panel;
    const int64_t cols = padded(stack.cols);
    for (int64_t first = 0; first < cols; first += SIDE) {
        vec acc[T][P * VECS] = {};
        const char* fetch = first + SIDE < cols ? column + SIDE * PANEL : next;
        for (int64_t left = std::min(SIDE, cols - first); left > 0; left -= 2) {
            UNROLL for (int c = 0; c < 2; ++c, column += PANEL, x += T) {
                vec w[P * VECS];
                UNROLL for (int p = 0; p < P; ++p) widen(column + p * apart, w + p * VECS);
                UNROLL for (int t = 0; t < T; ++t) {
                    const vec own = all(x[t]);
                    UNROLL for (int i = 0; i < P * VECS; ++i) acc[t][i] += w[i] * own;
                }
            }
            UNROLL for (int p = 0; p < P; ++p) __builtin_prefetch(fetch + p * apart);
            fetch += 2 * PANEL;
        }
        UNROLL for (int t = 0; t < T; ++t)
            UNROLL for (int i = 0; i < P * VECS; ++i)
                add_block(sums + (i / VECS * T + t) * PANEL + i % VECS * W, acc[t][i], scales[i / VECS][first / SIDE]);
    }
}

using UpToFew = std::make_integer_sequence<int, FEW>;
using BlockTile = void (*)(const Stack&, const char*, const float*, const char*, int64_t, float*);

template <int... T>
INLINE BlockTile block_tile_of(int64_t tokens, std::integer_sequence<int, T...>) {
    static constexpr BlockTile tiles[] = {tile<T + 1, 1>...};
    return tiles[tokens - 1];
}

}  // namespace

float widen_columns(const Stack& stack, const char* panel, int64_t first, int64_t count, float* to) {
    const char* column = panel + first * PANEL;
    for (int64_t col = 0; col < count; ++col, column += PANEL) {
        vec numbers[VECS];
        widen(column, numbers);
        UNROLL for (int v = 0; v < VECS; ++v) store(to + col * PANEL + v * W, numbers[v]);
    }
    return scales_of(stack, panel)[first / SIDE] * MISSING;
}

namespace {

// More tokens than there are registers for: a block is widened, and all of them use it before the next.
void in_blocks(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    alignas(64) float block[SIDE * PANEL], own[MOST * PANEL];
    const int64_t cols = padded(stack.cols);
    for (int64_t first = 0; first < cols; first += SIDE) {
        const int64_t count = std::min(SIDE, cols - first);
        const float scale = widen_columns(stack, panel, first, count, block);
        const char* next = panel + (first + count) * PANEL;
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t begin = groups.begin(group), size = groups.size(group);
            std::fill(own, own + size * PANEL, 0.0f);
            for (int v = 0; v < VECS; v += wide(size))
                tile_of<PlainF32>(size, UpToMost{})(stack, reinterpret_cast<const char*>(block),
                                                    x + begin * cols + first * size, count, v, own,
                                                    share_of(next, count * PANEL, count, groups, group, v));
            for (int64_t i = 0; i < size * PANEL; i += W)
                store(sums + begin * PANEL + i, load(sums + begin * PANEL + i) + load(own + i) * scale);
        }
    }
}

// One panel times all tokens: sums [tokens][32].
void of_one(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + groups.tokens * PANEL, 0.0f);
    const char* next = groups.next ? groups.next : panel + stack.panel_bytes;
    if (groups.tokens <= FEW) block_tile_of(groups.tokens, UpToFew{})(stack, panel, x, next, 0, sums);
    else in_blocks(stack, panel, x, groups, sums);
}

// Two panels times up to PAIR_TOKENS tokens: sums [2][tokens][32].
void of_two(const Stack& stack, const char* panel, const float* x, const Groups& groups, float* sums) {
    std::fill(sums, sums + 2 * groups.tokens * PANEL, 0.0f);
    const char* next = groups.next ? groups.next : panel + 2 * stack.panel_bytes;
    const int64_t apart = groups.apart ? groups.apart : stack.panel_bytes;
    if (groups.tokens == 1) tile<1, 2>(stack, panel, x, next, apart, sums);
    if constexpr (PAIR_TOKENS > 1)
        if (groups.tokens == 2) tile<2, 2>(stack, panel, x, next, apart, sums);
}

}  // namespace

Products block_products() { return {of_one, of_two}; }

}  // namespace looped
