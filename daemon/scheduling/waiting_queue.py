"""Sequences that wait for a place in the step, and the order in which they are looked at.

Order: the most urgent class first (priority, one class more after each `ageing_s` in which an owner waits and nothing
of it runs in that class: so nothing starves, and a flood that is being served does not grow more urgent than others);
within a class the owner with the lowest virtual counter; within an owner whoever is due first. A sequence is due at its
deadline, and one without a deadline a minute after it came, so among those it is first come, first served; a preempted
one came before those that never ran, and stands ahead of them by itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from ..memory.sequence import Sequence

PATIENCE_S = 60.0
"""How long a sequence without a deadline lets those of the same owner pass that have one."""

_BY_TIME = attrgetter("due", "sequence_id")


def due_at(sequence: Sequence, came: float) -> float:
    """When a sequence that came then is due (monotonic seconds)."""
    return came + PATIENCE_S if sequence.deadline is None else sequence.deadline


class WaitingQueue:
    """One line per (priority, uid), each in the order in which its sequences are due."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, int], list[Sequence]] = {}
        self.served_at: dict[tuple[int, int], float] = {}  # when the owner last had something running in the class
        self._of_uid: dict[int, int] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for line in self.lines.values():
            yield from line

    def of_uid(self, uid: int) -> int:
        """How many sequences of `uid` wait."""
        return self._of_uid.get(uid, 0)

    def note_served(self, running: Iterable[Sequence], now: float) -> None:
        """These run now: their owners' lines do not age."""
        known = {key: at for key, at in self.served_at.items() if key in self.lines}
        self.served_at = known | {(sequence.priority, sequence.uid): now for sequence in running}

    def add(self, sequence: Sequence) -> None:
        insort(self.lines.setdefault((sequence.priority, sequence.uid), []), sequence, key=_BY_TIME)
        self._of_uid[sequence.uid] = self.of_uid(sequence.uid) + 1
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        key = (sequence.priority, sequence.uid)
        line = self.lines[key]
        index = bisect_left(line, (sequence.due, sequence.sequence_id), key=_BY_TIME)
        if index == len(line) or line[index] is not sequence:
            raise RuntimeError(f"{sequence!r} is not in the queue")
        del line[index]
        if not line:
            del self.lines[key]
        self._of_uid[sequence.uid] -= 1
        if not self._of_uid[sequence.uid]:
            del self._of_uid[sequence.uid]
        self._length -= 1


class QueueScan:
    """One step's walk over the queue: the best sequence that was not passed over yet.

    `served(uid)` orders owners, the one that had least first; it may change during the walk.
    """

    def __init__(
        self, queue: WaitingQueue, now: float, ageing_s: float, served: Callable[[int], tuple[float, float]]
    ) -> None:
        self._now, self._ageing_s, self._served, self._served_at = now, ageing_s, served, queue.served_at
        self._lines = {key: list(line) for key, line in queue.lines.items()}  # as they are now, whoever comes or goes
        self._index = dict.fromkeys(self._lines, 0)  # sequences passed over at the head of each line

    def aged(self, sequence: Sequence) -> int:
        """Classes that it has won by waiting so far."""
        since = max(sequence.queued_since, self._served_at.get((sequence.priority, sequence.uid), 0.0))
        return int(max(0.0, self._now - since) / self._ageing_s)

    def best(self) -> Sequence | None:
        """The sequence to look at now; None when all were passed over."""
        heads = [line[self._index[key]] for key, line in self._lines.items() if self._index[key] < len(line)]
        return min(heads, key=self._order, default=None)

    def _order(self, sequence: Sequence) -> tuple[int, tuple[float, float], int]:
        return -(sequence.urgency + self.aged(sequence)), self._served(sequence.uid), sequence.sequence_id

    def skip(self, sequence: Sequence) -> None:
        """Pass over this one in this step."""
        self._index[(sequence.priority, sequence.uid)] += 1

    def skip_owner(self, uid: int) -> None:
        """Pass over all sequences of `uid` in this step."""
        for key in self._index:
            if key[1] == uid:
                self._index[key] = len(self._lines[key])
