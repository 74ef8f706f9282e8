"""The arms of a comparison: which softmax a model gets, and from which weights it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sms_plugin
from sms_plugin import reference
from sms_plugin.modules import native_softmax
from sms_plugin.patch import PatchReport
from train.config import Softmax
from train.module import LanguageModel
from train.run import choose_softmax

WRONG_SCALE = 1.01
PERTURBATION = 1e-7  # relative, of weights that can hold it
FLIPPED = 1e-3  # share of the weights that move by a unit in the last place, where they can't


def float64_softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The definition in float64, in the dtype of the scores: what the others are measured by."""
    probs = reference.scaled_mask_softmax(scores, *args, dtype=torch.float64, **kwargs)
    return probs.to(scores.dtype)


def chain_softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The native chain in the dtype of the scores, whatever autocast would make of it."""
    with torch.autocast(scores.device.type, enabled=False):
        return native_softmax(scores, *args, **kwargs)


def wrong_scale_softmax(
    scores: Tensor, mask: Tensor | None, scale: float, *args: Any, **kwargs: Any
) -> Tensor:
    """The fused operator with a scale that is off by 1 %: a mistake that a loss hardly shows."""
    return sms_plugin.scaled_mask_softmax(scores, mask, scale * WRONG_SCALE, *args, **kwargs)


# Those that aren't choices of the trainer; each is called as `scaled_mask_softmax` is.
OWN: dict[str, Callable[..., Tensor]] = {
    "reference": float64_softmax,
    "chain": chain_softmax,
    "wrong_scale": wrong_scale_softmax,
}


class OwnSoftmax(nn.Module):
    """One of them as a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = OWN[name]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: native, fused, sdpa, reference, chain or wrong_scale; native-1, native-2, ... are
            native from weights that are perturbed, each otherwise.
        softmax: what a run of it is configured with; its operator's calls are counted.
    """

    name: str
    softmax: Softmax

    @property
    def perturbation(self) -> int | None:
        """Which perturbation of the weights; None: none."""
        _, _, number = self.name.partition("-")
        return int(number) if number else None

    def choose(self, module: LanguageModel, softmax: Softmax) -> PatchReport | None:
        """Give a new module the softmax of this arm, and perturb its weights."""
        if self.perturbation is not None:
            perturb(module, self.perturbation)
        if self.name not in OWN:
            return choose_softmax(module, softmax)
        report = sms_plugin.patch_attention(module, softmax="fused")
        for part in module.modules():
            if isinstance(getattr(part, "scaled_mask_softmax", None), nn.Module):
                part.scaled_mask_softmax = OwnSoftmax(self.name)
        return report


def arm(name: str) -> Arm:
    """The arm of that name."""
    if name in ("fused", "wrong_scale"):
        return Arm(name, Softmax.fused)
    if name == "sdpa":
        return Arm(name, Softmax.sdpa)
    return Arm(name, Softmax.native)


def perturb(module: nn.Module, seed: int) -> None:
    """Change the weights by about as little as their dtype allows, in place."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        chance = torch.rand(weight.shape, generator=generator)
        noise = torch.randn(weight.shape, generator=generator)
        unit = torch.finfo(weight.dtype).eps
        change = torch.where(chance < FLIPPED, unit * noise.sign(), torch.zeros(()))
        if unit < PERTURBATION * 10:
            change = PERTURBATION * noise
        with torch.no_grad():
            weight.mul_(1 + change.to(weight.device, torch.float64))
