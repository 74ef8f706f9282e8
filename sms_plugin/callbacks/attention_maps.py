"""`AttentionMaps`: what the attention of chosen layers looks at, as the training goes on."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sms_plugin.callbacks.lightning_base import Callback
from sms_plugin.callbacks.whole_file import whole_file
from sms_plugin.patch.patching import patched_attention
from sms_plugin.patch.registry import check_softmax

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_COLUMNS = ("step", "layer", "head", "entropy")


class AttentionMaps(Callback):
    """Write head-averaged maps and the entropy of each head from the first batch of validations.

        trainer = Trainer(callbacks=[sms_plugin.callbacks.AttentionMaps(modules=["*.0.self_attn"])])

    For that batch the chosen modules are patched to hand their probabilities over, layer by layer;
    nothing of a layer is kept but its average over the heads. The folder gets
    ``step-<N>/<layer>.png`` (query by key), ``step-<N>/maps.pt`` (a dict of layer to
    ``(examples, Tq, Tk)`` float32) and ``entropy.csv`` with the mean over examples and queries,
    in nats, of ``-sum p log p``: 0 where a head looks at one key, ``log Tk`` where at all alike.

    Args:
        folder: where they go; default: ``attention`` in the Trainer's log folder.
        modules: as in `patch_attention`; None: every attention module that has an adapter.
        every_n_validations: 1 for each of them.
        examples: of the batch, in maps and plots.
        softmax: what the chosen modules run in that batch, as in `patch_attention`.

    Raises:
        ValueError: for an unknown ``softmax`` or one without probabilities, or a number below 1.
        ImportError: matplotlib is missing.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        modules: Sequence[str] | None = None,
        every_n_validations: int = 1,
        examples: int = 1,
        softmax: str = "fused",
    ) -> None:
        super().__init__()
        check_softmax("AttentionMaps", softmax)
        if softmax == "sdpa":
            raise ValueError("AttentionMaps: softmax='sdpa' has no probabilities; use another")
        for name, value in (("every_n_validations", every_n_validations), ("examples", examples)):
            if value < 1:
                raise ValueError(f"AttentionMaps: {name} must be at least 1, got {value}")
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "AttentionMaps draws with matplotlib: pip install matplotlib"
            ) from error
        self.folder, self.modules, self.softmax = folder, modules, softmax
        self.every_n_validations, self.examples = every_n_validations, examples
        self.entropies: list[tuple[int, str, int, float]] = []
        self._validations = 0
        self._reset()

    def _reset(self) -> None:
        self._patch = ExitStack()
        self._maps: dict[str, Tensor] = {}
        self._entropy: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_patch", "_maps", "_entropy")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking or batch_idx or dataloader_idx or not trainer.is_global_zero:
            return
        self._validations += 1
        if (self._validations - 1) % self.every_n_validations == 0:
            self._patch.enter_context(
                patched_attention(
                    pl_module, modules=self.modules, softmax=self.softmax, on_probs=self._collect
                )
            )

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._patch.close()
        if self._maps:
            root = trainer.log_dir or trainer.default_root_dir
            self._write(Path(self.folder or Path(root) / "attention"), trainer.global_step)
        self._reset()

    def on_exception(self, *args: Any) -> None:
        self._patch.close()
        self._reset()

    def _collect(self, name: str, probs: Tensor) -> None:
        """`probs` (B, H, Tq, Tk); a module that runs twice shows its last run."""
        if probs.dim() != 4:
            raise ValueError(
                f"AttentionMaps: probs of {name} must be (B, H, Tq, Tk), got {tuple(probs.shape)}"
            )
        probs = probs.detach()
        self._maps[name] = probs[: self.examples].float().mean(dim=1).cpu()
        entropy = torch.special.entr(probs.float()).sum(dim=-1)  # (B, H, Tq)
        self._entropy[name] = entropy.mean(dim=(0, 2)).cpu()  # (H,)

    def _write(self, folder: Path, step: int) -> None:
        own = folder / f"step-{step:06d}"
        for name, maps in self._maps.items():
            _draw(maps, f"{name or 'attention'}, step {step}", own / f"{name or 'attention'}.png")
        with whole_file(own / "maps.pt") as unfinished:
            torch.save(self._maps, unfinished)
        for name, heads in self._entropy.items():
            self.entropies += [(step, name, h, value) for h, value in enumerate(heads.tolist())]
        with whole_file(folder / "entropy.csv") as unfinished, unfinished.open("w") as file:
            csv.writer(file, lineterminator="\n").writerows([_COLUMNS, *self.entropies])


def _draw(maps: Tensor, title: str, path: Path) -> None:
    """One picture of (examples, Tq, Tk), side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 4 * len(maps), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    for panel, one in zip(panels, maps, strict=True):
        image = panel.imshow(one.numpy(), vmin=0, cmap="viridis", interpolation="nearest")
        panel.set(xlabel="key", ylabel="query")
        figure.colorbar(image, ax=panel)
    figure.suptitle(title, fontsize=9)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=120)
