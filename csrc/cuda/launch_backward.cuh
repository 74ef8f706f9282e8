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
bool is_plain_backward(const BackwardArguments& arguments) {
  const GradAndProbs<T> load = backward_load<T>(arguments);
  return has_whole_vectors(load.grad_probs, arguments.layout, 0) &&
         has_whole_vectors(load.probs, arguments.layout, 1) && is_aligned(arguments.grad_scores) &&
         is_aligned(arguments.dz);
}

}  // namespace sms_plugin
