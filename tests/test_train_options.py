"""What a run can be asked for beside the softmax: compilation, precision, profiles, loggers."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
import torch
from small_runs import small_config, train_losses

from train import run
from train.config import ModelConfig, ModelKind, Positions
from train.models import Transformer
from train.profiling import Group, group_of
from train.throughput import flops_per_token, peak_flops

STEPS = ["trainer.max_steps=6", "trainer.val_every=3"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    run.train(small_config(folder, *STEPS, "softmax=fused"))
    return train_losses(folder)


@pytest.mark.parametrize("softmax", ["native", "fused"])
def test_compiled_model_trains_as_it_does_uncompiled(
    tmp_path: Path, plain: list[float], softmax: str
) -> None:
    summary = run.train(small_config(tmp_path, *STEPS, "compile=true", f"softmax={softmax}"))
    assert train_losses(tmp_path) == pytest.approx(plain, abs=1e-4)
    assert summary["compile"] is True
    calls = summary["call_counts"]["scaled_mask_softmax_backward"]["cpu"]
    assert (calls > 0) is (softmax == "fused")
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert not any("_orig_mod" in name for name in saved["state_dict"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(tmp_path: Path, plain: list[float], precision: str) -> None:
    run.train(small_config(tmp_path, *STEPS, "softmax=fused", f"trainer.precision={precision}"))
    losses = train_losses(tmp_path)
    close = 1e-3 if precision == "64-true" else 0.05
    assert losses == pytest.approx(plain, abs=close)
    assert losses != plain


def test_profile_has_the_softmax_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.train(small_config(tmp_path, "softmax=fused", "trainer.max_steps=10", "profiler=torch"))
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    fused = [row for row in rows if row["name"].startswith("sms_plugin::scaled_mask_softmax")]
    assert {row["group"] for row in fused} == {"softmax"}
    # Two layers, five steps.
    assert {int(row["calls"]) for row in fused} == {10}
    assert {row["group"] for row in rows if row["name"] == "aten::bmm"} == {Group.products.value}
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert any("scaled_mask_softmax" in event.get("name", "") for event in trace["traceEvents"])
    assert "5 steps profiled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shapes", "kernel", "group"),
    [
        ("aten::mul", [[2, 4, 16, 16], []], "", Group.softmax),
        ("aten::_softmax_backward_data", [[2, 4, 16, 16]], "", Group.softmax),
        ("aten::masked_fill_", [[2, 4, 16, 16], [16, 16], []], "", Group.softmax),
        ("aten::_log_softmax", [[64, 256]], "", Group.other),
        ("autograd::engine::evaluate_function: LogSoftmaxBackward0", [], "", Group.other),
        ("aten::bmm", [[8, 16, 16], [8, 16, 4]], "", Group.products),
        ("aten::_scaled_dot_product_flash_attention", [[2, 4, 16, 16]], "", Group.products),
        ("aten::mul", [[2, 4, 16, 8], []], "", Group.other),
        ("triton", [], "triton_per_fused__softmax_masked_fill_mul_0", Group.softmax),
        ("triton", [], "triton_red_fused__log_softmax_nll_loss_1", Group.other),
        ("compiled graph", [], "compiled graph", Group.compiled),
        ("compiled graph", [], "triton_per_fused__softmax_mul_0", Group.softmax),
    ],
)
def test_groups(name: str, shapes: list[list[int]], kernel: str, group: Group) -> None:
    assert group_of(name, shapes, kernel) is group


def test_loggers_get_every_step(tmp_path: Path) -> None:
    run.train(small_config(tmp_path, *STEPS, "loggers=[csv,tensorboard]"))
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {int(row["step"]): float(row["train_loss"]) for row in rows if row["train_loss"]}
    assert logged == pytest.approx(dict(enumerate(train_losses(tmp_path))))
    assert any(row["val_loss"] for row in rows)
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_run_folder_says_where_it_ran_before_it_fails(tmp_path: Path) -> None:
    config = small_config(tmp_path, "data.source=text", "data.path=/nowhere/at/all")
    with pytest.raises(FileNotFoundError):
        run.train(config)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert (tmp_path / "config.yaml").is_file()


def test_fsdp_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"strategy=fsdp, but torch .* sees no GPU"):
        run.train(small_config(tmp_path, "trainer.strategy=fsdp"))


def test_flops_of_a_token() -> None:
    """By hand: products with 12 C^2 weights a layer and the output layer, and the scores'."""
    config = ModelConfig(
        kind=ModelKind.decoder,
        n_layer=2,
        n_head=2,
        n_embd=32,
        positions=Positions.learned,
        dropout=0.0,
        learning_rate=1e-3,
    )
    model = Transformer(config, 256, max_len=64)
    products = 6 * (2 * 12 * 32**2 + 256 * 32)
    scores = 2 * 2 * 2 * 3 * 64 * 32  # two products a layer, 2 T C each, three times
    # Biases and norms are counted as weights, as the formula does: few.
    assert flops_per_token(model, 64) == pytest.approx(products + scores, rel=0.03)
    assert peak_flops(torch.device("cpu"), "32-true") is None
