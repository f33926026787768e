// Matrix products, c = a b: the three of a linear layer, y = x w^T, dx = dy w and dw = dy^T x, and those of the masked
// language model's loss; in float32, and with AVX512_BF16 in bfloat16 with sums in float32. Why not torch.mm: its
// float32 library takes an AVX2 path on CPUs of other makers than its own, at less than half the rate of AVX-512, and
// the other one, which serves bfloat16, compiles code anew for every number of rows, which in packed batches changes
// each step, and keeps it: memory grows for a thousand products.
//
// The limit is arithmetic: 2 * rows * columns * depth operations at two multiply-adds of a vector a cycle, which the
// register tile of gemm.h reaches with its panel of b in the second-level cache. What is left is to keep everything
// else out of its way:
// - b is packed into panels, as many columns and as deep as less than half of that cache takes, and used for all rows
//   of a thread's share before the next ones.
// - a is read in place, in float32 whichever way it lies: single elements are broadcast, and the out-of-order core
//   hides the second-level cache. Packing a transposed a as well cost more than it saved. In bfloat16 pairs of steps
//   are broadcast, which only rows hold; other a are packed, a strip of rows at a time.
// - The next tile's part of a is fetched while this one computes: without that, narrow layers over many tokens, which
//   pass over memory once, run at half the rate.
// - Operands are rounded to bfloat16 where they are packed, results where they are stored: float32 weights are never
//   converted as a whole, and their gradients come in float32, unrounded.
// - A result with few tiles and a long sum (dw of a narrow layer over many tokens) is cut along the sum into chunks
//   with results of their own, which are added in order.
//
// Deterministic: chunks, blocks and chains of the sum follow from the sizes alone, and threads share out whole tiles.
#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace fastbert::cpu {
struct Product {
    const void *a, *b;  // a(i, k) = a[i * a_row + k * a_col], b(k, j) likewise
    const float* bias;  // [columns], or null
    void* c;            // rows of `columns`, c_row apart; if `apart`, float32 [chunks, rows, columns]
    DType a_type, b_type, c_type;
    bool bf16;  // multiply in bfloat16: the types are float32 or bfloat16; else all are float32
    int64_t rows, columns, depth;
    int64_t a_row, a_col, b_row, b_col, c_row;  // of a and b, one each is 1
    bool add;                                   // to what is in c
    // Set by plan(). A step is one of the sum's products, in bfloat16 two; how the sum is cut into chunks and those
    // into blocks of steps, how many panels are packed at once, and the tasks there are. `apart`: c is to be made
    // aside.
    int64_t steps = 0, chunks = 1, block = 0, group = 1, tasks = 0;
    bool apart = false;
};
struct LinearKernels {
    bool bf16;  // whether there are products of bfloat16
    void (*plan)(Product&);
    void (*run)(const Product&, int64_t begin, int64_t end);  // tasks [begin, end)
    // Rows [begin, end) of out, out_row apart, (+)= the sum over the chunks of p.c.
    void (*add_chunks)(const Product& p, void* out, DType out_type, int64_t out_row, bool add, int64_t begin,
                       int64_t end);
};
}  // namespace fastbert::cpu

#ifdef FASTBERT_ISA
#include <cstdlib>

#include "gemm.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

constexpr int64_t kPanelColumns = kPanel<float>;
constexpr int64_t kStripRows = 8 * kTileRows;  // rows of a task
constexpr int64_t kPackedBytes = 400 << 10;    // of b, in a second-level cache of 1 MiB
// The most steps of a block. A transposed a is read a cache line and, if wide, a page a step: as many as the
// first-level cache and its TLB take.
constexpr int64_t kDepth = 768, kDepthTransposed = 128;
// Strips that one packing of b serves where the sum has several blocks: their part of c stays in the caches.
constexpr int64_t kStripsPerPass = 22;
constexpr int64_t kChunks = 16, kChunkDepth = 1024;

constexpr int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }  // std::min might be merged across sets

// A step of a panel: its words are floats, or pairs of bfloat16.
constexpr int64_t kStepBytes = kPanelColumns * 4;
// The most steps of one panel: a bfloat16 result must be whole when it is rounded.
constexpr int64_t kMostSteps = kPackedBytes / kStepBytes / 16 * 16;

void plan(Product& p) {
    const int64_t panels = parts(p.columns, kPanelColumns), strips = parts(p.rows, kStripRows);
    const auto cut = [&](int64_t steps) {
        if (steps == 0) steps = 1;
        const bool whole = p.c_type != DType::f32 && !p.apart;
        const int64_t most = whole ? kMostSteps : p.bf16 || p.a_col == 1 ? kDepth : kDepthTransposed;
        p.block = round_up(parts(steps, parts(steps, most)), kLanes<float>);
        p.group = panels ? parts(panels, parts(panels, kPackedBytes / (kStepBytes * p.block))) : 1;
        p.tasks = strips * parts(panels, p.group);
    };
    p.steps = p.bf16 ? parts(p.depth, 2) : p.depth;
    p.apart = p.c_type != DType::f32 && p.steps > kMostSteps;
    cut(p.steps);
    if (p.tasks >= kChunks || p.steps < 2 * kChunkDepth) return;
    p.apart = true;
    p.chunks = least(p.steps / kChunkDepth, kChunks);
    cut(parts(p.steps, p.chunks));
    p.tasks *= p.chunks;
}

// A thread's memory for its panels of b and, in bfloat16, a strip of a, kept from call to call.
struct Scratch {
    static constexpr int64_t kStripBytes = kStripRows * kMostSteps * 4;
    char* const data = static_cast<char*>(std::aligned_alloc(4096, round_up(kPackedBytes + kStripBytes, 4096)));
    ~Scratch() { std::free(data); }
    template <class Word>
    Word* panels() const {
        return reinterpret_cast<Word*>(data);
    }
    template <class Word>
    Word* strip() const {
        return reinterpret_cast<Word*>(data + kPackedBytes);
    }
};
static_assert(kMostSteps >= kDepth);

// Part of a matrix to be read soon: `rows` of `bytes`, `stride` bytes apart.
struct Ahead {
    const char* data = nullptr;
    int64_t rows = 0, bytes = 0, stride = 0;

    void fetch(int64_t part, int64_t count) const {
        for (int64_t i = rows * part / count; i < rows * (part + 1) / count; ++i)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + i * stride + at);
    }
};

// Rows of a as a tile reads them, in words.
template <class Word>
struct Left {
    const Word* data;
    int64_t row, col;
};

// float32: b(k0 + k, j0 + j) as packed[k * kPanel + j], k < steps, j < width, with zeros to whole vectors.
struct Float32 : Fma<float> {
    static constexpr int64_t kChain = 192;  // rounding errors grow with a chain's length; c is at hand to add to

    static void pack_b(const Product& p, int64_t k0, int64_t steps, int64_t j0, int64_t width, float* packed) {
        const float* b = static_cast<const float*>(p.b) + k0 * p.b_row + j0 * p.b_col;
        if (p.b_col == 1) return pack_rows(b, p.b_row, steps, width, packed, 0);
        constexpr int lanes = kLanes<float>;
        for (int64_t j = 0; j < width; j += lanes) {
            const int64_t count = least(width - j, lanes);
            const float* in = b + j * p.b_col;
            for (int64_t k = 0; k < steps; k += lanes) {
                const int64_t depth = least(steps - k, lanes);
                VF block[lanes];
                if (count == lanes && depth == lanes) {
#pragma GCC unroll 16
                    for (int i = 0; i < lanes; ++i) block[i] = load<float>(in + i * p.b_col + k);
                } else {
                    for (int i = 0; i < lanes; ++i)
                        block[i] = i < count ? load_n<float>(in + i * p.b_col + k, depth) : VF{};
                }
                store_transposed(block, depth, packed + k * kPanelColumns + j);
            }
        }
    }
    static bool in_place(const Product&) { return true; }
    static Left<float> left(const Product& p, int64_t i, int64_t k0) {
        return {static_cast<const float*>(p.a) + i * p.a_row + k0 * p.a_col, p.a_row, p.a_col};
    }
    static Left<float> pack_a(const Product& p, int64_t i, int64_t, int64_t k0, int64_t, float*) {
        return left(p, i, k0);
    }

    static void store_transposed(VF (&block)[kLanes<float>], int64_t depth, float* out) {
        constexpr int lanes = kLanes<float>;
        transpose<float>(block);
        if (depth == lanes) {
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) store<float>(out + i * kPanelColumns, block[i]);
        } else {
            for (int64_t i = 0; i < depth; ++i) store<float>(out + i * kPanelColumns, block[i]);
        }
    }
};

#if defined(__AVX512BF16__)
// bfloat16, from it or from float32: words of two neighbours along the sum, the second of the last one 0 if there is
// none. k0 counts steps.
struct BFloat16 : PairsBF16 {
    static constexpr int64_t kChain = kMostSteps;

    static const char* at(const void* data, DType type, int64_t element) {
        return static_cast<const char*>(data) + element * (type == DType::f32 ? 4 : 2);
    }
    // Up to 16 elements, one in the low half of each word.
    static VU narrow(const char* p, DType type, int64_t n) {
        const auto some = static_cast<__mmask16>(n >= 16 ? 0xffff : (1 << n) - 1);
        const __m256i halves = type == DType::f32 ? (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, p))
                                                  : _mm256_maskz_loadu_epi16(some, p);
        return (VU)_mm512_cvtepu16_epi32(halves);
    }
    // Up to 32 elements as 16 words.
    static VU pairs(const char* p, DType type, int64_t n) {
        const auto some = static_cast<__mmask32>(n >= 32 ? ~0u : (1u << n) - 1);
        if (type != DType::f32) return (VU)_mm512_maskz_loadu_epi16(some, p);
        const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some), p);
        const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some >> 16), p + 64);
        return (VU)_mm512_cvtne2ps_pbh(high, low);
    }
    // Two rows of `in` interleaved for each step: out[step * out_row + j], j < width, zeros to whole vectors.
    static void interleave(const void* in, DType type, int64_t row, int64_t k, int64_t depth, int64_t steps, int64_t j0,
                           int64_t width, uint32_t* out, int64_t out_row) {
        for (int64_t step = 0; step < steps; ++step, k += 2, out += out_row) {
            const char *first = at(in, type, k * row + j0), *second = at(in, type, (k + 1) * row + j0);
            const int64_t ahead = k + 16 < depth ? 16 * row : 0;
            for (int64_t j = 0; j < width; j += 16) {
                __builtin_prefetch(at(first, type, ahead + j));
                __builtin_prefetch(at(second, type, ahead + j));
                VU words = narrow(at(first, type, j), type, width - j);
                if (k + 1 < depth) words |= narrow(at(second, type, j), type, width - j) << 16;
                store_raw(out + j, words);
            }
        }
    }

    static void pack_b(const Product& p, int64_t k0, int64_t steps, int64_t j0, int64_t width, uint32_t* packed) {
        if (p.b_col == 1)
            return interleave(p.b, p.b_type, p.b_row, 2 * k0, p.depth, steps, j0, width, packed, kPanelColumns);
        for (int64_t j = 0; j < width; j += 16)
            for (int64_t step = 0; step < steps; step += 16) {
                const int64_t k = 2 * (k0 + step);
                VF block[16];
                for (int i = 0; i < 16; ++i) {
                    const char* row = at(p.b, p.b_type, (j0 + j + i) * p.b_col + k);
                    block[i] = j + i < width ? (VF)pairs(row, p.b_type, p.depth - k) : VF{};
                    const char* ahead = at(row, p.b_type, j0 + j + i + 16 < p.columns ? 16 * p.b_col : 0);
                    __builtin_prefetch(ahead);
                    __builtin_prefetch(ahead + 64);
                }
                Float32::store_transposed(block, least(steps - step, 16),
                                          reinterpret_cast<float*>(packed + step * kPanelColumns + j));
            }
    }
    static bool in_place(const Product& p) {
        return p.a_type == DType::bf16 && p.a_col == 1 && p.a_row % 2 == 0 && p.depth % 2 == 0;
    }
    static Left<uint32_t> left(const Product& p, int64_t i, int64_t k0) {
        return {reinterpret_cast<const uint32_t*>(at(p.a, p.a_type, i * p.a_row + 2 * k0)), p.a_row / 2, 1};
    }
    static Left<uint32_t> pack_a(const Product& p, int64_t i, int64_t rows, int64_t k0, int64_t steps,
                                 uint32_t* strip) {
        if (p.a_col != 1) {
            interleave(p.a, p.a_type, p.a_col, 2 * k0, p.depth, steps, i, rows, strip, kStripRows);
            return {strip, 1, kStripRows};
        }
        const int64_t row = round_up(steps, 16);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t step = 0; step < steps; step += 16) {
                const int64_t k = 2 * (k0 + step);
                store_raw(strip + r * row + step,
                          pairs(at(p.a, p.a_type, (i + r) * p.a_row + k), p.a_type, p.depth - k));
            }
        return {strip, row, 1};
    }
};
static_assert(kStripRows % 16 == 0);
#endif

// A tile of c, which has `width` columns left: rows <= kTileRows; c starts from `bias` unless `add`.
template <class Step>
inline void tile_of_c(int64_t rows, int64_t steps, Left<typename Step::Word> a, const typename Step::Word* panel,
                      const Rows& c, int64_t width, const float* bias, bool add) {
    float buffer[kTileRows * kPanelColumns];
    auto* out = static_cast<float*>(c.data);
    int64_t out_row = c.stride;
    // Whole vectors of float32 are written: not into the neighbour, nor into another type.
    const bool aside = c.dtype != DType::f32 || (width < kPanelColumns && width % kLanes<float>);
    if (aside) {
        out = buffer;
        out_row = kPanelColumns;
    }
    if (add || bias) {
        for (int64_t i = 0; i < rows; ++i) {
            float* to = out + i * out_row;
            const float* from = add ? widen<float>(c.row(i), c.dtype, width, to) : bias;
            if (from != to) std::memcpy(to, from, width * sizeof(float));
        }
        add = true;
    }
    for (int64_t k = 0; k == 0 || k < steps; k += Step::kChain, add = true)
        tile_of<Step>(rows, least(parts(width, kLanes<float>), kTileVectors), least(steps - k, Step::kChain),
                      a.data + k * a.col, a.row, a.col, panel + k * kPanelColumns, out, out_row, add);
    if (!aside) return;
    for (int64_t i = 0; i < rows; ++i) {
        if (c.dtype == DType::f32)
            std::memcpy(c.row(i), out + i * out_row, width * sizeof(float));
        else
            commit<float>(c.row(i), c.dtype, width, out + i * out_row);
    }
}

// `rows` rows of columns [j0, j1), whose b is packed; starting from `bias` unless `add`.
template <class Step>
void block_of_c(const Product& p, int64_t rows, int64_t j0, int64_t j1, int64_t steps, Left<typename Step::Word> a,
                const typename Step::Word* packed, const float* bias, Rows c, bool add) {
    const int64_t panels = parts(j1 - j0, kPanelColumns);
    while (rows > 0) {
        // The last rows are shared evenly by two tiles: one of a single row would wait for its own sums.
        const int64_t take = rows <= kTileRows ? rows : rows < 2 * kTileRows ? (rows + 1) / 2 : kTileRows;
        const int64_t next = least(rows - take, kTileRows);
        const auto* after = reinterpret_cast<const char*>(a.data + take * a.row);
        const Ahead ahead =
            a.col == 1 ? Ahead{after, next, steps * 4, a.row * 4} : Ahead{after, next ? steps : 0, next * 4, a.col * 4};
        for (int64_t t = 0; t < panels; ++t) {
            const int64_t j = j0 + t * kPanelColumns;
            ahead.fetch(t, panels);
            tile_of_c<Step>(take, steps, a, packed + t * kPanelColumns * p.block,
                            {c.row(0) + j * size_of(c.dtype), c.dtype, c.stride}, least(j1 - j, kPanelColumns),
                            bias ? bias + j : nullptr, add);
        }
        a.data += take * a.row;
        c.data = c.row(take);
        rows -= take;
    }
}

// A task is a strip of rows of a group of panels of a chunk, counted in this order.
template <class Step>
void run_tasks(const Product& p, int64_t begin, int64_t end) {
    using Word = typename Step::Word;
    static thread_local const Scratch scratch;
    Word* const packed = scratch.panels<Word>();
    const int64_t strips = parts(p.rows, kStripRows), groups = parts(parts(p.columns, kPanelColumns), p.group);
    const bool in_place = Step::in_place(p);
    while (begin < end) {
        const int64_t chunk = begin / strips / groups, group = begin / strips % groups, first = begin % strips;
        const int64_t k_begin = p.steps * chunk / p.chunks, k_end = p.steps * (chunk + 1) / p.chunks;
        const int64_t most = k_end - k_begin > p.block ? kStripsPerPass : strips;
        const int64_t count = least(least(end - begin, strips - first), most);
        begin += count;
        const int64_t i0 = first * kStripRows, i1 = least(i0 + count * kStripRows, p.rows);
        const int64_t j0 = group * p.group * kPanelColumns, j1 = least(j0 + p.group * kPanelColumns, p.columns);
        const DType type = p.apart ? DType::f32 : p.c_type;
        const Rows c{static_cast<char*>(p.c) + chunk * p.rows * p.columns * size_of(type), type, p.c_row};
        const float* bias = chunk == 0 ? p.bias : nullptr;
        for (int64_t k0 = k_begin; k0 == k_begin || k0 < k_end; k0 += p.block) {
            const int64_t steps = least(p.block, k_end - k0);
            const bool add = p.add || k0 > k_begin;
            for (int64_t j = j0; j < j1; j += kPanelColumns)
                Step::pack_b(p, k0, steps, j, least(kPanelColumns, j1 - j), packed + (j - j0) * p.block);
            const int64_t rows = in_place ? i1 - i0 : kStripRows;
            for (int64_t i = i0; i < i1; i += rows) {
                const int64_t left = least(rows, i1 - i);
                const auto a =
                    in_place ? Step::left(p, i, k0) : Step::pack_a(p, i, left, k0, steps, scratch.strip<Word>());
                block_of_c<Step>(p, left, j0, j1, steps, a, packed, bias, {c.row(i), type, p.c_row}, add);
            }
        }
    }
}

void run(const Product& p, int64_t begin, int64_t end) {
#if defined(__AVX512BF16__)
    if (p.bf16) return run_tasks<BFloat16>(p, begin, end);
#endif
    run_tasks<Float32>(p, begin, end);
}

void add_chunks(const Product& p, void* out, DType out_type, int64_t out_row, bool add, int64_t begin, int64_t end) {
    constexpr int64_t kPart = 512;  // columns at a time
    float buffer[kPart + kSlack];
    const Rows result{out, out_type, out_row};
    for (int64_t row = begin; row < end; ++row)
        for (int64_t j0 = 0; j0 < p.columns; j0 += kPart) {
            const int64_t n = least(p.columns - j0, kPart);
            const float* partial = static_cast<const float*>(p.c) + row * p.columns + j0;
            char* const at = result.row(row) + j0 * size_of(out_type);
            float* const to = target<float>(at, out_type, buffer);
            const float* from = add ? widen<float>(at, out_type, n, buffer) : nullptr;
            for_vectors<float>(n, [&](int64_t j, auto m) {
                VF sum = from ? m.template load<float>(from + j) : VF{};
                for (int64_t c = 0; c < p.chunks; ++c)
                    sum += m.template load<float>(partial + c * p.rows * p.columns + j);
                m.template store<float>(to + j, sum);
            });
            commit<float>(at, out_type, n, to);
        }
}

}  // namespace

#if defined(__AVX512BF16__)
constexpr bool kBFloat16 = true;
#else
constexpr bool kBFloat16 = false;
#endif
FASTBERT_KERNELS(LinearKernels, linear) = {kBFloat16, plan, run, add_chunks};
}  // namespace fastbert::cpu::FASTBERT_ISA

#else
#include "../common/adapter.h"

namespace fastbert::cpu {
FASTBERT_CHOOSE(LinearKernels, linear)

namespace {

// A matrix with one contiguous dimension, copied if it has none or overlaps itself.
struct Matrix {
    Tensor tensor;  // keeps a copy alive
    int64_t rows, columns, row, col;

    explicit Matrix(const Tensor& t)
        : tensor(t), rows(t.size(0)), columns(t.size(1)), row(t.stride(0)), col(t.stride(1)) {
        if (col == 1 && (row >= columns || rows == 1)) return;
        if (row == 1 && (col >= rows || columns == 1)) return;
        tensor = torch::stable::contiguous(t);
        row = columns;
        col = 1;
    }
    const void* data() const { return tensor.const_data_ptr(); }
};

void check_matrix(const Tensor& t) {
    STD_TORCH_CHECK(t.dim() == 2 && (t.scalar_type() == ScalarType::Float || t.scalar_type() == ScalarType::BFloat16),
                    "fastbert: a float32 or bfloat16 matrix is needed");
}

// c (+)= a b + bias, into rows of c that are contiguous. If any of the three is bfloat16, that is what is multiplied.
void multiply(Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, bool add) {
    check_matrix(a), check_matrix(b), check_matrix(c);
    STD_TORCH_CHECK(a.size(1) == b.size(0) && c.size(0) == a.size(0) && c.size(1) == b.size(1), "fastbert: [",
                    a.size(0), ", ", a.size(1), "] times [", b.size(0), ", ", b.size(1), "] does not fit [", c.size(0),
                    ", ", c.size(1), "]");
    STD_TORCH_CHECK(c.size(1) <= 1 || (c.stride(1) == 1 && (c.size(0) <= 1 || c.stride(0) >= c.size(1))),
                    "fastbert: rows of the result must be contiguous");
    const Matrix left(a), right(b);
    const Accumulated offset(bias, DType::f32, c.size(1));
    Product p{};
    p.a = left.data(), p.b = right.data(), p.bias = static_cast<const float*>(offset.data());
    p.c = c.mutable_data_ptr();
    p.a_type = dtype_of(a), p.b_type = dtype_of(b), p.c_type = dtype_of(c);
    p.bf16 = p.a_type != DType::f32 || p.b_type != DType::f32 || p.c_type != DType::f32;
    STD_TORCH_CHECK(!p.bf16 || linear_kernels().bf16, "fastbert: products of bfloat16 need AVX512_BF16");
    p.rows = c.size(0), p.columns = c.size(1), p.depth = a.size(1);
    p.a_row = left.row, p.a_col = left.col, p.b_row = right.row, p.b_col = right.col, p.c_row = c.stride(0);
    p.add = add;
    linear_kernels().plan(p);
    std::optional<Tensor> partial;
    if (p.apart) {
        partial = new_output(c, {p.chunks, p.rows, p.columns}, ScalarType::Float);
        p.c = partial->mutable_data_ptr();
        p.c_row = p.columns;
        p.add = false;
    }
    torch::stable::parallel_for(0, p.tasks, 1,
                                [&](int64_t begin, int64_t end) { linear_kernels().run(p, begin, end); });
    if (p.apart)
        torch::stable::parallel_for(0, p.rows, grain(p.chunks * p.columns), [&](int64_t begin, int64_t end) {
            linear_kernels().add_chunks(p, c.mutable_data_ptr(), p.c_type, c.stride(0), add, begin, end);
        });
}

Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, bool bfloat16) {
    check_matrix(a), check_matrix(b);
    Tensor c = new_output(a, {a.size(0), b.size(1)}, bfloat16 ? ScalarType::BFloat16 : ScalarType::Float);
    multiply(c, a, b, bias, false);
    return c;
}

void product_(Tensor c, const Tensor& a, const Tensor& b, bool add) { multiply(c, a, b, std::nullopt, add); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert_cpu, CPU, m) {
    m.impl("product", TORCH_BOX(&product));
    m.impl("product_", TORCH_BOX(&product_));
}
}  // namespace fastbert::cpu
#endif
