// From arguments to launches. Included by the one file a dtype that instantiates it.

#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "backward.cuh"
#include "bias_grad.cuh"
#include "biased_backward.cuh"
#include "forward.cuh"
#include "launch.h"
#include "mapping.cuh"
#include "terms.cuh"

namespace sms_plugin {

// Which machine code this library holds, set by the build.
#ifndef SMS_PLUGIN_CUDA_ARCHS
#define SMS_PLUGIN_CUDA_ARCHS "unknown"
#endif

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  throw std::runtime_error(std::string("sms_plugin: launch of ") + kernel +
                           " failed on a device of compute capability " + std::to_string(major) +
                           "." + std::to_string(minor) + ": " + cudaGetErrorString(error) +
                           "; the library was built for " SMS_PLUGIN_CUDA_ARCHS
                           "; if yours is missing, rebuild with TORCH_CUDA_ARCH_LIST=" +
                           std::to_string(major) + "." + std::to_string(minor));
}

inline unsigned int blocks_for(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  if (blocks > INT32_MAX) throw std::runtime_error("sms_plugin: more than 2^31 blocks in a launch");
  return static_cast<unsigned int>(blocks);
}

template <typename T>
int64_t vectors_of(int64_t cols) {
  return (cols + kVectorSize<T> - 1) / kVectorSize<T>;
}

template <typename Load, typename Store>
void launch_forward_with(const Load& load, const Store& store, const ForwardArguments& arguments,
                         cudaStream_t stream) {
  const DeviceRowLayout layout(arguments.layout);
  const CausalLimit causal = arguments.causal;
  const int64_t vectors = vectors_of<typename Load::Scalar>(layout.cols);
  if (vectors > Load::kMaxResident) {
    softmax_forward_streaming<Load, Store, kStreamingThreads>
        <<<blocks_for(layout.rows, 1), kStreamingThreads, 0, stream>>>(load, store, layout, causal);
  } else {
    with_mapping<Load>(vectors, [&](auto mapping) {
      using M = decltype(mapping);
      softmax_forward<Load, Store, M::kLanes, M::kVectors, M::kThreads>
          <<<blocks_for(layout.rows, M::kRowsPerBlock), M::kThreads, 0, stream>>>(load, store,
                                                                                  layout, causal);
    });
  }
  check_launch("softmax_forward");
}

template <typename U>
constexpr TermKind term_kind_of() {
  if constexpr (std::is_same_v<U, __half>) return TermKind::kHalf;
  if constexpr (std::is_same_v<U, __nv_bfloat16>) return TermKind::kBFloat16;
  if constexpr (std::is_same_v<U, float>) return TermKind::kFloat;
  return TermKind::kDouble;
}

template <typename T>
T host_infinity(bool is_negative) {
  const float infinity = is_negative ? -INFINITY : INFINITY;
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half(infinity);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16(infinity);
  } else {
    return static_cast<T>(infinity);
  }
}

// One term of dtype U, contiguous along the columns, and at most a bool mask of the same kind
// besides.
template <typename T, typename U>
bool launch_biased(const ForwardArguments& arguments, cudaStream_t stream) {
  constexpr TermKind kKind = term_kind_of<U>();
  const auto mask_kind = static_cast<TermKind>(arguments.mask.kind);
  const auto bias_kind = static_cast<TermKind>(arguments.bias.kind);
  const bool has_flags = mask_kind == TermKind::kBool;
  const bool is_bias = bias_kind == kKind && (has_flags || mask_kind == TermKind::kNone);
  const bool is_mask = mask_kind == kKind && bias_kind == TermKind::kNone;
  if (!is_bias && !is_mask) return false;
  const int operand = is_bias ? 2 : 1;
  if (arguments.layout.col_strides[operand] != 1) return false;
  if (has_flags && arguments.layout.col_strides[1] != 1) return false;
  const BiasedScores<T, U> load{
      static_cast<const T*>(arguments.scores),
      static_cast<Accumulator<T>>(arguments.scale / kHeadroom),
      static_cast<const U*>(is_bias ? arguments.bias.data : arguments.mask.data),
      has_flags ? static_cast<const uint8_t*>(arguments.mask.data) : nullptr, operand};
  launch_forward_with(load, StoreProbs<T>{static_cast<T*>(arguments.probs)}, arguments, stream);
  return true;
}

template <typename T>
void launch_forward(const ForwardArguments& arguments, cudaStream_t stream) {
  using Acc = Accumulator<T>;
  if (arguments.layout.rows == 0 || arguments.layout.cols == 0) return;
  const auto* scores = static_cast<const T*>(arguments.scores);
  const auto scale = static_cast<Acc>(arguments.scale / kHeadroom);
  const StoreProbs<T> store{static_cast<T*>(arguments.probs)};
  const Term mask{arguments.mask.data, static_cast<TermKind>(arguments.mask.kind)};
  const Term bias{arguments.bias.data, static_cast<TermKind>(arguments.bias.kind)};
  if (mask.kind == TermKind::kNone && bias.kind == TermKind::kNone && scale != Acc{0}) {
    const PlainScores<T> load{scores, scale, host_infinity<T>(scale > Acc{0})};
    return launch_forward_with(load, store, arguments, stream);
  }
  if (mask.kind == TermKind::kBool && bias.kind == TermKind::kNone &&
      arguments.layout.col_strides[1] == 1) {
    const SelectedScores<T> load{scores, scale, static_cast<const uint8_t*>(mask.data)};
    return launch_forward_with(load, store, arguments, stream);
  }
  if constexpr (sizeof(T) < sizeof(double)) {
    if (launch_biased<T, T>(arguments, stream)) return;
  }
  if constexpr (sizeof(T) == 2) {
    if (launch_biased<T, float>(arguments, stream)) return;
  }
  launch_forward_with(GeneralScores<T>{scores, scale, mask, bias}, store, arguments, stream);
}

template <typename T>
GradAndProbs<T> backward_load(const BackwardArguments& arguments) {
  return {static_cast<const T*>(arguments.grad_probs), static_cast<const T*>(arguments.probs)};
}

template <typename T>
StoreGradScores<T> backward_store(const BackwardArguments& arguments) {
  using Acc = Accumulator<T>;
  return {static_cast<T*>(arguments.grad_scores), static_cast<Acc*>(arguments.dots),
          static_cast<Acc>(arguments.scale)};
}

template <typename T>
void launch_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  using Load = GradAndProbs<T>;
  using Store = StoreGradScores<T>;
  if (arguments.layout.rows == 0 || arguments.layout.cols == 0) return;
  const Load load = backward_load<T>(arguments);
  const Store store = backward_store<T>(arguments);
  const DeviceRowLayout layout(arguments.layout);
  const CausalLimit causal = arguments.causal;
  const int64_t vectors = vectors_of<T>(layout.cols);
  if (vectors > Load::kMaxResident) {
    auto* dz = static_cast<T*>(arguments.dz);
    const auto kernel = dz == nullptr
                            ? softmax_backward_streaming<Load, Store, kStreamingThreads, false>
                            : softmax_backward_streaming<Load, Store, kStreamingThreads, true>;
    kernel<<<blocks_for(layout.rows, 1), kStreamingThreads, 0, stream>>>(load, store, layout,
                                                                         causal, dz);
  } else {
    with_mapping<Load>(vectors, [&](auto mapping) {
      using M = decltype(mapping);
      softmax_backward<Load, Store, M::kLanes, M::kVectors, M::kThreads>
          <<<blocks_for(layout.rows, M::kRowsPerBlock), M::kThreads, 0, stream>>>(load, store,
                                                                                  layout, causal);
    });
  }
  check_launch("softmax_backward");
}

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
  return cols_kept && vectors_of<T>(kept.cols) <= kMaxBiasedVectors<GradAndProbs<T>>;
}

template <typename T>
bool takes_dz(const BiasGradArguments& arguments) {
  return arguments.cols_kept && arguments.reduced.rows == 1 &&
         static_cast<TermKind>(arguments.kind) == term_kind_of<T>() &&
         vectors_of<T>(arguments.kept.cols) > GradAndProbs<T>::kMaxResident;
}

template <typename T>
void launch_backward_biased(const BiasGradArguments& arguments, cudaStream_t stream) {
  using Acc = Accumulator<T>;
  using Load = GradAndProbs<T>;
  using Store = StoreGradScores<T>;
  const Load load = backward_load<T>(arguments.backward);
  const Store store = backward_store<T>(arguments.backward);
  const DeviceRowLayout kept(arguments.kept);
  const DeviceRowLayout reduced(arguments.reduced);
  const CausalLimit causal = arguments.backward.causal;
  const int64_t chunks = arguments.chunks;
  const auto kind = static_cast<TermKind>(arguments.kind);
  // With one chunk the sums are the gradient: written in place if they have its dtype.
  const bool is_final = chunks == 1 && (kind == term_kind_of<T>() || kind == term_kind_of<Acc>());
  const bool is_rounded = is_final && kind == term_kind_of<T>();
  const BiasGradOut<Acc> out{static_cast<Acc*>(is_final ? arguments.grad_bias : arguments.partial),
                             (reduced.rows + chunks - 1) / chunks};
  T* grad_bias = is_rounded ? static_cast<T*>(arguments.grad_bias) : nullptr;
  with_biased_mapping<Load>(vectors_of<T>(kept.cols), [&](auto mapping) {
    using M = decltype(mapping);
    const dim3 grid(blocks_for(kept.rows, M::kRowsPerBlock), static_cast<unsigned>(chunks));
    softmax_backward_biased<Load, Store, M::kLanes, M::kVectors, M::kThreads>
        <<<grid, M::kThreads, 0, stream>>>(load, store, kept, reduced, causal, out, grad_bias);
  });
  check_launch("softmax_backward_biased");
  if (!is_final) combine<Acc>(arguments, kept.rows * kept.cols, stream);
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

}  // namespace sms_plugin
