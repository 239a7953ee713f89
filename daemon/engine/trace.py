"""What the loop and the device did when, for as long as somebody wants to know: a bounded list of spans.

Off, a call costs a look at one attribute. On, the newest spans stay: what is older is dropped and counted.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import StepPlan

MAX_SPANS = 100_000
LOOP, DEVICE, COUNTERS = "loop", "device", "counters"


class Span(NamedTuple):
    """`lane`: the loop's, the device's, a sequence's (its number), or figures at one moment (`args`)."""

    lane: str | int
    name: str
    begin_us: int  # monotonic
    duration_us: int
    args: dict[str, Any]


class Trace:
    """Spans of the last recording."""

    def __init__(self) -> None:
        self.on = False
        self.dropped = 0
        self._number = 0
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._mark = self._launched = 0.0

    def start(self) -> int:
        """Record from now on; what was recorded before is gone. The recording's number."""
        self._spans.clear()
        self.dropped, self.on = 0, True
        self._mark = self._launched = time.monotonic()
        self._number += 1
        return self._number

    def stop(self, number: int, *, forget: bool = False) -> None:
        """End a recording, unless another one has begun meanwhile; `forget`: nobody has come for it."""
        if number == self._number:
            self.on = False
            if forget:
                self._spans.clear()

    def take(self, count: int) -> list[Span]:
        """The oldest spans, which are forgotten here."""
        return [self._spans.popleft() for _ in range(min(count, len(self._spans)))]

    def __len__(self) -> int:
        return len(self._spans)

    def stage(self, name: str) -> None:
        """A stage of the loop ends now; it began when the last one ended."""
        if not self.on:
            return
        begin, self._mark = self._mark, time.monotonic()
        self._add(LOOP, name, begin, self._mark)

    def launched(self) -> None:
        """The device has a step."""
        if self.on:
            self._launched = time.monotonic()

    def collected(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """The device is done with `plan`, which is still as it was scheduled."""
        if not self.on:
            return
        begin, end = self._launched, time.monotonic()
        decodes = sum(chunk.num_tokens == 1 and chunk.samples for chunk in plan.chunks)
        sizes = {"sequences": len(plan.chunks), "decodes": decodes, "rows": plan.num_tokens}
        moved = {"copies": len(plan.copies), "swapped_out": len(plan.swap_out), "swapped_in": len(plan.swap_in)}
        self._add(DEVICE, f"step of {plan.num_tokens}", begin, end, sizes | moved)
        for chunk in plan.chunks:
            name = "decode" if chunk.num_tokens == 1 and chunk.samples else f"prompt {chunk.num_tokens}"
            about = {"uid": chunk.sequence.uid, "from": chunk.start, "tokens": chunk.num_tokens}
            self._add(chunk.sequence.sequence_id, name, begin, end, about)
        for sequence in plan.preempted:
            self._add(sequence.sequence_id, "preempted", begin, begin, {"uid": sequence.uid})
        pool, roster = scheduler.pool, scheduler.roster
        figures = {"blocks used": pool.num_used, "blocks cached": pool.num_cached}
        figures |= {"running": len(roster.running), "waiting": roster.num_waiting}
        self._add(COUNTERS, "pool", end, end, figures)

    def _add(self, lane: str | int, name: str, begin: float, end: float, args: dict[str, Any] | None = None) -> None:
        self.dropped += len(self._spans) == MAX_SPANS
        self._spans.append(Span(lane, name, int(1e6 * begin), int(1e6 * (end - begin)), args or {}))
