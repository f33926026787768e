// dropout(softmax(q k^T * scale + mask)) v and its backward, for dense and packed sequences.
//
// The least memory is that of q, k, v and the result, once each (backward: of seven tensors); the work is two products
// of Sq x Sk x D multiply-adds a head, five in backward. Nothing of size Sq x Sk leaves the chip.
//
// Forward. A block takes a head, or some of its queries, and a warp 32 of these at a time (16 at D = 128 and in float).
// Scores stay in registers, as does the dropout: an accumulator holds neighbouring columns, which one hash serves. Up
// to 512 keys at D = 64 all keys and values are brought to shared memory once and warps go their own ways; where they
// do not fit they pass through in tiles, the next one on its way while one is multiplied. The largest score of a row is
// renewed only when a new one is 2^8 times larger as a power: a row of one tile is never rescaled, others hardly ever.
// 32 rows a warp and not 16: fetching an operand of q k^T from shared memory takes as long as multiplying it with 16
// rows, and both tensor cores and the dropout's integer work would wait for it.
//
// Backward. One block takes a head, each warp 32 of its keys (16 ...), whose dk and dv stay in its registers; queries
// come by in steps of 32, from which it makes the transposed tiles p^T and ds^T: as they are, left operands of dv and
// dk. Only for dq does ds go through shared memory; where one chunk of (8 warps x 32) keys holds the row, dq is
// complete then, and so is delta = sum(p dp), which is therefore taken from the tile: neither the result nor a kernel
// before this one is needed. This makes five products; a kernel for dk and dv and one for dq would make seven, and
// would hash twice. Longer rows take their chunks one after another: dq is summed in a float tensor by the thread that
// will write it, delta comes from the result. Every sum has one order: no atomics.
//
// What is off: keys past the length, or off for all queries by the mask, are replaced by zeros as they are loaded, and
// tiles of them at either end are not visited. Where that depends on the query, what is not finite is zeroed in shared
// memory in the operand that is summed over keys (v in forward, k in backward), and NaN put into the results that see
// it.
#include <algorithm>

#include "mma_tiles.cuh"

namespace fastbert::cuda {

enum class MaskKind : int { none, boolean, additive };

// Rows of D contiguous elements, each aligned to 16 bytes; strides in elements. Packed: no batch stride.
struct Sequences {
    void* data;
    int64_t batch, row, head;
};

struct AttentionArgs {
    Sequences query, key, value, out;      // out: written by forward, read by backward
    Sequences grad, dquery, dkey, dvalue;  // backward only
    DType dtype;
    int head_size;
    float* lse;  // [B, H, Sq], packed [H, T]
    // Element (b, h, q, k) at mask + sum of index * stride; bool bytes, or float.
    const void* mask;
    MaskKind mask_kind;
    int64_t mask_stride[4];
    const int32_t* lengths;  // [B], or [B, Sq] if lengths_per_query; or null
    bool lengths_per_query;
    bool by_query;              // which keys are on depends on the query
    const int32_t* cu_seqlens;  // [B + 1], or null: dense
    int64_t batch, tokens;      // tokens: T, packed
    int heads, queries, keys;   // queries, keys: of the longest sequence, if packed
    float scale;
    DropoutArgs dropout;
    // Backward of rows longer than attention_backward_keys(): sums [B, H, Sq, D] ([H, T, D]), and as lse; or null.
    float *dquery_sums, *norms;
};
void attention_forward(const AttentionArgs& args, cudaStream_t stream);
void attention_backward(const AttentionArgs& args, cudaStream_t stream);
// The keys that backward holds at a time, on the current device.
int attention_backward_keys(const AttentionArgs& args);

#ifdef FASTBERT_CUDA_KERNELS
namespace {

// What a kernel has to look at. General: masks, lengths per query, and dropout if there is any.
enum class Variant { plain, dropout, general };

constexpr int kMaxWarps = 8;
constexpr int kStep = 32;  // keys of a step in forward, queries in backward
constexpr int kHeaderBytes = 256;
constexpr float kOff = -INFINITY;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kSlack = 8;  // how much larger than its reference a score may be, as an exponent of 2
// Up to here the logarithm of a row's sum is fine enough to recompute probabilities from: a float's error is 1.5e-5.
constexpr float kFineLse = 256;

// At the start of a block's shared memory.
struct Header {
    int first[kMaxWarps], last[kMaxWarps];  // of narrow()
    int flag;                               // forward: a value is not finite; backward: a lse is coarse
};
static_assert(sizeof(Header) <= kHeaderBytes);

__device__ __forceinline__ int clamp(int x, int low, int high) { return ::min(::max(x, low), high); }

// One head of one sequence.
struct Head {
    unsigned plane, batch, head;  // plane: batch * heads + head
    unsigned start = 0;           // first row, packed
    int queries, all_keys;        // rows
    int keys;                     // those within the length
    int64_t statistics;           // where its rows are in lse

    __device__ __forceinline__ Head(const AttentionArgs& a, unsigned index)
        : plane(index),
          batch(index / static_cast<unsigned>(a.heads)),
          head(index % static_cast<unsigned>(a.heads)),
          queries(a.queries),
          all_keys(a.keys),
          statistics(int64_t{index} * a.queries) {
        if (a.cu_seqlens) {
            start = a.cu_seqlens[batch];
            queries = all_keys = a.cu_seqlens[batch + 1] - static_cast<int>(start);
            statistics = head * a.tokens + start;
        }
        keys = all_keys;
        if (a.lengths && !a.lengths_per_query) keys = clamp(a.lengths[batch], 0, all_keys);
    }
    template <class T>
    __device__ __forceinline__ T* rows(const Sequences& s) const {
        return static_cast<T*>(s.data) + ptx::opaque(batch) * s.batch + start * s.row + head * s.head;
    }
    __device__ __forceinline__ RowKeys dropout_keys(const AttentionArgs& a, int query) const {
        return row_keys(*a.dropout.seed, plane, static_cast<uint32_t>(query));
    }
};

// What is added to the score of a query and a key: -inf where the key is off.
struct Mask {
    const void* data;
    MaskKind kind;
    int64_t row, key;        // strides
    const int32_t* lengths;  // [Sq] or null
    int queries, keys;

    __device__ __forceinline__ Mask(const AttentionArgs& a, const Head& head)
        : kind(a.mask_kind),
          row(a.mask_stride[2]),
          key(a.mask_stride[3]),
          lengths(a.lengths_per_query ? a.lengths + static_cast<int64_t>(head.batch) * a.queries : nullptr),
          queries(head.queries),
          keys(head.keys) {
        const int64_t offset = head.batch * a.mask_stride[0] + head.head * a.mask_stride[1];
        data = static_cast<const char*>(a.mask) + offset * (kind == MaskKind::boolean ? 1 : 4);
    }
    __device__ __forceinline__ float at(int query, int k) const {
        if (query >= queries || k >= keys || (lengths && k >= lengths[query])) return kOff;
        if (kind == MaskKind::none) return 0;
        const int64_t offset = query * row + k * key;
        if (kind == MaskKind::boolean) return static_cast<const uint8_t*>(data)[offset] ? 0.0f : kOff;
        return static_cast<const float*>(data)[offset];
    }
};

// For masks that are the same for all queries: from the first to the last key that is on.
__device__ __forceinline__ void narrow(const Mask& mask, Header& header, int& begin, int& end) {
    int first = end, last = 0;
    for (int key = threadIdx.x; key < end; key += blockDim.x)
        if (mask.at(0, key) != kOff) first = ::min(first, key), last = key + 1;
#pragma unroll
    for (int bits = kWarp / 2; bits; bits /= 2) {
        first = ::min(first, __shfl_xor_sync(kFullWarp, first, bits));
        last = ::max(last, __shfl_xor_sync(kFullWarp, last, bits));
    }
    if (lane_of_warp() == 0) header.first[threadIdx.x / kWarp] = first, header.last[threadIdx.x / kWarp] = last;
    __syncthreads();
    begin = end, end = 0;
    for (unsigned i = 0; i < blockDim.x / kWarp; ++i) {
        begin = ::min(begin, header.first[i]);
        end = ::max(end, header.last[i]);
    }
    begin = begin / kStep * kStep;
}

// Starts copying `count` rows from `first` on to the rows of a tile from `to` on; zeros where !on(row).
template <class T, int D, class On>
__device__ __forceinline__ void copy_rows(const Tile<T, D>& tile, int to, const T* rows, int64_t stride, int first,
                                          int count, int thread, int threads, const On& on) {
#pragma unroll 1
    for (int i = thread; i < count * tile.kPieces; i += threads) {
        const int row = i / tile.kPieces, piece = i % tile.kPieces;
        const bool valid = on(first + row);
        ptx::cp_async<16>(tile.piece(to + row, piece),
                          rows + (valid ? first + row : 0) * stride + piece * tile.kPerPiece, valid);
    }
}

// Writes `count` rows of a tile from `from` on, by one warp.
template <class T, int D>
__device__ __forceinline__ void write_rows(const Tile<T, D>& tile, int from, T* rows, int64_t stride, int count) {
    for (int i = lane_of_warp(); i < count * tile.kPieces; i += kWarp) {
        const int row = i / tile.kPieces, piece = i % tile.kPieces;
        *reinterpret_cast<uint4*>(rows + row * stride + piece * tile.kPerPiece) =
            *reinterpret_cast<const uint4*>(tile.piece(from + row, piece));
    }
}

// Zeros in the rows first to last - 1.
template <class T, int D>
__device__ __forceinline__ void zero_rows(T* rows, int64_t stride, int first, int last) {
    constexpr int kPieces = Tile<T, D>::kPieces;
    for (int64_t i = threadIdx.x; i < int64_t{last - first} * kPieces; i += blockDim.x)
        *reinterpret_cast<uint4*>(rows + (first + i / kPieces) * stride + i % kPieces * Tile<T, D>::kPerPiece) = {};
}

// Zeros what is not finite in rows of a tile; returns whether there was anything.
template <class T, int D>
__device__ __forceinline__ bool clean_rows(const Tile<T, D>& tile, int first, int count) {
    constexpr uint32_t kHigh = sizeof(T) == 4 ? 0x7f800000u : std::is_same_v<T, __half> ? 0x7c000000u : 0x7f800000u;
    bool found = false;
    for (int i = threadIdx.x; i < count * tile.kPieces * 4; i += blockDim.x) {
        auto& word =
            reinterpret_cast<uint32_t*>(tile.piece(first + i / (tile.kPieces * 4), i / 4 % tile.kPieces))[i % 4];
        uint32_t clean = word;
        if ((clean & kHigh) == kHigh) clean &= sizeof(T) == 4 ? 0u : 0xffffu;
        if (sizeof(T) == 2 && (clean & kHigh >> 16) == kHigh >> 16) clean &= 0xffff0000u;
        if (clean != word) {
            word = clean;
            found = true;
        }
    }
    return found;
}

// Sums over the four lanes of a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

// Bits, shifted up by 16 for an even column, are kept if they are larger than this: threshold <= bits >> 16.
__device__ __forceinline__ uint32_t dropout_cut(const AttentionArgs& a) { return (a.dropout.threshold << 16) - 1; }

// --- forward ---

template <class T, int D>
struct ForwardShape {
    static constexpr int M = sizeof(T) == 2 && D <= 64 ? 2 : 1;
    static constexpr int kRows = 16 * M;                     // queries of a warp
    static constexpr int kStage = sizeof(T) == 2 ? 64 : 32;  // keys of a tile
    static constexpr int kRowBytes = Tile<T, D>::kRowBytes;
    static constexpr int kTileBytes = kStage * kRowBytes;
    static constexpr int kStageBytes = 2 * kTileBytes + kStage * 4;  // keys, values, what is added to scores
    // Queries, then results; in float the probabilities of a step.
    static constexpr int kProbabilityBytes = sizeof(T) == 4 ? kRows * kStep * 4 : 0;
    static constexpr int kWarpBytes = kRows * kRowBytes + kProbabilityBytes;
    static constexpr int bytes(int warps, int stages) {
        return kHeaderBytes + stages * kStageBytes + warps * kWarpBytes;
    }
};

struct ForwardPlan {
    int warps, stages, shared_bytes;
    int blocks, rows;  // blocks of a head, and queries of a block
};

// NaN in the results to which a value that is not finite contributes: it was made zero for the sake of queries that do
// not see it.
template <class T, int D, int M>
__device__ void spread_bad_values(const AttentionArgs& a, const Head& head, const Mask& mask, int end, int first,
                                  Product<M, D / 8>& o) {
    const int g = lane_of_warp() / 4, t = lane_of_warp() % 4;
    const T* values = head.rows<const T>(a.value);
    for (int key = 0; key < end; ++key)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (mask.at(first + 16 * m + 8 * h + g, key) == kOff) continue;
#pragma unroll
                for (int n = 0; n < D / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const auto value = static_cast<float>(values[key * a.value.row + 8 * n + 2 * t + e]);
                        if (!(value - value == 0)) o[m][n][2 * h + e] = NAN;
                    }
            }
}

template <class T, int D, Variant kVariant>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1)
    forward_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ ForwardPlan plan) {
    using Shape = ForwardShape<T, D>;
    constexpr int M = Shape::M, N = kStep / 8, kStage = Shape::kStage;
    constexpr bool kGeneral = kVariant == Variant::general;
    FASTBERT_DYNAMIC_SHARED(memory);
    const int lane = lane_of_warp(), g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarp;
    const Head head(a, blockIdx.x / plan.blocks);
    const int block_first = static_cast<int>(blockIdx.x % plan.blocks) * plan.rows;
    if (block_first >= head.queries) return;
    const int block_last = ::min(head.queries - block_first, plan.rows) + block_first;
    const Mask mask(a, head);
    const bool by_query = kGeneral && a.by_query, by_key = kGeneral && !a.by_query;
    const bool drop = kVariant == Variant::dropout || (kGeneral && a.dropout.threshold);

    auto& header = *reinterpret_cast<Header*>(memory);
    unsigned char* const stages = memory + kHeaderBytes;
    const Tile<T, D> own{stages + plan.stages * Shape::kStageBytes + warp * Shape::kWarpBytes};
    const Tile<T, kStep> own_probabilities{own.data + Shape::kRows * Shape::kRowBytes};
    const auto keys_at = [&](int slot) { return Tile<T, D>{stages + slot * Shape::kStageBytes}; };
    const auto values_at = [&](int slot) { return Tile<T, D>{keys_at(slot).data + Shape::kTileBytes}; };
    const auto added_at = [&](int slot) {
        return reinterpret_cast<float*>(keys_at(slot).data + 2 * Shape::kTileBytes);
    };

    int begin = 0, end = head.keys;
    if constexpr (kGeneral) {
        if (threadIdx.x == 0) header.flag = 0;
        if (by_key) narrow(mask, header, begin, end);
    }
    const int tiles = end > begin ? (end - begin + kStage - 1) / kStage : 0;
    const bool resident = tiles <= plan.stages;
    const auto slot_of = [&](int tile) { return resident ? tile : tile % 2; };
    // Whole steps: a step's keys past the end are zeros.
    const auto count_of = [&](int first) { return ::min(kStage, (end - first + kStep - 1) / kStep * kStep); };
    const auto load_tile = [&](int tile) {
        const int first = begin + tile * kStage, slot = slot_of(tile);
        const auto on = [&](int key) { return key < end && (!by_key || mask.at(0, key) != kOff); };
        copy_rows(keys_at(slot), 0, head.rows<const T>(a.key), a.key.row, first, count_of(first), threadIdx.x,
                  blockDim.x, on);
        copy_rows(values_at(slot), 0, head.rows<const T>(a.value), a.value.row, first, count_of(first), threadIdx.x,
                  blockDim.x, on);
        if (by_key)
            for (int i = threadIdx.x; i < kStage; i += blockDim.x) added_at(slot)[i] = mask.at(0, first + i);
    };

    // Scores times `unit` are exponents of 2. In general they are scaled before the mask is added, else the scale is
    // part of the unit: a negative one by its sign in q, zero as a tiny one, so that -inf stays what it is.
    const bool negative = a.scale < 0;
    const float magnitude = fmaxf(fabsf(a.scale), 1e-30f);
    const float unit = kGeneral ? kLog2E : magnitude * kLog2E;
    const float slack = kSlack / unit;
    const uint32_t cut = dropout_cut(a);

    for (int pass = block_first; pass < block_last; pass += blockDim.x / kWarp * Shape::kRows) {
        const int first_row = pass + warp * Shape::kRows;
        const bool active = first_row < block_last, first_pass = pass == block_first;
        copy_rows(own, 0, head.rows<const T>(a.query), a.query.row, first_row, Shape::kRows, lane, kWarp,
                  [&](int row) { return row < head.queries; });
        ptx::cp_async_commit();
        if (tiles && (first_pass || !resident)) load_tile(0);
        ptx::cp_async_commit();
        if (resident && first_pass) {
            for (int tile = 1; tile < tiles; ++tile) load_tile(tile);
            ptx::cp_async_commit();
        }
        HeldRows<T, M, D> q;
        RowKeys keys[M][2];
        float level[M][2], sum[M][2];  // of a row: what scores are compared with; its sum, this thread's part
        Product<M, D / 8> o = {};
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                level[m][h] = kOff, sum[m][h] = 0;
                if (drop) keys[m][h] = head.dropout_keys(a, first_row + 16 * m + 8 * h + g);
            }

#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            const int tile_first = begin + tile * kStage, slot = slot_of(tile);
            bool arrived = !resident;
            if (!resident) {
                if (tile + 1 < tiles) load_tile(tile + 1);
                ptx::cp_async_commit();
                ptx::cp_async_wait<1>();
                __syncthreads();
            } else if (first_pass && tile < 2) {
                if (tile == 0)
                    ptx::cp_async_wait<1>();
                else
                    ptx::cp_async_wait<0>();
                __syncthreads();
                arrived = true;
            } else if (tile == 0) {
                ptx::cp_async_wait<0>();
                __syncwarp();
            }
            if (by_query && arrived) {
                // Resident: the second barrier was for all tiles but the first.
                const int last = resident && tile == 1 ? tiles : tile + 1;
                bool found = false;
                for (int i = tile; i < last; ++i)
                    found |= clean_rows(values_at(slot_of(i)), 0, count_of(begin + i * kStage));
                if (found) header.flag = 1;
                __syncthreads();
            }
            if (active && tile == 0) {
                if (negative) {
                    for (int i = lane; i < Shape::kRows * Shape::kRowBytes / 4; i += kWarp)
                        reinterpret_cast<uint32_t*>(own.data)[i] ^= sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
                    __syncwarp();
                }
                q.load(own, 0);
            }

#pragma unroll 1
            for (int at = 0; active && at < count_of(tile_first); at += kStep) {
                const int first = tile_first + at;
                Product<M, N> s = {};
                multiply_transposed(s, q, keys_at(slot), at);
                if constexpr (kGeneral) {
                    const float* added = added_at(slot) + at + 2 * t;
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int n = 0; n < N; ++n)
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                float& score = s[m][n][i];
                                score *= magnitude;
                                float b;
                                if (by_query) {
                                    b = mask.at(first_row + 16 * m + i / 2 * 8 + g, first + 8 * n + 2 * t + i % 2);
                                    score += score - score;  // NaN, of a key that is not finite
                                } else {
                                    b = added[8 * n + i % 2];
                                }
                                score = b == kOff ? kOff : score + b;
                            }
                } else if (first + kStep > end) {
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int n = 0; n < N; ++n)
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                if (first + 8 * n + 2 * t + i % 2 >= end) s[m][n][i] = kOff;
                }

                float top[M][2];
                bool larger = false;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        top[m][h] = kOff;
#pragma unroll
                        for (int n = 0; n < N; ++n)
                            top[m][h] = fmaxf(top[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                        top[m][h] = row_max(top[m][h]);
                        larger |= top[m][h] > level[m][h] + slack;
                    }
                if (__any_sync(kFullWarp, larger)) {
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const float higher = fmaxf(level[m][h], top[m][h]);
                            const float factor =
                                higher == level[m][h] ? 1.0f : ptx::exp2((level[m][h] - higher) * unit);
                            level[m][h] = higher;
                            if (first == begin) continue;
                            sum[m][h] *= factor;
#pragma unroll
                            for (int n = 0; n < D / 8; ++n) o[m][n][2 * h] *= factor, o[m][n][2 * h + 1] *= factor;
                        }
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float reference = level[m][h] == kOff ? 0.0f : level[m][h];
                        const float shift = reference * unit;
#pragma unroll
                        for (int n = 0; n < N; ++n) {
                            float &p0 = s[m][n][2 * h], &p1 = s[m][n][2 * h + 1];
                            if constexpr (kGeneral) {  // a large mask times log2(e) may overflow, a difference does not
                                p0 = ptx::exp2((p0 - reference) * unit);
                                p1 = ptx::exp2((p1 - reference) * unit);
                            } else {
                                p0 = ptx::exp2(fmaf(p0, unit, -shift));
                                p1 = ptx::exp2(fmaf(p1, unit, -shift));
                            }
                            sum[m][h] += p0 + p1;
                            if (drop) {
                                const uint32_t bits =
                                    pair_bits(keys[m][h], static_cast<uint32_t>(first / 2 + 4 * n + t));
                                p0 = bits << 16 > cut ? p0 : 0.0f;
                                p1 = bits > cut ? p1 : 0.0f;
                            }
                        }
                    }
                if constexpr (sizeof(T) == 4) __syncwarp();  // the last step's probabilities have been read
                const LeftProduct<T, M, kStep> p(s, own_probabilities, 0);
                multiply(o, p, values_at(slot), at);
            }
            if (!resident) __syncthreads();
        }

        if (!active) continue;
        if (by_query && tiles && header.flag) spread_bad_values<T, D, M>(a, head, mask, end, first_row, o);
        __syncwarp();  // the queries have been read
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float total = row_sum(sum[m][h]);
                const float factor = total == 0 ? 0.0f : (drop ? a.dropout.scale : 1.0f) / total;
#pragma unroll
                for (int n = 0; n < D / 8; ++n)
                    own.store_pair(16 * m + 8 * h + g, 8 * n + 2 * t, o[m][n][2 * h] * factor,
                                   o[m][n][2 * h + 1] * factor);
                const int row = first_row + 16 * m + 8 * h + g;
                if (t == 0 && row < head.queries)
                    a.lse[head.statistics + row] =
                        total == 0 ? INFINITY : level[m][h] * (kGeneral ? 1.0f : magnitude) + logf(total);
            }
        __syncwarp();
        write_rows(own, 0, head.rows<T>(a.out) + first_row * a.out.row, a.out.row,
                   ::min(Shape::kRows, head.queries - first_row));
        __syncwarp();
    }
}

// --- backward ---

// Head and mask are kept here, out of the way: registers are for accumulators.
struct BackwardHeader : Header {
    Head head;
    Mask mask;
    int begin, end;  // the keys to visit
};
static_assert(sizeof(BackwardHeader) <= kHeaderBytes);

template <class T, int D, Variant kVariant>
struct BackwardShape {
    static constexpr int M = sizeof(T) == 2 && D <= 64 && kVariant != Variant::general ? 2 : 1;
    static constexpr int kKeys = 16 * M;  // of a warp
    static constexpr int kRowBytes = Tile<T, D>::kRowBytes;
    static constexpr int kQueryBytes = kStep * kRowBytes;
    // Steps held at a time: the next one comes while one is worked on, where there is room.
    static constexpr int kSlots = sizeof(T) == 4 && D == 128 ? 1 : 2;
    // Where things are in shared memory. Of a step: queries, gradients; lse, dropout keys. Two partial sums of each
    // query and warp. Then what depends on the number of warps: keys, values, ds, what is added to scores; last, where
    // there are several chunks, the results of a step.
    static constexpr int kGrad = kHeaderBytes + kSlots * kQueryBytes;
    static constexpr int kLse = kGrad + kSlots * kQueryBytes;
    static constexpr int kDropoutKeys = kLse + kSlots * kStep * 4;
    static constexpr int kDeltas = kDropoutKeys + kSlots * kStep * 8;
    static constexpr int kTotals = kDeltas + kMaxWarps * kStep * 4;
    static constexpr int kAllKeys = kTotals + kMaxWarps * kStep * 4;
    static constexpr int kWarpBytes = 2 * kKeys * kRowBytes + kKeys * kStep * static_cast<int>(sizeof(T)) + kKeys * 4;
    static constexpr int bytes(int warps, bool chunked) {
        return kAllKeys + warps * kWarpBytes + (chunked ? kSlots * kQueryBytes : 0);
    }
};

struct BackwardPlan {
    int warps, keys, shared_bytes;
    bool chunked;  // some rows may be longer than the keys that a block holds
};

template <class T, int D, Variant kVariant>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1)
    backward_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ BackwardPlan plan) {
    using Shape = BackwardShape<T, D, kVariant>;
    constexpr int M = Shape::M, N = kStep / 8, kKeys = Shape::kKeys;
    constexpr bool kGeneral = kVariant == Variant::general;
    FASTBERT_DYNAMIC_SHARED(memory);
    const int warp = threadIdx.x / kWarp;
    const int warps = plan.warps, chunk = plan.keys;
    auto& header = *reinterpret_cast<BackwardHeader*>(memory);
    if (threadIdx.x == 0) {
        header.head = Head(a, blockIdx.x);
        header.mask = Mask(a, header.head);
    }
    __syncthreads();
    const Head& head = header.head;
    const Mask& mask = header.mask;
    const bool by_query = kGeneral && a.by_query, by_key = kGeneral && !a.by_query;
    const bool drop = kVariant == Variant::dropout || (kGeneral && a.dropout.threshold);

    const auto query_at = [&](int slot) { return Tile<T, D>{memory + kHeaderBytes + slot * Shape::kQueryBytes}; };
    const auto grad_at = [&](int slot) { return Tile<T, D>{memory + Shape::kGrad + slot * Shape::kQueryBytes}; };
    auto* const lse = reinterpret_cast<float*>(memory + Shape::kLse);
    auto* const dropout_keys = reinterpret_cast<RowKeys*>(memory + Shape::kDropoutKeys);
    auto* const deltas = reinterpret_cast<float*>(memory + Shape::kDeltas);  // [warps, queries]
    auto* const totals = reinterpret_cast<float*>(memory + Shape::kTotals);
    const Tile<T, D> keys{memory + Shape::kAllKeys}, values{keys.data + chunk * Shape::kRowBytes};
    const Tile<T, kStep> ds_tile{values.data + chunk * Shape::kRowBytes};  // [keys, queries]
    auto* const added = reinterpret_cast<float*>(ds_tile.data + chunk * ds_tile.kRowBytes);
    const auto out_at = [&](int slot) {
        return Tile<T, D>{memory + Shape::kAllKeys + warps * Shape::kWarpBytes + slot * Shape::kQueryBytes};
    };

    if constexpr (kGeneral) {
        int begin = 0, end = head.keys;
        if (by_key) narrow(mask, header, begin, end);
        if (threadIdx.x == 0) header.begin = begin, header.end = end;
        __syncthreads();
    }
    const int begin = kGeneral ? header.begin : 0;
    const int& end = kGeneral ? header.end : head.keys;
    const bool one_chunk = end - begin <= chunk;
    const int visited = end > begin ? (end - begin + chunk - 1) / chunk * chunk : 0;
    const int unvisited = ::min(begin + visited, head.all_keys);
    zero_rows<T, D>(head.rows<T>(a.dkey), a.dkey.row, 0, ::min(begin, head.all_keys));
    zero_rows<T, D>(head.rows<T>(a.dvalue), a.dvalue.row, 0, ::min(begin, head.all_keys));
    zero_rows<T, D>(head.rows<T>(a.dkey), a.dkey.row, unvisited, head.all_keys);
    zero_rows<T, D>(head.rows<T>(a.dvalue), a.dvalue.row, unvisited, head.all_keys);
    if (end <= begin) return zero_rows<T, D>(head.rows<T>(a.dquery), a.dquery.row, 0, head.queries);

    const auto load_step = [&](int step) {
        const int slot = step % Shape::kSlots, first = ptx::opaque(step) * kStep;
        const auto on = [&](int row) { return row < head.queries; };
        const auto load = [&](const Tile<T, D>& tile, const Sequences& s) {
            copy_rows(tile, 0, head.rows<const T>(s), s.row, first, kStep, threadIdx.x, blockDim.x, on);
        };
        load(query_at(slot), a.query);
        load(grad_at(slot), a.grad);
        if (!one_chunk) load(out_at(slot), a.out);
        if (threadIdx.x < kStep) {
            const int row = first + threadIdx.x;
            ptx::cp_async<4>(lse + slot * kStep + threadIdx.x, a.lse + head.statistics + (on(row) ? row : 0), on(row));
            if (drop) dropout_keys[slot * kStep + threadIdx.x] = head.dropout_keys(a, row);
        }
        ptx::cp_async_commit();
    };

    const uint32_t cut = dropout_cut(a);
    const float keep_scale = drop ? a.dropout.scale : 1.0f;
    const auto coarse = [](float x) { return fabsf(x) > kFineLse && fabsf(x) < INFINITY; };

    // Rows in several chunks whose lse is coarse: a sweep that finds the sums of their probabilities as recomputed.
    bool recount = false;
    if constexpr (kGeneral) {
        if (!one_chunk) {
            if (threadIdx.x == 0) header.flag = 0;
            __syncthreads();
            for (int row = threadIdx.x; row < head.queries; row += blockDim.x)
                if (coarse(a.lse[head.statistics + row])) header.flag = 1;
            __syncthreads();
            recount = header.flag;
        }
    }

#pragma unroll 1
    for (int sweep = recount ? 0 : 1; sweep < 2; ++sweep)
#pragma unroll 1
        for (int chunk_first = begin; chunk_first < end; chunk_first += chunk) {
            // From here on keys are counted from the chunk's first: `left` of them, this warp's from own_first on.
            const int left = ::min(chunk, end - chunk_first), own_first = warp * kKeys;
            const auto whole = [&] { return (left + kKeys - 1) / kKeys * kKeys; };
            __syncthreads();  // the last chunk has been read
            {
                const auto on = [&](int key) { return key < end && (!by_key || mask.at(0, key) != kOff); };
                copy_rows(keys, 0, head.rows<const T>(a.key), a.key.row, chunk_first, whole(), threadIdx.x, blockDim.x,
                          on);
                copy_rows(values, 0, head.rows<const T>(a.value), a.value.row, chunk_first, whole(), threadIdx.x,
                          blockDim.x, on);
                if (by_key)
                    for (int i = threadIdx.x; i < chunk; i += blockDim.x) added[i] = mask.at(0, chunk_first + i);
            }
            if (head.queries > 0) load_step(0);
            Product<M, D / 8> dk = {}, dv = {};

#pragma unroll 1
            for (int step = 0; step * kStep < head.queries; ++step) {
                const int slot = step % Shape::kSlots, lane = own_lane(), g = lane / 4, t = lane % 4;
                const Tile<T, D> query = query_at(slot), grad = grad_at(slot);
                ptx::cp_async_wait<0>();
                __syncthreads();
                if (by_query && step == 0) {
                    clean_rows(keys, 0, whole());
                    __syncthreads();
                }
                const auto load_next = [&] {
                    if ((step + 1) * kStep < head.queries) load_step(step + 1);
                };
                if (Shape::kSlots == 2) load_next();

                // Transposed, [keys, queries]: scores, then p, with its sign set where it is dropped; dp, 0 there.
                Product<M, N> p = {}, dp = {};
                if (own_first < left) {
                    multiply_transposed(p, LeftRows<T, M, D>{keys, own_first}, query, 0);
                    const bool partial = own_first + kKeys > left;
                    const bool odd = g % 2;  // the parity of this thread's keys, and of the queries that it hashes
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const float2 row_lse = *reinterpret_cast<const float2*>(lse + slot * kStep + 8 * n + 2 * t);
                        RowKeys row_keys{};
                        if (drop) row_keys = dropout_keys[slot * kStep + 8 * n + 2 * t + odd];
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int h = 0; h < 2; ++h) {
                                const int key = own_first + 16 * m + 8 * h + g;
                                bool kept[2] = {true, true};
                                if (drop) {
                                    // Lanes g and g ^ 1 hold neighbouring keys: each hashes for one of two queries.
                                    const uint32_t mine =
                                        pair_bits(row_keys, static_cast<uint32_t>(chunk_first + key) >> 1);
                                    const uint32_t other = __shfl_xor_sync(kFullWarp, mine, 4);
                                    const int up = odd ? 0 : 16;
                                    kept[0] = (odd ? other : mine) << up > cut;
                                    kept[1] = (odd ? mine : other) << up > cut;
                                }
#pragma unroll
                                for (int e = 0; e < 2; ++e) {
                                    float& x = p[m][n][2 * h + e];
                                    const float l = e ? row_lse.y : row_lse.x;
                                    if constexpr (kGeneral) {
                                        const float b =
                                            by_query ? mask.at(step * kStep + 8 * n + 2 * t + e, chunk_first + key)
                                                     : added[key];
                                        x = b == kOff ? 0.0f : ptx::exp2((fmaf(x, a.scale, b) - l) * kLog2E);
                                    } else {
                                        x = ptx::exp2(fmaf(x, a.scale * kLog2E, -l * kLog2E));
                                        if (partial) x = key < left ? x : 0.0f;
                                    }
                                    if (drop && !kept[e]) x = -x;
                                }
                            }
                    }
                    multiply_transposed(dp, LeftRows<T, M, D>{values, own_first}, grad, 0);
                    if (drop || by_query) {
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int n = 0; n < N; ++n)
#pragma unroll
                                for (int i = 0; i < 4; ++i) {
                                    const float x = p[m][n][i];
                                    // By query: a value that is off may be anything.
                                    if ((drop && x < 0) || (by_query && x == 0)) dp[m][n][i] = 0;
                                }
                    }
                }

                if (!one_chunk) {
                    // delta of each query: a row's pieces lie in neighbouring lanes.
                    const Tile<T, D> out = out_at(slot);
                    for (int i = threadIdx.x; i < kStep * out.kPieces; i += blockDim.x) {
                        const int row = i / out.kPieces, piece = i % out.kPieces;
                        const auto* o = reinterpret_cast<const T*>(out.piece(row, piece));
                        const auto* d = reinterpret_cast<const T*>(grad.piece(row, piece));
                        float sum = 0;
#pragma unroll
                        for (int k = 0; k < out.kPerPiece; ++k)
                            sum = fmaf(static_cast<float>(o[k]), static_cast<float>(d[k]), sum);
#pragma unroll
                        for (int bits = out.kPieces / 2; bits; bits /= 2) sum += __shfl_xor_sync(kFullWarp, sum, bits);
                        if (piece == 0) deltas[row] = keep_scale > 0 ? sum / keep_scale : 0.0f;
                    }
                }
                // Sums over this warp's keys: after the exchange lane (g, t) has that of query own_query.
                const int own_query = lane / 8 * 8 + 2 * t + g % 2;
                const auto sum_keys = [&](float* to, const auto& term) {
                    float sums[2 * N] = {};
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int n = 0; n < N; ++n)
#pragma unroll
                            for (int i = 0; i < 4; ++i) sums[2 * n + i % 2] += term(m, n, i);
#pragma unroll
                    for (int half = N, bits = 16; half; half /= 2, bits /= 2) {
                        const bool upper = lane & bits;
#pragma unroll
                        for (int i = 0; i < half; ++i) {
                            const float sent = upper ? sums[i] : sums[i + half];
                            sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(kFullWarp, sent, bits);
                        }
                    }
                    to[warp * kStep + own_query] = sums[0];
                };
                if (one_chunk) sum_keys(deltas, [&](int m, int n, int i) { return fabsf(p[m][n][i]) * dp[m][n][i]; });
                if (kGeneral && (one_chunk || sweep == 0))
                    sum_keys(totals, [&](int m, int n, int i) { return fabsf(p[m][n][i]); });
                __syncthreads();

                if (kGeneral && sweep == 0) {
                    const int row = step * kStep + static_cast<int>(threadIdx.x);
                    if (threadIdx.x < kStep && row < head.queries) {
                        float total = chunk_first == begin ? 0.0f : a.norms[head.statistics + row];
                        for (int i = 0; i < warps; ++i) total += totals[i * kStep + threadIdx.x];
                        a.norms[head.statistics + row] = total;
                    }
                    if (Shape::kSlots == 1) load_next();
                    continue;
                }
                if (own_first < left) {
                    float2 delta[N] = {};
                    for (int i = 0; i < (one_chunk ? warps : 1); ++i)
#pragma unroll
                        for (int n = 0; n < N; ++n) {
                            const float2 part = *reinterpret_cast<const float2*>(deltas + i * kStep + 8 * n + 2 * t);
                            delta[n].x += part.x, delta[n].y += part.y;
                        }
#pragma unroll
                    for (int n = 0; n < N; ++n) {
                        const int column = 8 * n + 2 * t;
                        float factor[2] = {1, 1};
                        if constexpr (kGeneral) {
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int row = step * kStep + column + e;
                                if (!coarse(lse[slot * kStep + column + e]) || row >= head.queries) continue;
                                float total = 0;
                                if (!one_chunk)
                                    total = a.norms[head.statistics + row];
                                else
                                    for (int i = 0; i < warps; ++i) total += totals[i * kStep + column + e];
                                factor[e] = total == 0 ? 0.0f : 1.0f / total;
                                if (one_chunk) (e ? delta[n].y : delta[n].x) *= factor[e];
                            }
                        }
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                float &x = p[m][n][i], &dx = dp[m][n][i];
                                if constexpr (kGeneral) x *= factor[i % 2];
                                dx = fabsf(x) * (dx - (i % 2 ? delta[n].y : delta[n].x));
                                // What is off gets nothing of a gradient that is NaN.
                                if constexpr (kGeneral) dx = x == 0 ? 0.0f : dx;
                                if (drop) x = x < 0 ? 0.0f : x;
                            }
                    }
                    {
                        const LeftProduct<T, M, kStep> operand(p, ds_tile, own_first);
                        multiply(dv, operand, grad, 0);
                    }
                    if constexpr (sizeof(T) == 4)
                        __syncwarp();  // p has been read
                    else
                        store_product(dp, ds_tile, own_first);
                    const LeftProduct<T, M, kStep> operand(dp, ds_tile, own_first);
                    multiply(dk, operand, query, 0);
                }
                __syncthreads();
                if (Shape::kSlots == 1) load_next();

                const bool first_chunk = chunk_first == begin, last_chunk = chunk_first + left == end;
                for (int task = ptx::opaque(warp); task < 2 * (D / 16); task += warps) {
                    const int queries_at = task % 2 * 16, column = task / 2 * 16;
                    Product<1, 2> dq = {};
                    multiply_columns(dq, ds_tile, queries_at, keys, column, (left + 15) / 16 * 16);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int row = step * kStep + queries_at + 8 * h + g;
                        if (row >= head.queries) continue;
#pragma unroll
                        for (int n = 0; n < 2; ++n) {
                            const int at = column + 8 * n + 2 * t;
                            float2 pair = {dq[0][n][2 * h], dq[0][n][2 * h + 1]};
                            auto* const sums = reinterpret_cast<float2*>(
                                first_chunk && last_chunk ? nullptr : a.dquery_sums + (head.statistics + row) * D + at);
                            if (!first_chunk) pair.x += sums->x, pair.y += sums->y;
                            if (!last_chunk) {
                                *sums = pair;
                                continue;
                            }
                            pair.x *= a.scale * keep_scale, pair.y *= a.scale * keep_scale;
                            T* const to = head.rows<T>(a.dquery) + row * a.dquery.row + at;
                            if constexpr (sizeof(T) == 4)
                                *reinterpret_cast<float2*>(to) = pair;
                            else
                                *reinterpret_cast<uint32_t*>(to) = pack<T>(pair.x, pair.y);
                        }
                    }
                }
            }

            if (sweep == 0) continue;
            // Through the warp's own values, which nobody reads any more.
            ptx::cp_async_wait<0>();
            if (head.queries == 0) __syncthreads();
            const auto store = [&](const Product<M, D / 8>& x, float factor, const Sequences& to) {
                const int lane = own_lane(), g = lane / 4, t = lane % 4;
                __syncwarp();
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int row = own_first + 16 * m + 8 * h + g;
                        const bool on = row < left && !(by_key && added[row] == kOff);
#pragma unroll
                        for (int n = 0; n < D / 8; ++n)
                            values.store_pair(row, 8 * n + 2 * t, on ? x[m][n][2 * h] * factor : 0.0f,
                                              on ? x[m][n][2 * h + 1] * factor : 0.0f);
                    }
                __syncwarp();
                write_rows(values, own_first, head.rows<T>(to) + (chunk_first + own_first) * to.row, to.row,
                           clamp(head.all_keys - chunk_first - own_first, 0, kKeys));
            };
            store(dv, keep_scale, a.dvalue);
            store(dk, keep_scale * a.scale, a.dkey);
        }
}

// --- launches ---

unsigned grid_of(int64_t blocks) {
    if (blocks > 0x7fffffff) throw std::runtime_error("fastbert: attention needs more blocks than a grid has");
    return static_cast<unsigned>(blocks);
}
void check_fits(int bytes, int limit) {
    if (bytes > limit)
        throw std::runtime_error("fastbert: attention needs " + std::to_string(bytes) +
                                 " bytes of shared memory a block; this device has " + std::to_string(limit));
}
int shared_limit() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

template <class Shape>
ForwardPlan forward_plan(const AttentionArgs& a) {
    const int limit = shared_limit();
    ForwardPlan plan{};
    plan.warps = static_cast<int>(std::clamp<int64_t>(ceil_div(a.queries, Shape::kRows), 1, kMaxWarps));
    // All keys, if they fit beside the queries of these warps; else two tiles.
    const int64_t tiles = std::max<int64_t>(1, ceil_div(a.keys, Shape::kStage));
    const bool resident = tiles < 1024 && Shape::bytes(plan.warps, static_cast<int>(tiles)) <= limit;
    plan.stages = resident ? static_cast<int>(tiles) : 2;
    while (plan.warps > 1 && Shape::bytes(plan.warps, plan.stages) > limit) --plan.warps;
    plan.shared_bytes = Shape::bytes(plan.warps, plan.stages);
    check_fits(plan.shared_bytes, limit);
    // A block keeps its keys for all queries of its head, unless there are too few heads to fill the device.
    const int pass = plan.warps * Shape::kRows;
    const int64_t passes = ceil_div(a.queries, pass);
    const bool whole = resident && a.batch * a.heads >= 2 * device_attribute(cudaDevAttrMultiProcessorCount);
    plan.blocks = whole ? 1 : static_cast<int>(passes);
    plan.rows = whole ? static_cast<int>(passes) * pass : pass;
    return plan;
}

template <class Shape>
BackwardPlan backward_plan(const AttentionArgs& a) {
    const int limit = shared_limit();
    BackwardPlan plan{};
    plan.warps = static_cast<int>(std::clamp<int64_t>(ceil_div(a.keys, Shape::kKeys), 1, kMaxWarps));
    const auto chunked = [&] { return a.keys > plan.warps * Shape::kKeys; };
    while (plan.warps > 1 && Shape::bytes(plan.warps, chunked()) > limit) --plan.warps;
    plan.keys = plan.warps * Shape::kKeys;
    plan.chunked = chunked();
    plan.shared_bytes = Shape::bytes(plan.warps, plan.chunked);
    check_fits(plan.shared_bytes, limit);
    return plan;
}

Variant variant_of(const AttentionArgs& a) {
    // float, whose products take longest, has one kernel for all.
    if (a.dtype == DType::f32 || a.mask_kind != MaskKind::none || a.by_query) return Variant::general;
    return a.dropout.threshold ? Variant::dropout : Variant::plain;
}

// f(element, head size, variant), the last two as types, of a call.
template <class F>
auto dispatch(const AttentionArgs& a, const F& f) {
    const auto variants = [&](auto element, auto size) {
        if constexpr (sizeof(element) == 2) {
            const Variant variant = variant_of(a);
            if (variant == Variant::plain) return f(element, size, std::integral_constant<Variant, Variant::plain>{});
            if (variant == Variant::dropout)
                return f(element, size, std::integral_constant<Variant, Variant::dropout>{});
        }
        return f(element, size, std::integral_constant<Variant, Variant::general>{});
    };
    const auto sizes = [&](auto element) {
        if (a.head_size == 32) return variants(element, std::integral_constant<int, 32>{});
        if (a.head_size == 64) return variants(element, std::integral_constant<int, 64>{});
        return variants(element, std::integral_constant<int, 128>{});
    };
    if (a.dtype == DType::f32) return sizes(float{});
    if (a.dtype == DType::f16) return sizes(__half{});
    return sizes(__nv_bfloat16{});
}

}  // namespace

int attention_backward_keys(const AttentionArgs& a) {
    return dispatch(a, [&](auto element, auto size, auto variant) {
        return backward_plan<BackwardShape<decltype(element), size, variant>>(a).keys;
    });
}

void attention_forward(const AttentionArgs& a, cudaStream_t stream) {
    dispatch(a, [&](auto element, auto size, auto variant) {
        const auto plan = forward_plan<ForwardShape<decltype(element), size>>(a);
        launch("attention", forward_kernel<decltype(element), size, variant>,
               dim3(grid_of(a.batch * a.heads * plan.blocks)), dim3(plan.warps * kWarp), plan.shared_bytes, stream, a,
               plan);
    });
}

void attention_backward(const AttentionArgs& a, cudaStream_t stream) {
    dispatch(a, [&](auto element, auto size, auto variant) {
        const auto plan = backward_plan<BackwardShape<decltype(element), size, variant>>(a);
        launch("attention_backward", backward_kernel<decltype(element), size, variant>,
               dim3(grid_of(a.batch * a.heads)), dim3(plan.warps * kWarp), plan.shared_bytes, stream, a, plan);
    });
}
#endif
}  // namespace fastbert::cuda

#ifdef FASTBERT_CUDA_ADAPTER
#include "adapter.h"

namespace fastbert::cuda {
namespace {

using Optional = std::optional<Tensor>;

// Rows as a kernel reads them: contiguous, and aligned to 16 bytes. A view of a fused projection is taken as it is.
Tensor with_aligned_rows(const Tensor& t) {
    const int64_t dims = t.dim(), size = size_of(dtype_of(t));
    bool as_is = t.stride(dims - 1) == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
    for (int64_t d = 0; d < dims - 1; ++d) as_is &= t.size(d) <= 1 || t.stride(d) * size % 16 == 0;
    if (as_is || t.numel() == 0) return t;
    Tensor copy = new_tensor(t);
    torch::stable::copy_(copy, t);
    return copy;
}

// A call's arguments; it keeps the tensors that were copied alive.
class Call {
public:
    Device device;
    AttentionArgs args{};

    Call(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, const Optional& lengths,
         const Optional& cu_seqlens, int64_t max_seqlen, double scale, double dropout_p, const Optional& seed)
        : device(query) {
        const int64_t dims = cu_seqlens.has_value() ? 3 : 4;
        STD_TORCH_CHECK(query.dim() == dims && key.dim() == dims && value.dim() == dims,
                        "fastbert: attention needs query, key and value of ", dims, " dimensions");
        for (int64_t d = 0; d < dims; ++d)
            STD_TORCH_CHECK(key.size(d) == value.size(d) && (key.size(d) == query.size(d) || (dims == 4 && d == 1)),
                            "fastbert: attention's query, key and value do not fit together");
        args.heads = int_columns(query.size(dims - 2));
        args.head_size = int_columns(query.size(dims - 1));
        STD_TORCH_CHECK(args.head_size == 32 || args.head_size == 64 || args.head_size == 128,
                        "fastbert: head sizes of 32, 64 and 128 are supported, not ", args.head_size);
        args.dtype = dtype_of(query);
        STD_TORCH_CHECK(args.dtype != DType::f64 && dtype_of(key) == args.dtype && dtype_of(value) == args.dtype,
                        "fastbert: attention needs one type of float32, bfloat16 and float16");
        args.query = sequences(query);
        args.key = sequences(key);
        args.value = sequences(value);
        args.scale = static_cast<float>(scale);
        args.dropout = dropout_args(dropout_p, seed);
        if (dims == 3) {
            STD_TORCH_CHECK(!mask.has_value() && !lengths.has_value(),
                            "fastbert: packed sequences take neither mask nor lengths");
            STD_TORCH_CHECK(cu_seqlens->scalar_type() == ScalarType::Int && cu_seqlens->dim() == 1 &&
                                cu_seqlens->size(0) >= 1 && cu_seqlens->is_contiguous(),
                            "fastbert: cu_seqlens must be contiguous int32 [B + 1]");
            args.cu_seqlens = static_cast<const int32_t*>(cu_seqlens->const_data_ptr());
            args.batch = cu_seqlens->size(0) - 1;
            args.tokens = query.size(0);
            args.queries = args.keys = int_columns(max_seqlen);
            return;
        }
        args.batch = query.size(0);
        args.queries = int_columns(query.size(1));
        args.keys = int_columns(key.size(1));
        if (mask.has_value()) take_mask(*mask);
        if (lengths.has_value()) {
            args.lengths_per_query = lengths->dim() == 2;
            STD_TORCH_CHECK(lengths->scalar_type() == ScalarType::Int && lengths->is_contiguous() &&
                                lengths->numel() == args.batch * (args.lengths_per_query ? args.queries : 1),
                            "fastbert: lengths must be contiguous int32 [B] or [B, Sq]");
            args.lengths = static_cast<const int32_t*>(lengths->const_data_ptr());
        }
        args.by_query = args.lengths_per_query || (mask.has_value() && args.mask_stride[2] != 0 && args.queries > 1);
    }

    Sequences sequences(const Tensor& t) {
        kept_.push_back(with_aligned_rows(t));
        const Tensor& rows = kept_.back();
        const int64_t d = rows.dim();
        return {rows.mutable_data_ptr(), d == 4 ? rows.stride(0) : 0, rows.stride(d - 3), rows.stride(d - 2)};
    }

    // The shape of lse.
    std::vector<int64_t> statistics() const {
        if (args.cu_seqlens) return {args.heads, args.tokens};
        return {args.batch, args.heads, args.queries};
    }

private:
    void take_mask(const Tensor& mask) {
        const bool boolean = mask.scalar_type() == ScalarType::Bool;
        STD_TORCH_CHECK(boolean || mask.scalar_type() == ScalarType::Float, "fastbert: mask must be bool or float32");
        STD_TORCH_CHECK(mask.dim() == 4 && mask.size(0) == args.batch && mask.size(1) == args.heads &&
                            mask.size(2) == args.queries && mask.size(3) == args.keys,
                        "fastbert: the mask must be expanded to [B, H, Sq, Sk]");
        args.mask = mask.const_data_ptr();
        args.mask_kind = boolean ? MaskKind::boolean : MaskKind::additive;
        for (int d = 0; d < 4; ++d) args.mask_stride[d] = mask.stride(d);
    }

    std::vector<Tensor> kept_;
};

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask,
                                   const Optional& lengths, const Optional& cu_seqlens, int64_t max_seqlen,
                                   double scale, double dropout_p, const Optional& seed) {
    Call call(query, key, value, mask, lengths, cu_seqlens, max_seqlen, scale, dropout_p, seed);
    Tensor out = new_tensor(query), lse = new_tensor(query, call.statistics(), ScalarType::Float);
    if (out.numel() == 0) return {out, lse};
    call.args.out = call.sequences(out);
    call.args.lse = static_cast<float*>(lse.mutable_data_ptr());
    attention_forward(call.args, call.device.stream());
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                            const Tensor& value, const Tensor& out, const Tensor& lse,
                                            const Optional& mask, const Optional& lengths, const Optional& cu_seqlens,
                                            int64_t max_seqlen, double scale, double dropout_p, const Optional& seed) {
    Call call(query, key, value, mask, lengths, cu_seqlens, max_seqlen, scale, dropout_p, seed);
    auto& args = call.args;
    STD_TORCH_CHECK(sizes_of(grad) == sizes_of(query) && sizes_of(out) == sizes_of(query) &&
                        dtype_of(grad) == args.dtype && dtype_of(out) == args.dtype &&
                        sizes_of(lse) == call.statistics() && lse.is_contiguous(),
                    "fastbert: attention's gradient, output and statistics must fit its query");
    Tensor dquery = new_tensor(query), dkey = new_tensor(key), dvalue = new_tensor(value);
    if (dquery.numel() == 0 && dkey.numel() == 0) return {dquery, dkey, dvalue};
    args.grad = call.sequences(grad);
    args.out = call.sequences(out);
    args.dquery = call.sequences(dquery);
    args.dkey = call.sequences(dkey);
    args.dvalue = call.sequences(dvalue);
    args.lse = static_cast<float*>(lse.mutable_data_ptr());
    std::optional<Tensor> sums, norms;
    if (args.keys > attention_backward_keys(args)) {
        auto sizes = call.statistics();
        norms = new_tensor(query, sizes, ScalarType::Float);
        args.norms = static_cast<float*>(norms->mutable_data_ptr());
        sizes.push_back(args.head_size);
        sums = new_tensor(query, sizes, ScalarType::Float);
        args.dquery_sums = static_cast<float*>(sums->mutable_data_ptr());
    }
    attention_backward(args, call.device.stream());
    return {dquery, dkey, dvalue};
}

}  // namespace

FASTBERT_CUDA_LIBRARY_IMPL(m) {
    m.impl("attention", TORCH_BOX(&forward));
    m.impl("attention_backward", TORCH_BOX(&backward));
}
}  // namespace fastbert::cuda
#endif
