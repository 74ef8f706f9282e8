"""Architecture lists, and finding nvcc, the C++ compiler and ninja."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from checkouts import needs_compiler, real_nvcc, write_fake_nvcc, write_program

from sms_plugin.archs import (
    Arch,
    ArchListError,
    archs_for_cards,
    cards_without_code,
    parse_archs,
    require_supported,
    with_newest_ptx,
)
from sms_plugin.toolchain import ToolMissing, find_compiler, find_ninja, find_nvcc


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0 12.0", ["90", "120"]),
        ("9.0;12.0+PTX", ["90", "120+PTX"]),
        ("80;90;100;120", ["80", "90", "100", "120"]),
        (" 9.0 ;\t12.0 ", ["90", "120"]),
        ("sm_90 compute_80", ["80", "90"]),
        ("9.0a 10.0f+PTX", ["90a", "100f+PTX"]),
        ("Hopper", ["90+PTX"]),
        ("hopper", ["90+PTX"]),
        ("Ampere+Tegra", ["87"]),
        ("Ampere;8.6", ["80", "86+PTX"]),
        ("9.0;9.0+PTX", ["90+PTX"]),
        ("9.0;9.0a", ["90", "90a"]),
    ],
)
def test_arch_list_is_read(text: str, expected: list[str]) -> None:
    assert [str(arch) for arch in parse_archs(text, source="X")] == expected


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("9.0,12.0", "has a comma"),
        ("9", "write 9.0"),
        ("All", "is not an architecture: name capabilities"),
        ("native", "leave the list out"),
        ("Hoper", "one of Ada, Ampere"),
        ("9.0b", "is not an architecture"),
        ("9.00", "is not an architecture"),
        ("sm_", "is not an architecture"),
    ],
)
def test_each_bad_entry_says_why(entry: str, why: str) -> None:
    with pytest.raises(ArchListError) as caught:
        parse_archs(f"8.0 {entry} oops", source="TORCH_CUDA_ARCH_LIST")
    message = str(caught.value)
    assert message.startswith("TORCH_CUDA_ARCH_LIST=")
    assert f"{entry!r} " in message
    assert why in message
    assert "'oops'" in message  # the second one is named too
    assert "9.0;12.0+PTX" in message  # an example
    assert "'8.0' " not in message


def test_empty_arch_list_is_an_error() -> None:
    with pytest.raises(ArchListError, match="is empty"):
        parse_archs(" ", source="--archs")


def test_archs_unknown_to_nvcc_are_named() -> None:
    archs = parse_archs("3.0 9.0 10.1+PTX 9.0a", source="X")
    with pytest.raises(ArchListError) as caught:
        require_supported(archs, {80, 90}, source="X", compiler="nvcc 12.4 (/cuda)")
    assert "nvcc 12.4 (/cuda) can't compile for 30, 101; it knows 80, 90" in str(caught.value)
    require_supported(archs[1:3], {80, 90}, source="X", compiler="nvcc")  # 90 and 90a


@pytest.mark.parametrize(
    ("arch", "runs", "fails"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0)]),
        ("8.0+PTX", [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        ("9.0a", [(9, 0)], [(10, 0)]),
        ("9.0a+PTX", [(9, 0)], [(9, 1), (10, 0)]),
        ("10.0f", [(10, 0), (10, 3)], [(11, 0), (9, 0)]),
    ],
)
def test_which_cards_code_runs_on(
    arch: str, runs: list[tuple[int, int]], fails: list[tuple[int, int]]
) -> None:
    archs = parse_archs(arch, source="X")
    assert cards_without_code(archs, runs + fails) == tuple(sorted(fails))


def test_nvcc_flags() -> None:
    assert Arch(90).nvcc_flags() == ["-gencode=arch=compute_90,code=sm_90"]
    assert Arch(90, "a", ptx=True).nvcc_flags() == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


def test_newest_portable_arch_gets_ptx() -> None:
    archs = parse_archs("80 90 120a", source="X")
    assert [str(arch) for arch in with_newest_ptx(archs)] == ["80", "90+PTX", "120a"]
    only_special = parse_archs("90a", source="X")
    assert with_newest_ptx(only_special) == only_special


def test_archs_for_cards() -> None:
    def chosen(*cards: tuple[int, int]) -> list[str]:
        return [str(arch) for arch in archs_for_cards(cards, {80, 86, 90}, compiler="nvcc")]

    assert chosen((9, 0)) == ["90+PTX"]
    assert chosen((8, 6), (8, 0), (8, 0)) == ["80", "86+PTX"]
    assert chosen((12, 0)) == ["90+PTX"]  # newer than nvcc: the driver compiles the PTX
    with pytest.raises(
        ArchListError, match=r"nvcc can't compile for the visible sm_70.*older CUDA"
    ):
        chosen((9, 0), (7, 0))


def test_nvcc_behind_a_wrapper_script(tmp_path: Path) -> None:
    toolkit = tmp_path / "the real toolkit"
    real = write_fake_nvcc(toolkit)
    (toolkit / "lib").mkdir()
    (toolkit / "lib" / "libcudart_static.a").touch()
    wrapper = write_program(tmp_path / "bin" / "nvcc", f"exec '{real}' \"$@\"\n")
    nvcc = find_nvcc(None, {"PATH": str(wrapper.parent)}, ())
    assert nvcc.root == toolkit
    assert nvcc.version == (13, 0)
    assert nvcc.archs == {75, 80, 90, 100, 120}
    assert nvcc.library_folders == (toolkit / "lib",)
    assert nvcc.found_by == "PATH"


def test_cuda_home_goes_before_the_path(tmp_path: Path) -> None:
    write_fake_nvcc(tmp_path / "home", release="12.4")
    write_fake_nvcc(tmp_path / "path", release="13.0")
    environ = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path" / "bin")}
    assert find_nvcc("13.0", environ, ()).version == (12, 4)
    del environ["CUDA_HOME"]
    assert find_nvcc("13.0", environ, ()).version == (13, 0)


def test_nvcc_of_torchs_major_version_is_preferred(tmp_path: Path) -> None:
    write_fake_nvcc(tmp_path / "old", release="11.8")
    write_fake_nvcc(tmp_path / "new", release="13.0")
    places = {"PATH": str(tmp_path / "old" / "bin")}, (str(tmp_path / "new"),)
    assert find_nvcc("13.0", *places).version == (13, 0)
    assert find_nvcc("11.3", *places).version == (11, 8)
    assert find_nvcc(None, *places).version == (11, 8)
    assert find_nvcc("10.2", *places).version == (11, 8)  # none fits: the first


def test_nvcc_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_nvcc(tmp_path / "site" / "nvidia" / "cu97", release="97.0")
    monkeypatch.syspath_prepend(tmp_path / "site")
    nvcc = find_nvcc("97.0", {"PATH": ""}, ())
    assert nvcc.found_by == "the nvidia-cuda-nvcc package"
    assert nvcc.root == tmp_path / "site" / "nvidia" / "cu97"


def test_missing_nvcc_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sms_plugin.toolchain._packaged_nvccs", lambda: iter(()))
    write_fake_nvcc(tmp_path / "odd", banner="who knows")
    environ = {"CUDA_HOME": str(tmp_path / "gone"), "PATH": str(tmp_path / "odd" / "bin")}
    with pytest.raises(ToolMissing) as caught:
        find_nvcc("13.0", environ, (str(tmp_path / "usual"),))
    message = str(caught.value)
    assert f"$CUDA_HOME: {tmp_path}/gone/bin/nvcc does not exist" in message
    assert "names no release: 'who knows'" in message
    assert "the nvidia-cuda-nvcc package: none" in message
    assert f"{tmp_path}/usual: none" in message


def test_real_nvcc_has_its_headers() -> None:
    nvcc = real_nvcc()
    assert {80, 90} <= nvcc.archs
    headers = [
        *nvcc.root.glob("include/cuda_runtime.h"),
        *nvcc.root.glob("targets/*/include/cuda_runtime.h"),
    ]
    assert headers or Path("/usr/include/cuda_runtime.h").exists()


@needs_compiler
def test_cxx_may_hold_arguments(tmp_path: Path) -> None:
    cxx = write_program(tmp_path / "my c++", "echo 'my compiler 1.0'\n")
    assert find_compiler({"CXX": str(cxx), "PATH": ""}).command == (str(cxx),)
    plain = write_program(tmp_path / "cc1", 'echo "compiler with $*"\n')
    found = find_compiler({"CXX": f"{plain} -m64", "PATH": os.environ["PATH"]})
    assert found.command == (str(plain), "-m64")
    assert found.version == "compiler with -m64 --version"


def test_compiler_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    write_program(tmp_path / "c++", "exit 1\n")
    write_program(tmp_path / "g++", "echo good\n")
    assert find_compiler({"PATH": str(tmp_path)}).command == (str(tmp_path / "g++"),)


def test_missing_compiler_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing) as caught:
        find_compiler({"PATH": str(tmp_path)})
    for part in (
        f"PATH={str(tmp_path)!r}",
        "apt-get install g++",
        "set CXX",
        "sms_plugin.build --wheel",
    ):
        assert part in str(caught.value)
    with pytest.raises(ToolMissing, match="CXX='no-such-compiler'"):
        find_compiler({"CXX": "no-such-compiler", "PATH": os.environ["PATH"]})


def test_ninja_of_this_environment_without_its_path() -> None:
    pytest.importorskip("ninja")
    assert find_ninja({"PATH": ""}).is_file()


def test_broken_ninja_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = shutil.which("ninja") or str(find_ninja())
    monkeypatch.setattr("sms_plugin.toolchain._packaged_ninja", lambda: tmp_path / "stub" / "ninja")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "scripts"))
    (tmp_path / "stub").mkdir()
    dead = tmp_path / "stub" / "ninja"
    dead.write_text("#!/no/such/python\n")
    dead.chmod(0o755)
    assert find_ninja({"PATH": str(Path(good).parent)}) == Path(good)
    with pytest.raises(ToolMissing) as caught:
        find_ninja({"PATH": str(tmp_path)})
    assert f"{sys.executable} -m pip install ninja" in str(caught.value)
    assert f"PATH={str(tmp_path)!r}" in str(caught.value)
