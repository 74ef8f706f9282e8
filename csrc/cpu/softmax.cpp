// Host side of scaled_mask_softmax on the CPU: allocate, dispatch, split the rows over the threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "call_count.h"
#include "operands.h"
#include "row_kernels.h"

namespace sms_plugin {
namespace {

// Elements that one task takes at a time: enough to be worth a task, few enough to share out.
constexpr int64_t kTaskElements = 16384;

// A bias with fewer rows than this has the rows summed into each of them cut into chunks, so that
// there is work for all threads.
constexpr int64_t kFewBiasRows = 64;

// A chunk has at least as many rows, so that the partial sums stay small beside the scores.
constexpr int64_t kMinChunkRows = 8;

// The widest instruction set of this processor. A test may compile with one set forced.
const RowKernelSet& best_kernel_set() {
#if defined(SMS_PLUGIN_FORCED_KERNELS)
  return SMS_PLUGIN_FORCED_KERNELS;
#elif defined(__x86_64__)
  static const RowKernelSet& best = [&]() -> const RowKernelSet& {
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx2 && has_avx512) return kAvx512Kernels;
    return has_avx2 ? kAvx2Kernels : kBaselineKernels;
  }();
  return best;
#else
  return kBaselineKernels;
#endif
}

// A fresh result of many megabytes costs more in page faults, one for each 4 KB, than in
// arithmetic. Where the system leaves the choice to the program, ask for pages of 2 MB: a hint,
// never an error.
Tensor new_result(const Tensor& like, const std::vector<int64_t>& shape,
                  std::optional<ScalarType> dtype = std::nullopt) {
  Tensor result = torch::stable::new_empty(like, shape, dtype);
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 << 20;
  const uintptr_t first = reinterpret_cast<uintptr_t>(result.data_ptr());
  const uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (first + result.numel() * result.element_size()) / kHugePage * kHugePage;
  // Small results take memory that malloc has at hand already.
  if (end > begin + kHugePage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return result;
}

Dtype to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Double:
      return Dtype::kFloat64;
    case ScalarType::Bool:
      return Dtype::kBool;
    default:
      STD_TORCH_CHECK(false, "sms_plugin: a dtype without a CPU kernel");
  }
}

const RowKernels& kernels_for(const Tensor& scores) {
  return best_kernel_set().by_dtype[static_cast<int>(to_dtype(scores.scalar_type()))];
}

Operand to_operand(const std::optional<Tensor>& tensor) {
  if (!tensor) return {};
  return {tensor->const_data_ptr(), to_dtype(tensor->scalar_type())};
}

// Calls work(begin, end) for ranges that cover [0, count). Tasks are dealt from both ends in turn:
// the first causal rows are short and the last ones long, and every thread gets as many of each.
template <typename Work>
void for_each_range(int64_t count, int64_t elements_each, const Work& work) {
  const int64_t step = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, elements_each));
  const int64_t tasks = (count + step - 1) / step;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = i % 2 == 0 ? i / 2 : tasks - 1 - i / 2;
      work(task * step, std::min(count, (task + 1) * step));
    }
  });
}

Tensor scaled_mask_softmax(const Tensor& scores_in,            // [..., Tk]
                           const std::optional<Tensor>& mask,  // broadcasts to scores
                           const std::optional<Tensor>& bias,  // broadcasts to scores
                           double scale, bool is_causal) {
  count_call(Op::kForward, CountedDevice::kCpu);
  const Tensor scores = with_dense_rows(scores_in);
  Tensor probs = new_result(scores, shape_of(scores));
  if (probs.numel() == 0) return probs;

  const ForwardCall call = {scores.const_data_ptr(),
                            to_operand(mask),
                            to_operand(bias),
                            probs.mutable_data_ptr(),
                            forward_layout(scores, mask, bias, is_causal),
                            causal_limit(scores, is_causal),
                            scale};
  const RowKernels& kernels = kernels_for(scores);
  for_each_range(call.layout.rows, call.layout.cols,
                 [&](int64_t begin, int64_t end) { kernels.forward(call, begin, end); });
  return probs;
}

void run_backward(const RowKernels& kernels, const BackwardCall& call) {
  const int64_t unit_elements = call.reduced.rows / call.chunks * call.kept.cols;
  for_each_range(call.kept.rows * call.chunks, unit_elements,
                 [&](int64_t begin, int64_t end) { kernels.backward(call, begin, end); });
}

// Runs the call with dz summed on the way; `call` comes without the fields for the sums.
Tensor run_backward_with_sums(const RowKernels& kernels, BackwardCall call, const Tensor& probs,
                              const std::vector<int64_t>& bias_shape, ScalarType bias_dtype,
                              bool cols_kept) {
  Tensor grad_bias = new_result(probs, bias_shape, bias_dtype);
  call.sum_cols = cols_kept ? call.kept.cols : 1;
  call.chunks = std::clamp<int64_t>(kFewBiasRows / call.kept.rows, 1,
                                    std::max<int64_t>(1, call.reduced.rows / kMinChunkRows));
  if (call.chunks == 1) {
    call.sums = grad_bias.mutable_data_ptr();
    call.sums_dtype = to_dtype(bias_dtype);
    run_backward(kernels, call);
    return grad_bias;
  }
  const bool is_double = probs.scalar_type() == ScalarType::Double;
  const ScalarType sum_dtype = is_double ? ScalarType::Double : ScalarType::Float;
  const Tensor sums = new_result(probs, {call.kept.rows, call.chunks, call.sum_cols}, sum_dtype);
  call.sums = sums.mutable_data_ptr();
  call.sums_dtype = to_dtype(sum_dtype);
  run_backward(kernels, call);
  const ChunkCall chunks = {call.sums, grad_bias.mutable_data_ptr(), to_dtype(bias_dtype),
                            call.chunks, call.sum_cols};
  for_each_range(call.kept.rows, call.chunks * call.sum_cols,
                 [&](int64_t begin, int64_t end) { kernels.add_chunks(chunks, begin, end); });
  return grad_bias;
}

// One pass over grad_probs and probs: fills grad_scores if it is given, and returns dz summed to
// bias_shape if bias_dtype is given.
std::optional<Tensor> backward_pass(const Tensor& grad_probs,  // [..., Tk]
                                    const Tensor& probs,       // [..., Tk]
                                    double scale, bool is_causal,
                                    Tensor* grad_scores,  // [..., Tk], contiguous, or null
                                    const std::vector<int64_t>& bias_shape,
                                    std::optional<ScalarType> bias_dtype) {
  // Without a bias every row is kept and stands for itself.
  const BiasReduction reduction =
      bias_reduction(grad_probs, probs, bias_dtype ? bias_shape : shape_of(probs));
  BackwardCall call = {};
  call.grad_probs = grad_probs.const_data_ptr();
  call.probs = probs.const_data_ptr();
  call.grad_scores = grad_scores != nullptr ? grad_scores->mutable_data_ptr() : nullptr;
  call.kept = reduction.kept;
  call.reduced = reduction.reduced;
  call.chunks = 1;
  call.causal = causal_limit(probs, is_causal);
  call.scale = scale;
  const RowKernels& kernels = kernels_for(probs);
  if (bias_dtype) {
    return run_backward_with_sums(kernels, call, probs, bias_shape, *bias_dtype,
                                  reduction.cols_kept);
  }
  run_backward(kernels, call);
  return std::nullopt;
}

// Returns (grad_scores, grad_mask, grad_bias); a gradient without a dtype isn't wanted: shape (0,).
std::tuple<Tensor, Tensor, Tensor> scaled_mask_softmax_backward(
    const Tensor& grad_probs_in,  // [..., Tk]
    const Tensor& probs_in,       // [..., Tk]
    double scale, bool is_causal, std::vector<int64_t> mask_shape,
    std::optional<ScalarType> mask_dtype, std::vector<int64_t> bias_shape,
    std::optional<ScalarType> bias_dtype) {
  count_call(Op::kBackward, CountedDevice::kCpu);
  const Tensor grad_probs = with_dense_rows(grad_probs_in);
  const Tensor probs = with_dense_rows(probs_in);
  Tensor grad_scores = new_result(probs, shape_of(probs));
  const std::vector<int64_t> unwanted = {0};
  if (probs.numel() == 0) {
    const auto zeros = [&](const std::vector<int64_t>& shape, std::optional<ScalarType> dtype) {
      return torch::stable::new_zeros(probs, dtype ? shape : unwanted, dtype);
    };
    return {grad_scores, zeros(mask_shape, mask_dtype), zeros(bias_shape, bias_dtype)};
  }

  // The first pass fills grad_scores, and each pass sums at most one gradient.
  Tensor* to_fill = &grad_scores;
  const auto pass = [&](const std::vector<int64_t>& shape, std::optional<ScalarType> dtype) {
    Tensor* filled = std::exchange(to_fill, nullptr);
    return backward_pass(grad_probs, probs, scale, is_causal, filled, shape, dtype);
  };
  const auto unwanted_result = [&] { return torch::stable::new_empty(probs, unwanted); };
  Tensor grad_mask = mask_dtype ? *pass(mask_shape, mask_dtype) : unwanted_result();
  Tensor grad_bias = bias_dtype ? *pass(bias_shape, bias_dtype) : unwanted_result();
  if (to_fill != nullptr) pass({}, std::nullopt);
  return {grad_scores, grad_mask, grad_bias};
}

}  // namespace
}  // namespace sms_plugin

STABLE_TORCH_LIBRARY_IMPL(sms_plugin, CPU, m) {
  m.impl("scaled_mask_softmax", TORCH_BOX(&sms_plugin::scaled_mask_softmax));
  m.impl("scaled_mask_softmax_backward", TORCH_BOX(&sms_plugin::scaled_mask_softmax_backward));
}
