// dropout(LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids])) and its backward.
//
// Memory-bound. Forward reads three table rows a token, which repeat and mostly come from the second-level cache, and
// writes the output once; the sum of the three never reaches memory. Backward has three steps:
// 1. Rows: gathers again, recomputes the statistics, writes the gradient of the sum once, in float, sums the gradients
//    of weight and bias, and notes which row of which table each token read.
// 2. Those notes, of all three tables in one numbering, are sorted by torch, stably: 16-bit numbers where they suffice,
//    as for BERT's 30,522 + 512 + 2 rows. The tokens of a table row are then a run.
// 3. Tables: a group of threads owns a row of a table and writes the sum of its run, or zeros: the tables, dense and
//    mostly zeros, are written once and never read or cleared. A frequent id has a run of thousands: whole chunks of
//    kChunk tokens within one run are summed beforehand, side by side. The small tables come first in the numbering:
//    their long runs start early and overlap the rest.
// No atomics: every sum is taken in the order of the tokens. Ids are not checked, which would synchronise: one outside
// its table reads zeros and adds to no gradient.
#include <algorithm>

#include "layer_norm.cuh"

namespace fastbert::cuda {

constexpr int kTables = 3;  // token type, position, word: the order of the numbering

struct EmbeddingLayerNormArgs {
    const int64_t* ids[kTables];  // one a token
    Rows table[kTables];
    int64_t table_rows[kTables];
    Parameters weight, bias;
    DropoutArgs dropout;
    const int64_t* row_index;  // dropout's coordinate of each token; null: its own number
    float eps;
    int64_t tokens;
    int columns;
    float inverse_columns;
    Rows out;  // backward: the incoming gradient
    // Backward only. dsum: [tokens, columns], the gradient of the sum. partial: [parts, 2, columns], the sums of the
    // gradients of weight and bias over each block's rows; sums: [columns] each, over all.
    float *dsum, *partial, *sums[2];
    int64_t padding;  // the row of word that gets no gradient, or -1
    void* numbers;    // [kTables, tokens]: the row that each token read, numbered through; `none` where it read none
    bool narrow;      // numbers are 16 bits wide, else 32
    int none;         // the rows of all tables
};
struct TableGradientArgs {
    const float* dsum;     // [tokens, columns]
    const void* numbers;   // [kTables * tokens], sorted
    const int64_t* order;  // [kTables * tokens]: table * tokens + token of each
    bool narrow;
    int none;
    int* bounds;             // [none + 1]: where the run of each number starts
    float* chunks;           // [kTables * tokens / kChunk, columns]: sums of the chunks that lie within one run
    float* dtable[kTables];  // [table_rows, columns]
    int64_t table_rows[kTables];
    int64_t tokens;
    int columns;
};
constexpr int kChunk = 64;

void embedding_layer_norm_forward(const EmbeddingLayerNormArgs& args, cudaStream_t stream);
int embedding_layer_norm_parts(const EmbeddingLayerNormArgs& args);
void embedding_layer_norm_backward(const EmbeddingLayerNormArgs& args, cudaStream_t stream);
void embedding_table_gradients(const TableGradientArgs& args, cudaStream_t stream);

#ifdef FASTBERT_CUDA_KERNELS
namespace {

// One thread's part of the sum of a token's three rows.
template <class T, int kThreads, int kChunks>
struct Row : NormRow<kThreads, kChunks, kVector<T>> {
    using Base = NormRow<kThreads, kChunks, kVector<T>>;
    using Base::V, Base::kHeld, Base::row, Base::pre;

    const EmbeddingLayerNormArgs& a;
    int64_t id[kTables];

    __device__ __forceinline__ Row(const EmbeddingLayerNormArgs& args, int64_t i)
        : Base(i, args.columns, args.dropout, args.row_index), a(args) {
#pragma unroll
        for (int table = 0; table < kTables; ++table) id[table] = a.ids[table][row];
    }
    __device__ __forceinline__ bool exists(int table) const {
        return id[table] >= 0 && id[table] < a.table_rows[table];
    }

    __device__ __forceinline__ void add(int table, int chunk, int column) {
        Packed<T, V> packed;
        float v[V];
        packed.load(row_of<T>(a.table[table], id[table]), a.table[table].dtype, column);
        packed.floats(v);
#pragma unroll
        for (int k = 0; k < V; ++k) pre[chunk][k] += v[k];
    }
    __device__ __forceinline__ void clear(int chunk) {
#pragma unroll
        for (int k = 0; k < V; ++k) pre[chunk][k] = 0;
    }
    __device__ __forceinline__ void load() {
        if constexpr (kChunks > 0) {
            this->for_each([&](int chunk, int) { clear(chunk); });
#pragma unroll
            for (int table = 0; table < kTables; ++table)
                if (exists(table)) this->for_each([&](int chunk, int column) { add(table, chunk, column); });
        }
    }
    __device__ __forceinline__ void at(int column) {
        if constexpr (kChunks == 0) {
            clear(0);
#pragma unroll
            for (int table = 0; table < kTables; ++table)
                if (exists(table)) add(table, 0, column);
        }
    }
};

template <class T, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock,
                                  resident_blocks(Group<kThreads>::kBlock, kChunks* kVector<T>))
    forward_kernel(const __grid_constant__ EmbeddingLayerNormArgs a) {
    constexpr int V = kVector<T>;
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    for (int64_t i = group.first_row(); i < a.tokens; i += group.row_step()) {
        Row<T, kThreads, kChunks> row(a, i);
        row.load();
        const Statistics s = statistics(row, group, a.inverse_columns, a.eps);
        normalise(row, s, a.weight, a.bias, [&](int chunk, int column, float (&y)[V]) {
            if (a.dropout.threshold) {
                const uint32_t bits = row.draw(a.dropout.threshold, chunk, column);
#pragma unroll
                for (int k = 0; k < V; ++k) y[k] = drop(a.dropout, bits, k, y[k]);
            }
            Packed<T, V>::store(row_of<T>(a.out, i), a.out.dtype, column, y);
        });
    }
}

template <class T, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock, 1)
    backward_kernel(const __grid_constant__ EmbeddingLayerNormArgs a) {
    constexpr int V = kVector<T>;
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    ColumnSums<Row<T, kThreads, kChunks>, 2> sums(a.partial, a.columns);
    for (int64_t i = group.first_row(); i < a.tokens; i += group.row_step()) {
        Row<T, kThreads, kChunks> row(a, i);
        Packed<T, V> grad[row.kHeld];
        auto load_grad = [&](int chunk, int column) { grad[chunk].load(row_of<T>(a.out, i), a.out.dtype, column); };
        if constexpr (kChunks > 0) row.for_each(load_grad);
        row.load();
        if (group.thread() == 0) {
            int64_t first = 0;
#pragma unroll
            for (int table = 0; table < kTables; ++table) {
                const bool counts = row.exists(table) && !(table == kTables - 1 && row.id[table] == a.padding);
                const int number = counts ? static_cast<int>(first + row.id[table]) : a.none;
                if (a.narrow)
                    static_cast<int16_t*>(a.numbers)[table * a.tokens + i] = static_cast<int16_t>(number);
                else
                    static_cast<int32_t*>(a.numbers)[table * a.tokens + i] = number;
                first += a.table_rows[table];
            }
        }
        if (a.dropout.threshold && kChunks > 0)
            row.for_each([&](int chunk, int column) { row.draw(a.dropout.threshold, chunk, column); });
        const Statistics s = statistics(row, group, a.inverse_columns, a.eps);
        const auto gradient = [&](int chunk, int column, float (&d)[V]) {
            if constexpr (kChunks == 0) {
                load_grad(chunk, column);
                if (a.dropout.threshold) row.draw(a.dropout.threshold, chunk, column);
            }
            grad[chunk].floats(d);
            if (a.dropout.threshold) {
#pragma unroll
                for (int k = 0; k < V; ++k) d[k] = drop(a.dropout, row.drawn(chunk), k, d[k]);
            }
        };
        float* const dsum = a.dsum + i * a.columns;
        const auto store = [&](int, int column, float (&d)[V]) {
            if constexpr (V == 1)
                dsum[column] = d[0];
            else
                Packed<float, V>::store(dsum, DType::f32, column, d);
        };
        normalise_backward(row, group, s, a.weight, a.inverse_columns, sums, gradient, store);
        sums.first = false;
    }
    sums.write();
}

__device__ __forceinline__ int number_at(const void* numbers, bool narrow, int64_t i) {
    return narrow ? static_cast<const int16_t*>(numbers)[i] : static_cast<const int32_t*>(numbers)[i];
}

// A thread finds where the run of one number starts, by halving.
__global__ void __launch_bounds__(256) bounds_kernel(const __grid_constant__ TableGradientArgs a) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number > a.none) return;
    int64_t low = 0, high = kTables * a.tokens;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (number_at(a.numbers, a.narrow, middle) < number)
            low = middle + 1;
        else
            high = middle;
    }
    a.bounds[number] = static_cast<int>(low);
}

// Sums of rows: a group of threads makes V columns a thread of one row of the result. Several groups share a block.
constexpr int kSumThreads = 64, kSumBlock = 256;
template <int V>
struct RowSum {
    int64_t task;  // the row of the result
    int column;
    float total[V] = {};

    __device__ __forceinline__ RowSum(int columns) {
        const int64_t group = static_cast<int64_t>(blockIdx.x) * (kSumBlock / kSumThreads) + threadIdx.x / kSumThreads;
        const int tiles = (columns + kSumThreads * V - 1) / (kSumThreads * V);
        task = group / tiles;
        column = (static_cast<int>(group % tiles) * kSumThreads + static_cast<int>(threadIdx.x) % kSumThreads) * V;
    }
    static dim3 blocks(int64_t rows, int columns) {
        const int64_t count = ceil_div(rows * ceil_div(columns, kSumThreads * V), kSumBlock / kSumThreads);
        if (count > 0x7fffffff) throw std::runtime_error("fastbert: the tables need more blocks than a grid has");
        return dim3(static_cast<unsigned>(count));
    }
    // Adds the rows row(begin) to row(end - 1), in this order, with many loads in flight.
    template <class F>
    __device__ __forceinline__ void add(int64_t begin, int64_t end, const F& row) {
#pragma unroll 8
        for (int64_t i = begin; i < end; ++i) {
            const float* from = row(i) + column;
            if constexpr (V == 4) {
                const float4 v = *reinterpret_cast<const float4*>(from);
                total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
            } else {
                total[0] += *from;
            }
        }
    }
    __device__ __forceinline__ void store(float* row) const {
        if constexpr (V == 4)
            *reinterpret_cast<float4*>(row + column) = {total[0], total[1], total[2], total[3]};
        else
            row[column] = total[0];
    }
};

// The table that a number is of, and its row there.
struct TableRow {
    int table = 0;
    int64_t row;

    __device__ __forceinline__ TableRow(const TableGradientArgs& a, int64_t number) : row(number) {
#pragma unroll
        for (int i = 0; i < kTables - 1; ++i)
            if (table == i && row >= a.table_rows[i]) row -= a.table_rows[i], ++table;
    }
};

// The row of dsum at a place of the sorted order, among the numbers of one table.
struct TokenRow {
    const TableGradientArgs& a;
    const float* rows;

    __device__ __forceinline__ TokenRow(const TableGradientArgs& args, int table)
        : a(args), rows(a.dsum - table * a.tokens * a.columns) {}
    __device__ __forceinline__ const float* operator()(int64_t place) const {
        return rows + a.order[place] * a.columns;
    }
};

template <int V>
__global__ void __launch_bounds__(kSumBlock) chunks_kernel(const __grid_constant__ TableGradientArgs a) {
    RowSum<V> sum(a.columns);
    const int64_t begin = sum.task * kChunk, end = begin + kChunk;
    if (end > kTables * a.tokens || sum.column >= a.columns) return;
    const int number = number_at(a.numbers, a.narrow, begin);
    if (number == a.none || number != number_at(a.numbers, a.narrow, end - 1)) return;
    sum.add(begin, end, TokenRow(a, TableRow(a, number).table));
    sum.store(a.chunks + sum.task * a.columns);
}

template <int V>
__global__ void __launch_bounds__(kSumBlock) tables_kernel(const __grid_constant__ TableGradientArgs a) {
    RowSum<V> sum(a.columns);
    if (sum.task >= a.none || sum.column >= a.columns) return;
    const int64_t begin = a.bounds[sum.task], end = a.bounds[sum.task + 1];
    // Whole chunks, from first to last; the tokens before and after them.
    const int64_t first = (begin + kChunk - 1) / kChunk, last = end / kChunk;
    const bool whole = first < last;
    const TableRow result(a, sum.task);
    const TokenRow token(a, result.table);
    sum.add(begin, whole ? first * kChunk : end, token);
    if (whole) {
        sum.add(first, last, [&](int64_t chunk) { return a.chunks + chunk * a.columns; });
        sum.add(last * kChunk, end, token);
    }
    float* const out = result.table == 0 ? a.dtable[0] : result.table == 1 ? a.dtable[1] : a.dtable[2];
    sum.store(out + result.row * a.columns);
}

using Kernel = NormKernel<EmbeddingLayerNormArgs>;

template <class T, int kThreads, int kChunks>
Kernel kernel() {
    return Kernel::make<kThreads, kChunks>(forward_kernel<T, kThreads, kChunks>, backward_kernel<T, kThreads, kChunks>);
}
template <class T>
Kernel held(int columns) {
    return choose_held<kVector<T>>(columns, [](auto threads, auto chunks) { return kernel<T, threads, chunks>(); });
}

Kernel choose(const EmbeddingLayerNormArgs& a) {
    const DType dtype = a.out.dtype;
    bool vectors = a.columns % (16 / size_of(dtype)) == 0 && aligned(a.out) && aligned(a.weight) && aligned(a.bias);
    for (const Rows& table : a.table) vectors &= aligned(table) && table.dtype == dtype;
    if (vectors && a.columns <= kMostHeld) {
        if (dtype == DType::f32) return held<float>(a.columns);
        if (dtype == DType::bf16) return held<__nv_bfloat16>(a.columns);
        return held<__half>(a.columns);
    }
    return a.columns <= 1024 ? kernel<Any, kWarp, 0>() : kernel<Any, kBlockRow, 0>();
}

template <int V>
void table_gradients(const TableGradientArgs& a, cudaStream_t stream) {
    if (const int64_t chunks = kTables * a.tokens / kChunk)
        launch("embedding_chunks", chunks_kernel<V>, RowSum<V>::blocks(chunks, a.columns), kSumBlock, 0, stream, a);
    launch("embedding_tables", tables_kernel<V>, RowSum<V>::blocks(a.none, a.columns), kSumBlock, 0, stream, a);
}

}  // namespace

void embedding_layer_norm_forward(const EmbeddingLayerNormArgs& a, cudaStream_t stream) {
    const Kernel kernel = choose(a);
    launch("embedding_layer_norm", kernel.forward, kernel.forward_blocks(a.tokens), kernel.threads, 0, stream, a);
}
int embedding_layer_norm_parts(const EmbeddingLayerNormArgs& a) { return choose(a).all_parts(a.tokens); }
void embedding_layer_norm_backward(const EmbeddingLayerNormArgs& a, cudaStream_t stream) {
    const Kernel kernel = choose(a);
    launch("embedding_layer_norm_backward", kernel.backward, kernel.backward_blocks(a.tokens), kernel.threads, 0,
           stream, a);
    column_sums<2>(a.partial, {{a.sums[0], a.sums[1]}}, kernel.all_parts(a.tokens), a.columns, stream);
}
void embedding_table_gradients(const TableGradientArgs& a, cudaStream_t stream) {
    if (a.none == 0) return;
    launch("embedding_bounds", bounds_kernel, static_cast<unsigned>(ceil_div(a.none + int64_t{1}, 256)), 256, 0, stream,
           a);
    (a.columns % 4 == 0 ? table_gradients<4> : table_gradients<1>)(a, stream);
}
#endif
}  // namespace fastbert::cuda

#ifdef FASTBERT_CUDA_ADAPTER
#include <array>

#include "adapter.h"

namespace fastbert::cuda {
namespace {

using Optional = std::optional<Tensor>;

// torch.sort(numbers, stable=True)
std::array<Tensor, 2> sort(const Tensor& numbers) {
    using torch::stable::detail::from, torch::stable::detail::to;
    std::array<StableIValue, 4> stack{from(numbers), from(std::optional<bool>(true)), from(int64_t{0}), from(false)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
    return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

struct Call {
    Device device;
    std::vector<Tensor> ids;
    std::vector<RowView> tables;
    RowView out;
    ParameterView weight, bias;
    EmbeddingLayerNormArgs args{};

    Call(const Tensor& input_ids, const Tensor& token_type_ids, const Tensor& position_ids, const Tensor& word,
         const Tensor& token_type, const Tensor& position, const Tensor& weight_, const Tensor& bias_,
         const Optional& seed, const Optional& row_index, double dropout_p, double eps, const Tensor& out_)
        : device(word), out(out_), weight(weight_, word.size(1)), bias(bias_, word.size(1)) {
        args.tokens = input_ids.numel();
        args.columns = int_columns(word.size(1));
        args.inverse_columns = 1.0f / static_cast<float>(args.columns);
        int64_t rows = 0;
        for (const Tensor* t : {&token_type, &position, &word}) {
            STD_TORCH_CHECK(t->dim() == 2 && t->size(1) == args.columns, "fastbert: tables must be [ids, columns]");
            const RowView& view = tables.emplace_back(*t);
            args.table[tables.size() - 1] = view.rows;
            args.table_rows[tables.size() - 1] = t->size(0);
            rows += t->size(0);
        }
        STD_TORCH_CHECK(rows < 0x7fffffff && args.tokens <= 0x7fffffff / kTables,
                        "fastbert: tables of up to 2^31 rows and ", 0x7fffffff / kTables, " tokens are supported");
        args.none = static_cast<int>(rows);
        args.narrow = rows < 1 << 15;
        for (const Tensor* t : {&token_type_ids, &position_ids, &input_ids}) {
            STD_TORCH_CHECK(t->scalar_type() == ScalarType::Long && t->numel() == args.tokens,
                            "fastbert: ids must be int64, one for each token");
            const Tensor& last = ids.emplace_back(torch::stable::contiguous(*t));
            args.ids[ids.size() - 1] = static_cast<const int64_t*>(last.const_data_ptr());
        }
        STD_TORCH_CHECK(out.columns == args.columns && out.count == args.tokens,
                        "fastbert: the output or gradient must have a row for each token");
        args.out = out.rows;
        args.weight = weight.get();
        args.bias = bias.get();
        args.dropout = dropout_args(dropout_p, seed);
        args.row_index = row_numbers(row_index, args.tokens);
        args.eps = static_cast<float>(eps);
    }
};

Tensor forward(const Tensor& input_ids, const Tensor& token_type_ids, const Tensor& position_ids, const Tensor& word,
               const Tensor& token_type, const Tensor& position, const Tensor& weight, const Tensor& bias,
               const Optional& seed, const Optional& rows, double dropout_p, double eps, int64_t) {
    auto sizes = sizes_of(input_ids);
    sizes.push_back(word.size(1));
    Tensor out = new_tensor(word, sizes, word.scalar_type());
    const Call call(input_ids, token_type_ids, position_ids, word, token_type, position, weight, bias, seed, rows,
                    dropout_p, eps, out);
    if (call.args.tokens) embedding_layer_norm_forward(call.args, call.device.stream());
    return out;
}

// Gradients of word, token_type, position, weight and bias, all in float32.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad, const Tensor& input_ids, const Tensor& token_type_ids, const Tensor& position_ids,
    const Tensor& word, const Tensor& token_type, const Tensor& position, const Tensor& weight, const Tensor& bias,
    const Optional& seed, const Optional& rows, double dropout_p, double eps, int64_t padding) {
    Call call(input_ids, token_type_ids, position_ids, word, token_type, position, weight, bias, seed, rows, dropout_p,
              eps, grad);
    auto& args = call.args;
    const int64_t columns = args.columns, tokens = args.tokens;
    const auto made = [&](std::vector<int64_t> sizes) {
        return tokens ? new_tensor(word, sizes, ScalarType::Float)
                      : torch::stable::new_zeros(word, sizes, ScalarType::Float);
    };
    Tensor dtables[kTables], dweight = made({columns}), dbias = made({columns});
    TableGradientArgs gradients{};
    for (int table = 0; table < kTables; ++table) {
        gradients.table_rows[table] = args.table_rows[table];
        dtables[table] = made({args.table_rows[table], columns});
        gradients.dtable[table] = static_cast<float*>(dtables[table].mutable_data_ptr());
    }
    if (tokens) {
        Tensor dsum = made({tokens, columns}), partial = made({embedding_layer_norm_parts(args), 2, columns});
        Tensor numbers = new_tensor(word, {kTables * tokens}, args.narrow ? ScalarType::Short : ScalarType::Int);
        args.dsum = static_cast<float*>(dsum.mutable_data_ptr());
        args.partial = static_cast<float*>(partial.mutable_data_ptr());
        args.sums[0] = static_cast<float*>(dweight.mutable_data_ptr());
        args.sums[1] = static_cast<float*>(dbias.mutable_data_ptr());
        args.padding = padding;
        args.numbers = numbers.mutable_data_ptr();
        embedding_layer_norm_backward(args, call.device.stream());

        const auto [sorted, order] = sort(numbers);
        Tensor bounds = new_tensor(word, {args.none + int64_t{1}}, ScalarType::Int);
        Tensor chunks = made({kTables * tokens / kChunk, columns});
        gradients.dsum = args.dsum;
        gradients.numbers = sorted.const_data_ptr();
        gradients.order = static_cast<const int64_t*>(order.const_data_ptr());
        gradients.narrow = args.narrow;
        gradients.none = args.none;
        gradients.bounds = static_cast<int*>(bounds.mutable_data_ptr());
        gradients.chunks = static_cast<float*>(chunks.mutable_data_ptr());
        gradients.tokens = tokens;
        gradients.columns = args.columns;
        embedding_table_gradients(gradients, call.device.stream());
    }
    return {dtables[2], dtables[0], dtables[1], dweight, dbias};
}

}  // namespace

FASTBERT_CUDA_LIBRARY_IMPL(m) {
    m.impl("embedding_layer_norm", TORCH_BOX(&forward));
    m.impl("embedding_layer_norm_backward", TORCH_BOX(&backward));
}
}  // namespace fastbert::cuda
#endif
