"""Where snapshots are kept: one folder per user in the daemon's state directory, under a quota.

A file appears under its name whole and on the disk, or not at all: it is written beside its place, synced, and renamed.
Methods run in the background thread, and block.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...client.wire.errors import InvalidArgument, KVPoolError, NotFound, QuotaExceeded
from ..settings.options import show_size
from .snapshot_file import Image, Suitability, pieces, read

SUFFIX = ".safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
UNFINISHED_S = 3600.0
"""A file that was begun so long ago and not renamed belongs to a daemon that was killed."""

DISK_BLOCK_BYTES = 4096


class Stored(NamedTuple):
    """A snapshot in a list."""

    name: str
    size: int  # bytes
    saved_at: float  # seconds since 1970


def check_name(name: str) -> str:
    """The name, if it may be one. Raises InvalidArgument."""
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            "must be 1 to 100 letters, digits, points, underscores and hyphens, and begin with a letter or digit",
            field="name",
        )
    return name


def state_directory(setting: str, environ: Mapping[str, str]) -> Path:
    """The folder of a setting; auto: systemd's state directory, else the user's."""
    if setting != "auto":
        return Path(setting)
    if given := environ.get("STATE_DIRECTORY"):
        return Path(given.partition(":")[0])
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base and base.startswith("/") else Path.home() / ".local" / "state") / "kvpool"


class SnapshotStore:
    """Snapshots of all users. Raises KVPoolError, also for what the file system refuses."""

    def __init__(self, directory: Path, here: Suitability) -> None:
        self._directory = directory / "snapshots"
        self._here = here

    def save(self, uid: int, name: str, image: Image, max_bytes: int) -> int:
        """Store the image, in place of an older one of that name; its size. Raises QuotaExceeded."""
        folder = self._folder(uid)
        with _file_system("written"):
            for private in (self._directory, folder):
                private.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clean(folder)
            parts = list(pieces(image, uid, self._here))
            size = sum(map(len, parts))
            others = sum(_charged(stored.size) for stored in self.stored(uid) if stored.name != name)
            if others + _charged(size) > max_bytes:
                raise QuotaExceeded(
                    f"the snapshot takes {show_size(size)}, uid {uid} stores {show_size(others)} besides, and may "
                    f"store {show_size(max_bytes)} (max_snapshot_bytes)",
                    field="name",
                )
            temporary = folder / f".{secrets.token_hex(8)}"
            try:
                with open(temporary, "xb", opener=_private) as file:
                    for part in parts:
                        file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, folder / (name + SUFFIX))
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(folder)
        return size

    def restore(self, uid: int, name: str) -> Image:
        """What is stored under the name, verified. Raises NotFound, and what `snapshot_file.read` raises."""
        with _file_system("read"):
            try:
                fd = os.open(self._folder(uid) / (name + SUFFIX), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                raise NotFound(f"no snapshot of this user is called {name!r}", field="name") from None
            with open(fd, "rb") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise InvalidArgument("is no file", field="name")
                return read(file, status.st_size, uid, self._here)

    def stored(self, uid: int) -> list[Stored]:
        """The user's snapshots, by name."""
        found = []
        with contextlib.suppress(FileNotFoundError), _file_system("listed"), os.scandir(self._folder(uid)) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX)
                if name != entry.name and NAME.fullmatch(name):
                    status = entry.stat(follow_symlinks=False)
                    found.append(Stored(name, status.st_size, status.st_mtime))
        return sorted(found)

    def discard(self, uid: int, name: str) -> None:
        """Raises NotFound."""
        with _file_system("removed"):
            try:
                os.unlink(self._folder(uid) / (name + SUFFIX))
            except FileNotFoundError:
                raise NotFound(f"no snapshot of this user is called {name!r}", field="name") from None

    def _folder(self, uid: int) -> Path:
        return self._directory / str(uid)

    def _clean(self, folder: Path) -> None:
        """Remove what a daemon that was killed had begun."""
        for path in folder.glob(".*"):
            if path.lstat().st_mtime < time.time() - UNFINISHED_S:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _file_system(done: str) -> Iterator[None]:
    """What the file system refuses, as a typed error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise KVPoolError(f"snapshots cannot be {done}: {where}{error.strerror}; see state_directory") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _charged(size: int) -> int:
    """Bytes on the disk: whole blocks, so that very many very small files are no way round the quota."""
    return -(-size // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
