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
#include "term_kind.h"

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

// Memory of `like`'s device for kernels to exchange results in, held by `memory`.
Workspace workspace_of(const Tensor& like, Tensor& memory) {
  return [&](int64_t bytes) {
    memory = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
    return memory.mutable_data_ptr();
  };
}

Tensor scaled_mask_softmax(const Tensor& scores_in, const std::optional<Tensor>& mask,
                           const std::optional<Tensor>& bias, double scale, bool is_causal) {
  count_call(Op::kForward, CountedDevice::kCuda);
  const DeviceGuard guard(scores_in.get_device_index());
  const Tensor scores = with_dense_rows(scores_in);
  Tensor probs = torch::stable::new_empty(scores, shape_of(scores));
  if (scores.numel() == 0) return probs;

  Tensor memory;
  const ForwardArguments arguments{scores.const_data_ptr(),
                                   host_term(mask),
                                   host_term(bias),
                                   probs.mutable_data_ptr(),
                                   scale,
                                   causal_limit(scores, is_causal),
                                   forward_layout(scores, mask, bias, is_causal),
                                   workspace_of(scores, memory)};
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

// Where the gradient of a mask or bias comes from.
enum class Source {
  kDz,       // it is dz itself, written beside grad_scores
  kOnePass,  // summed in the pass that writes grad_scores
  kDots,     // a pass of its own, which reads the dot of every row
};

struct BiasGrad {
  Tensor grad;
  Source source;
  BiasGradArguments arguments;  // without partial sums
};

// One gradient at most comes out of the pass that writes grad_scores.
template <typename T>
BiasGrad make_bias_grad(const Tensor& grad_probs, const Tensor& probs,
                        const BackwardArguments& backward, const Wish& wish, bool in_first_pass) {
  Tensor grad = torch::stable::new_empty(probs, wish.shape, wish.dtype);
  const BiasReduction reduction = bias_reduction(grad_probs, probs, wish.shape);
  const BiasGradArguments arguments{
      backward,
      nullptr,
      grad.mutable_data_ptr(),
      static_cast<int>(term_kind(*wish.dtype)),
      bias_grad_chunks(reduction.kept, reduction.reduced, reduction.cols_kept),
      reduction.kept,
      reduction.reduced,
      reduction.cols_kept};
  const Source source = !in_first_pass           ? Source::kDots
                        : takes_dz<T>(arguments) ? Source::kDz
                        : takes_backward_biased<T>(arguments.kept, arguments.cols_kept)
                            ? Source::kOnePass
                            : Source::kDots;
  return {grad, source, arguments};
}

// Runs the kernels of one gradient. grad_scores and the dots are written by then, unless it comes
// out of the pass that writes them.
template <typename T>
void launch(BiasGrad& bias, const Tensor& probs, cudaStream_t stream) {
  if (bias.source == Source::kDz) {
    bias.arguments.backward.dz = bias.arguments.grad_bias;
    return launch_backward<T>(bias.arguments.backward, stream);
  }
  // Freed in the order of the stream when this returns.
  Tensor partial;
  if (bias.source == Source::kDots || !is_final<T>(bias.arguments)) {
    partial = torch::stable::new_empty(probs, {bias.arguments.chunks, bias.grad.numel()},
                                       accumulator_dtype(probs.scalar_type()));
    bias.arguments.partial = partial.mutable_data_ptr();
  }
  if (bias.source == Source::kOnePass) {
    launch_backward_biased<T>(bias.arguments, stream);
  } else {
    launch_bias_grad<T>(bias.arguments, stream);
  }
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

  Tensor memory;
  BackwardArguments backward{grad_probs.const_data_ptr(),
                             probs.const_data_ptr(),
                             grad_scores.mutable_data_ptr(),
                             nullptr,
                             nullptr,
                             scale,
                             causal_limit(probs, is_causal),
                             backward_layout(grad_probs, probs, is_causal),
                             workspace_of(probs, memory)};
  const cudaStream_t stream = current_stream(probs.get_device_index());
  with_kernel_type(probs.scalar_type(), [&](auto type) {
    using T = decltype(type);
    std::vector<BiasGrad> biases;
    bool needs_dots = false;
    for (int w = 1; w >= 0; --w) {
      if (!wishes[w].dtype) continue;
      biases.push_back(make_bias_grad<T>(grad_probs, probs, backward, wishes[w], biases.empty()));
      grads[w] = biases.back().grad;
      needs_dots = needs_dots || biases.back().source == Source::kDots;
    }
    Tensor dots;
    if (needs_dots) {
      dots = torch::stable::new_empty(probs, {backward.layout.rows},
                                      accumulator_dtype(probs.scalar_type()));
      backward.dots = dots.mutable_data_ptr();
    }
    if (biases.empty() || biases.front().source == Source::kDots) {
      launch_backward<T>(backward, stream);
    }
    for (BiasGrad& bias : biases) {
      bias.arguments.backward = backward;
      launch<T>(bias, probs, stream);
    }
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
