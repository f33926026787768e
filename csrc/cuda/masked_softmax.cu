// dropout(softmax(scale * scores + mask)) over the last dimension, and its backward.
//
// Memory-bound: forward reads scores and writes the output once; backward reads scores and the incoming gradient and
// writes one gradient, recomputing the row's softmax: no probabilities and no dropout mask are kept. A row is loaded
// whole, 16 bytes at a time, and held in registers through its maximum, its sum and the result. A bool or additive mask
// is read through its strides, so that a broadcast one costs nothing; with `lengths` nothing past the length is read.
#include <algorithm>

#include "rows.cuh"

namespace fastbert::cuda {

enum class MaskKind : int { none, boolean, additive };

struct MaskedSoftmaxArgs {
    // Rows are [batch, heads, queries] in this order; out is the incoming gradient in backward.
    Rows scores, out, dscores;
    int64_t rows, heads, queries;
    int keys;
    // Element (b, h, q, k) at mask + sum of index * stride; bool bytes, or float.
    const void* mask;
    MaskKind mask_kind;
    int64_t mask_stride[4];
    // Keys at or past lengths[b * stride[0] + q * stride[1]] are off; null: none.
    const int32_t* lengths;
    int64_t lengths_stride[2];
    float scale;
    DropoutArgs dropout;
};
void masked_softmax_forward(const MaskedSoftmaxArgs& args, cudaStream_t stream);
void masked_softmax_backward(const MaskedSoftmaxArgs& args, cudaStream_t stream);

#ifdef FASTBERT_CUDA_KERNELS
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// One thread's part of one row.
template <class T, int kThreads, int kChunks>
struct Row {
    static constexpr int V = kVector<T>;
    static constexpr int kHeld = kChunks ? kChunks : 1;
    static constexpr bool kLoop = kChunks == 0;

    const MaskedSoftmaxArgs& a;
    int64_t row;
    int64_t mask_offset;
    int keys;  // how many, from the first on, may be on
    RowKeys dropout_keys{};
    float s[kHeld][V];  // scaled, masked scores, -inf where off; then exp(s - max)

    __device__ __forceinline__ Row(const MaskedSoftmaxArgs& args, int64_t i) : a(args), row(i) {
        int64_t query, plane;        // plane: batch * heads + head
        if (a.rows <= 0xffffffff) {  // 64-bit division is slow
            plane = static_cast<uint32_t>(row) / static_cast<uint32_t>(a.queries);
            query = static_cast<uint32_t>(row) % static_cast<uint32_t>(a.queries);
        } else {
            plane = row / a.queries;
            query = row % a.queries;
        }
        const int64_t batch = plane / a.heads, head = plane % a.heads;
        mask_offset = batch * a.mask_stride[0] + head * a.mask_stride[1] + query * a.mask_stride[2];
        keys = a.keys;
        if (a.lengths)
            keys = ::min(::max(a.lengths[batch * a.lengths_stride[0] + query * a.lengths_stride[1]], 0), a.keys);
        if (a.dropout.threshold)
            dropout_keys = row_keys(*a.dropout.seed, static_cast<uint32_t>(plane), static_cast<uint32_t>(query));
    }

    template <class F>
    __device__ __forceinline__ void for_each(int end, F f) const {
        for_chunks<kThreads, kChunks, V>(Group<kThreads>::thread(), end, f);
    }

    // on(k): whether column + k is below the length.
    __device__ __forceinline__ bool on(int column, int k) const { return V == 1 || column + k < keys; }

    __device__ __forceinline__ void scaled(const Packed<T, V>& scores, float (&v)[V]) const {
        scores.floats(v);
#pragma unroll
        for (int k = 0; k < V; ++k) v[k] *= a.scale;
    }
    __device__ __forceinline__ void plain(const Packed<T, V>& scores, int chunk, int column) {
        scaled(scores, s[chunk]);
#pragma unroll
        for (int k = 0; k < V; ++k) s[chunk][k] = on(column, k) ? s[chunk][k] : -INFINITY;
    }
    __device__ __forceinline__ void boolean(const Packed<T, V>& scores, int chunk, int column) {
        const auto* mask = static_cast<const uint8_t*>(a.mask) + mask_offset;
        uint32_t bytes[(V + 3) / 4];
        if (V > 1 && a.mask_stride[3] == 1) {
            if constexpr (V > 1) load_words<V>(mask + column, bytes);
        } else {
            const uint32_t byte = mask[column * a.mask_stride[3]];
#pragma unroll
            for (int k = 0; k < V; k += 4) bytes[k / 4] = byte ? 0xffffffffu : 0;
        }
        scaled(scores, s[chunk]);
#pragma unroll
        for (int k = 0; k < V; ++k)
            s[chunk][k] = bytes[k / 4] >> k % 4 * 8 & 0xff && on(column, k) ? s[chunk][k] : -INFINITY;
    }
    __device__ __forceinline__ void additive(const Packed<T, V>& scores, int chunk, int column) {
        const float* mask = static_cast<const float*>(a.mask) + mask_offset;
        float added[V];
        if (V > 1 && a.mask_stride[3] == 1) {
            if constexpr (V > 1) {
                Packed<float, V> packed;
                packed.load(mask, DType::f32, column);
                packed.floats(added);
            }
        } else {
            const float one = mask[column * a.mask_stride[3]];
#pragma unroll
            for (int k = 0; k < V; ++k) added[k] = one;
        }
        scaled(scores, s[chunk]);
        // What is off is off whatever the score: a NaN as well.
#pragma unroll
        for (int k = 0; k < V; ++k)
            s[chunk][k] = added[k] == -INFINITY || !on(column, k) ? -INFINITY : s[chunk][k] + added[k];
    }

    // The scaled, masked scores. All loads first; the mask's kind is settled outside the loop, for the same reason.
    __device__ __forceinline__ void load() {
        if constexpr (!kLoop) {
            Packed<T, V> scores[kHeld];
            for_each(keys, [&](int chunk, int column) {
                scores[chunk].load(row_of<T>(a.scores, row), a.scores.dtype, column);
            });
            if (a.mask_kind == MaskKind::none)
                for_each(keys, [&](int chunk, int column) { plain(scores[chunk], chunk, column); });
            else if (a.mask_kind == MaskKind::boolean)
                for_each(keys, [&](int chunk, int column) { boolean(scores[chunk], chunk, column); });
            else
                for_each(keys, [&](int chunk, int column) { additive(scores[chunk], chunk, column); });
        }
    }
    // Where the row is not held: the same, chunk by chunk, at each pass.
    __device__ __forceinline__ void again(int column) {
        if constexpr (kLoop) {
            Packed<T, V> scores;
            scores.load(row_of<T>(a.scores, row), a.scores.dtype, column);
            if (a.mask_kind == MaskKind::none)
                plain(scores, 0, column);
            else if (a.mask_kind == MaskKind::boolean)
                boolean(scores, 0, column);
            else
                additive(scores, 0, column);
        }
    }

    struct Softmax {
        float most, inverse;
    };
    // exp(s - most) into s (where it is held), and 1 / their sum; 0 for a row with no key on. A NaN that is on shows:
    // the maximum passes over it, the sum does not.
    __device__ __forceinline__ Softmax softmax(Group<kThreads>& group) {
        float most = -INFINITY;
        for_each(keys, [&](int chunk, int column) {
            again(column);
#pragma unroll
            for (int k = 0; k < V; ++k) most = fmaxf(most, s[chunk][k]);
        });
        most = group.max(most);
        if (most == -INFINITY) most = 0;
        float total = 0;
        for_each(keys, [&](int chunk, int column) {
            again(column);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                const float e = exponential(s[chunk][k], most);
                if constexpr (!kLoop) s[chunk][k] = e;
                total += e;
            }
        });
        total = group.sum(total);
        return {most, total == 0 ? 0.0f : 1.0f / total};
    }
    static __device__ __forceinline__ float exponential(float score, float most) {
        return exp2f((score - most) * kLog2E);
    }
    // exp(s - most) of a chunk, held or not.
    __device__ __forceinline__ void exponentials(const Softmax& softmax, int chunk, int column, float (&e)[V]) {
        again(column);
#pragma unroll
        for (int k = 0; k < V; ++k) e[k] = kLoop ? exponential(s[chunk][k], softmax.most) : s[chunk][k];
    }

    __device__ __forceinline__ void drop(int column, float (&v)[V]) const {
        if (!a.dropout.threshold) return;
        const uint32_t kept = kept_bits<V>(dropout_keys, a.dropout.threshold, column);
#pragma unroll
        for (int k = 0; k < V; ++k) v[k] *= kept >> k & 1 ? a.dropout.scale : 0.0f;
    }
    // Zeros where nothing was computed.
    __device__ __forceinline__ void finish(const Rows& rows) const {
        constexpr float kZeros[V] = {};
        for_each(a.keys, [&](int, int column) {
            if (column >= keys) Packed<T, V>::store(row_of<T>(rows, row), rows.dtype, column, kZeros);
        });
    }
};

template <class T, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock,
                                  resident_blocks(Group<kThreads>::kBlock, kChunks* kVector<T>))
    forward_kernel(MaskedSoftmaxArgs a) {
    constexpr int V = kVector<T>;
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    for (int64_t i = group.first_row(); i < a.rows; i += group.row_step()) {
        Row<T, kThreads, kChunks> row(a, i);
        row.load();
        const auto softmax = row.softmax(group);
        row.for_each(row.keys, [&](int chunk, int column) {
            float p[V];
            row.exponentials(softmax, chunk, column, p);
            // Zero stays zero beside a NaN: what is off is zero.
#pragma unroll
            for (int k = 0; k < V; ++k) p[k] = p[k] == 0 ? 0.0f : p[k] * softmax.inverse;
            row.drop(column, p);
            Packed<T, V>::store(row_of<T>(a.out, i), a.out.dtype, column, p);
        });
        row.finish(a.out);
    }
}

// ds = scale * p * (d - sum(p * d)), d the gradient of the probabilities
template <class T, int kThreads, int kChunks>
__global__ void __launch_bounds__(Group<kThreads>::kBlock,
                                  resident_blocks(Group<kThreads>::kBlock, kChunks* kVector<T>))
    backward_kernel(MaskedSoftmaxArgs a) {
    constexpr int V = kVector<T>;
    FASTBERT_SHARED(buffer, float2[2 * Group<kThreads>::kWarps]);
    Group<kThreads> group{buffer};
    for (int64_t i = group.first_row(); i < a.rows; i += group.row_step()) {
        Row<T, kThreads, kChunks> row(a, i);
        Packed<T, V> grad[row.kHeld];
        auto load_grad = [&](int chunk, int column) { grad[chunk].load(row_of<T>(a.out, i), a.out.dtype, column); };
        if constexpr (!row.kLoop) row.for_each(row.keys, load_grad);
        row.load();
        const auto softmax = row.softmax(group);
        // p and d of a chunk. Where p is zero, off or not, whatever the gradient holds counts for nothing.
        auto gradient = [&](int chunk, int column, float (&p)[V], float (&d)[V]) {
            if constexpr (row.kLoop) load_grad(chunk, column);
            row.exponentials(softmax, chunk, column, p);
            grad[chunk].floats(d);
            row.drop(column, d);
#pragma unroll
            for (int k = 0; k < V; ++k) {
                d[k] = p[k] == 0 ? 0.0f : d[k];
                p[k] = p[k] == 0 ? 0.0f : p[k] * softmax.inverse;
            }
        };
        float dot = 0;
        row.for_each(row.keys, [&](int chunk, int column) {
            float p[V], d[V];
            gradient(chunk, column, p, d);
#pragma unroll
            for (int k = 0; k < V; ++k) dot += p[k] * d[k];
        });
        dot = group.sum(dot);
        row.for_each(row.keys, [&](int chunk, int column) {
            float p[V], d[V];
            gradient(chunk, column, p, d);
#pragma unroll
            for (int k = 0; k < V; ++k) d[k] = p[k] == 0 ? 0.0f : p[k] * (d[k] - dot) * a.scale;
            Packed<T, V>::store(row_of<T>(a.dscores, i), a.dscores.dtype, column, d);
        });
        row.finish(a.dscores);
    }
}

struct Kernel {
    void (*forward)(MaskedSoftmaxArgs);
    void (*backward)(MaskedSoftmaxArgs);
    int threads, rows;  // of a block
};
template <class T, int kThreads, int kChunks>
Kernel kernel() {
    return {forward_kernel<T, kThreads, kChunks>, backward_kernel<T, kThreads, kChunks>, Group<kThreads>::kBlock,
            Group<kThreads>::kRows};
}

// By the elements a thread holds: 8, 16 or 32 in a warp, or in a block.
template <class T>
Kernel held(int keys) {
    constexpr int C = 8 / kVector<T>;  // chunks in 8 elements
    if (keys <= 256) return kernel<T, kWarp, C>();
    if (keys <= 512) return kernel<T, kWarp, 2 * C>();
    if (keys <= 1024) return kernel<T, kWarp, 4 * C>();
    if (keys <= 2048) return kernel<T, kBlockRow, C>();
    if (keys <= 4096) return kernel<T, kBlockRow, 2 * C>();
    return kernel<T, kBlockRow, 4 * C>();
}

// A mask that V elements at a time can be read from: contiguous and aligned, or one value a row.
bool vector_mask(const MaskedSoftmaxArgs& a, int vector) {
    if (a.mask_kind == MaskKind::none || a.mask_stride[3] == 0) return true;
    if (a.mask_stride[3] != 1) return false;
    const int bytes = a.mask_kind == MaskKind::boolean ? vector : 16;  // of one access
    const int size = a.mask_kind == MaskKind::boolean ? 1 : 4;
    return reinterpret_cast<uintptr_t>(a.mask) % bytes == 0 &&
           std::all_of(a.mask_stride, a.mask_stride + 3, [&](int64_t stride) { return stride * size % bytes == 0; });
}

Kernel choose(const MaskedSoftmaxArgs& a) {
    const int vector = static_cast<int>(16 / size_of(a.scores.dtype));
    if (a.keys <= 8192 && a.keys % vector == 0 && a.out.dtype == a.scores.dtype && aligned(a.scores) &&
        aligned(a.out) && aligned(a.dscores) && vector_mask(a, vector)) {
        if (a.scores.dtype == DType::f32) return held<float>(a.keys);
        if (a.scores.dtype == DType::f16) return held<__half>(a.keys);
        return held<__nv_bfloat16>(a.keys);
    }
    return a.keys <= 1024 ? kernel<Any, kWarp, 0>() : kernel<Any, kBlockRow, 0>();
}

unsigned blocks(const MaskedSoftmaxArgs& a, const Kernel& kernel) {
    return static_cast<unsigned>(std::min(ceil_div(a.rows, kernel.rows), int64_t{0x7fffffff}));
}

}  // namespace

void masked_softmax_forward(const MaskedSoftmaxArgs& a, cudaStream_t stream) {
    const Kernel kernel = choose(a);
    launch("masked_softmax", kernel.forward, dim3(blocks(a, kernel)), kernel.threads, 0, stream, a);
}
void masked_softmax_backward(const MaskedSoftmaxArgs& a, cudaStream_t stream) {
    const Kernel kernel = choose(a);
    launch("masked_softmax_backward", kernel.backward, dim3(blocks(a, kernel)), kernel.threads, 0, stream, a);
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
    RowView scores, out;
    MaskedSoftmaxArgs args{};

    // scores [B, H, Sq, Sk]; mask: bool or float32, expanded to the same; lengths: int32 [B] or [B, Sq].
    Call(const Tensor& scores_, const Optional& mask, const Optional& lengths, double scale, double dropout_p,
         const Optional& seed, const Tensor& out_)
        : device(scores_), scores(scores_), out(out_) {
        STD_TORCH_CHECK(scores_.dim() == 4 && out_.dim() == 4 && out_.numel() == scores_.numel(),
                        "fastbert: scores must be [batch, heads, queries, keys], the gradient likewise");
        args.scores = scores.rows;
        args.out = out.rows;
        args.rows = scores.count;
        args.heads = scores_.size(1);
        args.queries = scores_.size(2);
        args.keys = int_columns(scores_.size(3));
        if (mask.has_value()) {
            const bool boolean = mask->scalar_type() == ScalarType::Bool;
            STD_TORCH_CHECK(boolean || mask->scalar_type() == ScalarType::Float,
                            "fastbert: mask must be bool or float32");
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
        args.scale = static_cast<float>(scale);
        args.dropout = dropout_args(dropout_p, seed);
    }
};

Tensor forward(const Tensor& scores, const Optional& mask, const Optional& lengths, double scale, double dropout_p,
               const Optional& seed) {
    Tensor out = new_tensor(scores);
    const Call call(scores, mask, lengths, scale, dropout_p, seed, out);
    if (call.args.rows) masked_softmax_forward(call.args, call.device.stream());
    return out;
}

Tensor backward(const Tensor& grad, const Tensor& scores, const Optional& mask, const Optional& lengths, double scale,
                double dropout_p, const Optional& seed) {
    Call call(scores, mask, lengths, scale, dropout_p, seed, grad);
    Tensor dscores = new_tensor(scores);
    call.args.dscores = rows_of(dscores, call.args.keys);
    if (call.args.rows) masked_softmax_backward(call.args, call.device.stream());
    return dscores;
}

}  // namespace

FASTBERT_CUDA_LIBRARY_IMPL(m) {
    m.impl("masked_softmax", TORCH_BOX(&forward));
    m.impl("masked_softmax_backward", TORCH_BOX(&backward));
}
}  // namespace fastbert::cuda
#endif
