// What every launch needs. No torch here.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "launch.h"
#include "mapping.cuh"
#include "parts.cuh"

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

// One operand of a layout, with the end of its memory.
template <typename T>
Operand<T> operand_of(const void* data, const RowLayout& layout, int which) {
  int64_t last = layout.cols == 0 ? 0 : (layout.cols - 1) * layout.col_strides[which];
  for (int d = 0; d < layout.dims; ++d) last += (layout.sizes[d] - 1) * layout.strides[which][d];
  const auto* begin = static_cast<const T*>(data);
  return {begin, begin + last + 1};
}

// Whether every row of an operand starts at a multiple of `bytes`.
template <typename T>
bool starts_at_multiples(const Operand<T>& operand, const RowLayout& layout, int which,
                         int64_t bytes) {
  bool result = reinterpret_cast<uintptr_t>(operand.data) % bytes == 0;
  for (int d = 0; d < layout.dims; ++d) {
    result = result && layout.strides[which][d] * static_cast<int64_t>(sizeof(T)) % bytes == 0;
  }
  return result;
}

// Scores, gradients and results do, or their rows are shifted.
template <typename T>
bool starts_on_boundaries(const Operand<T>& operand, const RowLayout& layout, int which) {
  return starts_at_multiples(operand, layout, which, kVectorBytes);
}

// How rows of `cols` columns are reached, given whether all operands start on boundaries.
template <typename T>
Access access_of(int64_t cols, bool are_aligned) {
  if (cols % kVectorSize<T> != 0) return Access::kSpread;
  return are_aligned ? Access::kWhole : Access::kShifted;
}

inline bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// Results come from torch's allocator, whose memory starts on boundaries.
inline void check_is_aligned(const void* result) {
  if (is_aligned(result)) return;
  throw std::runtime_error(
      "sms_plugin: the allocator gave memory for a result that doesn't start at a multiple of 16 "
      "bytes; use one that does, as torch's own");
}

// What a launch needs beside the kernel and its arguments if it has an attribute.
struct LaunchWith {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  LaunchWith(unsigned int blocks, int threads, cudaStream_t stream) {
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(static_cast<unsigned int>(threads));
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  LaunchWith(const LaunchWith&) = delete;  // config points into it
  LaunchWith& operator=(const LaunchWith&) = delete;

  void in_clusters_of(int blocks) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned int>(blocks);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }

  // May start before the kernel before it has ended: it waits by itself.
  void overlapping() {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
};

inline int compute_capability_major() {
  int device = 0;
  int major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major;
}

// How rows are cut into parts of at most `most` vectors.
inline Parts cut_rows(int64_t vectors, int64_t most) {
  return {nullptr, static_cast<int>((vectors + most - 1) / most)};
}

// Whether the current device can run `kernel` in clusters as `launch` says.
template <typename Kernel>
bool can_launch(const Kernel& kernel, const LaunchWith& launch) {
  int clusters = 0;
  const bool is_known =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
          cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) == cudaSuccess;
  if (!is_known) cudaGetLastError();  // no failure: there is another way
  return is_known && clusters > 0;
}

// Launches rows that are cut into parts in two stages.
template <typename Take, typename Finish, typename... Arguments>
void launch_stages(Take take, Finish finish, Parts parts, int64_t rows, const Workspace& workspace,
                   cudaStream_t stream, const Arguments&... arguments) {
  const unsigned int blocks = blocks_for(rows * parts.count, 1);
  parts.statistics =
      static_cast<float2*>(workspace(rows * parts.count * static_cast<int64_t>(sizeof(float2))));
  take<<<blocks, kPartThreads, 0, stream>>>(arguments..., parts);
  LaunchWith launch(blocks, kPartThreads, stream);
  launch.overlapping();
  if (compute_capability_major() < 9) launch.config.numAttrs = 0;  // there is no overlap
  cudaLaunchKernelEx(&launch.config, finish, arguments..., parts);
}

// The same in clusters, if a cluster can hold a row.
template <typename InCluster, typename Take, typename Finish, typename... Arguments>
void launch_parts(InCluster in_cluster, Take take, Finish finish, Parts parts, int64_t rows,
                  const Workspace& workspace, cudaStream_t stream, const Arguments&... arguments) {
  if (compute_capability_major() >= 9 && parts.count <= kMaxCluster) {
    LaunchWith launch(blocks_for(rows * parts.count, 1), kPartThreads, stream);
    launch.in_clusters_of(parts.count);
    if (can_launch(in_cluster, launch)) {
      cudaLaunchKernelEx(&launch.config, in_cluster, arguments..., parts);
      return;
    }
  }
  launch_stages(take, finish, parts, rows, workspace, stream, arguments...);
}

}  // namespace sms_plugin
