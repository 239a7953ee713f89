"""One setting: its default, what its text may be, and its help. Tables of these generate flags, files and checks.

A dataclass whose fields are made by `option` is such a table. From the fields alone follow the command line, the
environment names, the TOML keys, the printed configuration and every error, so none of them can tell another story.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any

from ...client.address import parse_tcp


class ConfigError(Exception):
    """A setting that cannot be used. The message says where it stands and what to set instead."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a setting is read and written. `parse` takes text or a TOML value; its ValueError says what to set."""

    metavar: str
    parse: Callable[[object], object]
    show: Callable[[Any], str]  # as a TOML value
    allowed: str  # for people: "1 to 1024", "cpu, cuda or auto"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of a table of settings."""

    name: str
    kind: Kind
    default: object
    help: str
    reloadable: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        return "KVPOOL_" + self.name.upper()


def option(default: object, kind: Kind, help: str, *, reloadable: bool = False) -> Any:
    """A dataclass field that is also a row of its class's table of settings."""
    return field(default=default, metadata={"kind": kind, "help": help, "reloadable": reloadable})


def options(table: Any) -> Iterator[Option]:
    """The rows of a table (a dataclass or an instance of one), in the order in which they are written."""
    for row in fields(table):
        if "kind" in row.metadata:
            yield _option(row)


def _option(row: Field[Any]) -> Option:
    return Option(row.name, row.metadata["kind"], row.default, row.metadata["help"], row.metadata["reloadable"])


def quote(text: str) -> str:
    """`text` as a TOML basic string."""
    return '"' + re.sub(r'[\x00-\x1f"\\\x7f]', lambda match: f"\\u{ord(match[0]):04x}", text) + '"'


def text(metavar: str = "TEXT") -> Kind:
    """Any string without a NUL."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError("set it to a string")
        return value

    return Kind(metavar, parse, quote, "text")


def choice(*names: str) -> Kind:
    """One of a few words."""
    allowed = ", ".join(names[:-1]) + " or " + names[-1]

    def parse(value: object) -> str:
        if value not in names:
            raise ValueError(f"set it to {allowed}")
        return str(value)

    return Kind("|".join(names), parse, quote, allowed)


def _parse_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise ValueError("set it to on or off")
    return value == "on"


SWITCH = Kind("on|off", _parse_switch, lambda value: quote("on" if value else "off"), "on or off")


def whole(minimum: int, maximum: int, *, auto: bool = False) -> Kind:
    """A whole number in a closed range; with `auto` also the word "auto", which reads as None."""
    allowed = f"{minimum} to {maximum}" + (" or auto" if auto else "")

    def parse(value: object) -> int | None:
        if auto and value == "auto":
            return None
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9][0-9_]{0,18}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise ValueError(f"set it to a whole number, {allowed}")
        return value

    return Kind("N|auto" if auto else "N", parse, _show_or_auto(str), allowed)


def number(minimum: float, maximum: float, metavar: str = "X", *, auto: bool = False) -> Kind:
    """A finite number in a closed range; with `auto` also the word "auto", which reads as None."""
    allowed = f"{minimum:g} to {maximum:g}" + (" or auto" if auto else "")

    def parse(value: object) -> float | None:
        if auto and value == "auto":
            return None
        try:
            found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            found = math.nan
        if not minimum <= found <= maximum:
            raise ValueError(f"set it to a number, {allowed}")
        return found

    return Kind(metavar + "|auto" * auto, parse, _show_or_auto(repr), allowed)


_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {_prefix + "iB": 1024**_power, _prefix + "B": 1000**_power, _prefix: 1024**_power}


def parse_size(value: object) -> int:
    """Bytes from a whole number or text such as "2GiB", "1.5 GB" or "512M" (a bare letter is binary)."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    match = (
        re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})\s*", value)
        if isinstance(value, str)
        else None
    )
    unit = next((size for name, size in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise ValueError('set it to a size such as "2GiB", "512MiB" or a whole number of bytes')
    size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size >= 2**63:
        raise ValueError("set it to a size below 8 EiB")
    return size


def show_size(value: int) -> str:
    """Bytes for people: the largest binary unit that leaves at least one whole."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit]
        if value >= scale:
            return f"{value // scale}{unit}" if value % scale == 0 else f"{value / scale:.2f} {unit}"
    return f"{value} B"


def size(*, auto: bool = False) -> Kind:
    """A number of bytes; with `auto` also the word "auto", which reads as None."""

    def parse(value: object) -> int | None:
        if auto and value == "auto":
            return None
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"{error}, or auto" if auto else str(error)) from None

    def show(value: int) -> str:
        text = show_size(value)
        return quote(text) if "." not in text and " " not in text else str(value)

    return Kind("SIZE|auto" if auto else "SIZE", parse, _show_or_auto(show), "a size" + (" or auto" if auto else ""))


def split_loopback(value: str) -> tuple[str, int] | None:
    """Host and port of "127.0.0.1:9464" or "[::1]:9464"; None for anything else."""
    match = re.fullmatch(r"(127\.0\.0\.1|\[::1\]):([0-9]{1,5})", value)
    return (match[1].strip("[]"), int(match[2])) if match and 0 < int(match[2]) < 65536 else None


def _parse_listen(value: object) -> str:
    if isinstance(value, str) and "\0" not in value and (not value or value.startswith("/") or split_loopback(value)):
        return value
    raise ValueError('set it to the path of a Unix socket, to a loopback port such as "127.0.0.1:9464", or to ""')


LISTEN = Kind("PATH|HOST:PORT", _parse_listen, quote, "the path of a Unix socket, or 127.0.0.1:PORT, or empty")


def _parse_tcp(value: object) -> str:
    if value == "" or (isinstance(value, str) and parse_tcp(value)):
        return str(value)
    raise ValueError('set it to tcp://HOST:PORT, such as "tcp://192.0.2.7:9400", or to ""')


TCP = Kind("tcp://HOST:PORT", _parse_tcp, quote, "tcp://HOST:PORT, or empty")


def _parse_mode(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"(0o)?[0-7]{3,4}", value):
        value = int(value.removeprefix("0o"), 8)
    if not isinstance(value, int) or isinstance(value, bool) or not 0o600 <= value <= 0o666 or value & 0o111:
        raise ValueError('set it to an octal file mode in quotes, from "0600" to "0666"')
    return value


MODE = Kind("MODE", _parse_mode, lambda value: quote(f"{value:04o}"), "0600 to 0666")


def _show_or_auto(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: quote("auto") if value is None else show(value)
