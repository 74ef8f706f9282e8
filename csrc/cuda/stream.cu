#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "stream.h"

namespace sms_plugin {
namespace {

using GetCurrentStream = int32_t (*)(int32_t device, void** stream);  // 0 on success

// A link against libtorch_cuda would keep this library from loading beside a CPU build of torch. It
// is in the process already when a CUDA tensor is: look the function up there.
GetCurrentStream find_get_current_stream() {
  constexpr const char* kSymbol = "aoti_torch_get_current_cuda_stream";
  void* found = nullptr;
  if (void* handle = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) {
    found = dlsym(handle, kSymbol);
    dlclose(handle);
  }
  if (found == nullptr) found = dlsym(RTLD_DEFAULT, kSymbol);
  if (found == nullptr) {
    throw std::runtime_error(std::string("sms_plugin: this process has no ") + kSymbol +
                             ": torch was built without CUDA");
  }
  return reinterpret_cast<GetCurrentStream>(found);
}

}  // namespace

cudaStream_t current_stream(int device) {
  static const GetCurrentStream get_current_stream = find_get_current_stream();
  void* stream = nullptr;
  if (get_current_stream(device, &stream) != 0) {
    throw std::runtime_error("sms_plugin: torch gave no current stream for device " +
                             std::to_string(device));
  }
  return static_cast<cudaStream_t>(stream);
}

}  // namespace sms_plugin
