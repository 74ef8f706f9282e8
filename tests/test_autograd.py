"""What autograd is promised: one saved tensor, inputs left alone, second derivatives, autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import make_scores, random_mask
from compare import DTYPES, compare_grads, exact_probs, upstream
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax


def saved_by(function: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(result, what autograd saves for its backward)"""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(), saved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float", "bias", "float and bias", "strided"])
def test_saves_probs_alone(device: str, kind: str, dtype: torch.dtype) -> None:
    scores = make_scores((2, 3, 8, 16), dtype, device).requires_grad_()
    terms: dict[str, Tensor] = {}
    if kind == "bool":
        terms["mask"] = random_mask((2, 1, 8, 16), device)
    if kind.startswith("float"):
        terms["mask"] = torch.zeros(8, 16, dtype=dtype, device=device, requires_grad=True)
    if kind.endswith("bias"):
        terms["bias"] = torch.zeros(3, 8, 16, dtype=dtype, device=device, requires_grad=True)
    view = scores.transpose(1, 2) if kind == "strided" else scores
    probs, saved = saved_by(lambda: softmax(view, scale=0.5, is_causal=True, **terms))
    assert len(saved) == 1
    assert saved[0].data_ptr() == probs.data_ptr()
    assert saved[0].shape == probs.shape
    assert saved[0].dtype == dtype


def test_saves_nothing_without_a_gradient(device: str) -> None:
    _, saved = saved_by(lambda: softmax(make_scores((3, 4), device=device)))
    assert saved == []


@pytest.mark.parametrize("edit", ["mul_", "dropout", "slice"])
def test_edited_result_raises(device: str, edit: str) -> None:
    scores = make_scores((4, 8), device=device).requires_grad_()
    probs = softmax(scores)
    if edit == "mul_":
        probs.mul_(2)
    elif edit == "dropout":
        torch.nn.functional.dropout(probs, 0.5, inplace=True)
    else:
        probs[0, 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probs.backward(upstream(probs))


def test_edited_scores_do_not_matter(device: str) -> None:
    """Scores, mask and bias aren't saved: the gradient is that of the values at the call."""
    leaf = make_scores((4, 8), device=device).requires_grad_()
    scores, mask, bias = leaf * 1, random_mask((8,), device), torch.zeros(8, device=device)
    exact = exact_probs(leaf, mask, bias=bias)
    probs = softmax(scores, mask, bias=bias)
    grad = upstream(probs)
    scores.add_(1)
    mask.fill_(True)
    bias.fill_(7)
    (got,) = torch.autograd.grad(probs, leaf, grad)
    for comparison in compare_grads(grad, exact, grad_scores=got):
        comparison.demand()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_strided", [False, True])
def test_inputs_are_never_written(device: str, is_strided: bool, dtype: torch.dtype) -> None:
    def operand(seed: int) -> Tensor:
        values = make_scores((2, 3, 9, 33), dtype, device, seed=seed)
        return values.mT.contiguous().mT if is_strided else values

    operands = {"scores": operand(1), "mask": operand(2), "bias": operand(3)}
    before = {name: value.clone() for name, value in operands.items()}
    grad = operand(4)
    grad_before = grad.clone()
    leaves = {name: value.detach().requires_grad_() for name, value in operands.items()}
    probs = softmax(**leaves, scale=0.5, is_causal=True)
    probs_before = probs.detach().clone()
    first = torch.autograd.grad(probs, list(leaves.values()), grad, retain_graph=True)
    second = torch.autograd.grad(probs, list(leaves.values()), grad)
    for name, value in operands.items():
        assert torch.equal(value, before[name]), name
        assert value._version == 0
    assert torch.equal(grad, grad_before)
    assert grad._version == 0
    assert torch.equal(probs, probs_before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_accumulate_from_two_uses(device: str) -> None:
    scores = make_scores((4, 8), torch.float64, device).requires_grad_()
    weights = upstream(scores)
    (once,) = torch.autograd.grad(softmax(scores), scores, weights)
    probs = softmax(scores)
    ((probs * weights).sum() + (probs * weights).sum()).backward()
    torch.testing.assert_close(scores.grad, 2 * once)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_second_derivatives(device: str, kind: str, is_causal: bool) -> None:
    """A Function that hides an intermediate passes gradcheck and fails here."""
    mask = random_mask((2, 1, 1, 4), device)
    mask[0] = True  # dead rows
    scores, bias, learned = (
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for shape in ((2, 2, 3, 4), (2, 1, 4), (3, 4))
    )

    def function(scores: Tensor, bias: Tensor, learned: Tensor) -> Tensor:
        if kind == "bool":
            return softmax(scores, mask, 0.7, is_causal, bias=bias + learned)
        term = learned + sms_plugin.additive_mask(mask, torch.float64)
        return softmax(scores, term, 0.7, is_causal, bias=bias)

    assert torch.autograd.gradgradcheck(function, (scores, bias, learned))


def chain(scores: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """The formula in plain operations, for masks that leave each row a key."""
    return (scores * 0.7 + bias).masked_fill(mask, -torch.inf).softmax(-1)


def test_hessian_vector_products(device: str) -> None:
    scores, bias, direction = (
        make_scores((2, 3, 5), torch.float64, device, seed=seed, size=0.2) for seed in range(3)
    )
    mask = random_mask((5,), device)
    weights = upstream(scores)

    def product(softmax_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        def loss(scores: Tensor, bias: Tensor) -> Tensor:
            return (softmax_of(scores, mask, bias).pow(3) * weights).sum()

        both = (direction, direction.flip(-1))
        return torch.cat(torch.autograd.functional.hvp(loss, (scores, bias), both)[1])

    ours = product(lambda s, m, b: softmax(s, m, 0.7, bias=b))
    torch.testing.assert_close(ours, product(chain), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_penalty(device: str, dtype: torch.dtype) -> None:
    """A loss of the gradient itself, through create_graph, in each dtype."""
    scores = make_scores((3, 4, 9), torch.float64, device, size=0.3).to(dtype)
    weights = upstream(scores)
    mask = random_mask((9,), device)

    def penalty(softmax_of: Callable[..., Tensor], inner: torch.dtype) -> Tensor:
        x = scores.to(inner).requires_grad_()
        probs = softmax_of(x, mask, torch.zeros((), dtype=inner, device=device))
        (grad,) = torch.autograd.grad(probs, x, weights.to(inner), create_graph=True)
        return torch.autograd.grad(grad, x, weights.to(inner).flip(-1))[0].double()

    got = penalty(lambda s, m, b: softmax(s, m, 0.7, bias=b), dtype)
    right = penalty(chain, torch.float64)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}.get(dtype, 6e-2)
    torch.testing.assert_close(got, right, rtol=bound, atol=bound * right.abs().max().item())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_checkpointing_under_autocast(device: str, is_causal: bool, use_reentrant: bool) -> None:
    """Recomputation saves the same tensors, so gradients are those without checkpointing."""
    layer = torch.nn.Linear(16, 16).to(device)
    inputs = make_scores((2, 8, 16), device=device, size=0.3)
    mask = random_mask((2, 1, 8), device)
    weights = upstream(inputs)

    def block(x: Tensor) -> Tensor:
        hidden = layer(x)
        scores = hidden @ x.mT.to(hidden.dtype)
        return softmax(scores, mask, 0.25, is_causal) @ hidden

    def run(is_checkpointed: bool) -> list[Tensor]:
        x = inputs.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = checkpoint(block, x, use_reentrant=use_reentrant) if is_checkpointed else block(x)
        out.float().backward(weights)  # re-entrant checkpoints know no autograd.grad()
        return [t.grad for t in (x, *layer.parameters()) if t.grad is not None]

    assert len(run(True)) == 3
    for got, right in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("inside", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_changes_nothing(device: str, dtype: torch.dtype, inside: torch.dtype) -> None:
    """The operator runs in the dtype that it is given: same bits, same gradient dtype."""
    scores = make_scores((3, 4, 20), dtype, device).requires_grad_()
    bias = torch.zeros(4, 20, device=device, requires_grad=True)
    right = softmax(scores, scale=0.5, bias=bias)
    with torch.autocast(device, dtype=inside):
        probs = softmax(scores, scale=0.5, bias=bias)
        assert probs.dtype == dtype
        followed = probs @ torch.randn(20, 5, device=device, dtype=dtype)
    assert followed.isfinite().all()
    assert torch.equal(probs, right)
    grad_scores, grad_bias = torch.autograd.grad(probs, [scores, bias], upstream(probs))
    assert (grad_scores.dtype, grad_bias.dtype) == (dtype, torch.float32)
    assert not torch.is_autocast_enabled(device)


def test_autocast_training_step(device: str) -> None:
    """matmul under autocast gives 16-bit scores; the scaler's step leaves finite parameters."""
    inside = torch.bfloat16 if device == "cpu" else torch.float16
    layer = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device)
    x = make_scores((2, 6, 8), device=device, size=0.3)
    mask = torch.zeros(6, 6, dtype=torch.bool, device=device)
    mask[2] = True
    with torch.autocast(device, dtype=inside):
        hidden = layer(x)
        scores = hidden @ hidden.mT
        assert scores.dtype == inside
        probs = softmax(scores, mask, 8**-0.5, True)
        assert probs.dtype == inside
        loss = ((probs @ hidden).float() * upstream(x)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(bool(p.isfinite().all()) for p in layer.parameters())
