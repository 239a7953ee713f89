"""Packed weights kept in a file, so that the next start reads them instead of packing them again.

A file is the weights' memory as it is, then a digest of every CHUNK_BYTES of it, then a digest of the file's name, its
length and those digests. Nothing is believed before its digest agrees: a torn, damaged or foreign file is removed and
made again. The weights are read, not mapped: pages of a file are small ones, which cost every step more than a copy
costs a start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...cpu_kernels.jit import LOADED_NS
from ..host import usable_cpus
from ..host_memory import Bytes

CHUNK_BYTES = 4 << 20
DIGEST_BYTES = 32
SUFFIX, TEMPORARY = ".weights", ".part"
DISK_SHARE = 0.1  # of the file system, that all files together may take
STALE_S = 3600.0  # a temporary file this old belongs to nobody any more

SOURCES = (  # what decides over the packed bytes
    "cpu_kernels/groups.py",
    "cpu_kernels/packing.py",
    "model/host_memory.py",
    "model/cpu/weights.py",
    "model/files/gguf_checkpoint.py",
    "model/files/gguf_file.py",
    "model/files/huggingface.py",
    "model/quantised.py",
    "model/files/safetensors_file.py",
    "model/weights.py",
)


def cache_name(parts: Iterable[str]) -> str:
    """A file name that changes with any of `parts` (model, formats, shapes) and with any of SOURCES.

    "" where a source was edited after this process loaded it: what it packs must not be kept under the new name.
    """
    root, digest = Path(__file__).parents[2], hashlib.blake2b(digest_size=20)
    for source in SOURCES:
        path = root / source
        if path.stat().st_mtime_ns > LOADED_NS:
            return ""
        content = path.read_bytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


class WeightCache:
    """Files of packed weights in one directory, the longest unused removed when they take too much of the disk."""

    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        """`max_bytes`: of all files together; None: a tenth of the file system."""
        self._directory = directory
        self._max_bytes = max_bytes

    def load(self, name: str, memory: Bytes) -> bool:
        """Fill `memory` from the file `name`. False where there is none, or none that can be believed: it is removed,
        and what `memory` holds then is undefined."""
        path = self._directory / (name + SUFFIX)
        try:
            with open(path, "rb", buffering=0) as file:
                whole = _read(file.fileno(), name, memory)
        except OSError:
            return False
        with contextlib.suppress(OSError):
            if whole:
                os.utime(path)  # used now: last to be evicted
            else:
                path.unlink()
        return whole

    def store(self, name: str, memory: Bytes) -> str:
        """Keep `memory` in the file `name`, all of it or nothing. Returns why it could not be kept; "" if it was."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            limit = self._limit()
            if memory.nbytes > min(limit, shutil.disk_usage(self._directory).free // 2):
                return f"{self._directory}: not enough space for {memory.nbytes / 2**20:.0f} MiB"
            self._make_room(limit - memory.nbytes)
            handle, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=self._directory)
            try:
                with os.fdopen(handle, "wb", buffering=0) as file:
                    _write(file.fileno(), name, memory)
                os.replace(temporary, self._directory / (name + SUFFIX))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            return f"{self._directory}: {error.strerror}"
        return ""

    def _limit(self) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        return int(shutil.disk_usage(self._directory).total * DISK_SHARE)

    def _make_room(self, budget: int) -> None:
        """Remove files, the longest unused first, until the rest fit in `budget` bytes; and what crashes left."""
        for path, status in self._files(TEMPORARY):
            if time.time() - status.st_mtime > STALE_S:
                path.unlink(missing_ok=True)
        found = [(status.st_mtime, status.st_size, path) for path, status in self._files(SUFFIX)]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= budget:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _files(self, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._directory.glob("*" + suffix):
            with contextlib.suppress(FileNotFoundError):  # another daemon was faster
                yield path, path.stat()


def _chunks(memory: Bytes) -> list[tuple[int, Bytes]]:
    """(offset, part) of every chunk."""
    return [(start, memory[start : start + CHUNK_BYTES]) for start in range(0, memory.nbytes, CHUNK_BYTES)]


def _digest(*parts: bytes | Bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.data)
    return digest.digest()


def _seal(name: str, size: int, digests: bytes) -> bytes:
    return _digest(name.encode(), size.to_bytes(8, "little"), digests)


def _read(descriptor: int, name: str, memory: Bytes) -> bool:
    """Read chunks on all processors, and say whether every digest agrees."""
    chunks = _chunks(memory)
    tail_bytes = (len(chunks) + 1) * DIGEST_BYTES
    if os.fstat(descriptor).st_size != memory.nbytes + tail_bytes:
        return False
    tail = os.pread(descriptor, tail_bytes, memory.nbytes)
    digests, seal = tail[:-DIGEST_BYTES], tail[-DIGEST_BYTES:]
    if seal != _seal(name, memory.nbytes, digests):
        return False

    def read(number: int) -> bool:
        offset, part = chunks[number]
        if os.preadv(descriptor, [part.data], offset) != part.nbytes:
            return False
        return _digest(part) == digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    with ThreadPoolExecutor(usable_cpus()) as pool:
        return all(pool.map(read, range(len(chunks))))


def _write(descriptor: int, name: str, memory: Bytes) -> None:
    chunks = _chunks(memory)
    digests = b"".join(_digest(part) for _, part in chunks)
    parts: list[bytes | memoryview] = [*(part.data for _, part in chunks), digests, _seal(name, memory.nbytes, digests)]
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
