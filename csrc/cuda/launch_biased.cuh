// Launches of the forward with one additive term.

#pragma once

#include "launch_forward.cuh"

namespace sms_plugin {

template <typename T, typename U>
void launch_biased(const ForwardArguments& arguments, int which, cudaStream_t stream) {
  const RowLayout& layout = arguments.layout;
  const auto scores = operand_of<T>(arguments.scores, layout, 0);
  const auto term =
      operand_of<U>(which == 2 ? arguments.bias.data : arguments.mask.data, layout, which);
  const bool has_flags = static_cast<TermKind>(arguments.mask.kind) == TermKind::kBool;
  const auto flags = has_flags ? operand_of<uint8_t>(arguments.mask.data, layout, 1)
                               : Operand<uint8_t>{nullptr, nullptr};
  const bool are_aligned = starts_on_boundaries(scores, layout, 0) &&
                           starts_on_boundaries(term, layout, which) &&
                           (!has_flags || starts_at_multiples(flags, layout, 1, kVectorSize<T>));
  if (has_flags) {
    launch_forward_with(BiasedScores<T, U, true>(scores, arguments.scale, term, flags, which),
                        arguments, are_aligned, stream);
  } else {
    launch_forward_with(BiasedScores<T, U, false>(scores, arguments.scale, term, flags, which),
                        arguments, are_aligned, stream);
  }
}

}  // namespace sms_plugin
