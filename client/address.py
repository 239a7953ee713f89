"""Where a daemon listens: a Unix socket path, with the lifeline's socket beside it; or a port of another machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .curve import KEY_FILE_NAME, SERVER_KEY_NAME, ClientKeys, client_keys
from .lifeline import LIFELINE_SUFFIX
from .wire.errors import ConnectionLost, InvalidArgument

ENVIRONMENT_NAME = "KVPOOL_ADDRESS"
SYSTEM_SOCKET = Path("/run/kvpool/kvpool.sock")
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
MAX_PATH_BYTES = 107 - len(LIFELINE_SUFFIX)  # sockaddr_un holds 107, and the longer of the two paths must fit


@dataclass(frozen=True, slots=True)
class Address:
    """A daemon's socket. `endpoint` is how ZeroMQ writes it."""

    path: Path

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.path}"

    @property
    def lifeline_path(self) -> Path:
        return self.path.with_name(self.path.name + LIFELINE_SUFFIX)

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """A daemon's port, usually on another machine. `endpoint` is how ZeroMQ writes it."""

    host: str
    port: int
    keys: ClientKeys | None = None

    @property
    def endpoint(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        return self.endpoint


def parse_tcp(text: str) -> tuple[str, int] | None:
    """Host and port of `tcp://HOST:PORT` (an IPv6 host in brackets); None for anything else."""
    match = re.fullmatch(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})", text)
    return (match[1] or match[2], int(match[3])) if match and 0 < int(match[3]) < 65536 else None


def parse_remote(text: str, keys: ClientKeys | None) -> RemoteAddress:
    """`tcp://HOST:PORT`; without keys only on loopback. Raises InvalidArgument saying what to set."""
    parts = parse_tcp(text)
    if parts is None:
        raise InvalidArgument(f"{text!r} cannot be used; write tcp://HOST:PORT", field="address")
    if keys is None and parts[0] not in LOOPBACK_HOSTS:
        raise InvalidArgument(
            f"{text} needs keys: set server_key and key_file, or {SERVER_KEY_NAME} and {KEY_FILE_NAME}",
            field="server_key",
        )
    return RemoteAddress(*parts, keys)


def parse_address(text: str) -> Address:
    """An absolute path, with or without `ipc://`. Raises InvalidArgument saying what to set."""
    if "://" in text and not text.startswith("ipc://"):
        raise InvalidArgument(
            f"{text!r} cannot be used; set an absolute path, ipc:// and one, or tcp://HOST:PORT", field="address"
        )
    path = Path(text.removeprefix("ipc://"))
    if not path.is_absolute():
        raise InvalidArgument(f"{text!r} is not an absolute path", field="address")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise InvalidArgument(f"{path} has more than {MAX_PATH_BYTES} bytes; set a shorter path", field="address")
    return Address(path)


def candidate_addresses(environ: Mapping[str, str]) -> list[Address]:
    """Where a daemon is looked for when nobody says where, in order."""
    runtime_directory = environ.get("XDG_RUNTIME_DIR")
    paths = [Path(runtime_directory) / "kvpool" / "kvpool.sock"] if runtime_directory else []
    return [parse_address(str(path)) for path in (*paths, SYSTEM_SOCKET)]


def resolve_address(
    address: str | None, environ: Mapping[str, str], *, server_key: str | None = None, key_file: str | None = None
) -> Address | RemoteAddress:
    """The address asked for, else `$KVPOOL_ADDRESS`, else the first candidate that exists. Raises ConnectionLost when
    there is none, InvalidArgument for one that cannot be used."""
    text = address or environ.get(ENVIRONMENT_NAME)
    if text and text.startswith("tcp://"):
        return parse_remote(text, client_keys(server_key, key_file, environ))
    if text:
        return parse_address(text)
    candidates = candidate_addresses(environ)
    for candidate in candidates:
        if candidate.path.exists():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise ConnectionLost(
        f"no daemon found at {looked}; start kvpoold (it listens once its model is loaded), or set {ENVIRONMENT_NAME} "
        "to its socket"
    )


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a program said about where its daemon is; None: as the environment says, looked at for every connection."""

    address: str | None = None
    server_key: str | None = None
    key_file: str | None = None

    def resolve(self) -> Address | RemoteAddress:
        """Raises as `resolve_address` does."""
        return resolve_address(self.address, os.environ, server_key=self.server_key, key_file=self.key_file)
