// Cross-entropy of rows of logits, and its gradient in their place: the middle of masked_lm_loss, whose products are
// torch's (fastbert/ops/masked_lm_loss.py calls this between them, for as many rows as fit in the caches).
//
// A row is read from memory once and written once: bias, maximum, exponentials, their sum and the scaling pass over it
// in the second-level cache (30,522 floats are 122 KB). The bias gradient, the column sums of the result, is summed in
// the same call.
#include <cstdint>

#include "dtype.h"
#include "isa.h"

namespace fastbert::cpu {
struct MaskedLmLossKernels {
    // Rows [begin, end) of logits [*, vocabulary] become scale * (softmax(logits + bias) - onehot(label));
    // losses[row] = -log softmax(logits + bias)[label]. bias: vocabulary of C (float; double for float64), or null;
    // dbias: vocabulary of C, added to; scratch: 2 rows of vocabulary + 64 elements of C.
    void (*rows)(Rows logits, const void* bias, const int64_t* labels, double scale, int64_t vocabulary, double* losses,
                 void* dbias, int64_t begin, int64_t end, void* scratch);
};
}  // namespace fastbert::cpu

#ifdef FASTBERT_ISA
#include "vec.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

template <class C>
void loss_rows(Rows logits, const C* bias, const int64_t* labels, C scale, int64_t n, double* losses, C* dbias,
               int64_t begin, int64_t end, C* scratch) {
    C *s = scratch, *buffer = scratch + n + 64;
    for (int64_t row = begin; row < end; ++row) {
        const C* in = widen(logits.row(row), logits.dtype, n, buffer);
        Vec<C> most = splat(-std::numeric_limits<C>::infinity());
        for_vectors<C>(n, [&](int64_t i, auto m) {
            Vec<C> v = m.template load<C>(in + i);
            if (bias) v += m.template load<C>(bias + i);
            store<C>(s + i, v);
            if constexpr (std::is_same_v<decltype(m), PartVector>)
                for (int64_t j = m.n; j < kLanes<C>; ++j) v[j] = most[j];
            most = max<C>(most, v);
        });
        const C top = max<C>(most), of_label = s[labels[row]];
        const C total = reduce<C>(n, [&](int64_t i, auto) {
            const auto e = exp(load<C>(s + i) - top);
            store<C>(s + i, e);
            return e;
        });
        losses[row] = std::log(static_cast<double>(total)) + top - of_label;
        C* out = target(logits.row(row), logits.dtype, buffer);
        const C factor = scale / total;
        for_vectors<C>(n, [&](int64_t i, auto m) { m.template store<C>(out + i, load<C>(s + i) * factor); });
        out[labels[row]] -= scale;
        for_vectors<C>(n, [&](int64_t i, auto m) {
            m.template store<C>(dbias + i, m.template load<C>(dbias + i) + m.template load<C>(out + i));
        });
        commit(logits.row(row), logits.dtype, n, out);
    }
}

void rows(Rows logits, const void* bias, const int64_t* labels, double scale, int64_t vocabulary, double* losses,
          void* dbias, int64_t begin, int64_t end, void* scratch) {
    if (logits.dtype == DType::f64)
        loss_rows(logits, static_cast<const double*>(bias), labels, scale, vocabulary, losses,
                  static_cast<double*>(dbias), begin, end, static_cast<double*>(scratch));
    else
        loss_rows(logits, static_cast<const float*>(bias), labels, static_cast<float>(scale), vocabulary, losses,
                  static_cast<float*>(dbias), begin, end, static_cast<float*>(scratch));
}
}  // namespace

FASTBERT_KERNELS(MaskedLmLossKernels, masked_lm_loss) = {rows};
}  // namespace fastbert::cpu::FASTBERT_ISA

#else
#include "../common/adapter.h"

namespace fastbert::cpu {
FASTBERT_CHOOSE(MaskedLmLossKernels, masked_lm_loss)

namespace {

// Returns the sum of the losses (float64) and the bias gradient (accumulation type).
std::tuple<Tensor, Tensor> masked_lm_loss_rows_(Tensor logits, const std::optional<Tensor>& bias, const Tensor& labels,
                                                double scale) {
    STD_TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && labels.is_contiguous() &&
                        labels.scalar_type() == ScalarType::Long && labels.numel() == logits.size(0),
                    "fastbert: logits must be contiguous [rows, vocabulary], labels int64 [rows]");
    const int64_t rows = logits.size(0), vocabulary = logits.size(1);
    const auto* label = static_cast<const int64_t*>(labels.const_data_ptr());
    for (int64_t i = 0; i < rows; ++i)
        STD_TORCH_CHECK(label[i] >= 0 && label[i] < vocabulary,
                        "fastbert: a label is outside the vocabulary: ", label[i]);
    const Rows view{logits.mutable_data_ptr(), dtype_of(logits), vocabulary};
    const bool wide = view.dtype == DType::f64;
    const Accumulated b(bias, view.dtype, vocabulary);
    std::vector<double> losses(rows);
    PartialSums dbias(logits, wide, 1, rows, vocabulary);
    dbias.for_each_chunk([&](int64_t begin, int64_t end, void* sums) {
        std::vector<double> scratch(wide ? 2 * (vocabulary + 64) : vocabulary + 64);
        masked_lm_loss_kernels().rows(view, b.data(), label, scale, vocabulary, losses.data(), sums, begin, end,
                                      scratch.data());
    });
    Tensor total = torch::stable::new_empty(logits, {}, ScalarType::Double);
    double sum = 0;
    for (double loss : losses) sum += loss;
    *static_cast<double*>(total.mutable_data_ptr()) = sum;
    return {total, dbias.total(0)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert_cpu, CPU, m) { m.impl("masked_lm_loss_rows_", TORCH_BOX(&masked_lm_loss_rows_)); }
}  // namespace fastbert::cpu
#endif
