// Element types a kernel meets, as plain C++: no torch header reaches a kernel's body.
#pragma once
#include <cstdint>

namespace fastbert {

enum class DType : int { f32, f64, bf16, f16 };

struct BF16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

inline int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// A matrix with contiguous columns; rows `stride` elements apart.
struct Rows {
    void* data;
    DType dtype;
    int64_t stride;

    char* row(int64_t i) const { return static_cast<char*>(data) + i * stride * size_of(dtype); }
};

}  // namespace fastbert
