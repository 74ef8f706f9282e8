// What a mask or bias holds.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace sms_plugin {

enum class TermKind : int { kNone, kBool, kHalf, kBFloat16, kFloat, kDouble };

template <typename U>
constexpr TermKind term_kind_of() {
  if constexpr (std::is_same_v<U, __half>) return TermKind::kHalf;
  if constexpr (std::is_same_v<U, __nv_bfloat16>) return TermKind::kBFloat16;
  if constexpr (std::is_same_v<U, float>) return TermKind::kFloat;
  return TermKind::kDouble;
}

}  // namespace sms_plugin
