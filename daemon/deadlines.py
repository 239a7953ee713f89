"""Which sequences have to end by when: a heap that forgets lazily."""

from __future__ import annotations

import heapq

from .sequence import Sequence


class Deadlines:
    """Times are monotonic seconds. Entries of sequences that ended, or got another deadline, are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def watch(self, sequence: Sequence) -> None:
        """Note the sequence's deadline, if it has one."""
        if sequence.deadline is not None:
            heapq.heappush(self._heap, (sequence.deadline, sequence.sequence_id, sequence))

    def first(self) -> float | None:
        """The next deadline."""
        while self._heap and (self._heap[0][2].finished or self._heap[0][2].deadline != self._heap[0][0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has come, each once."""
        due: dict[int, Sequence] = {}
        while (first := self.first()) is not None and first <= now:
            _, sequence_id, sequence = heapq.heappop(self._heap)
            due[sequence_id] = sequence
        return list(due.values())
