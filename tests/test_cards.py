"""CUDA: what is built for the visible cards, and what is said where nothing can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkouts import write_fake_nvcc

from sms_plugin import cards as visible
from sms_plugin.cards import CudaPart, plan_cuda
from sms_plugin.toolchain import find_nvcc


def _plan(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    cards: tuple[tuple[int, int], ...] = ((9, 0),),
    driver: tuple[int, int] | None = (13, 0),
) -> CudaPart:
    monkeypatch.setattr("sms_plugin.toolchain._packaged_nvccs", lambda: iter(()))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    # Only what the test names: the usual folders of this machine stay out.
    monkeypatch.setattr(
        visible, "find_nvcc", lambda cuda, environ: find_nvcc(cuda, environ, ("/no/cuda",))
    )
    return plan_cuda(cards, driver, environ)


@pytest.fixture
def toolkit(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with CUDA 13.0 for sm_75 to sm_120."""
    write_fake_nvcc(tmp_path / "toolkit")
    return {"CUDA_HOME": str(tmp_path / "toolkit"), "PATH": ""}


def test_built_for_the_visible_cards(
    monkeypatch: pytest.MonkeyPatch, toolkit: dict[str, str]
) -> None:
    plan = _plan(monkeypatch, toolkit, cards=((8, 0), (9, 0)))
    assert plan.nvcc is not None and plan.missing is None
    assert [str(arch) for arch in plan.archs] == ["80", "90+PTX"]


def test_arch_list_is_honoured(monkeypatch: pytest.MonkeyPatch, toolkit: dict[str, str]) -> None:
    plan = _plan(monkeypatch, {**toolkit, "TORCH_CUDA_ARCH_LIST": "8.0 9.0a"})
    assert [str(arch) for arch in plan.archs] == ["80", "90a"]
    assert plan.missing is None


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("8.0", "no code for the visible sm_90, and no PTX that would run there"),
        ("9.0,12.0", "has a comma"),
        ("9.0 10.1", "can't compile for 101; it knows 75, 80, 90, 100, 120"),
    ],
)
def test_bad_arch_list_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, toolkit: dict[str, str], wish: str, why: str
) -> None:
    plan = _plan(monkeypatch, {**toolkit, "TORCH_CUDA_ARCH_LIST": wish})
    assert plan.nvcc is None and plan.archs == ()
    assert plan.missing is not None
    assert f"TORCH_CUDA_ARCH_LIST={wish!r}" in plan.missing and why in plan.missing


def test_missing_nvcc_is_a_reason_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan(monkeypatch, {"PATH": ""})
    assert plan.nvcc is None
    for part in (
        "no working nvcc was found",
        "built for the CPU only",
        "CUDA 13 toolkit",
        "nvidia-cuda-nvcc==13.0.*",
    ):
        assert part in str(plan.missing)
    older_driver = _plan(monkeypatch, {"PATH": ""}, driver=(12, 8))
    assert "nvidia-cuda-nvcc==13.0.*" not in str(older_driver.missing)  # it couldn't run


def test_driver_older_than_the_toolkit(
    monkeypatch: pytest.MonkeyPatch, toolkit: dict[str, str]
) -> None:
    plan = _plan(monkeypatch, toolkit, driver=(12, 8))
    assert plan.nvcc is None
    assert "driver" in str(plan.missing) and "CUDA 12.8" in str(plan.missing)


def test_card_older_than_the_toolkit(
    monkeypatch: pytest.MonkeyPatch, toolkit: dict[str, str]
) -> None:
    plan = _plan(monkeypatch, toolkit, cards=((7, 0),))
    assert "can't compile for the visible sm_70" in str(plan.missing)


def test_cpu_build_of_torch_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    plan = plan_cuda((), None, {})
    assert "is built without CUDA" in str(plan.missing)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "saw no usable GPU" in str(plan_cuda((), None, {}).missing)
