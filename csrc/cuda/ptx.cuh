// Tensor-core and asynchronous-copy instructions as functions. Under nvcc they are inline PTX; tests/simt/simt.h
// defines the same functions for the host, fragment layouts included (PTX ISA, "Matrix Fragments for mma.m16n8k16" and
// "ldmatrix"), so that what is written with them runs, and is checked, without a GPU.
//
// With lane = 4 * g + t (g = lane / 4 in 0..7, t = lane % 4 in 0..3):
//   A 16 x 16, 4 registers of two 16-bit elements: a[0] row g, columns 2t, 2t+1;  a[1] row g+8, columns 2t, 2t+1;
//                                                  a[2] row g, columns 2t+8, +9;  a[3] row g+8, columns 2t+8, +9
//   B 16 x 8, 2 registers: b0 rows (k) 2t, 2t+1, column (n) g;  b1 rows 2t+8, 2t+9, column g
//   C 16 x 8 float: c[0], c[1] row g, columns 2t, 2t+1;  c[2], c[3] row g+8, columns 2t, 2t+1
//   ldmatrix: lanes 8j .. 8j+7 give the addresses of the 8 rows (16 bytes each) of matrix j; fragment[j] holds row g,
//             columns 2t, 2t+1 of it; transposed: rows 2t, 2t+1 of column g.
//             A from row-major shared memory: x4, matrices (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
//             B from shared [n][k]: plain; from shared [k][n]: transposed.
#pragma once
#include "launch.cuh"

#if defined(__CUDACC__)
namespace fastbert::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Start copying kBytes (4, 8 or 16; both ends aligned to them) from global to shared memory, or zeros if !valid
// (`global` must still be a pointer into the tensor). The data is there for this thread after cp_async_wait, for
// others after a barrier behind it.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool valid = true) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if __CUDA_ARCH__ >= 800
    const int bytes = valid ? kBytes : 0;
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                     "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(global),
                     "n"(kBytes), "r"(bytes)
                     : "memory");
#else
    using Word = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t> >;
    Word word{};
    if (valid) word = *static_cast<const Word*>(global);
    *static_cast<Word*>(shared) = word;
#endif
}

__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most kPending of this thread's committed groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// kMatrices (1, 2 or 4) 8 x 8 matrices of 16-bit elements; `row`: this lane's row in shared memory, aligned to 16
// bytes.
template <int kMatrices, bool kTransposed = false>
__device__ __forceinline__ void ldmatrix(uint32_t (&fragment)[kMatrices], const void* row) {
    static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4);
    const uint32_t address = shared_address(row);
    if constexpr (kMatrices == 4 && !kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address)
                     : "memory");
    else if constexpr (kMatrices == 4)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address)
                     : "memory");
    else if constexpr (kMatrices == 2 && !kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(fragment[0]), "=r"(fragment[1])
                     : "r"(address)
                     : "memory");
    else if constexpr (kMatrices == 2)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(fragment[0]), "=r"(fragment[1])
                     : "r"(address)
                     : "memory");
    else if constexpr (!kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                     : "=r"(fragment[0])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                     : "=r"(fragment[0])
                     : "r"(address)
                     : "memory");
}

// c += a b, 16 x 8 x 16, T = __half or __nv_bfloat16, float32 sums. Before sm_80: float16 only, as two products of
// depth 8 (columns 2t, 2t+1 of k 0-7 are a[0], a[1], b0; those of k 8-15 are a[2], a[3], b1).
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, __half>)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    if constexpr (std::is_same_v<T, __half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2]), "r"(a[3]), "r"(b1));
    } else {
        __trap();  // bfloat16 products need sm_80; the op's why_not says so before a launch
    }
#endif
}

// 2^x to 2 units in the last place; 0 where that is subnormal.
__device__ __forceinline__ float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x, of which the compiler knows nothing: what follows from it is computed where it is used, not kept in registers.
__device__ __forceinline__ unsigned opaque(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

}  // namespace fastbert::cuda::ptx
#endif
