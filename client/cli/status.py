"""`kvpool status`: whether the daemon gets on, and if not why; the requests that do not, each with its reason."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from ..client import Client
from .figures import show_duration
from .ps import plain, request_name, state_of
from .terminal import BOLD, DIM, GREEN, PLAIN, RED, UNLIMITED, Column, Span, Terminal, safe, table

EXIT_HEALTHY, EXIT_UNHEALTHY = 0, 1
ANSWER_TIMEOUT_S = 5.0

COLUMNS = (
    Column("ID", right=True),
    Column("REQUEST", share=2, min_width=8),
    Column("USER", share=1),
    Column("STATE"),
    Column("AGE", right=True),
    Column("WHY", share=4, min_width=16),
)


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser(
        "status", help="whether the daemon gets on, and what does not", description=__doc__
    )
    command.add_argument("--json", action="store_true", help="print it as one JSON object")
    command.set_defaults(command=status)


def status(options: argparse.Namespace) -> int:
    """Exit code 0: healthy; 1: not, or there is no answer."""
    with Client(options.address, timeout_s=ANSWER_TIMEOUT_S, client_name="kvpool status") as pool:
        figures, rows = pool.stats(), [row for row in pool.ps() if row.get("wait_reason")]
    healthy = bool(figures.get("healthy"))
    if options.json:
        report = {"healthy": healthy, "reason": figures.get("health_reason", ""), "stuck": rows, "stats": figures}
        print(json.dumps(report, default=plain))
    else:
        _show(figures, rows, healthy)
    return EXIT_HEALTHY if healthy else EXIT_UNHEALTHY


def _show(figures: dict[str, Any], rows: list[dict[str, Any]], healthy: bool) -> None:
    terminal = Terminal.of(sys.stdout, os.environ, piped_width=UNLIMITED)
    word: Span = ("healthy", GREEN) if healthy else ("unhealthy", RED)
    draining = " (draining)" if figures.get("draining") else ""
    counts = ", ".join(f"{figures.get(f'sequences_{name}', 0)} {name}" for name in ("running", "waiting", "paused"))
    print(terminal.show([word, (f"{draining}: {counts}", PLAIN)]))
    if not healthy:
        print(safe(str(figures.get("health_reason", ""))))
    if rows:
        oldest_first = sorted(rows, key=lambda row: -float(row.get("age_s", 0.0)))
        for line in table(COLUMNS, [_cells(row) for row in oldest_first], terminal.width):
            print(terminal.show(line))


def _cells(row: dict[str, Any]) -> list[Span]:
    return [
        (str(row.get("sequence_id", "")), BOLD),
        (request_name(row), PLAIN),
        (safe(str(row.get("user", row.get("uid", "")))), PLAIN),
        state_of(row),
        (show_duration(row.get("age_s", 0.0)), PLAIN),
        (safe(str(row.get("wait_reason", ""))), DIM),
    ]
