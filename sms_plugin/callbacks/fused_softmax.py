"""A callback that patches the attention of whatever is trained, and restores it afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sms_plugin.callbacks.lightning_base import Callback
from sms_plugin.ops import call_counts
from sms_plugin.patch.patching import apply_patch, unpatch_attention
from sms_plugin.patch.registry import check_softmax
from sms_plugin.patch.report import PatchError, PatchReport

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class FusedSoftmaxCallback(Callback):
    """Patch in `setup`, look again before the first step, restore at the end and on exceptions.

    Modules that run the same softmax before the Trainer starts are left alone at both ends.

        trainer = Trainer(callbacks=[sms_plugin.callbacks.FusedSoftmaxCallback()])

    Args:
        softmax: as in `patch_attention`.
        modules: as in `patch_attention`.
        strict: as in `patch_attention`.

    Attributes:
        report: what was patched in the last run, or None.
        calls: how often the host code of the operator ran during the last run, over all devices
            of this process; see `sms_plugin.call_counts`.

    Raises:
        PatchError: from `setup` or before the first step, as `patch_attention` would.
    """

    def __init__(
        self,
        softmax: str = "fused",
        *,
        modules: Sequence[str] | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__()
        check_softmax("FusedSoftmaxCallback", softmax)
        self.softmax, self.modules, self.strict = softmax, modules, strict
        self.report: PatchReport | None = None
        self.calls: dict[str, int] = {}
        self._ours: set[str] = set()  # what to restore
        self._calls_before: dict[str, int] = {}
        self._has_run = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.report, self.calls, self._ours = None, {}, set()
        self._calls_before, self._has_run = _total_calls(), False
        try:
            self._patch(trainer, pl_module)
        except PatchError as error:
            if any(module.blocking for module in error.report.skipped):
                raise
            # Models may be built in their own `setup` or in `configure_model`, which come later.
        except ValueError:  # a name in `modules` that isn't there yet
            pass

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patch(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patch(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patch(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patch(trainer, pl_module)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._has_run = True

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._has_run = True

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._has_run = True

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._has_run = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        calls = {f"calls/{op}": float(n) for op, n in self._calls_since_setup().items()}
        for logger in trainer.loggers:
            logger.log_metrics(calls, step=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore(trainer, pl_module)
        if self.softmax != "fused":
            return
        if self._has_run and not self.calls["scaled_mask_softmax"]:
            warnings.warn(
                "FusedSoftmaxCallback: the operator was never called, though "
                f"{len(self.report.patched) if self.report else 0} attention module(s) are "
                "patched; the model does not run the forward of these modules",
                stacklevel=2,
            )
        elif trainer.is_global_zero:
            print("calls: " + ", ".join(f"{op} {n}" for op, n in self.calls.items()))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore(trainer, pl_module)

    def _patch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        report = apply_patch(
            pl_module, modules=self.modules, strict=self.strict, softmax=self.softmax
        )
        new = {module.name for module in report.patched if not module.already}
        if trainer.is_global_zero and (new or self.report is None):
            print(report.summary())
        self._ours |= new
        self.report = report

    def _restore(self, trainer: Trainer, pl_module: LightningModule) -> None:
        unpatch_attention(pl_module, modules=sorted(self._ours))
        self._ours = set()
        self.calls = self._calls_since_setup()

    def _calls_since_setup(self) -> dict[str, int]:
        return {op: n - self._calls_before.get(op, 0) for op, n in _total_calls().items()}


def _total_calls() -> dict[str, int]:
    return {op: sum(devices.values()) for op, devices in call_counts().items()}
