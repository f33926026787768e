// LayerNorm(residual + dropout(x + x_bias)) and its backward, one row at a time.
//
// Memory-bound: forward reads x and residual and writes the output once. Backward reads the two again and the
// incoming gradient, recomputes sum, mean and variance from the row in the first-level cache, and writes the two
// gradients once (one where nothing is dropped, since they are then equal). Nothing else is kept: no dropout mask,
// no normalised row. The gradients of weight, bias and x_bias are summed in the same pass.
#include <cstdint>

#include "../common/dropout.h"
#include "dtype.h"
#include "isa.h"

namespace fastbert::cpu {
struct AddDropoutLayerNormArgs {
    Rows x, residual, out;  // backward: out is the incoming gradient
    // Vectors of `columns` in the accumulation type C (float; double if x or residual is float64).
    const void *x_bias, *weight, *bias;  // x_bias may be null
    Dropout dropout;
    const int64_t* row_index;  // dropout's coordinate of each row; null: its own number
    double eps;
    int64_t columns;
    bool wide;  // C is double
    // Backward only. dx.data is null where dx would equal dresidual. sums: [3, columns] of C, added to: the
    // gradients of weight, bias and x_bias.
    Rows dx, dresidual;
};
struct AddDropoutLayerNormKernels {
    // Rows [begin, end); scratch: scratch_rows * columns elements of C and a little slack.
    void (*forward)(const AddDropoutLayerNormArgs&, int64_t begin, int64_t end, void* scratch);
    void (*backward)(const AddDropoutLayerNormArgs&, int64_t begin, int64_t end, void* scratch, void* sums);
};
constexpr int64_t kLayerNormScratchRows = 7;
constexpr int64_t kLayerNormScratchSlack = 64;  // elements behind each row
}  // namespace fastbert::cpu

#ifdef FASTBERT_ISA
#include "layer_norm.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

template <class C>
struct AddDropoutLayerNorm {
    const AddDropoutLayerNormArgs& a;
    C* scratch;
    const int64_t n = a.columns;
    const LayerNormRow<C> norm{n, static_cast<const C*>(a.weight), static_cast<const C*>(a.bias),
                               static_cast<C>(a.eps)};

    C* buffer(int i) const { return scratch + i * (n + kLayerNormScratchSlack); }
    const C* read(const Rows& rows, int64_t row, int i) const { return widen(rows.row(row), rows.dtype, n, buffer(i)); }

    // The row residual + dropout(x + x_bias) into `pre`, dropout's multipliers into `kept`; returns the row's sum.
    C sum_row(int64_t row, C* pre, C* kept) const {
        const C *x = read(a.x, row, 0), *residual = read(a.residual, row, 1);
        const C* x_bias = static_cast<const C*>(a.x_bias);
        const bool drop = a.dropout.active();
        if (drop) hidden_dropout(a.dropout, a.row_index ? a.row_index[row] : row, n, kept);
        return reduce<C>(n, [&](int64_t i, auto m) {
            auto v = m.template load<C>(x + i);
            if (x_bias) v += m.template load<C>(x_bias + i);
            // A dropped element is dropped whatever it is: a NaN as well.
            if (drop) {
                const auto k = load<C>(kept + i);
                v = k == 0 ? Vec<C>{} : v * k;
            }
            v += m.template load<C>(residual + i);
            store<C>(pre + i, v);
            return v;
        });
    }

    void forward(int64_t row) const {
        C *pre = buffer(2), *kept = buffer(3);
        const auto statistics = norm.statistics(pre, sum_row(row, pre, kept));
        C* out = target(a.out.row(row), a.out.dtype, buffer(4));
        norm.forward(pre, statistics, [&](int64_t i, auto m, Vec<C> v) { m.template store<C>(out + i, v); });
        commit(a.out.row(row), a.out.dtype, n, out);
    }

    void backward(int64_t row, C* sums) const {
        C *pre = buffer(2), *kept = buffer(3);
        const auto statistics = norm.statistics(pre, sum_row(row, pre, kept));
        const C* grad = read(a.out, row, 4);
        C *dweight = sums, *dbias = sums + n, *dx_bias = sums + 2 * n;
        const bool drop = a.dropout.active();
        C* dresidual = target(a.dresidual.row(row), a.dresidual.dtype, buffer(5));
        C* dx = a.dx.data ? target(a.dx.row(row), a.dx.dtype, buffer(6)) : nullptr;
        norm.backward(pre, statistics, grad, dweight, dbias, [&](int64_t i, auto m, Vec<C> d) {
            m.template store<C>(dresidual + i, d);
            if (drop) d *= load<C>(kept + i);
            if (dx) m.template store<C>(dx + i, d);
            if (a.x_bias) m.template store<C>(dx_bias + i, m.template load<C>(dx_bias + i) + d);
        });
        commit(a.dresidual.row(row), a.dresidual.dtype, n, dresidual);
        if (dx) commit(a.dx.row(row), a.dx.dtype, n, dx);
    }
};

template <class C>
void forward_rows(const AddDropoutLayerNormArgs& a, int64_t begin, int64_t end, void* scratch) {
    const AddDropoutLayerNorm<C> op{a, static_cast<C*>(scratch)};
    for (int64_t row = begin; row < end; ++row) op.forward(row);
}
template <class C>
void backward_rows(const AddDropoutLayerNormArgs& a, int64_t begin, int64_t end, void* scratch, void* sums) {
    const AddDropoutLayerNorm<C> op{a, static_cast<C*>(scratch)};
    for (int64_t row = begin; row < end; ++row) op.backward(row, static_cast<C*>(sums));
}

void forward(const AddDropoutLayerNormArgs& a, int64_t begin, int64_t end, void* scratch) {
    (a.wide ? forward_rows<double> : forward_rows<float>)(a, begin, end, scratch);
}
void backward(const AddDropoutLayerNormArgs& a, int64_t begin, int64_t end, void* scratch, void* sums) {
    (a.wide ? backward_rows<double> : backward_rows<float>)(a, begin, end, scratch, sums);
}
}  // namespace

FASTBERT_KERNELS(AddDropoutLayerNormKernels, add_dropout_layer_norm) = {forward, backward};
}  // namespace fastbert::cpu::FASTBERT_ISA

#else
#include "../common/adapter.h"

namespace fastbert::cpu {
FASTBERT_CHOOSE(AddDropoutLayerNormKernels, add_dropout_layer_norm)

namespace {

using Optional = std::optional<Tensor>;

struct Call {
    RowView x, residual, out;
    DType accumulation;
    Accumulated x_bias, weight, bias;
    AddDropoutLayerNormArgs args;

    Call(const Tensor& x_, const Tensor& residual_, const Tensor& weight_, const Tensor& bias_, const Optional& x_bias_,
         const Optional& seed, const Optional& row_index, double dropout_p, double eps, const Tensor& out_)
        : x(x_),
          residual(residual_),
          out(out_),
          accumulation(x.rows.dtype == DType::f64 || residual.rows.dtype == DType::f64 ? DType::f64 : DType::f32),
          x_bias(x_bias_, accumulation, x.columns),
          weight(weight_, accumulation, x.columns),
          bias(bias_, accumulation, x.columns),
          args{} {
        STD_TORCH_CHECK(residual.count == x.count && residual.columns == x.columns && out.count == x.count &&
                            out.columns == x.columns,
                        "fastbert: x, residual and the output or gradient must have one shape");
        args.x = x.rows;
        args.residual = residual.rows;
        args.out = out.rows;
        args.x_bias = x_bias.data();
        args.weight = weight.data();
        args.bias = bias.data();
        args.dropout = dropout_of(dropout_p, seed);
        args.row_index = row_numbers(row_index, x.count);
        args.eps = eps;
        args.columns = x.columns;
        args.wide = accumulation == DType::f64;
    }
    std::vector<double> scratch() const {
        const int64_t elements = kLayerNormScratchRows * (args.columns + kLayerNormScratchSlack);
        return std::vector<double>(args.wide ? elements : elements / 2 + 1);
    }
};

Tensor add_dropout_layer_norm_forward(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                      const Optional& x_bias, const Optional& seed, const Optional& rows,
                                      double dropout_p, double eps) {
    Tensor out = new_output(x, sizes_of(x), promote(x.scalar_type(), residual.scalar_type()));
    const Call call(x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps, out);
    torch::stable::parallel_for(0, call.x.count, grain(call.x.columns), [&](int64_t begin, int64_t end) {
        auto scratch = call.scratch();
        add_dropout_layer_norm_kernels().forward(call.args, begin, end, scratch.data());
    });
    return out;
}

// dx is empty where it equals dresidual: nothing dropped and one dtype. The three sums are in the accumulation type.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> add_dropout_layer_norm_backward(
    const Tensor& grad, const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const Optional& x_bias, const Optional& seed, const Optional& rows, double dropout_p, double eps) {
    Call call(x, residual, weight, bias, x_bias, seed, rows, dropout_p, eps, grad);
    const bool same = !call.args.dropout.active() && x.scalar_type() == residual.scalar_type();
    Tensor dresidual = new_output(residual);
    Tensor dx = same ? torch::stable::new_empty(x, {0}, x.scalar_type()) : new_output(x);
    call.args.dresidual = {dresidual.mutable_data_ptr(), dtype_of(dresidual), call.x.columns};
    call.args.dx = {same ? nullptr : dx.mutable_data_ptr(), dtype_of(dx), call.x.columns};
    PartialSums sums(x, call.args.wide, 3, call.x.count, call.x.columns);
    sums.for_each_chunk([&](int64_t begin, int64_t end, void* partial) {
        auto scratch = call.scratch();
        add_dropout_layer_norm_kernels().backward(call.args, begin, end, scratch.data(), partial);
    });
    return {dx, dresidual, sums.total(0), sums.total(1), sums.total(2)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert_cpu, CPU, m) {
    m.impl("add_dropout_layer_norm", TORCH_BOX(&add_dropout_layer_norm_forward));
    m.impl("add_dropout_layer_norm_backward", TORCH_BOX(&add_dropout_layer_norm_backward));
}
}  // namespace fastbert::cpu
#endif
