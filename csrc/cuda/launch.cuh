// From arguments to launches. Included by the one file a dtype that instantiates it.

#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "backward.cuh"
#include "bias_grad.cuh"
#include "forward.cuh"
#include "launch.h"
#include "mapping.cuh"

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

template <typename T>
void launch_forward(const ForwardArguments& arguments, cudaStream_t stream) {
  using Acc = Accumulator<T>;
  if (arguments.layout.rows == 0 || arguments.layout.cols == 0) return;
  const auto* scores = static_cast<const T*>(arguments.scores);
  const Acc scale = static_cast<Acc>(arguments.scale / kHeadroom);
  const StoreProbs<T> store{static_cast<T*>(arguments.probs)};
  const bool has_terms = arguments.mask.kind != 0 || arguments.bias.kind != 0;
  // No padding becomes -inf under a scale of 0: the functor that pads after scaling takes that.
  if (!has_terms && scale != Acc{0}) {
    const PlainScores<T> load{scores, scale, host_infinity<T>(scale > Acc{0})};
    launch_forward_with(load, store, arguments, stream);
    return;
  }
  const MaskedScores<T> load{scores,
                             scale,
                             host_infinity<T>(true),
                             {arguments.mask.data, static_cast<TermKind>(arguments.mask.kind)},
                             {arguments.bias.data, static_cast<TermKind>(arguments.bias.kind)}};
  launch_forward_with(load, store, arguments, stream);
}

template <typename T>
void launch_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  using Acc = Accumulator<T>;
  using Load = GradAndProbs<T>;
  using Store = StoreGradScores<T>;
  if (arguments.layout.rows == 0 || arguments.layout.cols == 0) return;
  const Load load{static_cast<const T*>(arguments.grad_probs),
                  static_cast<const T*>(arguments.probs)};
  const Store store{static_cast<T*>(arguments.grad_scores), static_cast<Acc*>(arguments.dots),
                    static_cast<Acc>(arguments.scale)};
  const DeviceRowLayout layout(arguments.layout);
  const CausalLimit causal = arguments.causal;
  const int64_t vectors = vectors_of<T>(layout.cols);
  if (vectors > Load::kMaxResident) {
    softmax_backward_streaming<Load, Store, kStreamingThreads>
        <<<blocks_for(layout.rows, 1), kStreamingThreads, 0, stream>>>(load, store, layout, causal);
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
void combine(const BiasGradArguments& arguments, int64_t values, cudaStream_t stream) {
  bias_grad_combine<Out, Acc><<<blocks_for(values, kBiasThreads), kBiasThreads, 0, stream>>>(
      static_cast<const Acc*>(arguments.partial), static_cast<Out*>(arguments.grad_bias),
      arguments.chunks, values);
}

template <typename T>
void launch_bias_grad(const BiasGradArguments& arguments, cudaStream_t stream) {
  using Acc = Accumulator<T>;
  using Load = GradAndProbs<T>;
  const DeviceRowLayout kept(arguments.kept);
  const DeviceRowLayout reduced(arguments.reduced);
  const int64_t values = kept.rows * (arguments.cols_kept ? kept.cols : 1);
  if (values == 0) return;
  const Load load{static_cast<const T*>(arguments.grad_probs),
                  static_cast<const T*>(arguments.probs)};
  const auto* dots = static_cast<const Acc*>(arguments.dots);
  const int64_t chunks = arguments.chunks;
  const BiasGradOut<Acc> out{static_cast<Acc*>(arguments.partial),
                             (reduced.rows + chunks - 1) / chunks};
  const int64_t vectors = vectors_of<T>(kept.cols);
  if (arguments.cols_kept) {
    const dim3 grid(blocks_for(kept.rows * vectors, kBiasThreads), static_cast<unsigned>(chunks));
    bias_grad_by_column<Load><<<grid, kBiasThreads, 0, stream>>>(load, dots, kept, reduced,
                                                                 arguments.causal, out, vectors);
  } else {
    const dim3 grid(blocks_for(kept.rows, 1), static_cast<unsigned>(chunks));
    bias_grad_by_row<Load><<<grid, kBiasThreads, 0, stream>>>(load, dots, kept, reduced,
                                                              arguments.causal, out, vectors);
  }
  check_launch("bias_grad");
  switch (static_cast<TermKind>(arguments.kind)) {
    case TermKind::kHalf:
      combine<__half, Acc>(arguments, values, stream);
      break;
    case TermKind::kBFloat16:
      combine<__nv_bfloat16, Acc>(arguments, values, stream);
      break;
    case TermKind::kFloat:
      combine<float, Acc>(arguments, values, stream);
      break;
    case TermKind::kDouble:
      combine<double, Acc>(arguments, values, stream);
      break;
    default:
      throw std::runtime_error("sms_plugin: a bias gradient must be a float tensor");
  }
  check_launch("bias_grad_combine");
}

}  // namespace sms_plugin
