"""The verdict: gradients from the same weights and the same batch, against a float64 softmax.

Training is chaotic, so that curves of equal kernels part; from the same state they can't. What a
candidate may be off by is measured on the chain: scale, bias, mask and softmax one by one in the
dtype of the scores. Native is the same but where autocast promotes it to float32, which costs the
memory that a fused operator saves. The constants below are the rule; they are no settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL, QK = "all", "q and k"  # groups of parameters
MOST_OF_CHAIN = 2.0  # a candidate may be that many times as far from float64 as the chain is
FLOOR = {"32-true": 1e-6, "bf16-true": 2e-4, "bf16-mixed": 2e-4}  # and that much more
MOST_SLOPE = {"32-true": 1e-4, "bf16-true": 2e-3, "bf16-mixed": 2e-3}  # of |slope - 1|, q and k


@dataclass
class Sums:
    """Over batches, of gradients g and those of the reference r, all in float64."""

    difference: float = 0.0  # |g - r|^2
    reference: float = 0.0  # |r|^2
    product: float = 0.0  # g . r

    @property
    def distance(self) -> float:
        """``|g - r| / |r|``."""
        return math.sqrt(self.difference / self.reference) if self.reference else math.nan

    @property
    def slope(self) -> float:
        """``g . r / |r|^2``: 1 where there is noise alone."""
        return self.product / self.reference if self.reference else math.nan


@dataclass(frozen=True)
class StateResult:
    """What an arm computed from one state.

    Attributes:
        step: optimizer steps before it.
        losses: of each batch, nats a token.
        norms: of the gradient of each batch.
        sums: by group.
        calls: of the fused operator's forward and backward.
    """

    step: int
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    sums: Mapping[str, Sums]
    calls: tuple[int, int]


@dataclass(frozen=True)
class Check:
    """One number against its limit."""

    name: str
    step: int
    native: float
    chain: float
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # NaN doesn't


def checks_of(
    candidate: str, results: Mapping[str, Sequence[StateResult]], precision: str
) -> list[Check]:
    """All that a candidate has to pass.

    Args:
        candidate: an arm.
        results: by arm, state by state, the initial weights first; native and chain among them.
        precision: of Lightning; one of FLOOR.
    """
    ours, native, chain = results[candidate], results["native"], results["chain"]
    checks = []
    for o, n, c in zip(ours, native, chain, strict=True):
        for group in (ALL, QK):
            own, theirs, base = (state.sums[group].distance for state in (o, n, c))
            limit = MOST_OF_CHAIN * base + FLOOR[precision]
            checks.append(Check(f"distance, {group}", o.step, theirs, base, own, limit))
    theirs, base, own = (abs(states[0].sums[QK].slope - 1) for states in (native, chain, ours))
    name = f"|slope - 1|, {QK}"
    checks.append(Check(name, ours[0].step, theirs, base, own, MOST_SLOPE[precision]))
    return checks


def passed(checks: Sequence[Check]) -> bool:
    return bool(checks) and all(check.passed for check in checks)


def check_precision(precision: str) -> None:
    """Raise a ValueError for one that there is no rule for."""
    if precision not in FLOOR:
        raise ValueError(
            f"trainer.precision must be one of {', '.join(FLOOR)} to be judged, got {precision}"
        )
