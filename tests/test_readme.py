"""The worked example of the README is one that works."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sms_plugin
from sms_plugin.patch import registry

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The block that registers an adapter, as a module; without what it does to `model`."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (block,) = (block for block in blocks if "register_adapter(" in block)
    code = "\n".join(line for line in block.splitlines() if "patch_attention(model" not in line)
    module = types.ModuleType("readme_example")
    vars(module).update(nn=nn, sms_plugin=sms_plugin)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for table in ("_by_original", "_by_patched"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    exec(compile(code, str(README), "exec"), vars(module))
    yield module


def test_triangle_attention(example: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(example.TriangleAttention(C=16, H=2, D=4))
    z = torch.randn(2, 6, 6, 16, requires_grad=True)
    mask = torch.ones(2, 6, 6)
    mask[1, :, 4:] = 0

    def outputs() -> list[torch.Tensor]:
        out = model[0](z, mask)
        return [out, *torch.autograd.grad(out.square().sum(), [z, *model.parameters()])]

    before = outputs()
    report = sms_plugin.patch_attention(model)
    assert [done.name for done in report.patched] == ["0"]
    calls = sms_plugin.call_counts()["scaled_mask_softmax_backward"]["cpu"]
    patched = outputs()
    assert sms_plugin.call_counts()["scaled_mask_softmax_backward"]["cpu"] == calls + 1
    for ours, theirs in zip(patched, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert sms_plugin.unpatch_attention(model) == ("0",)
    assert all(map(torch.equal, outputs(), before))
