"""Where a daemon listens: a Unix socket path, with the lifeline's socket beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ConnectionLost, InvalidArgument
from .lifeline import LIFELINE_SUFFIX

ENVIRONMENT_NAME = "KVPOOL_ADDRESS"
SYSTEM_SOCKET = Path("/run/kvpool/kvpool.sock")
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


def parse_address(text: str) -> Address:
    """An absolute path, with or without `ipc://`. Raises InvalidArgument saying what to set."""
    if "://" in text and not text.startswith("ipc://"):
        raise InvalidArgument(
            f"{text!r} is not a local socket; set an absolute path, or ipc:// and one", field="address"
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


def resolve_address(address: str | None, environ: Mapping[str, str]) -> Address:
    """The address asked for, else `$KVPOOL_ADDRESS`, else the first candidate that exists. Raises ConnectionLost when
    there is none."""
    text = address or environ.get(ENVIRONMENT_NAME)
    if text:
        return parse_address(text)
    candidates = candidate_addresses(environ)
    for candidate in candidates:
        if candidate.path.exists():
            return candidate
    looked = " and ".join(str(candidate) for candidate in candidates)
    raise ConnectionLost(f"no daemon found at {looked}; start kvpoold, or set {ENVIRONMENT_NAME} to its socket")
