// Counter-based dropout: the bits of an element depend on the seed and its coordinates alone, so every
// backend, layout and tile size drops the same elements and backward recomputes what forward dropped.
// One 32-bit hash serves two neighbouring columns. `mix` is the "lowbias32" finaliser
// (https://nullprogram.com/blog/2018/07/31/).
#pragma once
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FASTBERT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTBERT_HOST_DEVICE static inline
#endif

namespace fastbert {

constexpr uint32_t kMixMultiplier1 = 0x7feb352du;
constexpr uint32_t kMixMultiplier2 = 0x846ca68bu;
constexpr uint32_t kGolden = 0x9E3779B9u;
constexpr uint32_t kSecondKey = 0xA511E9B3u;

FASTBERT_HOST_DEVICE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= kMixMultiplier1;
    x ^= x >> 15;
    x *= kMixMultiplier2;
    return x ^ (x >> 16);
}

// Two keys, derived once per row.
struct RowKeys {
    uint32_t k0, k1;
};

FASTBERT_HOST_DEVICE RowKeys row_keys(uint64_t seed, uint32_t row_hi, uint32_t row_lo) {
    uint32_t k0 =
        mix(mix(mix(mix(static_cast<uint32_t>(seed) + kGolden) + static_cast<uint32_t>(seed >> 32)) + row_hi) + row_lo);
    return {k0, mix(k0 ^ kSecondKey)};
}

// The hash of columns 2 * pair (its low half) and 2 * pair + 1 (its high half).
FASTBERT_HOST_DEVICE uint32_t pair_bits(RowKeys keys, uint32_t pair) {
    uint32_t x = keys.k0 + pair * kGolden;
    x ^= x >> 16;
    x *= kMixMultiplier1;
    x ^= (x >> 15) ^ keys.k1;
    x *= kMixMultiplier2;
    return x ^ (x >> 16);
}

// An element is kept when its 16 bits are at least `threshold`, and then scaled by `scale`.
struct Dropout {
    uint64_t seed;
    uint32_t threshold;  // 0: no dropout; 65536: everything is dropped
    double scale;

    static Dropout make(double p, uint64_t seed) {
        const auto threshold = static_cast<uint32_t>(std::nearbyint(p * 65536.0));
        return {seed, threshold, threshold < 65536 ? 1.0 / (1.0 - threshold / 65536.0) : 0.0};
    }
    bool active() const { return threshold != 0; }
};

}  // namespace fastbert
