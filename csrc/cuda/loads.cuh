// What happens at load: one functor for scores alone, one for scores with any mask, bias or
// selection.
//
// A load functor says what stays in registers of a vector of columns (Held), reads it, and gives z
// from it in eighths (see kHeadroom). The kernels know nothing else about masks.

#pragma once

#include "mapping.cuh"
#include "primitives.cuh"
#include "rows.cuh"

namespace sms_plugin {

// What a mask or bias holds; the dtype is a runtime value, since it doesn't change the mapping.
enum class TermKind : int { kNone, kBool, kHalf, kBFloat16, kFloat, kDouble };

struct Term {
  const void* data = nullptr;
  TermKind kind = TermKind::kNone;
};

// Scores times scale, kept packed in their own dtype.
template <typename T>
struct PlainScores {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = sizeof(T) == 8 ? Table::kCoarse : Table::kFine;
  static constexpr int kMaxVectors = 8;
  static constexpr int kResidentThreads = 1024;
  static constexpr int64_t kMaxResident = sizeof(T) == 8 ? 512 : 4096;  // vectors a row, no spills
  using Held = Vector<T>;

  const T* scores;  // strided [rows, cols]
  Acc scale;        // in eighths; not 0, see padding
  T padding;        // becomes -inf when scaled
  struct Row {
    const T* scores;  // [cols]
    uint32_t shift;   // misalignment of scores
  };

  __device__ __forceinline__ Row row(const DeviceRowLayout&, const RowOffsets& offsets) const {
    const T* start = scores + offsets.operand[0];
    return {start, misalignment(start)};
  }

  template <typename Index>
  __device__ __forceinline__ Held load(const Row& row, Index first, Index end) const {
    return load_vector(row.scores, first, end, row.shift, padding);
  }

  __device__ __forceinline__ Held removed() const {
    Held held = zero_vector<T>();
#pragma unroll
    for (int k = 0; k < N; ++k) put_element(held, k, padding);
    return held;
  }

  __device__ __forceinline__ Acc z(const Held& held, int k) const {
    return to_accumulator<Acc>(element(held, k)) * scale;
  }

  __device__ __forceinline__ bool is_selected(const Held&, int) const { return true; }

  static __device__ __forceinline__ void between_passes(Held& held) { keep_packed(held); }
};

// Columns [first, first + N) of a term row, in the accumulator; those from `end` on repeat the
// last.
template <typename Acc, int N, typename U, typename Index>
__device__ __forceinline__ void read_term(const U* __restrict__ row,  // strided [cols]
                                          int64_t col_stride, Index first, Index end,
                                          Acc (&out)[N]) {
  constexpr int kPerLoad = kVectorSize<U> < N ? kVectorSize<U> : N;
  struct alignas(kPerLoad * sizeof(U)) Chunk {
    U values[kPerLoad];
  };
  const bool is_aligned = reinterpret_cast<uintptr_t>(row) % sizeof(Chunk) == 0;
  if (col_stride == 1 && is_aligned && first + N <= end) {
#pragma unroll
    for (int c = 0; c < N / kPerLoad; ++c) {
      const Chunk chunk = *reinterpret_cast<const Chunk*>(row + first + c * kPerLoad);
#pragma unroll
      for (int k = 0; k < kPerLoad; ++k) {
        out[c * kPerLoad + k] = to_accumulator<Acc>(chunk.values[k]);
      }
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    out[k] = to_accumulator<Acc>(row[column_within(first + k, end) * col_stride]);
  }
}

// Scores times scale plus bias plus mask, kept as z; and a bit a column that says what a bool mask
// selects.
template <typename T>
struct MaskedScores {
  using Scalar = T;
  using Acc = Accumulator<T>;
  static constexpr int N = kVectorSize<T>;
  static constexpr Table kTable = Table::kCoarse;
  static constexpr int kResidentThreads = sizeof(T) == 4 ? 1024 : 512;
  static constexpr int64_t kMaxResident = sizeof(T) == 8 ? 512 : 2048;  // vectors a row, no spills
  struct Held {
    Acc z[N];
    uint32_t selected;  // bit k: column first + k isn't removed by selection
  };

  const T* scores;  // strided [rows, cols]
  Acc scale;        // in eighths
  T padding;        // unused: removed columns get their -inf after scaling
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
    constexpr Acc kEighth = static_cast<Acc>(1 / kHeadroom);
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
    for (int k = 0; k < N; ++k) z[k] += values[k] * kEighth;
  }

  template <typename Index>
  static __device__ __forceinline__ uint32_t select(const void* row, int64_t col_stride,
                                                    Index first, Index end) {
    const auto* flags = static_cast<const uint8_t*>(row);
    uint32_t selected = 0;
    struct alignas(N) Chunk {
      uint8_t values[N];
    };
    if (col_stride == 1 && reinterpret_cast<uintptr_t>(flags) % N == 0 && first + N <= end) {
      const Chunk chunk = *reinterpret_cast<const Chunk*>(flags + first);
#pragma unroll
      for (int k = 0; k < N; ++k) selected |= (chunk.values[k] == 0 ? 1u : 0u) << k;
      return selected;
    }
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
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (first + k >= end || !is_selected(held, k)) held.z[k] = negative_infinity(Acc{});
    }
    return held;
  }

  __device__ __forceinline__ Held removed() const {
    Held held;
#pragma unroll
    for (int k = 0; k < N; ++k) held.z[k] = negative_infinity(Acc{});
    held.selected = 0;
    return held;
  }

  __device__ __forceinline__ Acc z(const Held& held, int k) const { return held.z[k]; }

  __device__ __forceinline__ bool is_selected(const Held& held, int k) const {
    return held.selected >> k & 1u;
  }

  static __device__ __forceinline__ void between_passes(Held&) {}
};

}  // namespace sms_plugin
