"""`kvpool stats`: the daemon's figures; `kvpool version`: who speaks what."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from ... import __version__
from ..client import Client
from ..wire.errors import KVPoolError
from ..wire.messages import PROTOCOL_VERSION
from .figures import show_bytes, show_count, show_duration, show_share
from .ps import plain
from .terminal import BOLD, PLAIN, UNLIMITED, Column, Line, Span, Terminal, safe, table


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("stats", help="figures of the daemon")
    command.add_argument("--json", action="store_true", help="print them as one JSON object")
    command.set_defaults(command=stats)
    commands.add_parser("version", help="versions of client, protocol and daemon").set_defaults(command=version)


def stats(options: argparse.Namespace) -> int:
    with Client(options.address, client_name="kvpool stats") as pool:
        figures = pool.stats()
    if options.json:
        print(json.dumps(figures, default=plain))
        return 0
    terminal = Terminal.of(sys.stdout, os.environ, piped_width=UNLIMITED)
    for line in _lines(figures, terminal.width):
        print(terminal.show(line))
    return 0


def _lines(figures: dict[str, Any], width: int) -> list[Line]:
    """Names and values in two columns, and maps below their names."""
    rows: list[list[Span]] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            rows += [[(f"{name}.{key}", PLAIN), (show_figure(name, item), BOLD)] for key, item in value.items()]
        else:
            rows.append([(name, PLAIN), (show_figure(name, value), BOLD)])
    return table((Column(""), Column("", right=True, share=1)), rows, width)[1:]


def show_figure(name: str, value: object) -> str:
    """A value as its name's unit wants it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return safe(str(value))
    if name.endswith("_ratio"):
        return show_share(value)
    if name.endswith("_ms"):
        return show_duration(value / 1000)
    if name.endswith("_s"):
        return show_duration(value)
    if name.endswith("_bytes"):
        return show_bytes(value)
    return str(value) if name == "epoch" else show_count(value)


def version(options: argparse.Namespace) -> int:
    print(f"kvpool {__version__}, protocol {PROTOCOL_VERSION}")
    try:
        with Client(options.address, timeout_s=3.0, client_name="kvpool version") as pool:
            welcome = pool.connect()
    except KVPoolError as error:
        print(error)
    else:
        print(f"kvpoold {welcome.server}, protocol {welcome.version}, model {welcome.model}, epoch {welcome.epoch}")
    return 0
