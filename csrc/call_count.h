// How often each operator ran on each device: proof for a user that the fused path is taken.

#pragma once

#include <cstdint>

namespace sms_plugin {

enum class Op : int { kForward = 0, kBackward = 1 };
enum class CountedDevice : int { kCpu = 0, kCuda = 1 };

void count_call(Op op, CountedDevice device);

}  // namespace sms_plugin

// Read by sms_plugin.call_counts() through ctypes; -1 for an unknown index.
extern "C" __attribute__((visibility("default"))) int64_t sms_plugin_call_count(int op, int device);
