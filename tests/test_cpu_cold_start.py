"""The first start on a machine: several processes fill the cache of kernels, and nothing depends on their success."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cpu_kernels import compiler, machine_code, side_by_side
from kvpool.cpu_kernels.compiler import load_kernels, load_ring_functions, missing
from kvpool.cpu_kernels.isa import FLOAT16, FLOAT32
from kvpool.cpu_kernels.rings import RINGS
from kvpool.cpu_kernels.side_by_side import compile_side_by_side

QUICK = ["select_rows", "float16"]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    monkeypatch.setattr(compiler, "_compiled", {})
    monkeypatch.setattr(compiler, "_tiles", {})


def test_what_is_missing_is_made_by_other_processes_and_found_here(tmp_path: Path) -> None:
    before, told = missing([FLOAT16], tmp_path), []
    assert set(before[:3]) == set(compiler.SLOW)
    assert set(QUICK) < set(before)
    compile_side_by_side(QUICK, tmp_path, 2, told.append)
    assert told == [1, 2]
    assert set(before) - set(missing([FLOAT16], tmp_path)) == set(QUICK)
    assert compiler._compiled == {}


def test_what_writes_rings_is_kept_as_object_code_that_needs_nothing_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = compiler._rings_module()
    assert {
        function.name for function in module.functions if function.is_declaration and "llvm." not in function.name
    } == {"write"}
    assert compiler.RINGS_NAME in missing([FLOAT16], tmp_path)
    assert set(load_ring_functions(tmp_path)) == {function.__name__ for function in RINGS}
    assert compiler.RINGS_NAME not in missing([FLOAT16], tmp_path)

    def nothing_more() -> object:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_rings_module", nothing_more)
    assert all(load_ring_functions(tmp_path).values())


def test_a_cache_that_is_full_or_partly_somebody_elses_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(cache: Path, module: str) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(cache / module))

    monkeypatch.setattr(compiler, "_made", full)
    monkeypatch.setattr(compiler, "_load", lambda formats, cache, progress: cache)
    told: list[str] = []
    assert load_kernels([FLOAT32], tmp_path, lambda what, share: told.append(what)) is None
    assert told[-1].startswith("kernels will not be cached: ")
    assert told[-1].endswith(": No space left on device")
    assert set(load_ring_functions(tmp_path)) == {function.__name__ for function in RINGS}


def test_object_code_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine_code.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        machine_code._write(tmp_path / "x.o", b"code")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("executable", ["/bin/false", "/nowhere/python"])
def test_what_other_processes_cannot_make_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    before, told = missing([FLOAT16], tmp_path), []
    monkeypatch.setattr(sys, "executable", executable)
    compile_side_by_side(before, tmp_path, 2, told.append)
    assert missing([FLOAT16], tmp_path) == before


def test_they_end_with_the_thread_that_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = side_by_side._start

    def watched(cache: Path) -> subprocess.Popen[bytes]:
        started.append(start(cache))
        return started[-1]

    def stop(number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "_start", watched)
    with pytest.raises(KeyboardInterrupt):
        compile_side_by_side(["select_rows", "sample", "sample"], tmp_path, 2, stop)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_start_asks_for_them_only_where_there_is_much_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], int]] = []

    def note(names: list[str], cache: Path, processes: int, told: object) -> None:
        asked.append((names, processes))

    monkeypatch.setattr(compiler, "compile_side_by_side", note)
    monkeypatch.setattr(compiler, "_load", lambda formats, cache, progress: cache)
    for absent in (["a"], ["a", "b"]):
        monkeypatch.setattr(compiler, "missing", lambda formats, cache, absent=absent: absent)
        for processes in (1, 3):
            assert load_kernels([FLOAT32], tmp_path, lambda what, share: None, processes) == tmp_path
    assert asked == [(["a", "b"], 3)]


def test_two_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits while the other fills the cache, and then looks again what is missing."""
    asked: list[list[str]] = []
    lacking = [["a", "b"], []]
    monkeypatch.setattr(compiler, "missing", lambda formats, cache: lacking.pop(0))
    monkeypatch.setattr(compiler, "compile_side_by_side", lambda names, *others: asked.append(names))
    monkeypatch.setattr(compiler, "_load", lambda formats, cache, progress: cache)
    load_kernels([FLOAT32], tmp_path, lambda what, share: None, 2)
    assert asked == [[]]
    with (tmp_path / "filling").open("w") as file:
        with compiler._filling(tmp_path), pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
