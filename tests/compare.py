"""The yardstick of the tests: the contract in NumPy, and the error that the contract allows.

Independent of `sms_plugin.reference` on purpose: two definitions that agree are worth more than
one. 16- and 32-bit scores are computed in float64, float64 scores in `numpy.longdouble`, from the
inputs as stored. Each comparison yields its largest error, and that error in units of what is
allowed there; more than 1 fails.

Legend: scores (..., Tq, Tk), mask and bias broadcast to it; D = max |z| over a row's kept keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    digits: int  # bits of the significand, the hidden one included
    min_exponent: int  # 2 ** min_exponent is the smallest normal number
    largest: float

    @property
    def unit(self) -> float:
        """u of the contract: half a unit in the last place of 1."""
        return 2.0**-self.digits

    @property
    def smallest(self) -> float:
        """The smallest subnormal number."""
        return 2.0 ** (self.min_exponent - self.digits + 1)

    def ulp(self, values: np.ndarray) -> np.ndarray:
        """One unit in the last place of each value."""
        _, exponent = np.frexp(
            np.where(np.isfinite(values), values, 1)
        )  # |value| in [.5, 1) * 2^exponent
        exponent = np.where(
            values == 0, self.min_exponent, np.maximum(exponent - 1, self.min_exponent)
        )
        return np.ldexp(np.ones_like(values), exponent - self.digits + 1)

    def round(self, values: np.ndarray) -> np.ndarray:
        """The nearest numbers of this format, ties to even; overflow isn't modelled."""
        ulp = self.ulp(values)
        return np.where(np.isfinite(values), np.rint(values / ulp) * ulp, values)


FORMATS = {
    torch.float16: Format(11, -14, torch.finfo(torch.float16).max),
    torch.bfloat16: Format(8, -126, torch.finfo(torch.bfloat16).max),
    torch.float32: Format(24, -126, torch.finfo(torch.float32).max),
    torch.float64: Format(53, -1022, torch.finfo(torch.float64).max),
}


def inner_format(dtype: torch.dtype) -> Format:
    """What the operator computes in: float32 for 16- and 32-bit scores, float64 for float64."""
    return FORMATS[torch.float64 if dtype == torch.float64 else torch.float32]


def widen(values: Tensor, dtype: torch.dtype) -> np.ndarray:
    """`values` exactly, in the yardstick's precision for scores of `dtype`."""
    wide = values.detach().cpu().resolve_neg().double().numpy()
    return wide.astype(np.longdouble) if dtype == torch.float64 else wide


@dataclass(frozen=True)
class Exact:
    """What `scaled_mask_softmax` is of some inputs, before rounding."""

    dtype: torch.dtype  # of the scores
    probs: np.ndarray  # (..., Tq, Tk); NaN in a diverged row except where selection removed the key
    kept: np.ndarray  # bool (..., Tq, Tk)
    size: np.ndarray  # D, (..., Tq, 1)


def exact_probs(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    bias: Tensor | None = None,
) -> Exact:
    """The forward formula of the contract."""
    largest = inner_format(scores.dtype).largest
    z = widen(scores, scores.dtype)
    selected = np.ones(z.shape, dtype=bool)
    if is_causal:
        rows, cols = z.shape[-2:]
        selected &= np.arange(cols) <= np.arange(rows)[:, None] + cols - rows
    if mask is not None and mask.dtype == torch.bool:
        selected &= ~np.broadcast_to(mask.cpu().numpy(), z.shape)

    with np.errstate(all="ignore"):
        z = z * z.dtype.type(scale)
        for term in (bias, mask):
            if term is not None and term.dtype != torch.bool:
                added = widen(term, scores.dtype)
                added = np.where(np.isneginf(added), added, np.maximum(added, -largest))
                z = z + np.broadcast_to(np.where(added > largest, np.inf, added), z.shape)
        # z is summed at an eighth of its size: it becomes -inf from eight times the format on.
        z = np.where(selected & ~(z < -8 * largest), z, -np.inf)
        is_nan_row = (np.isnan(z) | (z > largest)).any(axis=-1, keepdims=True)
        kept = selected & ~np.isneginf(z)
        highest = np.max(z, axis=-1, keepdims=True, initial=-np.inf)
        weights = np.where(kept, np.exp(z - np.where(np.isfinite(highest), highest, 0)), 0)
        total = weights.sum(axis=-1, keepdims=True)
        probs = np.where(kept, weights / np.where(total == 0, 1, total), 0)
        probs = np.where(is_nan_row, np.where(selected, np.nan, 0), probs)
        size = np.where(kept & ~is_nan_row, np.abs(z), 0).max(axis=-1, keepdims=True, initial=0)
    return Exact(scores.dtype, probs, kept, size)


@dataclass(frozen=True)
class Comparison:
    """How far a result is from the exact one."""

    what: str
    error: float  # the largest absolute error
    ratio: float  # the largest error over what is allowed there
    detail: str

    @property
    def passed(self) -> bool:
        return self.ratio <= 1  # False for NaN

    def demand(self) -> None:
        if not self.passed:
            raise AssertionError(
                f"{self.what}: {self.ratio:.3g} times the allowed error; {self.detail}"
            )


def _compare(what: str, got: Tensor, target: np.ndarray, allowed: np.ndarray) -> Comparison:
    """NaN and infinities must agree; elsewhere |got - target| <= allowed, which may be 0."""
    if tuple(got.shape) != target.shape:
        return Comparison(what, math.inf, math.inf, f"shape {tuple(got.shape)}, not {target.shape}")
    if got.numel() == 0:
        return Comparison(what, 0.0, 0.0, "empty")
    values = got.detach().cpu().double().numpy().astype(target.dtype)
    with np.errstate(all="ignore"):
        same = (values == target) | (np.isnan(values) & np.isnan(target))
        error = np.where(same, 0, np.abs(values - target))
        ratio = np.where(same, 0, error / allowed)
        ratio = np.where(np.isnan(ratio) | ~np.isfinite(error), np.inf, ratio)
    index = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
    detail = (
        f"at {index} got {values[index]!s}, right {target[index]!s}, allowed {allowed[index]!s}"
    )
    return Comparison(what, float(np.max(error)), float(ratio[index]), detail)


def compare_probs(got: Tensor, exact: Exact, *, exact_z: bool = False) -> Comparison:
    """Forward. `exact_z`: each z is a number of the inner format, so 1e-6 is demanded."""
    if got.dtype != exact.dtype or not got.is_contiguous():
        detail = f"{got.dtype} with strides {got.stride()}, not contiguous {exact.dtype}"
        return Comparison("probs", math.inf, math.inf, detail)
    fmt, inner = FORMATS[exact.dtype], inner_format(exact.dtype)
    relative = 8 * inner.unit * (1 + exact.size)
    if exact_z:
        relative = np.minimum(relative, 1e-6)
    elif relative.max(initial=0) > 1e-3:
        raise ValueError(
            "such large z prove nothing: use inputs whose z is exact, and exact_z=True"
        )
    target, allowed = exact.probs, relative * exact.probs
    if exact.dtype in (torch.float16, torch.bfloat16):
        target = fmt.round(exact.probs)
        allowed = allowed + fmt.ulp(target)
    else:
        allowed = allowed + np.ldexp(target.dtype.type(1), fmt.min_exponent)
    return _compare("probs", got, target, np.where(exact.kept, allowed, 0))


def exact_dz(grad_probs: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """dz and sum |probs * grad| of the contract's backward; nothing enters where probs is 0."""
    with np.errstate(all="ignore"):
        grad = np.where(probs == 0, 0, grad_probs)
        dz = probs * (grad - (probs * grad).sum(axis=-1, keepdims=True))
        return np.where(probs == 0, 0, dz), (np.abs(probs * grad)).sum(axis=-1, keepdims=True)


def compare_grads(
    grad_probs: Tensor,
    exact: Exact,
    scale: float = 1.0,
    *,
    saved: Tensor | None = None,
    grad_scores: Tensor | None = None,
    additive: Sequence[tuple[str, Tensor, Tensor]] = (),
    exact_z: bool = False,
) -> list[Comparison]:
    """Backward: the gradient of the scores and of each (name, term, gradient) in `additive`.

    `saved`: the probs that forward returned; from 16-bit probs the gradients are demanded as saved.
    """
    fmt, inner = FORMATS[exact.dtype], inner_format(exact.dtype)
    is_short = exact.dtype in (torch.float16, torch.bfloat16)
    as_saved = is_short and saved is not None
    probs = widen(saved, exact.dtype) if as_saved else exact.probs
    grad = widen(grad_probs, exact.dtype)
    dz, sum_of_sizes = exact_dz(grad, probs)
    with np.errstate(all="ignore"):
        sizes = np.abs(np.where(probs == 0, 0, grad))
        slope = probs * (sizes + sum_of_sizes)
        if is_short:  # without saved probs: no gradient enters where they are zero once rounded
            vanishes = fmt.round(probs) == 0
            vanished = np.where(vanishes, probs * sizes, 0).sum(axis=-1, keepdims=True)
            lost = np.where(vanishes, slope, 0) + probs * vanished
        else:  # what forward may lose absolutely is lost in p here too
            lost = np.where(exact.kept, 2.0**fmt.min_exponent * (sizes + sum_of_sizes), 0)
        relative = 8 * inner.unit * (1 if as_saved else 1 + exact.size)
        error_of_dz = (np.minimum(relative, 4e-6) if exact_z else relative) * slope + lost
    found = []
    if grad_scores is not None:
        found.append(_dtype_is("grad_scores", grad_scores, exact.dtype))
        error = abs(scale) * (4 * fmt.unit * slope + lost if is_short else error_of_dz)
        allowed = np.where((probs == 0) & (is_short or ~exact.kept), 0, error + 2 * fmt.smallest)
        with np.errstate(all="ignore"):
            found.append(
                _compare("grad_scores", grad_scores, np.where(probs == 0, 0, scale * dz), allowed)
            )
    for name, term, got in additive:
        target = _sum_to(dz, term.shape)
        own = FORMATS[term.dtype]
        if term.dtype != torch.float64 or exact.dtype == torch.float64:
            target = own.round(target)
        count = dz.size / max(1, target.size)
        allowed = _sum_to(error_of_dz, term.shape)
        # A sum in the inner format, in any fixed order, and one rounding to the dtype of the term.
        allowed = allowed + (8 + math.sqrt(count)) * inner.unit * _sum_to(np.abs(dz), term.shape)
        subnormals = 2 * own.smallest + 2 * count * inner.smallest
        allowed = np.where(allowed == 0, 0, allowed + own.ulp(target) + subnormals)
        found += [_dtype_is(name, got, term.dtype), _compare(name, got, target, allowed)]
    return found


def _dtype_is(what: str, got: Tensor, dtype: torch.dtype) -> Comparison:
    return Comparison(
        what, 0.0, 0.0 if got.dtype == dtype else math.inf, f"{got.dtype}, not {dtype}"
    )


def _sum_to(values: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The sum over the dimensions along which `shape` was broadcast."""
    lead = values.ndim - len(shape)
    kept = [lead + i for i, size in enumerate(shape) if size != 1 or values.shape[lead + i] == 1]
    return values.sum(axis=tuple(i for i in range(values.ndim) if i not in kept)).reshape(
        tuple(shape)
    )


def check(
    softmax: Callable[..., Tensor],
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    *,
    bias: Tensor | None = None,
    exact_z: bool = False,
    backward: bool = True,
    grad_probs: Tensor | None = None,
    saves_probs: bool = True,
) -> Tensor:
    """Demand the contract's accuracy of `softmax` on these inputs; return its probs.

    `saves_probs`: False for an implementation whose backward uses probs from before rounding.
    """
    exact = exact_probs(scores, mask, scale, is_causal, bias=bias)
    scores = scores.detach().requires_grad_(backward)  # keeps strides and storage offset
    terms = {"mask": mask, "bias": bias}
    for name, term in terms.items():
        if term is not None and term.dtype != torch.bool:
            terms[name] = term.detach().requires_grad_(backward)
    probs = softmax(scores, terms["mask"], scale, is_causal, bias=terms["bias"])
    compare_probs(probs, exact, exact_z=exact_z).demand()
    if not backward:
        return probs
    if grad_probs is None:
        grad_probs = upstream(probs)
    wanted = {name: term for name, term in terms.items() if term is not None and term.requires_grad}
    grads = torch.autograd.grad(probs, [scores, *wanted.values()], grad_probs)
    found = compare_grads(
        grad_probs,
        exact,
        scale,
        saved=probs if saves_probs else None,
        grad_scores=grads[0],
        additive=[(f"grad_{n}", t, g) for (n, t), g in zip(wanted.items(), grads[1:], strict=True)],
        exact_z=exact_z,
    )
    for comparison in found:
        comparison.demand()
    return probs.detach()


def upstream(probs: Tensor, seed: int = 1234) -> Tensor:
    """A random incoming gradient: that of a sum would be exactly zero after a softmax."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(probs.shape, generator=generator).to(probs.device, probs.dtype)
