#include "call_count.h"

#include <atomic>

namespace sms_plugin {
namespace {

constexpr int kOps = 2;
constexpr int kDevices = 2;

std::atomic<int64_t>& counter(int op, int device) {
  static std::atomic<int64_t> counters[kOps][kDevices];
  return counters[op][device];
}

}  // namespace

void count_call(Op op, CountedDevice device) {
  counter(static_cast<int>(op), static_cast<int>(device)).fetch_add(1, std::memory_order_relaxed);
}

}  // namespace sms_plugin

int64_t sms_plugin_call_count(int op, int device) {
  if (op < 0 || op >= sms_plugin::kOps || device < 0 || device >= sms_plugin::kDevices) return -1;
  return sms_plugin::counter(op, device).load(std::memory_order_relaxed);
}
