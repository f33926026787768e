// Matrices in shared memory and a warp's products of them. Every type accumulates in the float layout of
// mma.m16n8k16 (ptx.cuh: lane = 4 g + t holds rows g, g + 8 and columns 2t, 2t + 1 of each 16 x 8 block), so that what
// is done with a product is written once: 16-bit types multiply on the tensor cores, with the left operand in
// registers; float multiplies by FMA, with both operands in shared memory.
#pragma once
#include "ptx.cuh"
#include "rows.cuh"

#ifdef FASTBERT_CUDA_KERNELS
namespace fastbert::cuda {

__device__ __forceinline__ int lane_of_warp() { return threadIdx.x % kWarp; }
// The same; addresses made of it do not outlive the function that asked: registers are for accumulators.
__device__ __forceinline__ int own_lane() { return ptx::opaque(lane_of_warp()); }

// Products [16 M, 8 N]: element [m][n][2 h + e] is row 16 m + 8 h + g, column 8 n + 2 t + e.
template <int M, int N>
using Product = float[M][N][4];

// Rows of kColumns elements. The 16-byte pieces of a row are permuted by its number: eight rows' pieces of the same
// column, which ldmatrix reads at once, lie in different banks.
template <class T, int kColumns>
struct Tile {
    static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(T));
    static constexpr int kPieces = kRowBytes / 16;
    static constexpr int kPerPiece = 16 / static_cast<int>(sizeof(T));
    static_assert(kPieces >= 4 && (kPieces & (kPieces - 1)) == 0);

    unsigned char* data;

    static __device__ __forceinline__ int offset(int row, int piece) {
        const int turn = kPieces >= 8 ? row & 7 : row >> 1 & 3;
        return row * kRowBytes + (piece ^ turn) * 16;
    }
    __device__ __forceinline__ unsigned char* piece(int row, int piece) const { return data + offset(row, piece); }
    __device__ __forceinline__ T* element(int row, int column) const {
        return reinterpret_cast<T*>(piece(row, column / kPerPiece)) + column % kPerPiece;
    }
    // Columns column, column + 1; column is even.
    __device__ __forceinline__ void store_pair(int row, int column, float low, float high) const {
        if constexpr (sizeof(T) == 4)
            *reinterpret_cast<float2*>(element(row, column)) = {low, high};
        else
            *reinterpret_cast<uint32_t*>(element(row, column)) = pack<T>(low, high);
    }
};

// Where a lane finds its row for ldmatrix<4>. `row` is a multiple of 8, `piece` of 2, so that what depends on the lane
// is a number of its own, and the rest a constant. Matrices in the order (rows 0-7, piece 0), (8-15, 0), (0-7, 1),
// (8-15, 1) ...
template <class T, int kColumns>
__device__ __forceinline__ const unsigned char* down_then_across(const Tile<T, kColumns>& tile, int lane, int row,
                                                                 int piece) {
    return tile.data + row * tile.kRowBytes + (tile.offset(lane % 16, lane / 16) ^ piece * 16);
}
// ... or (rows 0-7, piece 0), (0-7, 1), (8-15, 0), (8-15, 1).
template <class T, int kColumns>
__device__ __forceinline__ const unsigned char* across_then_down(const Tile<T, kColumns>& tile, int lane, int row,
                                                                 int piece) {
    return tile.data + row * tile.kRowBytes + (tile.offset(lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ piece * 16);
}

// A left operand [16 M, K]: rows of a tile.
template <class T, int M, int K>
struct LeftRows {
    const Tile<T, K>& tile;
    int row;

    __device__ __forceinline__ void fragment(int lane, int m, int k, uint32_t (&a)[4]) const {
        ptx::ldmatrix<4>(a, down_then_across(tile, lane, row + 16 * m, 2 * k));
    }
};

// The same, read once for many products. float stays where it is.
template <class T, int M, int K>
struct HeldRows {
    uint32_t held[M][K / 16][4];

    __device__ __forceinline__ void load(const Tile<T, K>& tile, int row) {
        const int lane = own_lane();
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int k = 0; k < K / 16; ++k)
                ptx::ldmatrix<4>(held[m][k], down_then_across(tile, lane, row + 16 * m, 2 * k));
    }
    __device__ __forceinline__ void fragment(int, int m, int k, uint32_t (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = held[m][k][i];
    }
};
template <int M, int K>
struct HeldRows<float, M, K> {
    Tile<float, K> tile;
    int row;

    __device__ __forceinline__ void load(const Tile<float, K>& from, int first) { tile = from, row = first; }
};

template <class T, int M, int N>
__device__ __forceinline__ void store_product(const Product<M, N>& p, const Tile<T, 8 * N>& tile, int row) {
    const int lane = own_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                tile.store_pair(row + 16 * m + 8 * h + g, 8 * n + 2 * t, p[m][n][2 * h], p[m][n][2 * h + 1]);
}

// A left operand [16 M, K] that was a product: 16-bit types stay in registers, float goes through rows of a tile of
// the warp's own (the caller sees to it that nobody reads them any more).
template <class T, int M, int K>
struct LeftProduct {
    uint32_t held[M][K / 16][4];

    __device__ __forceinline__ LeftProduct(const Product<M, K / 8>& p, const Tile<T, K>&, int) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int k = 0; k < K / 16; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float (&block)[4] = p[m][2 * k + i / 2];
                    held[m][k][i] = pack<T>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
                }
    }
};
template <int M, int K>
struct LeftProduct<float, M, K> {
    const Tile<float, K>& tile;
    int row;

    __device__ __forceinline__ LeftProduct(const Product<M, K / 8>& p, const Tile<float, K>& to, int first)
        : tile(to), row(first) {
        store_product(p, to, first);
        __syncwarp();
    }
};

// c [16 M, 8 N] += a [16 M, K] b^T, b: rows b_row to b_row + 8 N - 1 of a tile.
template <class T, int M, int N, int K, class Left>
__device__ __forceinline__ void multiply_transposed(Product<M, N>& c, const Left& a, const Tile<T, K>& b, int b_row) {
    const int lane = own_lane();
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int k = 0; k < K / 16; ++k) {
            uint32_t left[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) a.fragment(lane, m, k, left[m]);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t right[4];
                ptx::ldmatrix<4>(right, across_then_down(b, lane, b_row + 8 * n, 2 * k));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    ptx::mma<T>(c[m][n], left[m], right[0], right[1]);
                    ptx::mma<T>(c[m][n + 1], left[m], right[2], right[3]);
                }
            }
        }
    } else {
        const int g = lane / 4, t = lane % 4;
#pragma unroll 1
        for (int k = 0; k < K / 4; ++k) {
            float4 left[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    left[m][h] = *reinterpret_cast<const float4*>(a.tile.piece(a.row + 16 * m + 8 * h + g, k));
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float4 right = *reinterpret_cast<const float4*>(b.piece(b_row + 8 * n + 2 * t + e, k));
#pragma unroll
                    for (int m = 0; m < M; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float& sum = c[m][n][2 * h + e];
                            sum = fmaf(left[m][h].x, right.x, sum);
                            sum = fmaf(left[m][h].y, right.y, sum);
                            sum = fmaf(left[m][h].z, right.z, sum);
                            sum = fmaf(left[m][h].w, right.w, sum);
                        }
                }
        }
    }
}

// c [16 M, 8 N] += a [16 M, K] b, b: rows b_row to b_row + K - 1 of a tile.
template <class T, int M, int N, int K>
__device__ __forceinline__ void multiply(Product<M, N>& c, const LeftProduct<T, M, K>& a, const Tile<T, 8 * N>& b,
                                         int b_row) {
    const int lane = own_lane();
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int k = 0; k < K / 16; ++k)
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t right[4];
                ptx::ldmatrix<4, true>(right, down_then_across(b, lane, b_row + 16 * k, n));
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    ptx::mma<T>(c[m][n], a.held[m][k], right[0], right[1]);
                    ptx::mma<T>(c[m][n + 1], a.held[m][k], right[2], right[3]);
                }
            }
    } else {
        const int g = lane / 4, t = lane % 4;
#pragma unroll 1
        for (int k = 0; k < K; ++k) {
            float left[M][2];
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) left[m][h] = *a.tile.element(a.row + 16 * m + 8 * h + g, k);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float2 right = *reinterpret_cast<const float2*>(b.element(b_row + k, 8 * n + 2 * t));
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        c[m][n][2 * h] = fmaf(left[m][h], right.x, c[m][n][2 * h]);
                        c[m][n][2 * h + 1] = fmaf(left[m][h], right.y, c[m][n][2 * h + 1]);
                    }
            }
        }
    }
}

// c [16, 16] += a^T b: a: columns a_column to a_column + 15 of a tile, b: columns b_column to b_column + 15, both rows
// 0 to `rows` - 1, a multiple of 16.
template <class T, int A, int B>
__device__ __forceinline__ void multiply_columns(Product<1, 2>& c, const Tile<T, A>& a, int a_column,
                                                 const Tile<T, B>& b, int b_column, int rows) {
    const int lane = own_lane();
    if constexpr (sizeof(T) == 2) {
#pragma unroll 4
        for (int k = 0; k < rows; k += 16) {
            uint32_t left[4], right[4];
            ptx::ldmatrix<4, true>(left, across_then_down(a, lane, k, a_column / 8));
            ptx::ldmatrix<4, true>(right, down_then_across(b, lane, k, b_column / 8));
            ptx::mma<T>(c[0][0], left, right[0], right[1]);
            ptx::mma<T>(c[0][1], left, right[2], right[3]);
        }
    } else {
        const int g = lane / 4, t = lane % 4;
#pragma unroll 4
        for (int k = 0; k < rows; ++k) {
            const float left[2] = {*a.element(k, a_column + g), *a.element(k, a_column + 8 + g)};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 right = *reinterpret_cast<const float2*>(b.element(k, b_column + 8 * n + 2 * t));
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    c[0][n][2 * h] = fmaf(left[h], right.x, c[0][n][2 * h]);
                    c[0][n][2 * h + 1] = fmaf(left[h], right.y, c[0][n][2 * h + 1]);
                }
            }
        }
    }
}

}  // namespace fastbert::cuda
#endif
