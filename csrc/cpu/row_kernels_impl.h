// The table of one instruction set. Included once per instruction set, behind its target pragma.

#pragma once

#include "backward_impl.h"
#include "forward_impl.h"

namespace sms_plugin {
namespace {

template <typename T, typename S>
constexpr RowKernels kernels_of() {
  return {forward_rows<T, S>, backward_rows<T, S>, add_chunks<T>};
}

// In the order of Dtype.
constexpr RowKernelSet kernel_set() {
  return {{kernels_of<float, Half>(), kernels_of<float, BFloat16>(), kernels_of<float, float>(),
           kernels_of<double, double>()}};
}

}  // namespace
}  // namespace sms_plugin
