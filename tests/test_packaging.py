"""Wheels and installations: used elsewhere, the checkout gone, with and without a compiler."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from checkouts import STUB_NUMBER, environment, make_checkout, needs_compiler, run_python

from sms_plugin.build import has_setuptools

# Asked of the metadata: importing pip, and even find_spec("pip"), switches setuptools' distutils
# off for the whole process, and torch.compile fails without it.
pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="pip")) or not has_setuptools(),
    reason="pip and setuptools 70.1 are needed to make and install wheels",
)

NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _run(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _make_wheel(checkout: Path, **changes: str) -> Path:
    """What `pip wheel .` makes of a checkout; without build isolation, which needs the network."""
    dist = checkout.parent / "dist"
    env = environment(None, **NO_NETWORK, **changes)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    _run([*command, "--wheel-dir", str(dist), str(checkout)], env)
    (wheel,) = dist.glob("*.whl")
    return wheel


def _new_environment(folder: Path) -> Path:
    """The Python of a new environment, which borrows torch and its needs from this one."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], environment(None))
    (site,) = folder.glob("lib/python*/site-packages")
    borrowed = Path(torch.__file__).resolve().parent.parent
    (site / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return folder / "bin" / "python"


def _install(python: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    _run([*pip, "--no-build-isolation", *what], environment(None, **NO_NETWORK))


@needs_compiler
def test_wheel_with_the_library_needs_no_compiler(tmp_path: Path) -> None:
    """The real operator, from a wheel, elsewhere, with the checkout and every tool gone."""
    checkout = make_checkout(tmp_path / "checkout", stub=False)
    build = [sys.executable, "-m", "sms_plugin.build", "--cpu-only", "--wheel"]
    _run([*build, str(tmp_path / "dist")], environment(checkout, **NO_NETWORK))
    (wheel,) = (tmp_path / "dist").iterdir()
    machine = os.uname().machine
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
    shutil.rmtree(checkout)

    python = _new_environment(tmp_path / "venv")
    _install(python, str(wheel))
    code = """
import torch, sms_plugin
from sms_plugin import extension
scores = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 0.0]], requires_grad=True)
mask = torch.tensor([[False, False, True], [True, True, True]])
probs = sms_plugin.scaled_mask_softmax(scores, mask, 2.0)
probs[0, 1].backward()
expected = torch.tensor([[2.0, 4.0]]).softmax(-1)[0]
torch.testing.assert_close(probs[0, :2], expected)
torch.testing.assert_close(scores.grad[0, 1], 2 * expected[0] * expected[1])
assert probs[0, 2] == 0 and not probs[1].any() and not scores.grad[1].any()
assert sms_plugin.call_counts()["scaled_mask_softmax"]["cpu"] == 1
print(extension.library_path())
"""
    env = environment(None, PATH="", CXX="none", SMS_PLUGIN_CACHE=str(tmp_path / "cache"))
    done = run_python(code, env, python=python, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "venv"))
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_plain_wheel_builds_at_first_use(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout", cuda=True)
    # No compiler while the wheel is made: nothing is compiled then.
    wheel = _make_wheel(checkout, PATH="", CXX="none")
    assert wheel.name.endswith("-py3-none-any.whl")
    shutil.rmtree(checkout)

    python = _new_environment(tmp_path / "venv")
    _install(python, str(wheel))
    code = (
        "from sms_plugin import extension\n"
        "print(extension.load().sms_plugin_call_count(0, 0), extension.library_path())"
    )
    env = environment(None, SMS_PLUGIN_CACHE=str(tmp_path / "cache"))
    done = run_python(code, env, python=python, cwd=tmp_path)
    assert done.stdout.startswith(f"{STUB_NUMBER} {tmp_path / 'cache'}/"), done.stderr


def test_what_the_wheel_holds(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout", cuda=True)
    for name in ("train", "conf"):
        (checkout / name).mkdir()
        (checkout / name / "__init__.py").touch()
    with zipfile.ZipFile(_make_wheel(checkout)) as wheel:
        names = wheel.namelist()
        (metadata_name,) = (name for name in names if name.endswith("/METADATA"))
        metadata = wheel.read(metadata_name).decode().splitlines()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sms_plugin"}
    assert {"sms_plugin/csrc/call_count.cpp", "sms_plugin/csrc/cuda/zero.cu"} <= set(names)
    # Every module: pyproject.toml names the packages, and a new one is easily forgotten there.
    modules = (checkout / "sms_plugin").rglob("*.py")
    assert {path.relative_to(checkout).as_posix() for path in modules} <= set(names)
    assert "sms_plugin/py.typed" in names
    assert not [name for name in names if name.endswith(".so")]
    required = {line for line in metadata if line.startswith("Requires-Dist") and ";" not in line}
    # Torch without any bound: an installation must never replace the one that is there.
    assert required == {"Requires-Dist: torch", "Requires-Dist: ninja"}
    extras = {line.split()[1] for line in metadata if line.startswith("Provides-Extra")}
    assert {"train", "test", "nvcc"} <= extras


@needs_compiler
def test_editable_installation_uses_the_sources_of_the_checkout(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    python = _new_environment(tmp_path / "venv")
    _install(python, "--editable", str(checkout))
    code = "from sms_plugin import recipe\nprint(recipe.source_folder())"
    done = run_python(code, environment(None), python=python, cwd=tmp_path)
    assert done.stdout == f"{checkout / 'csrc'}\n", done.stderr


def test_csrc_of_someone_else_is_not_ours(tmp_path: Path) -> None:
    """Beside an installed package lies site-packages, where other projects may drop a csrc."""
    checkout = make_checkout(tmp_path / "site-packages")
    (checkout / "pyproject.toml").unlink()
    code = "from sms_plugin import recipe\nprint(recipe.source_folder())"
    done = run_python(code, environment(checkout))
    assert done.stdout == f"{checkout / 'sms_plugin' / 'csrc'}\n", done.stderr
