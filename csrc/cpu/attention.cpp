// softmax(q k^T * scale + mask) v with dropout, and its backward, for dense and packed sequences.
//
// The least memory is that of q, k, v and the result, once each; the work is two products (five in backward) of
// Sq x Sk x D multiply-adds per head. A thread takes one head: it packs k and v once (into its second-level cache
// at the lengths BERT has), then for a block of queries computes the scores of up to kKeys keys as a tile, turns
// them into probabilities in place, and multiplies them with v. Rows with more keys keep a running maximum and
// rescale (online softmax), so scratch grows with the length, not with its square. Backward recomputes the
// probabilities from the saved logarithm of each row's sum; one thread owns a head, so sums have one order.
// Keys off for all queries of a block at its ends are not computed; single ones in between get -inf.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "../common/dropout.h"
#include "dtype.h"
#include "isa.h"

namespace fastbert::cpu {

// Rows of D contiguous elements; strides in elements. Packed tensors have no batch stride.
struct Sequences {
    char* data;
    DType dtype;
    int64_t batch, row, head;
};

enum class MaskKind { none, boolean, additive };

struct AttentionCall {
    Sequences query, key, value, out;      // out: the result, written by forward and read by backward
    Sequences grad, dquery, dkey, dvalue;  // backward only
    void* lse;                             // float (double) [B, H, Sq], packed [H, T]
    MaskKind mask_kind;
    const void* mask;  // bytes or float (double) [B, H, Sq, Sk] with the strides below
    int64_t mask_batch, mask_head, mask_row, mask_key;
    const int32_t* lengths;  // [B], or [B, Sq] if lengths_per_query; or null
    bool lengths_per_query;
    const int32_t* cu_seqlens;                       // [B + 1], or null: dense
    int64_t batch, heads, queries, keys, head_size;  // queries and keys: of a dense sequence
    int64_t tokens;                                  // T, packed
    double scale;
    Dropout dropout;
};

constexpr int64_t kMaxHeadSize = 256;

struct AttentionKernels {
    // Queries [first, last) of one head.
    void (*forward)(const AttentionCall& call, int64_t batch, int64_t head, int64_t first, int64_t last);
    void (*backward)(const AttentionCall& call, int64_t batch, int64_t head);
    int64_t tile_rows;  // whole multiples of it make good blocks of queries
};
}  // namespace fastbert::cpu

#ifdef FASTBERT_ISA
#include "gemm.h"

namespace fastbert::cpu::FASTBERT_ISA {
namespace {

// Queries and keys of a tile of scores: it and what it is multiplied with stay in a second-level cache. From half to
// twice as many of either cost the same; at 512 keys a row of the longest sequence BERT has is one tile.
constexpr int64_t kRows = 48, kKeys = 512;
// Rows of a tile lie this many elements further apart than they are long: at a power of two, a column of a tile
// would fall into a few sets of the first-level cache.
constexpr int64_t kSkew = 16;

// Rows that are fetched before they are read.
constexpr int64_t kAhead = 16;

// A thread's scratch memory, kept from call to call and handed out in pieces aligned to a cache line.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }

    template <class C>
    struct Piece {
        C*& pointer;
        int64_t count;
    };
    // Points each piece to memory for `count` elements. Takes back what an earlier call gave.
    template <class C, int kPieces>
    void allocate(const Piece<C> (&pieces)[kPieces]) {
        int64_t total = 0;
        for (const auto& piece : pieces) total += round_up(piece.count * sizeof(C), 64);
        if (total > size_) {
            std::free(memory_);
            memory_ = static_cast<char*>(std::aligned_alloc(64, total));
            if (!memory_) std::abort();
            size_ = total;
        }
        char* next = memory_;
        for (const auto& piece : pieces) {
            piece.pointer = reinterpret_cast<C*>(next);
            next += round_up(piece.count * sizeof(C), 64);
        }
    }

private:
    char* memory_ = nullptr;
    int64_t size_ = 0;
};
thread_local Scratch scratch;

// One head of one sequence.
template <class C>
struct Head {
    const AttentionCall& call;
    int64_t batch, head, size;
    int64_t width;              // of a row in scratch memory: size, rounded up to whole vectors
    int64_t start = 0;          // first row, packed
    int64_t queries, all_keys;  // rows
    int64_t keys;               // those within the length
    C* lse;

    Head(const AttentionCall& c, int64_t b, int64_t h)
        : call(c),
          batch(b),
          head(h),
          size(c.head_size),
          width(round_up(c.head_size, kLanes<C>)),
          queries(c.queries),
          all_keys(c.keys) {
        C* all = static_cast<C*>(c.lse);
        if (c.cu_seqlens) {
            start = c.cu_seqlens[b];
            queries = all_keys = c.cu_seqlens[b + 1] - start;
            lse = all + h * c.tokens + start;
        } else {
            lse = all + (b * c.heads + h) * c.queries;
        }
        keys = all_keys;
        if (c.lengths && !c.lengths_per_query) {
            const int64_t length = c.lengths[b];
            keys = length < 0 ? 0 : length < keys ? length : keys;
        }
    }

    char* row(const Sequences& s, int64_t i) const {
        return s.data + (batch * s.batch + (start + i) * s.row + head * s.head) * size_of(s.dtype);
    }
    // Row i, times `factor`, with zeros up to `width`.
    void read(const Sequences& s, int64_t i, C factor, C* out) const {
        // The hardware does not foresee pieces this short, this far apart.
        const char* ahead = row(s, i + kAhead);
        for (int64_t byte = 0; byte < size * size_of(s.dtype); byte += 64) __builtin_prefetch(ahead + byte);
        C buffer[kMaxHeadSize + kSlack];
        const C* in = widen<C>(row(s, i), s.dtype, size, buffer);
        for_vectors<C>(size, [&](int64_t d, auto m) { store<C>(out + d, m.template load<C>(in + d) * factor); });
        for (int64_t d = size; d < width; ++d) out[d] = 0;
    }
    void write(const Sequences& s, int64_t i, const C* values) const {
        char* out = row(s, i);
        if (s.dtype == (sizeof(C) == 4 ? DType::f32 : DType::f64))
            std::memcpy(out, values, size * sizeof(C));
        else
            commit<C>(out, s.dtype, size, values);
    }
    RowKeys dropout_keys(int64_t query) const {
        const auto row_hi = static_cast<uint32_t>(batch * call.heads + head);
        return row_keys(call.dropout.seed, row_hi, static_cast<uint32_t>(query));
    }
};

template <class C>
constexpr C kOff = static_cast<C>(-__builtin_inf());
// Up to here the logarithm of a row's sum is fine enough to recompute probabilities from: a float's error is 1.5e-5.
constexpr double kFineLse = 256;

// Which keys of a head are on, as numbers to add to the scores: -inf = off.
template <class C>
class Mask {
public:
    // `shared` and `poison`: memory for head.keys elements each.
    Mask(const Head<C>& head, C* shared, C* poison)
        : head_(head), call_(head.call), shared_(shared), poison_(poison), end_(head.queries ? head.keys : 0) {
        const bool has_mask = call_.mask_kind != MaskKind::none;
        per_query_ = call_.lengths_per_query || (has_mask && call_.mask_row != 0 && head.queries > 1);
        if (per_query_ || !has_mask) return;
        fill(0, 0, end_, shared_);
        while (end_ > 0 && shared_[end_ - 1] == kOff<C>) --end_;
        while (begin_ < end_ && shared_[begin_] == kOff<C>) ++begin_;
        biased_ = begin_ > 0;
        for (int64_t j = begin_; j < end_ && !biased_; ++j) biased_ = shared_[j] != 0;
    }

    // Keys outside [begin, end) are off for every query, and others may be if not per_query.
    int64_t begin() const { return begin_; }
    int64_t end() const { return end_; }
    bool per_query() const { return per_query_; }
    bool off(int64_t key) const { return biased_ && shared_[key] == kOff<C>; }

    // Leaves in begin and end those of the keys [begin, end) between which all lie that a query of [first, last)
    // sees.
    void narrow(int64_t first, int64_t last, int64_t& begin, int64_t& end) const {
        if (!per_query_) return;
        int64_t low = end, high = begin;
        for (int64_t i = first; i < last && (low > begin || high < end); ++i) {
            int64_t j = begin, row_end = limit(i, end);
            while (j < row_end && j < low && value(i, j) == kOff<C>) ++j;
            if (j < row_end && j < low) low = j;
            while (row_end > high && value(i, row_end - 1) == kOff<C>) --row_end;
            if (row_end > high) high = row_end;
        }
        begin = low;
        end = high;
    }

    // A key that holds a NaN or an infinity, and was replaced by a finite one: the queries that see it get NaN.
    void poison(int64_t key) {
        if (!poisoned_) std::memset(poison_, 0, head_.keys * sizeof(C));
        poisoned_ = true;
        poison_[key] = static_cast<C>(__builtin_nan(""));
    }

    // What to add to the scores of `query` and the keys [begin, begin + n), in `buffer`; null if nothing.
    const C* row(int64_t query, int64_t begin, int64_t n, C* buffer) const {
        if (!per_query_) return biased_ ? shared_ + begin : nullptr;
        fill(query, begin, n, buffer);
        if (poisoned_)
            for (int64_t j = 0; j < n; ++j)
                if (buffer[j] != kOff<C>) buffer[j] += poison_[begin + j];
        return buffer;
    }

private:
    const char* address(int64_t query, int64_t key, int64_t element_size) const {
        const int64_t offset = head_.batch * call_.mask_batch + head_.head * call_.mask_head + query * call_.mask_row +
                               key * call_.mask_key;
        return static_cast<const char*>(call_.mask) + offset * element_size;
    }
    C value(int64_t query, int64_t key) const {
        if (call_.mask_kind == MaskKind::none) return 0;
        if (call_.mask_kind == MaskKind::boolean) return *address(query, key, 1) ? C(0) : kOff<C>;
        return *reinterpret_cast<const C*>(address(query, key, sizeof(C)));
    }
    // Keys at or past it are off by their number.
    int64_t limit(int64_t query, int64_t end) const {
        if (!call_.lengths_per_query) return end;
        const int64_t length = call_.lengths[head_.batch * call_.queries + query];
        return length < 0 ? 0 : length < end ? length : end;
    }
    void fill(int64_t query, int64_t begin, int64_t n, C* out) const {
        int64_t count = limit(query, begin + n) - begin;
        if (count < 0) count = 0;
        const int64_t stride = call_.mask_key;
        if (call_.mask_kind == MaskKind::none) {
            for (int64_t j = 0; j < count; ++j) out[j] = 0;
        } else if (call_.mask_kind == MaskKind::boolean) {
            const char* in = address(query, begin, 1);
            if (stride == 1)
                for (int64_t j = 0; j < count; ++j) out[j] = in[j] ? C(0) : kOff<C>;
            else
                for (int64_t j = 0; j < count; ++j) out[j] = in[j * stride] ? C(0) : kOff<C>;
        } else {
            const C* in = reinterpret_cast<const C*>(address(query, begin, sizeof(C)));
            for (int64_t j = 0; j < count; ++j) out[j] = in[j * stride];
        }
        for (int64_t j = count; j < n; ++j) out[j] = kOff<C>;
    }

    const Head<C>& head_;
    const AttentionCall& call_;
    C *shared_, *poison_;
    int64_t begin_ = 0, end_;
    bool per_query_, biased_ = false, poisoned_ = false;
};

// The packed keys of a head: [base, end), where base lies on a panel's boundary.
template <class C>
struct KeyRange {
    int64_t base, end;

    explicit KeyRange(const Mask<C>& mask) : base(mask.begin() / kPanel<C> * kPanel<C>), end(mask.end()) {}
    int64_t count() const { return end - base; }
};

// Memory for `keys` packed rows.
template <class C>
int64_t packed_by_key(const Head<C>& head) {
    return (round_up(head.keys, kPanel<C>) + kPanel<C>)*head.size;
}
template <class C>
int64_t packed_by_row(int64_t rows, int64_t width) {
    return rows * round_up(width, kPanel<C>);
}

// Packs rows of keys or values for products over D, in panels of kPanel keys by [D] (`by_key`), and for products
// over keys, in panels of kPanel of D by [keys] (`by_row`); either may be null. What is off for every query becomes
// zeros. Where that depends on the query, non-finite elements do, and on_bad_row(key) is told.
template <class C, class OnBadRow>
void pack_keys(const Head<C>& head, const Sequences& s, const Mask<C>& mask, const KeyRange<C>& range, C* by_key,
               C* by_row, OnBadRow&& on_bad_row) {
    constexpr int64_t lanes = kLanes<C>;
    alignas(64) C rows[lanes * kMaxHeadSize];
    for (int64_t j = range.base; j < range.end; j += lanes) {
        const int64_t count = range.end - j < lanes ? range.end - j : lanes, at = j - range.base;
        for (int64_t i = 0; i < lanes; ++i) {
            C* row = rows + i * head.width;
            if (i >= count || mask.off(j + i)) {
                std::memset(row, 0, head.width * sizeof(C));
                continue;
            }
            head.read(s, j + i, 1, row);
            if (!mask.per_query()) continue;
            bool finite = true;
            for (int64_t d = 0; d < head.size; ++d) {
                const bool bad = !(row[d] - row[d] == 0);
                finite &= !bad;
                row[d] = bad ? C(0) : row[d];
            }
            if (!finite) on_bad_row(j + i);
        }
        if (by_key)
            pack_transposed(rows, head.width, head.size,
                            by_key + at / kPanel<C> * kPanel<C> * head.size + at % kPanel<C>);
        if (by_row) pack_rows(rows, head.width, count, head.width, by_row + at * kPanel<C>, range.count() * kPanel<C>);
    }
}

// exp for softmax, whose arguments are at most 0 but for rounding; below -87.3 it is 0.
inline VF exp_difference(VF x) {
    const VF low = splat(-87.33654f);
    const VF clamped = x < low ? low : x;  // a NaN passes
    const VF shifted = clamped * 1.44269504f + 12582912.0f;
    const VF k = shifted - 12582912.0f;
    const VF r = (clamped - k * 0.693359375f) + k * 2.12194440e-4f;
    VF p = splat(1.381454058e-3f);
    p = p * r + 8.368745446e-3f;
    p = p * r + 4.166838899e-2f;
    p = p * r + 1.666652113e-1f;
    p = p * r + 4.999999404e-1f;
    p = p * (r * r) + r + 1.0f;
    const VF result = p * (VF)(((VI)shifted - (0x4b400000 - 127)) << 23);
    return x < low ? VF{} : result;
}
inline Vec<double> exp_difference(Vec<double> x) { return exp(x); }

// Adds `bias` (if any) to a row of n scores and fills its last vector with -inf.
template <class C>
inline void add_mask(C* scores, int64_t n, const C* bias) {
    for (int64_t j = n; j < round_up(n, kLanes<C>); ++j) scores[j] = kOff<C>;
    if (!bias) return;
    for_vectors<C>(n, [&](int64_t j, auto m) {
        const Vec<C> b = m.template load<C>(bias + j), off = splat(kOff<C>);
        m.template store<C>(scores + j, b == off ? off : m.template load<C>(scores + j) + b);
    });
}

template <class C>
inline C largest(const C* row, int64_t n) {
    constexpr int64_t lanes = kLanes<C>;
    Vec<C> most = load<C>(row);
    for (int64_t j = lanes; j < n; j += lanes) most = max<C>(most, load<C>(row + j));
    return max<C>(most);
}

// The softmax of a row whose scores come piece by piece.
template <class C>
struct RunningSoftmax {
    C most, total;  // the largest score, and the sum of exp(score - most)

    void reset() {
        most = kOff<C>;
        total = 0;
    }
    C shift() const { return most == kOff<C> ? C(0) : most; }

    // Turns n scores into exp(score - most), times `multipliers` if not null; adds those without them to the sum.
    // Returns the factor by which `most` makes earlier pieces smaller.
    C add(C* row, int64_t n, const C* multipliers) {
        const C before = most, here = largest(row, n);
        if (here > most) most = here;
        const Vec<C> offset = splat(shift());
        Vec<C> sums{};
        if (multipliers)
            for (int64_t j = 0; j < n; j += kLanes<C>) {
                const Vec<C> p = exp_difference(load<C>(row + j) - offset);
                sums += p;
                store<C>(row + j, p * load<C>(multipliers + j));
            }
        else
            for (int64_t j = 0; j < n; j += kLanes<C>) {
                const Vec<C> p = exp_difference(load<C>(row + j) - offset);
                sums += p;
                store<C>(row + j, p);
            }
        const C factor = before == most ? C(1) : std::exp(before - most);
        total = total * factor + sum<C>(sums);
        return factor;
    }
    // log(sum(exp(score))); +inf if there was none, so that exp(score - it) is 0.
    C log_sum() const { return total == 0 ? -kOff<C> : most + std::log(total); }
    C inverse() const { return total == 0 ? C(0) : 1 / total; }
};

// Calls f(begin, n) for the pieces of at most `kKeys` keys that some query of [first, last) sees; begin lies on a
// panel's boundary.
template <class C, class F>
inline void for_key_tiles(const Mask<C>& mask, const KeyRange<C>& range, int64_t first, int64_t last, F&& f) {
    for (int64_t key = range.base; key < range.end; key += kKeys) {
        int64_t begin = key, end = key + kKeys < range.end ? key + kKeys : range.end;
        mask.narrow(first, last, begin, end);
        if (begin >= end) continue;
        begin = begin / kPanel<C> * kPanel<C>;
        f(begin, end - begin);
    }
}
// Elements from one row of a tile of scores to the next.
template <class C>
int64_t tile_stride(const Head<C>& head) {
    const int64_t keys = round_up(head.keys, kPanel<C>);
    return (keys < kKeys ? keys : kKeys) + kSkew;
}

// NaN in the elements of a result to which a non-finite value contributes: it was packed as zero, so that queries
// that do not see it are spared.
template <class C>
void spread_bad_values(const Head<C>& head, const Mask<C>& mask, const KeyRange<C>& range, int64_t query, C* bias,
                       C* out) {
    C value[kMaxHeadSize + kSlack];
    for (int64_t key = range.base; key < range.end; ++key) {
        if (*mask.row(query, key, 1, bias) == kOff<C>) continue;
        head.read(head.call.value, key, 1, value);
        for (int64_t d = 0; d < head.size; ++d)
            if (!(value[d] - value[d] == 0)) out[d] = static_cast<C>(__builtin_nan(""));
    }
}

template <class C>
void forward_head(const AttentionCall& call, int64_t batch, int64_t head_index, int64_t first, int64_t last) {
    const Head<C> head(call, batch, head_index);
    if (last > head.queries) last = head.queries;
    if (first >= last) return;
    const int64_t width = head.width, stride = tile_stride(head);
    C *shared, *poison, *keys, *values, *q, *o, *tile, *bias, *multipliers;
    scratch.allocate<C>({{shared, head.keys},
                         {poison, head.keys},
                         {keys, packed_by_key(head)},
                         {values, packed_by_row<C>(head.keys, width)},
                         {q, kRows * width},  // [rows, width], scaled
                         {o, kRows * width},
                         {tile, kRows * stride},  // [rows, keys]: scores, then probabilities
                         {bias, stride},
                         {multipliers, stride}});
    Mask<C> mask(head, shared, poison);
    const KeyRange<C> range(mask);
    bool bad_values = false;
    pack_keys<C>(head, call.key, mask, range, keys, nullptr, [&](int64_t key) { mask.poison(key); });
    pack_keys<C>(head, call.value, mask, range, nullptr, values, [&](int64_t) { bad_values = true; });

    for (int64_t row = first; row < last; row += kRows) {
        const int64_t rows = last - row < kRows ? last - row : kRows;
        RunningSoftmax<C> softmax[kRows];
        for (int64_t i = 0; i < rows; ++i) {
            head.read(call.query, row + i, static_cast<C>(call.scale), q + i * width);
            softmax[i].reset();
        }
        bool started = false;
        for_key_tiles<C>(mask, range, row, row + rows, [&](int64_t begin, int64_t n) {
            const int64_t at = begin - range.base;
            gemm<C>(rows, n, head.size, q, width, 1, keys + at * head.size, kPanel<C> * head.size, tile, stride, false);
            for (int64_t i = 0; i < rows; ++i) {
                C* scores = tile + i * stride;
                add_mask(scores, n, mask.row(row + i, begin, n, bias));
                const bool drop = call.dropout.active();
                if (drop) dropout_multipliers<C>(call.dropout, head.dropout_keys(row + i), begin, n, multipliers);
                const C factor = softmax[i].add(scores, n, drop ? multipliers : nullptr);
                if (started && factor != 1)
                    for (int64_t d = 0; d < width; ++d) o[i * width + d] *= factor;
            }
            gemm<C>(rows, width, n, tile, stride, 1, values + at * kPanel<C>, range.count() * kPanel<C>, o, width,
                    started);
            started = true;
        });
        for (int64_t i = 0; i < rows; ++i) {
            C* out = o + i * width;
            const C inverse = softmax[i].inverse();
            for (int64_t d = 0; d < width; ++d) out[d] = started ? out[d] * inverse : C(0);
            if (bad_values) spread_bad_values(head, mask, range, row + i, bias, out);
            head.write(call.out, row + i, out);
            head.lse[row + i] = softmax[i].log_sum();
        }
    }
}

// From a row of scores and of gradients of the dropped probabilities to the gradients of the scores.
template <class C>
struct RowGradient {
    C shift, factor;  // p = exp(score - shift) * factor
    C delta;          // sum over keys of p * dp

    Vec<C> probability(Vec<C> score) const { return exp_difference(score - splat(shift)) * splat(factor); }

    void add_delta(const C* scores, const C* dp, int64_t n, const C* multipliers) {
        Vec<C> sums{};
        for (int64_t j = 0; j < n; j += kLanes<C>) {
            const Vec<C> product = probability(load<C>(scores + j)) * load<C>(dp + j);
            sums += multipliers ? product * load<C>(multipliers + j) : product;
        }
        delta += sum<C>(sums);
    }
    // scores: in, scores; out, dropped probabilities. dp: in, their gradients; out, gradients of the scores.
    void apply(C* scores, C* dp, int64_t n, const C* multipliers) const {
        for (int64_t j = 0; j < n; j += kLanes<C>) {
            const Vec<C> p = probability(load<C>(scores + j)),
                         keep = multipliers ? load<C>(multipliers + j) : splat(C(1));
            // Where p is 0 (off, at the least), a delta or gradient that is NaN reaches nothing.
            const Vec<C> ds = p * (load<C>(dp + j) * keep - splat(delta));
            store<C>(dp + j, p == 0 ? Vec<C>{} : ds);
            store<C>(scores + j, p * keep);
        }
    }
};

template <class C>
void backward_head(const AttentionCall& call, int64_t batch, int64_t head_index) {
    const Head<C> head(call, batch, head_index);
    const int64_t width = head.width, stride = tile_stride(head);
    C *shared, *poison, *keys, *key_rows, *values, *dk, *dv, *q, *q_packed, *g, *g_packed, *dq, *p, *dp, *bias,
        *multipliers;
    scratch.allocate<C>({{shared, head.keys},
                         {poison, head.keys},
                         {keys, packed_by_key(head)},
                         {key_rows, packed_by_row<C>(head.keys, width)},
                         {values, packed_by_key(head)},
                         {dk, (head.keys + kPanel<C>)*width},  // [keys, width], from range.base on
                         {dv, (head.keys + kPanel<C>)*width},
                         {q, kRows * width},  // [rows, width], scaled
                         {q_packed, packed_by_row<C>(kRows, width)},
                         {g, kRows * width},  // the result's gradient
                         {g_packed, packed_by_row<C>(kRows, width)},
                         {dq, kRows * width},
                         {p, kRows * stride},   // [rows, keys]: scores, then dropped probabilities
                         {dp, kRows * stride},  // [rows, keys]: gradients of p, then of the scores
                         {bias, stride},
                         {multipliers, stride}});
    Mask<C> mask(head, shared, poison);
    const KeyRange<C> range(mask);
    pack_keys<C>(head, call.key, mask, range, keys, key_rows, [&](int64_t key) { mask.poison(key); });
    pack_keys<C>(head, call.value, mask, range, values, nullptr, [](int64_t) {});
    const C scale = static_cast<C>(call.scale);
    std::memset(dk, 0, (range.count() + kPanel<C>)*width * sizeof(C));
    std::memset(dv, 0, (range.count() + kPanel<C>)*width * sizeof(C));

    // delta, the sum over keys of p * dp, is the sum over D of gradient * out as well; but out was rounded, and in 16
    // bits that shows where a row has few keys.
    const bool rounded = call.out.dtype == DType::bf16 || call.out.dtype == DType::f16;
    const bool one_tile = range.count() <= kKeys;

    for (int64_t row = 0; row < head.queries; row += kRows) {
        const int64_t rows = head.queries - row < kRows ? head.queries - row : kRows;
        RowGradient<C> row_gradient[kRows];
        bool coarse = false;
        for (int64_t i = 0; i < rows; ++i) {
            C *qi = q + i * width, *gi = g + i * width, *out = dq;
            head.read(call.query, row + i, scale, qi);
            head.read(call.grad, row + i, 1, gi);
            C delta = 0;
            if (!rounded) {
                head.read(call.out, row + i, 1, out);
                delta = reduce<C>(head.size, [&](int64_t d, auto m) {
                    return m.template load<C>(gi + d) * m.template load<C>(out + d);
                });
            }
            const C lse = head.lse[row + i];
            row_gradient[i] = {lse, 1, delta};
            coarse |= std::fabs(lse) > kFineLse && std::fabs(lse) < -kOff<C>;
        }
        pack_rows(q, width, rows, width, q_packed, kRows * kPanel<C>);
        pack_rows(g, width, rows, width, g_packed, kRows * kPanel<C>);

        const auto for_tiles = [&](auto&& f) { for_key_tiles<C>(mask, range, row, row + rows, f); };
        const auto find_scores = [&](int64_t begin, int64_t n) {
            const int64_t at = begin - range.base;
            gemm<C>(rows, n, head.size, q, width, 1, keys + at * head.size, kPanel<C> * head.size, p, stride, false);
            for (int64_t i = 0; i < rows; ++i) add_mask(p + i * stride, n, mask.row(row + i, begin, n, bias));
        };
        // scores, and gradients of the dropped probabilities
        const auto find_tile = [&](int64_t begin, int64_t n) {
            const int64_t at = begin - range.base;
            find_scores(begin, n);
            gemm<C>(rows, n, head.size, g, width, 1, values + at * head.size, kPanel<C> * head.size, dp, stride, false);
        };
        const auto drop = [&](int64_t i, int64_t begin, int64_t n) -> const C* {
            if (!call.dropout.active()) return nullptr;
            dropout_multipliers<C>(call.dropout, head.dropout_keys(row + i), begin, n, multipliers);
            return multipliers;
        };
        if (coarse) {
            RunningSoftmax<C> softmax[kRows];
            for (int64_t i = 0; i < rows; ++i) softmax[i].reset();
            for_tiles([&](int64_t begin, int64_t n) {
                find_scores(begin, n);
                for (int64_t i = 0; i < rows; ++i) softmax[i].add(p + i * stride, n, nullptr);
            });
            for (int64_t i = 0; i < rows; ++i) {
                row_gradient[i].shift = softmax[i].shift();
                row_gradient[i].factor = softmax[i].inverse();
            }
        }
        if (rounded && !one_tile)
            for_tiles([&](int64_t begin, int64_t n) {
                find_tile(begin, n);
                for (int64_t i = 0; i < rows; ++i)
                    row_gradient[i].add_delta(p + i * stride, dp + i * stride, n, drop(i, begin, n));
            });
        bool started = false;
        for_tiles([&](int64_t begin, int64_t n) {
            const int64_t at = begin - range.base;
            find_tile(begin, n);
            for (int64_t i = 0; i < rows; ++i) {
                C *pi = p + i * stride, *di = dp + i * stride;
                const C* kept = drop(i, begin, n);
                if (rounded && one_tile) row_gradient[i].add_delta(pi, di, n, kept);
                row_gradient[i].apply(pi, di, n, kept);
            }
            gemm<C>(n, width, rows, p, 1, stride, g_packed, kRows * kPanel<C>, dv + at * width, width, true);
            gemm<C>(n, width, rows, dp, 1, stride, q_packed, kRows * kPanel<C>, dk + at * width, width, true);
            gemm<C>(rows, width, n, dp, stride, 1, key_rows + at * kPanel<C>, range.count() * kPanel<C>, dq, width,
                    started);
            started = true;
        });
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t d = 0; d < width; ++d) dq[i * width + d] = started ? dq[i * width + d] * scale : C(0);
            head.write(call.dquery, row + i, dq + i * width);
        }
    }
    std::memset(dq, 0, width * sizeof(C));
    for (int64_t key = 0; key < head.all_keys; ++key) {
        const bool inside = key >= range.base && key < range.end;
        head.write(call.dkey, key, inside ? dk + (key - range.base) * width : dq);
        head.write(call.dvalue, key, inside ? dv + (key - range.base) * width : dq);
    }
}

void forward(const AttentionCall& call, int64_t batch, int64_t head, int64_t first, int64_t last) {
    (call.query.dtype == DType::f64 ? forward_head<double> : forward_head<float>)(call, batch, head, first, last);
}
void backward(const AttentionCall& call, int64_t batch, int64_t head) {
    (call.query.dtype == DType::f64 ? backward_head<double> : backward_head<float>)(call, batch, head);
}
}  // namespace

FASTBERT_KERNELS(AttentionKernels, attention) = {forward, backward, kRows};
}  // namespace fastbert::cpu::FASTBERT_ISA

#else
#include <algorithm>
#include <atomic>

#include "../common/adapter.h"

namespace fastbert::cpu {
FASTBERT_CHOOSE(AttentionKernels, attention)

namespace {

using OptionalTensor = std::optional<Tensor>;

Tensor with_contiguous_rows(const Tensor& t) {
    return t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1 ? t : torch::stable::contiguous(t);
}

// A call's description for the kernels; it keeps the tensors that were copied alive.
class Prepared {
public:
    AttentionCall call{};

    Prepared(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
             const OptionalTensor& lengths, const OptionalTensor& cu_seqlens, double scale, double dropout_p,
             const OptionalTensor& seed) {
        const bool packed = cu_seqlens.has_value();
        const int64_t dims = packed ? 3 : 4;
        STD_TORCH_CHECK(query.dim() == dims && key.dim() == dims && value.dim() == dims,
                        "fastbert: attention needs query, key and value of ", dims, " dimensions");
        for (int64_t d = 0; d < dims; ++d)
            STD_TORCH_CHECK(key.size(d) == value.size(d) && (key.size(d) == query.size(d) || (!packed && d == 1)),
                            "fastbert: attention's query, key and value do not fit together");
        call.heads = query.size(dims - 2);
        call.head_size = query.size(dims - 1);
        STD_TORCH_CHECK(call.head_size >= 1 && call.head_size <= kMaxHeadSize, "fastbert: a head size of 1 to ",
                        kMaxHeadSize, " is supported, not ", call.head_size);
        call.query = sequences(query);
        call.key = sequences(key);
        call.value = sequences(value);
        call.scale = scale;
        call.dropout = dropout_of(dropout_p, seed);
        if (packed) {
            STD_TORCH_CHECK(!mask.has_value() && !lengths.has_value(),
                            "fastbert: packed sequences take neither mask nor lengths");
            take_packing(*cu_seqlens, query.size(0));
            return;
        }
        call.batch = query.size(0);
        longest = call.queries = query.size(1);
        call.keys = key.size(1);
        if (mask.has_value()) take_mask(*mask);
        if (lengths.has_value()) {
            STD_TORCH_CHECK(lengths->scalar_type() == ScalarType::Int && lengths->is_contiguous(),
                            "fastbert: lengths must be contiguous int32");
            call.lengths_per_query = lengths->dim() == 2;
            STD_TORCH_CHECK(lengths->numel() == call.batch * (call.lengths_per_query ? call.queries : 1),
                            "fastbert: lengths must be [B] or [B, Sq]");
            call.lengths = static_cast<const int32_t*>(lengths->const_data_ptr());
        }
    }

    // Where the rows of a tensor [B, S, H, D] or [T, H, D] are.
    Sequences sequences(const Tensor& t) {
        kept_.push_back(with_contiguous_rows(t));
        const Tensor& rows = kept_.back();
        const int64_t d = rows.dim();
        return {static_cast<char*>(rows.mutable_data_ptr()), dtype_of(rows), d == 4 ? rows.stride(0) : 0,
                rows.stride(d - 3), rows.stride(d - 2)};
    }

    // The shape of lse.
    std::vector<int64_t> statistics() const {
        if (call.cu_seqlens) return {call.heads, call.tokens};
        return {call.batch, call.heads, call.queries};
    }

    // Calls f(batch, head, first query, last query) for heads, or for blocks of `block` queries of them. Threads take
    // the next one when they are done: sequences differ in length.
    template <class F>
    void for_each_head(int64_t block, const F& f) const {
        const int64_t blocks = std::max<int64_t>(1, (longest + block - 1) / block);
        const int64_t count = call.batch * call.heads * blocks;
        std::atomic<int64_t> next{0};
        const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
        torch::stable::parallel_for(0, std::min(threads, count), 1, [&](int64_t, int64_t) {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
                const int64_t head = i / blocks, first = i % blocks * block;
                f(head / call.heads, head % call.heads, first, first + block);
            }
        });
    }

    int64_t longest = 0;  // queries of the longest sequence

private:
    void take_mask(const Tensor& mask) {
        const auto wide = call.query.dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
        STD_TORCH_CHECK(mask.dim() == 4 && mask.size(0) == call.batch && mask.size(1) == call.heads &&
                            mask.size(2) == call.queries && mask.size(3) == call.keys,
                        "fastbert: the mask must be expanded to [B, H, Sq, Sk]");
        STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool || mask.scalar_type() == wide,
                        "fastbert: the mask must be bool or of the accumulation type");
        call.mask_kind = mask.scalar_type() == ScalarType::Bool ? MaskKind::boolean : MaskKind::additive;
        call.mask = mask.const_data_ptr();
        call.mask_batch = mask.stride(0);
        call.mask_head = mask.stride(1);
        call.mask_row = mask.stride(2);
        call.mask_key = mask.stride(3);
    }
    void take_packing(const Tensor& cu_seqlens, int64_t tokens) {
        STD_TORCH_CHECK(cu_seqlens.scalar_type() == ScalarType::Int && cu_seqlens.dim() == 1 &&
                            cu_seqlens.size(0) >= 1 && cu_seqlens.is_contiguous(),
                        "fastbert: cu_seqlens must be contiguous int32 [B + 1]");
        call.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
        call.batch = cu_seqlens.size(0) - 1;
        call.tokens = tokens;
        bool valid = call.cu_seqlens[0] == 0 && call.cu_seqlens[call.batch] == tokens;
        for (int64_t b = 0; b < call.batch; ++b) {
            const int64_t length = static_cast<int64_t>(call.cu_seqlens[b + 1]) - call.cu_seqlens[b];
            valid &= length >= 0;
            longest = std::max(longest, length);
        }
        STD_TORCH_CHECK(valid, "fastbert: cu_seqlens must start at 0, not decrease, and end at ", tokens);
    }

    std::vector<Tensor> kept_;
};

std::tuple<Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                             const OptionalTensor& mask, const OptionalTensor& lengths,
                                             const OptionalTensor& cu_seqlens, int64_t max_seqlen, double scale,
                                             double dropout_p, const OptionalTensor& seed) {
    Prepared prepared(query, key, value, mask, lengths, cu_seqlens, scale, dropout_p, seed);
    auto& call = prepared.call;
    Tensor out = new_output(query);
    const auto wide = call.query.dtype == DType::f64 ? ScalarType::Double : ScalarType::Float;
    Tensor lse = new_output(query, prepared.statistics(), wide);
    call.out = prepared.sequences(out);
    call.lse = lse.mutable_data_ptr();
    // With few heads each is cut into blocks of queries, so that every thread has several pieces of work. A piece
    // packs all keys, so there are no more than it takes, and they are whole tiles: their bits stay the same.
    const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
    const int64_t heads = std::max<int64_t>(1, call.batch * call.heads), tile = attention_kernels().tile_rows;
    const int64_t pieces = threads == 1 ? 1 : (4 * threads + heads - 1) / heads;
    const int64_t block = ((prepared.longest + pieces - 1) / pieces + tile - 1) / tile * tile;
    prepared.for_each_head(std::max(block, tile), [&](int64_t batch, int64_t head, int64_t first, int64_t last) {
        attention_kernels().forward(call, batch, head, first, last);
    });
    return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor& lse,
                                                      const OptionalTensor& mask, const OptionalTensor& lengths,
                                                      const OptionalTensor& cu_seqlens, int64_t max_seqlen,
                                                      double scale, double dropout_p, const OptionalTensor& seed) {
    Prepared prepared(query, key, value, mask, lengths, cu_seqlens, scale, dropout_p, seed);
    auto& call = prepared.call;
    STD_TORCH_CHECK(sizes_of(grad) == sizes_of(query) && sizes_of(out) == sizes_of(query) &&
                        sizes_of(lse) == prepared.statistics() && lse.is_contiguous(),
                    "fastbert: attention's gradient, output and statistics must fit its query");
    Tensor dquery = new_output(query), dkey = new_output(key), dvalue = new_output(value);
    call.out = prepared.sequences(out);
    call.grad = prepared.sequences(grad);
    call.dquery = prepared.sequences(dquery);
    call.dkey = prepared.sequences(dkey);
    call.dvalue = prepared.sequences(dvalue);
    call.lse = lse.mutable_data_ptr();
    prepared.for_each_head(std::max<int64_t>(1, prepared.longest), [&](int64_t batch, int64_t head, int64_t, int64_t) {
        attention_kernels().backward(call, batch, head);
    });
    return {dquery, dkey, dvalue};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastbert_cpu, CPU, m) {
    m.impl("attention", TORCH_BOX(&attention_forward));
    m.impl("attention_backward", TORCH_BOX(&attention_backward));
}
}  // namespace fastbert::cpu
#endif
