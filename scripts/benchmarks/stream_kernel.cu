// The roof: reads two streams and writes one, of any sizes, and computes next to nothing.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace {

struct Stream {
  int64_t vectors;  // 16 bytes each
  int per_block;    // the blocks own equal parts, the last ones what is left
};

// The part of this block: where it starts, and how many vectors it has.
__device__ __forceinline__ int part_of(const Stream& stream, int64_t* start) {
  *start = static_cast<int64_t>(blockIdx.x) * stream.per_block;
  const int64_t left = stream.vectors - *start;
  return static_cast<int>(left < stream.per_block ? left : stream.per_block);
}

__device__ __forceinline__ void mix(uint4* sum, const uint4& value) {
  sum->x ^= value.x;
  sum->y ^= value.y;
  sum->z ^= value.z;
  sum->w ^= value.w;
}

// A block owns its part of each stream, a thread kVectors vectors of it; all loads are in flight
// before the first store. What is read decides what is written, so that no load can be left out.
template <int kThreads, int kVectors, bool kSecond>
__global__ void __launch_bounds__(kThreads)
    stream_kernel(const uint4* __restrict__ first,   // [first_stream.vectors]
                  const uint4* __restrict__ second,  // [second_stream.vectors]
                  uint4* __restrict__ out,           // [out_stream.vectors]
                  Stream first_stream, Stream second_stream, Stream out_stream) {
  int64_t start;
  uint4 values[kVectors];
  const int first_count = part_of(first_stream, &start);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int at = k * kThreads + threadIdx.x;
    values[k] = at < first_count ? first[start + at] : make_uint4(1, 2, 3, 4);
  }
  if constexpr (kSecond) {
    uint4 others[kVectors];
    const int second_count = part_of(second_stream, &start);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int at = k * kThreads + threadIdx.x;
      others[k] = at < second_count ? second[start + at] : make_uint4(4, 3, 2, 1);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) mix(&values[k], others[k]);
  }
  // What was read without a place to be written to still counts.
  uint4 rest = make_uint4(0, 0, 0, 0);
  const int out_count = part_of(out_stream, &start);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int at = k * kThreads + threadIdx.x;
    if (at < out_count) {
      out[start + at] = values[k];
    } else {
      mix(&rest, values[k]);
    }
  }
  const bool never = rest.x == 0x9e3779b9u && rest.y == 0x7f4a7c15u && rest.z == 0xf39cc060u;
  if (never && rest.w == 0x2545f491u) out[0] = rest;
}

template <int kThreads, int kVectors>
cudaError_t launch(const void* first, int64_t first_bytes, const void* second, int64_t second_bytes,
                   void* out, int64_t out_bytes, cudaStream_t stream) {
  constexpr int64_t kPerBlock = int64_t{kThreads} * kVectors;
  const int64_t largest = std::max({first_bytes, second_bytes, out_bytes}) / 16;
  const int64_t blocks = std::max<int64_t>(1, (largest + kPerBlock - 1) / kPerBlock);
  const auto part = [blocks](int64_t bytes) {
    const int64_t vectors = bytes / 16;
    return Stream{vectors, static_cast<int>((vectors + blocks - 1) / blocks)};
  };
  const auto kernel = second_bytes > 0 ? stream_kernel<kThreads, kVectors, true>
                                       : stream_kernel<kThreads, kVectors, false>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const uint4*>(first), static_cast<const uint4*>(second), static_cast<uint4*>(out),
      part(first_bytes), part(second_bytes), part(out_bytes));
  return cudaGetLastError();
}

}  // namespace

// Returns a cudaError_t. Sizes in bytes, multiples of 16; `wide` has blocks of 512 threads.
extern "C" int sms_benchmark_stream(const void* first, int64_t first_bytes, const void* second,
                                    int64_t second_bytes, void* out, int64_t out_bytes, int wide,
                                    void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return wide ? launch<512, 4>(first, first_bytes, second, second_bytes, out, out_bytes, s)
              : launch<128, 4>(first, first_bytes, second, second_bytes, out, out_bytes, s);
}

extern "C" const char* sms_benchmark_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
