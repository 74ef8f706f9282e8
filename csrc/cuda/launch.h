// Between the host code, which knows tensors, and the kernels, which know pointers. Instances for
// each dtype.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

#include "../row_layout.h"

namespace sms_plugin {

// Gives so many bytes of device memory, which live until the launch has been queued: the memory is
// reused in the order of the stream.
using Workspace = std::function<void*(int64_t)>;

// Data of an additive or bool tensor; the values are those of TermKind.
struct HostTerm {
  const void* data = nullptr;
  int kind = 0;
};

struct ForwardArguments {
  const void* scores;  // strided [rows, cols]
  HostTerm mask;       // strided, broadcasts to [rows, cols]
  HostTerm bias;       // same, never bool
  void* probs;         // [rows, cols]
  double scale;
  CausalLimit causal;
  RowLayout layout;  // operands: scores, mask, bias
  Workspace workspace;
};

struct BackwardArguments {
  const void* grad_probs;  // strided [rows, cols]
  const void* probs;       // strided [rows, cols]
  void* grad_scores;       // [rows, cols]
  void* dots;              // [rows] in the accumulator, or null
  void* dz;                // [rows, cols], or null; only if takes_dz
  double scale;
  CausalLimit causal;
  RowLayout layout;  // operands: grad_probs, probs
  Workspace workspace;
};

// The gradient of a bias. grad_scores and the dots of `backward` are written along with it by
// launch_backward_biased; launch_bias_grad reads the dots.
struct BiasGradArguments {
  BackwardArguments backward;
  void* partial;    // [chunks, bias values] in the accumulator, or null if is_final
  void* grad_bias;  // [bias values]
  int kind;         // dtype of grad_bias, as in TermKind
  int64_t chunks;
  RowLayout kept;     // operands: grad_probs, probs, dots
  RowLayout reduced;  // same
  bool cols_kept;
};

// How many chunks the reduced rows are cut into: enough threads for a large card, by shape alone.
int64_t bias_grad_chunks(const RowLayout& kept, const RowLayout& reduced, bool cols_kept);

// T is __half, __nv_bfloat16, float or double. Nothing is launched for an empty layout.
template <typename T>
void launch_forward(const ForwardArguments& arguments, cudaStream_t stream);
// What launch_forward chooses from. Without a mask or bias; with a bool mask; with one additive
// term of dtype U, operand `which` of the layout, and perhaps a bool mask; with anything. All but
// the last want a scale above 0, and terms whose columns lie one after the other.
template <typename T>
void launch_plain(const ForwardArguments& arguments, cudaStream_t stream);
template <typename T>
void launch_selected(const ForwardArguments& arguments, cudaStream_t stream);
template <typename T, typename U>
void launch_biased(const ForwardArguments& arguments, int which, cudaStream_t stream);
template <typename T>
void launch_general(const ForwardArguments& arguments, cudaStream_t stream);

template <typename T>
void launch_backward(const BackwardArguments& arguments, cudaStream_t stream);
// Whether launch_backward_biased takes this bias: one value for each column, rows that fit in
// registers.
template <typename T>
bool takes_backward_biased(const RowLayout& kept, bool cols_kept);
// Whether the gradient of this bias is dz, row by row, and launch_backward can write it.
template <typename T>
bool takes_dz(const BiasGradArguments& arguments);
// Whether the one pass of launch_backward_biased writes the gradient itself: no partial sums.
template <typename T>
bool is_final(const BiasGradArguments& arguments);
template <typename T>
void launch_backward_biased(const BiasGradArguments& arguments, cudaStream_t stream);
template <typename T>
void launch_bias_grad(const BiasGradArguments& arguments, cudaStream_t stream);

}  // namespace sms_plugin
