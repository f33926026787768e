// Small matrix products out of registers: c (+)= a * b, for operands that fit the caches.
//
// A tile of up to kTileRows x kTileVectors vectors of c stays in registers while k runs. Each step loads a row of
// b, which is packed so that this is one contiguous read, and broadcasts single elements of a, which may have any
// two strides: a transposed operand costs no copy. Every element of c is one chain of multiply-adds in the order
// of k, so its bits do not depend on how rows and columns are cut into tiles. In bfloat16 (AVX512_BF16) a step is two
// of k: an element of a is a pair in 32 bits, b has pairs of rows interleaved, and an instruction adds two products.
#pragma once
#include <utility>

#include "vec.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

// 24 accumulators of 32 registers with AVX-512, 12 of 16 otherwise; the rest hold the row of b and an element of a.
constexpr int kTileRows = 6;
constexpr int kTileVectors = kVectorBytes == 64 ? 4 : 2;
template <class C>
constexpr int kPanel = kTileVectors * kLanes<C>;  // columns of a packed panel

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// What a step does: Word, an element of a and b; Sum, of c.
template <class C>
struct Fma {
    using Word = C;
    using Sum = C;
    static Vec<C> splat_word(const C* p) { return splat(*p); }
    static Vec<C> row(const C* p) { return load<C>(p); }
    static void add_product(Vec<C>& sum, Vec<C> a, Vec<C> b) { sum += a * b; }
};
#if defined(__AVX512BF16__)
struct PairsBF16 {
    using Word = uint32_t;  // in memory possibly two BF16, on any even address
    using Sum = float;
    static VU splat_word(const void* p) {
        uint32_t word;
        __builtin_memcpy(&word, p, 4);
        return (VU)_mm512_set1_epi32(static_cast<int>(word));
    }
    static VU row(const uint32_t* p) { return load_raw<VU>(p); }
    static void add_product(VF& sum, VU a, VU b) { sum = (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
};
#endif

template <class Step, int kRows, int kVectors>
void tile(int64_t k, const typename Step::Word* a, int64_t a_row, int64_t a_col, const typename Step::Word* b,
          typename Step::Sum* c, int64_t c_row, bool add) {
    using C = typename Step::Sum;
    Vec<C> sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sums[i][j] = Vec<C>{};
    const auto* p = a;
    for (int64_t step = 0; step < k; ++step, p += a_col, b += kPanel<C>) {
        decltype(Step::row(b)) row[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) row[j] = Step::row(b + j * kLanes<C>);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const auto element = Step::splat_word(p + i * a_row);
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j) Step::add_product(sums[i][j], element, row[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            C* out = c + i * c_row + j * kLanes<C>;
            store<C>(out, add ? load<C>(out) + sums[i][j] : sums[i][j]);
        }
}

template <class Step, int kVectors>
inline void tile_rows(int64_t rows, int64_t k, const typename Step::Word* a, int64_t a_row, int64_t a_col,
                      const typename Step::Word* b, typename Step::Sum* c, int64_t c_row, bool add) {
    switch (rows) {
        case 1:
            return tile<Step, 1, kVectors>(k, a, a_row, a_col, b, c, c_row, add);
        case 2:
            return tile<Step, 2, kVectors>(k, a, a_row, a_col, b, c, c_row, add);
        case 3:
            return tile<Step, 3, kVectors>(k, a, a_row, a_col, b, c, c_row, add);
        case 4:
            return tile<Step, 4, kVectors>(k, a, a_row, a_col, b, c, c_row, add);
        case 5:
            return tile<Step, 5, kVectors>(k, a, a_row, a_col, b, c, c_row, add);
        default:
            return tile<Step, 6, kVectors>(k, a, a_row, a_col, b, c, c_row, add);
    }
}
// The same for 1 to kTileVectors vectors of columns.
template <class Step>
inline void tile_of(int64_t rows, int64_t vectors, int64_t k, const typename Step::Word* a, int64_t a_row,
                    int64_t a_col, const typename Step::Word* b, typename Step::Sum* c, int64_t c_row, bool add) {
    switch (vectors) {
        case 1:
            return tile_rows<Step, 1>(rows, k, a, a_row, a_col, b, c, c_row, add);
        case 2:
            return tile_rows<Step, 2>(rows, k, a, a_row, a_col, b, c, c_row, add);
        case 3:
            return tile_rows<Step, kTileVectors - 1>(rows, k, a, a_row, a_col, b, c, c_row, add);
        default:
            return tile_rows<Step, kTileVectors>(rows, k, a, a_row, a_col, b, c, c_row, add);
    }
}

// c[i, j] = sum over k of a[i * a_row + k * a_col] * b(k, j), or added to c. b is packed in panels of kPanel
// columns, `b_panel` elements apart: b(k, j) = b[j / kPanel * b_panel + k * kPanel + j % kPanel]. Columns are
// computed, and written, in whole vectors.
template <class C>
void gemm(int64_t rows, int64_t columns, int64_t k, const C* a, int64_t a_row, int64_t a_col, const C* b,
          int64_t b_panel, C* c, int64_t c_row, bool add) {
    constexpr int64_t kDepth = 128;  // of a panel: 32 KiB, two thirds of a first-level cache
    for (int64_t k0 = 0; k0 == 0 || k0 < k; k0 += kDepth) {
        const int64_t depth = k - k0 < kDepth ? k - k0 : kDepth;
        for (int64_t j = 0; j < columns; j += kPanel<C>) {
            const int64_t vectors =
                columns - j < kPanel<C> ? round_up(columns - j, kLanes<C>) / kLanes<C> : kTileVectors;
            const C* panel = b + j / kPanel<C> * b_panel + k0 * kPanel<C>;
            for (int64_t i = 0; i < rows;) {
                // The last rows are shared evenly by two tiles: one of a single row would wait for its own sums.
                const int64_t left = rows - i;
                const int64_t take = left <= kTileRows ? left : left < 2 * kTileRows ? (left + 1) / 2 : kTileRows;
                const C* from = a + i * a_row + k0 * a_col;
                C* to = c + i * c_row + j;
                tile_of<Fma<C>>(take, vectors, depth, from, a_row, a_col, panel, to, c_row, add);
                i += take;
            }
        }
        add = true;
    }
}

// Square transposition in registers, by exchanging ever larger blocks across the diagonal.
template <class C, int kStep, size_t... kLane>
inline void exchange(Vec<C>& a, Vec<C>& b, std::index_sequence<kLane...>) {
    constexpr int lanes = kLanes<C>;
    const Vec<C> x = a, y = b;
    a = __builtin_shufflevector(x, y, (kLane & kStep ? lanes + kLane - kStep : kLane)...);
    b = __builtin_shufflevector(x, y, (kLane & kStep ? lanes + kLane : kLane + kStep)...);
}
template <class C, int kStep = 1>
inline void transpose(Vec<C> (&rows)[kLanes<C>]) {
    if constexpr (kStep < kLanes<C>) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes<C>; ++i)
            if (!(i & kStep)) exchange<C, kStep>(rows[i], rows[i + kStep], std::make_index_sequence<kLanes<C>>{});
        transpose<C, 2 * kStep>(rows);
    }
}

// Rows [count, columns] as the b of a product over rows: panel j / kPanel holds [count, kPanel], zeros past `columns`.
template <class C>
void pack_rows(const C* rows, int64_t row_stride, int64_t count, int64_t columns, C* packed, int64_t panel_stride) {
    for (int64_t j = 0; j < columns; j += kPanel<C>) {
        const int64_t width = columns - j < kPanel<C> ? columns - j : kPanel<C>;
        C* out = packed + j / kPanel<C> * panel_stride;
        for (int64_t i = 0; i < count; ++i, out += kPanel<C>) {
            const C* in = rows + i * row_stride + j;
            for_vectors<C>(width, [&](int64_t l, auto m) { store<C>(out + l, m.template load<C>(in + l)); });
        }
    }
}

// kLanes rows [kLanes, columns], `row_stride` apart and readable up to whole vectors, as kLanes neighbouring
// columns of the b of a product over columns: packed[d * kPanel + lane].
template <class C>
void pack_transposed(const C* rows, int64_t row_stride, int64_t columns, C* packed) {
    constexpr int lanes = kLanes<C>;
    for (int64_t d = 0; d < columns; d += lanes) {
        Vec<C> block[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) block[i] = load<C>(rows + i * row_stride + d);
        transpose<C>(block);
        const int64_t count = columns - d < lanes ? columns - d : lanes;
        for (int64_t i = 0; i < count; ++i) store<C>(packed + (d + i) * kPanel<C>, block[i]);
    }
}

}  // namespace
}  // namespace fastbert::cpu::FASTBERT_ISA
