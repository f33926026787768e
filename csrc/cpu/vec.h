// Vectors of one instruction set, by the compiler's own vector types: the width follows the flags this file
// is compiled with, and the few operations that the generic form spells badly use intrinsics.
//
// Everything here has internal linkage: were these functions merged across the files of different sets, an
// older CPU could end up in AVX-512 code.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../common/dropout.h"
#include "dtype.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Vector<C>: a register of C (float or double), the signed integers of its size, as many bytes, and the number of
// lanes.
template <class C>
struct Vector;
template <>
struct Vector<float> {
    static constexpr int lanes = kVectorBytes / 4;
    typedef float V __attribute__((vector_size(kVectorBytes)));
    typedef int32_t I __attribute__((vector_size(kVectorBytes)));
    typedef unsigned char Bytes __attribute__((vector_size(lanes)));
};
template <>
struct Vector<double> {
    static constexpr int lanes = kVectorBytes / 8;
    typedef double V __attribute__((vector_size(kVectorBytes)));
    typedef int64_t I __attribute__((vector_size(kVectorBytes)));
    typedef unsigned char Bytes __attribute__((vector_size(lanes)));
};
typedef Vector<float>::V VF;
typedef Vector<float>::I VI;
typedef uint32_t VU __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfU16 __attribute__((vector_size(kVectorBytes / 2)));
template <class C>
using Vec = typename Vector<C>::V;
template <class C>
constexpr int kLanes = Vector<C>::lanes;

template <class C>
inline Vec<C> splat(C x) {
    return x - Vec<C>{};  // the compiler's scalar-to-vector rule; x - 0 keeps the sign of zero
}
template <class V, class P>
inline V load_raw(const P* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class P>
inline void store_raw(P* p, V v) {
    __builtin_memcpy(p, &v, sizeof v);
}

// load<C>(p): a vector of C from memory of type T, widened. store(p, v): narrowed, rounding to nearest even.
template <class C, class T>
struct Memory;
template <class C>
struct Memory<C, C> {
    static Vec<C> load(const C* p) { return load_raw<Vec<C>>(p); }
    static void store(C* p, Vec<C> v) { store_raw(p, v); }
};
template <>
struct Memory<float, BF16> {
    static VF load(const BF16* p) {
        const VU wide = __builtin_convertvector(load_raw<HalfU16>(p), VU) << 16;
        return (VF)wide;
    }
    static void store(BF16* p, VF v) {
#if defined(__AVX512BF16__)
        store_raw(p, _mm512_cvtneps_pbh((__m512)v));
#else
        VU bits = (VU)v;
        const VU rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        bits = v == v ? rounded : bits | 0x400000u;  // a NaN stays one
        store_raw(p, __builtin_convertvector(bits >> 16, HalfU16));
#endif
    }
};
template <>
struct Memory<float, F16> {
    static VF load(const F16* p) {
#if defined(__AVX512F__)
        return (VF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
        return (VF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
        // Shift exponent and mantissa into place and rescale by 2^112: subnormals come out right as well.
        const VU h = __builtin_convertvector(load_raw<HalfU16>(p), VU);
        const VU magnitude = (h & 0x7fffu) << 13;
        const VF scaled = (VF)magnitude * 0x1p112f;
        const VU special = (h & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : (VU)scaled;
        return (VF)(special | ((h & 0x8000u) << 16));
#endif
    }
    static void store(F16* p, VF v) {
#if defined(__AVX512F__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
        const VU sign = ((VU)v >> 16) & 0x8000u;
        const VU a = (VU)v & 0x7fffffffu;
        // Normal halves: rebias and round by integer addition. Subnormal ones: let float addition round.
        const VU normal = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
        const VU subnormal = (VU)((VF)a + 0.5f) - 0x3f000000u;
        VU h = a < 0x38800000u ? subnormal : normal;
        h = a >= 0x477ff000u ? (VU)(VI{} + 0x7c00) : h;
        h = a > 0x7f800000u ? (VU)(VI{} + 0x7e00) : h;
        store_raw(p, __builtin_convertvector(h | sign, HalfU16));
#endif
    }
};

template <class C, class T>
inline Vec<C> load(const T* p) {
    return Memory<C, T>::load(p);
}
template <class C, class T>
inline void store(T* p, Vec<C> v) {
    Memory<C, T>::store(p, v);
}
// The first n < lanes elements, zeros behind them.
template <class C, class T>
inline Vec<C> load_n(const T* p, int64_t n) {
    T buffer[kLanes<C>] = {};
    for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
    return load<C>(buffer);
}
template <class C, class T>
inline void store_n(T* p, Vec<C> v, int64_t n) {
    T buffer[kLanes<C>];
    store<C>(buffer, v);
    for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

// for_vectors(n, f): f(offset, load, store) over a row of n elements, whole vectors first, then the rest.
struct WholeVector {
    template <class C, class T>
    static Vec<C> load(const T* p) {
        return Memory<C, T>::load(p);
    }
    template <class C, class T>
    static void store(T* p, Vec<C> v) {
        Memory<C, T>::store(p, v);
    }
    template <class V>
    static V clear(V v) {
        return v;
    }
};
struct PartVector {
    int64_t n;
    // Zeros in the lanes past the row's end.
    template <class V>
    V clear(V v) const {
        for (int64_t i = n; i < static_cast<int64_t>(sizeof(v) / sizeof(v[0])); ++i) v[i] = 0;
        return v;
    }
    template <class C, class T>
    Vec<C> load(const T* p) const {
        return load_n<C>(p, n);
    }
    template <class C, class T>
    void store(T* p, Vec<C> v) const {
        store_n<C>(p, v, n);
    }
};
template <class C, class F>
inline void for_vectors(int64_t n, F&& f) {
    int64_t i = 0;
    for (; i + kLanes<C> <= n; i += kLanes<C>) f(i, WholeVector{});
    if (i < n) f(i, PartVector{n - i});
}

// All lanes by `op`, halving the vector: a chain over single lanes would take longer than a short row.
template <class C, int kStep, size_t... kLane>
inline Vec<C> swapped(Vec<C> v, std::index_sequence<kLane...>) {
    return __builtin_shufflevector(v, v, (kLane ^ kStep)...);
}
template <class C, int kStep = kLanes<C> / 2, class F>
inline C fold(Vec<C> v, const F& op) {
    if constexpr (kStep == 0)
        return v[0];
    else
        return fold<C, kStep / 2>(op(v, swapped<C, kStep>(v, std::make_index_sequence<kLanes<C>>{})), op);
}
template <class C>
inline C sum(Vec<C> v) {
    return fold<C>(v, [](Vec<C> a, Vec<C> b) { return a + b; });
}
// The sum over a row of f(offset, load) -> Vec<C>. Four sums at once, so that additions need not wait for each other.
template <class C, class F>
inline C reduce(int64_t n, F&& f) {
    constexpr int64_t lanes = kLanes<C>;
    Vec<C> a{}, b{}, c{}, d{};
    int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
        a += f(i, WholeVector{});
        b += f(i + lanes, WholeVector{});
        c += f(i + 2 * lanes, WholeVector{});
        d += f(i + 3 * lanes, WholeVector{});
    }
    for (; i + lanes <= n; i += lanes) a += f(i, WholeVector{});
    if (i < n) {
        const PartVector part{n - i};
        b += part.clear(f(i, part));
    }
    return sum<C>((a + b) + (c + d));
}

// A row of any dtype as a row of C: in place where it is one already, else widened into `buffer`.
template <class C>
inline const C* widen(const void* data, DType dtype, int64_t n, C* buffer) {
    if constexpr (sizeof(C) == 4) {
        if (dtype == DType::f32) return static_cast<const float*>(data);
        if (dtype == DType::bf16)
            for_vectors<C>(n, [&](int64_t i, auto m) {
                store<C>(buffer + i, m.template load<C>(static_cast<const BF16*>(data) + i));
            });
        else
            for_vectors<C>(n, [&](int64_t i, auto m) {
                store<C>(buffer + i, m.template load<C>(static_cast<const F16*>(data) + i));
            });
        return buffer;
    } else {
        if (dtype == DType::f64) return static_cast<const double*>(data);
        float part[kLanes<float>];
        for (int64_t i = 0; i < n; i += kLanes<float>) {
            const int64_t count = n - i < kLanes<float> ? n - i : kLanes<float>;
            const char* source = static_cast<const char*>(data) + i * size_of(dtype);
            float filled[kLanes<float>] = {};
            __builtin_memcpy(filled, source, count * size_of(dtype));
            const float* wide = widen<float>(filled, dtype, kLanes<float>, part);
            for (int64_t j = 0; j < count; ++j) buffer[i + j] = wide[j];
        }
        return buffer;
    }
}
// Where results of C for a row of `dtype` may be written: the row itself or `buffer`, then narrowed by `commit`.
template <class C>
inline C* target(void* data, DType dtype, C* buffer) {
    return dtype == (sizeof(C) == 4 ? DType::f32 : DType::f64) ? static_cast<C*>(data) : buffer;
}
template <class C>
inline void commit(void* data, DType dtype, int64_t n, const C* buffer) {
    if (static_cast<const void*>(buffer) == data) return;
    if constexpr (sizeof(C) == 4) {
        if (dtype == DType::bf16)
            for_vectors<C>(
                n, [&](int64_t i, auto m) { m.template store<C>(static_cast<BF16*>(data) + i, load<C>(buffer + i)); });
        else
            for_vectors<C>(
                n, [&](int64_t i, auto m) { m.template store<C>(static_cast<F16*>(data) + i, load<C>(buffer + i)); });
    } else {
        float part[kLanes<float>];
        for (int64_t i = 0; i < n; i += kLanes<float>) {
            const int64_t count = n - i < kLanes<float> ? n - i : kLanes<float>;
            char* destination = static_cast<char*>(data) + i * size_of(dtype);
            for (int64_t j = 0; j < count; ++j) part[j] = static_cast<float>(buffer[i + j]);
            if (dtype == DType::f32)
                __builtin_memcpy(destination, part, count * 4);
            else
                commit<float>(destination, dtype, count, part);
        }
    }
}
// Elements past the end of a row that `widen` and `commit` may touch in a buffer.
constexpr int64_t kSlack = kVectorBytes / 2;

template <class C>
inline Vec<C> max(Vec<C> a, Vec<C> b) {
    return a > b ? a : b;
}
template <class C>
inline C max(Vec<C> v) {
    return fold<C>(v, [](Vec<C> a, Vec<C> b) { return a > b ? a : b; });
}

// exp, within 1 ulp or so: 2^k * exp(r), |r| <= ln(2) / 2. Below -87.3 (float) it is 0.
inline VF exp(VF x) {
    const VF low = splat(-87.33654f), high = splat(88.72283f);
    const VF clamped = x < low ? low : x > high ? high : x;  // a NaN passes: both comparisons are false
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const VF shifted = clamped * 1.44269504f + 12582912.0f;
    const VF k = shifted - 12582912.0f;
    const VF r = (clamped - k * 0.693359375f) + k * 2.12194440e-4f;
    // exp(r) = 1 + r + r^2 * p(r); p is the degree-4 minimax fit, relative error 3e-9.
    VF p = splat(1.381454058e-3f);
    p = p * r + 8.368745446e-3f;
    p = p * r + 4.166838899e-2f;
    p = p * r + 1.666652113e-1f;
    p = p * r + 4.999999404e-1f;
    p = p * (r * r) + r + 1.0f;
    // Two factors of 2^(k/2), so that k = 128 does not overflow the exponent field.
    const VI n = (VI)shifted - 0x4b400000;
    const VI half = n >> 1;
    const VF result = p * (VF)((half + 127) << 23) * (VF)((n - half + 127) << 23);
    return x < low ? VF{} : x > high ? splat(__builtin_inff()) : result;
}
inline Vec<double> exp(Vec<double> x) {
    for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
    return x;
}

// multipliers[c] = scale where column c is kept, 0 where it is dropped, for `columns` rounded up to two
// vectors. `first` is the column that multipliers[0] stands for; even.
template <class C>
inline void dropout_multipliers(const Dropout& dropout, RowKeys keys, int64_t first, int64_t columns, C* multipliers) {
    constexpr int lanes = kLanes<float>;
    VU pair;
    for (int i = 0; i < lanes; ++i) pair[i] = static_cast<uint32_t>(first / 2 + i);
    VU x0 = pair * kGolden + keys.k0;
    const uint32_t threshold = dropout.threshold;
    const C scale = static_cast<C>(dropout.scale);
    for (int64_t c = 0; c < columns; c += 2 * lanes) {
        VU x = x0;
        x ^= x >> 16;
        x *= kMixMultiplier1;
        x ^= (x >> 15) ^ keys.k1;
        x *= kMixMultiplier2;
        x ^= x >> 16;
        x0 += kGolden * static_cast<uint32_t>(lanes);
        // Little-endian: the low half of a pair is its even column, so the 16-bit halves lie in column order.
        HalfU16 halves[2];
        __builtin_memcpy(halves, &x, sizeof x);
        for (int h = 0; h < 2; ++h) {
            const VU bits = __builtin_convertvector(halves[h], VU);
            C* out = multipliers + c + h * lanes;
            if constexpr (sizeof(C) == 4)
                store_raw(out, (VF)((VU)(bits >= threshold) & (VU)splat(scale)));
            else
                for (int i = 0; i < lanes; ++i) out[i] = bits[i] >= threshold ? scale : 0.0;
        }
    }
}

}  // namespace
}  // namespace fastbert::cpu::FASTBERT_ISA
