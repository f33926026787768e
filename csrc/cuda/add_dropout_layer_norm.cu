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

#include "layer_norm.cuh"

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
struct Row : NormRow<kThreads, kChunks, kVector<X>> {
    using Base = NormRow<kThreads, kChunks, kVector<X>>;
    using Base::V, Base::kHeld, Base::row, Base::pre;

    const AddDropoutLayerNormArgs& a;

    __device__ __forceinline__ Row(const AddDropoutLayerNormArgs& args, int64_t i)
        : Base(i, args.columns, args.dropout, args.row_index), a(args) {}

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
            const uint32_t bits = this->draw(a.dropout.threshold, chunk, column);
#pragma unroll
            for (int k = 0; k < V; ++k) v[k] = drop(a.dropout, bits, k, v[k]);
        }
#pragma unroll
        for (int k = 0; k < V; ++k) pre[chunk][k] = v[k] + r[k];
    }

    // All loads first; then the sums.
    __device__ __forceinline__ void load() {
        if constexpr (kChunks > 0) {
            Packed<X, V> x[kHeld];
            Packed<R, V> residual[kHeld];
            this->for_each([&](int chunk, int column) {
                x[chunk].load(row_of<X>(a.x, row), a.x.dtype, column);
                residual[chunk].load(row_of<R>(a.residual, row), a.residual.dtype, column);
            });
            this->for_each([&](int chunk, int column) { combine(x[chunk], residual[chunk], chunk, column); });
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
};

template <class X, class R, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock,
                                  resident_blocks(Group<kThreads>::kBlock, kChunks* kVector<X>))
    forward_kernel(AddDropoutLayerNormArgs a) {
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    for (int64_t i = group.first_row(); i < a.rows; i += group.row_step()) {
        Row<X, R, kThreads, kChunks> row(a, i);
        row.load();
        const Statistics s = statistics(row, group, a.inverse_columns, a.eps);
        normalise(row, s, a.weight, a.bias, [&](int, int column, const auto& y) {
            Packed<R, kVector<X>>::store(row_of<R>(a.out, i), a.out.dtype, column, y);
        });
    }
}

template <class X, class R, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock, 1) backward_kernel(AddDropoutLayerNormArgs a) {
    constexpr int V = kVector<X>;
    // With 32 elements a thread there are no registers for all of it: the gradient is read twice (from the caches).
    constexpr bool kHoldGrad = kChunks > 0 && kChunks * V <= 24;
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    ColumnSums<Row<X, R, kThreads, kChunks>, 3> sums(a.partial, a.columns);
    for (int64_t i = group.first_row(); i < a.rows; i += group.row_step()) {
        Row<X, R, kThreads, kChunks> row(a, i);
        Packed<R, V> grad[row.kHeld];
        auto load_grad = [&](int chunk, int column) { grad[chunk].load(row_of<R>(a.out, i), a.out.dtype, column); };
        if constexpr (kHoldGrad) row.for_each(load_grad);
        row.load();
        const Statistics s = statistics(row, group, a.inverse_columns, a.eps);
        const auto gradient = [&](int chunk, int column, float (&d)[V]) {
            if constexpr (!kHoldGrad) load_grad(chunk, column);
            grad[chunk].floats(d);
        };
        const auto store = [&](int chunk, int column, float (&d)[V]) {
            Packed<R, V>::store(row_of<R>(a.dresidual, i), a.dresidual.dtype, column, d);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                if (a.dropout.threshold) d[k] = drop(a.dropout, row.drawn(chunk), k, d[k]);
                sums.add(2, chunk, column, k, d[k]);
            }
            if (a.dx.data) Packed<X, V>::store(row_of<X>(a.dx, i), a.dx.dtype, column, d);
        };
        normalise_backward(row, group, s, a.weight, a.inverse_columns, sums, gradient, store);
        sums.first = false;
    }
    sums.write();
}

using Kernel = NormKernel<AddDropoutLayerNormArgs>;

template <class X, class R, int kThreads, int kChunks>
Kernel kernel() {
    return Kernel::make<kThreads, kChunks>(forward_kernel<X, R, kThreads, kChunks>,
                                           backward_kernel<X, R, kThreads, kChunks>);
}
template <class X, class R>
Kernel held(int columns) {
    return choose_held<kVector<X>>(columns, [](auto threads, auto chunks) { return kernel<X, R, threads, chunks>(); });
}

Kernel choose(const AddDropoutLayerNormArgs& a) {
    const bool vectors = a.columns % (16 / size_of(a.x.dtype)) == 0 && aligned(a.x) && aligned(a.residual) &&
                         aligned(a.out) && aligned(a.dx) && aligned(a.dresidual) && aligned(a.x_bias) &&
                         aligned(a.weight) && aligned(a.bias);
    if (vectors && a.columns <= kMostHeld && a.out.dtype == a.residual.dtype) {
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
    launch("add_dropout_layer_norm", kernel.forward, kernel.forward_blocks(a.rows), kernel.threads, 0, stream, a);
}
int add_dropout_layer_norm_parts(const AddDropoutLayerNormArgs& a) { return choose(a).all_parts(a.rows); }
void add_dropout_layer_norm_backward(const AddDropoutLayerNormArgs& a, cudaStream_t stream) {
    const Kernel kernel = choose(a);
    launch("add_dropout_layer_norm_backward", kernel.backward, kernel.backward_blocks(a.rows), kernel.threads, 0,
           stream, a);
    column_sums<3>(a.partial, {{a.sums[0], a.sums[1], a.sums[2]}}, kernel.all_parts(a.rows), a.columns, stream);
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
