"""Show people how far something long has come: a bar in a terminal, a line per stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_display(title: str) -> Iterator[Callable[[str, float], None]]:
    """A function to call with (what is being done, share of it done, 0 to 1). Writes to standard error."""
    if not sys.stderr.isatty():
        yield _Lines(title).update
        return
    import rich.console
    import rich.progress

    bar = rich.progress.Progress(
        rich.progress.TextColumn("[bold]{task.fields[title]}[/bold] {task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=1.0, title=title)
        yield lambda what, share: bar.update(task, description=what, completed=share)


class _Lines:
    """One line when a stage begins, and nothing while it goes on: logs are not for watching."""

    def __init__(self, title: str) -> None:
        self._title, self._last = title, ""

    def update(self, what: str, share: float) -> None:
        if what != self._last:
            print(f"{self._title}: {what}", file=sys.stderr, flush=True)
        self._last = what
