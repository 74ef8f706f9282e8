"""Whole attentions of the benchmark: what is timed is right, on small shapes; no time is asserted.

Legend: B batch, H heads, T queries and keys, D width of a head.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts import bench_attention
from scripts.benchmarks import attention_rows, gpt_run
from scripts.benchmarks.attention_record import AttentionRecord, verdicts
from scripts.benchmarks.attention_rows import AttentionRow, Inputs, make_inputs
from scripts.benchmarks.attention_run import make_calls, make_roofs, measure_row
from scripts.benchmarks.attention_systems import PADDED, make_attention, systems_of
from scripts.benchmarks.gpt import ATTENTIONS, GPT, Size
from scripts.benchmarks.record import read_rows
from scripts.benchmarks.timing import Percentiles

ROWS = (
    AttentionRow("T5", 2, 3, 24, 8),
    AttentionRow("pair bias", 3, 2, 16, 6, bias_per_sample=True),
    AttentionRow("Swin windows", 4, 2, 9, 8),
    AttentionRow("Swin windows, padded", 4, 2, 16, 8, kept=9),
)
SIZE = Size(layers=2, heads=2, width=16, vocabulary=11, max_len=32)


def exact(inputs: Inputs) -> list[Tensor]:
    """Output and gradients in float64, by the plainest code."""
    q, k, v, bias = (t.detach().double().requires_grad_() for t in inputs.wanted)
    z = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    out = z.masked_fill(inputs.mask, -torch.inf).softmax(-1) @ v
    return [out, *torch.autograd.grad(out, (q, k, v, bias), inputs.grad_out.double())]


def outputs(system: str, inputs: Inputs) -> list[Tensor]:
    attention = make_attention(system, inputs)
    return [attention(inputs), *make_calls(attention, [inputs])[0]()]  # type: ignore[misc]


def close(found: list[Tensor], right: list[Tensor], relative: float) -> bool:
    """Every tensor within `relative` of the size of its own largest value."""
    return all(
        f.shape == r.shape and bool(((f.double() - r).abs() <= relative * r.abs().max()).all())
        for f, r in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_systems_agree_with_float64(row: AttentionRow, device: str) -> None:
    inputs = make_inputs(row, torch.float32, device)
    right = exact(inputs)
    for system in ("native", "fused", "SDPA", *systems_of(row)[6:]):
        assert close(outputs(system, inputs), right, 1e-5), system


def test_bfloat16_is_as_near_as_native() -> None:
    inputs = make_inputs(ROWS[0], torch.bfloat16, "cpu")
    right = exact(inputs)
    assert close(outputs("fused", inputs), right, 0.02)
    assert close(outputs("native", inputs), right, 0.04)


def test_the_comparison_can_fail() -> None:
    inputs = make_inputs(ROWS[0], torch.float32, "cpu")
    right = exact(inputs)
    assert not close([torch.zeros_like(r) for r in right], right, 0.5)
    uniform = inputs.v.mean(-2, keepdim=True).expand_as(inputs.v)
    assert not close([uniform, *right[1:]], right, 0.1)
    assert not close([*right[:-1], right[-1] * 1.001], right, 1e-5)


def test_keys_are_padded_where_rows_are_not_aligned() -> None:
    assert PADDED in systems_of(AttentionRow("", 1, 1, 49, 32))
    assert PADDED not in systems_of(AttentionRow("", 1, 1, 56, 32))
    inputs = make_inputs(ROWS[2], torch.float32, "cpu")
    shapes = []

    def softmax(scores: Tensor, mask: Tensor, **options: object) -> Tensor:
        shapes.append(tuple(scores.shape))
        return scores.masked_fill(mask, -torch.inf).softmax(-1)

    from scripts.benchmarks.attention_systems import attend_padded

    attend_padded(softmax, inputs.q, inputs.k, inputs.v, inputs.mask, inputs.bias)
    assert shapes == [(4, 2, 9, 16)]


def test_a_mask_removes_keys_and_is_the_same_for_all_sets() -> None:
    one, other = (make_inputs(ROWS[0], torch.float32, "cpu", seed) for seed in (0, 1))
    assert torch.equal(one.mask, other.mask) and not torch.equal(one.q, other.q)
    assert one.mask.any() and not one.mask.all(-1).any()


def test_bytes_of_the_softmax() -> None:
    row = AttentionRow("", 2, 3, 8, 4)
    forward, backward = attention_rows.softmax_traffic(row, torch.bfloat16)
    scores, bias, mask = 2 * 3 * 64 * 2, 3 * 64 * 2, 2 * 8
    assert (forward.reads, forward.writes) == (scores + bias + mask, scores)
    assert (backward.reads, backward.writes) == (2 * scores, scores + bias)


def test_products_are_those_of_autograd() -> None:
    """The floor's six products, seen by torch's own count of operations."""
    from torch.utils.flop_counter import FlopCounterMode

    row = ROWS[0]
    inputs = make_inputs(row, torch.float32, "cpu")
    attention = make_attention("fused", inputs)
    counts = []
    for call in (
        attention_rows.products(row, torch.float32, "cpu"),
        make_calls(attention, [inputs])[0],
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 6 * 2 * row.scores * row.D


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"must be one of native, .*got 'flash'"):
        make_attention("flash", make_inputs(ROWS[0], torch.float32, "cpu"))
    with pytest.raises(ValueError, match="must be one of native, fused, SDPA, got 'flash'"):
        GPT("flash", SIZE)


def test_measured_rows_name_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[0]
    systems = ("native", "fused", "broken")
    records = list(measure_row(row, torch.float32, "cpu", systems, 2, make_roofs("cpu", 2)))
    floor, native, fused, broken = records
    assert [r.system for r in records] == ["floor", *systems]
    assert fused.goal is native.goal is None  # goals are a GPU's
    assert floor.fraction_of_roof == 1 and fused.floor_ms == floor.ms.ms_p50
    assert broken.failed and "broken" in broken.note and broken.cells()["ms_p50"] == ""


@pytest.fixture(scope="module")
def gpt_gradients() -> dict[str, list[Tensor]]:
    """Of each attention, with the same parameters and tokens, in float32."""
    tokens = gpt_run.make_batch(2, 24, SIZE, "cpu")
    found = {}
    for name in ATTENTIONS:
        torch.manual_seed(0)
        model = GPT(name, SIZE)
        loss = model(*tokens)
        loss.backward()
        found[name] = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("name", ["fused", "SDPA"])
def test_gpts_agree(name: str, gpt_gradients: dict[str, list[Tensor]]) -> None:
    native = gpt_gradients["native"]
    assert len(native) > 20
    assert close(gpt_gradients[name], [t.double() for t in native], 1e-4)
    assert not close(gpt_gradients[name], [t.double() * 1.01 for t in native], 1e-4)


@pytest.mark.parametrize("name", tuple(ATTENTIONS))
def test_gpts_are_causal(name: str) -> None:
    torch.manual_seed(0)
    attention = ATTENTIONS[name](8)
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    changed = v.clone()
    changed[..., 5:, :] += 1
    one, other = attention(q, k, v), attention(q, k, changed)
    assert torch.equal(one[..., :5, :], other[..., :5, :])
    assert not torch.isclose(one[..., 5:, :], other[..., 5:, :]).any()


@pytest.mark.parametrize("name", tuple(ATTENTIONS))
def test_gpts_compile_as_one_graph_for_all_lengths(name: str) -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(GPT(name, SIZE), backend=backend, fullgraph=True)
    for T in (32, 24, 16, 20):
        loss = model(*gpt_run.make_batch(2, T, SIZE, "cpu"))
        assert torch.isfinite(loss)
    torch.compiler.reset()
    assert len(graphs) == 2  # the first length, and any other


def test_lengths_that_change() -> None:
    for T in (256, *gpt_run.LENGTHS):
        lengths = gpt_run.different_lengths(T)
        assert lengths[0] == T and len(set(lengths)) == len(lengths) == 8
        assert all(T // 2 < n <= T and n % 8 == 0 for n in lengths)


def test_a_step_clears_the_gradients() -> None:
    step = gpt_run.Step("fused", False, SIZE, "cpu")
    batch = gpt_run.make_batch(2, 16, SIZE, "cpu")
    grads = []
    for _ in range(2):
        step(batch)
        grads.append([p.grad.clone() for p in step.model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *grads))


def test_steps_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this GPU goes on by 3 ms for one step and by 5 ms for the other."""
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = math.nan

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def step(ms: float) -> None:
        now[0] += ms

    waits = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(now[0]))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    ms, peak = gpt_run.time_steps([lambda: step(3.0), lambda: step(5.0)], "cuda", 6)
    assert (ms.ms_p20, ms.ms_p50, ms.ms_p80, peak) == (4.0, 4.0, 4.0, 3.0)
    assert waits == [8.0, 8.0 * 8]  # after warming up, and at the end: not once a step


def test_a_model_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(gpt_run, "Step", fail)
    records = list(
        gpt_run.measure_gpt(32, "fused", "cpu", size=SIZE, tokens=64, rounds=2, changing=True)
    )
    assert [r.case for r in records] == ["GPT", "GPT, changing lengths"]
    assert all(r.note == "error: RuntimeError: out of memory" for r in records)


def record(system: str, ms: float, shape: str, **options: object) -> AttentionRecord:
    percentiles = Percentiles(ms, ms, ms)
    return AttentionRecord("bfloat16", "", shape, "", system, percentiles, **options)  # type: ignore[arg-type]


def test_verdicts() -> None:
    shape = "8x12x1024x64"
    row = {
        "native": record("native", 3.0, shape, floor_ms=0.8),
        "compiled": record("compiled", 0.9, shape, floor_ms=0.8),
        "fused": record("fused", 1.0, shape, floor_ms=0.8, goal=0.8),
        "fused + compiled": record("fused + compiled", 1.0, shape, floor_ms=0.8),
        "SDPA": record("SDPA", 1.5, shape, floor_ms=0.8),
    }
    assert verdicts(row) == [
        "of floor 0.80",
        "SDPA / 1.50 MISSED 1.6",
        "native / 3.00",
        "compiled / 0.90 MISSED 1",
    ]
    model = {
        "native": record("native", 40.0, "32x16x512x64", peak_gib=10.0),
        "fused": record("fused", 25.0, "32x16x512x64", peak_gib=6.3, goal=1.5),
    }
    assert verdicts(model) == ["native / 1.60", "memory 0.630 MISSED 0.62"]


def test_main_writes_a_csv_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [tmp_path / f"{n}.csv" for n in (1, 2)]
    for n, part in enumerate(parts, start=1):
        arguments = ["--device", "cpu", "--out", str(part), "--part", f"{n}/2"]
        arguments += ["--only", "bias*float32", "--systems", "native,fused"]
        assert bench_attention.main(arguments) == 0
    out = tmp_path / "all.csv"
    assert bench_attention.main(["--merge", *map(str, parts), "--out", str(out)]) == 0
    rows = read_rows(out)
    assert len(rows) == 3 * len(attention_rows.CPU_ROWS)
    assert all(float(row["ms_p50"]) > 0 and row["floor_ms"] for row in rows)
    said = capsys.readouterr().out
    assert "triangle" in said and "MISSED" not in said


def test_list_and_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention.main(["--device", "cpu", "--list", "--only", "GPT"]) == 0
    assert capsys.readouterr().out == "GPT 256\n"
    names = [cell.name for cell in bench_attention.bias_cells("cpu", False, [])]
    assert len(names) == len(set(names)) == 10
    quick = bench_attention.wanted(("native", "compiled", "fused", "SDPA"), [], True)
    assert quick == ["native", "fused", "SDPA"]


@pytest.mark.parametrize("option", [["--systems", "flash"], ["--only", "nothing like it"]])
def test_options_that_fit_nothing(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_attention.main(["--device", "cpu", *option])
    assert option[1].split()[0] in capsys.readouterr().err
