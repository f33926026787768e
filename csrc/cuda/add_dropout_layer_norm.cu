// LayerNorm(residual + dropout(x + x_bias)) and its backward.
//
// Memory-bound: forward reads x and residual and writes the output once. Backward reads the two again and the incoming
// gradient, recomputes sum, mean and variance in registers, and writes the two gradients once (one where nothing is
// dropped, since they are then equal). Nothing else is kept: no dropout mask, no normalised row, no statistics.
//
// A row is loaded whole, 16 bytes at a time, before anything is computed from it, so that all of its loads are in
// flight together, and is then held in registers for its two sums (mean, and squares about the mean) and the result.
// Backward holds the sums of its columns' weight gradients in registers down the rows, and the dropped elements as one
// word of bits; the blocks' sums are added in order by a second kernel.
#include <algorithm>

#include "rows.cuh"

namespace fastbert::cuda {

struct AddDropoutLayerNormArgs {
    Rows x, residual, out;  // backward: out is the incoming gradient
    Parameters x_bias, weight, bias;
    DropoutArgs dropout;
    const int64_t* row_index;  // dropout's coordinate of each row; null: its own number
    float eps;
    int64_t rows;
    int columns;
    float inverse_columns;  // 1 / columns
    // Backward only. dx.data is null where dx would equal dresidual. partial: [parts, 3, columns], the sums of the
    // gradients of weight, bias and x_bias over each block's rows; sums: [columns] each, over all.
    Rows dx, dresidual;
    float *partial, *sums[3];
};
void add_dropout_layer_norm_forward(const AddDropoutLayerNormArgs& args, cudaStream_t stream);
void add_dropout_layer_norm_backward(const AddDropoutLayerNormArgs& args, cudaStream_t stream);
int add_dropout_layer_norm_parts(const AddDropoutLayerNormArgs& args);

#ifdef FASTBERT_CUDA_KERNELS
namespace {

// One thread's part of one row of residual + dropout(x + x_bias).
template <class X, class R, int kThreads, int kChunks>
struct Row {
    static constexpr int V = kVector<X>;
    static constexpr int kHeld = kChunks ? kChunks : 1;
    static_assert(kHeld * V <= 32, "kept has a bit for each element");

    const AddDropoutLayerNormArgs& a;
    int64_t row;
    RowKeys keys{};
    float pre[kHeld][V];
    uint32_t kept = 0xffffffffu;

    __device__ __forceinline__ Row(const AddDropoutLayerNormArgs& args, int64_t i) : a(args), row(i) {
        if (!a.dropout.threshold) return;
        const uint64_t index = a.row_index ? a.row_index[row] : row;
        keys = row_keys(*a.dropout.seed, static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(index));
    }

    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
        for_chunks<kThreads, kChunks, V>(Group<kThreads>::thread(), a.columns, f);
    }

    __device__ __forceinline__ void combine(const Packed<X, V>& x, const Packed<R, V>& residual, int chunk,
                                            int column) {
        float v[V], r[V];
        x.floats(v);
        residual.floats(r);
        if (a.x_bias.data) {
            float b[V];
            load_parameters<V>(a.x_bias, column, b);
#pragma unroll
            for (int k = 0; k < V; ++k) v[k] += b[k];
        }
        if (a.dropout.threshold) {
            const uint32_t bits = kept_bits<V>(keys, a.dropout.threshold, column);
            // A dropped element is dropped whatever it is: a NaN as well.
#pragma unroll
            for (int k = 0; k < V; ++k) v[k] = bits >> k & 1 ? v[k] * a.dropout.scale : 0.0f;
            if constexpr (kChunks > 0) {
                constexpr uint32_t kMask = V < 32 ? (1u << V) - 1 : 0xffffffffu;
                kept = (kept & ~(kMask << chunk * V)) | bits << chunk * V;
            } else {
                kept = bits;
            }
        }
#pragma unroll
        for (int k = 0; k < V; ++k) pre[chunk][k] = v[k] + r[k];
    }

    // All loads first; then the sums, into `pre`. Where the row is not held, `at` does both, chunk by chunk.
    __device__ __forceinline__ void load() {
        if constexpr (kChunks > 0) {
            Packed<X, V> x[kHeld];
            Packed<R, V> residual[kHeld];
            for_each([&](int chunk, int column) {
                x[chunk].load(row_of<X>(a.x, row), a.x.dtype, column);
                residual[chunk].load(row_of<R>(a.residual, row), a.residual.dtype, column);
            });
            for_each([&](int chunk, int column) { combine(x[chunk], residual[chunk], chunk, column); });
        }
    }
    __device__ __forceinline__ void at(int column) {
        if constexpr (kChunks == 0) {
            Packed<X, V> x;
            Packed<R, V> residual;
            x.load(row_of<X>(a.x, row), a.x.dtype, column);
            residual.load(row_of<R>(a.residual, row), a.residual.dtype, column);
            combine(x, residual, 0, column);
        }
    }

    struct Statistics {
        float mean, rstd;
    };
    __device__ __forceinline__ Statistics statistics(Group<kThreads>& group) {
        float total = 0;
        for_each([&](int chunk, int column) {
            at(column);
#pragma unroll
            for (int k = 0; k < V; ++k) total += pre[chunk][k];
        });
        const float mean = group.sum(total) * a.inverse_columns;
        float squares = 0;
        for_each([&](int chunk, int column) {
            at(column);
#pragma unroll
            for (int k = 0; k < V; ++k) squares += (pre[chunk][k] - mean) * (pre[chunk][k] - mean);
        });
        return {mean, rsqrtf(group.sum(squares) * a.inverse_columns + a.eps)};
    }
};

template <class X, class R, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock,
                                  resident_blocks(Group<kThreads>::kBlock, kChunks* kVector<X>))
    forward_kernel(AddDropoutLayerNormArgs a) {
    constexpr int V = kVector<X>;
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    for (int64_t i = group.first_row(); i < a.rows; i += group.row_step()) {
        Row<X, R, kThreads, kChunks> row(a, i);
        row.load();
        const auto s = row.statistics(group);
        row.for_each([&](int chunk, int column) {
            row.at(column);
            float w[V], b[V], y[V];
            load_parameters<V>(a.weight, column, w);
            load_parameters<V>(a.bias, column, b);
#pragma unroll
            for (int k = 0; k < V; ++k) y[k] = (row.pre[chunk][k] - s.mean) * s.rstd * w[k] + b[k];
            Packed<R, V>::store(row_of<R>(a.out, i), a.out.dtype, column, y);
        });
    }
}

// d(pre) = rstd * (g - mean(g) - normalised * mean(g * normalised)), g = grad * weight
template <class X, class R, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock, 1) backward_kernel(AddDropoutLayerNormArgs a) {
    constexpr int V = kVector<X>;
    constexpr int kHeld = kChunks ? kChunks : 1;
    // With 32 elements a thread there are no registers for all of it: the gradient is read twice (from the caches).
    constexpr bool kHoldGrad = kChunks > 0 && kChunks * V <= 24;
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    float dweight[kHeld][V] = {}, dbias[kHeld][V] = {}, dx_bias[kHeld][V] = {};
    // One part of the sums for each block, or, where the row is not held, for each group.
    float* partial = a.partial + int64_t{3} * a.columns * (kChunks ? blockIdx.x : group.first_row());
    bool first = true;
    // A sum over the rows: in registers, or, where the row is not held, in this thread's own elements of `partial`.
    auto add = [&](float (&sums)[kHeld][V], int vector, int chunk, int column, int k, float v) {
        if constexpr (kChunks > 0) {
            sums[chunk][k] += v;
        } else {
            float& sum = partial[int64_t{vector} * a.columns + column];
            sum = first ? v : sum + v;
        }
    };
    for (int64_t i = group.first_row(); i < a.rows; i += group.row_step()) {
        Row<X, R, kThreads, kChunks> row(a, i);
        Packed<R, V> grad[kHeld];
        auto load_grad = [&](int chunk, int column) { grad[chunk].load(row_of<R>(a.out, i), a.out.dtype, column); };
        if constexpr (kHoldGrad) row.for_each(load_grad);
        row.load();
        const auto s = row.statistics(group);
        float2 sums{0, 0};
        row.for_each([&](int chunk, int column) {
            row.at(column);
            if constexpr (!kHoldGrad) load_grad(chunk, column);
            float w[V], d[V];
            load_parameters<V>(a.weight, column, w);
            grad[chunk].floats(d);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const float normalised = (row.pre[chunk][k] - s.mean) * s.rstd;
                if constexpr (kChunks > 0) row.pre[chunk][k] = normalised;
                add(dweight, 0, chunk, column, k, d[k] * normalised);
                add(dbias, 1, chunk, column, k, d[k]);
                sums.x += d[k] * w[k];
                sums.y += d[k] * w[k] * normalised;
            }
        });
        sums = group.sum(sums);
        const float mean_g = sums.x * a.inverse_columns, mean_gn = sums.y * a.inverse_columns;
        row.for_each([&](int chunk, int column) {
            row.at(column);
            if constexpr (!kHoldGrad) load_grad(chunk, column);
            float w[V], d[V];
            load_parameters<V>(a.weight, column, w);
            grad[chunk].floats(d);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const float normalised = kChunks ? row.pre[chunk][k] : (row.pre[chunk][k] - s.mean) * s.rstd;
                d[k] = (d[k] * w[k] - mean_g - normalised * mean_gn) * s.rstd;
            }
            Packed<R, V>::store(row_of<R>(a.dresidual, i), a.dresidual.dtype, column, d);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                if (a.dropout.threshold) d[k] = row.kept >> (chunk * V + k) & 1 ? d[k] * a.dropout.scale : 0.0f;
                add(dx_bias, 2, chunk, column, k, d[k]);
            }
            if (a.dx.data) Packed<X, V>::store(row_of<X>(a.dx, i), a.dx.dtype, column, d);
        });
        first = false;
    }
    if constexpr (kChunks > 0) {
        // The warps' sums of one column are added up, one of the three vectors after the other.
        constexpr int kRows = Group<kThreads>::kRows;
        constexpr int kWidth = kThreads * kChunks * V;
        auto write = [&](float (&sums)[kHeld][V], int vector) {
            float* out = partial + vector * a.columns;
            if constexpr (kRows == 1) {
                for_chunks<kThreads, kChunks, V>(group.thread(), a.columns, [&](int chunk, int column) {
                    Packed<float, V>::store(out, DType::f32, column, sums[chunk]);
                });
            } else {
                FASTBERT_SHARED(tile, float[kRows][kWidth]);
                __syncthreads();
                for_chunks<kThreads, kChunks, V>(group.thread(), a.columns, [&](int chunk, int column) {
#pragma unroll
                    for (int k = 0; k < V; ++k) tile[threadIdx.x / kThreads][column + k] = sums[chunk][k];
                });
                __syncthreads();
                for (int column = threadIdx.x; column < a.columns; column += Group<kThreads>::kBlock) {
                    float sum = tile[0][column];
#pragma unroll
                    for (int j = 1; j < kRows; ++j) sum += tile[j][column];
                    out[column] = sum;
                }
            }
        };
        write(dweight, 0);
        write(dbias, 1);
        write(dx_bias, 2);
    }
}

struct Kernel {
    void (*forward)(AddDropoutLayerNormArgs);
    void (*backward)(AddDropoutLayerNormArgs);
    int threads, rows, parts;  // of a block; parts: of the sums of backward
};

template <class X, class R, int kThreads, int kChunks>
Kernel kernel() {
    return {forward_kernel<X, R, kThreads, kChunks>, backward_kernel<X, R, kThreads, kChunks>, Group<kThreads>::kBlock,
            Group<kThreads>::kRows, kChunks ? 1 : Group<kThreads>::kRows};
}

// By the elements a thread holds: 8, 16, 24 or 32 in a warp; 8, 16 or 32 in a block.
template <class X, class R>
Kernel held(int columns) {
    constexpr int C = 8 / kVector<X>;  // chunks in 8 elements
    if (columns <= 256) return kernel<X, R, kWarp, C>();
    if (columns <= 512) return kernel<X, R, kWarp, 2 * C>();
    if (columns <= 768) return kernel<X, R, kWarp, 3 * C>();
    if (columns <= 1024) return kernel<X, R, kWarp, 4 * C>();
    if (columns <= 2048) return kernel<X, R, kBlockRow, C>();
    if (columns <= 4096) return kernel<X, R, kBlockRow, 2 * C>();
    return kernel<X, R, kBlockRow, 4 * C>();
}

Kernel choose(const AddDropoutLayerNormArgs& a) {
    const bool vectors = a.columns % (16 / size_of(a.x.dtype)) == 0 && aligned(a.x) && aligned(a.residual) &&
                         aligned(a.out) && aligned(a.dx) && aligned(a.dresidual) && aligned(a.x_bias) &&
                         aligned(a.weight) && aligned(a.bias);
    if (vectors && a.columns <= 8192 && a.out.dtype == a.residual.dtype) {
        const DType x = a.x.dtype, residual = a.residual.dtype;
        if (x == DType::f32 && residual == DType::f32) return held<float, float>(a.columns);
        if (x == DType::bf16 && residual == DType::bf16) return held<__nv_bfloat16, __nv_bfloat16>(a.columns);
        if (x == DType::f16 && residual == DType::f16) return held<__half, __half>(a.columns);
        if (x == DType::bf16 && residual == DType::f32) return held<__nv_bfloat16, float>(a.columns);
        if (x == DType::f16 && residual == DType::f32) return held<__half, float>(a.columns);
    }
    return a.columns <= 1024 ? kernel<Any, Any, kWarp, 0>() : kernel<Any, Any, kBlockRow, 0>();
}

}  // namespace

void add_dropout_layer_norm_forward(const AddDropoutLayerNormArgs& a, cudaStream_t stream) {
    const Kernel kernel = choose(a);
    const auto blocks = std::min(ceil_div(a.rows, kernel.rows), int64_t{0x7fffffff});
    launch("add_dropout_layer_norm", kernel.forward, dim3(static_cast<unsigned>(blocks)), kernel.threads, 0, stream, a);
}

// As many blocks as are at work at once, so that there is little to add up behind them.
static int backward_blocks(const AddDropoutLayerNormArgs& a, const Kernel& kernel) {
    const int64_t most = 512 / kernel.threads * device_attribute(cudaDevAttrMultiProcessorCount);
    return static_cast<int>(std::min(ceil_div(a.rows, kernel.rows), most));
}
int add_dropout_layer_norm_parts(const AddDropoutLayerNormArgs& a) {
    const Kernel kernel = choose(a);
    return static_cast<int>(std::min<int64_t>(a.rows, backward_blocks(a, kernel) * kernel.parts));
}
void add_dropout_layer_norm_backward(const AddDropoutLayerNormArgs& a, cudaStream_t stream) {
    const Kernel kernel = choose(a);
    const dim3 blocks(backward_blocks(a, kernel));
    launch("add_dropout_layer_norm_backward", kernel.backward, blocks, kernel.threads, 0, stream, a);
    column_sums<3>(a.partial, {{a.sums[0], a.sums[1], a.sums[2]}}, add_dropout_layer_norm_parts(a), a.columns, stream);
}
#endif
}  // namespace fastbert::cuda

#ifdef FASTBERT_CUDA_ADAPTER
#include "adapter.h"

namespace fastbert::cuda {
namespace {

using Optional = std::optional<Tensor>;

struct Call {
    Device device;
    RowView x, residual, out;
    ParameterView x_bias, weight, bias;
    AddDropoutLayerNormArgs args{};

    Call(const Tensor& x_, const Tensor& residual_, const Tensor& weight_, const Tensor& bias_, const Optional& x_bias_,
         const Optional& seed, const Optional& row_index, double dropout_p, double eps, const Tensor& out_)
        : device(x_),
          x(x_),
          residual(residual_),
          out(out_),
          x_bias(x_bias_, x.columns),
          weight(weight_, x.columns),
          bias(bias_, x.columns) {
        STD_TORCH_CHECK(residual.count == x.count && residual.columns == x.columns && out.count == x.count &&
                            out.columns == x.columns,
                        "fastbert: x, residual and the output or gradient must have one shape");
        args.x = x.rows;
        args.residual = residual.rows;
        args.out = out.rows;
        args.x_bias = x_bias.get();
        args.weight = weight.get();
        args.bias = bias.get();
        args.dropout = dropout_args(dropout_p, seed);
        if (row_index.has_value()) {
            STD_TORCH_CHECK(row_index->numel() == x.count && row_index->scalar_type() == ScalarType::Long &&
                                row_index->is_contiguous(),
                            "fastbert: rows must be a contiguous int64 tensor with one number a row");
            args.row_index = static_cast<const int64_t*>(row_index->const_data_ptr());
        }
        args.eps = static_cast<float>(eps);
        args.rows = x.count;
        args.columns = int_columns(x.columns);
        args.inverse_columns = 1.0f / static_cast<float>(x.columns);
    }
};

Tensor forward(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
               const Optional& x_bias, const Optional& seed, const Optional& rows, double dropout_p, double eps) {
    Tensor out = new_tensor(x, sizes_of(x), promote(x.scalar_type(), residual.scalar_type()));
    const Call call(x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps, out);
    if (call.args.rows) add_dropout_layer_norm_forward(call.args, call.device.stream());
    return out;
}

// dx is empty where it equals dresidual: nothing dropped and one dtype. The three sums are in float32.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& residual,
                                                            const Tensor& weight, const Tensor& bias,
                                                            const Optional& x_bias, const Optional& seed,
                                                            const Optional& rows, double dropout_p, double eps) {
    Call call(x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps, grad);
    auto& args = call.args;
    const bool same = !args.dropout.threshold && x.scalar_type() == residual.scalar_type();
    Tensor dresidual = new_tensor(residual);
    Tensor dx = same ? new_tensor(x, {0}, x.scalar_type()) : new_tensor(x);
    args.dresidual = rows_of(dresidual, call.x.columns);
    args.dx = rows_of(dx, call.x.columns);
    if (same) args.dx.data = nullptr;
    Tensor sums[3];
    for (int i = 0; i < 3; ++i) {
        sums[i] = args.rows ? new_tensor(x, {call.x.columns}, ScalarType::Float)
                            : torch::stable::new_zeros(x, {call.x.columns}, ScalarType::Float);
        args.sums[i] = static_cast<float*>(sums[i].mutable_data_ptr());
    }
    if (args.rows) {
        Tensor partial = new_tensor(x, {add_dropout_layer_norm_parts(args), 3, call.x.columns}, ScalarType::Float);
        args.partial = static_cast<float*>(partial.mutable_data_ptr());
        add_dropout_layer_norm_backward(args, call.device.stream());
    }
    return {dx, dresidual, sums[0], sums[1], sums[2]};
}

}  // namespace

FASTBERT_CUDA_LIBRARY_IMPL(m) {
    m.impl("add_dropout_layer_norm", TORCH_BOX(&forward));
    m.impl("add_dropout_layer_norm_backward", TORCH_BOX(&backward));
}
}  // namespace fastbert::cuda
#endif
