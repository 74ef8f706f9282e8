"""Building ahead of time: the architectures, and the check of all sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkouts import needs_compiler, real_nvcc, write_fake_nvcc, write_stub_sources

from sms_plugin.archs import parse_archs
from sms_plugin.build import check_sources, choose_archs, parse_usage
from sms_plugin.recipe import Recipe
from sms_plugin.toolchain import BuildError, find_compiler, find_nvcc


@pytest.mark.parametrize("unset", [None, "", "  "])
def test_archs_ahead_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: str | None
) -> None:
    """No GPU, and no arch list or an empty one: the documented default, as far as nvcc knows it."""
    if unset is None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    else:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", unset)
    write_fake_nvcc(tmp_path, release="12.4", archs="50 80 86 90")
    nvcc = find_nvcc(None, {"CUDA_HOME": str(tmp_path)}, ())

    def chosen(wish: str | None) -> list[str]:
        return [str(arch) for arch in choose_archs(wish, nvcc)]

    assert chosen(None) == ["80", "90+PTX"]
    assert chosen("8.6 8.0") == ["80", "86+PTX"]
    with pytest.raises(
        ValueError, match=r"--archs: nvcc 12.4 .* can't compile for 120; it knows 50"
    ):
        chosen("90;120")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert chosen(None) == ["90"]
    assert chosen("80") == ["80+PTX"]


PTXAS_OUTPUT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_80'
ptxas info    : Function properties for _Z4goodPf
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90a'
ptxas info    : Function properties for _Z3badPf
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_spills_are_read() -> None:
    good, bad = parse_usage(PTXAS_OUTPUT)
    assert (good.name, good.arch, good.registers, good.stack_bytes) == (
        "_Z4goodPf",
        "sm_80",
        40,
        16,
    )
    assert good.spill_bytes == 0
    assert (bad.name, bad.arch, bad.registers, bad.spill_bytes) == ("_Z3badPf", "sm_90a", 255, 32)


@needs_compiler
def test_compile_check(tmp_path: Path) -> None:
    sources = write_stub_sources(tmp_path / "csrc", cuda=True)
    archs = parse_archs("8.0 9.0", source="X")
    recipe = Recipe(sources, find_compiler(), real_nvcc(), archs, strict=True)
    assert "2 files, 2 kernels for sm_80, sm_90: no warnings, no spills" in check_sources(recipe)

    kernel = sources / "cuda" / "zero.cu"
    clean = kernel.read_text()
    # 64 values that live across a loop, in the 32 registers of a block of 1024 threads, two per SM.
    kernel.write_text(
        """
__global__ void __launch_bounds__(1024, 2) spill(float* values, int n) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = values[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 64; ++i) kept[i] = kept[i] * kept[(i * 7 + 1) % 64] + kept[(i * 3) % 64];
  for (int i = 0; i < 64; ++i) values[i * 1024 + threadIdx.x] = kept[i];
}
"""
    )
    with pytest.raises(
        BuildError, match=r"2 of 2 kernels spill registers:\n  sm_80 \d+ bytes _Z5spill"
    ):
        check_sources(Recipe(sources, find_compiler(), real_nvcc(), archs, strict=True))

    kernel.write_text(clean + "static void never_called() {}\n")
    with pytest.raises(BuildError, match="never_called"):
        check_sources(Recipe(sources, find_compiler(), real_nvcc(), archs, strict=True))
    kernel.write_text(clean)
    (sources / "call_count.cpp").write_text("static void never_called() {}\n")
    with pytest.raises(BuildError, match="never_called"):
        check_sources(Recipe(sources, find_compiler(), strict=True))
