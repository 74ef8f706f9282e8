"""The two operators: schemas, fake kernels, and the library behind them.

C++ has implementations only (csrc/cpu, csrc/cuda). They arrive when the library is loaded, which
happens at the first call on real data, in eager and in compiled code alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sms_plugin import extension

library = torch.library.Library("sms_plugin", "DEF")

library.define(
    "scaled_mask_softmax(Tensor scores, Tensor? mask, Tensor? bias, float scale, bool is_causal)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Returns (grad_scores, grad_mask, grad_bias). The last two are dz summed to their shape; where the
# dtype is None that gradient isn't wanted and an empty tensor stands for it.
library.define(
    "scaled_mask_softmax_backward(Tensor grad_probs, Tensor probs, float scale, bool is_causal,"
    " SymInt[] mask_shape, ScalarType? mask_dtype, SymInt[] bias_shape, ScalarType? bias_dtype)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

forward_op = torch.ops.sms_plugin.scaled_mask_softmax.default
backward_op = torch.ops.sms_plugin.scaled_mask_softmax_backward.default

_OPS = (forward_op, backward_op)
_DEVICES = ("cpu", "cuda")


def _require_kernel(op: torch._ops.OpOverload, device: torch.device) -> None:
    """Load the library; raise if it holds no kernel of `op` for `device`."""
    if device.type not in _DEVICES:
        raise RuntimeError(
            f"{op.name()}: there is no kernel for device {str(device)!r}; move the tensors to "
            "'cpu' or 'cuda', or use ScaledMaskSoftmax('native')"
        )
    extension.load()
    key = device.type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        raise extension.LibraryUnavailable(
            f"{op.name()}: the loaded library has no {key} kernels: "
            f"{extension.cuda_unavailable_reason()}"
        )


# These two run only as long as the library's own kernels aren't there, which take precedence.
@torch.library.impl(library, "scaled_mask_softmax", "CompositeExplicitAutograd")
def _load_and_forward(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    _require_kernel(forward_op, scores.device)
    return forward_op(scores, mask, bias, scale, is_causal)


@torch.library.impl(library, "scaled_mask_softmax_backward", "CompositeExplicitAutograd")
def _load_and_backward(
    grad_probs: Tensor,
    probs: Tensor,
    scale: float,
    is_causal: bool,
    mask_shape: Sequence[int],
    mask_dtype: torch.dtype | None,
    bias_shape: Sequence[int],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _require_kernel(backward_op, probs.device)
    return backward_op(
        grad_probs, probs, scale, is_causal, mask_shape, mask_dtype, bias_shape, bias_dtype
    )


@torch.library.register_fake(forward_op, lib=library)
def _fake_forward(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    return scores.new_empty(scores.shape)


@torch.library.register_fake(backward_op, lib=library)
def _fake_backward(
    grad_probs: Tensor,
    probs: Tensor,
    scale: float,
    is_causal: bool,
    mask_shape: Sequence[int],
    mask_dtype: torch.dtype | None,
    bias_shape: Sequence[int],
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:

    def grad(shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        return probs.new_empty((0,)) if dtype is None else probs.new_empty(shape, dtype=dtype)

    grad_scores = probs.new_empty(probs.shape)
    return grad_scores, grad(mask_shape, mask_dtype), grad(bias_shape, bias_dtype)


def call_counts() -> dict[str, dict[str, int]]:
    """How often each operator ran on each device in this process.

    The counters are atomic and live in the host code of the operators, so compiled graphs are
    counted too. The replay of a captured CUDA graph runs no host code and isn't counted; its
    capture is.

    Returns:
        ``{"scaled_mask_softmax": {"cpu": n, "cuda": n}, "scaled_mask_softmax_backward": {...}}``;
        zeros as long as the library isn't loaded.
    """
    loaded = extension.loaded_library()
    return {
        op._schema.name.removeprefix("sms_plugin::"): {
            device: 0 if loaded is None else loaded.sms_plugin_call_count(op_index, device_index)
            for device_index, device in enumerate(_DEVICES)
        }
        for op_index, op in enumerate(_OPS)
    }
