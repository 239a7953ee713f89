"""Compiled kernels, kept in memory and, where a folder is given, on disk: seconds to compile, milliseconds to read.

A file's name is a digest of this package's sources, of the compilers' versions and of what was asked for, so a file is
either right or never looked at.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, cast

from .compiler import Kernel

Parameters = ParamSpec("Parameters")
_folders: list[Path] = []


def use_folder(folder: Path | None) -> str:
    """Keep compiled kernels in `folder` (created with mode 0700) from now on; None: in memory only.

    Returns "", or why the folder cannot be used: then kernels stay in memory, and the next start compiles them again.
    """
    _folders.clear()
    if folder is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            return f"{folder} cannot be used: {error.strerror}"
        _folders.append(folder)
    return ""


def kernel_factory(factory: Callable[Parameters, Kernel]) -> Callable[Parameters, Kernel]:
    """Compile each kernel once. Arguments must be hashable values whose `repr` tells them apart."""

    @functools.cache
    def compiled(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Kernel:
        if not _folders:
            return factory(*args, **kwargs)
        wanted = f"{factory.__module__}.{factory.__qualname__} {args!r} {sorted(kwargs.items())!r}"
        path = _folders[0] / (hashlib.sha256(f"{_fingerprint()} {wanted}".encode()).hexdigest() + ".json")
        return _read(path) or _write(path, factory(*args, **kwargs))

    return cast(Callable[Parameters, Kernel], functools.wraps(factory)(compiled))


@functools.cache
def _fingerprint() -> str:
    """A digest of everything that decides what a factory's arguments become."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for distribution in ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm"):
        try:
            digest.update(importlib.metadata.version(distribution).encode())
        except importlib.metadata.PackageNotFoundError:  # a system-wide CUDA toolkit
            digest.update(b"none")
    return digest.hexdigest()


def _read(path: Path) -> Kernel | None:
    try:
        fields = json.loads(path.read_text())
        fields["arguments"] = tuple((name, kind) for name, kind in fields["arguments"])
        return Kernel(**fields)
    except (OSError, ValueError, TypeError, KeyError):  # missing, or damaged: compile again
        return None


def _write(path: Path, kernel: Kernel) -> Kernel:
    """Best effort: a folder that cannot be written costs time at the next start, nothing else."""
    fields = {name: getattr(kernel, name) for name in Kernel.__slots__}
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(fields, file)
        Path(temporary).replace(path)
    except OSError:
        pass
    return kernel
