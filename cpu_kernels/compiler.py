"""Compiling the kernels when a back end starts, and keeping the result in a cache directory of our own.

Every function has a directory of its own, named by a hash of all sources that can reach it, of Numba's version and of
the processor, because Numba itself only notices a change of the file that holds the outermost function.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from .isa import FORMAT_NAMES, host_features, host_isa
from .jit import LOADED_NS
from .machine_code import linked, load_functions
from .rings import RINGS
from .side_by_side import compile_side_by_side
from .tile import tile_names, tile_table, tiles_module

Progress = Callable[[str, float], None]

HERE = Path(__file__).parent

_lock = threading.Lock()
_compiled: dict[str, Any] = {}  # Numba's functions own their code: they live as long as the process
_tiles: dict[tuple[int, ...], NDArray[np.int64]] = {}  # by formats

_ALL: list[Callable[..., None]] = [run_thread, *OPERATIONS.values()]
SLOW = ("sample", "attend_shared", "linear")
RINGS_NAME = "rings"

COMPILING, LOADING = "compiling CPU kernels", "loading CPU kernels"
BY_OTHERS = 0.9  # share of the time until all is ready, where other processes compile


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


@cache
def cache_key(module: str) -> str:
    """Changes with any source that `module` can reach, with the compiler and with the processor. (Sources that change
    under this process are `changed_sources`: then nothing is kept.)"""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(sources(module) | {"machine_code"}):
        digest.update(name.encode() + b"\0" + (HERE / f"{name}.py").read_bytes() + b"\0")
    names = (numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), *sorted(host_features()))
    digest.update("\0".join(names).encode())
    return digest.hexdigest()


def load_kernels(formats: Sequence[int], cache: Path, progress: Progress, processes: int = 1) -> Kernels:
    """Compile the kernels for `formats` on this processor, or read them from `cache`, and say so through `progress`.
    Several processes at once fill the cache, where there is much to compile.

    A cache that cannot be written only costs time: `progress` is told why.
    """
    with _lock:
        problem = _unusable(cache)
        if not problem:
            try:
                return _load_cached(formats, cache, progress, processes)
            except OSError as error:  # it is full, or part of it somebody else's
                problem = f"{error.filename or cache}: {error.strerror}"
        progress(f"kernels will not be cached: {problem}", 0.0)
        return _load(formats, None, progress)


def _load_cached(formats: Sequence[int], cache: Path, progress: Progress, processes: int) -> Kernels:
    if len(missing(formats, cache)) < 2 or processes < 2:
        return _load(formats, cache, progress)
    progress(COMPILING, 0.0)
    with _filling(cache):
        absent = missing(formats, cache)  # less, where another process was at it
        compile_side_by_side(absent, cache, processes, lambda done: progress(COMPILING, BY_OTHERS * done / len(absent)))
    return _load(formats, cache, lambda what, share: progress(what, BY_OTHERS + (1 - BY_OTHERS) * share))


def load_ring_functions(cache: Path) -> dict[str, int]:
    """The addresses of `rings.RINGS` by their names, C functions of int64; kept in `cache`, if that can be used."""
    with _lock:
        with suppress(OSError):
            return _load_rings(None if _unusable(cache) else cache)
        return _load_rings(None)


@contextmanager
def _filling(cache: Path) -> Iterator[None]:
    """One process after the other: two that start together would compile everything twice."""
    with (cache / "filling").open("w") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(formats: Sequence[int], cache: Path | None, progress: Progress) -> Kernels:
    parts = len(OPERATIONS) + 2
    functions = np.zeros(len(OPERATIONS), dtype=np.int64)
    for number, (opcode, operation) in enumerate(OPERATIONS.items()):
        progress(_doing(operation, cache), number / parts)
        functions[opcode] = _compile(operation, cache).address
    progress(_doing(run_thread, cache), (parts - 2) / parts)
    entry = _compile(run_thread, cache).ctypes
    progress(LOADING, (parts - 1) / parts)
    tiles = _load_tiles(tuple(formats), cache)
    progress(LOADING, 1.0)
    return Kernels(functions, tiles, entry)


def missing(formats: Sequence[int], cache: Path) -> list[str]:
    """Names of operations (unless this process has them), of formats of tiles, and RINGS_NAME, that are not in `cache`;
    slow ones first."""
    operations = [function for function in _ALL if not _is_known(function, cache)]
    operations.sort(key=lambda function: function.__name__ not in SLOW)
    tiles = [number for number in formats if not _tiles_file(number, cache).exists()]
    rings = [] if _rings_file(cache).exists() else [RINGS_NAME]
    return [function.__name__ for function in operations] + [FORMAT_NAMES[number] for number in tiles] + rings


def make(name: str, cache: Path) -> None:
    """Compile one of `missing`, and keep it in `cache`."""
    for function in _ALL:
        if function.__name__ == name:
            _compile(function, cache)
    for number, format_name in FORMAT_NAMES.items():
        if format_name == name:
            _tiles_of(number, cache)
    if name == RINGS_NAME:
        _load_rings(cache)


def _doing(function: Callable[..., None], cache: Path | None) -> str:
    """What people are told while `function` is made ready: compiling takes seconds, and happens once."""
    return LOADING if _is_known(function, cache) else COMPILING


def _is_known(function: Callable[..., None], cache: Path | None) -> bool:
    directory = _directory(cache, module_of(function))
    return function.__name__ in _compiled or (
        directory is not None and any(directory.rglob(f"*.{function.__name__}-*"))
    )


def module_of(function: Callable[..., None]) -> str:
    return function.__module__.rpartition(".")[2]


def _compile(function: Callable[..., None], cache: Path | None) -> Any:
    """A C function of int64, compiled once in this process."""
    name = function.__name__
    if name not in _compiled:
        directory = _directory(cache, module_of(function))
        with _numba_cache(directory):
            declare = numba.cfunc(_signature(function), cache=directory is not None, error_model="numpy")
            _compiled[name] = declare(function)
    return _compiled[name]


def _signature(function: Callable[..., None]) -> Any:
    return types.void(*[types.int64] * function.__code__.co_argcount)


def _load_rings(cache: Path | None) -> dict[str, int]:
    """Kept as object code: to be loaded, they need nothing of Numba, which would take longer than all else of a daemon
    whose model runs elsewhere."""
    file = _rings_file(cache) if cache is not None else None
    return load_functions(_rings_module, [function.__name__ for function in RINGS], file)


def _rings_module() -> Any:
    return linked([numba.cfunc(_signature(function), error_model="numpy")(function) for function in RINGS])


def _rings_file(cache: Path) -> Path:
    return _made(cache, "rings") / "rings.o"


def _load_tiles(formats: tuple[int, ...], cache: Path | None) -> NDArray[np.int64]:
    """The table of all tiles; each format has object code of its own, which any combination of formats shares."""
    if formats not in _tiles:
        addresses: dict[str, int] = {}
        for number in formats:
            addresses |= _tiles_of(number, cache)
        _tiles[formats] = tile_table(host_isa(), formats, addresses)
    return _tiles[formats]


def _tiles_of(number: int, cache: Path | None) -> dict[str, int]:
    """Addresses of a format's tiles."""
    isa = host_isa()
    file = _tiles_file(number, cache) if cache is not None else None
    return load_functions(partial(tiles_module, isa, [number]), tile_names(isa, [number]), file)


def _tiles_file(number: int, cache: Path) -> Path:
    return _made(cache, "tile") / f"tiles-{host_isa().name}-{FORMAT_NAMES[number]}.o"


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
    return None if cache is None else _made(cache, module)


def _made(cache: Path, module: str) -> Path:
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
