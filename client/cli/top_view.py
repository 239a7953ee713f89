"""What `kvpool top` shows: a snapshot of the pool as lines of text.

Every block is a cell in the colour of the sequence that holds it. Without colour a cell is the sequence's letter, upper
case where the block is shared. Of a pool with more blocks than there is room for, every second (third, ...) is shown,
which keeps the proportions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arena.pool_map import CACHED, FREE, USED, PoolMap
from .figures import show_count, show_duration, show_share
from .ps import command_of, request_name, state_of
from .terminal import BOLD, DIM, PLAIN, Column, Line, Span, Terminal, safe, table, width_of

PALETTE = tuple(f"38;5;{code}" for code in (39, 208, 76, 170, 220, 45, 203, 141, 118, 214, 69, 199, 30, 178, 106, 133))
CACHED_STYLE, FREE_STYLE, OTHERS_STYLE = "38;5;66", "38;5;239", "38;5;250"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

WIDE = ("TTFT", "CREDIT", "CACHED", "PRIO")
"""Columns of a wide terminal; elsewhere they are told of the chosen sequence."""

SORTS: dict[str, Callable[[Row], Any]] = {
    "id": lambda row: row.sequence_id,
    "tokens": lambda row: -row.figures.get("num_tokens", 0),
    "blocks": lambda row: -row.figures.get("num_blocks", 0),
    "tok/s": lambda row: -row.tokens_per_s,
    "ttft": lambda row: -(row.figures.get("ttft_s") or 0.0),
    "age": lambda row: -row.figures.get("age_s", 0.0),
    "state": lambda row: (str(row.figures.get("state", "")), row.sequence_id),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence, with what only two snapshots or the map can tell."""

    figures: dict[str, Any]
    tokens_per_s: float
    num_shared: int

    @property
    def sequence_id(self) -> int:
        return int(self.figures.get("sequence_id", 0))

    @property
    def style(self) -> str:
        return PALETTE[self.sequence_id % len(PALETTE)]

    @property
    def letter(self) -> str:
        return LETTERS[self.sequence_id % len(LETTERS)]


@dataclass(slots=True)
class History:
    """Remembers the last snapshot, so that the next can show speeds."""

    _outputs: dict[int, int] = field(default_factory=dict)  # by sequence
    _total: float = 0.0
    _at: float | None = None

    def rows(self, pool: PoolMap, now_s: float) -> tuple[list[Row], float]:
        """(one Row per sequence, tokens per second of all); at the first look, means since each began."""
        elapsed_s = None if self._at is None else max(now_s - self._at, 1e-3)
        rows = [self._row(figures, pool, elapsed_s) for figures in pool.sequences]
        total = float(pool.counters.get("tokens_generated_total", 0))
        if elapsed_s is None:
            speed = sum(row.tokens_per_s for row in rows)
        else:
            speed = max(0.0, total - self._total) / elapsed_s
        self._outputs = {row.sequence_id: int(row.figures.get("num_output_tokens", 0)) for row in rows}
        self._total, self._at = total, now_s
        return rows, speed

    def _row(self, figures: dict[str, Any], pool: PoolMap, elapsed_s: float | None) -> Row:
        outputs = figures.get("num_output_tokens", 0)
        before = self._outputs.get(figures.get("sequence_id", 0), 0)
        if elapsed_s is not None:
            speed = max(0, outputs - before) / elapsed_s
        else:
            speed = outputs / max(figures.get("age_s", 0.0), 1e-3)
        blocks = [block for block in figures.get("blocks", ()) if 0 <= block < pool.num_blocks]
        return Row(figures, speed, int(np.count_nonzero(pool.ref_counts[blocks] > 1)))


@dataclass(slots=True)
class View:
    """How a person has set the display."""

    sort: str = "id"
    selected: int | None = None  # sequence_id
    filter: str = ""  # only sequences in whose line it occurs
    typing: bool = False  # keys go into the filter
    message: str = ""

    def shown(self, rows: list[Row]) -> list[Row]:
        """Those that pass the filter, in order."""
        return sorted((row for row in rows if self.filter.lower() in _searched(row)), key=SORTS[self.sort])


def _searched(row: Row) -> str:
    names = ("user", "state", "wait_reason")
    words = [request_name(row.figures), command_of(row.figures), *(str(row.figures.get(name, "")) for name in names)]
    return " ".join(words).lower()


def draw(pool: PoolMap, rows: list[Row], tokens_per_s: float, view: View, terminal: Terminal) -> list[Line]:
    """The whole display, at most the terminal's height; of sequences that the filter leaves out only the blocks."""
    rows = view.shown(rows)
    head = [_title(pool, terminal.width), _bar(pool, terminal), *_figures(pool, tokens_per_s, terminal.width), []]
    room = max(4, terminal.height - len(head) - 6)
    for_rows = max(3, min(len(rows) + 1, room // 2))
    cells, stride = block_map(pool, rows, terminal, max_lines=max(2, room - for_rows))
    lines = [*head, *cells, legend(stride, terminal), []]
    chosen = next((row for row in rows if row.sequence_id == view.selected), None)
    detail = [[], *_detail(chosen)] if chosen is not None else []
    listing = _listing(rows, view, terminal)
    return [*lines, *listing[: max(3, terminal.height - len(lines) - len(detail) - 1)], *detail]


def _title(pool: PoolMap, width: int) -> Line:
    counters = pool.counters
    left = [("kvpool", BOLD), (f"  {safe(str(counters.get('model', '')))}", PLAIN)]
    clients = counters.get("clients", 0)
    right = f"{clients} client{'' if clients == 1 else 's'}, up {show_duration(counters.get('uptime_s', 0.0))}"
    if counters.get("draining"):
        right = "draining, " + right
    gap = width - sum(width_of(text) for text, _ in left) - len(right)
    return [*left, (" " * max(2, gap), PLAIN), (right, DIM)]


def _bar(pool: PoolMap, terminal: Terminal) -> Line:
    """The pool as one bar, by what its blocks are."""
    total = max(1, pool.num_blocks)
    used, cached = pool.count(USED), pool.count(CACHED)
    label = f"  {show_share(used / total)} used, {show_share(cached / total)} cached"
    width = max(10, terminal.width - width_of(label))
    used_cells = min(width, -(-used * width // total))
    cached_cells = min(width - used_cells, -(-cached * width // total))
    full, half, empty = ("█", "▒", "░") if terminal.unicode else ("#", "+", ".")
    return [
        (full * used_cells, "32"),
        (half * cached_cells, CACHED_STYLE),
        (empty * (width - used_cells - cached_cells), FREE_STYLE),
        (label, PLAIN),
    ]


def _figures(pool: PoolMap, tokens_per_s: float, width: int) -> list[Line]:
    counters = pool.counters
    used = pool.count(USED)
    shared = int(np.count_nonzero(pool.ref_counts > 1))
    pairs = [
        ("tok/s", show_count(tokens_per_s)),
        ("running", show_count(counters.get("sequences_running", 0))),
        ("waiting", show_count(counters.get("sequences_waiting", 0))),
        ("paused", show_count(counters.get("sequences_paused", 0))),
        ("blocks", f"{show_count(used)} of {show_count(pool.num_blocks)} x {pool.block_size}"),
        ("shared", show_count(shared)),
        ("waste", show_share(counters.get("kv_waste_ratio", 0.0))),
        ("step", show_duration(counters.get("step_ms", 0.0) / 1000)),
        ("preempted", show_count(counters.get("preemptions_total", 0))),
    ]
    lines: list[Line] = [[]]
    for name, value in pairs:
        if sum(width_of(text) for text, _ in lines[-1]) + len(name) + len(value) + 3 > width:
            lines.append([])
        lines[-1] += [(name + " ", DIM), (value, BOLD), ("   ", PLAIN)]
    return lines


# ---- the map


def block_map(pool: PoolMap, rows: list[Row], terminal: Terminal, max_lines: int) -> tuple[list[Line], int]:
    """(lines, every how many-th block they show)."""
    holders = _holders(pool, rows)
    stride = max(1, -(-pool.num_blocks // (terminal.width * max_lines)))
    spans = [_cell(pool, block, int(holders[block]), rows, terminal) for block in range(0, pool.num_blocks, stride)]
    lines = [_joined(spans[start : start + terminal.width]) for start in range(0, len(spans), terminal.width)]
    return lines, stride


def _holders(pool: PoolMap, rows: list[Row]) -> NDArray[np.int32]:
    """(num_blocks,) int32: which row holds the block (the first that does), -1: none that the caller may see."""
    holders = np.full(pool.num_blocks, -1, dtype=np.int32)
    for number in range(len(rows) - 1, -1, -1):
        blocks = np.array(rows[number].figures.get("blocks", ()), dtype=np.int64)
        holders[blocks[(blocks >= 0) & (blocks < pool.num_blocks)]] = number
    return holders


def _cell(pool: PoolMap, block: int, holder: int, rows: list[Row], terminal: Terminal) -> Span:
    """One character for a block: what it is, and of which row."""
    letters = not (terminal.colour and terminal.unicode)
    state, shared = pool.states[block], pool.ref_counts[block] > 1
    if state == FREE:
        return ("." if letters else "·", FREE_STYLE)
    if state == CACHED:
        return (":" if letters else "▪", CACHED_STYLE)
    if holder < 0:
        return ("?" if letters else "■", OTHERS_STYLE)
    row = rows[holder]
    if letters:
        return (row.letter.upper() if shared else row.letter, row.style)
    return ("◆" if shared else "■", row.style)


def _joined(spans: list[Span]) -> Line:
    """Neighbours of one style as one span: a tenth of the escape codes."""
    line: Line = []
    for text, style in spans:
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + text, style)
        else:
            line.append((text, style))
    return line


def legend(stride: int, terminal: Terminal) -> Line:
    sampled = f", one block in {stride} shown" if stride > 1 else ""
    if terminal.colour and terminal.unicode:
        return [
            ("■ in use, by sequence   ◆ shared   ", DIM),
            ("▪", CACHED_STYLE),
            (" cached   ", DIM),
            ("·", FREE_STYLE),
            (f" free{sampled}", DIM),
        ]
    return [(f"a-z in use by sequence, A-Z shared, ? of others, : cached, . free{sampled}", DIM)]


# ---- the table


def _listing(rows: list[Row], view: View, terminal: Terminal) -> list[Line]:
    if not rows:
        return [[(f"no sequences with {view.filter!r}" if view.filter else "no sequences", DIM)]]
    wide = terminal.width >= 110
    columns = [
        Column("ID", right=True),
        Column("REQUEST", share=2, min_width=7),
        Column("CLIENT", share=3, min_width=6),
        Column("STATE"),
        Column("TOKENS", right=True),
        Column("BLKS", right=True),
        Column("SHR", right=True),
        Column("TOK/S", right=True),
        Column("AGE", right=True),
        *([Column(name, right=True) for name in WIDE] if wide else []),
        *([Column("USER", share=1)] if wide else []),
        Column("WHY", share=6, min_width=3),
    ]
    return table(columns, [_cells(row, view, terminal, wide) for row in rows], terminal.width, gap=1)


def _ttft(figures: dict[str, Any]) -> str:
    """Time to the first token."""
    ttft_s = figures.get("ttft_s")
    return "" if ttft_s is None else show_duration(ttft_s)


def _credit(figures: dict[str, Any]) -> str:
    """Tokens that may come before the reader reads."""
    credit = figures.get("credit")
    return "" if credit is None else show_count(credit)


def _detail(row: Row) -> list[Line]:
    """All about the chosen sequence that the table has no room for."""
    figures = row.figures
    state, style = state_of(figures)
    why = safe(str(figures.get("wait_reason", "")))
    line: Line = [(f"{row.sequence_id} {request_name(figures)}  ", BOLD), (state, style)]
    line += [(f": {why}" if why else "", PLAIN)]
    more: Line = []
    for name, value in (
        ("of", f"{safe(str(figures.get('user', '')))} ({figures.get('uid', '?')}), {command_of(figures)}"),
        ("first token after", _ttft(figures)),
        ("credit", _credit(figures)),
        ("cached", show_count(figures.get("num_cached_tokens", 0))),
        ("preempted", show_count(figures.get("preemptions", 0))),
    ):
        more += [(f"{name} ", DIM), (f"{value}   ", PLAIN)] if value else []
    return [line, more]


def _cells(row: Row, view: View, terminal: Terminal, wide: bool) -> list[Span]:
    figures = row.figures
    chosen = "7" if row.sequence_id == view.selected else PLAIN
    mark = "■" if terminal.colour and terminal.unicode else row.letter
    extra = [
        (_ttft(figures), chosen),
        (_credit(figures), chosen),
        (show_count(figures.get("num_cached_tokens", 0)), chosen),
        (str(figures.get("priority", 0)), chosen),
        (safe(str(figures.get("user", ""))), chosen),
    ]
    return [
        (f"{mark} {row.sequence_id}", "7" if chosen else row.style),
        (request_name(figures), chosen),
        (command_of(figures), chosen),
        state_of(figures),
        (show_count(figures.get("num_tokens", 0)), chosen),
        (show_count(figures.get("num_blocks", 0)), chosen),
        (show_count(row.num_shared), chosen),
        (show_count(row.tokens_per_s), chosen),
        (show_duration(figures.get("age_s", 0.0)), chosen),
        *(extra if wide else []),
        (safe(str(figures.get("wait_reason", ""))), DIM),
    ]
