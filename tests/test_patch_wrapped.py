"""Patched models under what people wrap them in: DDP, spawned processes, checkpointing, threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from patched_attention import LAYERS, are_close, forward_calls, make_gpt, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sms_plugin


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(tokens()).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_wrapped_first", [True, False])
def test_ddp(process_group: None, is_wrapped_first: bool) -> None:
    model = make_gpt()
    right = gradients(model)
    if is_wrapped_first:
        wrapped = DistributedDataParallel(model)
        report = sms_plugin.patch_attention(wrapped)
        assert report.patched[0].name == "module.blocks.0.attention.core"
    else:
        sms_plugin.patch_attention(model)
        wrapped = DistributedDataParallel(model)
    calls = forward_calls()
    assert are_close(gradients(wrapped), right)
    assert forward_calls() == calls + LAYERS
    assert len(sms_plugin.unpatch_attention(wrapped)) == LAYERS
    assert all(map(torch.equal, gradients(model), right))


class Checkpointed(nn.Module):
    """Activations of a block are computed again in the backward."""

    def __init__(self, model: nn.Module, is_reentrant: bool) -> None:
        super().__init__()
        self.model, self.is_reentrant = model, is_reentrant
        for block in model.blocks:
            block.forward = self._twice(block.forward)

    def _twice(self, forward):
        return lambda *args: checkpoint(forward, *args, use_reentrant=self.is_reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_activation_checkpointing(is_reentrant: bool) -> None:
    right = gradients(make_gpt())
    model = make_gpt()
    sms_plugin.patch_attention(model)
    calls = forward_calls()
    assert are_close(gradients(Checkpointed(model, is_reentrant)), right)
    assert forward_calls() == calls + 2 * LAYERS


def _in_a_process(rank: int, model: nn.Module, folder: str) -> None:
    before = sms_plugin.call_counts()["scaled_mask_softmax"]["cpu"]
    out = model(tokens())
    calls = sms_plugin.call_counts()["scaled_mask_softmax"]["cpu"] - before
    torch.save({"out": out.detach(), "calls": calls}, f"{folder}/{rank}.pt")


def test_spawned_processes(tmp_path: Path) -> None:
    model = make_gpt()
    sms_plugin.patch_attention(model)
    right = model(tokens())
    mp.spawn(_in_a_process, (model, str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(found["out"], right) and found["calls"] == LAYERS


def test_threads_patch_models_of_their_own() -> None:
    models = [make_gpt() for _ in range(4)]  # they seed the one generator
    right = make_gpt()(tokens())

    def work(model: nn.Module) -> bool:
        for _ in range(20):
            with sms_plugin.patched_attention(model):
                is_close = are_close([model(tokens())], [right])
            if not (is_close and torch.equal(model(tokens()), right)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, models))
