// dropout(LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids])) and its backward.
//
// Memory-bound: forward reads three table rows a token and writes one output row; the sum of the three never reaches
// memory. Backward gathers the rows again, recomputes the statistics and writes the gradient of the sum once, in the
// accumulation type; it is then added into the tables by slices of columns: a slice belongs to one thread, which takes
// the tokens in order, so that the result is deterministic whatever ids repeat, without atomics and without sorting.
#include <cstdint>

#include "../common/dropout.h"
#include "dtype.h"
#include "isa.h"

namespace fastbert::cpu {
constexpr int kTables = 3;  // word, token type, position

struct EmbeddingLayerNormArgs {
    const int64_t* ids[kTables];  // one a token
    Rows table[kTables];
    const void *weight, *bias;  // [columns] of C
    Dropout dropout;
    const int64_t* row_index;  // dropout's coordinate of each token; null: its own number
    double eps;
    int64_t columns;
    bool wide;   // C is double
    Rows out;    // backward: the incoming gradient
    void* dsum;  // backward: [tokens, columns] of C, the gradient of the sum
};
struct EmbeddingLayerNormKernels {
    // Tokens [begin, end); scratch: 6 rows of columns + 64 elements of C; sums: [2, columns] of C, the gradients of
    // weight and bias, added to.
    void (*forward)(const EmbeddingLayerNormArgs&, int64_t begin, int64_t end, void* scratch);
    void (*backward)(const EmbeddingLayerNormArgs&, int64_t begin, int64_t end, void* scratch, void* sums);
    // dtable[ids[t]] += dsum[t] for every token but those of id `skip`, columns [begin, end); dtable is of C.
    void (*scatter)(const void* dsum, const int64_t* ids, int64_t tokens, int64_t columns, int64_t skip, void* dtable,
                    bool wide, int64_t begin, int64_t end);
};
constexpr int64_t kEmbeddingScratchRows = 6;
constexpr int64_t kEmbeddingScratchSlack = 64;
}  // namespace fastbert::cpu

#ifdef FASTBERT_ISA
#include "layer_norm.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

template <class C>
struct EmbeddingLayerNorm {
    const EmbeddingLayerNormArgs& a;
    C* scratch;
    const int64_t n = a.columns;
    const LayerNormRow<C> norm{n, static_cast<const C*>(a.weight), static_cast<const C*>(a.bias),
                               static_cast<C>(a.eps)};

    C* buffer(int i) const { return scratch + i * (n + kEmbeddingScratchSlack); }

    C sum_row(int64_t token, C* pre) const {
        const C* rows[kTables];
        for (int t = 0; t < kTables; ++t)
            rows[t] = widen(a.table[t].row(a.ids[t][token]), a.table[t].dtype, n, buffer(t));
        return reduce<C>(n, [&](int64_t i, auto m) {
            const auto v =
                m.template load<C>(rows[0] + i) + m.template load<C>(rows[1] + i) + m.template load<C>(rows[2] + i);
            store<C>(pre + i, v);
            return v;
        });
    }
    const C* multipliers(int64_t token) const {
        if (!a.dropout.active()) return nullptr;
        hidden_dropout(a.dropout, a.row_index ? a.row_index[token] : token, n, buffer(4));
        return buffer(4);
    }

    void forward(int64_t token) const {
        C* pre = buffer(3);
        const auto statistics = norm.statistics(pre, sum_row(token, pre));
        const C* kept = multipliers(token);
        C* out = target(a.out.row(token), a.out.dtype, buffer(5));
        norm.forward(pre, statistics, [&](int64_t i, auto m, Vec<C> v) {
            if (kept) {
                const auto k = load<C>(kept + i);
                v = k == 0 ? Vec<C>{} : v * k;
            }
            m.template store<C>(out + i, v);
        });
        commit(a.out.row(token), a.out.dtype, n, out);
    }

    void backward(int64_t token, C* sums) const {
        C* pre = buffer(3);
        const auto statistics = norm.statistics(pre, sum_row(token, pre));
        const C* kept = multipliers(token);
        const C* grad = widen(a.out.row(token), a.out.dtype, n, buffer(5));
        if (kept) {
            C* kept_grad = buffer(5);
            for_vectors<C>(n, [&](int64_t i, auto m) {
                store<C>(kept_grad + i, m.template load<C>(grad + i) * load<C>(kept + i));
            });
            grad = kept_grad;
        }
        C* dsum = static_cast<C*>(a.dsum) + token * n;
        norm.backward(pre, statistics, grad, sums, sums + n,
                      [&](int64_t i, auto m, Vec<C> d) { m.template store<C>(dsum + i, d); });
    }
};

template <class C>
void forward_rows(const EmbeddingLayerNormArgs& a, int64_t begin, int64_t end, void* scratch) {
    const EmbeddingLayerNorm<C> op{a, static_cast<C*>(scratch)};
    for (int64_t token = begin; token < end; ++token) op.forward(token);
}
template <class C>
void backward_rows(const EmbeddingLayerNormArgs& a, int64_t begin, int64_t end, void* scratch, void* sums) {
    const EmbeddingLayerNorm<C> op{a, static_cast<C*>(scratch)};
    for (int64_t token = begin; token < end; ++token) op.backward(token, static_cast<C*>(sums));
}
template <class C>
void scatter_columns(const C* dsum, const int64_t* ids, int64_t tokens, int64_t columns, int64_t skip, C* dtable,
                     int64_t begin, int64_t end) {
    for (int64_t t = 0; t < tokens; ++t) {
        if (ids[t] == skip) continue;
        const C* from = dsum + t * columns + begin;
        C* to = dtable + ids[t] * columns + begin;
        for_vectors<C>(end - begin, [&](int64_t i, auto m) {
            m.template store<C>(to + i, m.template load<C>(to + i) + m.template load<C>(from + i));
        });
    }
}

void forward(const EmbeddingLayerNormArgs& a, int64_t begin, int64_t end, void* scratch) {
    (a.wide ? forward_rows<double> : forward_rows<float>)(a, begin, end, scratch);
}
void backward(const EmbeddingLayerNormArgs& a, int64_t begin, int64_t end, void* scratch, void* sums) {
    (a.wide ? backward_rows<double> : backward_rows<float>)(a, begin, end, scratch, sums);
}
void scatter(const void* dsum, const int64_t* ids, int64_t tokens, int64_t columns, int64_t skip, void* dtable,
             bool wide, int64_t begin, int64_t end) {
    if (wide)
        scatter_columns(static_cast<const double*>(dsum), ids, tokens, columns, skip, static_cast<double*>(dtable),
                        begin, end);
    else
        scatter_columns(static_cast<const float*>(dsum), ids, tokens, columns, skip, static_cast<float*>(dtable), begin,
                        end);
}
}  // namespace

FASTBERT_KERNELS(EmbeddingLayerNormKernels, embedding_layer_norm) = {forward, backward, scatter};
}  // namespace fastbert::cpu::FASTBERT_ISA

#else
#include "../common/adapter.h"

namespace fastbert::cpu {
FASTBERT_CHOOSE(EmbeddingLayerNormKernels, embedding_layer_norm)

namespace {

using Optional = std::optional<Tensor>;

struct Call {
    std::vector<Tensor> ids;
    std::vector<RowView> tables;
    DType accumulation = DType::f32;
    std::optional<Accumulated> weight, bias;
    EmbeddingLayerNormArgs args{};
    int64_t tokens;

    Call(const Tensor& input_ids, const Tensor& token_type_ids, const Tensor& position_ids, const Tensor& word,
         const Tensor& token_type, const Tensor& position, const Tensor& weight_, const Tensor& bias_,
         const Optional& seed, const Optional& row_index, double dropout_p, double eps) {
        tokens = input_ids.numel();
        for (const Tensor* t : {&word, &token_type, &position}) {
            STD_TORCH_CHECK(t->dim() == 2 && t->size(1) == word.size(1), "fastbert: tables must be [ids, columns]");
            tables.emplace_back(*t);
            if (tables.back().rows.dtype == DType::f64) accumulation = DType::f64;
        }
        for (const Tensor* t : {&input_ids, &token_type_ids, &position_ids}) {
            STD_TORCH_CHECK(t->scalar_type() == ScalarType::Long && t->numel() == tokens,
                            "fastbert: ids must be int64, one for each token");
            ids.push_back(torch::stable::contiguous(*t));
        }
        args.columns = word.size(1);
        for (int t = 0; t < kTables; ++t) {
            args.ids[t] = static_cast<const int64_t*>(ids[t].const_data_ptr());
            args.table[t] = tables[t].rows;
            for (int64_t i = 0; i < tokens; ++i)
                STD_TORCH_CHECK(args.ids[t][i] >= 0 && args.ids[t][i] < tables[t].count,
                                "fastbert: an id is outside its table: ", args.ids[t][i]);
        }
        weight.emplace(weight_, accumulation, args.columns);
        bias.emplace(bias_, accumulation, args.columns);
        args.weight = weight->data();
        args.bias = bias->data();
        args.dropout = dropout_of(dropout_p, seed);
        args.row_index = row_numbers(row_index, tokens);
        args.eps = eps;
        args.wide = accumulation == DType::f64;
    }
    std::vector<double> scratch() const {
        const int64_t elements = kEmbeddingScratchRows * (args.columns + kEmbeddingScratchSlack);
        return std::vector<double>(args.wide ? elements : elements / 2 + 1);
    }
    ScalarType type() const { return args.wide ? ScalarType::Double : ScalarType::Float; }
};

Tensor embedding_layer_norm_forward(const Tensor& input_ids, const Tensor& token_type_ids, const Tensor& position_ids,
                                    const Tensor& word, const Tensor& token_type, const Tensor& position,
                                    const Tensor& weight, const Tensor& bias, const Optional& seed,
                                    const Optional& rows, double dropout_p, double eps, int64_t padding_idx) {
    Call call(input_ids, token_type_ids, position_ids, word, token_type, position, weight, bias, seed, rows, dropout_p,
              eps);
    auto sizes = sizes_of(input_ids);
    sizes.push_back(call.args.columns);
    Tensor out = new_output(word, sizes, word.scalar_type());
    call.args.out = {out.mutable_data_ptr(), dtype_of(out), call.args.columns};
    torch::stable::parallel_for(0, call.tokens, grain(call.args.columns), [&](int64_t begin, int64_t end) {
        auto scratch = call.scratch();
        embedding_layer_norm_kernels().forward(call.args, begin, end, scratch.data());
    });
    return out;
}

// Gradients of word, token_type, position, weight and bias, all in the accumulation type.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> embedding_layer_norm_backward(
    const Tensor& grad, const Tensor& input_ids, const Tensor& token_type_ids, const Tensor& position_ids,
    const Tensor& word, const Tensor& token_type, const Tensor& position, const Tensor& weight, const Tensor& bias,
    const Optional& seed, const Optional& rows, double dropout_p, double eps, int64_t padding_idx) {
    Call call(input_ids, token_type_ids, position_ids, word, token_type, position, weight, bias, seed, rows, dropout_p,
              eps);
    const RowView dy(grad);
    STD_TORCH_CHECK(dy.columns == call.args.columns && (dy.count == call.tokens || call.args.columns == 0),
                    "fastbert: the gradient must have the output's shape");
    call.args.out = dy.rows;
    Tensor dsum = new_output(word, {call.tokens, call.args.columns}, call.type());
    call.args.dsum = dsum.mutable_data_ptr();
    PartialSums sums(word, call.args.wide, 2, call.tokens, call.args.columns);
    sums.for_each_chunk([&](int64_t begin, int64_t end, void* partial) {
        auto scratch = call.scratch();
        embedding_layer_norm_kernels().backward(call.args, begin, end, scratch.data(), partial);
    });
    std::vector<Tensor> gradients;
    for (int t = 0; t < kTables; ++t) {
        Tensor dtable = new_output(word, {call.tables[t].count, call.args.columns}, call.type());
        zero(dtable);
        torch::stable::parallel_for(0, call.args.columns, 16, [&](int64_t begin, int64_t end) {
            embedding_layer_norm_kernels().scatter(call.args.dsum, call.args.ids[t], call.tokens, call.args.columns,
                                                   t == 0 ? padding_idx : -1, dtable.mutable_data_ptr(), call.args.wide,
                                                   begin, end);
        });
        gradients.push_back(dtable);
    }
    return {gradients[0], gradients[1], gradients[2], sums.total(0), sums.total(1)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert_cpu, CPU, m) {
    m.impl("embedding_layer_norm", TORCH_BOX(&embedding_layer_norm_forward));
    m.impl("embedding_layer_norm_backward", TORCH_BOX(&embedding_layer_norm_backward));
}
}  // namespace fastbert::cpu
#endif
