// What blocks tell each other within a cluster, and kernels one after the other (both from compute
// capability 9.0 on). No torch here.

#pragma once

#include <cstdint>

#include "primitives.cuh"

namespace sms_plugin {

constexpr int kMaxCluster = 16;  // blocks; 8 where the hardware has no larger ones

// The kernel that waits for this one may start: its blocks fill the places that become free.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before this one has ended and its results can be read. Without effect in a
// kernel that was started after it.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Each block sends its part into the shared memory of all, and waits until it has the parts of all.
// Nobody reads the memory of another block, so that none has to outlive the others. For one
// exchange. A barrier of the cluster would do as well, but for the fence over all memory that comes
// with it.
struct ClusterExchange {
  float2 parts[kMaxCluster];
  alignas(8) uint64_t arrived;  // an mbarrier that counts the bytes of the parts

  // To be called by all threads, before anything else: says that this block is ready for parts.
  __device__ __forceinline__ void begin(int count) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      const auto barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&arrived));
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
          "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n\t"
          "fence.mbarrier_init.release.cluster;" ::"r"(barrier),
          "r"(count * static_cast<int>(sizeof(float2)))
          : "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  // Gives `part`, the same in all threads, to each of `count` blocks; `parts` are complete after
  // it.
  __device__ __forceinline__ void exchange(float2 part, int rank, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks are ready
    const auto barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&arrived));
    if (threadIdx.x < count) {
      const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(&parts[rank]));
      asm volatile(
          "{\n\t"
          ".reg .b32 place, signal;\n\t"
          "mapa.shared::cluster.u32 place, %0, %2;\n\t"
          "mapa.shared::cluster.u32 signal, %1, %2;\n\t"
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [place], {%3, %4}, "
          "[signal];\n\t"
          "}" ::"r"(own),
          "r"(barrier), "r"(threadIdx.x), "f"(part.x), "f"(part.y)
          : "memory");
    }
    uint32_t is_complete = 0;
    while (is_complete == 0) {
      asm volatile(
          "{\n\t"
          ".reg .pred complete;\n\t"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], 0;\n\t"
          "selp.u32 %0, 1, 0, complete;\n\t"
          "}"
          : "=r"(is_complete)
          : "r"(barrier)
          : "memory");
    }
#endif
  }
};

}  // namespace sms_plugin
