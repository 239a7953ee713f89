"""`kvpool top`: the pool, live. Keys: q leaves, s sorts otherwise, / filters by what is typed then (enter keeps it,
escape drops it), up and down (or k and j) choose, c cancels."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Any

from ..arena.pool_map import PoolMap
from ..client import Client
from ..wire.errors import KVPoolError
from .live_map import LiveMap
from .terminal import BOLD, DIM, PLAIN, Line, Terminal
from .top_view import SORTS, History, Row, View, draw

KEYS = "q quit   s sort   / filter   ↑↓ choose   c cancel"
MAX_FILTER = 40
ARROWS = {"\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down"}
ENTER, ESCAPE, BACKSPACE = ("\r", "\n"), "\x1b", ("\x7f", "\b")
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, ERASE_LINE, ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("top", help="live map of the pool")
    command.add_argument("--once", action="store_true", help="print one picture and end")
    command.add_argument("--json", action="store_true", help="print snapshots as JSON, one a line")
    command.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between pictures")
    command.add_argument("--sort", choices=tuple(SORTS), default="id", help="order of the sequences")
    command.set_defaults(command=top)


def top(options: argparse.Namespace) -> int:
    view = View(sort=options.sort)
    on_screen = not options.once and not options.json and sys.stdout.isatty() and sys.stdin.isatty()
    with Client(options.address, client_name="kvpool top") as pool:
        read = pool.pool_map if options.once else LiveMap(pool).read
        if on_screen:
            with _raw_screen() as woken:
                _watch(pool, read, view, max(0.1, options.interval), woken)
            return 0
        while True:
            snapshot = read()
            if options.json:
                print(json.dumps(as_json(snapshot)), flush=True)
            else:
                _print_once(snapshot, view)
            if options.once or not options.json:
                return 0
            time.sleep(max(0.1, options.interval))


def _print_once(snapshot: PoolMap, view: View) -> None:
    terminal = Terminal.of(sys.stdout, os.environ)
    rows, speed = History().rows(snapshot, 0.0)
    tall = Terminal(terminal.width, max(terminal.height, 20 + len(rows)), terminal.colour, terminal.unicode)
    for line in draw(snapshot, rows, speed, view, tall):
        print(terminal.show(line))


def as_json(snapshot: PoolMap) -> dict[str, Any]:
    """A snapshot as plain data, every block included."""
    return {
        "block_size": snapshot.block_size,
        "num_blocks": snapshot.num_blocks,
        "counters": snapshot.counters,
        "sequences": snapshot.sequences,
        "states": snapshot.states.tolist(),
        "owners": snapshot.owners.tolist(),
        "ref_counts": snapshot.ref_counts.tolist(),
    }


def _watch(pool: Client, read: Callable[[], PoolMap], view: View, interval_s: float, woken: int) -> None:
    history = History()
    while True:
        snapshot = read()
        rows, speed = history.rows(snapshot, time.monotonic())
        until = time.monotonic() + interval_s
        while (left_s := until - time.monotonic()) > 0:
            _show(draw(snapshot, rows, speed, view, _terminal()), view)
            key = _key(left_s, woken)
            if view.typing:
                _type(key, view)
            elif key in ("q", "Q", "\x03", ESCAPE):
                return
            else:
                _act(key, view, rows, pool)


def _terminal() -> Terminal:
    """The screen as it is now (people change its size), less the line of keys."""
    whole = Terminal.of(sys.stdout, os.environ)
    return Terminal(whole.width, whole.height - 1, whole.colour, whole.unicode)


def _show(lines: list[Line], view: View) -> None:
    terminal = _terminal()
    lines = lines[: terminal.height] + [[]] * (terminal.height - len(lines))
    if view.typing:
        footer: Line = [("filter: ", BOLD), (view.filter + ("▏" if terminal.unicode else "_"), PLAIN)]
    else:
        kept = f", with {view.filter!r}" if view.filter else ""
        footer = [(f"{KEYS}   by {view.sort}{kept}", DIM), (f"   {view.message}" if view.message else "", PLAIN)]
    text = f"{ERASE_LINE}\r\n".join(terminal.show(line) for line in [*lines, footer])
    sys.stdout.write(f"{HOME}{text}{ERASE_LINE}{ERASE_BELOW}")
    sys.stdout.flush()


def _type(keys: str, view: View) -> None:
    """Keys that belong to the filter."""
    if keys in ENTER or keys == ESCAPE:
        view.typing = False
        view.filter = "" if keys == ESCAPE else view.filter
    elif keys in BACKSPACE:
        view.filter = view.filter[:-1]
    elif keys not in ARROWS.values():
        view.filter = (view.filter + keys)[:MAX_FILTER]


def _act(key: str, view: View, rows: list[Row], pool: Client) -> None:
    if key in ("s", "S"):
        names = list(SORTS)
        view.sort = names[(names.index(view.sort) + 1) % len(names)]
    elif key == "/":
        view.typing, view.filter, view.message = True, "", ""
    elif key in ("j", "k", "down", "up"):
        view.selected = _neighbour(view, rows, 1 if key in ("j", "down") else -1)
    elif key in ("c", "C") and view.selected is not None:
        try:
            pool.cancel(str(view.selected))
            view.message = f"cancelled {view.selected}"
        except KVPoolError as error:
            view.message = str(error)


def _neighbour(view: View, rows: list[Row], step: int) -> int | None:
    """The sequence below or above the chosen one, as they are shown."""
    order = [row.sequence_id for row in view.shown(rows)]
    if not order:
        return None
    if view.selected not in order:
        return order[0 if step > 0 else -1]
    return order[(order.index(view.selected) + step) % len(order)]


def _key(limit_s: float, woken: int) -> str:
    """The key that is pressed within the limit, or nothing; arrows by name, and text that came at once as a whole. A
    signal ends the wait through `woken`, also one that came just before it."""
    ready, _, _ = select.select([sys.stdin, woken], [], [], limit_s)
    if sys.stdin not in ready:
        return ""
    data = os.read(sys.stdin.fileno(), 16).decode(errors="replace") or "q"  # nobody is there any more
    return ARROWS.get(data, data if data.isprintable() else data[:1])


@contextlib.contextmanager
def _raw_screen() -> Iterator[int]:
    """A screen of our own, and keys as they are pressed; afterwards the terminal is as it was, whatever happens. The
    descriptor that it gives is readable once a signal has come."""
    before = termios.tcgetattr(sys.stdin)
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(ENTER_SCREEN)
        yield woken
    finally:
        sys.stdout.write(LEAVE_SCREEN)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(-1)
        os.close(woken)
        os.close(waker)
