"""Compiling the kernels when a back end starts, and keeping the result in a cache directory of our own.

Every function has a directory of its own, named by a hash of all sources that can reach it, of Numba's version and of
the processor, because Numba itself only notices a change of the file that holds the outermost function.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba import types
from numba.core import config as numba_config
from numpy.typing import NDArray

from .executor import OPERATIONS, run_thread
from .isa import FORMAT_NAMES, Isa, host_features
from .jit import LOADED_NS
from .machine_code import load_functions
from .tile import tile_names, tile_table, tiles_module

Progress = Callable[[str, float], None]

HERE = Path(__file__).parent

_SIGNATURE = types.void(*[types.int64] * 4)  # of every operation, and of `run_thread`
_lock = threading.Lock()
_compiled: dict[str, Any] = {}  # Numba's functions own their code: they live as long as the process
_tiles: dict[tuple[str, tuple[int, ...]], NDArray[np.int64]] = {}


@dataclass(frozen=True, slots=True)
class Kernels:
    """Everything compiled for one back end."""

    functions: NDArray[np.int64]  # address of the function of each opcode
    tiles: NDArray[np.int64]  # see `tile.tile_table`
    run_thread: Callable[[int, int, int, int], None]


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of this room that `module` imports. (Parsing them takes as long as importing the compiler.)"""
    text = (HERE / f"{module}.py").read_text(encoding="utf-8")
    found = set(re.findall(r"^ *from \.(\w+) import", text, re.MULTILINE))
    for names in re.findall(r"^ *from \. import (\([^)]*\)|.+)", text, re.MULTILINE):
        found |= set(re.findall(r"\w+", names))
    return frozenset(name for name in found if (HERE / f"{name}.py").exists())


def sources(module: str) -> set[str]:
    """`module` and every module of this room that it imports, directly or not."""
    found: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= imports(name) - found
    return found


def changed_sources(since_ns: int = LOADED_NS) -> list[str]:
    """Sources that were edited after this process loaded them: what it compiles must not be kept under their names."""
    return sorted(path.name for path in HERE.glob("*.py") if path.stat().st_mtime_ns > since_ns)


def cache_key(module: str) -> str:
    """Changes with any source that `module` can reach, with the compiler and with the processor."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(sources(module)):
        digest.update(name.encode() + b"\0" + (HERE / f"{name}.py").read_bytes() + b"\0")
    names = (numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), *sorted(host_features()))
    digest.update("\0".join(names).encode())
    return digest.hexdigest()


def load_kernels(isa: Isa, formats: Sequence[int], cache: Path, progress: Progress) -> Kernels:
    """Compile the kernels for `formats`, or read them from `cache`, and say so through `progress`.

    A cache that cannot be written only costs time: `progress` is told why.
    """
    with _lock:
        problem = _unusable(cache)
        if problem:
            progress(f"kernels will not be cached: {problem}", 0.0)
        kept = None if problem else cache
        parts = len(OPERATIONS) + 2
        functions = np.zeros(len(OPERATIONS), dtype=np.int64)
        for number, (opcode, operation) in enumerate(OPERATIONS.items()):
            progress(_doing(operation, kept), number / parts)
            functions[opcode] = _compile(operation, kept).address
        progress(_doing(run_thread, kept), (parts - 2) / parts)
        entry = _compile(run_thread, kept).ctypes
        progress("loading CPU kernels", (parts - 1) / parts)
        tiles = _load_tiles(isa, tuple(formats), kept)
        progress("loading CPU kernels", 1.0)
    return Kernels(functions, tiles, entry)


def _doing(function: Callable[..., None], cache: Path | None) -> str:
    """What people are told while `function` is made ready: compiling takes seconds, and happens once."""
    directory = _directory(cache, module_of(function))
    known = function.__name__ in _compiled or (
        directory is not None and any(directory.rglob(f"*.{function.__name__}-*"))
    )
    return "loading CPU kernels" if known else "compiling CPU kernels"


def module_of(function: Callable[..., None]) -> str:
    return function.__module__.rpartition(".")[2]


def _compile(function: Callable[..., None], cache: Path | None) -> Any:
    """A C function of four int64, compiled once in this process."""
    name = function.__name__
    if name not in _compiled:
        directory = _directory(cache, module_of(function))
        with _numba_cache(directory):
            declare = numba.cfunc(_SIGNATURE, cache=directory is not None, error_model="numpy")
            _compiled[name] = declare(function)
    return _compiled[name]


def _load_tiles(isa: Isa, formats: tuple[int, ...], cache: Path | None) -> NDArray[np.int64]:
    """The table of all tiles; each format has object code of its own, which any combination of formats shares."""
    key = isa.name, formats
    if key not in _tiles:
        directory = _directory(cache, "tile")
        addresses: dict[str, int] = {}
        for number in formats:
            file = directory / f"tiles-{isa.name}-{FORMAT_NAMES[number]}.o" if directory is not None else None
            addresses |= load_functions(partial(tiles_module, isa, [number]), tile_names(isa, [number]), file)
        _tiles[key] = tile_table(isa, formats, addresses)
    return _tiles[key]


def _unusable(cache: Path) -> str:
    """Why nothing can be kept in `cache`; "" if it can."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{cache}: {error.strerror}"
    if not os.access(cache, os.W_OK | os.X_OK):
        return f"{cache} is not writable"
    changed = changed_sources()
    return f"{', '.join(changed)} changed while this process ran" if changed else ""


def _directory(cache: Path | None, module: str) -> Path | None:
    """Where what is compiled from `module` is kept."""
    if cache is None:
        return None
    directory = cache / f"{module}-{cache_key(module)}"
    directory.mkdir(exist_ok=True)
    return directory


@contextmanager
def _numba_cache(directory: Path | None) -> Iterator[None]:
    """Point Numba at `directory` while functions are declared, and back: other users of Numba keep theirs."""
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(directory or "")
    try:
        yield
    finally:
        numba_config.CACHE_DIR = before
