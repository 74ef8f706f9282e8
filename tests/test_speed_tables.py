"""The README's tables, the plots and the ledger, made from small CSVs that are made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import plot_speed, speed_tables
from scripts.benchmarks.attention_record import COLUMNS as ATTENTION_COLUMNS
from scripts.benchmarks.ledger_table import Entry, as_markdown
from scripts.benchmarks.ncu_counters import CountersUnavailable, read_counters
from scripts.benchmarks.record import Row, write_rows
from scripts.benchmarks.speed_text import (
    bias_memory_text,
    bias_text,
    gpt_text,
    short,
    small_text,
    softmax_text,
)
from scripts.benchmarks.timing import Percentiles
from scripts.speed_tables import CHECKOUT, TABLES, TableError, table_text, with_tables

GPT = {  # system: (ms, GiB, seconds)
    "native": (40.9, 9.4, 0.3),
    "compiled": (21.4, 7.2, 15.0),
    "fused": (26.6, 5.8, 0.2),
    "fused + compiled": (20.8, 5.7, 14.0),
    "SDPA": (22.2, 4.3, 0.2),
    "SDPA + compiled": (17.8, 4.2, 13.0),
}


def row(case: str, shape: str, system: str, ms: float, **cells: object) -> Row:
    about = {"device": "NVIDIA H200", "torch": "2.11.0+cu130", "commit": "abc1234"}
    named = {"case": case, "shape": shape, "system": system, "ms_p50": f"{ms:.5g}"}
    row = about | named | {"dtype": "bfloat16", "direction": "forward + backward"}
    return row | {name: str(value) for name, value in cells.items()}


def gpt_rows() -> list[Row]:
    rows = []
    for system, (ms, peak, seconds) in GPT.items():
        cells = {"peak_gib": peak, "first_step_s": seconds}
        rows.append(row("GPT", "32x16x512x64", system, ms, **cells))
        rows.append(row("GPT, changing lengths", "16x16x1024x64", system, 2 * ms, **cells))
    return rows


def bias_rows() -> list[Row]:
    shape, case = "8x12x512x64", "learned bias: T5"
    times = {"floor": 0.29, "native": 0.62, "fused": 0.36, "SDPA": 0.5, "compiled": 0.355}
    rows = [row(case, shape, s, ms, fraction_of_roof=0.29 / ms) for s, ms in times.items()]
    failed = row(case, shape, "FlexAttention", 1, note="error: NotImplementedError: no")
    swin = "learned bias: Swin windows"
    return [
        *rows,
        failed | {"ms_p50": ""},
        row(swin, "2048x8x49x32", "fused", 1.25, fraction_of_roof=0.8),
        row(swin, "2048x8x49x32", "fused (padded keys)", 0.8, fraction_of_roof=1.25),
    ]


def softmax_rows() -> list[Row]:
    rows = []
    for length, share in ((512, 0.99), (1024, 0.97)):
        for dtype in ("bfloat16", "float32"):
            for direction in ("forward", "backward"):
                drop = 0.1 if (length, dtype, direction) == (1024, "float32", "backward") else 0
                for system, slow in (("fused", 1.0), ("native", 2.5), ("quack", 1.01)):
                    cells = {
                        "tb_per_s": 4.2 * (share - drop) / slow,
                        "roof_tb_per_s": 4.2,
                        "fraction_of_roof": (share - drop) / slow,
                        "goal": 0.97 if system == "fused" else "",
                    }
                    one = row("dense", f"9x{length}", system, slow * 0.1, **cells)
                    rows.append(one | {"dtype": dtype, "direction": direction})
    return rows


def cpu_rows() -> list[Row]:
    times = {"native": 160.0, "compiled": 60.0, "fused": 29.0, "bound": 27.0}
    return [
        row("dense", "8x16x512x512", system, ms, ms_p20=0.9 * ms, ms_p80=2 * ms)
        for system, ms in times.items()
    ]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The four CSVs, as a results folder."""
    rows = {"gpt": gpt_rows(), "bias": bias_rows(), "softmax": softmax_rows(), "cpu": cpu_rows()}
    rows |= {"bias-memory": rows["bias"], "small": rows["softmax"]}
    for name, (path, _) in TABLES.items():
        write_rows(tmp_path / path, rows[name], ATTENTION_COLUMNS)
    return tmp_path


def test_gpt_table() -> None:
    text = gpt_text(gpt_rows())
    lines = text.splitlines()
    assert lines[0] == "|  | native | compiled | fused | fused + compiled | SDPA |"
    assert "| T = 512: ms | 40.9 | 21.4 | 26.6 | 20.8 | 22.2 (17.8 compiled) |" in lines
    assert "| T = 512: peak GiB | 9.40 | 7.20 | 5.80 | 5.70 | 4.30 (4.20 compiled) |" in lines
    assert any(line.startswith("| T up to 1024: ms, lengths change | 81.8 |") for line in lines)
    assert any(line.startswith("| T = 512: seconds to the first step | 0.300 |") for line in lines)
    assert "SDPA is as fast as fused or faster everywhere: T = 512 (1.20 times)" in text
    assert "Compiled is as fast as fused or faster everywhere" in text
    assert "Fused + compiled is faster than compiled wherever both have a time." in text
    assert text.endswith("(NVIDIA H200, torch 2.11.0, commit abc1234.)")


def test_bias_table() -> None:
    text = bias_text(bias_rows())
    line = "| T5 8x12x512x64 bfloat16 | 0.620 | 0.355 | 0.360 | - | 0.500 | error | 0.290 |"
    assert line in text
    assert "1.25 (0.800 with padded keys)" in text
    assert "Fused is faster than SDPA" in text
    assert (
        "Compiled is as fast as fused or faster everywhere: T5 8x12x512x64 bfloat16 (1.01" in text
    )
    assert "FlexAttention is" not in text and "than FlexAttention" not in text  # it has no time
    assert "The slowest row of fused is Swin windows 2048x8x49x32 bfloat16, 1.25 times" in text


def test_softmax_table() -> None:
    text = softmax_text(softmax_rows())
    assert "| dense | 0.97 to 0.99 | 0.97 to 0.99 | 0.97 to 0.99 | 0.87 to 0.99 |" in text
    assert "7 of 8 goals are reached." in text
    assert "The slowest cell is dense 9x1024 float32 backward: 0.87 of its roof." in text
    assert "Against native: 2.50 to 2.50 times as fast in 8 timings." in text
    assert "quack is as fast (within 2 %) or faster in 8 of them, faster in 0," in text


def test_goals_without_a_roof_count_too() -> None:
    host = [row("host", "1x4", "fused", 0.031, goal=1), row("host", "1x4", "native", 0.028)]
    assert "7 of 9 goals are reached." in softmax_text([*softmax_rows(), *host])
    host[1]["ms_p50"] = "0.032"
    assert "8 of 9 goals are reached." in softmax_text([*softmax_rows(), *host])


def test_small_problems() -> None:
    times = {"native": 0.03, "compiled": 0.004, "fused": 0.005}
    text = small_text([row("small BERT", "1x12x128x128", s, ms) for s, ms in times.items()])
    assert "| BERT 1x12x128x128 forward + backward | 30.0 | 4.00 | 5.00 |" in text
    assert "Compiled is as fast as fused or faster everywhere: BERT" in text


def test_memory_of_attentions() -> None:
    rows = [
        row("learned bias: T5", "8x12", s, 1.0, peak_gib=g)
        for s, g in (("native", 3), ("fused", 1))
    ]
    assert "| T5 8x12 bfloat16 | 3.00 | - | 1.00 |" in bias_memory_text(rows)


def test_cpu_table(results: Path) -> None:
    text = table_text("cpu", results)
    line = "| bfloat16 dense [8, 16, 512, 512] | 160 (144 to 320) | 60.0 (54.0 to 120) | 29.0 (26.1"
    assert line in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.012"), (0.5, "0.500"), (5.432, "5.43"), (54.32, "54.3"), (1234.5, "1234")],
)
def test_numbers(value: float, text: str) -> None:
    assert short(value) == text


README = """# Title

<!-- speed:begin gpt -->
old
<!-- speed:end gpt -->

between

<!-- speed:begin cpu -->
<!-- speed:end cpu -->
"""


def test_written_and_checked(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    options = ["--readme", str(readme), "--results", str(results)]
    assert speed_tables.main([*options, "--check"]) == 1
    assert readme.read_text() == README
    assert speed_tables.main(options) == 0
    text = readme.read_text()
    assert "old" not in text and "between" in text and "| 40.9 | 21.4 |" in text
    assert speed_tables.main([*options, "--check"]) == 0

    readme.write_text(text.replace("40.9", "41.9"))
    capsys.readouterr()
    assert speed_tables.main([*options, "--check"]) == 1
    assert "41.9" in capsys.readouterr().out
    rows = gpt_rows()
    rows[0]["ms_p50"] = "39.9"
    readme.write_text(text)
    write_rows(results / "h200/gpt.csv", rows, ATTENTION_COLUMNS)
    assert speed_tables.main([*options, "--check"]) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<!-- speed:begin gpt -->\n", "no partner"),
        ("<!-- speed:begin gpt -->\n<!-- speed:end cpu -->\n", "no partner"),
        ("<!-- speed:begin x -->\n<!-- speed:end x -->\n", "there is no table 'x'"),
    ],
)
def test_markers_that_do_not_fit(text: str, reason: str, results: Path) -> None:
    with pytest.raises(TableError, match=reason):
        with_tables(text, results)


def test_a_csv_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"table gpt: .*isn't there"):
        table_text("gpt", tmp_path)


def test_the_readme_is_what_the_csvs_say() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert "<!-- speed:begin gpt -->" in readme
    assert speed_tables.main(["--check"]) == 0


def test_plots(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = [str(results / path) for path, _ in TABLES.values()]
    out = tmp_path / "plots"
    assert plot_speed.main([*files, "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    expected = {"dense.png", "attention_bias_bfloat16.png", "gpt_ms.png", "gpt_gib.png"}
    assert names == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.iterdir())
    assert len(capsys.readouterr().out.splitlines()) == len(expected)


def test_plots_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit):
        plot_speed.main([str(tmp_path / "no.csv"), "--out", str(tmp_path)])
    assert "no such file" in capsys.readouterr().err


NCU = """==PROF== Connected to process 42 (/usr/bin/python3.12)
the program's own line
==PROF== Profiling "spin_kernel": 0%....100% - 1 pass
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","42","python3.12","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)",\
"(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","5,120"
"0","42","python3.12","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)",\
"(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","0"
"1","42","python3.12","127.0.0.1","void at::native::mul<float, 4>(int)","1","7","(128, 1, 1)",\
"(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","1,073,741,824"
"1","42","python3.12","127.0.0.1","void at::native::mul<float, 4>(int)","1","7","(128, 1, 1)",\
"(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","Gbyte","1.05"
"2","42","python3.12","127.0.0.1","softmax","1","7","(128, 1, 1)",\
"(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","176"
"2","42","python3.12","127.0.0.1","softmax","1","7","(128, 1, 1)",\
"(9, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","Kbyte","2"
"3","42","python3.12","127.0.0.1","at::cuda::<unnamed>::spin_kernel(long)","1","7","(1, 1, 1)",\
"(1, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","512"
==PROF== Disconnected from process 42
"""


def test_ncu_counters() -> None:
    one, other = read_counters(NCU, "", "spin_kernel")
    assert (one.kernels, one.bytes_read, one.bytes_written) == (2, 1073742000, 1050002000)
    assert (other.kernels, other.bytes_read) == (0, 0)


@pytest.mark.parametrize(
    ("stdout", "reason"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "run as root"),
        ("==ERROR== No kernels were profiled.", "no CSV; it said: ==ERROR== No kernels"),
        (NCU.replace('"Gbyte"', '"inst"'), "counted in 'inst'"),
        (NCU.replace('"1.05"', '"n/a"'), "but 'n/a'"),
    ],
)
def test_ncu_without_counters(stdout: str, reason: str) -> None:
    with pytest.raises(CountersUnavailable, match=reason):
        read_counters(stdout, "", "spin_kernel")


def test_ledger_table() -> None:
    def entry(system: str, direction: str, ms: float, **counted: int) -> Entry:
        return Entry(system, direction, 3, 2**31, Percentiles(ms, ms, ms), 1.5, **counted)

    entries = [
        entry("chain", "forward", 1.5, bytes_read=3 * 10**9, bytes_written=3 * 10**9),
        entry("chain", "backward", 1.5, bytes_read=10**9, bytes_written=10**9),
        entry("fused", "forward", 0.5, bytes_read=10**9, bytes_written=10**9),
        entry("fused", "backward", 0.7, bytes_read=10**9, bytes_written=10**9),
    ]
    text = as_markdown(entries, "NVIDIA H200", [])
    assert "| chain | forward | 3 | 3.00 | 3.00 | 2.15 | 1.500 | 1.50 |" in text
    assert "takes 2.50 times as long as fused and moves 2.00 times as many bytes." in text
    assert "bytes_read" in entries[0].cells() and entries[0].cells()["ms_p50"] == "1.5"
    uncounted = as_markdown([entry("chain", "forward", 1.5)], "NVIDIA H200", ["No ncu."])
    assert "| 3 | - | - | 2.15 |" in uncounted and "No ncu." in uncounted
