"""Keys for connections between machines: CURVE, as ZeroMQ builds it in. Each side has a pair, and knows the other's
public key. Keys are written as 40 characters of Z85.

A key file holds a public and a secret key, a line each, and is for its owner only; beside it lies the public one alone
in FILE.pub. `kvpool keygen` makes both.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from .wire.errors import InvalidArgument

SERVER_KEY_NAME = "KVPOOL_SERVER_KEY"
KEY_FILE_NAME = "KVPOOL_KEY_FILE"
KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both keys of one side, as Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: its own pair, and the daemon's public key."""

    own: KeyPair
    server: bytes


def parse_key(text: str) -> bytes | None:
    """A public key in Z85; None for anything else."""
    key = text.strip().encode(errors="replace")
    try:
        return key if len(key) == KEY_CHARACTERS and len(z85.decode(key)) == 32 else None
    except (ValueError, KeyError, IndexError, OverflowError):
        return None


def write_key_files(path: Path) -> KeyPair:
    """A new pair in `path` (mode 0600) and its public key in `path`.pub. Raises InvalidArgument if one exists."""
    if not zmq.has("curve"):
        raise InvalidArgument("this pyzmq was built without CURVE; install the wheel from PyPI", field="pyzmq")
    pair = KeyPair(*zmq.curve_keypair())
    public_path = path.with_name(path.name + ".pub")
    lines = {path: (0o600, [pair.public, pair.secret]), public_path: (0o644, [pair.public])}
    for made, (mode, keys) in lines.items():
        try:
            fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except OSError as error:
            raise InvalidArgument(f"{made}: {error.strerror}; give a name that is free", field="file") from None
        with os.fdopen(fd, "wb") as file:
            file.write(b"\n".join(keys) + b"\n")
    return pair


def read_key_file(path: Path) -> KeyPair:
    """Raises InvalidArgument for a file that is no key file, or that others can read."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InvalidArgument(f"{path} can be read by others; chmod 600 {path}", field="key_file")
        keys = [parse_key(line) for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; make one with kvpool keygen", field="key_file") from None
    if len(keys) != 2 or keys[0] is None or keys[1] is None or zmq.curve_public(keys[1]) != keys[0]:
        raise InvalidArgument(f"{path} is no key file; make one with kvpool keygen", field="key_file")
    return KeyPair(keys[0], keys[1])


def read_public_key(text: str) -> bytes:
    """A public key, or the file that holds it. Raises InvalidArgument."""
    key = parse_key(text)
    if key is None:
        try:
            key = parse_key(Path(text).read_text(errors="replace"))
        except (OSError, ValueError):
            key = None
    if key is None:
        raise InvalidArgument(f"{text!r} is neither a public key nor a file that holds one", field="server_key")
    return key


def client_keys(server_key: str | None, key_file: str | None, environ: Mapping[str, str]) -> ClientKeys | None:
    """Keys as they were given, else as `$KVPOOL_SERVER_KEY` and `$KVPOOL_KEY_FILE` say; None: there are none. Raises
    InvalidArgument for one without the other."""
    server_key = server_key or environ.get(SERVER_KEY_NAME)
    key_file = key_file or environ.get(KEY_FILE_NAME)
    if not server_key and not key_file:
        return None
    if not server_key or not key_file:
        missing, name = ("key_file", KEY_FILE_NAME) if server_key else ("server_key", SERVER_KEY_NAME)
        raise InvalidArgument(f"a connection with keys needs both: set {missing}, or {name}", field=missing)
    return ClientKeys(read_key_file(Path(key_file)), read_public_key(server_key))
