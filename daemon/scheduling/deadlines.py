"""Which sequences have to end by when: a heap that forgets lazily, before half of it is about sequences that ended."""

from __future__ import annotations

import heapq

from ..memory.sequence import Sequence

FEWEST = 64  # entries that are worth looking through


class Deadlines:
    """Times are monotonic seconds. Entries of sequences that ended, or got another deadline, are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._most = FEWEST  # entries; with more, those of sequences that ended are thrown out

    def watch(self, sequence: Sequence) -> None:
        """Note the sequence's deadline, if it has one."""
        if sequence.deadline is not None:
            heapq.heappush(self._heap, (sequence.deadline, sequence.sequence_id, sequence))
            if len(self._heap) > self._most:
                self._heap = [entry for entry in self._heap if not _is_over(entry)]
                heapq.heapify(self._heap)
                self._most = max(FEWEST, 2 * len(self._heap))

    def first(self) -> float | None:
        """The next deadline."""
        while self._heap and _is_over(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has come, each once."""
        due: dict[int, Sequence] = {}
        while (first := self.first()) is not None and first <= now:
            _, sequence_id, sequence = heapq.heappop(self._heap)
            due[sequence_id] = sequence
        return list(due.values())


def _is_over(entry: tuple[float, int, Sequence]) -> bool:
    deadline, _, sequence = entry
    return sequence.finished or sequence.deadline != deadline
