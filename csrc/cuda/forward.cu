// Which kernels a forward takes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "exponential.cuh"
#include "launch.h"
#include "row_order.h"
#include "term_kind.h"

namespace sms_plugin {
namespace {

// Which operand of the layout is the one additive term of dtype U, its columns one after the other,
// with at most a bool mask of the same kind besides; 0 if that isn't what there is.
template <typename U>
int single_term(const ForwardArguments& arguments) {
  constexpr TermKind kKind = term_kind_of<U>();
  const auto mask = static_cast<TermKind>(arguments.mask.kind);
  const auto bias = static_cast<TermKind>(arguments.bias.kind);
  const bool has_flags = mask == TermKind::kBool;
  const bool is_bias = bias == kKind && (has_flags || mask == TermKind::kNone);
  const bool is_mask = mask == kKind && bias == TermKind::kNone;
  if (!is_bias && !is_mask) return 0;
  const int which = is_bias ? 2 : 1;
  if (arguments.layout.col_strides[which] != 1) return 0;
  if (has_flags && arguments.layout.col_strides[1] != 1) return 0;
  return which;
}

}  // namespace

template <typename T>
void launch_forward(const ForwardArguments& arguments, cudaStream_t stream) {
  if (arguments.layout.rows == 0 || arguments.layout.cols == 0) return;
  const auto mask = static_cast<TermKind>(arguments.mask.kind);
  const auto bias = static_cast<TermKind>(arguments.bias.kind);
  // A removed score is -inf before it is scaled, and has to be after it: all but the general
  // kernels want a scale above 0.
  if (static_cast<Accumulator<T>>(arguments.scale / kHeadroom) > Accumulator<T>{0}) {
    if (bias == TermKind::kNone && mask == TermKind::kNone) {
      return launch_plain<T>(arguments, stream);
    }
    ForwardArguments ordered = arguments;
    if (bias == TermKind::kNone && mask == TermKind::kBool &&
        arguments.layout.col_strides[1] == 1) {
      share_rows(ordered.layout, 1, sizeof(T));
      return launch_selected<T>(ordered, stream);
    }
    if constexpr (sizeof(T) < sizeof(double)) {
      if (const int which = single_term<T>(arguments)) {
        share_rows(ordered.layout, which, sizeof(T));
        return launch_biased<T, T>(ordered, which, stream);
      }
    }
    if constexpr (sizeof(T) == 2) {
      if (const int which = single_term<float>(arguments)) {
        share_rows(ordered.layout, which, sizeof(T));
        return launch_biased<T, float>(ordered, which, stream);
      }
    }
  }
  launch_general<T>(arguments, stream);
}

template void launch_forward<__half>(const ForwardArguments&, cudaStream_t);
template void launch_forward<__nv_bfloat16>(const ForwardArguments&, cudaStream_t);
template void launch_forward<float>(const ForwardArguments&, cudaStream_t);
template void launch_forward<double>(const ForwardArguments&, cudaStream_t);

}  // namespace sms_plugin
