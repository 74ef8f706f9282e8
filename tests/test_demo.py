"""The demo, with tiny shapes: its verdict can fail, and an arm that is missing says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sms_plugin import demo, modules
from sms_plugin.extension import LibraryUnavailable
from sms_plugin.functional import scaled_mask_softmax

SHAPES = ((1, 1, 4, 2), (1, 2, 8, 4))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled arm without the minute that compiling takes."""
    monkeypatch.setattr(modules, "_compiled", lambda: modules._chain)


def _lines(device: str) -> list[demo.Line]:
    return list(demo.measure(SHAPES, device, demo.DTYPES[device], seconds=0))


def test_the_operator_is_right(device: str) -> None:
    found = demo.check(device, length=17)
    assert found.passed and found.comparisons == 18


def _steep(scores: Tensor, **options: object) -> Tensor:
    """Right forward, and a gradient that is off by a fiftieth."""
    probs = scaled_mask_softmax(scores, **options)
    return probs.detach() + (probs - probs.detach()) * 1.02


@pytest.mark.parametrize(
    "wrong",
    [
        lambda scores, **_: scores * 0,
        lambda scores, **_: torch.full_like(scores, 1 / scores.shape[-1]) + scores * 0,
        lambda scores, **options: scaled_mask_softmax(scores, **{**options, "is_causal": False}),
        lambda scores, **options: scaled_mask_softmax(scores, **options) * 1.02,
        lambda scores, **options: scaled_mask_softmax(scores, **options) * torch.nan,
        _steep,
    ],
    ids=["zero", "uniform", "not causal", "too large", "nan", "gradient too large"],
)
def test_wrong_results_fail(wrong: Callable[..., Tensor]) -> None:
    assert not demo.check("cpu", wrong, length=17).passed


def test_one_unit_in_the_last_place() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        values = torch.tensor([0.0, 0.25, 0.75, 1.0], dtype=torch.float64)
        ulps = demo._ulp(values, dtype).tolist()
        assert ulps[1:] == [eps / 4, eps / 2, eps]
        assert ulps[0] == torch.finfo(dtype).tiny * eps


def test_every_arm_is_timed(uncompiled: None, device: str) -> None:
    lines = _lines(device)
    assert [(line.what, line.shape) for line in lines] == [
        (what, shape) for shape in SHAPES for what in ("softmax", "attention")
    ]
    for line in lines:
        assert set(line.ms) == {*demo.ARMS} - ({"SDPA"} if line.what == "softmax" else set())
        assert min(line.ms.values()) > 0 and not line.missing
    table = demo.as_text(lines).splitlines()
    assert len(table) == 5 and len({len(line) for line in table}) == 1
    assert demo.advice(lines).startswith("Use F.scaled_dot_product_attention for plain attention")


def test_arms_agree() -> None:
    """All four compute the same attention, so that their times may be compared."""
    arms = demo._attention_arms((1, 2, 8, 4), "cpu", torch.float64)
    del arms["compiled"]
    (first, *others) = (arm() for arm in arms.values())
    for other in others:
        torch.testing.assert_close(other, first)


def test_missing_compiler_is_said_in_its_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("No working C++ compiler found\nand a page of other text")

    monkeypatch.setattr(modules, "_compiled", fail)
    monkeypatch.setitem(demo.SHAPES, "cpu", SHAPES)
    monkeypatch.setattr(demo, "SECONDS", 0)
    monkeypatch.setattr(demo, "MOST_ROUNDS", 1)
    assert demo.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("compiled failed: RuntimeError: No working C++ compiler found\n") == 1
    assert "right: 18 comparisons" in out and "page of other text" not in out
    assert all("failed" in line for line in out.splitlines() if " x 4 x 2 " in line)


def test_without_the_library_the_doctor_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(device: str) -> None:
        raise LibraryUnavailable("no compiler")

    monkeypatch.setattr(demo, "check", fail)
    assert demo.main(["--device", "cpu"]) == 1
    assert "no compiler\n`python -m sms_plugin.doctor` says more" in capsys.readouterr().err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        demo.main(["--device", "cuda"])
    assert "torch sees no GPU" in capsys.readouterr().err
