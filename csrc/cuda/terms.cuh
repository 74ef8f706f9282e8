// What happens at load of scores with an additive mask or bias: the sum is held as z.

#pragma once

#include "held_values.cuh"
#include "loads.cuh"
#include "term_kind.h"

namespace sms_plugin {

struct Term {
  const void* data = nullptr;
  TermKind kind = TermKind::kNone;
};

struct Nothing {};

// One additive term of dtype U whose columns lie one after the other, with or without a bool mask
// of the same kind: a bias and padding, ALiBi and padding, an additive mask. Removed scores become
// -inf and their terms 0, so that nothing but -inf reaches z.
template <typename T, typename U, bool kHasMask>
struct BiasedScores : HeldZ<T> {
  using Acc = Accumulator<T>;
  using Held = typename HeldZ<T>::Held;
  static constexpr int N = kVectorSize<T>;
  static constexpr int kPerLoad = kVectorSize<U>;
  static constexpr int kTermLoads = N / kPerLoad;
  static_assert(N % kPerLoad == 0);

  Operand<T> scores;
  Acc scale;  // above 0: a removed score stays -inf
  Operand<U> term;
  Operand<uint8_t> mask;  // if kHasMask
  int term_operand;       // which operand of the layout the term is

  BiasedScores(const Operand<T>& operand, double factor, const Operand<U>& added,
               const Operand<uint8_t>& flags, int which)
      : scores(operand),
        scale(static_cast<Acc>(factor)),
        term(added),
        mask(flags),
        term_operand(which) {}

  template <typename Columns>
  struct Row {
    RowReader<T, Columns> scores;
    RowReader<U, Columns> term;
    std::conditional_t<kHasMask, FlagReader<N, Columns>, Nothing> mask;
    __device__ __forceinline__ bool is_inner() const { return scores.is_inner(); }
  };
  template <typename Columns>
  struct Raw {
    RawVector<T, Columns> scores;
    RawVector<U, Columns> term[kTermLoads];
    std::conditional_t<kHasMask, typename FlagReader<N, Columns>::Raw, Nothing> mask;
  };

  template <typename Columns>
  __device__ __forceinline__ Row<Columns> row(const DeviceRowLayout& layout,
                                              const RowOffsets& offsets, int64_t start) const {
    Row<Columns> row{
        {scores, offsets.operand[0], layout.cols, start},
        {term, term_operand == 1 ? offsets.operand[1] : offsets.operand[2], layout.cols, start},
        {}};
    bool is_inner = row.scores.is_inner() && row.term.is_inner();
    if constexpr (kHasMask) {
      row.mask = FlagReader<N, Columns>(mask, offsets.operand[1], layout.cols, start);
      is_inner = is_inner && row.mask.is_inner();
    }
    row.scores.keep_inner(is_inner);
    row.term.keep_inner(is_inner);
    if constexpr (kHasMask) row.mask.keep_inner(is_inner);
    return row;
  }

  template <typename Columns>
  __device__ __forceinline__ Raw<Columns> nothing() const {
    Raw<Columns> raw{};
    raw.scores = unread<Columns>(removed_vector<T>());
    return raw;
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ void fetch(const Row<Columns>& row, Index first, Index end,
                                        Raw<Columns>& raw) const {
    row.scores.fetch(first, end, raw.scores);
#pragma unroll
    for (int c = 0; c < kTermLoads; ++c) {
      const Index start = first + c * (kPerLoad * Columns::kStep);
      if (c == 0 || row.term.holds(start)) row.term.fetch(start, end, raw.term[c]);
    }
    if constexpr (kHasMask) row.mask.fetch(first, end, raw.mask);
  }
  template <typename Index>
  __device__ __forceinline__ Raw<ShiftedColumns> gather(const Row<ShiftedColumns>& row, Index first,
                                                        Index end) const {
    Raw<ShiftedColumns> raw{};
    raw.scores = row.scores.gather(first, end);
#pragma unroll
    for (int c = 0; c < kTermLoads; ++c) {
      raw.term[c] = row.term.gather(column_within(first + c * kPerLoad, end), end);
    }
    if constexpr (kHasMask) raw.mask = row.mask.gather(first, end);
    return raw;
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ Held finish(const Row<Columns>& row, const Raw<Columns>& raw,
                                         Index first, Index end, Acc unit = 1) const {
    Held held;
    if constexpr (Columns::kIsSpread) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const Acc added = raw.term[k / kPerLoad].template value<Acc>(k % kPerLoad);
        held.z[k] = fma(raw.scores.template value<Acc>(k), scale * unit, added * unit);
        if constexpr (kHasMask) {
          if (raw.mask.values[k]) held.z[k] = negative_infinity(Acc{});
        }
      }
    } else {
      Vector<T> x = row.scores.take(raw.scores);
      Vector<U> terms[kTermLoads];
#pragma unroll
      for (int c = 0; c < kTermLoads; ++c) terms[c] = row.term.take(raw.term[c]);
      if constexpr (kHasMask) {
        uint32_t flags[FlagReader<N, Columns>::kWords];
        row.mask.take(raw.mask, first, flags);
        replace_flagged(x, flags, removed_vector<T>());
#pragma unroll
        for (int c = 0; c < kTermLoads; ++c) {
          uint32_t own[FlagReader<N, Columns>::kWords];
#pragma unroll
          for (int w = 0; w < FlagReader<N, Columns>::kWords; ++w) own[w] = 0;
          if constexpr (kTermLoads == 1) {
#pragma unroll
            for (int w = 0; w < FlagReader<N, Columns>::kWords; ++w) own[w] = flags[w];
          } else {
            own[0] = flags[c];  // four flags a load of float32
          }
          replace_flagged(terms[c], own, zero_vector<U>());
        }
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const Acc added = value_of<Acc>(terms[k / kPerLoad], k % kPerLoad);
        held.z[k] = fma(value_of<Acc>(x, k), scale * unit, added * unit);
      }
    }
    return held;
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ uint32_t selected(const Row<Columns>& row, Index first,
                                               Index end) const {
    if constexpr (kHasMask) return row.mask.clear_bits(first, end);
    return ~0u;
  }
};

// N columns of a term row, `kStep` apart, in the accumulator; those from `end` on repeat the last.
template <int kStep, typename Acc, int N, typename U, typename Index>
__device__ __forceinline__ void read_term(const U* __restrict__ row,  // strided [cols]
                                          int64_t col_stride, Index first, Index end,
                                          Acc (&out)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    out[k] = to_accumulator<Acc>(row[column_within(first + k * kStep, end) * col_stride]);
  }
}

// Whatever else there is: two terms, dtypes that differ from the scores', columns with strides,
// scales that aren't above 0. Value by value, with dtypes and strides known at run time only.
template <typename T>
struct GeneralScores : HeldZ<T> {
  using Acc = Accumulator<T>;
  using Held = typename HeldZ<T>::Held;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kDouble : Table::kRare;

  Operand<T> scores;
  Acc scale;  // of any sign
  Term mask;  // strided, broadcasts to [rows, cols]
  Term bias;  // same

  GeneralScores(const Operand<T>& operand, double factor, const Term& mask_term,
                const Term& bias_term)
      : scores(operand), scale(static_cast<Acc>(factor)), mask(mask_term), bias(bias_term) {}

  template <typename Columns>
  struct Row {
    RowReader<T, Columns> scores;
    const void* mask;  // strided [cols]
    const void* bias;  // strided [cols]
    int64_t mask_stride;
    int64_t bias_stride;
    __device__ __forceinline__ bool is_inner() const { return scores.is_inner(); }
  };
  template <typename Columns>
  using Raw = RawVector<T, Columns>;

  static __device__ __forceinline__ const void* advance(const Term& term, int64_t offset) {
    const int64_t size = term.kind == TermKind::kDouble  ? 8
                         : term.kind == TermKind::kFloat ? 4
                         : term.kind == TermKind::kBool  ? 1
                                                         : 2;
    return static_cast<const char*>(term.data) + offset * size;
  }

  template <typename Columns>
  __device__ __forceinline__ Row<Columns> row(const DeviceRowLayout& layout,
                                              const RowOffsets& offsets, int64_t start) const {
    return {{scores, offsets.operand[0], layout.cols, start},
            advance(mask, offsets.operand[1] + start * layout.col_strides[1]),
            advance(bias, offsets.operand[2] + start * layout.col_strides[2]),
            layout.col_strides[1],
            layout.col_strides[2]};
  }

  template <typename Columns>
  __device__ __forceinline__ Raw<Columns> nothing() const {
    return unread<Columns>(removed_vector<T>());
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ void fetch(const Row<Columns>& row, Index first, Index end,
                                        Raw<Columns>& raw) const {
    row.scores.fetch(first, end, raw);
  }
  template <typename Index>
  __device__ __forceinline__ Raw<ShiftedColumns> gather(const Row<ShiftedColumns>& row, Index first,
                                                        Index end) const {
    return row.scores.gather(first, end);
  }

  // z += term, in the unit and in whatever dtype the term is stored.
  template <int kStep, typename Index>
  static __device__ __forceinline__ void add(TermKind kind, const void* row, int64_t col_stride,
                                             Index first, Index end, Acc unit, Acc (&z)[N]) {
    Acc values[N];
    switch (kind) {
      case TermKind::kHalf:
        read_term<kStep>(static_cast<const __half*>(row), col_stride, first, end, values);
        break;
      case TermKind::kBFloat16:
        read_term<kStep>(static_cast<const __nv_bfloat16*>(row), col_stride, first, end, values);
        break;
      case TermKind::kFloat:
        read_term<kStep>(static_cast<const float*>(row), col_stride, first, end, values);
        break;
      case TermKind::kDouble:
        read_term<kStep>(static_cast<const double*>(row), col_stride, first, end, values);
        break;
      default:
        return;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) z[k] = fma(values[k], unit, z[k]);
  }

  // Bits of the columns that a bool mask keeps.
  template <typename Columns, typename Index>
  __device__ __forceinline__ uint32_t selected(const Row<Columns>& row, Index first,
                                               Index end) const {
    if (mask.kind != TermKind::kBool) return ~0u;
    const auto* flags = static_cast<const uint8_t*>(row.mask);
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      bits |=
          (flags[column_within(first + k * Columns::kStep, end) * row.mask_stride] == 0 ? 1u : 0u)
          << k;
    }
    return bits;
  }

  template <typename Columns, typename Index>
  __device__ __forceinline__ Held finish(const Row<Columns>& row, const Raw<Columns>& raw,
                                         Index first, Index end, Acc unit = 1) const {
    Held held;
    if (first >= end) {
      HeldZ<T>::cut(held, 0);
      return held;
    }
    const Vector<T> x = row.scores.take(raw);
#pragma unroll
    for (int k = 0; k < N; ++k) held.z[k] = value_of<Acc>(x, k) * (scale * unit);
    // One copy of the code for both terms: two would spill.
#pragma unroll 1
    for (int t = 0; t < 2; ++t) {
      const bool is_bias = t == 0;
      add<Columns::kStep>(is_bias ? bias.kind : mask.kind, is_bias ? row.bias : row.mask,
                          is_bias ? row.bias_stride : row.mask_stride, first, end, unit, held.z);
    }
    // Selection comes after all arithmetic. A scale that isn't above 0 needs it beyond the end too.
    const uint32_t kept = selected(row, first, end);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const bool is_within = !Columns::kIsSpread || first + k * Columns::kStep < end;
      if (!is_within || !(kept >> k & 1u)) held.z[k] = negative_infinity(Acc{});
    }
    return held;
  }
};

}  // namespace sms_plugin
