"""Settings of a comparison of speed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from omegaconf import MISSING

from train.config import Config, Softmax


class SpeedArm(enum.Enum):
    """A softmax, and whether the whole model is compiled."""

    native = "native"
    compiled = "compiled"
    fused = "fused"
    fused_compiled = "fused_compiled"
    sdpa = "sdpa"
    sdpa_compiled = "sdpa_compiled"

    def __str__(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        """As tables and plots have it."""
        return self.name.replace("_", " + ")

    @property
    def softmax(self) -> Softmax:
        own = self.name.removesuffix("_compiled")
        return Softmax.native if own == "compiled" else Softmax[own]

    @property
    def is_compiled(self) -> bool:
        return self.name.endswith("compiled")


@dataclass
class SpeedConfig:
    arms: list[SpeedArm] = MISSING  # beside native, which is measured twice: that is the noise
    seq_lens: list[int] = MISSING  # with as many tokens a step as data.batch_size * data.seq_len
    steps: int = MISSING  # of a process, after the warm-up
    repeats: int = MISSING  # processes of each arm and length
    profile: bool = MISSING  # one more process of each, for the table of kernels


@dataclass
class SpeedRunConfig(Config):
    speed: SpeedConfig = MISSING
