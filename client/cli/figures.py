"""Numbers as people read and write them."""

from __future__ import annotations

import re

from ..wire.errors import InvalidArgument

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(text: str) -> int:
    """Bytes of `20GiB`, `512MiB`, `1.5G` or `1048576`. Raises InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise InvalidArgument(f"{text!r} is not a size; write 20GiB, 512MiB or a number of bytes", field="size")
    return int(float(match[1]) * _UNITS[match[2]])


def show_count(value: float) -> str:
    """1,234 or, from a hundred thousand, 123k and 1.2M."""
    if value < 100_000:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.5 or unit == "T":
            break
    return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"


def show_bytes(value: float) -> str:
    """1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def show_duration(seconds: float) -> str:
    """850ms, 12.3s, 4m08s, 3h05m, 2d04h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}m{seconds % 60:02.0f}s"
    if seconds < 86400:
        return f"{seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}m"
    return f"{seconds // 86400:.0f}d{seconds % 86400 // 3600:02.0f}h"


def show_share(value: float) -> str:
    """41 %, with a decimal where it would else read as nothing."""
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"
