// dropout(softmax(scale * scores + mask)) over the last dimension, and its backward, one row at a time.
//
// Memory-bound: forward reads scores and writes the output once; backward reads scores and the incoming gradient and
// writes one gradient, recomputing the row's softmax in the first-level cache: no probabilities and no dropout mask are
// kept. A bool or additive mask is read through its strides, so a broadcast one costs nothing; with `lengths` no mask
// is read and columns past the length are not computed.
#include <cstdint>

#include "../common/dropout.h"
#include "dtype.h"
#include "isa.h"

namespace fastbert::cpu {
enum class MaskKind { none, boolean, additive };

struct MaskedSoftmaxArgs {
    // Rows are [batch, heads, queries] in this order; out is the incoming gradient in backward.
    Rows scores, out, dscores;
    int64_t heads, queries, keys;
    // Element (b, h, q, k) at mask + sum of index * stride; bool bytes, or C (float; double for float64 scores).
    const void* mask;
    MaskKind mask_kind;
    int64_t mask_stride[4];
    // Keys at or past lengths[b * stride[0] + q * stride[1]] are off; null: none.
    const int32_t* lengths;
    int64_t lengths_stride[2];
    double scale;
    Dropout dropout;
    bool wide;  // C is double
};
struct MaskedSoftmaxKernels {
    // Rows [begin, end); scratch: 5 rows of keys + 64 elements of C.
    void (*forward)(const MaskedSoftmaxArgs&, int64_t begin, int64_t end, void* scratch);
    void (*backward)(const MaskedSoftmaxArgs&, int64_t begin, int64_t end, void* scratch);
};
constexpr int64_t kSoftmaxScratchRows = 5;
constexpr int64_t kSoftmaxScratchSlack = 64;
}  // namespace fastbert::cpu

#ifdef FASTBERT_ISA
#include "vec.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

template <class C>
struct MaskedSoftmax {
    using V = Vec<C>;
    using I = typename Vector<C>::I;
    const MaskedSoftmaxArgs& a;
    C* scratch;

    static constexpr C kOff = -std::numeric_limits<C>::infinity();

    C* buffer(int i) const { return scratch + i * (a.keys + kSoftmaxScratchSlack); }

    struct Row {
        int64_t batch, head, query, keys;  // keys: how many, from the first on, may be on
    };
    Row locate(int64_t row) const {
        Row r;
        r.query = row % a.queries;
        r.head = row / a.queries % a.heads;
        r.batch = row / a.queries / a.heads;
        r.keys = a.keys;
        if (a.lengths) {
            const int64_t length = a.lengths[r.batch * a.lengths_stride[0] + r.query * a.lengths_stride[1]];
            r.keys = length < 0 ? 0 : length < a.keys ? length : a.keys;
        }
        return r;
    }

    // The scaled, masked scores of a row into `s`, -inf where a key is off; returns their maximum.
    C masked_scores(const Row& r, const C* scores, C* s) const {
        const C scale = static_cast<C>(a.scale);
        V most = splat(kOff);
        auto keep_most = [&](auto m, V v) {
            if constexpr (std::is_same_v<decltype(m), PartVector>)
                for (int64_t i = m.n; i < kLanes<C>; ++i) v[i] = kOff;
            most = max<C>(most, v);
        };
        const int64_t base = r.batch * a.mask_stride[0] + r.head * a.mask_stride[1] + r.query * a.mask_stride[2];
        if (a.mask_kind == MaskKind::none) {
            for_vectors<C>(r.keys, [&](int64_t i, auto m) {
                const V v = m.template load<C>(scores + i) * scale;
                store<C>(s + i, v);
                keep_most(m, v);
            });
        } else if (a.mask_kind == MaskKind::boolean) {
            const auto* mask = static_cast<const unsigned char*>(a.mask) + base;
            const int64_t step = a.mask_stride[3];
            for_vectors<C>(r.keys, [&](int64_t i, auto m) {
                I on;
                int64_t count = kLanes<C>;
                if constexpr (std::is_same_v<decltype(m), PartVector>) count = m.n;
                if (step == 1 && count == kLanes<C>) {
                    on = __builtin_convertvector(load_raw<typename Vector<C>::Bytes>(mask + i), I);
                } else {
                    for (int64_t j = 0; j < kLanes<C>; ++j) on[j] = j < count ? mask[(i + j) * step] : 0;
                }
                const V v = on != 0 ? m.template load<C>(scores + i) * scale : splat(kOff);
                store<C>(s + i, v);
                keep_most(m, v);
            });
        } else {
            const C* mask = static_cast<const C*>(a.mask) + base;
            if (a.mask_stride[3] != 1) {
                C* row = buffer(4);
                for (int64_t k = 0; k < r.keys; ++k) row[k] = mask[k * a.mask_stride[3]];
                mask = row;
            }
            for_vectors<C>(r.keys, [&](int64_t i, auto m) {
                const V added = m.template load<C>(mask + i);
                const V v = added == kOff ? added : m.template load<C>(scores + i) * scale + added;
                store<C>(s + i, v);
                keep_most(m, v);
            });
        }
        // A NaN that is on must show: max() passes over it, the exponentials do not.
        return max<C>(most);
    }

    // exp(s - max) in place and 1 / their sum; a row with no key on gives zeros.
    C exponentials(const Row& r, C most, C* s) const {
        if (most == kOff) {
            bool any_nan = false;
            for (int64_t k = 0; k < r.keys; ++k) any_nan |= s[k] != s[k];
            if (!any_nan) {
                for_vectors<C>(r.keys, [&](int64_t i, auto) { store<C>(s + i, V{}); });
                return 0;
            }
        }
        const C total = reduce<C>(r.keys, [&](int64_t i, auto) {
            const V e = exp(load<C>(s + i) - most);
            store<C>(s + i, e);
            return e;
        });
        return C(1) / total;
    }

    const C* kept(const Row& r) const {
        C* multipliers = buffer(2);
        const auto row_hi = static_cast<uint32_t>(r.batch * a.heads + r.head);
        const RowKeys keys = row_keys(a.dropout.seed, row_hi, static_cast<uint32_t>(r.query));
        dropout_multipliers(a.dropout, keys, 0, r.keys, multipliers);
        return multipliers;
    }

    void forward(int64_t row) const {
        const Row r = locate(row);
        C* s = buffer(0);
        const C most = masked_scores(r, widen(a.scores.row(row), a.scores.dtype, r.keys, buffer(1)), s);
        const C inverse = exponentials(r, most, s);
        C* out = target(a.out.row(row), a.out.dtype, buffer(3));
        if (a.dropout.active()) {
            const C* multipliers = kept(r);
            for_vectors<C>(r.keys, [&](int64_t i, auto m) {
                m.template store<C>(out + i, load<C>(s + i) * inverse * load<C>(multipliers + i));
            });
        } else {
            for_vectors<C>(r.keys, [&](int64_t i, auto m) { m.template store<C>(out + i, load<C>(s + i) * inverse); });
        }
        finish(a.out, row, r.keys, out);
    }

    void backward(int64_t row) const {
        const Row r = locate(row);
        C* s = buffer(0);
        const C most = masked_scores(r, widen(a.scores.row(row), a.scores.dtype, r.keys, buffer(1)), s);
        const C inverse = exponentials(r, most, s);
        const C* grad = widen(a.out.row(row), a.out.dtype, r.keys, buffer(1));
        C* dp = buffer(3);  // the gradient of the probabilities
        const C* multipliers = a.dropout.active() ? kept(r) : nullptr;
        const C dot = reduce<C>(r.keys, [&](int64_t i, auto m) {
            const V p = load<C>(s + i) * inverse;
            V d = m.template load<C>(grad + i);
            if (multipliers) d *= load<C>(multipliers + i);
            d = p == 0 ? V{} : d;  // off: whatever the gradient holds there, it counts for nothing
            store<C>(s + i, p);
            store<C>(dp + i, d);
            return p * d;
        });
        const C scale = static_cast<C>(a.scale);
        C* ds = target(a.dscores.row(row), a.dscores.dtype, buffer(1));
        for_vectors<C>(r.keys, [&](int64_t i, auto m) {
            m.template store<C>(ds + i, load<C>(s + i) * (load<C>(dp + i) - dot) * scale);
        });
        finish(a.dscores, row, r.keys, ds);
    }

    // Narrow what was computed and put zeros behind it.
    void finish(const Rows& rows, int64_t row, int64_t computed, const C* values) const {
        commit(rows.row(row), rows.dtype, computed, values);
        const int64_t size = size_of(rows.dtype);
        std::memset(rows.row(row) + computed * size, 0, (a.keys - computed) * size);
    }
};

template <class C, bool kBackward>
void rows(const MaskedSoftmaxArgs& a, int64_t begin, int64_t end, void* scratch) {
    const MaskedSoftmax<C> softmax{a, static_cast<C*>(scratch)};
    for (int64_t row = begin; row < end; ++row) {
        if constexpr (kBackward)
            softmax.backward(row);
        else
            softmax.forward(row);
    }
}
void forward(const MaskedSoftmaxArgs& a, int64_t begin, int64_t end, void* scratch) {
    (a.wide ? rows<double, false> : rows<float, false>)(a, begin, end, scratch);
}
void backward(const MaskedSoftmaxArgs& a, int64_t begin, int64_t end, void* scratch) {
    (a.wide ? rows<double, true> : rows<float, true>)(a, begin, end, scratch);
}
}  // namespace

FASTBERT_KERNELS(MaskedSoftmaxKernels, masked_softmax) = {forward, backward};
}  // namespace fastbert::cpu::FASTBERT_ISA

#else
#include "../common/adapter.h"

namespace fastbert::cpu {
FASTBERT_CHOOSE(MaskedSoftmaxKernels, masked_softmax)

namespace {

using Optional = std::optional<Tensor>;

struct Call {
    RowView scores, out;
    MaskedSoftmaxArgs args;

    // scores [B, H, Sq, Sk]; mask: bool or the accumulation type, expanded to the same; lengths: int32 [B] or [B, Sq].
    Call(const Tensor& scores_, const Optional& mask, const Optional& lengths, double scale, double dropout_p,
         const Optional& seed, const Tensor& out_)
        : scores(scores_), out(out_), args{} {
        STD_TORCH_CHECK(scores_.dim() == 4 && out_.dim() == 4 && out_.numel() == scores_.numel(),
                        "fastbert: scores must be [batch, heads, queries, keys], the gradient likewise");
        args.scores = scores.rows;
        args.out = out.rows;
        args.heads = scores_.size(1);
        args.queries = scores_.size(2);
        args.keys = scores_.size(3);
        args.wide = scores.rows.dtype == DType::f64;
        if (mask.has_value()) {
            const bool boolean = mask->scalar_type() == ScalarType::Bool;
            STD_TORCH_CHECK(boolean || mask->scalar_type() == (args.wide ? ScalarType::Double : ScalarType::Float),
                            "fastbert: mask must be bool or of the accumulation type");
            for (int d = 0; d < 4; ++d) {
                STD_TORCH_CHECK(mask->size(d) == scores_.size(d), "fastbert: mask must be expanded to scores' shape");
                args.mask_stride[d] = mask->stride(d);
            }
            args.mask = mask->const_data_ptr();
            args.mask_kind = boolean ? MaskKind::boolean : MaskKind::additive;
        }
        if (lengths.has_value()) {
            STD_TORCH_CHECK(lengths->scalar_type() == ScalarType::Int && lengths->size(0) == scores_.size(0) &&
                                (lengths->dim() == 1 || lengths->size(1) == args.queries),
                            "fastbert: lengths must be int32 [batch] or [batch, queries]");
            args.lengths = static_cast<const int32_t*>(lengths->const_data_ptr());
            args.lengths_stride[0] = lengths->stride(0);
            args.lengths_stride[1] = lengths->dim() == 2 ? lengths->stride(1) : 0;
        }
        args.scale = scale;
        args.dropout = dropout_of(dropout_p, seed);
    }

    void run(void (*kernel)(const MaskedSoftmaxArgs&, int64_t, int64_t, void*)) const {
        torch::stable::parallel_for(0, scores.count, grain(args.keys), [&](int64_t begin, int64_t end) {
            const int64_t elements = kSoftmaxScratchRows * (args.keys + kSoftmaxScratchSlack);
            std::vector<double> scratch(args.wide ? elements : elements / 2 + 1);
            kernel(args, begin, end, scratch.data());
        });
    }
};

Tensor masked_softmax_forward(const Tensor& scores, const Optional& mask, const Optional& lengths, double scale,
                              double dropout_p, const Optional& seed) {
    Tensor out = new_output(scores);
    Call(scores, mask, lengths, scale, dropout_p, seed, out).run(masked_softmax_kernels().forward);
    return out;
}

Tensor masked_softmax_backward(const Tensor& grad, const Tensor& scores, const Optional& mask, const Optional& lengths,
                               double scale, double dropout_p, const Optional& seed) {
    Call call(scores, mask, lengths, scale, dropout_p, seed, grad);
    Tensor dscores = new_output(scores);
    call.args.dscores = {dscores.mutable_data_ptr(), dtype_of(dscores), call.args.keys};
    call.run(masked_softmax_kernels().backward);
    return dscores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert_cpu, CPU, m) {
    m.impl("masked_softmax", TORCH_BOX(&masked_softmax_forward));
    m.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward));
}
}  // namespace fastbert::cpu
#endif
