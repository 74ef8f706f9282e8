#include "bias_grad.cuh"
#include "biased_backward.cuh"
#include "launch_backward.cuh"
#include "term_kind.h"

namespace sms_plugin {

template <typename Out, typename Acc>
void combine_as(const BiasGradArguments& arguments, int64_t values, cudaStream_t stream) {
  bias_grad_combine<Out, Acc><<<blocks_for(values, kBiasThreads), kBiasThreads, 0, stream>>>(
      static_cast<const Acc*>(arguments.partial), static_cast<Out*>(arguments.grad_bias),
      arguments.chunks, values);
}

// Sums the chunks and rounds once to the dtype of the bias.
template <typename Acc>
void combine(const BiasGradArguments& arguments, int64_t values, cudaStream_t stream) {
  switch (static_cast<TermKind>(arguments.kind)) {
    case TermKind::kHalf:
      combine_as<__half, Acc>(arguments, values, stream);
      break;
    case TermKind::kBFloat16:
      combine_as<__nv_bfloat16, Acc>(arguments, values, stream);
      break;
    case TermKind::kFloat:
      combine_as<float, Acc>(arguments, values, stream);
      break;
    case TermKind::kDouble:
      combine_as<double, Acc>(arguments, values, stream);
      break;
    default:
      throw std::runtime_error("sms_plugin: a bias gradient must be a float tensor");
  }
  check_launch("bias_grad_combine");
}

template <typename T>
bool takes_backward_biased(const RowLayout& kept, bool cols_kept) {
  return cols_kept && vectors_of<T>(kept.cols) <= kMaxBiasedVectors<T>;
}

template <typename T>
bool takes_dz(const BiasGradArguments& arguments) {
  return arguments.cols_kept && arguments.reduced.rows == 1 &&
         static_cast<TermKind>(arguments.kind) == term_kind_of<T>() &&
         is_aligned(arguments.grad_bias) && is_aligned(arguments.backward.grad_scores);
}

template <typename T>
bool is_final(const BiasGradArguments& arguments) {
  const auto kind = static_cast<TermKind>(arguments.kind);
  return arguments.chunks == 1 &&
         (kind == term_kind_of<T>() || kind == term_kind_of<Accumulator<T>>());
}

template <typename T, Access kAccess>
void launch_backward_biased_as(const BiasGradArguments& arguments, cudaStream_t stream) {
  using Acc = Accumulator<T>;
  using Load = GradAndProbs<T>;
  const Load load = backward_load<T>(arguments.backward);
  const GradOut<T> grad_out = backward_out<T>(arguments.backward);
  const DeviceRowLayout kept(arguments.kept);
  const DeviceRowLayout reduced(arguments.reduced);
  const CausalLimit causal = arguments.backward.causal;
  const int64_t chunks = arguments.chunks;
  const bool is_rounded =
      is_final<T>(arguments) && static_cast<TermKind>(arguments.kind) == term_kind_of<T>();
  const BiasGradOut<Acc> out{
      static_cast<Acc*>(is_final<T>(arguments) ? arguments.grad_bias : arguments.partial),
      (reduced.rows + chunks - 1) / chunks};
  T* grad_bias = is_rounded ? static_cast<T*>(arguments.grad_bias) : nullptr;
  with_biased_mapping<T, kAccess>(vectors_of<T>(kept.cols), [&](auto mapping) {
    using M = decltype(mapping);
    const dim3 grid(blocks_for(kept.rows, M::kRowsPerBlock), static_cast<unsigned>(chunks));
    softmax_backward_biased<Load, M, kAccess>
        <<<grid, M::kThreads, 0, stream>>>(load, grad_out, kept, reduced, causal, out, grad_bias);
  });
  check_launch("softmax_backward_biased");
}

template <typename T>
void launch_backward_biased(const BiasGradArguments& arguments, cudaStream_t stream) {
  check_is_aligned(arguments.grad_bias);
  switch (backward_access<T>(arguments.backward)) {
    case Access::kWhole:
      launch_backward_biased_as<T, Access::kWhole>(arguments, stream);
      break;
    case Access::kShifted:
      launch_backward_biased_as<T, Access::kShifted>(arguments, stream);
      break;
    case Access::kSpread:
      launch_backward_biased_as<T, Access::kSpread>(arguments, stream);
      break;
  }
  // With one chunk the sums are the gradient: written in place if they have its dtype.
  if (!is_final<T>(arguments)) {
    combine<Accumulator<T>>(arguments, arguments.kept.rows * arguments.kept.cols, stream);
  }
}

template <typename T>
void launch_bias_grad(const BiasGradArguments& arguments, cudaStream_t stream) {
  using Acc = Accumulator<T>;
  using Load = GradAndProbs<T>;
  const DeviceRowLayout kept(arguments.kept);
  const DeviceRowLayout reduced(arguments.reduced);
  const int64_t values = kept.rows * (arguments.cols_kept ? kept.cols : 1);
  if (values == 0) return;
  const Load load = backward_load<T>(arguments.backward);
  const CausalLimit causal = arguments.backward.causal;
  const auto* dots = static_cast<const Acc*>(arguments.backward.dots);
  const int64_t chunks = arguments.chunks;
  const BiasGradOut<Acc> out{static_cast<Acc*>(arguments.partial),
                             (reduced.rows + chunks - 1) / chunks};
  const int64_t vectors = vectors_of<T>(kept.cols);
  if (arguments.cols_kept) {
    const dim3 grid(blocks_for(kept.rows * vectors, kBiasThreads), static_cast<unsigned>(chunks));
    bias_grad_by_column<Load>
        <<<grid, kBiasThreads, 0, stream>>>(load, dots, kept, reduced, causal, out, vectors);
  } else {
    const dim3 grid(blocks_for(kept.rows, 1), static_cast<unsigned>(chunks));
    bias_grad_by_row<Load>
        <<<grid, kBiasThreads, 0, stream>>>(load, dots, kept, reduced, causal, out, vectors);
  }
  check_launch("bias_grad");
  combine<Acc>(arguments, values, stream);
}

template bool takes_backward_biased<__half>(const RowLayout&, bool);
template bool takes_dz<__half>(const BiasGradArguments&);
template bool is_final<__half>(const BiasGradArguments&);
template void launch_backward_biased<__half>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<__half>(const BiasGradArguments&, cudaStream_t);
template bool takes_backward_biased<__nv_bfloat16>(const RowLayout&, bool);
template bool takes_dz<__nv_bfloat16>(const BiasGradArguments&);
template bool is_final<__nv_bfloat16>(const BiasGradArguments&);
template void launch_backward_biased<__nv_bfloat16>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<__nv_bfloat16>(const BiasGradArguments&, cudaStream_t);
template bool takes_backward_biased<float>(const RowLayout&, bool);
template bool takes_dz<float>(const BiasGradArguments&);
template bool is_final<float>(const BiasGradArguments&);
template void launch_backward_biased<float>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<float>(const BiasGradArguments&, cudaStream_t);
template bool takes_backward_biased<double>(const RowLayout&, bool);
template bool takes_dz<double>(const BiasGradArguments&);
template bool is_final<double>(const BiasGradArguments&);
template void launch_backward_biased<double>(const BiasGradArguments&, cudaStream_t);
template void launch_bias_grad<double>(const BiasGradArguments&, cudaStream_t);

}  // namespace sms_plugin
