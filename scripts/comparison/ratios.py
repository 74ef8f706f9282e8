"""How much faster, and whether that can be told from noise."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import scipy.stats

CONFIDENCE = 0.95


class Speed(enum.Enum):
    """The verdicts that there are."""

    faster = "faster"
    slower = "slower"
    same = "no measurable difference"


@dataclass(frozen=True)
class Ratio:
    """Time of the base by the time of the other: above 1, the other is faster.

    Attributes:
        ratio: by the median of the repeats.
        low, high: of its confidence interval.
    """

    ratio: float
    low: float
    high: float


def ratio_of(base_ms: Sequence[float], other_ms: Sequence[float]) -> Ratio:
    """From times of processes that ran side by side, repeat by repeat.

    The interval is Student's for the mean of the logarithms of the ratios of each repeat.

    Raises:
        ValueError: for fewer than two repeats, or numbers of them that differ.
    """
    if len(base_ms) != len(other_ms) or len(base_ms) < 2:
        raise ValueError(
            f"a ratio needs at least two repeats of each arm, got {len(base_ms)} and "
            f"{len(other_ms)}"
        )
    logs = [math.log(b / o) for b, o in zip(base_ms, other_ms, strict=True)]
    n, mean = len(logs), statistics.fmean(logs)
    t = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
    half = t * statistics.stdev(logs) / math.sqrt(n)
    middle = math.exp(statistics.median(logs))
    return Ratio(middle, math.exp(mean - half), math.exp(mean + half))


def noise_of(base_ms: Sequence[float], again_ms: Sequence[float]) -> float:
    """The largest factor, either way, between two processes of one arm that ran side by side."""
    return max(max(a / b, b / a) for a, b in zip(base_ms, again_ms, strict=True))


def verdict(ratio: Ratio, noise: float) -> Speed:
    """A difference counts if its interval excludes 1 and it exceeds the noise.

    Args:
        ratio: base against the arm.
        noise: of base against itself, as a factor.
    """
    if ratio.low <= 1 <= ratio.high or max(ratio.ratio, 1 / ratio.ratio) <= noise:
        return Speed.same
    return Speed.faster if ratio.ratio > 1 else Speed.slower


def least_seen(ratio: Ratio, noise: float) -> float:
    """The smallest factor that would have counted, with an interval as wide and this noise."""
    return max(math.sqrt(ratio.high / ratio.low), noise)


def most_possible(share: float) -> float:
    """The factor that a step gains if a part of it takes no time at all: ``1 / (1 - share)``."""
    return 1 / (1 - share)
