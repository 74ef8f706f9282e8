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

// The same for what consists of whole vectors of T: scores, gradients and results.
template <typename T>
bool has_whole_vectors(const Operand<T>& operand, const RowLayout& layout, int which) {
  return layout.cols % kVectorSize<T> == 0 &&
         starts_at_multiples(operand, layout, which, kVectorBytes);
}

inline bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// What a launch in clusters needs beside the kernel and its arguments.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int cluster, int threads, unsigned int blocks, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned int>(cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(static_cast<unsigned int>(threads));
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points into it
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

// How rows of `vectors` vectors are cut into parts of at most `most`, all but the last as long.
inline Parts cut_rows(int64_t vectors, int64_t most, int vector_size) {
  const int64_t count = (vectors + most - 1) / most;
  const int64_t of_part = (vectors + count - 1) / count;
  const int64_t whole_warps = (of_part + kWarpSize - 1) / kWarpSize * kWarpSize;
  return {nullptr, static_cast<int>(count), static_cast<int>(whole_warps) * vector_size};
}

// Up to so many bytes a second reading comes from the L2 of a data-centre card.
constexpr int64_t kRereadBytes = int64_t{40} << 20;

// Whether the current device can run `kernel` in clusters of `launch`.
template <typename Kernel>
bool can_launch(const Kernel& kernel, const ClusterLaunch& launch) {
  int device = 0;
  int major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major < 9) return false;
  int clusters = 0;
  const bool is_known =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
          cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) == cudaSuccess;
  if (!is_known) cudaGetLastError();  // no failure: there is another way
  return is_known && clusters > 0;
}

// Launches rows that are cut into parts: in clusters, if there are too many of them for the parts
// to be read twice from the L2; or in two stages. `read_bytes` are those of the operands.
template <typename InCluster, typename Take, typename Finish, typename... Arguments>
void launch_parts(InCluster in_cluster, Take take, Finish finish, Parts parts, int64_t rows,
                  int64_t read_bytes, const Workspace& workspace, cudaStream_t stream,
                  const Arguments&... arguments) {
  const unsigned int blocks = blocks_for(rows * parts.count, 1);
  if (parts.count <= kMaxCluster && read_bytes > kRereadBytes) {
    const ClusterLaunch launch(parts.count, kPartThreads, blocks, stream);
    if (can_launch(in_cluster, launch)) {
      cudaLaunchKernelEx(&launch.config, in_cluster, arguments..., parts);
      return;
    }
  }
  parts.statistics =
      static_cast<float2*>(workspace(rows * parts.count * static_cast<int64_t>(sizeof(float2))));
  take<<<blocks, kPartThreads, 0, stream>>>(arguments..., parts);
  finish<<<blocks, kPartThreads, 0, stream>>>(arguments..., parts);
}

}  // namespace sms_plugin
