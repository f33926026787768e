// What the adapters of CUDA ops share, beside common/adapter.h: device, stream, and small arguments.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../common/adapter.h"
#include "rows.cuh"

// tests/simt/ registers the same ops for CPU tensors, under a name of their own.
#ifdef FASTBERT_SIMT
#define FASTBERT_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(fastbert_cuda_simt, CPU, m)
#else
#define FASTBERT_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(fastbert_cuda, CUDA, m)
#endif

namespace fastbert::cuda {

// Makes the tensor's device current, for allocations and launches, and gives its current stream.
class Device {
public:
    explicit Device(const Tensor& t)
#ifndef FASTBERT_SIMT
        : guard_(t.get_device_index())
#endif
    {
        void* stream = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
        stream_ = static_cast<cudaStream_t>(stream);
    }
    cudaStream_t stream() const { return stream_; }

private:
#ifndef FASTBERT_SIMT
    torch::stable::accelerator::DeviceGuard guard_;
#endif
    cudaStream_t stream_;
};

inline Tensor new_tensor(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
    return torch::stable::new_empty(like, sizes, dtype);
}
inline Tensor new_tensor(const Tensor& like) { return new_tensor(like, sizes_of(like), like.scalar_type()); }

inline Rows rows_of(Tensor& contiguous, int64_t columns) {
    return {contiguous.mutable_data_ptr(), dtype_of(contiguous), columns};
}

// A vector of `size` elements, in its own type; copied only if it is not contiguous.
class ParameterView {
public:
    ParameterView(const std::optional<Tensor>& t, int64_t size) {
        if (!t.has_value()) return;
        STD_TORCH_CHECK(t->numel() == size, "fastbert: a vector of ", size, " elements is needed, not ", t->numel());
        tensor_ = torch::stable::contiguous(*t);
    }
    Parameters get() const {
        return tensor_.has_value() ? Parameters{tensor_->const_data_ptr(), dtype_of(*tensor_)}
                                   : Parameters{nullptr, DType::f32};
    }

private:
    std::optional<Tensor> tensor_;
};

inline DropoutArgs dropout_args(double p, const std::optional<Tensor>& seed) {
    const auto dropout = Dropout::make(p, 0);
    if (!dropout.active()) return {nullptr, 0, 1.0f};
    STD_TORCH_CHECK(seed.has_value() && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
                    "fastbert: dropout needs a seed, an int64 tensor of one element");
    return {static_cast<const int64_t*>(seed->const_data_ptr()), dropout.threshold, static_cast<float>(dropout.scale)};
}

inline int int_columns(int64_t columns) {
    STD_TORCH_CHECK(columns < int64_t{1} << 30, "fastbert: rows of ", columns, " elements; up to 2^30 are supported");
    return static_cast<int>(columns);
}

}  // namespace fastbert::cuda
