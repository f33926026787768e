// LayerNorm of a row whose elements a kernel makes: what add_dropout_layer_norm and embedding_layer_norm share. Their
// rows derive from NormRow and add `load()`, which makes all of `pre` where the row is held in registers, and
// `at(column)`, which makes the chunk at `column` where it is not (kChunks = 0) and else does nothing.
#pragma once
#include <algorithm>

#include "ptx.cuh"
#include "rows.cuh"

#ifdef FASTBERT_CUDA_KERNELS
namespace fastbert::cuda {

// One thread's part of a row: what is normalised, and which elements dropout keeps.
template <int kThreads_, int kChunks_, int kV>
struct NormRow {
    static constexpr int kThreads = kThreads_, kChunks = kChunks_, V = kV;
    static constexpr int kHeld = kChunks ? kChunks : 1;
    static_assert(kHeld * V <= 32, "kept has a bit for each element");

    int64_t row;
    int columns;
    RowKeys keys{};
    float pre[kHeld][V];
    uint32_t kept = 0xffffffffu;

    // index: dropout's coordinate of each row; null: its own number.
    __device__ __forceinline__ NormRow(int64_t i, int n, const DropoutArgs& dropout, const int64_t* index)
        : row(i), columns(n) {
        if (!dropout.threshold) return;
        const uint64_t place = index ? index[row] : row;
        keys = row_keys(*dropout.seed, static_cast<uint32_t>(place >> 32), static_cast<uint32_t>(place));
    }
    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
        for_chunks<kThreads, kChunks, V>(Group<kThreads>::thread(), columns, f);
    }
    // What is kept of a chunk, a bit for each element; noted in `kept`.
    __device__ __forceinline__ uint32_t draw(uint32_t threshold, int chunk, int column) {
        const uint32_t bits = kept_bits<V>(keys, threshold, column);
        if constexpr (kChunks > 0) {
            constexpr uint32_t kMask = V < 32 ? (1u << V) - 1 : 0xffffffffu;
            kept = (kept & ~(kMask << chunk * V)) | bits << chunk * V;
        } else {
            kept = bits;
        }
        return bits;
    }
    // The same again.
    __device__ __forceinline__ uint32_t drawn(int chunk) const { return kept >> chunk * V; }
};

// v, scaled where bit k is set, else 0, whatever it is: a NaN as well.
__device__ __forceinline__ float drop(const DropoutArgs& dropout, uint32_t bits, int k, float v) {
    return bits >> k & 1 ? v * dropout.scale : 0.0f;
}

struct Statistics {
    float mean, rstd;
};
template <class Row>
__device__ __forceinline__ Statistics statistics(Row& row, Group<Row::kThreads>& group, float inverse_columns,
                                                 float eps) {
    float total = 0;
    row.for_each([&](int chunk, int column) {
        row.at(column);
#pragma unroll
        for (int k = 0; k < Row::V; ++k) total += row.pre[chunk][k];
    });
    const float mean = group.sum(total) * inverse_columns;
    float squares = 0;
    row.for_each([&](int chunk, int column) {
        row.at(column);
#pragma unroll
        for (int k = 0; k < Row::V; ++k) squares += (row.pre[chunk][k] - mean) * (row.pre[chunk][k] - mean);
    });
    return {mean, rsqrtf(group.sum(squares) * inverse_columns + eps)};
}

// store(chunk, column, y): a chunk of the normalised row, weight and bias applied.
template <class Row, class Store>
__device__ __forceinline__ void normalise(Row& row, const Statistics& s, const Parameters& weight,
                                          const Parameters& bias, const Store& store) {
    constexpr int V = Row::V;
    row.for_each([&](int chunk, int column) {
        row.at(column);
        float w[V], b[V], y[V];
        const int here = static_cast<int>(ptx::opaque(column));  // not loaded before the sums: that takes registers
        load_parameters<V>(weight, here, w);
        load_parameters<V>(bias, here, b);
#pragma unroll
        for (int k = 0; k < V; ++k) y[k] = (row.pre[chunk][k] - s.mean) * s.rstd * w[k] + b[k];
        store(chunk, column, y);
    });
}

// Sums of columns down the rows of a block: in registers or, where rows are not held, in this thread's own elements of
// `partial`. A block (a group, where rows are not held) writes [kVectors, columns].
template <class Row, int kVectors>
struct ColumnSums {
    static constexpr int V = Row::V;

    float* partial;
    int columns;
    float sums[kVectors][Row::kHeld][V] = {};
    bool first = true;  // no row has been added yet

    __device__ __forceinline__ ColumnSums(float* all, int n)
        : partial(all + int64_t{kVectors} * n * (Row::kChunks ? blockIdx.x : Group<Row::kThreads>::first_row())),
          columns(n) {}
    __device__ __forceinline__ void add(int vector, int chunk, int column, int k, float v) {
        if constexpr (Row::kChunks > 0) {
            sums[vector][chunk][k] += v;
        } else {
            float& sum = partial[int64_t{vector} * columns + column];
            sum = first ? v : sum + v;
        }
    }
    __device__ __forceinline__ void write() {
        if constexpr (Row::kChunks > 0) {
            constexpr int kThreads = Row::kThreads, kChunks = Row::kChunks, kRows = Group<kThreads>::kRows;
            const int thread = Group<kThreads>::thread();
#pragma unroll
            for (int vector = 0; vector < kVectors; ++vector) {
                float* out = partial + int64_t{vector} * columns;
                if constexpr (kRows == 1) {
                    for_chunks<kThreads, kChunks, V>(thread, columns, [&](int chunk, int column) {
                        Packed<float, V>::store(out, DType::f32, column, sums[vector][chunk]);
                    });
                } else {
                    // The warps' sums of one column are added up, one vector after the other.
                    FASTBERT_SHARED(tile, float[kRows][kThreads * kChunks * V]);
                    __syncthreads();
                    for_chunks<kThreads, kChunks, V>(thread, columns, [&](int chunk, int column) {
#pragma unroll
                        for (int k = 0; k < V; ++k) tile[threadIdx.x / kThreads][column + k] = sums[vector][chunk][k];
                    });
                    __syncthreads();
                    for (int column = threadIdx.x; column < columns; column += Group<kThreads>::kBlock) {
                        float sum = tile[0][column];
#pragma unroll
                        for (int j = 1; j < kRows; ++j) sum += tile[j][column];
                        out[column] = sum;
                    }
                }
            }
        }
    }
};

// d(pre) = rstd * (g - mean(g) - normalised * mean(g * normalised)), g = gradient * weight. gradient(chunk, column, d)
// gives a chunk of what arrives; it is asked twice. store(chunk, column, d) takes d(pre). Vectors 0 and 1 of `sums` are
// the gradients of weight and bias.
template <class Row, class Sums, class Gradient, class Store>
__device__ __forceinline__ void normalise_backward(Row& row, Group<Row::kThreads>& group, const Statistics& s,
                                                   const Parameters& weight, float inverse_columns, Sums& sums,
                                                   const Gradient& gradient, const Store& store) {
    constexpr int V = Row::V;
    float2 totals{0, 0};
    row.for_each([&](int chunk, int column) {
        row.at(column);
        float w[V], d[V];
        load_parameters<V>(weight, column, w);
        gradient(chunk, column, d);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const float normalised = (row.pre[chunk][k] - s.mean) * s.rstd;
            if constexpr (Row::kChunks > 0) row.pre[chunk][k] = normalised;
            sums.add(0, chunk, column, k, d[k] * normalised);
            sums.add(1, chunk, column, k, d[k]);
            totals.x += d[k] * w[k];
            totals.y += d[k] * w[k] * normalised;
        }
    });
    totals = group.sum(totals);
    const float mean_g = totals.x * inverse_columns, mean_gn = totals.y * inverse_columns;
    row.for_each([&](int chunk, int column) {
        row.at(column);
        float w[V], d[V];
        load_parameters<V>(weight, column, w);
        gradient(chunk, column, d);
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const float normalised = Row::kChunks ? row.pre[chunk][k] : (row.pre[chunk][k] - s.mean) * s.rstd;
            d[k] = (d[k] * w[k] - mean_g - normalised * mean_gn) * s.rstd;
        }
        store(chunk, column, d);
    });
}

// How a file chooses among its kernels for rows. parts: of the sums of backward, for each block.
template <class Args>
struct NormKernel {
    void (*forward)(Args);
    void (*backward)(Args);
    int threads, rows, parts;

    template <int kThreads, int kChunks>
    static NormKernel make(void (*forward)(Args), void (*backward)(Args)) {
        return {forward, backward, Group<kThreads>::kBlock, Group<kThreads>::kRows,
                kChunks ? 1 : Group<kThreads>::kRows};
    }
    unsigned forward_blocks(int64_t count) const {
        return static_cast<unsigned>(std::min(ceil_div(count, rows), int64_t{0x7fffffff}));
    }
    // As many blocks as are at work at once, so that there is little to add up behind them.
    unsigned backward_blocks(int64_t count) const {
        const int64_t most = 512 / threads * device_attribute(cudaDevAttrMultiProcessorCount);
        return static_cast<unsigned>(std::min(ceil_div(count, rows), most));
    }
    int all_parts(int64_t count) const {
        return static_cast<int>(std::min<int64_t>(count, int64_t{backward_blocks(count)} * parts));
    }
};

// f(threads, chunks), as types, for vectors of kV elements: by the elements a thread holds: 8, 16, 24 or 32 in a warp;
// 8, 16 or 32 in a block.
template <int kV, class F>
auto choose_held(int columns, const F& f) {
    constexpr int C = 8 / kV;  // chunks in 8 elements
    using std::integral_constant;
    constexpr integral_constant<int, kWarp> warp;
    constexpr integral_constant<int, kBlockRow> block;
    if (columns <= 256) return f(warp, integral_constant<int, C>{});
    if (columns <= 512) return f(warp, integral_constant<int, 2 * C>{});
    if (columns <= 768) return f(warp, integral_constant<int, 3 * C>{});
    if (columns <= 1024) return f(warp, integral_constant<int, 4 * C>{});
    if (columns <= 2048) return f(block, integral_constant<int, C>{});
    if (columns <= 4096) return f(block, integral_constant<int, 2 * C>{});
    return f(block, integral_constant<int, 4 * C>{});
}
constexpr int kMostHeld = 8192;  // columns

}  // namespace fastbert::cuda
#endif
