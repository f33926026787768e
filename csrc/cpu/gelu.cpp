// gelu(x + bias), exact or tanh, and its backward.
//
// Memory-bound: forward reads x and writes y once; backward reads x and dy and writes dx once, and sums the
// bias gradient in the same pass. Nothing but x is kept for backward.
//
// Exact form: Phi(-t) = exp(-t^2 / 2) * R(t), where R, the Mills ratio over sqrt(2 pi), is smooth; R is a
// polynomial in u = 1 / (1 + t / 4) (relative error 6e-8 on [0, 14]). The exponential is what the derivative
// needs as well, and the lower tail keeps its relative accuracy, which 1 + erf(x) loses.
#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace fastbert::cpu {
struct GeluKernels {
    // Rows [begin, end) of x [*, columns]; bias: columns of float (double for float64), or null.
    void (*forward)(Rows x, const void* bias, Rows y, bool tanh, int64_t columns, int64_t begin, int64_t end);
    // dbias: columns of float (double), added to; or null.
    void (*backward)(Rows dy, Rows x, const void* bias, Rows dx, void* dbias, bool tanh, int64_t columns, int64_t begin,
                     int64_t end);
};
}  // namespace fastbert::cpu

#ifdef FASTBERT_ISA
#include "vec.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

// The cumulative distribution Phi(x) of the normal law and its density phi(x).
template <class V>
struct Normal {
    V cdf, density;
};
inline Normal<VF> normal(VF x) {
    const VF t = x < 0 ? -x : x;
    const VF e = exp(x * x * -0.5f);
    const VF u = 1.0f / (1.0f + t * 0.25f);
    VF p = splat(2.572335117e-2f);
    p = p * u - 1.528086960e-1f;
    p = p * u + 2.961206436e-1f;
    p = p * u - 2.057820112e-1f;
    p = p * u + 2.017575949e-1f;
    p = p * u + 3.292812407e-2f;
    p = p * u + 1.037466526e-1f;
    p = p * u + 9.851684421e-2f;
    p = p * u + 9.979747981e-2f;
    const VF tail = e * (p * u);
    return {x < 0 ? tail : 1.0f - tail, e * 0.398942280f};
}
inline Normal<Vec<double>> normal(Vec<double> x) {
    Normal<Vec<double>> n;
    for (int i = 0; i < kLanes<double>; ++i) {
        n.cdf[i] = 0.5 * std::erfc(-x[i] * 0.70710678118654752440);
        n.density[i] = std::exp(-0.5 * x[i] * x[i]) * 0.39894228040143267794;
    }
    return n;
}

template <class C, bool kTanh>
struct Gelu {
    using V = Vec<C>;
    static constexpr C kSqrt2OverPi = C(0.79788456080286535588), kCubic = C(0.044715);

    // tanh form: x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    static V sigmoid(V x) { return C(1) / (C(1) + exp(x * (C(-2) * kSqrt2OverPi) * (C(1) + kCubic * x * x))); }
    static V value(V x) {
        if constexpr (kTanh) {
            return x * sigmoid(x);
        } else {
            return x * normal(x).cdf;
        }
    }
    static V derivative(V x) {
        if constexpr (kTanh) {
            const V s = sigmoid(x);
            return s + x * s * (C(1) - s) * (C(2) * kSqrt2OverPi) * (C(1) + C(3) * kCubic * x * x);
        } else {
            const auto n = normal(x);
            return n.cdf + x * n.density;
        }
    }
};

// Columns are taken a block at a time, so that widened copies stay in the first-level cache.
constexpr int64_t kBlock = 512;

template <class C, bool kTanh>
void forward_rows(Rows x, const C* bias, Rows y, int64_t columns, int64_t begin, int64_t end) {
    C x_buffer[kBlock + kSlack], y_buffer[kBlock + kSlack];
    for (int64_t row = begin; row < end; ++row)
        for (int64_t c = 0; c < columns; c += kBlock) {
            const int64_t n = columns - c < kBlock ? columns - c : kBlock;
            const C* in = widen(x.row(row) + c * size_of(x.dtype), x.dtype, n, x_buffer);
            char* out_row = y.row(row) + c * size_of(y.dtype);
            C* out = target(out_row, y.dtype, y_buffer);
            if (bias)
                for_vectors<C>(n, [&](int64_t i, auto m) {
                    const auto v = m.template load<C>(in + i) + m.template load<C>(bias + c + i);
                    m.template store<C>(out + i, Gelu<C, kTanh>::value(v));
                });
            else
                for_vectors<C>(n, [&](int64_t i, auto m) {
                    m.template store<C>(out + i, Gelu<C, kTanh>::value(m.template load<C>(in + i)));
                });
            commit(out_row, y.dtype, n, out);
        }
}

template <class C, bool kTanh>
void backward_rows(Rows dy, Rows x, const C* bias, Rows dx, C* dbias, int64_t columns, int64_t begin, int64_t end) {
    C dy_buffer[kBlock + kSlack], x_buffer[kBlock + kSlack], dx_buffer[kBlock + kSlack];
    for (int64_t row = begin; row < end; ++row)
        for (int64_t c = 0; c < columns; c += kBlock) {
            const int64_t n = columns - c < kBlock ? columns - c : kBlock;
            const C* grad = widen(dy.row(row) + c * size_of(dy.dtype), dy.dtype, n, dy_buffer);
            const C* in = widen(x.row(row) + c * size_of(x.dtype), x.dtype, n, x_buffer);
            char* out_row = dx.row(row) + c * size_of(dx.dtype);
            C* out = target(out_row, dx.dtype, dx_buffer);
            for_vectors<C>(n, [&](int64_t i, auto m) {
                auto v = m.template load<C>(in + i);
                if (bias) v += m.template load<C>(bias + c + i);
                const auto d = m.template load<C>(grad + i) * Gelu<C, kTanh>::derivative(v);
                m.template store<C>(out + i, d);
                if (dbias) m.template store<C>(dbias + c + i, m.template load<C>(dbias + c + i) + d);
            });
            commit(out_row, dx.dtype, n, out);
        }
}

void forward(Rows x, const void* bias, Rows y, bool tanh, int64_t columns, int64_t begin, int64_t end) {
    if (x.dtype == DType::f64)
        (tanh ? forward_rows<double, true> : forward_rows<double, false>)(x, static_cast<const double*>(bias), y,
                                                                          columns, begin, end);
    else
        (tanh ? forward_rows<float, true> : forward_rows<float, false>)(x, static_cast<const float*>(bias), y, columns,
                                                                        begin, end);
}
void backward(Rows dy, Rows x, const void* bias, Rows dx, void* dbias, bool tanh, int64_t columns, int64_t begin,
              int64_t end) {
    if (x.dtype == DType::f64)
        (tanh ? backward_rows<double, true> : backward_rows<double, false>)(dy, x, static_cast<const double*>(bias), dx,
                                                                            static_cast<double*>(dbias), columns, begin,
                                                                            end);
    else
        (tanh ? backward_rows<float, true> : backward_rows<float, false>)(dy, x, static_cast<const float*>(bias), dx,
                                                                          static_cast<float*>(dbias), columns, begin,
                                                                          end);
}
}  // namespace

FASTBERT_KERNELS(GeluKernels, gelu) = {forward, backward};
}  // namespace fastbert::cpu::FASTBERT_ISA

#else
#include "../common/adapter.h"

namespace fastbert::cpu {
FASTBERT_CHOOSE(GeluKernels, gelu)

namespace {

bool is_tanh(const std::string& approximate) { return approximate == "tanh"; }

Tensor gelu_forward(const Tensor& x, const std::optional<Tensor>& bias, std::string approximate) {
    Tensor y = new_output(x);
    const RowView in(x), out(y);
    const Accumulated b(bias, in.rows.dtype, in.columns);
    torch::stable::parallel_for(0, in.count, grain(in.columns), [&](int64_t begin, int64_t end) {
        gelu_kernels().forward(in.rows, b.data(), out.rows, is_tanh(approximate), in.columns, begin, end);
    });
    return y;
}

// dbias is in the accumulation type, or empty where there is no bias.
std::tuple<Tensor, Tensor> gelu_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& bias,
                                         std::string approximate) {
    Tensor dx = new_output(x);
    const RowView dy(grad), in(x), out(dx);
    const Accumulated b(bias, in.rows.dtype, in.columns);
    PartialSums dbias(x, in.rows.dtype == DType::f64, bias.has_value() ? 1 : 0, in.count, in.columns);
    dbias.for_each_chunk([&](int64_t begin, int64_t end, void* sums) {
        gelu_kernels().backward(dy.rows, in.rows, b.data(), out.rows, sums, is_tanh(approximate), in.columns, begin,
                                end);
    });
    return {dx, dbias.total(0)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert_cpu, CPU, m) {
    m.impl("gelu", TORCH_BOX(&gelu_forward));
    m.impl("gelu_backward", TORCH_BOX(&gelu_backward));
}
}  // namespace fastbert::cpu
#endif
