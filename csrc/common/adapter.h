// What adapters share: from torch's stable tensors to the plain pointers, sizes and strides of a kernel.
// Shapes and dtypes were checked in Python, where the argument's name is known; the checks here only keep a
// direct call of a registered op from reaching memory it should not.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../cpu/dtype.h"
#include "dropout.h"

namespace fastbert {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t) {
    switch (t.scalar_type()) {
        case ScalarType::Float:
            return DType::f32;
        case ScalarType::Double:
            return DType::f64;
        case ScalarType::BFloat16:
            return DType::bf16;
        case ScalarType::Half:
            return DType::f16;
        default:
            STD_TORCH_CHECK(false, "fastbert: a float32, float64, bfloat16 or float16 tensor is needed");
    }
    return DType::f32;
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
    std::vector<int64_t> sizes(t.dim());
    for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = t.size(i);
    return sizes;
}

// Zeros, written by all threads.
inline void zero(Tensor& t) {
    auto* data = static_cast<char*>(t.mutable_data_ptr());
    const int64_t size = t.numel() * size_of(dtype_of(t));
    torch::stable::parallel_for(0, size, 1 << 18,
                                [&](int64_t begin, int64_t end) { std::memset(data + begin, 0, end - begin); });
}

// torch's type promotion among the four floating types.
inline ScalarType promote(ScalarType a, ScalarType b) {
    if (a == b) return a;
    return a == ScalarType::Double || b == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A new contiguous tensor. Fresh memory costs a page fault per page when a kernel first writes it, several times
// what the writing itself costs; large tensors ask for huge pages, 512 times fewer faults.
inline Tensor new_output(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
    Tensor t = torch::stable::new_empty(like, sizes, dtype);
#if defined(__linux__)
    constexpr uintptr_t kHugePage = 2 << 20;
    const auto begin = (reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + 4095) & ~uintptr_t{4095};
    const auto end = reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + t.numel() * size_of(dtype_of(t));
    if (end > begin + 2 * kHugePage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    return t;
}
inline Tensor new_output(const Tensor& like) { return new_output(like, sizes_of(like), like.scalar_type()); }

// A tensor [..., columns] as rows of one stride, copied only where no single stride describes it.
struct RowView {
    Tensor tensor;  // keeps a copy alive
    Rows rows;
    int64_t count, columns;

    explicit RowView(const Tensor& t) : tensor(t) {
        const int64_t dims = t.dim();
        STD_TORCH_CHECK(dims >= 1, "fastbert: a tensor of at least one dimension is needed");
        columns = t.size(dims - 1);
        count = columns ? t.numel() / columns : 0;
        int64_t stride = columns;
        bool regular = columns <= 1 || t.stride(dims - 1) == 1;
        // Innermost row dimension sets the stride; each outer one must continue it.
        int64_t expected = -1;
        for (int64_t d = dims - 2; d >= 0 && regular; --d) {
            if (t.size(d) == 1) continue;
            if (expected < 0)
                stride = expected = t.stride(d);
            else
                regular = t.stride(d) == expected;
            expected *= t.size(d);
        }
        if (!regular) {
            tensor = torch::stable::contiguous(t);
            stride = columns;
        }
        rows = {tensor.mutable_data_ptr(), dtype_of(tensor), stride};
    }
};

// Rows per task: enough work to pay for a thread (about 32 KiB of it), shared evenly.
inline int64_t grain(int64_t columns) { return columns ? 1 + 8192 / columns : 1; }

inline Dropout dropout_of(double p, const std::optional<Tensor>& seed) {
    const auto threshold = Dropout::make(p, 0);
    if (!threshold.active()) return threshold;
    STD_TORCH_CHECK(seed.has_value() && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
                    "fastbert: dropout needs a seed, an int64 tensor of one element");
    return Dropout::make(p, static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr())));
}

// A small vector (bias, LayerNorm parameters) in the type a kernel accumulates in: float, or double for float64.
class Accumulated {
public:
    Accumulated(const std::optional<Tensor>& t, DType dtype, int64_t size) {
        if (!t.has_value()) return;
        STD_TORCH_CHECK(t->numel() == size, "fastbert: a vector of ", size, " elements is needed, not ", t->numel());
        const auto wanted = dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
        tensor_ = torch::stable::contiguous(t->scalar_type() == wanted ? *t : torch::stable::to(*t, wanted));
    }
    const void* data() const { return tensor_.has_value() ? tensor_->const_data_ptr() : nullptr; }

private:
    std::optional<Tensor> tensor_;
};

// Column sums over many rows (weight gradients), deterministic and in the accumulation type: rows are cut into
// chunks by their number alone, each chunk sums into its own rows of `partial`, and the chunks are added in order.
class PartialSums {
public:
    PartialSums(const Tensor& like, bool wide, int64_t vectors, int64_t rows, int64_t columns)
        : vectors_(vectors), rows_(rows), columns_(columns), wide_(wide) {
        chunks_ = rows < 32 * kChunks ? (rows + 31) / 32 : kChunks;
        const auto dtype = wide_ ? ScalarType::Double : ScalarType::Float;
        partial_ = torch::stable::new_zeros(like, {chunks_, vectors, columns}, dtype);
    }

    // f(begin, end, sums): sums points to `vectors` x `columns` zeros of this chunk, or is null.
    template <class F>
    void for_each_chunk(const F& f) {
        char* base = static_cast<char*>(partial_.mutable_data_ptr());
        const int64_t bytes = vectors_ * columns_ * (wide_ ? 8 : 4);
        torch::stable::parallel_for(0, chunks_, 1, [&](int64_t begin, int64_t end) {
            for (int64_t c = begin; c < end; ++c)
                f(rows_ * c / chunks_, rows_ * (c + 1) / chunks_, bytes ? base + c * bytes : nullptr);
        });
    }

    // The sum `vector` [columns], or an empty tensor where nothing was summed.
    Tensor total(int64_t vector) const {
        Tensor out = torch::stable::new_empty(partial_, {vectors_ ? columns_ : 0}, partial_.scalar_type());
        if (!vectors_) return out;
        if (wide_)
            add_chunks<double>(out, vector);
        else
            add_chunks<float>(out, vector);
        return out;
    }

private:
    static constexpr int64_t kChunks = 64;

    template <class C>
    void add_chunks(Tensor& out, int64_t vector) const {
        const C* partial = static_cast<const C*>(partial_.const_data_ptr());
        C* total = static_cast<C*>(out.mutable_data_ptr());
        for (int64_t i = 0; i < columns_; ++i) total[i] = 0;
        for (int64_t c = 0; c < chunks_; ++c)
            for (int64_t i = 0; i < columns_; ++i) total[i] += partial[(c * vectors_ + vector) * columns_ + i];
    }

    int64_t vectors_, rows_, columns_, chunks_;
    bool wide_;
    Tensor partial_;
};

// The index of each row in the padded batch, or null where each has its own number.
inline const int64_t* row_numbers(const std::optional<Tensor>& rows, int64_t count) {
    if (!rows.has_value()) return nullptr;
    STD_TORCH_CHECK(rows->numel() == count && rows->scalar_type() == ScalarType::Long && rows->is_contiguous(),
                    "fastbert: rows must be a contiguous int64 tensor with one number a row");
    return static_cast<const int64_t*>(rows->const_data_ptr());
}

}  // namespace fastbert
