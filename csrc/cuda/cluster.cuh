// What the blocks of a thread-block cluster tell each other (compute capability 9.0 on). No torch
// here.

#pragma once

#include <cstdint>

#include "primitives.cuh"

namespace sms_plugin {

constexpr int kMaxCluster = 16;  // blocks; 8 where the hardware has no larger ones

// Each block writes its part into the shared memory of all, then all meet. Nobody reads the memory
// of another block, so that none has to outlive the others. For one exchange.
struct ClusterExchange {
  float2 parts[kMaxCluster];

  // Says that this block has started. To be called by all threads, before anything else.
  static __device__ __forceinline__ void announce() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  // Gives `part`, the same in all threads, to each of `count` blocks; `parts` are complete after
  // it.
  __device__ __forceinline__ void exchange(float2 part, int rank, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all have started
    if (threadIdx.x < count) {
      const auto own = static_cast<uint32_t>(__cvta_generic_to_shared(&parts[rank]));
      uint32_t remote;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(threadIdx.x));
      asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(part.x),
                   "f"(part.y)
                   : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all parts are written
#endif
  }
};

}  // namespace sms_plugin
