"""Compiling the kernels when a back end starts, and keeping the result in a cache directory of our own.

The directory's name is a hash of every source file here, of Numba's version and of the processor, because Numba itself
only notices a change of the file that holds the outermost function.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba import types
from numba.core import config as numba_config

from .executor import run_thread
from .variant import Variant, VariantType, host_features

_lock = threading.Lock()


def cache_key() -> str:
    """Changes with any source of the kernels, the compiler and the processor."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    names = (numba.__version__, llvmlite.__version__, binding.get_host_cpu_name(), *sorted(host_features()))
    digest.update("\0".join(names).encode())
    return digest.hexdigest()


def compile_kernels(variant: Variant, cache: Path | None) -> str:
    """Make `run_thread` ready for `variant`, from `cache` where it lies there, else by compiling (and storing) it.

    Returns "" or why nothing can be cached.
    """
    signature = types.void(VariantType(variant), *[types.int64] * 4)
    with _lock:
        problem = _use_cache(run_thread, cache) if cache is not None else "no cache directory"
        dispatcher: Any = run_thread
        dispatcher.compile(signature)
    return problem


def is_cached(variant: Variant, cache: Path) -> bool:
    """Whether compiling will probably be quick."""
    return any((cache / cache_key()).rglob("*.nbc"))


def _use_cache(dispatcher: Any, cache: Path) -> str:
    """Have Numba keep what it compiles for `dispatcher` under `cache`."""
    directory = cache / cache_key()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"kernel cache {directory} is not usable: {error.strerror}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"kernel cache {directory} is not writable"
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(directory)
    try:
        dispatcher.enable_caching()
    except RuntimeError as error:
        return f"kernel cache {directory} is not usable: {error}"
    finally:
        numba_config.CACHE_DIR = before
    return ""
