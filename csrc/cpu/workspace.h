// Scratch memory of a row kernel, aligned to a cache line.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace sms_plugin {
namespace {

template <typename T>
class Workspace {
 public:
  explicit Workspace(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    if (bytes == 0) return;
    data_ = static_cast<T*>(std::aligned_alloc(kLine, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Workspace() { std::free(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  T* data() { return data_; }

 private:
  static constexpr size_t kLine = 64;
  T* data_ = nullptr;  // [count]
};

}  // namespace
}  // namespace sms_plugin
