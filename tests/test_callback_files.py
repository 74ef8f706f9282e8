"""The callbacks' base class, and files that are whole or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_time import ROOT

import train.adapter  # noqa: F401  registers the core
from sms_plugin.callbacks.whole_file import whole_file

LIGHTNING_STUB = "class Callback:\n    flavour = 'lightning'\n"


@pytest.mark.parametrize(
    ("first", "bases"),
    [
        ("import lightning.pytorch.callbacks", ["lightning.pytorch.callbacks"]),
        ("import pytorch_lightning", ["pytorch_lightning.callbacks.callback"]),
        (
            "import pytorch_lightning, lightning.pytorch.callbacks",
            ["lightning.pytorch.callbacks", "pytorch_lightning.callbacks.callback"],
        ),
        ("", ["lightning.pytorch.callbacks"]),
    ],
    ids=["lightning", "pytorch_lightning", "both", "neither yet"],
)
def test_base_class_is_of_what_is_imported(tmp_path: Path, first: str, bases: list[str]) -> None:
    package = tmp_path / "lightning" / "pytorch"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "callbacks.py").write_text(LIGHTNING_STUB)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {first}\n"
        "import sms_plugin, pickle\n"
        "for name in ('ForwardBackwardTimer', 'FusedSoftmaxCallback'):\n"
        "    cls = getattr(sms_plugin.callbacks, name)\n"
        "    assert type(pickle.loads(pickle.dumps(cls()))) is cls\n"
        "    print([base.__module__ for base in cls.__mro__[2:-1]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str(bases)] * 2


def test_without_lightning_the_error_says_what_to_do() -> None:
    script = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "import sms_plugin\n"
        "sms_plugin.callbacks.ForwardBackwardTimer\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install pytorch-lightning" in done.stderr.splitlines()[-1]


def test_whole_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.txt"
    with whole_file(path) as unfinished:
        unfinished.write_text("one")
        assert not path.exists()
    with pytest.raises(RuntimeError), whole_file(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path]
