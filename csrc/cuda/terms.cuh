// What happens at load of scores with an additive mask or bias: the sum is held as z.

#pragma once

#include "loads.cuh"

namespace sms_plugin {

// What a mask or bias holds.
enum class TermKind : int { kNone, kBool, kHalf, kBFloat16, kFloat, kDouble };

struct Term {
  const void* data = nullptr;
  TermKind kind = TermKind::kNone;
};

// z of a vector of columns, and a bit a column that says what a bool mask selects.
template <typename Acc, int N>
struct HeldZ {
  Acc z[N];
  uint32_t selected;

  // Columns from `end` on and those removed by selection become -inf, after all arithmetic.
  template <typename Index>
  __device__ __forceinline__ void remove(Index first, Index end) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (first + k >= end || !(selected >> k & 1u)) z[k] = negative_infinity(Acc{});
    }
  }

  static __device__ __forceinline__ HeldZ removed() {
    HeldZ held;
#pragma unroll
    for (int k = 0; k < N; ++k) held.z[k] = negative_infinity(Acc{});
    held.selected = 0;
    return held;
  }
};

template <typename Acc>
__device__ __forceinline__ Acc eighth() {
  return static_cast<Acc>(1 / kHeadroom);
}

// One additive term of dtype U whose columns lie one after the other, with or without a bool mask
// of the same kind: a bias and padding, ALiBi and padding, an additive mask.
template <typename T, typename U>
struct BiasedScores {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr int kPerLoad = kVectorSize<U>;
  static constexpr Table kTable = Table::kCoarse;
  static constexpr int kResidentThreads = sizeof(T) == 4 ? 768 : 640;
  static constexpr int64_t kMaxResident = sizeof(T) == 4 ? 4096 : 2048;  // vectors a row, no spills
  static_assert(N % kPerLoad == 0);
  using Held = HeldZ<Acc, N>;

  const T* scores;      // strided [rows, cols]
  Acc scale;            // in eighths
  const U* term;        // strided, broadcasts to [rows, cols]
  const uint8_t* mask;  // same, or null
  int term_operand;     // which operand of the layout the term is

  struct Row {
    const T* scores;      // [cols]
    const U* term;        // [cols]
    const uint8_t* mask;  // [cols], or null
    uint32_t shift;       // misalignment of scores
    uint32_t term_shift;  // misalignment of term
  };

  __device__ __forceinline__ Row row(const DeviceRowLayout&, const RowOffsets& offsets) const {
    const T* start = scores + offsets.operand[0];
    const U* term_start = term + (term_operand == 1 ? offsets.operand[1] : offsets.operand[2]);
    return {start, term_start, mask == nullptr ? nullptr : mask + offsets.operand[1],
            misalignment(start), misalignment(term_start)};
  }

  template <typename Index>
  __device__ __forceinline__ Held load(const Row& row, Index first, Index end) const {
    const Vector<T> x = load_vector(row.scores, first, end, row.shift, from_accumulator<T>(Acc{0}));
    Vector<U> values[N / kPerLoad];
#pragma unroll
    for (int c = 0; c < N / kPerLoad; ++c) {
      values[c] = zero_vector<U>();
      const Index start = first + c * kPerLoad;
      if (start < end) {
        values[c] = load_vector(row.term, start, end, row.term_shift, from_accumulator<U>(0.0f));
      }
    }
    Held held;
    held.selected = row.mask == nullptr ? ~0u : selected_columns<N>(row.mask, first, end);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const Acc added = to_accumulator<Acc>(element(values[k / kPerLoad], k % kPerLoad));
      held.z[k] = fma(added, eighth<Acc>(), to_accumulator<Acc>(element(x, k)) * scale);
    }
    held.remove(first, end);
    return held;
  }

  __device__ __forceinline__ Held removed() const { return Held::removed(); }
  __device__ __forceinline__ Acc z(const Held& held, int k) const { return held.z[k]; }
  __device__ __forceinline__ bool is_selected(const Held& held, int k) const {
    return held.selected >> k & 1u;
  }
  static __device__ __forceinline__ void between_passes(Held&) {}
};

// Columns [first, first + N) of a term row, in the accumulator; those from `end` on repeat the
// last.
template <typename Acc, int N, typename U, typename Index>
__device__ __forceinline__ void read_term(const U* __restrict__ row,  // strided [cols]
                                          int64_t col_stride, Index first, Index end,
                                          Acc (&out)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    out[k] = to_accumulator<Acc>(row[column_within(first + k, end) * col_stride]);
  }
}

// Whatever else there is: two terms, dtypes that differ from the scores', columns with strides.
// Value by value, with dtypes and strides known at run time only.
template <typename T>
struct GeneralScores {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = Table::kCoarse;
  static constexpr int kResidentThreads = 512;
  static constexpr int64_t kMaxResident = sizeof(T) == 8 ? 512 : 2048;  // vectors a row, no spills
  using Held = HeldZ<Acc, N>;

  const T* scores;  // strided [rows, cols]
  Acc scale;        // in eighths
  Term mask;        // strided, broadcasts to [rows, cols]
  Term bias;        // same

  struct Row {
    const T* scores;   // [cols]
    const void* mask;  // strided [cols]
    const void* bias;  // strided [cols]
    int64_t mask_stride;
    int64_t bias_stride;
    uint32_t shift;  // misalignment of scores
  };

  static __device__ __forceinline__ const void* advance(const Term& term, int64_t offset) {
    const int64_t size = term.kind == TermKind::kDouble  ? 8
                         : term.kind == TermKind::kFloat ? 4
                         : term.kind == TermKind::kBool  ? 1
                                                         : 2;
    return static_cast<const char*>(term.data) + offset * size;
  }

  __device__ __forceinline__ Row row(const DeviceRowLayout& layout,
                                     const RowOffsets& offsets) const {
    const T* start = scores + offsets.operand[0];
    return {start,
            advance(mask, offsets.operand[1]),
            advance(bias, offsets.operand[2]),
            layout.col_strides[1],
            layout.col_strides[2],
            misalignment(start)};
  }

  // z += term / 8, in whatever dtype the term is stored.
  template <typename Index>
  static __device__ __forceinline__ void add(TermKind kind, const void* row, int64_t col_stride,
                                             Index first, Index end, Acc (&z)[N]) {
    Acc values[N];
    switch (kind) {
      case TermKind::kHalf:
        read_term(static_cast<const __half*>(row), col_stride, first, end, values);
        break;
      case TermKind::kBFloat16:
        read_term(static_cast<const __nv_bfloat16*>(row), col_stride, first, end, values);
        break;
      case TermKind::kFloat:
        read_term(static_cast<const float*>(row), col_stride, first, end, values);
        break;
      case TermKind::kDouble:
        read_term(static_cast<const double*>(row), col_stride, first, end, values);
        break;
      default:
        return;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) z[k] = fma(values[k], eighth<Acc>(), z[k]);
  }

  template <typename Index>
  static __device__ __forceinline__ uint32_t select(const void* row, int64_t col_stride,
                                                    Index first, Index end) {
    const auto* flags = static_cast<const uint8_t*>(row);
    uint32_t selected = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      selected |= (flags[column_within(first + k, end) * col_stride] == 0 ? 1u : 0u) << k;
    }
    return selected;
  }

  template <typename Index>
  __device__ __forceinline__ Held load(const Row& row, Index first, Index end) const {
    const Vector<T> x = load_vector(row.scores, first, end, row.shift, from_accumulator<T>(Acc{0}));
    Held held;
#pragma unroll
    for (int k = 0; k < N; ++k) held.z[k] = to_accumulator<Acc>(element(x, k)) * scale;
    // One copy of the code for both terms: two would spill.
#pragma unroll 1
    for (int t = 0; t < 2; ++t) {
      const bool is_bias = t == 0;
      add(is_bias ? bias.kind : mask.kind, is_bias ? row.bias : row.mask,
          is_bias ? row.bias_stride : row.mask_stride, first, end, held.z);
    }
    held.selected =
        mask.kind == TermKind::kBool ? select(row.mask, row.mask_stride, first, end) : ~0u;
    held.remove(first, end);
    return held;
  }

  __device__ __forceinline__ Held removed() const { return Held::removed(); }
  __device__ __forceinline__ Acc z(const Held& held, int k) const { return held.z[k]; }
  __device__ __forceinline__ bool is_selected(const Held& held, int k) const {
    return held.selected >> k & 1u;
  }
  static __device__ __forceinline__ void between_passes(Held&) {}
};

}  // namespace sms_plugin
