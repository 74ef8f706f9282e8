// Host side of the CUDA operators: check, return if empty, allocate, guard, dispatch, launch.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "../call_count.h"
#include "../operands.h"
#include "launch.h"
#include "stream.h"
#include "terms.cuh"

namespace sms_plugin {
namespace {

using torch::stable::accelerator::DeviceGuard;

TermKind term_kind(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Bool:
      return TermKind::kBool;
    case ScalarType::Half:
      return TermKind::kHalf;
    case ScalarType::BFloat16:
      return TermKind::kBFloat16;
    case ScalarType::Float:
      return TermKind::kFloat;
    case ScalarType::Double:
      return TermKind::kDouble;
    default:
      throw std::runtime_error("sms_plugin: a dtype that the Python checks should have refused");
  }
}

HostTerm host_term(const std::optional<Tensor>& term) {
  if (!term) return {};
  return {term->const_data_ptr(), static_cast<int>(term_kind(term->scalar_type()))};
}

// Calls `launch` with a value of the kernel's type for `dtype`.
template <typename Launch>
void with_kernel_type(ScalarType dtype, Launch&& launch) {
  switch (dtype) {
    case ScalarType::Half:
      return launch(__half{});
    case ScalarType::BFloat16:
      return launch(__nv_bfloat16{});
    case ScalarType::Float:
      return launch(float{});
    case ScalarType::Double:
      return launch(double{});
    default:
      throw std::runtime_error("sms_plugin: a dtype that the Python checks should have refused");
  }
}

ScalarType accumulator_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor scaled_mask_softmax(const Tensor& scores_in, const std::optional<Tensor>& mask,
                           const std::optional<Tensor>& bias, double scale, bool is_causal) {
  count_call(Op::kForward, CountedDevice::kCuda);
  const DeviceGuard guard(scores_in.get_device_index());
  const Tensor scores = with_dense_rows(scores_in);
  Tensor probs = torch::stable::new_empty(scores, shape_of(scores));
  if (scores.numel() == 0) return probs;

  const ForwardArguments arguments{scores.const_data_ptr(),
                                   host_term(mask),
                                   host_term(bias),
                                   probs.mutable_data_ptr(),
                                   scale,
                                   causal_limit(scores, is_causal),
                                   forward_layout(scores, mask, bias, is_causal)};
  const cudaStream_t stream = current_stream(scores.get_device_index());
  with_kernel_type(scores.scalar_type(),
                   [&](auto type) { launch_forward<decltype(type)>(arguments, stream); });
  return probs;
}

// A gradient that the caller may want: dz summed to `shape`, in `dtype` (none: not wanted).
struct Wish {
  const std::vector<int64_t>& shape;
  std::optional<ScalarType> dtype;
};

// The tensors of one bias gradient, and what the kernels need to know of it.
struct BiasGrad {
  Tensor grad;
  Tensor partial;
  BiasGradArguments arguments;
};

BiasGrad make_bias_grad(const Tensor& grad_probs, const Tensor& probs,
                        const BackwardArguments& backward, const Wish& wish) {
  Tensor grad = torch::stable::new_empty(probs, wish.shape, wish.dtype);
  const BiasReduction reduction = bias_reduction(grad_probs, probs, wish.shape);
  const int64_t chunks = bias_grad_chunks(reduction.kept, reduction.reduced, reduction.cols_kept);
  Tensor partial = torch::stable::new_empty(probs, {chunks, grad.numel()},
                                            accumulator_dtype(probs.scalar_type()));
  const BiasGradArguments arguments{backward,
                                    partial.mutable_data_ptr(),
                                    grad.mutable_data_ptr(),
                                    static_cast<int>(term_kind(*wish.dtype)),
                                    chunks,
                                    reduction.kept,
                                    reduction.reduced,
                                    reduction.cols_kept};
  return {grad, partial, arguments};
}

std::tuple<Tensor, Tensor, Tensor> scaled_mask_softmax_backward(
    const Tensor& grad_probs_in, const Tensor& probs_in, double scale, bool is_causal,
    const std::vector<int64_t>& mask_shape, std::optional<ScalarType> mask_dtype,
    const std::vector<int64_t>& bias_shape, std::optional<ScalarType> bias_dtype) {
  count_call(Op::kBackward, CountedDevice::kCuda);
  const DeviceGuard guard(probs_in.get_device_index());
  const Tensor grad_probs = with_dense_rows(grad_probs_in);
  const Tensor probs = with_dense_rows(probs_in);
  Tensor grad_scores = torch::stable::new_empty(probs, shape_of(probs));
  const Wish wishes[2] = {{mask_shape, mask_dtype}, {bias_shape, bias_dtype}};
  Tensor grads[2];
  for (int w = 0; w < 2; ++w) {
    if (!wishes[w].dtype) grads[w] = torch::stable::new_empty(probs, {0});
  }
  if (probs.numel() == 0) {
    for (int w = 0; w < 2; ++w) {
      if (wishes[w].dtype) {
        grads[w] = torch::stable::new_zeros(probs, wishes[w].shape, wishes[w].dtype);
      }
    }
    return {grad_scores, grads[0], grads[1]};
  }

  const RowLayout layout = backward_layout(grad_probs, probs, is_causal);
  const bool needs_dots = mask_dtype || bias_dtype;
  Tensor dots = torch::stable::new_empty(probs, {needs_dots ? layout.rows : 0},
                                         accumulator_dtype(probs.scalar_type()));
  const BackwardArguments backward{grad_probs.const_data_ptr(),
                                   probs.const_data_ptr(),
                                   grad_scores.mutable_data_ptr(),
                                   needs_dots ? dots.mutable_data_ptr() : nullptr,
                                   nullptr,
                                   scale,
                                   causal_limit(probs, is_causal),
                                   layout};
  const cudaStream_t stream = current_stream(probs.get_device_index());
  with_kernel_type(probs.scalar_type(), [&](auto type) {
    using T = decltype(type);
    // One gradient at most comes out of the same pass as grad_scores; the other reads the dots.
    bool has_grad_scores = false;
    for (int w = 1; w >= 0; --w) {
      if (!wishes[w].dtype) continue;
      const BiasGrad bias = make_bias_grad(grad_probs, probs, backward, wishes[w]);
      grads[w] = bias.grad;
      const bool in_one_pass =
          takes_backward_biased<T>(bias.arguments.kept, bias.arguments.cols_kept);
      if (!has_grad_scores && in_one_pass) {
        launch_backward_biased<T>(bias.arguments, stream);
      } else if (!has_grad_scores && takes_dz<T>(bias.arguments)) {
        BackwardArguments with_dz = backward;
        with_dz.dz = bias.arguments.grad_bias;
        launch_backward<T>(with_dz, stream);
      } else {
        if (!has_grad_scores) launch_backward<T>(backward, stream);
        launch_bias_grad<T>(bias.arguments, stream);
      }
      has_grad_scores = true;
    }
    if (!has_grad_scores) launch_backward<T>(backward, stream);
  });
  return {grad_scores, grads[0], grads[1]};
}

}  // namespace

int64_t bias_grad_chunks(const RowLayout& kept, const RowLayout& reduced, bool cols_kept) {
  constexpr int64_t kThreadsWanted = int64_t{1} << 18;  // fills a card of 132 multiprocessors
  constexpr int64_t kMinRows = 8;       // below that a chunk isn't worth its partial
  constexpr int64_t kMaxChunks = 4096;  // grid y ends at 65535
  constexpr int64_t kColumnsPerThread = 8;
  const int64_t per_row = cols_kept ? (kept.cols + kColumnsPerThread - 1) / kColumnsPerThread : 128;
  const int64_t threads = kept.rows * per_row;
  const int64_t wanted = (kThreadsWanted + threads - 1) / (threads > 0 ? threads : 1);
  const int64_t useful = (reduced.rows + kMinRows - 1) / kMinRows;
  const int64_t chunks = wanted < useful ? wanted : useful;
  return chunks < 1 ? 1 : (chunks < kMaxChunks ? chunks : kMaxChunks);
}

}  // namespace sms_plugin

STABLE_TORCH_LIBRARY_IMPL(sms_plugin, CUDA, m) {
  m.impl("scaled_mask_softmax", TORCH_BOX(&sms_plugin::scaled_mask_softmax));
  m.impl("scaled_mask_softmax_backward", TORCH_BOX(&sms_plugin::scaled_mask_softmax_backward));
}
