"""Settings that change nothing, because of others: somebody set them for an effect that they do not have."""

from __future__ import annotations

from collections.abc import Callable

from .config import Config
from .options import options

UNQUANTISED = ("float32", "bfloat16", "float16")

_IDLE: list[tuple[str, Callable[[Config], bool], str]] = [
    ("activations", lambda config: config.device == "cuda", "device is cuda"),
    ("activations", lambda config: config.dtype in UNQUANTISED, "dtype holds weights as floats, not as codes"),
    ("products", lambda config: config.device == "cpu", "device is cpu"),
    ("threads", lambda config: config.device == "cuda", "device is cuda"),
    ("prefix_ttl_s", lambda config: not config.prefix_cache, "prefix_cache is off"),
    ("journal_max_bytes", lambda config: config.journal == "off", "journal is off"),
    ("server_key_file", lambda config: not config.tcp_address, "tcp_address is empty"),
    ("authorised_keys", lambda config: not config.tcp_address, "tcp_address is empty"),
    ("remote_timeout_s", lambda config: not config.tcp_address, "tcp_address is empty"),
]


def idle_settings(config: Config) -> list[str]:
    """A line for each setting that has another value than its default, and no effect beside the others."""
    rows = {row.name: row for row in options(Config)}
    return [
        f"{name} = {rows[name].kind.show(getattr(config, name))} has no effect: {why}"
        for name, idle, why in _IDLE
        if getattr(config, name) != rows[name].default and idle(config)
    ]
