// The border between the host side, which knows tensors, and the row kernels, which know pointers.
// No torch here.

#pragma once

#include <cstdint>

#include "row_layout.h"

namespace sms_plugin {

enum class Dtype : int { kFloat16, kBFloat16, kFloat32, kFloat64, kBool };

constexpr int kScoreDtypes = 4;  // all but bool

// What is added to the scaled scores, or selects among them. Read in place, at any strides.
struct Operand {
  const void* data = nullptr;  // broadcast to [rows, cols]; null: absent
  Dtype dtype = Dtype::kFloat32;
};

struct ForwardCall {
  const void* scores;  // [rows, cols], layout operand 0, columns one after the other
  Operand mask;        // [rows, cols], layout operand 1
  Operand bias;        // [rows, cols], layout operand 2
  void* probs;         // [rows, cols], contiguous
  RowLayout layout;    // innermost dimension: the queries, if causal
  CausalLimit causal;  // which keys a row may see
  double scale;
};

// dz [rows, cols] is summed over `reduced` rows into `kept` ones. The reduced rows are cut into
// chunks, whose number depends on the shape alone: a sum doesn't depend on the number of threads.
struct BackwardCall {
  const void* grad_probs;   // [rows, cols], layout operand 0
  const void* probs;        // [rows, cols], layout operand 1
  void* grad_scores;        // [rows, cols], contiguous; null: not wanted
  void* sums;               // [kept.rows, chunks, sum_cols], contiguous; null: not wanted
  Dtype sums_dtype;         // of the bias, or of the accumulators if there are chunks to add up
  int64_t sum_cols;         // cols, or 1: all columns into one
  RowLayout kept, reduced;  // operand 2 is the index of a row in [rows, cols]
  int64_t chunks;           // of the reduced rows
  CausalLimit causal;
  double scale;
};

// Adds up the chunks, in order.
struct ChunkCall {
  const void* sums;  // [kept_rows, chunks, cols], accumulators
  void* total;       // [kept_rows, cols], contiguous
  Dtype total_dtype;
  int64_t chunks, cols;
};

// Float32 accumulators for 16- and 32-bit scores, float64 for float64.
struct RowKernels {
  // Rows [begin, end) of the call.
  void (*forward)(const ForwardCall& call, int64_t begin, int64_t end);
  // Units [begin, end) of kept.rows * chunks.
  void (*backward)(const BackwardCall& call, int64_t begin, int64_t end);
  // Kept rows [begin, end).
  void (*add_chunks)(const ChunkCall& call, int64_t begin, int64_t end);
};

// One set of kernels per instruction set, by the dtype of the scores.
struct RowKernelSet {
  RowKernels by_dtype[kScoreDtypes];
};

extern const RowKernelSet kBaselineKernels;
#if defined(__x86_64__)
extern const RowKernelSet kAvx2Kernels;
extern const RowKernelSet kAvx512Kernels;
#endif

}  // namespace sms_plugin
