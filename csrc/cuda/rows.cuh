// What the memory-bound kernels share. A row is held by a group of threads: by one warp up to 1,024 columns, by a block
// up to 8,192, with everything read once and kept in registers; longer rows, odd sizes, unaligned pointers and rare
// mixes of types take a general kernel, the same code with `Any` elements and a loop over the row (kChunks = 0).
//
// Thread i of a group owns the columns V * i to V * i + V - 1 of each chunk of V * kThreads columns.
#pragma once
#include <type_traits>

#include "../common/dropout.h"
#include "../cpu/dtype.h"
#include "launch.cuh"

namespace fastbert::cuda {

// Dropout as a kernel needs it: the seed stays on the device.
struct DropoutArgs {
    const int64_t* seed;
    uint32_t threshold;  // 0: nothing is dropped
    float scale;
};

// A vector of parameters, [columns]; data may be null.
struct Parameters {
    const void* data;
    DType dtype;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that can be read 16 bytes at a time: each starts at a multiple of 16 bytes.
inline bool aligned(const Rows& rows) {
    return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride * size_of(rows.dtype) % 16 == 0;
}
inline bool aligned(const Parameters& p) { return reinterpret_cast<uintptr_t>(p.data) % 16 == 0; }

#ifdef FASTBERT_CUDA_KERNELS

struct Any {};  // an element type known at run time

template <class T>
constexpr DType kDType = std::is_same_v<T, float>    ? DType::f32
                         : std::is_same_v<T, __half> ? DType::f16
                                                     : DType::bf16;

// Elements in 16 bytes; 1 where the type is not known.
template <class T>
constexpr int kVector = 16 / sizeof(T);
template <>
inline constexpr int kVector<Any> = 1;

// Two 16-bit elements in a word.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(*reinterpret_cast<const __half2*>(&word));
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
}

// kBytes (a multiple of 4) as the widest accesses there are.
template <int kBytes>
__device__ __forceinline__ void load_words(const void* p, uint32_t (&words)[kBytes / 4]) {
    if constexpr (kBytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) {
            const uint4 v = __ldg(static_cast<const uint4*>(p) + i);
            words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
        }
    } else if constexpr (kBytes == 8) {
        const uint2 v = __ldg(static_cast<const uint2*>(p));
        words[0] = v.x, words[1] = v.y;
    } else {
        static_assert(kBytes == 4);
        words[0] = __ldg(static_cast<const uint32_t*>(p));
    }
}
template <int kBytes>
__device__ __forceinline__ void store_words(void* p, const uint32_t (&words)[kBytes / 4]) {
    static_assert(kBytes % 16 == 0);
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
        static_cast<uint4*>(p)[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
}

// V elements as they lie in memory: loading many of these first keeps many loads in flight.
template <class T, int V>
struct Packed {
    uint32_t words[V * sizeof(T) / 4];

    __device__ __forceinline__ void load(const void* row, DType, int64_t column) {
        load_words<V * sizeof(T)>(static_cast<const T*>(row) + column, words);
    }
    __device__ __forceinline__ void floats(float (&v)[V]) const {
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if constexpr (sizeof(T) == 4) {
                v[i] = __uint_as_float(words[i]);
            } else if (i % 2 == 0) {
                const float2 pair = unpack<T>(words[i / 2]);
                v[i] = pair.x, v[i + 1] = pair.y;
            }
        }
    }
    static __device__ __forceinline__ void store(void* row, DType, int64_t column, const float (&v)[V]) {
        uint32_t words[V * sizeof(T) / 4];
#pragma unroll
        for (int i = 0; i < V; ++i) {
            if constexpr (sizeof(T) == 4)
                words[i] = __float_as_uint(v[i]);
            else if (i % 2 == 0)
                words[i / 2] = pack<T>(v[i], v[i + 1]);
        }
        store_words<V * sizeof(T)>(static_cast<T*>(row) + column, words);
    }
};
template <int V>
struct Packed<Any, V> {
    static_assert(V == 1);
    float value;

    __device__ __forceinline__ void load(const void* row, DType dtype, int64_t column) {
        if (dtype == DType::f32)
            value = static_cast<const float*>(row)[column];
        else if (dtype == DType::f16)
            value = __half2float(static_cast<const __half*>(row)[column]);
        else
            value = __bfloat162float(static_cast<const __nv_bfloat16*>(row)[column]);
    }
    __device__ __forceinline__ void floats(float (&v)[1]) const { v[0] = value; }
    static __device__ __forceinline__ void store(void* row, DType dtype, int64_t column, const float (&v)[1]) {
        if (dtype == DType::f32)
            static_cast<float*>(row)[column] = v[0];
        else if (dtype == DType::f16)
            static_cast<__half*>(row)[column] = __float2half_rn(v[0]);
        else
            static_cast<__nv_bfloat16*>(row)[column] = __float2bfloat16_rn(v[0]);
    }
};

// V parameters from `column` on, of whatever type they are.
template <int V>
__device__ __forceinline__ void load_parameters(const Parameters& p, int64_t column, float (&v)[V]) {
    if constexpr (V == 1) {
        Packed<Any, 1> one;
        one.load(p.data, p.dtype, column);
        one.floats(v);
    } else if (p.dtype == DType::f32) {
        Packed<float, V> packed;
        packed.load(p.data, p.dtype, column);
        packed.floats(v);
    } else if (p.dtype == DType::f16) {
        Packed<__half, V> packed;
        packed.load(p.data, p.dtype, column);
        packed.floats(v);
    } else {
        Packed<__nv_bfloat16, V> packed;
        packed.load(p.data, p.dtype, column);
        packed.floats(v);
    }
}

// Row `i` of a matrix of T.
template <class T>
__device__ __forceinline__ char* row_of(const Rows& rows, int64_t i) {
    if constexpr (std::is_same_v<T, Any>)
        return static_cast<char*>(rows.data) + i * rows.stride * (rows.dtype == DType::f32 ? 4 : 2);
    else
        return static_cast<char*>(rows.data) + i * rows.stride * static_cast<int64_t>(sizeof(T));
}

// f(chunk, column) for each chunk of V columns that this thread owns.
template <int kThreads, int kChunks, int V, class F>
__device__ __forceinline__ void for_chunks(int thread, int columns, F f) {
    if constexpr (kChunks > 0) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int column = (chunk * kThreads + thread) * V;
            if (column < columns) f(chunk, column);
        }
    } else {
        for (int64_t column = thread * V; column < columns; column += kThreads * V) f(0, static_cast<int>(column));
    }
}

// Which of V neighbouring columns are kept; bit i for column + i.
template <int V>
__device__ __forceinline__ uint32_t kept_bits(RowKeys keys, uint32_t threshold, int column) {
    uint32_t kept = 0;
    if constexpr (V == 1) {
        const uint32_t bits = pair_bits(keys, static_cast<uint32_t>(column) >> 1);
        kept = (column & 1 ? bits >> 16 : bits & 0xffffu) >= threshold;
    } else {
#pragma unroll
        for (int i = 0; i < V; i += 2) {
            const uint32_t bits = pair_bits(keys, static_cast<uint32_t>(column + i) >> 1);
            kept |= uint32_t{(bits & 0xffffu) >= threshold} << i | uint32_t{(bits >> 16) >= threshold} << (i + 1);
        }
    }
    return kept;
}

constexpr int kWarpsPerBlock = 4;  // where a warp holds a row
constexpr int kBlockRow = 256;     // threads, where a block does

// The threads that hold one row, and their sums. A block of several warps alternates between two buffers, so that one
// barrier a sum is enough: whoever writes a buffer again has passed the barrier that its last readers came to.
template <int kThreads>
struct Group {
    static_assert(kThreads == kWarp || kThreads == kBlockRow);
    static constexpr int kBlock = kThreads == kWarp ? kWarp * kWarpsPerBlock : kThreads;
    static constexpr int kRows = kBlock / kThreads;  // of a block
    static constexpr int kWarps = kThreads / kWarp;

    float2* buffer;  // [2, kWarps]
    int turn = 0;

    static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }
    static __device__ __forceinline__ int64_t first_row() {
        return static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
    }
    static __device__ __forceinline__ int64_t row_step() { return static_cast<int64_t>(gridDim.x) * kRows; }

    static __device__ __forceinline__ float exchange(float v, int bits) { return __shfl_xor_sync(kFullWarp, v, bits); }
    static __device__ __forceinline__ float2 exchange(float2 v, int bits) {
        return {exchange(v.x, bits), exchange(v.y, bits)};
    }
    template <class T, class Combine>
    __device__ __forceinline__ T reduce(T v, Combine combine) {
#pragma unroll
        for (int bits = kWarp / 2; bits; bits /= 2) v = combine(v, exchange(v, bits));
        if constexpr (kThreads > kWarp) {
            T* parts = reinterpret_cast<T*>(buffer + turn * kWarps);
            turn ^= 1;
            if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = v;
            __syncthreads();
            v = parts[0];
#pragma unroll
            for (int i = 1; i < kWarps; ++i) v = combine(v, parts[i]);
        }
        return v;
    }
    __device__ __forceinline__ float2 sum(float2 v) {
        return reduce(v, [](float2 a, float2 b) { return float2{a.x + b.x, a.y + b.y}; });
    }
    __device__ __forceinline__ float sum(float v) {
        return reduce(v, [](float a, float b) { return a + b; });
    }
    __device__ __forceinline__ float max(float v) {
        return reduce(v, [](float a, float b) { return fmaxf(a, b); });
    }
};

// Blocks that should fit a multiprocessor together, for __launch_bounds__: what holds a row of so many elements a
// thread without spilling. Left to itself the compiler takes up to twice the registers, and half the loads are in
// flight.
constexpr int resident_blocks(int block, int elements) {
    if (block == kBlockRow) return elements > 16 ? 1 : elements > 8 ? 2 : 4;
    return elements > 24 ? 3 : elements > 16 ? 4 : elements > 8 ? 5 : 8;
}

// The second stage of column sums: total[v] [columns] of partial [parts, vectors, columns] for each vector v, added in
// the order of parts, in eight interleaved sums a column.
constexpr int kSumGroups = 8;
template <int kVectors>
struct Totals {
    float* total[kVectors];
};
template <int kVectors>
__global__ void __launch_bounds__(kWarp* kSumGroups)
    column_sums_kernel(const float* partial, const __grid_constant__ Totals<kVectors> totals, int parts,
                       int64_t columns) {
    FASTBERT_SHARED(sums, float[kSumGroups][kWarp]);
    const int lane = threadIdx.x % kWarp, group = threadIdx.x / kWarp;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
    float sum = 0;
    if (column < columns) {
#pragma unroll 4
        for (int part = group; part < parts; part += kSumGroups)
            sum += partial[(int64_t{part} * kVectors + blockIdx.y) * columns + column];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group == 0 && column < columns) {
#pragma unroll
        for (int i = 1; i < kSumGroups; ++i) sum += sums[i][lane];
        totals.total[blockIdx.y][column] = sum;
    }
}
template <int kVectors>
void column_sums(const float* partial, Totals<kVectors> totals, int parts, int64_t columns, cudaStream_t stream) {
    launch("column_sums", column_sums_kernel<kVectors>, dim3(static_cast<unsigned>(ceil_div(columns, kWarp)), kVectors),
           kWarp * kSumGroups, 0, stream, partial, totals, parts, columns);
}

#endif
}  // namespace fastbert::cuda
