// What happens at load of scores without added terms. terms.cuh has those with.
//
// A load functor says what is fetched of a vector of columns (Raw) and what stays of it in
// registers (Held), and gives values from it: ordered as z is, times a factor. The kernels know
// nothing else about masks. Removed columns hold what becomes z = -inf. Values may be asked for in
// a unit (1, or 1/8 in odd rows).

#pragma once

#include "exponential.cuh"
#include "mapping.cuh"
#include "row_reader.cuh"
#include "rows.cuh"
#include "spread_reader.cuh"

namespace sms_plugin {

// Whether exponents of 2 can be had from scores by one float32 factor.
inline bool is_ordinary_scale(double scale) { return scale > 0x1p-60 && scale < 0x1p60; }

// A vector of -inf.
template <typename T>
__device__ __forceinline__ Vector<T> removed_vector() {
  Vector<T> vector;
#pragma unroll
  for (int w = 0; w < kVectorBytes / 4; ++w) {
    if constexpr (std::is_same_v<T, __half>) {
      vector.words[w] = 0xfc00fc00u;
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      vector.words[w] = 0xff80ff80u;
    } else if constexpr (sizeof(T) == 4) {
      vector.words[w] = 0xff800000u;
    } else {
      vector.words[w] = w % 2 == 0 ? 0u : 0xfff00000u;
    }
  }
  return vector;
}

// The largest value of a vector. NaN loses.
template <typename T, typename Acc = Accumulator<T>>
__device__ __forceinline__ Acc packed_max(const Vector<T>& vector) {
  if constexpr (sizeof(T) == 2) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair pairs[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) pairs[w] = *reinterpret_cast<const Pair*>(&vector.words[w]);
    const Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return larger(to_accumulator<Acc>(largest.x), to_accumulator<Acc>(largest.y));
  } else {
    Acc largest = element(vector, 0);
#pragma unroll
    for (int k = 1; k < kVectorSize<T>; ++k) largest = larger(largest, element(vector, k));
    return largest;
  }
}

// Scores times scale, kept packed in their own dtype.
template <typename T>
struct PlainScores {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kDouble : Table::kPacked;
  static constexpr int kOperands = 1;           // of the layout
  static constexpr bool kMayOverflow = false;   // whether -inf may come of finite operands
  static constexpr bool kHoldsWeights = false;  // whether exponentials take the place of values
  using Held = Vector<T>;

  Operand<T> scores;
  Acc scale;             // above 0, so that the largest score has the largest z
  float exponent_scale;  // scale in the unit of exponents
  float limit;           // of |z| of a regular row; below 0 if there are none

  template <typename Columns>
  using Row = RowReader<T, Columns>;
  template <typename Columns>
  using Raw = RawVector<T, Columns>;

  PlainScores(const Operand<T>& operand, double factor)
      : scores(operand),
        scale(static_cast<Acc>(factor)),
        exponent_scale(static_cast<float>(factor * kExponentUnit<T>)),
        limit(is_ordinary_scale(factor) ? kRegularZ : -1.0f) {}

  template <typename Columns>
  __device__ __forceinline__ Row<Columns> row(const DeviceRowLayout& layout,
                                              const RowOffsets& offsets, int64_t start) const {
    return {scores, offsets.operand[0], layout.cols, start};
  }

  // What stands for columns that aren't loaded.
  template <typename Columns>
  __device__ __forceinline__ Raw<Columns> nothing() const {
    return unread<Columns>(removed_vector<T>());
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ void fetch(const Row<Columns>& row, Index first, Index end,
                                        Raw<Columns>& raw) const {
    row.fetch(first, end, raw);
  }
  template <typename Index>
  __device__ __forceinline__ Raw<ShiftedColumns> gather(const Row<ShiftedColumns>& row, Index first,
                                                        Index end) const {
    return row.gather(first, end);
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ Held finish(const Row<Columns>& row, const Raw<Columns>& raw, Index,
                                         Index, Acc = 1) const {
    return row.take(raw);
  }

  // Columns from `left` on become removed.
  static __device__ __forceinline__ void cut(Held& held, int left) {
    cut_vector(held, left, removed_vector<T>());
  }

  __device__ __forceinline__ Acc value(const Held& held, int k) const {
    return value_of<Acc>(held, k);
  }
  __device__ __forceinline__ Acc largest(const Held& held) const { return packed_max(held); }

  // From a value to z; to z in eighths, of an odd row.
  __device__ __forceinline__ Acc z(Acc value) const { return value * scale; }
  __device__ __forceinline__ Acc odd_z(Acc value) const {
    return value * (scale * static_cast<Acc>(1 / kHeadroom));
  }
  // From a value to an exponent.
  __device__ __forceinline__ float exponent_factor() const { return exponent_scale; }
  __device__ __forceinline__ float regular_limit() const { return limit; }

  // Bits of the columns that selection keeps.
  template <typename Columns, typename Index>
  __device__ __forceinline__ uint32_t selected(const Row<Columns>&, Index, Index) const {
    return ~0u;
  }

  static __device__ __forceinline__ void between_passes(Held& held) { keep_packed(held); }
};

// The same under a bool mask: removed scores become -inf, in place.
template <typename T>
struct SelectedScores : PlainScores<T> {
  using Base = PlainScores<T>;
  using Held = typename Base::Held;
  using Acc = typename Base::Acc;
  static constexpr int N = Base::N;
  static constexpr int kOperands = 2;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kDouble : Table::kMasked;

  Operand<uint8_t> mask;  // columns one after the other

  template <typename Columns>
  struct Row {
    RowReader<T, Columns> scores;
    FlagReader<N, Columns> mask;
    __device__ __forceinline__ bool is_inner() const {
      return scores.is_inner() && mask.is_inner();
    }
  };
  template <typename Columns>
  struct Raw {
    RawVector<T, Columns> scores;
    typename FlagReader<N, Columns>::Raw mask;
  };

  SelectedScores(const Operand<T>& operand, double factor, const Operand<uint8_t>& flags)
      : Base(operand, factor), mask(flags) {}

  template <typename Columns>
  __device__ __forceinline__ Row<Columns> row(const DeviceRowLayout& layout,
                                              const RowOffsets& offsets, int64_t start) const {
    Row<Columns> row{{this->scores, offsets.operand[0], layout.cols, start},
                     {mask, offsets.operand[1], layout.cols, start}};
    const bool is_inner = row.is_inner();
    row.scores.keep_inner(is_inner);
    row.mask.keep_inner(is_inner);
    return row;
  }

  template <typename Columns>
  __device__ __forceinline__ Raw<Columns> nothing() const {
    return {unread<Columns>(removed_vector<T>()), {}};
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ void fetch(const Row<Columns>& row, Index first, Index end,
                                        Raw<Columns>& raw) const {
    row.scores.fetch(first, end, raw.scores);
    row.mask.fetch(first, end, raw.mask);
  }
  template <typename Index>
  __device__ __forceinline__ Raw<ShiftedColumns> gather(const Row<ShiftedColumns>& row, Index first,
                                                        Index end) const {
    return {row.scores.gather(first, end), row.mask.gather(first, end)};
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ Held finish(const Row<Columns>& row, const Raw<Columns>& raw,
                                         Index first, Index, Acc = 1) const {
    Held held = row.scores.take(raw.scores);
    uint32_t flags[FlagReader<N, Columns>::kWords];
    row.mask.take(raw.mask, first, flags);
    replace_flagged(held, flags, removed_vector<T>());
    return held;
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ uint32_t selected(const Row<Columns>& row, Index first,
                                               Index end) const {
    return row.mask.clear_bits(first, end);
  }
};

}  // namespace sms_plugin
