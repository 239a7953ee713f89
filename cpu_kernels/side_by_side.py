"""Compiling kernels in several processes at once, into the cache: in one the compiler keeps one processor busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue

MAX_PROCESSES = 4
"""The slowest kernel alone takes a quarter of the time of all, and each process 200 MB."""


def compile_side_by_side(names: Sequence[str], cache: Path, processes: int, told: Callable[[int], None]) -> None:
    """Make `names` (see `compiler.missing`) in this order; `told` hears how many are done. What no process makes, or
    where none can be had, is left to the caller, who will find out why."""
    with ExitStack() as stack:
        compilers: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):
            compilers.extend(
                stack.enter_context(_start(cache)) for _ in range(min(processes, len(names), MAX_PROCESSES))
            )
        if not compilers:  # or nothing to make
            return
        idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for compiler in compilers:
            idle.put(compiler)
        pool = stack.enter_context(ThreadPoolExecutor(len(compilers)))
        for compiler in compilers:
            stack.callback(compiler.kill)  # before the pool waits for its threads, should this one be interrupted
        made = [pool.submit(_make, name, idle) for name in names]
        for number, future in enumerate(as_completed(made), start=1):
            future.result()
            told(number)


def _start(cache: Path) -> subprocess.Popen[bytes]:
    """A process that finds this package where this one did."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-P", "-m", __package__, str(cache)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment)


def _make(name: str, idle: SimpleQueue[subprocess.Popen[bytes]]) -> None:
    compiler = idle.get()
    with suppress(BrokenPipeError):  # it is gone
        if compiler.stdin is not None and compiler.stdout is not None:
            compiler.stdin.write(f"{name}\n".encode())
            compiler.stdout.readline()
    idle.put(compiler)
