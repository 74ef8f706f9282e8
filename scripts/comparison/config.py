"""Settings of an A/B run: those of a training run, and how it is judged."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from omegaconf import MISSING

from train.config import Config


class Candidate(enum.Enum):
    """The arm that is judged."""

    fused = "fused"
    native = "native"  # passes by its nature
    wrong_scale = "wrong_scale"  # fused with a scale that is off by 1 %: has to fail

    def __str__(self) -> str:
        return self.name


@dataclass
class ParityConfig:
    states: int = MISSING  # saved along the reference arm, beside the initial weights
    batches: int = MISSING  # that each state is judged on
    native_runs: int = MISSING  # from perturbed weights, for the spread of the curves


@dataclass
class ParityRunConfig(Config):
    candidate: Candidate = MISSING
    parity: ParityConfig = MISSING
