"""Loading: which library is taken, by many processes at once, and what is said without one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkouts import (
    STUB_NUMBER,
    count_runs,
    environment,
    make_checkout,
    needs_compiler,
    real_nvcc,
    run_python,
    wrapped_compiler,
    write_stub_sources,
)

from sms_plugin import extension
from sms_plugin.archs import parse_archs
from sms_plugin.cache import STAMP_NAME, make_stamp, publish
from sms_plugin.cards import visible_cards
from sms_plugin.recipe import LIBRARY_NAME, Recipe
from sms_plugin.toolchain import Compiler

LOAD_AND_PRINT = """
from sms_plugin import extension
print(extension.load().sms_plugin_call_count(0, 0))
print(extension.library_path())
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_stub_sources(tmp_path / "csrc")


@needs_compiler
def test_many_processes_start_at_once(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    log = tmp_path / "compiler.log"
    compiler = wrapped_compiler(tmp_path, log)
    env = environment(checkout, SMS_PLUGIN_CACHE=str(tmp_path / "cache"), CXX=str(compiler))
    command = [sys.executable, "-c", LOAD_AND_PRINT]
    processes = [
        subprocess.Popen(command, env=env, cwd="/", stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert len(set(outputs)) == 1
    assert outputs[0].startswith(f"{STUB_NUMBER}\n{tmp_path}/cache/")
    assert count_runs(log) == 2  # one of them built


@needs_compiler
def test_killed_build_is_no_hindrance(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    log, go_on = tmp_path / "compiler.log", tmp_path / "go on"
    compiler = wrapped_compiler(tmp_path, log, f"test -e '{go_on}' || exec sleep 600")
    cache = tmp_path / "cache"
    env = environment(checkout, SMS_PLUGIN_CACHE=str(cache), CXX=str(compiler))
    killed = subprocess.Popen(
        [sys.executable, "-c", LOAD_AND_PRINT],
        env=env,
        cwd="/",
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (log.exists() and count_runs(log)):
            assert killed.poll() is None and time.monotonic() < deadline, "the build never began"
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)  # its ninja and compiler live on
        killed.wait()
        assert list(cache.glob("*/build-*"))
        go_on.touch()
        done = run_python(LOAD_AND_PRINT, env)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{STUB_NUMBER}\n")
    assert "waiting" not in done.stderr
    assert not list(cache.glob("*/build-*"))


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    code = """
import torch, sms_plugin
from sms_plugin import extension
assert extension.loaded_library() is None
for _ in range(2):
    try:
        sms_plugin.scaled_mask_softmax(torch.zeros(2, 3))
    except extension.LibraryUnavailable as error:
        print(error)
print(sms_plugin.call_counts()["scaled_mask_softmax"]["cpu"])
"""
    env = environment(
        checkout, PATH=str(tmp_path), CXX=None, SMS_PLUGIN_CACHE=str(tmp_path / "cache")
    )
    done = run_python(code, env)
    assert done.returncode == 0, done.stderr
    first, second, count = done.stdout.splitlines()
    assert first == second
    for part in ("no working C++ compiler", "apt-get install g++", "sms_plugin.build --wheel"):
        assert part in first
    assert count == "0"


@needs_compiler
def test_failure_is_remembered(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    (checkout / "csrc" / "call_count.cpp").write_text("#error this can't work\n")
    log = tmp_path / "compiler.log"
    compiler = wrapped_compiler(tmp_path, log)
    code = """
from sms_plugin import extension
for _ in range(3):
    try:
        extension.load()
    except extension.LibraryUnavailable as error:
        assert "this can't work" in str(error)
        print("refused")
"""
    env = environment(checkout, SMS_PLUGIN_CACHE=str(tmp_path / "cache"), CXX=str(compiler))
    done = run_python(code, env)
    assert done.stdout.split() == ["refused"] * 3, done.stderr
    assert count_runs(log) == 1


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.0", "2.1.0a0+git1234"])
def test_old_torch_is_one_line_at_import(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        extension.require_torch(version)
    message = str(caught.value)
    assert (
        "torch 2.10" in message and version in message and "pip install --upgrade torch" in message
    )
    assert "\n" not in message


@pytest.mark.parametrize("version", ["2.10.0", "2.14.1+cu130", "2.13.0a0+git1234", "3.0.0"])
def test_new_torch_is_welcome(version: str) -> None:
    extension.require_torch(version)


# A library that lies in the package


@pytest.fixture
def carried(tmp_path: Path, sources: Path) -> Path:
    """A folder with a library whose stamp says: these sources, this machine, sm_80 and sm_90."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (tmp_path / "any.so").write_bytes(b"not loaded here")
    recipe = Recipe(sources, Compiler(("c++",), "c++ 1"), archs=parse_archs("8.0 9.0", source="X"))
    stamp = make_stamp(recipe, tmp_path / "any.so")
    publish(tmp_path / "any.so", replace(stamp, cuda="13.0.88"), folder)
    return folder


def _restamp(folder: Path, **changes: str | None) -> None:
    stamp = json.loads((folder / STAMP_NAME).read_text())
    (folder / STAMP_NAME).write_text(json.dumps({**stamp, **changes}))


def test_carried_library_fits(carried: Path, sources: Path) -> None:
    on_cpu = extension.carried_library(carried, sources, (), None)
    assert on_cpu.usable and on_cpu.has_cuda and on_cpu.cuda_problem is None
    on_cards = extension.carried_library(carried, sources, ((8, 6), (9, 0)), (13, 0))
    assert on_cards.usable and on_cards.cuda_problem is None


def test_carried_library_that_does_not_fit(carried: Path, sources: Path) -> None:
    def problem(cards: tuple[tuple[int, int], ...], driver: tuple[int, int] | None) -> str | None:
        found = extension.carried_library(carried, sources, cards, driver)
        assert found.usable  # on the CPU
        return found.cuda_problem

    assert problem(((9, 0), (12, 0)), (13, 0)) == (
        "it has code for 80;90 and none for the visible sm_120"
    )
    assert "driver for CUDA 13.0.88, and this one is for 12.8" in str(problem(((9, 0),), (12, 8)))
    _restamp(carried, cuda=None, archs="")
    assert problem(((9, 0),), (13, 0)) == "it has no CUDA code"
    assert problem((), None) is None


def test_carried_library_that_is_of_no_use(carried: Path, sources: Path) -> None:
    def problem() -> str | None:
        found = extension.carried_library(carried, sources, (), None)
        assert not found.usable
        return found.problem

    _restamp(carried, machine="riscv64")
    assert "it is for riscv64" in str(problem())
    _restamp(carried, sources="0" * 64)
    _restamp(carried, machine=os.uname().machine)
    assert "other sources" in str(problem())
    (carried / LIBRARY_NAME).write_bytes(b"cut")
    assert problem() == "it is damaged"
    (carried / LIBRARY_NAME).unlink()
    assert problem() is None  # there is none


@needs_compiler
def test_carried_library_is_preferred_until_the_sources_change(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    env = environment(checkout, SMS_PLUGIN_CACHE=str(tmp_path / "cache"))
    command = [sys.executable, "-m", "sms_plugin.build", "--cpu-only"]
    subprocess.run(command, env=env, cwd="/", check=True, capture_output=True, timeout=300)
    without_tools = {**env, "PATH": "", "CXX": "none", "SMS_PLUGIN_CACHE": str(tmp_path / "empty")}
    done = run_python(LOAD_AND_PRINT, without_tools)
    carried = checkout / "sms_plugin" / "lib" / LIBRARY_NAME
    assert done.stdout == f"{STUB_NUMBER}\n{carried}\n", done.stderr
    assert not (tmp_path / "empty").exists()

    write_stub_sources(checkout / "csrc", number=5)
    assert run_python(LOAD_AND_PRINT, env).stdout.startswith(f"5\n{tmp_path}/cache/")
    refused = run_python(LOAD_AND_PRINT, without_tools)
    assert "The package carries one, but it was built from other sources" in refused.stderr


# On a machine with a GPU


@pytest.mark.cuda
def test_library_has_code_for_the_gpu(cuda: str) -> None:
    assert extension.cuda_unavailable_reason() is None
    assert visible_cards()


@pytest.mark.cuda
@pytest.mark.slow
def test_carried_code_for_other_cards_is_refused_with_the_reason(cuda: str, tmp_path: Path) -> None:
    """No compiler, and a library for older cards: the CPU works, a CUDA call says why it can't."""
    nvcc = real_nvcc()
    if torch.cuda.get_device_capability()[0] == 8:
        pytest.skip("the library for sm_80 would run on this card")
    checkout = make_checkout(tmp_path / "checkout", stub=False)
    env = environment(
        checkout,
        CUDA_HOME=str(nvcc.root),
        TORCH_CUDA_ARCH_LIST="8.0",
        SMS_PLUGIN_CACHE=str(tmp_path / "cache"),
    )
    command = [sys.executable, "-m", "sms_plugin.build"]
    subprocess.run(command, env=env, cwd="/", check=True, capture_output=True, timeout=600)
    code = """
import torch, sms_plugin
print(sms_plugin.scaled_mask_softmax(torch.zeros(1, 2)).tolist())
try:
    sms_plugin.scaled_mask_softmax(torch.zeros(1, 2, device="cuda"))
except sms_plugin.extension.LibraryUnavailable as error:
    print(error)
"""
    done = run_python(code, {**env, "PATH": "", "CXX": "none"})
    assert done.stdout.startswith("[[0.5, 0.5]]\n"), done.stderr
    assert "it has code for 80 and none for the visible sm_" in done.stdout
