// The kernel of the article that started this project, to compare with: one block of 128 threads a
// row, the row as float32 in dynamic shared memory, tree reductions with a barrier a step.
// docs/article.md says where the operator departs from it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>

namespace {

constexpr int kThreads = 128;

struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

// Halves the number of values until one is left, and returns it to every thread.
template <typename Combine>
__device__ float tree_reduce(float value, float* buffer, Combine combine) {
  buffer[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      buffer[threadIdx.x] = combine(buffer[threadIdx.x], buffer[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const float result = buffer[0];
  __syncthreads();  // everybody has read it before the buffer is used again
  return result;
}

// The article's question: maximum and sum in one pass over the row, each value corrected for the
// maximum so far, instead of two passes over shared memory.
__device__ void online_reduce(float* maximum, float* sum, float* buffer) {
  float* sums = buffer + kThreads;
  buffer[threadIdx.x] = *maximum;
  sums[threadIdx.x] = *sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      const float mine = buffer[threadIdx.x], other = buffer[threadIdx.x + half];
      const float both = fmaxf(mine, other);
      sums[threadIdx.x] =
          sums[threadIdx.x] * expf(mine - both) + sums[threadIdx.x + half] * expf(other - both);
      buffer[threadIdx.x] = both;
    }
    __syncthreads();
  }
  *maximum = buffer[0];
  *sum = sums[0];
}

template <typename T, bool kOnline>
__global__ void article_forward(const T* __restrict__ scores,  // [rows, cols]
                                const T* __restrict__ mask,    // [rows, cols] or null
                                T* __restrict__ probs,         // [rows, cols]
                                int cols, float scale, bool is_causal) {
  extern __shared__ float shared[];  // [cols] values of the row, then the buffer of the reductions
  float* buffer = shared + cols;
  const int query = blockIdx.x % cols;  // right for square scores only
  const long long start = static_cast<long long>(blockIdx.x) * cols;

  float maximum = kOnline ? -FLT_MAX : -INFINITY;
  float sum = 0.0f;
  for (int key = threadIdx.x; key < cols; key += kThreads) {
    float z = static_cast<float>(scores[start + key]) * scale;
    if (mask != nullptr) z += static_cast<float>(mask[start + key]);
    if (is_causal && key > query) z = -INFINITY;
    shared[key] = z;
    if constexpr (kOnline) {
      const float next = fmaxf(maximum, z);
      sum = sum * expf(maximum - next) + expf(z - next);
      maximum = next;
    } else {
      maximum = fmaxf(maximum, z);
    }
  }
  if constexpr (kOnline) {
    online_reduce(&maximum, &sum, buffer);
  } else {
    maximum = tree_reduce(maximum, buffer, Max{});
    for (int key = threadIdx.x; key < cols; key += kThreads) sum += expf(shared[key] - maximum);
    sum = tree_reduce(sum, buffer, Sum{});
  }
  for (int key = threadIdx.x; key < cols; key += kThreads) {
    probs[start + key] = static_cast<T>(expf(shared[key] - maximum) / sum);
  }
}

template <typename T>
__global__ void article_backward(const T* __restrict__ probs,       // [rows, cols]
                                 const T* __restrict__ grad_probs,  // [rows, cols]
                                 T* __restrict__ grad_scores,       // [rows, cols]
                                 int cols, float scale) {
  __shared__ float buffer[kThreads];
  const long long start = static_cast<long long>(blockIdx.x) * cols;
  float dot = 0.0f;
  for (int key = threadIdx.x; key < cols; key += kThreads) {
    dot += static_cast<float>(grad_probs[start + key]) * static_cast<float>(probs[start + key]);
  }
  dot = tree_reduce(dot, buffer, Sum{});
  for (int key = threadIdx.x; key < cols; key += kThreads) {
    const float grad = static_cast<float>(grad_probs[start + key]);
    const float prob = static_cast<float>(probs[start + key]);
    grad_scores[start + key] = static_cast<T>((grad - dot) * prob * scale);
  }
}

template <typename T>
void forward(const void* scores, const void* mask, void* probs, int rows, int cols, float scale,
             bool is_causal, bool online, cudaStream_t stream) {
  const size_t shared = (static_cast<size_t>(cols) + 2 * kThreads) * sizeof(float);
  const auto kernel = online ? article_forward<T, true> : article_forward<T, false>;
  kernel<<<rows, kThreads, shared, stream>>>(static_cast<const T*>(scores),
                                             static_cast<const T*>(mask), static_cast<T*>(probs),
                                             cols, scale, is_causal);
}

template <typename T>
void backward(const void* probs, const void* grad_probs, void* grad_scores, int rows, int cols,
              float scale, cudaStream_t stream) {
  article_backward<T><<<rows, kThreads, 0, stream>>>(static_cast<const T*>(probs),
                                                     static_cast<const T*>(grad_probs),
                                                     static_cast<T*>(grad_scores), cols, scale);
}

}  // namespace

// dtype: 0 float32, 1 float16, 2 bfloat16. Returns a cudaError_t: a row that doesn't fit in 48 KB
// of shared memory can't be launched.
extern "C" int sms_article_forward(int dtype, const void* scores, const void* mask, void* probs,
                                   int rows, int cols, float scale, int is_causal, int online,
                                   void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (dtype == 0) forward<float>(scores, mask, probs, rows, cols, scale, is_causal, online, s);
  if (dtype == 1) forward<__half>(scores, mask, probs, rows, cols, scale, is_causal, online, s);
  if (dtype == 2) {
    forward<__nv_bfloat16>(scores, mask, probs, rows, cols, scale, is_causal, online, s);
  }
  return cudaGetLastError();
}

extern "C" int sms_article_backward(int dtype, const void* probs, const void* grad_probs,
                                    void* grad_scores, int rows, int cols, float scale,
                                    void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (dtype == 0) backward<float>(probs, grad_probs, grad_scores, rows, cols, scale, s);
  if (dtype == 1) backward<__half>(probs, grad_probs, grad_scores, rows, cols, scale, s);
  if (dtype == 2) backward<__nv_bfloat16>(probs, grad_probs, grad_scores, rows, cols, scale, s);
  return cudaGetLastError();
}
