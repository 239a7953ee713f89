"""Who may come from other machines: the file of authorised keys, and whose requests each key's are."""

from __future__ import annotations

import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...client.curve import KeyPair, parse_key, read_key_file
from ...client.wire.errors import InvalidArgument
from ..settings.config import Config
from ..settings.options import ConfigError

NOBODY_UID = 65534
"""Owns what comes over a loopback port without keys: nobody says there who asks."""


@dataclass(frozen=True, slots=True)
class RemoteUser:
    """One authorised key: its name, the user of this machine in whose name it acts, and whether it may administrate."""

    name: str
    uid: int
    gid: int
    key: bytes = b""  # public, Z85
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Keyring:
    """The daemon's own pair (None: it works without keys, on loopback), and who is known by which public key (Z85)."""

    own: KeyPair | None
    users: Mapping[bytes, RemoteUser]


ANYBODY = RemoteUser("", NOBODY_UID, NOBODY_UID)


def load_keyring(config: Config) -> Keyring:
    """Raises ConfigError with the file, the line and what to set."""
    if not config.server_key_file:
        return Keyring(None, {})
    try:
        own = read_key_file(Path(config.server_key_file))
    except InvalidArgument as error:
        raise ConfigError(f"server_key_file: {error.message}") from None
    return Keyring(own, read_authorised_keys(Path(config.authorised_keys)))


def read_authorised_keys(path: Path) -> dict[bytes, RemoteUser]:
    """Lines of `NAME USER PUBLIC-KEY [admin]`; empty lines and lines that begin with # say nothing."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o022:
            raise ConfigError(f"authorised_keys: {path} can be written by others; chmod go-w {path}")
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"authorised_keys: {path}: {error.strerror}; set it to a file that can be read") from None
    users: dict[bytes, RemoteUser] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"authorised_keys: {path}:{number}"
        key = parse_key(words[2]) if len(words) in (3, 4) else None
        if key is None or words[3:] not in ([], ["admin"]):
            raise ConfigError(f"{where}: write NAME USER PUBLIC-KEY, and admin behind it for an administrator")
        name = words[0]
        if key in users or name in {user.name for user in users.values()}:
            raise ConfigError(f"{where}: {name}: the name or the key stands there twice; remove one")
        users[key] = RemoteUser(name, *_user(words[1], where), key, words[3:] == ["admin"])
    return users


def _user(name: str, where: str) -> tuple[int, int]:
    """(uid, gid) of a user's name or number."""
    try:
        found = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        if name.isdecimal() and int(name) < 2**31:
            return int(name), int(name)
        raise ConfigError(f"{where}: there is no user {name!r}; set a name or a uid") from None
    return found.pw_uid, found.pw_gid
