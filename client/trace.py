"""A recording of the daemon's steps as a file that Perfetto (ui.perfetto.dev) and Chrome (about:tracing) open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LANES = {"loop": 1, "device": 2}
SEQUENCES = 1000
"""The thread ids of sequences are their numbers and this."""


class Recording:
    """Pieces of a recording, put together. `more`: there are some left."""

    def __init__(self) -> None:
        self.more = True
        self._dropped = 0
        self._spans: list[Any] = []

    def add(self, piece: dict[str, Any]) -> None:
        self.more = bool(piece.get("more"))
        self._dropped = int(piece.get("dropped", 0))
        self._spans += piece.get("spans", ())

    def chrome(self) -> dict[str, Any]:
        """The trace event format: complete events (`X`), counters (`C`), and names of the lanes (`M`)."""
        lanes = {span[0] for span in self._spans if isinstance(span[0], int)}
        names = [("loop", LANES["loop"]), ("device", LANES["device"])]
        names += [(f"sequence {number}", SEQUENCES + number) for number in sorted(lanes)]
        return {
            "displayTimeUnit": "ms",
            "otherData": {"dropped_spans": self._dropped},
            "traceEvents": [
                _named("process_name", 0, "kvpoold"),
                *(_named("thread_name", thread_id, name) for name, thread_id in names),
                *_events(self._spans),
            ],
        }


def _named(what: str, thread_id: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread_id, "args": {"name": name}}


def _events(spans: Iterable[Any]) -> Iterable[dict[str, Any]]:
    for lane, name, begin_us, duration_us, args in spans:
        if lane == "counters":
            for figure, value in args.items():
                yield {"ph": "C", "name": figure, "pid": 1, "ts": begin_us, "args": {figure: value}}
        else:
            thread_id = LANES.get(lane) or SEQUENCES + lane
            event = {"ph": "X", "name": name, "pid": 1, "tid": thread_id, "ts": begin_us, "dur": duration_us}
            yield event | ({"args": args} if args else {})
