"""The journal as a file: frames that are whole or not there, appended with one write, rewritten by rename.

    file    MAGIC, then frames; the payload of the first is the header
    frame   uint32 length of the payload, uint32 CRC-32 of length and payload, payload     (little-endian)

What a write() has taken survives the end of the process however it comes, SIGKILL included, because it lies in the
kernel. It does not survive the end of the kernel unless `sync` asks for fdatasync before anything is answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import Struct
from typing import BinaryIO

log = logging.getLogger(__name__)

MAGIC = b"kvpool journal 2\n"
FRAME = Struct("<II")
TEMPORARY_SUFFIX = ".new"
MODE = 0o600  # prompts and answers of everybody


def frame(payload: bytes | bytearray) -> bytes:
    """A payload (at least one byte) with its length and checksum before it."""
    length = len(payload).to_bytes(4, "little")
    return FRAME.pack(len(payload), zlib.crc32(payload, zlib.crc32(length))) + payload


def read_frames(file: BinaryIO) -> Iterator[bytes]:
    """Payloads from the start of a file, up to the first that is not whole and right; what follows it is lost, and
    the log says so."""
    size = os.fstat(file.fileno()).st_size
    end = len(MAGIC)
    if file.read(end) == MAGIC:
        while (payload := _read_frame(file, size - end)) is not None:
            yield payload
            end += FRAME.size + len(payload)
    if end < size:
        log.warning("the journal is torn or damaged at byte %d of %d; what follows is lost", end, size)


def _read_frame(file: BinaryIO, left: int) -> bytes | None:
    head = file.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    length, checksum = FRAME.unpack(head)
    if not 0 < length <= left - FRAME.size:
        return None
    payload = file.read(length)
    return payload if zlib.crc32(payload, zlib.crc32(head[:4])) == checksum else None


def open_existing(path: Path) -> BinaryIO | None:
    """The journal that an earlier daemon left, for reading; None if there is none. Raises OSError if it is not a
    regular file of our own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    file = os.fdopen(fd, "rb")
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        file.close()
        raise OSError(f"{path} is not a regular file of uid {os.geteuid()}")
    return file


class JournalFile:
    """The end of a journal. Every method may raise OSError; then what was there before is still there."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path = path
        self.size = 0  # bytes that are whole frames
        self._sync = sync
        self._fd = -1

    def rewrite(self, payloads: Iterable[bytes | bytearray]) -> None:
        """Replace the journal at once by one of these payloads, the header first."""
        temporary = self.path.with_name(self.path.name + TEMPORARY_SUFFIX)
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, MODE)
        try:
            size = _write(fd, MAGIC)
            for payload in payloads:
                size += _write(fd, frame(payload))
            if self._sync:
                os.fdatasync(fd)
            os.replace(temporary, self.path)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._fd, self.size = fd, size
        if self._sync:
            _sync_directory(self.path.parent)

    def append(self, payload: bytes | bytearray) -> None:
        """Add one frame."""
        try:
            written = _write(self._fd, frame(payload))
            if self._sync:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)  # half a frame would hide all that follow
            raise
        self.size += written

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write(fd: int, data: bytes) -> int:
    """Write all of it; usually one system call."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])
    return written


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
