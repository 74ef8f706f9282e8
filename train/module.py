"""Training on next or masked tokens as a LightningModule."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from train.config import Config, ModelKind
from train.data.masking import IGNORED, MaskedBatch
from train.models import Transformer


class LanguageModel(pl.LightningModule):
    """A Transformer, its cross entropy, AdamW and a schedule of warm-up and cosine.

    Letters: B batch, T positions, V vocabulary.

    Args:
        config: the whole configuration; a plain copy of it goes into checkpoints.
        vocab_size: of the text. An encoder has one token more, which hides others.
    """

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(
            config.model,
            vocab_size + (config.model.kind is ModelKind.encoder),
            max_len=config.data.seq_len,
        )
        # By name: FSDP flattens what it shards.
        self._matrices = {name for name, p in self.named_parameters() if p.dim() >= 2}
        self._rng_states: dict[str, Any] | None = None  # of a checkpoint, until training starts
        # Plain values, for a checkpoint must load with weights_only=True.
        self.save_hyperparameters({"config": plain(asdict(config)), "vocab_size": vocab_size})

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.model(tokens, padding)  # (B, T) -> (B, T, V)

    def loss(self, batch: Tensor | MaskedBatch) -> Tensor:
        """Mean nats a predicted token.

        Args:
            batch: (B, T + 1) int64, each position is predicted from those before it; or texts with
                hidden tokens.
        """
        if isinstance(batch, Tensor):
            logits, targets = self(batch[:, :-1]), batch[:, 1:]
        else:
            logits, targets = self(batch["tokens"], batch["padding"]), batch["targets"]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def training_step(self, batch: Tensor | MaskedBatch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor | MaskedBatch, batch_idx: int) -> None:
        self.log(
            "val_loss", self.loss(batch), batch_size=self.config.data.batch_size, sync_dist=True
        )

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        settings, peak = self.config.optimizer, self.config.model.learning_rate
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            is_matrix = name.replace("_fsdp_wrapped_module.", "") in self._matrices
            (matrices if is_matrix else others).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=peak, betas=(settings.beta1, settings.beta2))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def learning_rate_factor(self, step: int) -> float:
        """Share of the peak at an optimizer step: a line up, then half a cosine down."""
        settings, steps = self.config.optimizer, self.config.trainer.max_steps
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        done = (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
        return settings.final_lr_ratio + (1.0 - settings.final_lr_ratio) * cosine

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """With the states of the random number generators, dropout goes on as it would have."""
        checkpoint["rng_states"] = {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng_states = checkpoint["rng_states"]

    def on_train_start(self) -> None:
        if self._rng_states is None:
            return
        torch.set_rng_state(self._rng_states["cpu"].cpu())
        if self._rng_states["cuda"]:
            torch.cuda.set_rng_state_all([state.cpu() for state in self._rng_states["cuda"]])
        self._rng_states = None

    def weights_sha256(self) -> str:
        """Hash of all parameters and their names: equal for runs that start equal."""
        digest = hashlib.sha256()
        for name, weight in self.named_parameters():
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def plain(value: Any) -> Any:
    """The same with an enum's name in place of it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return getattr(value, "name", value)
