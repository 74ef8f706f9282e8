"""The doctor: what it says on machines that lack something, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from checkouts import ROOT, environment, needs_compiler, write_fake_nvcc, write_program

import sms_plugin
from sms_plugin import cards, diagnosis, doctor, extension, functional
from sms_plugin.diagnosis import Finding
from sms_plugin.doctor import Gpu
from sms_plugin.toolchain import ToolMissing, find_nvcc

H200 = Gpu("cuda:0", "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler, without a GPU and without a library; returns its folder."""
    write_program(tmp_path / "bin" / "c++", "echo 'c++ (made up) 12.2.0'\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SMS_PLUGIN_CACHE", str(tmp_path / "cache"))
    for variable in ("CUDA_HOME", "CUDA_PATH", "CXX", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    nothing_usual = partial(find_nvcc, usual_folders=())
    monkeypatch.setattr(cards, "find_nvcc", nothing_usual)
    monkeypatch.setattr(diagnosis, "find_nvcc", nothing_usual)
    monkeypatch.setattr("sms_plugin.toolchain._packaged_nvccs", lambda: iter(()))
    monkeypatch.setattr(extension, "carried_folder", lambda: tmp_path / "lib")
    plug_in(monkeypatch, [], None)
    return tmp_path


def plug_in(
    monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], driver: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(cards, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if driver else None)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_90"])


@pytest.fixture
def with_gpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine with an H200 and CUDA 13.0."""
    write_fake_nvcc(machine / "toolkit")
    (machine / "toolkit" / "lib").mkdir()
    (machine / "toolkit" / "lib" / "libcudart_static.a").touch()
    monkeypatch.setenv("CUDA_HOME", str(machine / "toolkit"))
    plug_in(monkeypatch, [H200], (13, 0))
    return machine


def examine() -> dict[str, Finding]:
    findings = doctor.examine()
    for finding in findings:
        assert finding.fix or finding.status == "ok", finding
        assert "\n" not in finding.fix
    found = {finding.about: finding for finding in findings}
    assert len(found) == len(findings)
    return found


def problems() -> set[str]:
    return {about for about, finding in examine().items() if finding.status == "problem"}


def test_nothing_is_built_unless_asked(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "not built yet" in text and "`python -m sms_plugin.doctor --build` builds it" in text
    assert examine()["fused on cpu"].seen == "works once the library is built"
    assert not (machine / "cache").exists()


def test_gpu_with_everything_for_it(with_gpu: Path) -> None:
    found = examine()
    assert {finding.status for about, finding in found.items() if about != "library"} == {"ok"}
    assert found["cuda:0"].seen == "NVIDIA H200, compute capability 9.0"
    assert found["nvcc ($CUDA_HOME)"].seen.endswith("; used")
    assert "CUDA for 90+PTX" in found["library"].seen
    assert found["fused on cuda:0"].seen == "works once the library is built"


def test_no_compiler(machine: Path) -> None:
    (machine / "bin" / "c++").unlink()
    found = examine()
    assert found["C++ compiler"].status == "problem"
    assert "apt-get install g++" in found["C++ compiler"].fix
    assert found["library"].status == found["fused on cpu"].status == "problem"
    assert doctor.main([]) == 1


def test_no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(environ: object = None) -> None:
        raise ToolMissing("no working ninja was found. Run `pip install ninja`")

    monkeypatch.setattr(doctor, "find_ninja", find_none)
    monkeypatch.setattr(diagnosis, "find_ninja", find_none)
    ninja = Finding("ninja", "problem", "no working ninja was found", "Run `pip install ninja`")
    assert examine()["ninja"] == ninja
    assert "fused on cpu" in problems()


def test_cache_that_cannot_be_written(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "file").touch()
    monkeypatch.setenv("SMS_PLUGIN_CACHE", str(machine / "file" / "cache"))
    assert problems() == {"cache", "fused on cpu"}
    assert "set SMS_PLUGIN_CACHE" in examine()["cache"].fix
    monkeypatch.setenv("SMS_PLUGIN_CACHE", str(machine))
    monkeypatch.setattr(diagnosis, "_SPACE_FOR_A_BUILD", 2**70)
    assert "a build may not fit" in examine()["cache"].seen


def test_missing_tools_do_no_harm_to_a_library_that_is_there(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_recipe_to_build", lambda *_: None)
    monkeypatch.setattr(extension, "load", lambda: None)
    monkeypatch.setattr(extension, "library_path", lambda: machine / "lib" / "libsms_plugin.so")
    monkeypatch.setattr(functional, "scaled_mask_softmax", sms_plugin.reference.scaled_mask_softmax)
    (machine / "bin" / "c++").unlink()
    found = examine()
    assert found["C++ compiler"].status == "warning"
    assert found["library"].seen.startswith("loaded from the package")
    assert found["fused on cpu"] == Finding("fused on cpu", "ok", "works")
    assert problems() == set()


def test_wrong_results_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (torch.zeros_like, lambda scores: torch.softmax(scores.detach(), -1) + 0 * scores):
        monkeypatch.setattr(functional, "scaled_mask_softmax", lambda s, scale, w=wrong: w(s * 0.5))
        assert doctor._examine_device("cpu").status == "problem"


def test_failed_build(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise extension.LibraryUnavailable("compiling failed. It said:\nline 2")

    monkeypatch.setattr(extension, "load", fail)
    assert doctor.main(["--build"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (index,) = (i for i, line in enumerate(lines) if line.startswith("problem  library"))
    assert lines[index + 1].index("line 2") == lines[index].index("compiling")


# nvcc, the driver and the GPUs


def test_gpu_without_nvcc(with_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME")
    found = examine()
    assert problems() == {"nvcc", "fused on cuda:0"}
    assert "CUDA 13.0 toolkit" in found["nvcc"].fix
    assert "Install a CUDA 13 toolkit" in found["fused on cuda:0"].fix
    assert found["fused on cpu"].status == "ok"
    assert doctor.main([]) == 1


def test_every_nvcc_is_listed(with_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_nvcc(with_gpu / "other", release="12.8")
    monkeypatch.setenv("PATH", f"{with_gpu / 'bin'}:{with_gpu / 'other' / 'bin'}")
    found = examine()
    assert found["nvcc ($CUDA_HOME)"].seen.endswith("75 80 90 100 120; used")
    assert found["nvcc (PATH)"].seen.startswith("12.8.7 in ")
    assert found["nvcc (PATH)"].seen.endswith("; not used")


@pytest.mark.parametrize(
    ("release", "driver", "status", "words"),
    [
        ("13.2", (13, 0), "ok", "; used"),  # another minor version
        ("12.4", (13, 0), "ok", "Torch's CUDA is 13.0, another major version, which is fine"),
        ("14.0", (13, 3), "problem", "too new for the driver"),
    ],
)
def test_versions_of_nvcc_and_driver(
    with_gpu: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    driver: tuple[int, int],
    status: str,
    words: str,
) -> None:
    write_fake_nvcc(with_gpu / "toolkit", release=release)
    plug_in(monkeypatch, [H200], driver)
    found = examine()
    assert found["nvcc ($CUDA_HOME)"].status == found["fused on cuda:0"].status == status
    assert words in found["nvcc ($CUDA_HOME)"].seen
    assert "nvidia-smi's number" in found["driver"].seen


def test_cuda_home_that_is_of_no_use(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(machine / "nowhere"))
    nvcc = examine()["nvcc ($CUDA_HOME)"]
    assert nvcc.status == "warning" and "does not exist" in nvcc.seen
    assert nvcc.fix.startswith("set CUDA_HOME to the folder that holds bin/nvcc")
    write_fake_nvcc(machine / "nowhere", banner="no version here")
    assert "names no release: 'no version here'" in examine()["nvcc ($CUDA_HOME)"].seen
    write_fake_nvcc(machine / "nowhere")
    assert "lacks libcudart_static.a" in examine()["nvcc ($CUDA_HOME)"].seen


def test_gpu_that_torch_has_no_code_for(with_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, [H200, Gpu("cuda:1", "older", (7, 5))], (13, 0))
    assert problems() == {"cuda:1"}
    seen = examine()["cuda:1"].seen
    assert seen == ("older, compute capability 7.5; torch has no code for it, but for 80 90+PTX")


def test_gpu_that_torch_does_not_see(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(machine / "bin" / "nvidia-smi", "echo 'NVIDIA H200, 9.0, 580.1'\n")
    plug_in(monkeypatch, [], (12, 8))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = examine()
    assert found["GPU"].status == "warning"
    assert "NVIDIA H200, 9.0" in found["GPU"].seen and "='7'" in found["GPU"].seen
    assert found["GPU"].fix.startswith("set CUDA_VISIBLE_DEVICES")
    assert found["driver"].status == "warning" and "update the driver" in found["driver"].fix
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a CUDA build of torch" in examine()["GPU"].fix
    assert doctor.main([]) == 0  # it works on every device that torch sees


@pytest.mark.parametrize(
    ("wish", "bad", "words"),
    [
        ("8.0", "", "no code for the visible sm_90"),
        ("9.0 8.0,9.0", "8.0,9.0", "has a comma"),
        ("9.0;10.1", "10.1", "can't compile for 101; it knows 75, 80, 90, 100, 120"),
        ("Hopper oops", "oops", "is not an architecture"),
    ],
)
def test_bad_arch_list(
    with_gpu: Path, monkeypatch: pytest.MonkeyPatch, wish: str, bad: str, words: str
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
    about = "TORCH_CUDA_ARCH_LIST" + (f" {bad!r}" if bad else "")
    assert problems() == {about, "fused on cuda:0"}
    assert words in examine()[about].seen
    plug_in(monkeypatch, [], None)  # nothing is built for it then
    assert problems() == set()


@pytest.mark.parametrize("wish", ["9.0a", "Hopper", "8.0 9.0", "sm_80;8.0+PTX"])
def test_good_arch_list(with_gpu: Path, monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wish)
    assert problems() == set()
    entries = [f for about, f in examine().items() if about.startswith("TORCH_CUDA_ARCH_LIST ")]
    assert "runs on sm_90" in entries[-1].seen


# As a program


def test_json(with_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert set(whole) == {"version", "works", "findings"}
    assert whole["version"] == sms_plugin.__version__ and whole["works"] is True
    for finding in whole["findings"]:
        assert set(finding) == {"about", "status", "seen", "fix"}
        assert finding["status"] in ("ok", "warning", "problem")
    abouts = [finding["about"] for finding in whole["findings"]]
    assert abouts[:3] == ["Python", "torch", "driver"]
    assert abouts[-3:] == ["library", "fused on cpu", "fused on cuda:0"]


def test_columns_are_aligned(with_gpu: Path) -> None:
    findings = doctor.examine()
    lines = doctor.as_text(findings).splitlines()
    whole = [line for line in lines if not line.startswith(" ")]
    assert len(whole) == len(findings)
    (column,) = {line.index(f.seen) for line, f in zip(whole, findings, strict=True)}
    assert all(line.index("->") == column for line in lines if line.startswith(" "))


Doctor = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.undo()  # the real machine

    def run(*words: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        env = environment(ROOT)
        env["PYTHONPATH"] = f"{path}:{ROOT}"
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    return run


def test_without_torch(run_doctor: Doctor) -> None:
    done = run_doctor("-S", "-m", "sms_plugin.doctor", "--json")  # -S: no site-packages
    assert done.returncode == 1, done.stderr
    found = {finding["about"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["torch"]["seen"] == "isn't installed"
    assert found["torch"]["fix"] == f"run `{sys.executable} -m pip install torch`"
    assert {"Python", "GPU", "C++ compiler", "ninja", "cache", "library"} <= set(found)


@pytest.mark.parametrize("error", ["OSError('libcudart.so.12')", "RuntimeError('twice')"])
def test_broken_torch(run_doctor: Doctor, tmp_path: Path, error: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}\n")
    done = run_doctor("-m", "sms_plugin.doctor", path=tmp_path)
    assert done.returncode == 1, done.stderr
    name, _, message = error[:-2].partition("('")
    assert f"can't be used: {name}: {message}" in done.stdout
    # Anyone else gets the error itself, at the import.
    other = run_doctor("-c", "import sms_plugin", path=tmp_path)
    assert other.returncode == 1
    assert other.stderr.splitlines()[-1] == f"{name}: {message}"


def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError) as caught:
        extension.require_torch("2.9.1")
    monkeypatch.setattr(sms_plugin, "_import_error", caught.value)
    torch_finding = examine()["torch"]
    assert "torch 2.9.1 is installed" in torch_finding.seen and "--upgrade" in torch_finding.fix


@needs_compiler
def test_this_machine(run_doctor: Doctor) -> None:
    done = run_doctor("-m", "sms_plugin.doctor", "--json", "--build")
    found = {finding["about"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["library"]["seen"].startswith("loaded from the ")
    assert found["fused on cpu"]["status"] == "ok"
    assert done.returncode == (0 if json.loads(done.stdout)["works"] else 1)
