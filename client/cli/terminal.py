"""Text for terminals: lines of styled spans that know their width, with colour only where a person looks at it.

A span's style is a list of SGR parameters (`"1;36"`), kept apart from its text until the line is written, so that
clipping and columns count characters and not escape codes. Nothing but the standard library is needed for it.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

Span = tuple[str, str]
Line = list[Span]

PLAIN, BOLD, DIM = "", "1", "2"
RED, GREEN, YELLOW, CYAN = "31", "32", "33", "36"
ELLIPSIS = "…"
UNLIMITED = 1 << 20
"""A width that nothing exceeds."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """What the other end can show."""

    width: int
    height: int
    colour: bool
    unicode: bool

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str], *, piped_width: int = 80) -> Terminal:
        """Colour on a terminal that has it, unless NO_COLOR is set. `piped_width`: columns of a file or a pipe, unless
        COLUMNS says how many; UNLIMITED for what a program may read, as it must not miss the end of a line."""
        is_terminal = stream.isatty()
        size = shutil.get_terminal_size((80, 24)) if is_terminal else os.terminal_size((piped_width, 24))
        return cls(
            width=int(environ["COLUMNS"]) if environ.get("COLUMNS", "").isdecimal() else size.columns,
            height=size.lines,
            colour=is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb",
            unicode="utf" in (stream.encoding or "").lower(),
        )

    def show(self, line: Line) -> str:
        """The line as text, clipped to the width."""
        parts = []
        for text, style in clip(line, self.width):
            shown = text if self.unicode else text.encode("ascii", "replace").decode()
            parts.append(f"\x1b[{style}m{shown}\x1b[0m" if style and self.colour else shown)
        return "".join(parts).rstrip() if not self.colour else "".join(parts)


def safe(text: str) -> str:
    """Text from somebody else, without what could move a cursor or forge a line."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def width_of(text: str) -> int:
    """Columns that the text takes."""
    if text.isascii():
        return len(text)
    return sum(_cell_width(character) for character in text)


def _cell_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clip(line: Line, width: int) -> Line:
    """The part of a line that fits; an ellipsis says that something is missing."""
    if sum(width_of(text) for text, _ in line) <= width:
        return line
    clipped: Line = []
    left = width - 1
    for text, style in line:
        if width_of(text) > left:
            kept = ""
            for character in text:
                if width_of(kept + character) > left:
                    break
                kept += character
            clipped.append((kept + ELLIPSIS, style))
            break
        clipped.append((text, style))
        left -= width_of(text)
    return clipped


def pad(span: Span, width: int, right: bool = False) -> Span:
    """A span of exactly this width."""
    (text, style), *_ = clip([span], width)
    space = " " * (width - width_of(text))
    return (space + text if right else text + space, style)


@dataclass(frozen=True, slots=True)
class Column:
    """`share` columns divide what the others leave of the width, and clip what does not fit."""

    title: str
    right: bool = False
    share: int = 0
    min_width: int = 0


def table(columns: Sequence[Column], rows: Sequence[Sequence[Span]], width: int, gap: int = 2) -> list[Line]:
    """A heading and the rows, aligned."""
    widths = [
        max([column.min_width, width_of(column.title), *(width_of(row[i][0]) for row in rows)])
        for i, column in enumerate(columns)
    ]
    spare = width - sum(widths) - gap * (len(columns) - 1)
    if spare < 0:
        _shrink(columns, widths, -spare)
    heading = [(column.title, DIM) for column in columns]
    lines: list[Line] = []
    for row in (heading, *rows):
        line: Line = []
        for i, column in enumerate(columns):
            line += [pad(row[i], widths[i], column.right), (" " * gap, PLAIN)]
        lines.append(line[:-1])
    return lines


def _shrink(columns: Sequence[Column], widths: list[int], excess: int) -> None:
    """Take what is too much from the columns that share, the widest first."""
    for _ in range(excess):
        flexible = [i for i, column in enumerate(columns) if column.share and widths[i] > max(column.min_width, 4)]
        if not flexible:
            return
        widest = max(flexible, key=lambda i: widths[i] / columns[i].share)
        widths[widest] -= 1
