"""What only a GPU can show: graphs, streams, devices, grids, memory, more than 2^31 elements."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cases import CASES, make_case, make_scores, random_mask
from compare import DTYPES, check, compare_grads, compare_probs, exact_probs, upstream
from torch import Tensor

import sms_plugin

softmax = sms_plugin.scaled_mask_softmax
pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda")]

GIB = 2**30


def needs_memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib:g} GiB of free GPU memory, {free / GIB:.1f} are there")


@pytest.mark.parametrize("case", CASES)
def test_cuda_graph(case: str) -> None:
    """Captured with its backward, replayed on new values; replays aren't counted, captures are."""
    arguments = make_case(case, 2, 3, 33, 33, torch.bfloat16, "cuda")
    arguments["scores"].requires_grad_()
    wanted = [arguments["scores"]]
    if "bias" in arguments:
        wanted.append(arguments["bias"].requires_grad_())
    grad = upstream(arguments["scores"])

    def run() -> list[Tensor]:
        probs = softmax(**arguments)
        return [probs, *torch.autograd.grad(probs, wanted, grad)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    before = sms_plugin.call_counts()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for op, by_device in sms_plugin.call_counts().items():
        assert by_device["cuda"] == before[op]["cuda"] + 1
    for seed in (1, 2):
        fresh = make_case(case, 2, 3, 33, 33, torch.bfloat16, "cuda", seed=seed)
        with torch.no_grad():
            for name, value in arguments.items():
                if isinstance(value, Tensor):
                    value.copy_(fresh[name])
        for out in captured:
            out.detach().fill_(7)
        graph.replay()
        for got, right in zip([c.clone() for c in captured], run(), strict=True):
            assert torch.equal(got, right)


def test_inductors_cuda_graphs() -> None:
    compiled = torch.compile(
        lambda s, b: softmax(s, None, 0.5, True, bias=b), mode="reduce-overhead", fullgraph=True
    )
    for seed in range(4):
        scores = make_scores((2, 3, 64, 64), torch.bfloat16, "cuda", seed=seed)
        bias = make_scores((3, 64, 64), torch.float32, "cuda", seed=seed, size=0.1)
        assert torch.equal(compiled(scores, bias), softmax(scores, None, 0.5, True, bias=bias))


def test_side_stream() -> None:
    """On any other stream than the current one it would read the scores before they are there."""
    right_scores = make_scores((4, 64, 256), device="cuda")
    bias = torch.zeros(256, device="cuda", requires_grad=True)
    grad = upstream(right_scores)
    right = softmax(right_scores, bias=bias)
    right_grad = torch.autograd.grad(right, bias, grad)[0]
    scores = torch.zeros_like(right_scores)
    late_grad = torch.zeros_like(grad)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        scores.copy_(right_scores)
        late_grad.copy_(grad)
        got = softmax(scores, bias=bias)
        got_grad = torch.autograd.grad(got, bias, late_grad)[0]
    stream.synchronize()
    assert torch.equal(got, right)
    assert torch.equal(got_grad, right_grad)


def test_no_synchronisation() -> None:
    scores = make_scores((4, 64, 256), device="cuda").requires_grad_()
    bias = torch.zeros(256, device="cuda", requires_grad=True)
    grad = upstream(scores)
    torch.autograd.grad(softmax(scores, bias=bias), [scores, bias], grad)  # kernels are loaded
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    probs = softmax(scores, bias=bias)
    torch.autograd.grad(probs, [scores, bias], grad)
    assert not torch.cuda.current_stream().query()  # the sleep still runs: nobody waited for it


@pytest.mark.parametrize("first", [0, 1])
def test_second_device(first: int) -> None:
    """The tensor's own device, from any current device and thread; nothing on the other."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: torch.cuda.device_count() is 1")
    own, other = f"cuda:{first}", f"cuda:{1 - first}"
    scores = make_scores((4, 33, 257), device=own)
    bias = make_scores((257,), device=own, size=0.1)
    with torch.cuda.device(own):
        right = softmax(scores, bias=bias)
    torch.cuda.synchronize(own)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.device(other):
                before = torch.cuda.memory_allocated(other)
                probs = check(softmax, scores, None, 0.5, True, bias=bias)
                assert probs.device == scores.device
                assert torch.equal(softmax(scores, bias=bias), right)
                assert torch.cuda.current_device() == 1 - first
                assert torch.cuda.memory_allocated(other) == before
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert not failures, failures
    with pytest.raises(RuntimeError, match=r"cuda:\d.*cuda:\d"):
        softmax(scores, bias.to(other))


@pytest.mark.parametrize(
    "shape",
    [(65537, 1, 1, 8), (1, 65537, 1, 8), (2, 32769, 1, 8), (1, 1, 70000, 8), (1, 32, 2048, 16)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_more_than_65535_blocks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scores = make_scores(shape, dtype, "cuda")
    check(softmax, scores, None, 0.5, bias=torch.zeros(8 if shape[-1] == 8 else 16, device="cuda"))
    check(softmax, scores, random_mask(shape, "cuda"), 0.5, True)


@pytest.mark.parametrize("length", [2048, 16384])
def test_many_long_rows(length: int) -> None:
    """Blocks of many threads, more of them than grid y and z can count."""
    needs_memory(6 * 70_000 * length * 2 / GIB)
    scores = torch.zeros(70_000, length, dtype=torch.bfloat16, device="cuda")
    picked = torch.tensor([0, 1, 65534, 65535, 65536, 69_998, 69_999], device="cuda")
    scores[picked] = make_scores((len(picked), length), torch.bfloat16, "cuda")
    hold_rows(scores, picked, rest=1 / length)


def hold_rows(scores: Tensor, picked: Tensor, rest: float, is_causal: bool = False) -> None:
    """Forward and backward of all rows; `picked` ones against the yardstick, others are `rest`."""
    scores = scores.requires_grad_()
    probs = softmax(scores, scale=0.5, is_causal=is_causal)
    exact = exact_probs(scores[picked], None, 0.5)
    compare_probs(probs[picked], exact).demand()
    others = torch.ones(scores.shape[0], dtype=torch.bool, device=scores.device)
    others[picked] = False
    untouched = probs.detach()[others]
    assert untouched.min().item() == untouched.max().item() == rest
    del untouched
    grad = torch.zeros_like(probs)
    grad[picked] = upstream(grad[picked])
    (grad_scores,) = torch.autograd.grad(probs, scores, grad)
    for comparison in compare_grads(
        grad[picked], exact, 0.5, saved=probs[picked], grad_scores=grad_scores[picked]
    ):
        comparison.demand()
    assert not grad_scores[others].any()


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 1000, 32769])
def test_more_than_two_to_the_31_elements(length: int) -> None:
    """Offsets of 32 bits end at row 2^31 / length."""
    needs_memory(30)
    rows = 2**31 // length + 70
    scores = torch.zeros(rows, length, dtype=torch.bfloat16, device="cuda")
    boundary = 2**31 // length
    picked = torch.tensor(
        [0, 1, boundary // 2, boundary - 1, boundary, boundary + 1, rows - 2, rows - 1],
        device="cuda",
    )
    scores[picked] = make_scores((len(picked), length), torch.bfloat16, "cuda")
    rest = torch.tensor(1 / length).bfloat16().item()
    hold_rows(scores, picked, rest)


@pytest.mark.slow
def test_one_row_of_more_than_two_to_the_31_elements() -> None:
    needs_memory(60)
    length = 2**31 + 24
    scores = torch.zeros(1, length, dtype=torch.bfloat16, device="cuda")
    scores[0, -8:] = 20.0
    scores[0, :8] = 19.0
    mask = torch.zeros(length, dtype=torch.bool, device="cuda")
    mask[-1] = True
    probs = softmax(scores, mask)
    weights = torch.tensor([19.0, 0.0, 20.0], dtype=torch.float64).exp()
    total = (weights * torch.tensor([8, length - 16, 7], dtype=torch.float64)).sum()
    right = (weights / total).bfloat16()
    assert probs[0, -1] == 0
    for got, wanted in (
        (probs[0, 0], right[0]),
        (probs[0, 99], right[1]),
        (probs[0, -2], right[2]),
    ):
        torch.testing.assert_close(got.cpu(), wanted, rtol=2**-7, atol=0)
    assert probs[0, 8:-8].min() == probs[0, 8:-8].max()


@pytest.mark.parametrize("filler", [7.0, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_written(dtype: torch.dtype, filler: float) -> None:
    """The allocator hands out memory that holds 7.0; so would a result that nobody wrote."""

    def spoil(count: int) -> None:
        torch.full((count,), filler, dtype=dtype, device="cuda")

    for length in (1, 7, 64, 130, 1000, 1024, 4100, 20000):
        for case in ("none", "bool", "causal", "causal+mask+bias"):
            arguments = make_case(case, 1, 2, 3, length, dtype, "cuda")
            count = arguments["scores"].numel()
            bias = torch.zeros(2, 1, length, dtype=dtype, device="cuda")
            arguments["bias"] = bias.requires_grad_()
            scores = arguments["scores"].requires_grad_()
            if case == "bool":
                arguments["mask"][..., 0, :] = True
            exact = exact_probs(**arguments)
            grad = upstream(scores)
            spoil(count)
            probs = softmax(**arguments)
            compare_probs(probs, exact).demand()
            for _ in range(2):
                spoil(count)
            grads = torch.autograd.grad(probs, [scores, bias], grad)
            for comparison in compare_grads(
                grad,
                exact,
                arguments["scale"],
                saved=probs,
                grad_scores=grads[0],
                additive=[("grad_bias", bias, grads[1])],
            ):
                comparison.demand()


def peak_of(function: object) -> int:
    """Bytes that a call allocates beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()  # type: ignore[operator]
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", ["bool", "expanded", "float64", "transposed", "strided scores"])
def test_operands_are_read_in_place(kind: str) -> None:
    """Forward allocates probs alone: no expanded, converted or contiguous copy of an operand."""
    scores = make_scores((8, 16, 128, 1024), torch.bfloat16, "cuda")
    if kind == "strided scores":
        scores = scores.transpose(1, 2).contiguous().transpose(1, 2)
    mask = {
        "bool": random_mask((8, 1, 128, 1024), "cuda"),
        "expanded": random_mask((8, 1, 1, 1024), "cuda").expand(8, 16, 128, 1024),
        "float64": torch.zeros(16, 128, 1024, dtype=torch.float64, device="cuda"),
        "transposed": torch.zeros(1024, 128, dtype=torch.bfloat16, device="cuda").mT,
        "strided scores": None,
    }[kind]
    softmax(scores, mask)
    result = scores.numel() * 2
    assert peak_of(lambda: softmax(scores, mask)) <= result + 2**20


def test_backward_allocates_its_results_alone() -> None:
    scores = make_scores((8, 16, 128, 1024), torch.bfloat16, "cuda").requires_grad_()
    grad = upstream(scores)
    probs = softmax(scores)
    torch.autograd.grad(probs, scores, grad, retain_graph=True)
    peak = peak_of(lambda: torch.autograd.grad(probs, scores, grad, retain_graph=True))
    assert peak <= scores.numel() * 2 + 2**20


@pytest.mark.slow
def test_library_without_code_for_this_gpu(tmp_path: Path) -> None:
    """An error that names the GPU's capability, or right numbers; never the 7.0 of old memory."""
    major, minor = torch.cuda.get_device_capability()
    foreign = "8.0" if major != 8 else "9.0"
    program = (
        "import torch, sms_plugin\n"
        "scores = torch.randn(8, 64, device='cuda')\n"
        "torch.full_like(scores, 7.0)\n"
        "probs = sms_plugin.scaled_mask_softmax(scores)\n"
        "torch.testing.assert_close(probs, scores.softmax(-1))\n"
        "print('right numbers')\n"
    )
    environment = os.environ | {
        "SMS_PLUGIN_CACHE": str(tmp_path),
        "TORCH_CUDA_ARCH_LIST": foreign,
        "PYTHONPATH": str(Path(sms_plugin.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    said = done.stdout + done.stderr
    if done.returncode == 0:
        assert "right numbers" in said
    else:
        assert "AssertionError" not in said, said
        assert f"{major}.{minor}" in said or f"sm_{major}{minor}" in said, said
