"""All sequences that are alive, and the one place where each stands: queued, running, paused, or following another."""

from __future__ import annotations

from collections import Counter

from ..memory.sequence import Sequence, SequenceState
from .fairness import VirtualCounters
from .waiting_queue import WaitingQueue

QUEUED = "queued"  # why a sequence waits that no step was planned with yet


class Roster:
    """Moves sequences between places; every move keeps the counts per owner and the fairness counters right."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.queue = WaitingQueue()
        self.counters = VirtualCounters()
        self.num_following = 0
        self._alive: Counter[int] = Counter()  # by uid, as the next two
        self._running: Counter[int] = Counter()
        self._following: Counter[int] = Counter()
        self._next_id = 1

    # Counts

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + self.num_following

    @property
    def num_paused(self) -> int:
        return len(self.sequences) - len(self.running) - self.num_waiting

    def alive_of(self, uid: int) -> int:
        return self._alive[uid]

    def running_of(self, uid: int) -> int:
        return self._running[uid]

    def waiting_of(self, uid: int) -> int:
        return self.queue.of_uid(uid) + self._following[uid]

    # Moves

    def register(self, sequence: Sequence) -> None:
        """Give a new sequence its id; it stands nowhere yet, which is to say it is paused."""
        if sequence.sequence_id != -1:
            raise ValueError(f"{sequence!r} was added before")
        sequence.sequence_id = self._next_id
        self._next_id += 1
        self.sequences[sequence.sequence_id] = sequence
        self._alive[sequence.uid] += 1
        sequence.state = SequenceState.PAUSED

    def to_queue(self, sequence: Sequence, reason: str, now: float, state: SequenceState) -> None:
        self._leave(sequence)
        self.queue.add(sequence)
        self.counters.enter(sequence.uid)
        sequence.state, sequence.wait_reason, sequence.queued_since = state, reason, now

    def to_running(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.running.append(sequence)
        self._running[sequence.uid] += 1
        self.counters.enter(sequence.uid)
        sequence.state, sequence.wait_reason = SequenceState.RUNNING, ""

    def to_paused(self, sequence: Sequence, reason: str) -> None:
        self._leave(sequence)
        sequence.state, sequence.wait_reason = SequenceState.PAUSED, reason

    def to_following(self, sequence: Sequence, leader: Sequence) -> None:
        """Wait until the leader of its group has computed the prompt."""
        self._leave(sequence)
        leader.followers.append(sequence)
        sequence.leader = leader
        self.num_following += 1
        self._following[sequence.uid] += 1
        sequence.state, sequence.wait_reason = (
            SequenceState.WAITING,
            f"sequence {leader.sequence_id} computes its prompt",
        )

    def remove(self, sequence: Sequence, finish_reason: str) -> None:
        """The sequence is over."""
        self._leave(sequence)
        del self.sequences[sequence.sequence_id]
        self._alive[sequence.uid] -= 1
        sequence.state, sequence.finish_reason, sequence.wait_reason = SequenceState.FINISHED, finish_reason, ""

    def _leave(self, sequence: Sequence) -> None:
        """Take it from where it stands; it is paused until it stands somewhere else."""
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
            self.num_following -= 1
            self._following[sequence.uid] -= 1
        elif sequence.queued:
            self.queue.remove(sequence)
            self.counters.leave(sequence.uid)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._running[sequence.uid] -= 1
            self.counters.leave(sequence.uid)
        sequence.state = SequenceState.PAUSED

    def check_invariants(self) -> None:
        """Raise RuntimeError if a sequence stands nowhere, twice, or a count is wrong."""
        queued = list(self.queue)
        following = [follower for leader in self.sequences.values() for follower in leader.followers]
        placed = Counter(id(sequence) for sequence in [*queued, *self.running, *following])
        if any(count > 1 for count in placed.values()):
            raise RuntimeError("a sequence stands in two places")
        for sequence in self.sequences.values():
            if (id(sequence) in placed) == (sequence.state is SequenceState.PAUSED) or sequence.finished:
                raise RuntimeError(f"{sequence!r} does not stand where its state says")
        if len(queued) != len(self.queue) or len(following) != self.num_following:
            raise RuntimeError("the counts of waiting sequences are wrong")
        for count, members in (
            (self._alive, list(self.sequences.values())),
            (self._running, self.running),
            (self._following, following),
            (Counter(self.counters.active), [*queued, *self.running]),
        ):
            if +count != Counter(sequence.uid for sequence in members):
                raise RuntimeError(f"the counts by uid are wrong: {count}")
