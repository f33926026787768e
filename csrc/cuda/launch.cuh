// What every CUDA file starts from: how shared memory is declared and a kernel is launched, in a form that nvcc and,
// for tests/simt/, g++ can both read (g++ parses neither __shared__ nor <<<>>>).
//
// An op's file holds a torch-free part (arguments, kernels, host launchers), compiled by nvcc, and an adapter, compiled
// by the C++ compiler: no torch header passes through nvcc, once per architecture. tests/simt/ compiles both at once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#if defined(__CUDACC__) || defined(FASTBERT_SIMT)
#define FASTBERT_CUDA_KERNELS
#endif
#if !defined(__CUDACC__)
#define FASTBERT_CUDA_ADAPTER
#endif

#if defined(__CUDACC__)
// FASTBERT_SHARED(tile, float[32][33]): a static shared array. FASTBERT_DYNAMIC_SHARED(bytes): what the launch asked
// for, as unsigned char*, aligned to 128 bytes.
#define FASTBERT_SHARED(name, ...) __shared__ fastbert::cuda::Same<__VA_ARGS__> name
#define FASTBERT_DYNAMIC_SHARED(name)                                  \
    extern __shared__ __align__(128) unsigned char fastbert_dynamic[]; \
    unsigned char* const name = fastbert_dynamic
#elif defined(FASTBERT_SIMT)
#define FASTBERT_SHARED(name, ...) \
    auto& name = *static_cast<fastbert::cuda::Same<__VA_ARGS__>*>(simt::shared(SIMT_SITE, sizeof(__VA_ARGS__)))
#define FASTBERT_DYNAMIC_SHARED(name) unsigned char* const name = simt::dynamic_shared()
#endif

namespace fastbert::cuda {

template <class T>
using Same = T;

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
        throw std::runtime_error(std::string("fastbert: ") + what + ": " + cudaGetErrorString(status));
}

#ifdef FASTBERT_CUDA_KERNELS
constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Told of every launch, if set: the kernel, threads and dynamic shared bytes of a block; and as the device has it,
// registers and bytes of local memory (spills) of a thread, static shared bytes, and blocks that fit a multiprocessor.
using Observer = void (*)(const char* kernel, int threads, int shared_bytes, int registers, int local_bytes,
                          int static_shared_bytes, int resident_blocks);
inline Observer observer = nullptr;
// For fastbert.info, by ctypes.
extern "C" inline __attribute__((visibility("default"), used)) void fastbert_observe_launches(Observer o) {
    observer = o;
}

// Launches `kernel` and raises if the device refuses; more than 48 KiB of shared memory is asked for here.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, const Arguments&... arguments) {
#ifdef FASTBERT_SIMT
    static_cast<void>(stream);
    if (observer) observer(name, block.x * block.y * block.z, static_cast<int>(shared_bytes), 0, 0, 0, 0);
    simt::launch(name, grid, block, shared_bytes, [&] { kernel(static_cast<Parameters>(arguments)...); });
#else
    if (shared_bytes > 48 << 10)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
              name);
    if (observer) {
        const int threads = block.x * block.y * block.z;
        cudaFuncAttributes facts{};
        int resident = 0;
        check(cudaFuncGetAttributes(&facts, kernel), name);
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, shared_bytes), name);
        observer(name, threads, static_cast<int>(shared_bytes), facts.numRegs, static_cast<int>(facts.localSizeBytes),
                 static_cast<int>(facts.sharedSizeBytes), resident);
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
#endif
}
#endif

// An attribute of the current device, such as cudaDevAttrMultiProcessorCount.
inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
}

}  // namespace fastbert::cuda
