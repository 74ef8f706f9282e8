// The current CUDA stream of torch, without linking libtorch_cuda.

#pragma once

#include <cuda_runtime.h>

namespace sms_plugin {

// Raises if the process has no CUDA build of torch.
cudaStream_t current_stream(int device);

}  // namespace sms_plugin
