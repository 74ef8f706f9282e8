"""The cache: built once whatever happens, found again, and rebuilt when it is damaged."""

from __future__ import annotations

import ctypes
import fcntl
from dataclasses import replace
from pathlib import Path

import pytest
from checkouts import (
    STUB_NUMBER,
    count_runs,
    needs_compiler,
    real_nvcc,
    wrapped_compiler,
    write_fake_nvcc,
    write_program,
    write_stub_sources,
)

from sms_plugin.archs import parse_archs
from sms_plugin.cache import (
    STAMP_NAME,
    cache_folder,
    cached_library,
    make_stamp,
    publish,
    read_stamp,
)
from sms_plugin.recipe import LIBRARY_NAME, Recipe, job_count
from sms_plugin.toolchain import BuildError, Compiler, find_compiler, find_nvcc


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_stub_sources(tmp_path / "csrc")


@pytest.fixture
def counted(tmp_path: Path) -> tuple[Compiler, Path]:
    """A compiler that writes a line for each run, and the file with the lines."""
    log = tmp_path / "compiler.log"
    log.touch()
    return replace(find_compiler(), command=(str(wrapped_compiler(tmp_path, log)),)), log


def _number(library: Path) -> int:
    return ctypes.CDLL(str(library)).sms_plugin_call_count(0, 0)


def _quiet(text: str) -> None:
    pass


@needs_compiler
def test_built_once_and_found_again(
    tmp_path: Path, sources: Path, counted: tuple[Compiler, Path]
) -> None:
    compiler, log = counted
    said: list[str] = []
    library = cached_library(Recipe(sources, compiler), tmp_path / "cache", say=said.append)
    assert _number(library) == STUB_NUMBER
    assert count_runs(log) == 2  # one source, one link
    assert len(said) == 1
    assert "CPU only" in said[0] and str(library.parent) in said[0]
    assert cached_library(Recipe(sources, compiler), tmp_path / "cache") == library
    assert count_runs(log) == 2


@needs_compiler
def test_edited_sources_get_another_library(tmp_path: Path, sources: Path) -> None:
    first = cached_library(Recipe(sources, find_compiler()), tmp_path / "cache", say=_quiet)
    write_stub_sources(sources, number=7)
    second = cached_library(Recipe(sources, find_compiler()), tmp_path / "cache", say=_quiet)
    assert (_number(first), _number(second)) == (STUB_NUMBER, 7)


def test_key_holds_what_decides_the_library(tmp_path: Path, sources: Path) -> None:
    fake = write_fake_nvcc(tmp_path / "cuda13", release="13.0").parent
    newer = write_fake_nvcc(tmp_path / "cuda14", release="14.1").parent
    nvcc, other_nvcc = (find_nvcc(None, {"PATH": str(path)}, ()) for path in (fake, newer))
    compiler = Compiler(("/usr/bin/c++",), "c++ 12.2")
    base = Recipe(sources, compiler, nvcc, parse_archs("9.0", source="X"))
    changed = [
        replace(base, compiler=Compiler(("/usr/bin/c++",), "c++ 12.3")),
        replace(base, compiler=Compiler(("/usr/bin/c++", "-m64"), "c++ 12.2")),
        replace(base, nvcc=other_nvcc),
        replace(base, nvcc=None, archs=()),
        replace(base, archs=parse_archs("9.0+PTX", source="X")),
        replace(base, archs=parse_archs("8.0 9.0", source="X")),
        replace(base, sources=write_stub_sources(tmp_path / "with_header")),
    ]
    (tmp_path / "with_header" / "rows.cuh").write_text("// new\n")
    assert len({recipe.key for recipe in (base, *changed)}) == len(changed) + 1
    moved = write_stub_sources(tmp_path / "elsewhere")
    (moved / "notes.txt").write_text("not a source")
    same = replace(base, sources=moved, compiler=Compiler(("/opt/bin/c++",), "c++ 12.2"))
    assert same.key == base.key


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "empty", "no stamp", "bad stamp", "no library"])
def test_damaged_library_is_rebuilt(
    tmp_path: Path, sources: Path, counted: tuple[Compiler, Path], damage: str
) -> None:
    compiler, log = counted
    recipe = Recipe(sources, compiler)
    library = cached_library(recipe, tmp_path / "cache", say=_quiet)
    stamp = library.parent / STAMP_NAME
    if damage in ("truncated", "empty"):
        # A new file, since the old one may be mapped into this process.
        content = library.read_bytes()
        library.unlink()
        library.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    elif damage == "bad stamp":
        stamp.write_text("{")
    else:
        (stamp if damage == "no stamp" else library).unlink()
    assert read_stamp(library.parent) is None
    assert cached_library(recipe, tmp_path / "cache", say=_quiet) == library
    assert count_runs(log) == 4
    assert _number(library) == STUB_NUMBER


@needs_compiler
def test_what_a_dead_build_left_is_cleared_away(tmp_path: Path, sources: Path) -> None:
    recipe = Recipe(sources, find_compiler())
    folder = tmp_path / "cache" / recipe.key
    (folder / "build-dead" / "objects").mkdir(parents=True)
    (folder / f".{LIBRARY_NAME}.dead").touch()
    (folder / "lock").write_text("process 1 on a host that is long gone")
    said: list[str] = []
    cached_library(recipe, tmp_path / "cache", say=said.append)
    # Nobody holds the lock, so its text means nothing.
    assert not any("waiting" in text for text in said)
    assert {path.name for path in folder.iterdir()} == {LIBRARY_NAME, STAMP_NAME, "lock"}


@needs_compiler
def test_live_builder_is_waited_for(tmp_path: Path, sources: Path) -> None:
    recipe = Recipe(sources, find_compiler())
    folder = tmp_path / "cache" / recipe.key
    folder.mkdir(parents=True)
    said: list[str] = []
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 77 on somewhere")
        lock.flush()

        def finish_the_other_build(text: str) -> None:
            said.append(text)
            if text.startswith("waiting"):
                elsewhere = cached_library(recipe, tmp_path / "other cache", say=_quiet)
                publish(elsewhere, make_stamp(recipe, elsewhere), folder)
                fcntl.flock(lock, fcntl.LOCK_UN)

        library = cached_library(recipe, tmp_path / "cache", say=finish_the_other_build)
    assert _number(library) == STUB_NUMBER
    assert len(said) == 1  # it waited, and then didn't build
    assert "process 77 on somewhere" in said[0] and str(folder / "lock") in said[0]


@needs_compiler
@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda"])
def test_odd_characters_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    odd = tmp_path / "a b" / "c(d)=e,f%g'h\"é$HOME;&"
    sources = write_stub_sources(odd / "csrc", cuda=cuda)
    monkeypatch.setenv("TMPDIR", str(odd))
    recipe = Recipe(sources, find_compiler())
    if cuda:
        recipe = replace(recipe, nvcc=real_nvcc(), archs=parse_archs("9.0+PTX", source="X"))
        toolkit = odd / "cuda"
        toolkit.symlink_to(recipe.nvcc.root, target_is_directory=True)
        recipe = replace(recipe, nvcc=replace(recipe.nvcc, root=toolkit))
    assert _number(cached_library(recipe, odd / "my cache", say=_quiet)) == STUB_NUMBER


@needs_compiler
def test_cache_that_can_not_be_written_is_named(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError) as caught:
        cached_library(Recipe(sources, find_compiler()), tmp_path / "file" / "cache", say=_quiet)
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    assert "set SMS_PLUGIN_CACHE to a folder that this user can write" in str(caught.value)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"SMS_PLUGIN_CACHE": "/x", "XDG_CACHE_HOME": "/y"}) == Path("/x")
    assert cache_folder({"XDG_CACHE_HOME": "/y"}) == Path("/y/sms_plugin")
    assert cache_folder({"SMS_PLUGIN_CACHE": "here"}) == Path.cwd() / "here"
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder({}) == Path("/home/someone/.cache/sms_plugin")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("/home/someone/.cache/sms_plugin")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(BuildError, match="set SMS_PLUGIN_CACHE"):
        cache_folder({})


@needs_compiler
def test_compiler_errors_are_shown_with_advice(tmp_path: Path, sources: Path) -> None:
    (sources / "broken.cpp").write_text("#error this can't work\n")
    with pytest.raises(BuildError, match=r"(?s)compiling failed\. .*this can't work"):
        cached_library(Recipe(sources, find_compiler()), tmp_path / "cache", say=_quiet)
    killed = write_program(tmp_path / "c++", "echo 'Killed signal terminated program'; exit 1\n")
    recipe = Recipe(sources, Compiler((str(killed),), "fake"))
    with pytest.raises(BuildError, match="want of memory: set MAX_JOBS=1"):
        cached_library(recipe, tmp_path / "cache", say=_quiet)
    assert not list((tmp_path / "cache").glob(f"*/{LIBRARY_NAME}"))


def test_max_jobs() -> None:
    assert job_count({"MAX_JOBS": "3"}) == 3
    assert job_count({}) >= 1
    for bad in ("0", "many", "-2"):
        with pytest.raises(BuildError, match=f"MAX_JOBS='{bad}'"):
            job_count({"MAX_JOBS": bad})
