// Small kernels, each right or with one fault planted, for tests/test_simt.py: `faults CASE` prints "right" or "wrong",
// or what was raised; the sanitizers stop it.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cuda/ptx.cuh"

using namespace fastbert::cuda;

namespace {

enum Fault { none, first, second };

// y = x reversed, twice over: x -> shared -> y, and y -> the same shared -> x.
template <Fault fault>
__global__ void barrier(float* x, float* y) {
    FASTBERT_SHARED(row, float[128]);
    const int i = threadIdx.x;
    row[i] = x[i];
    if (fault != first) __syncthreads();
    y[i] = row[127 - i];
    if (fault != second) __syncthreads();
    row[i] = 2 * y[i];
    __syncthreads();
    x[i] = row[127 - i];
}

template <Fault fault>
__global__ void warp_barrier(const float* x, float* y) {
    FASTBERT_SHARED(row, float[128]);
    const int i = threadIdx.x;
    row[i] = x[i];
    if (fault == none) __syncwarp();
    y[i] = row[i ^ 1];
}

template <Fault fault>
__global__ void bounds_static(const float* x, float* y) {
    FASTBERT_SHARED(row, float[128]);
    volatile int shift = fault == none ? 0 : 1;
    const int i = threadIdx.x + shift;
    (&row[0])[i] = x[threadIdx.x];
    y[threadIdx.x] = row[threadIdx.x];
}

__global__ void bounds_dynamic(const float* x, float* y) {
    FASTBERT_DYNAMIC_SHARED(bytes);
    auto* row = reinterpret_cast<float*>(bytes);
    row[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = row[threadIdx.x];
}

__global__ void bounds_global(const float* x, float* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i];
}

__global__ void vector(const float* x, float* y, int shift) {
    const float4 v = *reinterpret_cast<const float4*>(x + shift + threadIdx.x / 4 * 4 % 124);
    y[threadIdx.x] = v.x;
}

template <Fault fault>
__global__ void uninitialised(const float* x, float* y) {
    FASTBERT_SHARED(row, float[128]);
    if (fault == none || threadIdx.x != 77) row[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = row[127 - threadIdx.x];
}

template <Fault fault>
__global__ void divergent(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x];
    if (fault == first && threadIdx.x >= 100) return;
    if (fault == second && threadIdx.x < 64)
        __syncthreads();
    else
        __syncthreads();
}

template <Fault fault>
__global__ void shuffle(const float* x, float* y) {
    float v = x[threadIdx.x];
    if (fault == first && threadIdx.x % 32 == 5) return;
    if (fault == second && threadIdx.x % 32 < 16)
        v = __shfl_sync(0xffffu, v, 20);
    else if (fault != second)
        v = __shfl_sync(kFullWarp, v, 31 - threadIdx.x % 32);
    y[threadIdx.x] = v;
}

// y = x in steps of 128 bytes a warp's lane; `first`: no wait; `second`: no barrier after it.
template <Fault fault>
__global__ void copy(const float* x, float* y, int shift) {
    FASTBERT_SHARED(row, float[128]);
    const int i = threadIdx.x;
    if (i < 32) ptx::cp_async<16>(row + 4 * i, x + 4 * i + shift, i != 31);
    ptx::cp_async_commit();
    if (fault != first) ptx::cp_async_wait<0>();
    if (fault != second) __syncthreads();
    y[i] = row[i];
}

// c [16, 8] = a [16, 16] b [16, 8] by one warp; all row-major.
template <class T, Fault fault>
__global__ void product(const T* a, const T* b, float* c, int shift) {
    FASTBERT_SHARED(a_tile, T[16][16]);
    FASTBERT_SHARED(b_tile, T[16][8]);
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) a_tile[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += 32) b_tile[i / 8][i % 8] = b[i];
    __syncwarp();
    uint32_t a_fragment[4], b_fragment[2];
    ptx::ldmatrix<4>(a_fragment, &a_tile[lane % 16][lane / 16 * 8 + shift]);
    ptx::ldmatrix<2, fault != first>(b_fragment, &b_tile[lane % 16][0]);
    if (fault == second) std::swap(a_fragment[1], a_fragment[2]);
    float sum[4] = {};
    ptx::mma<T>(sum, a_fragment, b_fragment[0], b_fragment[1]);
    for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

using Vector = std::unique_ptr<float[]>;  // of exactly its size
Vector numbers(int n) {
    Vector v(new float[n]);
    for (int i = 0; i < n; ++i) v[i] = static_cast<float>(i * 37 % 101);
    return v;
}
template <class F>
bool all(int n, F f) {
    for (int i = 0; i < n; ++i)
        if (!f(i)) return false;
    return true;
}

// How a kernel of one block that maps x [128] to y [128] comes out; expected(i) is the index y[i] comes from.
template <class Kernel, class F, class... More>
bool maps(Kernel kernel, size_t shared_bytes, F expected, More... more) {
    const Vector x = numbers(128), y = numbers(128), original = numbers(128);
    launch("kernel", kernel, 1, 128, shared_bytes, nullptr, x.get(), y.get(), more...);
    return all(128, [&](int i) { return y[i] == original[expected(i)]; });
}
int same(int i) { return i; }
int reversed(int i) { return 127 - i; }

template <Fault fault>
bool barriers() {
    const Vector x = numbers(128), y = numbers(128), original = numbers(128);
    launch("barrier", barrier<fault>, 1, 128, 0, nullptr, x.get(), y.get());
    return all(128, [&](int i) { return y[i] == original[127 - i] && x[i] == 2 * original[i]; });
}

template <class T, Fault fault>
bool product_is_right(int shift = 0) {
    std::vector<T> a(256), b(128);
    for (int i = 0; i < 256; ++i) a[i] = T(static_cast<float>(i * 7 % 23 - 11));
    for (int i = 0; i < 128; ++i) b[i] = T(static_cast<float>(i * 5 % 19 - 9));
    std::vector<float> c(128);
    launch("product", product<T, fault>, 1, 32, 0, nullptr, a.data(), b.data(), c.data(), shift);
    return all(128, [&](int i) {
        float sum = 0;
        for (int k = 0; k < 16; ++k)
            sum += static_cast<float>(a[i / 8 * 16 + k]) * static_cast<float>(b[k * 8 + i % 8]);
        return c[i] == sum;
    });
}

bool limits(dim3 grid, dim3 block, size_t shared_bytes) {
    const Vector x = numbers(1024), y = numbers(1024);
    launch("bounds_global", bounds_global, grid, block, shared_bytes, nullptr, x.get(), y.get(), 1024);
    return true;
}

const struct {
    const char* name;
    bool (*run)();
} kCases[] = {
    {"barrier", barriers<none>},
    {"barrier missing", barriers<first>},
    {"barrier missing before reuse", barriers<second>},
    {"warp barrier", [] { return maps(warp_barrier<none>, 0, [](int i) { return i ^ 1; }); }},
    {"warp barrier missing", [] { return maps(warp_barrier<first>, 0, [](int i) { return i ^ 1; }); }},
    {"static shared", [] { return maps(bounds_static<none>, 0, same); }},
    {"static shared out of bounds", [] { return maps(bounds_static<first>, 0, same); }},
    {"dynamic shared", [] { return maps(bounds_dynamic, 512, same); }},
    {"dynamic shared out of bounds", [] { return maps(bounds_dynamic, 508, same); }},
    {"global", [] { return maps(bounds_global, 0, same, 128); }},
    {"global out of bounds", [] { return maps(bounds_global, 0, same, 129); }},
    {"vector load", [] { return maps(vector, 0, [](int i) { return i / 4 * 4 % 124; }, 0); }},
    {"vector load misaligned", [] { return maps(vector, 0, [](int i) { return i / 4 * 4 % 124 + 1; }, 1); }},
    {"initialised", [] { return maps(uninitialised<none>, 0, reversed); }},
    {"uninitialised", [] { return maps(uninitialised<first>, 0, reversed); }},
    {"convergent", [] { return maps(divergent<none>, 0, same); }},
    {"barrier after an exit", [] { return maps(divergent<first>, 0, same); }},
    {"two barriers at once", [] { return maps(divergent<second>, 0, same); }},
    {"shuffle", [] { return maps(shuffle<none>, 0, [](int i) { return i / 32 * 32 + 31 - i % 32; }); }},
    {"shuffle with an exited lane", [] { return maps(shuffle<first>, 0, same); }},
    {"shuffle from outside the mask", [] { return maps(shuffle<second>, 0, same); }},
    {"copy",
     [] { return !maps(copy<none>, 0, same, 0) && maps(copy<none>, 0, [](int i) { return i < 124 ? i : 0; }, 0); }},
    {"copy without wait", [] { return maps(copy<first>, 0, [](int i) { return i < 124 ? i : 0; }, 0); }},
    {"copy without barrier", [] { return maps(copy<second>, 0, [](int i) { return i < 124 ? i : 0; }, 0); }},
    {"copy misaligned", [] { return maps(copy<none>, 0, same, 1); }},
    {"product", [] { return product_is_right<__half, none>() && product_is_right<__nv_bfloat16, none>(); }},
    {"product without transposing", [] { return product_is_right<__half, first>(); }},
    {"product with registers swapped", [] { return product_is_right<__nv_bfloat16, second>(); }},
    {"ldmatrix misaligned", [] { return product_is_right<__half, none>(1); }},
    {"largest launch", [] { return limits(dim3(1, 1, 2), 1024, 166912); }},
    {"grid y", [] { return limits(dim3(1, 65536), 32, 0); }},
    {"grid z", [] { return limits(dim3(1, 1, 65536), 32, 0); }},
    {"no block", [] { return limits(dim3(0), 32, 0); }},
    {"threads", [] { return limits(1, 1056, 0); }},
    {"shared memory", [] { return limits(1, 32, 166913); }},
};

}  // namespace

int main(int, char** arguments) {
    for (const auto& test : kCases) {
        if (std::string(arguments[1]) != test.name) continue;
        try {
            std::puts(test.run() ? "right" : "wrong");
        } catch (const std::exception& error) {
            std::puts(error.what());
        }
        return 0;
    }
    std::puts("no such case");
    return 1;
}
