// What launches of the backward have in common.

#pragma once

#include "backward.cuh"
#include "launch.cuh"

namespace sms_plugin {

template <typename T>
GradAndProbs<T> backward_load(const BackwardArguments& arguments) {
  return {operand_of<T>(arguments.grad_probs, arguments.layout, 0),
          operand_of<T>(arguments.probs, arguments.layout, 1)};
}

template <typename T>
GradOut<T> backward_out(const BackwardArguments& arguments) {
  using Acc = Accumulator<T>;
  return {static_cast<T*>(arguments.grad_scores), static_cast<T*>(arguments.dz),
          static_cast<Acc*>(arguments.dots), static_cast<Acc>(arguments.scale)};
}

template <typename T>
Access backward_access(const BackwardArguments& arguments) {
  const GradAndProbs<T> load = backward_load<T>(arguments);
  check_is_aligned(arguments.grad_scores);
  check_is_aligned(arguments.dz);
  return access_of<T>(arguments.layout.cols,
                      starts_on_boundaries(load.grad_probs, arguments.layout, 0) &&
                          starts_on_boundaries(load.probs, arguments.layout, 1));
}

}  // namespace sms_plugin
