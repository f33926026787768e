// Instruction sets. Each op's file is compiled once per set for its kernels, with FASTBERT_ISA naming the
// set, and once without FASTBERT_ISA for its adapter, which chooses among them once a call.
#pragma once
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#define FASTBERT_FOR_EACH_ISA(X) X(baseline) X(avx2) X(avx512) X(avx512_bf16)
#else
#define FASTBERT_FOR_EACH_ISA(X) X(baseline)
#endif

namespace fastbert::cpu {

#define FASTBERT_ISA_ENUMERATOR(isa) isa_##isa,
enum Isa { FASTBERT_FOR_EACH_ISA(FASTBERT_ISA_ENUMERATOR) isa_count };
#undef FASTBERT_ISA_ENUMERATOR

#define FASTBERT_ISA_STRING(isa) #isa,
inline constexpr const char* kIsaNames[] = {FASTBERT_FOR_EACH_ISA(FASTBERT_ISA_STRING)};
#undef FASTBERT_ISA_STRING

inline Isa best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return isa_avx512_bf16;
    if (avx512) return isa_avx512;
    if (avx2) return isa_avx2;
#endif
    return isa_baseline;
}

// The set in use: the best this CPU has, or a lesser one named by FASTBERT_CPU_ISA. Read once.
inline Isa current_isa() {
    static const Isa isa = [] {
        const Isa best = best_isa();
        if (const char* name = std::getenv("FASTBERT_CPU_ISA"))
            for (int i = 0; i < best; ++i)
                if (std::strcmp(name, kIsaNames[i]) == 0) return static_cast<Isa>(i);
        return best;
    }();
    return isa;
}

}  // namespace fastbert::cpu

// An op's file declares `struct GeluKernels` (its kernels, as function pointers), defines one such table per
// instruction set with FASTBERT_KERNELS(GeluKernels, gelu) = {...}, and in its adapter says
// FASTBERT_CHOOSE(GeluKernels, gelu) to get `gelu_kernels()`, the table in use.
#define FASTBERT_KERNELS(Type, op)               \
    extern const fastbert::cpu::Type op##_table; \
    const fastbert::cpu::Type op##_table

#define FASTBERT_DECLARE_TABLE(isa, Type, op) \
    namespace isa {                           \
    extern const Type op##_table;             \
    }
#if defined(__x86_64__)
#define FASTBERT_CHOOSE(Type, op)                                                                           \
    FASTBERT_DECLARE_TABLE(baseline, Type, op)                                                              \
    FASTBERT_DECLARE_TABLE(avx2, Type, op)                                                                  \
    FASTBERT_DECLARE_TABLE(avx512, Type, op)                                                                \
    FASTBERT_DECLARE_TABLE(avx512_bf16, Type, op)                                                           \
    static const Type& op##_kernels() {                                                                     \
        static const Type* const tables[] = {&baseline::op##_table, &avx2::op##_table, &avx512::op##_table, \
                                             &avx512_bf16::op##_table};                                     \
        return *tables[current_isa()];                                                                      \
    }
#else
#define FASTBERT_CHOOSE(Type, op)              \
    FASTBERT_DECLARE_TABLE(baseline, Type, op) \
    static const Type& op##_kernels() { return baseline::op##_table; }
#endif
