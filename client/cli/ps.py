"""`kvpool ps`: one line per sequence, whose it is, where it stands and why it waits."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..client import Client
from .figures import show_count, show_duration
from .terminal import BOLD, CYAN, DIM, GREEN, PLAIN, RED, UNLIMITED, YELLOW, Column, Span, Terminal, safe, table

STATE_STYLES = {"running": GREEN, "waiting": YELLOW, "preempted": RED, "paused": CYAN}

COLUMNS = (
    Column("ID", right=True),
    Column("REQUEST", share=2, min_width=8),
    Column("USER", share=1),
    Column("COMMAND", share=1),
    Column("STATE"),
    Column("TOKENS", right=True),
    Column("BLOCKS", right=True),
    Column("AGE", right=True),
    Column("WHY", share=2),
)


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("ps", help="sequences and their owners")
    command.add_argument("--json", action="store_true", help="print the rows as JSON")
    command.set_defaults(command=ps)


def ps(options: argparse.Namespace) -> int:
    with Client(options.address, client_name="kvpool ps") as pool:
        rows = pool.ps()
    if options.json:
        print(json.dumps(rows, default=plain))
        return 0
    terminal = Terminal.of(sys.stdout, os.environ, piped_width=UNLIMITED)
    for line in table(COLUMNS, [_cells(row) for row in rows], terminal.width):
        print(terminal.show(line))
    return 0


def _cells(row: dict[str, Any]) -> list[Span]:
    return [
        (str(row.get("sequence_id", "")), BOLD),
        (request_name(row), PLAIN),
        (safe(str(row.get("user", row.get("uid", "")))), PLAIN),
        (command_of(row), PLAIN),
        state_of(row),
        (show_count(row.get("num_tokens", 0)), PLAIN),
        (show_count(row.get("num_blocks", 0)), PLAIN),
        (show_duration(row.get("age_s", 0.0)), PLAIN),
        (safe(str(row.get("wait_reason", ""))), DIM),
    ]


def request_name(row: dict[str, Any]) -> str:
    sample = row.get("sample", 0)
    return safe(str(row.get("request_id", ""))) + (f"#{sample}" if sample else "")


def state_of(row: dict[str, Any]) -> Span:
    state = safe(str(row.get("state", "")))
    return state, STATE_STYLES.get(state, PLAIN)


def command_of(row: dict[str, Any]) -> str:
    """What the client calls itself, else its process's name, with its pid."""
    pid = row.get("pid", 0)
    name = row.get("client_name", "")
    if not name and pid:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            name = "?"
    return safe(f"{name} {pid}") if pid else safe(name)


def plain(value: object) -> object:
    """For JSON: packed arrays as hexadecimal text."""
    return value.hex() if isinstance(value, bytes) else str(value)
