"""Every torch.func transform and forward-mode AD in eager mode, against plain operations and loops.

A zero or missing tangent is a wrong result. Legend: N samples, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, upstream
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax
Function = Callable[..., Tensor]

SCALE = 0.7
N = 5


def plain(
    scores: Tensor, mask: Tensor | None = None, scale: float = 1.0, is_causal: bool = False, *,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The contract in plain operations, of which torch knows every derivative; no dead rows."""
    z = scores * scale
    if bias is not None:
        z = z + bias
    if mask is not None:
        z = z.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        z = z.masked_fill(future.triu(1 + scores.shape[-1] - scores.shape[-2]), -torch.inf)
    return z.softmax(-1)


def values(shape: tuple[int, ...], device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)


def close(got: Any, right: Any) -> None:
    torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-12)


def of_terms(softmax_of: Function, kind: str, device: str) -> tuple[Function, tuple[Tensor, ...]]:
    """(function of float tensors only, its inputs (H, Tq, Tk) and terms that broadcast)"""
    scores, bias, learned = (
        values((2, 3, 4), device),
        values((2, 1, 4), device, 1),
        values((4,), device, 2),
    )
    removed = random_mask((3, 4), device)
    functions: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
        "scores": (lambda s: softmax_of(s, None, SCALE), (scores,)),
        "bool": (lambda s: softmax_of(s, removed, SCALE), (scores,)),
        "causal": (lambda s: softmax_of(s, None, SCALE, True), (scores,)),
        "float mask": (lambda s, m: softmax_of(s, m, SCALE), (scores, learned)),
        "bias alone": (lambda b: softmax_of(scores, removed, SCALE, bias=b), (bias,)),
        "everything": (
            lambda s, b, m: softmax_of(s, m, SCALE, True, bias=b),
            (scores, bias, learned),
        ),
    }
    return functions[kind]


KINDS = ["scores", "bool", "causal", "float mask", "bias alone", "everything"]


@pytest.mark.parametrize("kind", KINDS)
def test_jacobians(device: str, kind: str) -> None:
    ours, inputs = of_terms(softmax, kind, device)
    right = jacrev(of_terms(plain, kind, device)[0], tuple(range(len(inputs))))(*inputs)
    for transform in (jacrev, jacfwd):
        close(transform(ours, tuple(range(len(inputs))))(*inputs), right)
    for is_vectorized in (False, True):
        got = torch.autograd.functional.jacobian(ours, inputs, vectorize=is_vectorized)
        close(got, right)
    got = torch.autograd.functional.jacobian(ours, inputs, strategy="forward-mode", vectorize=True)
    close(got, right)


@pytest.mark.parametrize("kind", KINDS)
def test_jvp_and_vjp(device: str, kind: str) -> None:
    ours, inputs = of_terms(softmax, kind, device)
    theirs = of_terms(plain, kind, device)[0]
    tangents = tuple(values(tuple(t.shape), device, 9) for t in inputs)
    got, right = jvp(ours, inputs, tangents), jvp(theirs, inputs, tangents)
    assert right[1].abs().max() > 1e-3
    close(got, right)
    cotangent = values((2, 3, 4), device, 10)
    close(vjp(ours, *inputs)[1](cotangent), vjp(theirs, *inputs)[1](cotangent))


SECOND_ORDER: dict[str, Callable[[Function, tuple[int, ...]], Function]] = {
    "hessian": hessian,
    "jacrev of jacrev": lambda f, n: jacrev(jacrev(f, n), n),
    "jacrev of jacfwd": lambda f, n: jacrev(jacfwd(f, n), n),
    "jacfwd of jacrev": lambda f, n: jacfwd(jacrev(f, n), n),
    "jacfwd of jacfwd": lambda f, n: jacfwd(jacfwd(f, n), n),
}


def loss_of(function: Function, weights: Tensor) -> Function:
    return lambda *inputs: (function(*inputs).pow(2) * weights).sum()


@pytest.mark.parametrize("composition", SECOND_ORDER)
@pytest.mark.parametrize("kind", KINDS)
def test_second_order(device: str, kind: str, composition: str) -> None:
    weights = values((2, 3, 4), device, 11)
    ours, inputs = of_terms(softmax, kind, device)
    theirs = of_terms(plain, kind, device)[0]
    everything = tuple(range(len(inputs)))
    right = jacrev(jacrev(loss_of(theirs, weights), everything), everything)(*inputs)
    close(SECOND_ORDER[composition](loss_of(ours, weights), everything)(*inputs), right)


@pytest.mark.parametrize("kind", KINDS)
def test_hessian_vector_products(device: str, kind: str) -> None:
    """jvp of grad, grad of jvp, jvp of jvp."""
    weights = values((2, 3, 4), device, 11)
    ours, inputs = of_terms(softmax, kind, device)
    loss, right_loss = (loss_of(f, weights) for f in (ours, of_terms(plain, kind, device)[0]))
    everything = tuple(range(len(inputs)))
    tangents = tuple(values(tuple(t.shape), device, 12) for t in inputs)

    def directional(f: Function) -> Function:
        return lambda *x: jvp(f, x, tangents)[1]

    for make in (
        lambda f: jvp(grad(f, everything), inputs, tangents)[1],
        lambda f: grad(directional(f), everything)(*inputs),
        lambda f: jvp(directional(f), inputs, tangents)[1],
    ):
        close(make(loss), make(right_loss))


@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dual_tensors(device: str, dtype: torch.dtype, wants_grad: bool) -> None:
    """With requires_grad, autograd's formula alone would return a zero tangent without a word."""
    scores = make_scores((2, 3, 4), dtype, device, size=0.3)
    bias = make_scores((3, 4), dtype, device, seed=1, size=0.1)
    tangent, bias_tangent = upstream(scores, 5), upstream(bias, 6)
    double = (x.double() for x in (scores, bias, tangent, bias_tangent))
    s, b, ts, tb = double
    right = jvp(lambda s, b: plain(s, None, SCALE, True, bias=b), (s, b), (ts, tb))[1]
    scores.requires_grad_(wants_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(scores, tangent)
        dual_bias = forward_ad.make_dual(bias, bias_tangent)
        probs = softmax(dual, None, SCALE, True, bias=dual_bias)
        got = forward_ad.unpack_dual(probs).tangent
        only_bias = softmax(scores, None, SCALE, True, bias=dual_bias)
        got_of_bias = forward_ad.unpack_dual(only_bias).tangent
        no_tangent = forward_ad.unpack_dual(softmax(scores, None, SCALE)).tangent
    assert got is not None
    assert got.dtype == dtype
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 2e-2)
    torch.testing.assert_close(got.double(), right, rtol=bound, atol=bound)
    right_of_bias = jvp(lambda b: plain(s, None, SCALE, True, bias=b), (b,), (tb,))[1]
    torch.testing.assert_close(got_of_bias.double(), right_of_bias, rtol=bound, atol=bound)
    assert no_tangent is None or not no_tangent.any()


def test_forward_over_reverse_with_duals(device: str) -> None:
    """A Hessian-vector product of dual tensors and backward()."""
    scores, direction, weights = (values((3, 4), device, seed) for seed in range(3))

    def product(softmax_of: Function) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(scores.clone().requires_grad_(), direction)
            loss = (softmax_of(dual, None, SCALE).pow(2) * weights).sum()
            (gradient,) = torch.autograd.grad(loss, dual, create_graph=True)
            return forward_ad.unpack_dual(gradient).tangent

    close(product(softmax), product(plain))


def test_dead_rows_have_zero_tangents(device: str) -> None:
    scores, mask = values((4, 5), device), torch.zeros(4, 5, dtype=torch.bool, device=device)
    mask[1] = True
    scores[1] = torch.nan
    probs, tangent = jvp(lambda s: softmax(s, mask, SCALE), (scores,), (values((4, 5), device, 1),))
    assert not probs[1].any()
    assert not tangent[1].any()
    assert bool(tangent.isfinite().all())
    jacobian = jacrev(lambda s: softmax(s, mask, SCALE))(scores)
    assert bool(jacobian.isfinite().all())
    assert not jacobian[1].any()


def test_gradcheck_of_every_mode(device: str) -> None:
    bias, scores = (
        values((4,), device, 1).requires_grad_(),
        values((2, 3, 4), device).requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda s, b: softmax(s, None, SCALE, True, bias=b),
        (scores, bias),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    assert torch.autograd.gradgradcheck(
        lambda s, b: softmax(s, None, SCALE, True, bias=b),
        (scores, bias),
        check_batched_grad=True,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
    )


def loop(function: Function, in_dims: tuple[int | None, ...], *inputs: Tensor | None) -> Tensor:
    samples = []
    for n in range(N):
        picked = (t if d is None else t.select(d, n) for t, d in zip(inputs, in_dims, strict=True))
        samples.append(function(*picked))
    return torch.stack(samples)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shapes", "in_dims"),
    [
        (((N, 2, 4, 6), None, None), (0, None, None)),
        (((N, 2, 4, 6), (4, 6), None), (0, None, None)),
        (((N, 2, 4, 6), (N, 4, 6), None), (0, 0, None)),
        (((N, 2, 4, 6), (N, 6), (N, 2, 1, 1)), (0, 0, 0)),
        (((N, 2, 4, 6), (N,), (6, N)), (0, 0, 1)),
        (((2, N, 4, 6), (4, 6, N), (N, 4, 6)), (1, 2, 0)),
        (((2, 4, 6, N), (N, 1, 6), None), (3, 0, None)),
        (((2, 4, N, 6), (1, N), (2, 4, 6)), (-2, 1, None)),
        (((2, 4, 6), (N, 2, 4, 6), None), (None, 0, None)),
        (((2, 4, 6), (N, 6), (6,)), (None, 0, None)),
        (((2, 4, 6), None, (2, N, 4, 1)), (None, None, 1)),
        (((N, 4, 6), (N, 4, 1), (N, 1, 6)), (0, 0, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_vmap(device: str, kind: str, shapes: Any, in_dims: Any, is_causal: bool) -> None:
    """A term's sample dimension stands before its own, not where broadcasting would put it."""
    scores_shape, mask_shape, bias_shape = shapes
    scores = values(scores_shape, device)
    mask = None if mask_shape is None else values(mask_shape, device, 1)
    mask = mask > 0.5 if mask is not None and kind == "bool" else mask
    bias = None if bias_shape is None else values(bias_shape, device, 2)

    def function(scores: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        return softmax(scores, mask, SCALE, is_causal, bias=bias)

    right = loop(function, in_dims, scores, mask, bias)
    close(vmap(function, in_dims)(scores, mask, bias), right)
    close(vmap(function, in_dims, out_dims=-1)(scores, mask, bias), right.movedim(0, -1))

    inputs = [scores, mask, bias]
    wanted = tuple(i for i, t in enumerate(inputs) if t is not None and t.is_floating_point())
    weights = values(tuple(right.shape[1:]), device, 3)
    per_sample = grad(lambda *t: (function(*t).pow(2) * weights).sum(), wanted)
    got = vmap(per_sample, in_dims)(*inputs)
    for i, g in enumerate(got):
        close(g, loop(lambda *t, i=i: per_sample(*t)[i], in_dims, *inputs))

    def forward(*t: Tensor) -> Tensor:
        return jvp(lambda s: function(s, *t[1:]), (t[0],), (t[0].sin(),))[1]

    close(vmap(forward, in_dims)(*inputs), loop(forward, in_dims, *inputs))


def test_vmap_of_single_rows(device: str) -> None:
    scores, mask = values((N, 7), device), random_mask((N, 7), device)
    close(vmap(lambda s, m: softmax(s, m))(scores, mask), softmax(scores, mask))
    with pytest.raises(ValueError, match="is_causal"):
        vmap(lambda s: softmax(s, is_causal=True))(scores)


def test_nested_vmap(device: str) -> None:
    scores, mask, bias = (
        values((N, 3, 4, 6), device),
        random_mask((3, 6), device),
        values((N, 6), device),
    )
    nested = vmap(vmap(lambda s, m, b: softmax(s, m, bias=b), (0, 0, None)), (0, None, 0))
    right = softmax(scores, mask[:, None], bias=bias[:, None, None])
    close(nested(scores, mask, bias), right)
    got = vmap(vmap(grad(lambda s, b: softmax(s, bias=b)[0, 0], (0, 1)), (0, None)))(scores, bias)
    each = [
        [grad(lambda s, b: softmax(s, bias=b)[0, 0], (0, 1))(s, b) for s in t]
        for t, b in zip(scores, bias, strict=True)
    ]
    for i in range(2):
        close(got[i], torch.stack([torch.stack([pair[i] for pair in row]) for row in each]))


def test_batched_incoming_gradients(device: str) -> None:
    scores, bias = values((3, 4), device).requires_grad_(), values((4,), device, 1).requires_grad_()
    probs = softmax(scores, None, SCALE, True, bias=bias)
    batch = values((N, 3, 4), device, 2)
    got = torch.autograd.grad(
        probs, [scores, bias], batch, is_grads_batched=True, retain_graph=True
    )
    for n in range(N):
        right = torch.autograd.grad(probs, [scores, bias], batch[n], retain_graph=True)
        close([g[n] for g in got], list(right))


def test_per_sample_gradients_of_a_module(device: str) -> None:
    """An ensemble: functional_call under vmap(grad)."""
    layer = torch.nn.Linear(6, 6, dtype=torch.float64, device=device)
    attention = sms_plugin.ScaledMaskSoftmax("fused")
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = torch.func.functional_call(layer, parameters, (x,))
        return (attention(hidden @ x.mT, None, SCALE, True) @ hidden).pow(2).sum()

    samples = values((N, 4, 6), device)
    got = vmap(grad(loss), (None, 0))(parameters, samples)
    for name in parameters:
        close(got[name], torch.stack([grad(loss)(parameters, x)[name] for x in samples]))
