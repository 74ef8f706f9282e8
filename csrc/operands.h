// From tensors to rows: what both devices do before they dispatch.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "row_layout.h"

namespace sms_plugin {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

inline StridedShape strided_shape(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return {shape_of(tensor), std::vector<int64_t>(strides.begin(), strides.end())};
}

// Kernels read the columns of scores, probs and their gradients one after the other.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) <= 1 || tensor.stride(last) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

inline CausalLimit causal_limit(const Tensor& scores, bool is_causal) {
  const int64_t dims = scores.dim();
  return {is_causal, dims > 1 ? scores.size(dims - 2) : 1, scores.size(dims - 1)};
}

// Layout over scores (operand 0), mask (1) and bias (2); an absent operand gets zeros.
inline RowLayout forward_layout(const Tensor& scores, const std::optional<Tensor>& mask,
                                const std::optional<Tensor>& bias, bool is_causal) {
  const StridedShape absent;
  return make_row_layout(shape_of(scores),
                         {strided_shape(scores), mask ? strided_shape(*mask) : absent,
                          bias ? strided_shape(*bias) : absent},
                         is_causal);
}

// Layout over grad_probs (operand 0) and probs (1).
inline RowLayout backward_layout(const Tensor& grad_probs, const Tensor& probs, bool is_causal) {
  return make_row_layout(shape_of(probs), {strided_shape(grad_probs), strided_shape(probs)},
                         is_causal);
}

// How dz [..., cols] is summed to the shape of a bias: each bias row sums the rows of `reduced`,
// and all columns into one where the bias has a single column.
struct BiasReduction {
  RowLayout kept;     // bias rows; operands: grad_probs, probs, row dots
  RowLayout reduced;  // rows summed into each of them; same operands
  bool cols_kept;     // false: the bias broadcasts over the columns
};

inline BiasReduction bias_reduction(const Tensor& grad_probs, const Tensor& probs,
                                    const std::vector<int64_t>& bias_shape) {
  const std::vector<int64_t> shape = shape_of(probs);
  StridedShape dots{shape, std::vector<int64_t>(shape.size(), 1)};  // one value a row, contiguous
  dots.sizes.back() = 1;
  for (size_t d = shape.size() - 1; d-- > 0;) {
    dots.strides[d] = dots.strides[d + 1] * dots.sizes[d + 1];
  }
  const size_t missing = shape.size() - bias_shape.size();
  std::vector<int64_t> kept = shape;
  std::vector<int64_t> reduced = shape;
  for (size_t d = 0; d + 1 < shape.size(); ++d) {
    const bool is_reduced = d < missing || bias_shape[d - missing] != shape[d];
    (is_reduced ? kept : reduced)[d] = 1;
  }
  const std::vector<StridedShape> operands = {strided_shape(grad_probs), strided_shape(probs),
                                              dots};
  const bool cols_kept = !bias_shape.empty() && bias_shape.back() == shape.back();
  return {make_row_layout(kept, operands, false), make_row_layout(reduced, operands, false),
          cols_kept};
}

}  // namespace sms_plugin
