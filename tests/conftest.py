"""Fixtures of all tests: where they run, and which implementation they hold to the contract."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))  # compare.py and cases.py, under any import mode of pytest
# Last: train lies in the checkout alone, sms_plugin may be installed.
sys.path.append(str(TESTS.parent))

import sms_plugin  # noqa: E402

if TYPE_CHECKING:
    from fake_time import FakeClock


@pytest.fixture
def cuda() -> str:
    """The current GPU's device name; skips the test where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU: torch.cuda.is_available() is False")
    return "cuda"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Every machine's CPU, and its GPU if it has one."""
    return request.getfixturevalue("cuda") if request.param == "cuda" else "cpu"


@pytest.fixture(params=["fused", "reference"])
def check(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """`compare.check` of the operator, and of its definition in plain PyTorch."""
    from compare import check as check_of

    if request.param == "fused":
        return partial(check_of, sms_plugin.scaled_mask_softmax)
    return partial(check_of, sms_plugin.reference.scaled_mask_softmax, saves_probs=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The timer's clock, replaced by one that a test moves on."""
    from fake_time import install_clock

    return install_clock(monkeypatch)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adapters that a test registers are gone after it."""
    from patched_attention import own_registry

    yield from own_registry(monkeypatch)
