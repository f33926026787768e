// Runs CUDA C++ kernels on the CPU, to find what a GPU would punish. A test tool; x86-64 only.
//
// How to use it. Write a kernel as usual, with FASTBERT_SHARED and launch() of csrc/cuda/launch.cuh and the wrappers of
// csrc/cuda/ptx.cuh; compile the same file with
//     g++ -x c++ -std=c++17 -DFASTBERT_SIMT -include tests/simt/simt.h -isystem $CUDA/include file.cu
//     tests/simt/simt.cpp
// (tests/simt/build.py does, with the sanitizers) and call the host launcher: it has run the kernel when it returns.
//
// Each thread of a block is a fibre that runs until it meets others (__syncthreads, __syncwarp, a shuffle, a vote, mma,
// ldmatrix); which fibre goes on, and the order of blocks, is drawn from FASTBERT_SIMT_SEED. Two runs in one process
// take different orders: results that differ show a race. Shared memory has its exact size, on the heap, and is filled
// with 0xFF (NaN in every floating type) before a block starts: AddressSanitizer sees an access out of bounds, a result
// of NaN shows a read before the write. A copy by cp_async arrives at the wait, and poisons its target until then.
// Threads that can never meet (a divergent barrier), a shuffle from a lane that is not taking part, a misaligned or
// misplaced ldmatrix or cp_async, and a launch over the device's limits raise std::runtime_error at the launch. The
// device's limits are those of FASTBERT_SIMT_ARCH (75, 80, 86, 89, 90, 100 or 120; default 80).
#pragma once
#ifndef __x86_64__
#error "tests/simt switches stacks in x86-64 assembly"
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#undef __shared__
#define __shared__ static_assert(false, "use FASTBERT_SHARED of csrc/cuda/launch.cuh");
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__  // it would cost minutes of compiling, and gain nothing here
#define __forceinline__ inline

namespace simt {

// Where a thread waits, and with what. Threads meet if all but `request` agree.
struct Meeting {
    const char* what;
    const char* file;
    int line;
    unsigned mask;  // lanes of the warp; 0: the whole block
    void* request;
};
// Waits for the others; the last to come runs act(requests by lane, null where none) for all of them.
using Act = void (*)(void* const* requests);
void meet(Meeting meeting, Act act);

void launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& kernel);
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

void* shared(const void* site, size_t bytes);
unsigned char* dynamic_shared();
bool is_shared(const void* p, size_t bytes);
unsigned lane();
// A key for this place in the code, one for each instantiation of a template.
#define SIMT_SITE          \
    ([]() -> const void* { \
        static char site;  \
        return &site;      \
    }())

void cp_async(void* target, const void* source, int bytes, bool valid);
void cp_async_commit();
void cp_async_wait(int pending);

}  // namespace simt

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

#define SIMT_WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(SIMT_WHERE) { simt::meet({"__syncthreads", file, line, 0, nullptr}, nullptr); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_WHERE) {
    simt::meet({"__syncwarp", file, line, mask, nullptr}, nullptr);
}

namespace simt {

template <class T>
struct Shuffle {
    T value;
    int source;
    T result;
};
template <class T>
T shuffle(const char* what, unsigned mask, T value, int source, const char* file, int line) {
    Shuffle<T> request{value, source, value};
    meet({what, file, line, mask, &request}, [](void* const* requests) {
        for (int i = 0; i < warpSize; ++i)
            if (auto* mine = static_cast<Shuffle<T>*>(requests[i])) {
                auto* theirs = static_cast<Shuffle<T>*>(requests[mine->source]);
                if (!theirs) fault("lane %d shuffles from lane %d, which takes no part", i, mine->source);
                mine->result = theirs->value;
            }
    });
    return request.result;
}

struct Vote {
    bool value;
    unsigned ballot;
};
inline unsigned vote(const char* what, unsigned mask, bool value, const char* file, int line) {
    Vote request{value, 0};
    meet({what, file, line, mask, &request}, [](void* const* requests) {
        unsigned ballot = 0;
        for (int i = 0; i < warpSize; ++i)
            if (requests[i]) ballot |= unsigned{static_cast<Vote*>(requests[i])->value} << i;
        for (int i = 0; i < warpSize; ++i)
            if (requests[i]) static_cast<Vote*>(requests[i])->ballot = ballot;
    });
    return request.ballot;
}

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, SIMT_WHERE) {
    const int first = simt::lane() & ~(width - 1);
    return simt::shuffle("__shfl_sync", mask, value, first + (source & (width - 1)), file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, SIMT_WHERE) {
    const int lane = simt::lane(), other = lane ^ bits;
    return simt::shuffle("__shfl_xor_sync", mask, value, other / width > lane / width ? lane : other, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = warpSize, SIMT_WHERE) {
    const int lane = simt::lane();
    return simt::shuffle("__shfl_up_sync", mask, value, lane % width >= delta ? lane - delta : lane, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = warpSize, SIMT_WHERE) {
    const int lane = simt::lane();
    return simt::shuffle("__shfl_down_sync", mask, value, lane % width + delta < width ? lane + delta : lane, file,
                         line);
}
inline unsigned __ballot_sync(unsigned mask, bool value, SIMT_WHERE) {
    return simt::vote("__ballot_sync", mask, value, file, line);
}
inline bool __any_sync(unsigned mask, bool value, SIMT_WHERE) {
    return simt::vote("__any_sync", mask, value, file, line) != 0;
}
inline bool __all_sync(unsigned mask, bool value, SIMT_WHERE) {
    return simt::vote("__all_sync", mask, !value, file, line) == 0;
}

template <class T>
T __ldg(const T* p) {
    return *p;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
using std::max;
using std::min;

// csrc/cuda/ptx.cuh for the host; see there for the layouts.
namespace fastbert::cuda::ptx {

template <int kBytes>
void cp_async(void* shared, const void* global, bool valid = true) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
    simt::cp_async(shared, global, kBytes, valid);
}
inline void cp_async_commit() { simt::cp_async_commit(); }
template <int kPending>
void cp_async_wait() {
    simt::cp_async_wait(kPending);
}

template <int kMatrices, bool kTransposed = false>
void ldmatrix(uint32_t (&fragment)[kMatrices], const void* row, SIMT_WHERE) {
    static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4);
    struct Request {
        const void* row;
        uint32_t* fragment;
    } request{row, fragment};
    simt::meet({"ldmatrix", file, line, 0xffffffffu, &request}, [](void* const* requests) {
        auto row_of = [&](int matrix, int r) {
            const void* row = static_cast<Request*>(requests[8 * matrix + r])->row;
            if (reinterpret_cast<uintptr_t>(row) % 16 || !simt::is_shared(row, 16))
                simt::fault("ldmatrix: lane %d's row is not 16 aligned bytes of shared memory", 8 * matrix + r);
            return static_cast<const uint16_t*>(row);
        };
        for (int lane = 0; lane < warpSize; ++lane)
            for (int j = 0; j < kMatrices; ++j) {
                const int g = lane / 4, t = lane % 4;
                const uint32_t low = kTransposed ? row_of(j, 2 * t)[g] : row_of(j, g)[2 * t];
                const uint32_t high = kTransposed ? row_of(j, 2 * t + 1)[g] : row_of(j, g)[2 * t + 1];
                static_cast<Request*>(requests[lane])->fragment[j] = low | high << 16;
            }
    });
}

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMT_WHERE) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
    struct Request {
        float* c;
        const uint32_t* a;
        uint32_t b[2];
    } request{c, a, {b0, b1}};
    simt::meet({"mma", file, line, 0xffffffffu, &request}, [](void* const* requests) {
        auto half_of = [](uint32_t word, int high) {
            T value;
            const auto bits = static_cast<uint16_t>(word >> 16 * high);
            std::memcpy(static_cast<void*>(&value), &bits, 2);
            return static_cast<float>(value);
        };
        float a[16][16], b[16][8];
        for (int lane = 0; lane < warpSize; ++lane) {
            const auto* request = static_cast<Request*>(requests[lane]);
            const int g = lane / 4, t = lane % 4;
            for (int high = 0; high < 2; ++high) {
                for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + high] = half_of(request->a[i], high);
                for (int i = 0; i < 2; ++i) b[2 * t + i * 8 + high][g] = half_of(request->b[i], high);
            }
        }
        for (int lane = 0; lane < warpSize; ++lane)
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float& sum = static_cast<Request*>(requests[lane])->c[i];
                for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            }
    });
}

inline float exp2(float x) { return std::exp2(x); }
inline unsigned opaque(unsigned x) { return x; }

}  // namespace fastbert::cuda::ptx
