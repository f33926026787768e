// Products of float32 matrices, c = a b: the three of a linear layer, y = x w^T, dx = dy w and dw = dy^T x, and those
// of the masked language model's loss. Why not torch.mm: its library takes an AVX2 path on CPUs of other makers than
// its own, at less than half the rate of AVX-512, and the other one torch links compiles code anew for every number of
// rows, which in packed batches changes each step.
//
// The limit is arithmetic: 2 * rows * columns * depth operations at two multiply-adds of a vector a cycle, which the
// register tile of gemm.h reaches with its panel of b in the second-level cache. What is left is to keep everything
// else out of its way:
// - b is packed into panels, as many columns and as deep as less than half of that cache takes, and used for all rows
//   of a thread's share before the next ones.
// - a is read in place, whichever way it lies: single elements are broadcast, and the out-of-order core hides the
//   second-level cache. Packing a transposed a as well cost more than it saved.
// - The next tile's part of a is fetched while this one computes: without that, narrow layers over many tokens, which
//   pass over memory once, run at half the rate.
// - A result with few tiles and a long sum (dw of a narrow layer over many tokens) is cut along the sum into chunks
//   with results of their own, which are added in order.
//
// Deterministic: chunks, blocks and chains of the sum follow from the sizes alone, and threads share out whole tiles.
#include <cstdint>

#include "isa.h"

namespace fastbert::cpu {
struct Product {
    const float *a, *b, *bias;  // a(i, k) = a[i * a_row + k * a_col], b(k, j) likewise; bias: columns, or null
    float* c;                   // rows of `columns`, c_row apart; of several chunks [chunks, rows, columns]
    int64_t rows, columns, depth;
    int64_t a_row, a_col, b_row, b_col, c_row;  // of a and b, one each is 1
    bool add;                                   // to what is in c
    // Set by plan(): how the sum is cut, how many panels are packed at once, and the tasks there are.
    int64_t chunks, block, group, tasks;
};
struct LinearKernels {
    void (*plan)(Product&);
    void (*run)(const Product&, int64_t begin, int64_t end);  // tasks [begin, end)
    // Rows [begin, end) of out, out_row apart, (+)= the sum over the chunks of p.c.
    void (*add_chunks)(const Product& p, float* out, int64_t out_row, bool add, int64_t begin, int64_t end);
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
// Steps that are summed in one chain: rounding errors grow with a chain's length, and the tile of c is at hand to add
// to.
constexpr int64_t kChain = 192;
// Strips that one packing of b serves where the sum has several blocks: their part of c stays in the caches.
constexpr int64_t kStripsPerPass = 22;
constexpr int64_t kChunks = 16, kChunkDepth = 1024;

constexpr int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }  // std::min might be merged across sets

void plan(Product& p) {
    const bool transposed = p.a_col != 1;
    const int64_t panels = parts(p.columns, kPanelColumns), strips = parts(p.rows, kStripRows);
    const auto cut = [&](int64_t depth) {
        if (depth == 0) depth = 1;
        p.block = round_up(parts(depth, parts(depth, transposed ? kDepthTransposed : kDepth)), kLanes<float>);
        const int64_t fit = kPackedBytes / (kPanelColumns * sizeof(float) * p.block);
        p.group = panels ? parts(panels, parts(panels, fit)) : 1;
        p.tasks = strips * parts(panels, p.group);
    };
    cut(p.depth);
    p.chunks = 1;
    if (p.tasks >= kChunks || p.depth < 2 * kChunkDepth) return;
    p.chunks = least(p.depth / kChunkDepth, kChunks);
    cut(parts(p.depth, p.chunks));
    p.tasks *= p.chunks;
}

// A thread's memory for its panels of b, kept from call to call.
struct Scratch {
    float* packed = static_cast<float*>(std::aligned_alloc(4096, kPackedBytes));
    ~Scratch() { std::free(packed); }
};
static_assert(kPackedBytes >= kDepth * kPanelColumns * static_cast<int64_t>(sizeof(float)));

// Part of a matrix to be read soon: `rows` of `bytes`, `stride` bytes apart.
struct Ahead {
    const char* data = nullptr;
    int64_t rows = 0, bytes = 0, stride = 0;

    static Ahead of(const float* data, int64_t rows, int64_t columns, int64_t stride) {
        return {reinterpret_cast<const char*>(data), rows, columns * 4, stride * 4};
    }
    void fetch(int64_t part, int64_t count) const {
        for (int64_t i = rows * part / count; i < rows * (part + 1) / count; ++i)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + i * stride + at);
    }
};

// b(k0 + k, j0 + j) as packed[k * kPanel + j], k < depth, j < width, with zeros to whole vectors.
void pack_b(const Product& p, int64_t k0, int64_t depth, int64_t j0, int64_t width, float* packed) {
    constexpr int lanes = kLanes<float>;
    if (p.b_col == 1) return pack_rows(p.b + k0 * p.b_row + j0, p.b_row, depth, width, packed, 0);
    for (int64_t j = 0; j < width; j += lanes) {
        const int64_t count = width - j < lanes ? width - j : lanes;
        const float* in = p.b + (j0 + j) * p.b_col + k0;
        for (int64_t k = 0; k < depth; k += lanes) {
            const int64_t steps = depth - k < lanes ? depth - k : lanes;
            VF block[lanes];
            if (count == lanes && steps == lanes) {
#pragma GCC unroll 16
                for (int i = 0; i < lanes; ++i) block[i] = load<float>(in + i * p.b_col + k);
            } else {
                for (int i = 0; i < lanes; ++i)
                    block[i] = i < count ? load_n<float>(in + i * p.b_col + k, steps) : VF{};
            }
            transpose<float>(block);
            float* out = packed + k * kPanelColumns + j;
            if (steps == lanes) {
#pragma GCC unroll 16
                for (int i = 0; i < lanes; ++i) store<float>(out + i * kPanelColumns, block[i]);
            } else {
                for (int64_t i = 0; i < steps; ++i) store<float>(out + i * kPanelColumns, block[i]);
            }
        }
    }
}

// A tile of c, which has `width` columns left: rows <= kTileRows, depth steps; c starts from `bias` unless `add`.
inline void tile_of_c(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_col, const float* panel,
                      float* c, int64_t c_row, int64_t width, const float* bias, bool add) {
    float buffer[kTileRows * kPanelColumns];
    float* out = c;
    int64_t out_row = c_row;
    if (width < kPanelColumns && width % kLanes<float>) {  // whole vectors are written: not into the neighbour
        out = buffer;
        out_row = kPanelColumns;
    }
    if (add || bias) {
        for (int64_t i = 0; i < rows; ++i) {
            const float* from = add ? c + i * c_row : bias;
            if (from != out + i * out_row) std::memcpy(out + i * out_row, from, width * sizeof(float));
        }
        add = true;
    }
    for (int64_t k = 0; k == 0 || k < depth; k += kChain, add = true) {
        const float *x = a + k * a_col, *y = panel + k * kPanelColumns;
        const int64_t steps = least(depth - k, kChain);
        switch (parts(width, kLanes<float>)) {
            case 1:
                tile_rows<float, 1>(rows, steps, x, a_row, a_col, y, out, out_row, add);
                break;
            case 2:
                tile_rows<float, 2>(rows, steps, x, a_row, a_col, y, out, out_row, add);
                break;
            case 3:
                tile_rows<float, kTileVectors - 1>(rows, steps, x, a_row, a_col, y, out, out_row, add);
                break;
            default:
                tile_rows<float, kTileVectors>(rows, steps, x, a_row, a_col, y, out, out_row, add);
        }
    }
    if (out != c)
        for (int64_t i = 0; i < rows; ++i) std::memcpy(c + i * c_row, out + i * out_row, width * sizeof(float));
}

// Rows [i0, i1) of columns [j0, j1), steps [k0, k0 + depth), whose b is packed; starting from `bias` unless `add`.
void block_of_c(const Product& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1, int64_t k0, int64_t depth,
                const float* packed, const float* bias, float* c, bool add) {
    const int64_t panels = parts(j1 - j0, kPanelColumns);
    for (int64_t i = i0; i < i1;) {
        // The last rows are shared evenly by two tiles: one of a single row would wait for its own sums.
        const int64_t left = i1 - i;
        const int64_t take = left <= kTileRows ? left : left < 2 * kTileRows ? (left + 1) / 2 : kTileRows;
        const int64_t next = least(left - take, kTileRows);
        const float* a = p.a + i * p.a_row + k0 * p.a_col;
        const auto ahead = p.a_col == 1 ? Ahead::of(a + take * p.a_row, next, depth, p.a_row)
                                        : Ahead::of(a + take, next ? depth : 0, next, p.a_col);
        for (int64_t t = 0; t < panels; ++t) {
            const int64_t j = j0 + t * kPanelColumns;
            ahead.fetch(t, panels);
            tile_of_c(take, depth, a, p.a_row, p.a_col, packed + t * kPanelColumns * p.block, c + i * p.c_row + j,
                      p.c_row, least(j1 - j, kPanelColumns), bias ? bias + j : nullptr, add);
        }
        i += take;
    }
}

// A task is a strip of rows of a group of panels of a chunk, counted in this order.
void run(const Product& p, int64_t begin, int64_t end) {
    static thread_local const Scratch scratch;
    float* const packed = scratch.packed;
    const int64_t strips = parts(p.rows, kStripRows), groups = parts(parts(p.columns, kPanelColumns), p.group);
    while (begin < end) {
        const int64_t chunk = begin / strips / groups, group = begin / strips % groups, first = begin % strips;
        const int64_t k_begin = p.depth * chunk / p.chunks, k_end = p.depth * (chunk + 1) / p.chunks;
        const int64_t most = k_end - k_begin > p.block ? kStripsPerPass : strips;
        const int64_t count = least(least(end - begin, strips - first), most);
        begin += count;
        const int64_t i0 = first * kStripRows, i1 = least(i0 + count * kStripRows, p.rows);
        const int64_t j0 = group * p.group * kPanelColumns, j1 = least(j0 + p.group * kPanelColumns, p.columns);
        float* c = p.c + chunk * p.rows * p.columns;
        const float* bias = chunk == 0 ? p.bias : nullptr;
        for (int64_t k0 = k_begin; k0 == k_begin || k0 < k_end; k0 += p.block) {
            const int64_t depth = least(p.block, k_end - k0);
            const bool add = p.add || k0 > k_begin;
            for (int64_t j = j0; j < j1; j += kPanelColumns)
                pack_b(p, k0, depth, j, least(kPanelColumns, j1 - j), packed + (j - j0) * p.block);
            block_of_c(p, i0, i1, j0, j1, k0, depth, packed, bias, c, add);
        }
    }
}

void add_chunks(const Product& p, float* out, int64_t out_row, bool add, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* partial = p.c + row * p.columns;
        float* to = out + row * out_row;
        for_vectors<float>(p.columns, [&](int64_t j, auto m) {
            VF sum = add ? m.template load<float>(to + j) : VF{};
            for (int64_t c = 0; c < p.chunks; ++c) sum += m.template load<float>(partial + c * p.rows * p.columns + j);
            m.template store<float>(to + j, sum);
        });
    }
}

}  // namespace

FASTBERT_KERNELS(LinearKernels, linear) = {plan, run, add_chunks};
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
    const float* data() const { return static_cast<const float*>(tensor.const_data_ptr()); }
};

void check_matrix(const Tensor& t) {
    STD_TORCH_CHECK(t.dim() == 2 && t.scalar_type() == ScalarType::Float, "fastbert: a float32 matrix is needed");
}

// c (+)= a b + bias, into rows of c that are contiguous.
void multiply(Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, bool add) {
    check_matrix(a), check_matrix(b), check_matrix(c);
    STD_TORCH_CHECK(a.size(1) == b.size(0) && c.size(0) == a.size(0) && c.size(1) == b.size(1), "fastbert: [",
                    a.size(0), ", ", a.size(1), "] times [", b.size(0), ", ", b.size(1), "] does not fit [", c.size(0),
                    ", ", c.size(1), "]");
    STD_TORCH_CHECK(c.size(1) <= 1 || (c.stride(1) == 1 && (c.size(0) <= 1 || c.stride(0) >= c.size(1))),
                    "fastbert: rows of the result must be contiguous");
    const Matrix left(a), right(b);
    const Accumulated offset(bias, DType::f32, c.size(1));
    auto* const out = static_cast<float*>(c.mutable_data_ptr());
    const int64_t out_row = c.stride(0);
    Product p{left.data(),
              right.data(),
              static_cast<const float*>(offset.data()),
              out,
              c.size(0),
              c.size(1),
              a.size(1),
              left.row,
              left.col,
              right.row,
              right.col,
              out_row,
              add,
              1,
              0,
              0,
              0};
    linear_kernels().plan(p);
    std::optional<Tensor> partial;
    if (p.chunks > 1) {
        partial = new_output(c, {p.chunks, p.rows, p.columns}, ScalarType::Float);
        p.c = static_cast<float*>(partial->mutable_data_ptr());
        p.c_row = p.columns;
        p.add = false;
    }
    torch::stable::parallel_for(0, p.tasks, 1,
                                [&](int64_t begin, int64_t end) { linear_kernels().run(p, begin, end); });
    if (p.chunks > 1)
        torch::stable::parallel_for(0, p.rows, grain(p.chunks * p.columns), [&](int64_t begin, int64_t end) {
            linear_kernels().add_chunks(p, out, out_row, add, begin, end);
        });
}

Tensor product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
    check_matrix(a), check_matrix(b);
    Tensor c = new_output(a, {a.size(0), b.size(1)}, ScalarType::Float);
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
