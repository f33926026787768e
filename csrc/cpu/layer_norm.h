// LayerNorm of one row, forward and backward; what the ops that end in a LayerNorm share.
#pragma once
#include "vec.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

template <class C>
struct LayerNormRow {
    int64_t n;
    const C *weight, *bias;
    C eps;

    struct Statistics {
        C mean, rstd;
    };

    // Of the row `pre`, whose sum is `total`. The variance is that of the deviations, in a second pass over the row in
    // the first-level cache: E[x^2] - E[x]^2 would cancel.
    Statistics statistics(const C* pre, C total) const {
        const C mean = total / static_cast<C>(n);
        const C squares = reduce<C>(n, [&](int64_t i, auto) {
            const auto d = load<C>(pre + i) - mean;
            return d * d;
        });
        return {mean, C(1) / std::sqrt(squares / static_cast<C>(n) + eps)};
    }

    // emit(offset, access, value) for each vector of the normalised, weighted row.
    template <class F>
    void forward(const C* pre, Statistics s, F&& emit) const {
        for_vectors<C>(n, [&](int64_t i, auto m) {
            const auto normalised = (load<C>(pre + i) - s.mean) * s.rstd;
            emit(i, m, normalised * m.template load<C>(weight + i) + m.template load<C>(bias + i));
        });
    }

    // emit(offset, access, gradient of pre); `pre` is overwritten by the normalised row; dweight and dbias are added
    // to.
    //   d(pre) = rstd * (g - mean(g) - normalised * mean(g * normalised)),  g = grad * weight
    template <class F>
    void backward(C* pre, Statistics s, const C* grad, C* dweight, C* dbias, F&& emit) const {
        C mean_g = reduce<C>(
            n, [&](int64_t i, auto m) { return m.template load<C>(grad + i) * m.template load<C>(weight + i); });
        C mean_gn = reduce<C>(n, [&](int64_t i, auto m) {
            const auto normalised = (load<C>(pre + i) - s.mean) * s.rstd;
            const auto d = m.template load<C>(grad + i);
            store<C>(pre + i, normalised);
            m.template store<C>(dweight + i, m.template load<C>(dweight + i) + d * normalised);
            m.template store<C>(dbias + i, m.template load<C>(dbias + i) + d);
            return d * m.template load<C>(weight + i) * normalised;
        });
        mean_g /= static_cast<C>(n);
        mean_gn /= static_cast<C>(n);
        for_vectors<C>(n, [&](int64_t i, auto m) {
            const auto g = m.template load<C>(grad + i) * m.template load<C>(weight + i);
            emit(i, m, (g - mean_g - load<C>(pre + i) * mean_gn) * s.rstd);
        });
    }
};

// Multipliers of hidden dropout for a row of n: `index` is the token's number in the padded batch.
template <class C>
inline void hidden_dropout(const Dropout& dropout, uint64_t index, int64_t n, C* multipliers) {
    const RowKeys keys = row_keys(dropout.seed, static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(index));
    dropout_multipliers(dropout, keys, 0, n, multipliers);
}

}  // namespace
}  // namespace fastbert::cpu::FASTBERT_ISA
