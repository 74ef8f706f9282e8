"""Which derivative runs when: autograd formulas and batching rules of the two operators.

Eager calls take an `autograd.Function` of their own, since the one that
`torch.library.register_autograd` makes costs a small call more than the kernels do; compiled graphs
and direct calls of the operators take that one. Under `torch.func` transforms a Function with
`setup_context` and `vmap` is needed, which the others can't be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from sms_plugin import derivatives
from sms_plugin.derivatives import Grads, Shape
from sms_plugin.ops import backward_op, forward_op, library

_below_autograd = torch._C._AutoDispatchBelowAutograd


def eager_softmax(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    """The forward operator in eager mode, at the least cost for the host."""
    needs_grad = torch.is_grad_enabled() and (
        scores.requires_grad
        or (mask is not None and mask.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    if needs_grad:
        return EagerSoftmaxFunction.apply(scores, mask, bias, scale, is_causal)
    with _below_autograd():
        return forward_op(scores, mask, bias, scale, is_causal)


def compiled_softmax(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    """The forward operator in code that `torch.compile` traces."""
    if not _transforms_are_traced():
        return forward_op(scores, mask, bias, scale, is_causal)

    # Dynamo takes no Function with a vmap of its own, and the operator's registered formula knows
    # no transform: the derivatives are traced instead, around the operator's value.
    def softmax(scores: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        return forward_op(scores, mask, bias, scale, is_causal)

    return derivatives.around_value(softmax, scores, mask, bias, scale)


class EagerSoftmaxFunction(torch.autograd.Function):
    """The forward operator where no transform and no compiler is at work."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        with _below_autograd():
            probs = forward_op(*inputs)
        _save_forward(ctx, inputs, probs)
        return probs

    @staticmethod
    def backward(ctx: Any, grad_probs: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True the operator records its own derivative.
        operator = backward_op if torch.is_grad_enabled() else _backward_without_graph
        return _backward(ctx, grad_probs, operator)


def transforms_are_active() -> bool:
    """Whether a `torch.func` transform or a dual level is entered."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def _transforms_are_traced() -> bool:
    """The same at trace time; dynamo guards on the transforms and the dual level itself."""
    return transforms_are_active()


def _is_forward_mode() -> bool:
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack() if torch._C._are_functorch_transforms_active() else None
    return any(level.key() == TransformType.Jvp for level in stack or ())


def transformed_softmax(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, is_causal: bool
) -> Tensor:
    """The forward operator under `torch.func` transforms and dual tensors."""

    def softmax(scores: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        return ScaledMaskSoftmaxFunction.apply(scores, mask, bias, scale, is_causal)

    if _is_forward_mode():
        return derivatives.around_value(softmax, scores, mask, bias, scale)
    return softmax(scores, mask, bias)


class ScaledMaskSoftmaxFunction(torch.autograd.Function):
    """The forward operator with the rules that `torch.func.vmap` and `grad` need."""

    @staticmethod
    def forward(
        scores: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, is_causal: bool
    ) -> Tensor:
        return forward_op(scores, mask, bias, scale, is_causal)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save_forward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_probs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad_probs, ScaledMaskSoftmaxBackwardFunction.apply)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        scores: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, int]:
        scores, mask, bias = _batch_forward(info.batch_size, in_dims, scores, mask, bias)
        return ScaledMaskSoftmaxFunction.apply(scores, mask, bias, *options), 0


class ScaledMaskSoftmaxBackwardFunction(torch.autograd.Function):
    """The backward operator with the same rules, so that transforms of gradients are right too."""

    @staticmethod
    def forward(grad_probs: Tensor, probs: Tensor, *options: Any) -> Grads:
        return backward_op(grad_probs, probs, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Grads) -> None:
        _save_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward_of_backward(ctx, *grads)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], grad_probs: Tensor, probs: Tensor, *options: Any
    ) -> tuple[Grads, tuple[int | None, ...]]:
        return _vmap_backward(
            ScaledMaskSoftmaxBackwardFunction.apply, info, in_dims, grad_probs, probs, *options
        )


def _backward_without_graph(*arguments: Any) -> Grads:
    with _below_autograd():
        return backward_op(*arguments)


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, bias, ctx.scale, ctx.is_causal = inputs
    ctx.terms = tuple(None if term is None else (term.shape, term.dtype) for term in (mask, bias))
    ctx.save_for_backward(output)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Grads) -> None:
    grad_probs, probs, ctx.scale, _, *ctx.wanted = inputs
    ctx.save_for_backward(grad_probs, probs)


def _backward(ctx: Any, grad_probs: Tensor, operator: Any) -> tuple[Tensor | None, ...]:
    (probs,) = ctx.saved_tensors
    needs_scores, needs_mask, needs_bias, *_ = ctx.needs_input_grad
    mask_shape, mask_dtype = ctx.terms[0] if needs_mask else ((), None)
    bias_shape, bias_dtype = ctx.terms[1] if needs_bias else ((), None)
    if not torch.compiler.is_compiling() and _is_forward_mode():
        operator = derivatives.backward
    grad_scores, grad_mask, grad_bias = operator(
        grad_probs, probs, ctx.scale, ctx.is_causal, mask_shape, mask_dtype, bias_shape, bias_dtype
    )
    return (
        grad_scores if needs_scores else None,
        grad_mask if needs_mask else None,
        grad_bias if needs_bias else None,
        None,
        None,
    )


def _backward_of_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    grad_probs, probs = ctx.saved_tensors
    _, mask_dtype, _, bias_dtype = ctx.wanted
    cotangents = (
        grads[0],
        None if mask_dtype is None else grads[1],
        None if bias_dtype is None else grads[2],
    )
    grad_g, grad_p = derivatives.double_backward(probs, grad_probs, ctx.scale, cotangents)
    return grad_g, grad_p, None, None, None, None, None, None


def _batch_first(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    if dim is None:
        return tensor.unsqueeze(0).expand(batch, *tensor.shape)
    return tensor.movedim(dim, 0)


def _batch_forward(
    batch: int,
    in_dims: tuple[int | None, ...],
    scores: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Move the batch dimension of each tensor to the front, where it broadcasts."""
    scores = _batch_first(scores, in_dims[0], batch)  # (batch, ..., Tk)

    def aligned(term: Tensor | None, dim: int | None) -> Tensor | None:
        if term is None or dim is None:
            return term
        term = term.movedim(dim, 0)
        missing = scores.dim() - term.dim()
        return term.reshape(batch, *(1,) * missing, *term.shape[1:])

    return scores, aligned(mask, in_dims[1]), aligned(bias, in_dims[2])


def _vmap_forward(
    info: Any, in_dims: tuple[Any, ...], scores: Tensor, mask: Any, bias: Any, *options: Any
) -> tuple[Tensor, int]:
    scores, mask, bias = _batch_forward(info.batch_size, in_dims, scores, mask, bias)
    return forward_op(scores, mask, bias, *options), 0


def _vmap_backward(
    operator: Any,
    info: Any,
    in_dims: tuple[Any, ...],
    grad_probs: Tensor,
    probs: Tensor,
    scale: float,
    is_causal: bool,
    mask_shape: Shape,
    mask_dtype: torch.dtype | None,
    bias_shape: Shape,
    bias_dtype: torch.dtype | None,
) -> tuple[Grads, tuple[int | None, ...]]:
    batch = info.batch_size
    grad_probs = _batch_first(grad_probs, in_dims[0], batch)
    probs = _batch_first(probs, in_dims[1], batch)

    def batched(shape: Shape) -> list[int]:
        return [batch] + [1] * (probs.dim() - 1 - len(shape)) + list(shape)

    grad_scores, grad_mask, grad_bias = operator(
        grad_probs,
        probs,
        scale,
        is_causal,
        batched(mask_shape),
        mask_dtype,
        batched(bias_shape),
        bias_dtype,
    )
    out_dims: list[int | None] = [0, None, None]
    if mask_dtype is not None:
        grad_mask, out_dims[1] = grad_mask.reshape(batch, *mask_shape), 0
    if bias_dtype is not None:
        grad_bias, out_dims[2] = grad_bias.reshape(batch, *bias_shape), 0
    return (grad_scores, grad_mask, grad_bias), tuple(out_dims)


def _register() -> None:
    """What eager mode and torch.compile use; the Functions above serve transforms."""

    def backward(ctx: Any, grad_probs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad_probs, backward_op)

    def vmap_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        return _vmap_backward(backward_op, info, in_dims, *arguments)

    torch.library.register_autograd(forward_op, backward, setup_context=_save_forward, lib=library)
    torch.library.register_autograd(
        backward_op, _backward_of_backward, setup_context=_save_backward, lib=library
    )
    torch.library.register_vmap(forward_op, _vmap_forward, lib=library)
    torch.library.register_vmap(backward_op, vmap_backward, lib=library)


_register()
