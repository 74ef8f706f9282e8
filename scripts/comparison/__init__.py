"""Fair comparisons of softmax paths: parity of losses and gradients, and speed."""
