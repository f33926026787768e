// gelu(x + bias), exact or tanh, and its backward.
//
// Memory-bound: forward reads x and writes y once; backward reads x and dy and writes dx once, and sums the bias
// gradient in the same pass. Nothing but x is kept for backward. A thread owns a vector of columns, whose bias and sums
// stay in registers, and goes down the rows four at a time, so that four (backward: eight) 16-byte loads are in flight.
// The bias gradient is summed per block, then over the blocks in order.
//
// Exact form: Phi(-t) = exp(-t^2 / 2) * R(t), with the polynomial of csrc/cpu/gelu.cpp: one exponential serves value
// and derivative, and the lower tail keeps its relative accuracy.
#include <algorithm>

#include "rows.cuh"

namespace fastbert::cuda {

struct GeluArgs {
    Rows x, grad, out;  // out: y, or dx
    Parameters bias;
    bool tanh;
    int64_t rows, columns;
    float* partial;  // backward with a bias: [gelu_parts(), columns], and where their sums go
    float* dbias;
};
void gelu_forward(const GeluArgs& args, cudaStream_t stream);
void gelu_backward(const GeluArgs& args, cudaStream_t stream);
int gelu_parts(const GeluArgs& args);

#ifdef FASTBERT_CUDA_KERNELS
namespace {

constexpr int kThreads = 256;
constexpr int kRowsInFlight = 4;

struct Normal {
    float cdf, density;
};
__device__ __forceinline__ Normal normal(float x) {
    const float t = fabsf(x);
    const float e = __expf(x * x * -0.5f);
    const float u = __fdividef(1.0f, 1.0f + t * 0.25f);
    float p = 2.572335117e-2f;
    p = p * u - 1.528086960e-1f;
    p = p * u + 2.961206436e-1f;
    p = p * u - 2.057820112e-1f;
    p = p * u + 2.017575949e-1f;
    p = p * u + 3.292812407e-2f;
    p = p * u + 1.037466526e-1f;
    p = p * u + 9.851684421e-2f;
    p = p * u + 9.979747981e-2f;
    const float tail = e * (p * u);
    return {x < 0 ? tail : 1.0f - tail, e * 0.398942280f};
}

constexpr float kSqrt2OverPi = 0.79788456080286535588f, kCubic = 0.044715f;

// tanh form: x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(x * (-2.0f * kSqrt2OverPi) * (1.0f + kCubic * x * x)));
}

template <bool kTanh>
__device__ __forceinline__ float value(float x) {
    if constexpr (kTanh)
        return x * sigmoid(x);
    else
        return x * normal(x).cdf;
}
template <bool kTanh>
__device__ __forceinline__ float derivative(float x) {
    if constexpr (kTanh) {
        const float s = sigmoid(x);
        return s + x * s * (1.0f - s) * (2.0f * kSqrt2OverPi) * (1.0f + 3.0f * kCubic * x * x);
    } else {
        const Normal n = normal(x);
        return n.cdf + x * n.density;
    }
}

// Block: x threads across the columns, y down the rows. Grid: the same.
template <class T, bool kTanh, bool kBackward>
__global__ void __launch_bounds__(kThreads) gelu_kernel(GeluArgs a) {
    constexpr int V = kVector<T>;
    const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * V;
    const bool inside = column < a.columns;
    float bias[V] = {}, dbias[V] = {};
    if (inside && a.bias.data) load_parameters<V>(a.bias, column, bias);
    const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
    const int64_t rows = inside ? a.rows : 0;
    for (int64_t first = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; first < rows;
         first += step * kRowsInFlight) {
        Packed<T, V> x[kRowsInFlight], grad[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
            const int64_t row = first + i * step;
            if (row >= rows) continue;
            x[i].load(row_of<T>(a.x, row), a.x.dtype, column);
            if constexpr (kBackward) grad[i].load(row_of<T>(a.grad, row), a.grad.dtype, column);
        }
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i) {
            const int64_t row = first + i * step;
            if (row >= rows) continue;
            float v[V];
            x[i].floats(v);
            if constexpr (kBackward) {
                float d[V];
                grad[i].floats(d);
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    v[k] = d[k] * derivative<kTanh>(v[k] + bias[k]);
                    dbias[k] += v[k];
                }
            } else {
#pragma unroll
                for (int k = 0; k < V; ++k) v[k] = value<kTanh>(v[k] + bias[k]);
            }
            Packed<T, V>::store(row_of<T>(a.out, row), a.out.dtype, column, v);
        }
    }
    if constexpr (kBackward) {
        if (!a.partial) return;
        FASTBERT_SHARED(sums, float[kThreads * V]);  // [blockDim.y, blockDim.x, V]
        const unsigned width = blockDim.x * V;
#pragma unroll
        for (int k = 0; k < V; ++k) sums[threadIdx.y * width + threadIdx.x * V + k] = dbias[k];
        __syncthreads();
        for (unsigned i = threadIdx.y * blockDim.x + threadIdx.x; i < width; i += kThreads) {
            float sum = 0;
            for (unsigned y = 0; y < blockDim.y; ++y) sum += sums[y * width + i];
            const int64_t at = static_cast<int64_t>(blockIdx.x) * width + i;
            if (at < a.columns) a.partial[blockIdx.y * a.columns + at] = sum;
        }
    }
}

struct Shape {
    dim3 grid, block;
};
// A warp's width across the columns where there are that many, more where there are few rows.
Shape shape_of(const GeluArgs& a, int vector, bool backward) {
    const int64_t vectors = ceil_div(a.columns, vector);
    unsigned x = 1, y = 1;
    while (x < vectors && x < kWarp) x *= 2;
    while (y < a.rows && y < kThreads / x) y *= 2;
    x = kThreads / y;
    const int64_t across = ceil_div(vectors, x);
    int64_t down = ceil_div(a.rows, y * kRowsInFlight);
    // Backward: as many blocks as are at work at once, so that there is little to add up behind them.
    const int64_t most = backward ? ceil_div(8 * device_attribute(cudaDevAttrMultiProcessorCount), across) : down;
    down = std::min(std::min(down, most), int64_t{65535});
    return {dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), dim3(x, y)};
}

// The type of a kernel for these arguments: 16 bytes at a time, or Any.
bool vectorised(const GeluArgs& a) {
    const bool one_type = a.x.dtype == a.out.dtype && (!a.grad.data || a.grad.dtype == a.x.dtype);
    return one_type && a.columns * size_of(a.x.dtype) % 16 == 0 && aligned(a.x) && aligned(a.out) && aligned(a.grad) &&
           aligned(a.bias);
}

template <bool kTanh, bool kBackward>
void run(const GeluArgs& a, cudaStream_t stream) {
    const bool fast = vectorised(a);
    const auto kernel = !fast                     ? gelu_kernel<Any, kTanh, kBackward>
                        : a.x.dtype == DType::f32 ? gelu_kernel<float, kTanh, kBackward>
                        : a.x.dtype == DType::f16 ? gelu_kernel<__half, kTanh, kBackward>
                                                  : gelu_kernel<__nv_bfloat16, kTanh, kBackward>;
    const auto shape = shape_of(a, fast ? 16 / size_of(a.x.dtype) : 1, kBackward);
    launch(kBackward ? "gelu_backward" : "gelu", kernel, shape.grid, shape.block, 0, stream, a);
}

}  // namespace

int gelu_parts(const GeluArgs& a) { return shape_of(a, vectorised(a) ? 16 / size_of(a.x.dtype) : 1, true).grid.y; }
void gelu_forward(const GeluArgs& a, cudaStream_t stream) {
    (a.tanh ? run<true, false> : run<false, false>)(a, stream);
}
void gelu_backward(const GeluArgs& a, cudaStream_t stream) {
    (a.tanh ? run<true, true> : run<false, true>)(a, stream);
    if (a.partial) column_sums<1>(a.partial, {{a.dbias}}, gelu_parts(a), a.columns, stream);
}
#endif
}  // namespace fastbert::cuda

#ifdef FASTBERT_CUDA_ADAPTER
#include "adapter.h"

namespace fastbert::cuda {
namespace {

Tensor forward(const Tensor& x, const std::optional<Tensor>& bias, std::string approximate) {
    const Device device(x);
    Tensor y = new_tensor(x);
    if (y.numel() == 0) return y;
    const RowView in(x), out(y);
    const ParameterView b(bias, in.columns);
    gelu_forward({in.rows, {}, out.rows, b.get(), approximate == "tanh", in.count, in.columns, nullptr, nullptr},
                 device.stream());
    return y;
}

// dbias is in float32, or empty where there is no bias.
std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias,
                                    std::string approximate) {
    const Device device(x);
    Tensor dx = new_tensor(x);
    const RowView dy(grad), in(x), out(dx);
    const ParameterView b(bias, in.columns);
    if (dx.numel() == 0)
        return {dx, torch::stable::new_zeros(x, {bias.has_value() ? in.columns : 0}, ScalarType::Float)};
    Tensor dbias = new_tensor(x, {bias.has_value() ? in.columns : 0}, ScalarType::Float);
    GeluArgs args{in.rows, dy.rows, out.rows, b.get(), approximate == "tanh", in.count, in.columns, nullptr, nullptr};
    std::optional<Tensor> partial;
    if (bias.has_value()) {
        partial = new_tensor(x, {gelu_parts(args), in.columns}, ScalarType::Float);
        args.partial = static_cast<float*>(partial->mutable_data_ptr());
        args.dbias = static_cast<float*>(dbias.mutable_data_ptr());
    }
    gelu_backward(args, device.stream());
    return {dx, dbias};
}

}  // namespace

FASTBERT_CUDA_LIBRARY_IMPL(m) {
    m.impl("gelu", TORCH_BOX(&forward));
    m.impl("gelu_backward", TORCH_BOX(&backward));
}
}  // namespace fastbert::cuda
#endif
