"""Who may be in the pool: free blocks promised and reclaimed, owners kept within their limits, victims chosen.

A sequence is admitted when blocks for all its known tokens are free. Those it has not taken yet are promised to it, so
an admitted sequence always reaches its next token. That is what makes it safe not to preempt a sequence again before
it made progress: the time it is protected is bounded.

When more is needed, victims give way in this order: paused ones, then queued ones that still hold blocks, then running
ones that the needy one outranks; the least urgent first, then those of the owner furthest over its fair share, then the
one that loses the least work per block freed. The first in rank among the running ones outranks all others, so it can
always go on, and everything that was admitted ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from ..memory.block_pool import NULL_BLOCK
from ..memory.block_tables import BlockTables
from ..memory.host_pool import HostPool, PreemptionCosts
from ..memory.pins import Pins
from ..memory.sequence import Sequence, SequenceState
from .limits import SchedulerLimits
from .roster import Roster
from .step_plan import StepPlan

NO_SLOT = -1
"""Stands in `host_slots` for a block that had left the sliding window."""


class Scope(Enum):
    """Whom a refusal concerns: who need not be looked at any more in this step."""

    SEQUENCE = "sequence"
    OWNER = "owner"
    ALL = "all"


class Refusal(NamedTuple):
    """Not now, and why, for people."""

    reason: str
    scope: Scope


class Residency:
    """Decides about the pool's memory for the scheduler, which decides about the step's rows."""

    def __init__(
        self,
        tables: BlockTables,
        roster: Roster,
        pins: Pins,
        host: HostPool,
        costs: PreemptionCosts,
        limits: SchedulerLimits,
        works_ahead: bool = False,
    ) -> None:
        self.tables = tables
        self.pool = tables.pool
        self.roster = roster
        self.pins = pins
        self.host = host
        self.costs = costs
        self.limits = limits
        self.promised = 0  # free blocks that belong to admitted sequences
        self.deadlocks_broken = 0
        self.works_ahead = works_ahead  # see `Backend`
        self.brought_back: set[Sequence] = set()  # in the step that is being planned
        self._promised_of: Counter[int] = Counter()  # by uid
        self._usage: dict[int, float] = {}  # by uid; see `begin`
        self._shares: dict[int, float] = {}
        self._greedy: set[int] = set()  # owners beyond their fair share
        self._plan = StepPlan()
        self._now = 0.0
        self.slots_in_use: list[int] = []  # read by the step in flight

    def begin(self, plan: StepPlan, now: float) -> None:
        """A step is planned from here on: note who uses how much of its fair share (1.0: just that)."""
        self._plan, self._now = plan, now
        self.brought_back = set()
        limits = self.limits
        active = self.roster.counters.active
        total = sum(limits.of(uid).weight for uid in active)
        self._shares = {uid: limits.of(uid).weight / total for uid in active}
        self._usage = {uid: self._usage_with(uid, 0, 0) for uid in active} if len(active) > 1 else {}
        self._greedy = {uid for uid, usage in self._usage.items() if usage > 1.0}

    def _usage_with(self, uid: int, blocks: int, sequences: int) -> float:
        """How much of its fair share `uid` would use with so many more blocks and running sequences."""
        of_pool = (self.pool.charged(uid) + blocks) / self.pool.num_blocks
        of_step = (self.roster.running_of(uid) + sequences) / self.limits.max_running
        return max(of_pool, of_step) / self._shares[uid]

    def rank(self, sequence: Sequence) -> tuple[int, bool, int]:
        """Order among the running ones, best first: class, owner within its share, age."""
        return -sequence.priority - sequence.boost, sequence.uid in self._greedy, sequence.sequence_id

    def served(self, uid: int) -> tuple[float, float]:
        """Order among owners, who had least first: tokens by weight, then use of the fair share."""
        return self.roster.counters.value(uid), self._usage.get(uid, 0.0)

    # Free blocks and promises

    def available(self, sequence: Sequence) -> int:
        """Free blocks that this sequence may take: all that are not promised to others."""
        return self.pool.num_free - self.promised + sequence.promised_blocks

    def promise(self, sequence: Sequence) -> None:
        """Set aside what the sequence still needs for its goal; nothing if it does not run."""
        running = sequence.state is SequenceState.RUNNING
        wanted = self.tables.promise(sequence) if running and sequence.num_computed_tokens < sequence.goal_tokens else 0
        self.promised += wanted - sequence.promised_blocks
        self._promised_of[sequence.uid] += wanted - sequence.promised_blocks
        sequence.promised_blocks = wanted

    def fit(self, sequence: Sequence, num_tokens: int) -> int:
        """The largest n <= num_tokens such that n more tokens can be computed without taking from anybody."""
        table, start = sequence.block_table, sequence.num_computed_tokens
        room = self.room(sequence)
        if self.tables.blocks_short(sequence, start + num_tokens) <= room:
            return num_tokens
        shared_tail = self.tables.blocks_short(sequence, start)
        capacity = (len(table) + room - shared_tail) * self.pool.block_size
        return max(0, min(num_tokens, capacity - start)) if room >= shared_tail else 0

    def room(self, sequence: Sequence) -> int:
        """Blocks that the sequence may take without anybody giving way."""
        return min(self.available(sequence), self._quota_room(sequence))

    def _quota_room(self, sequence: Sequence) -> int:
        """Blocks that its owner's limit still allows this sequence to take."""
        limit = self.limits.of(sequence.uid).max_blocks
        if limit is None:
            return self.pool.num_blocks
        promised = self._promised_of[sequence.uid] - sequence.promised_blocks
        room = limit - self.pool.charged(sequence.uid) - promised
        if room <= 0 and not self._others_with_blocks(sequence):
            return self.pool.num_blocks  # the limit was lowered: what was accepted may still run, one at a time
        return room

    def _others_with_blocks(self, sequence: Sequence) -> list[Sequence]:
        return [
            other
            for other in self.roster.sequences.values()
            if other.uid == sequence.uid and other is not sequence and other.block_table
        ]

    def _all_others(self, sequence: Sequence, outranks: Callable[[Sequence], bool]) -> list[Sequence] | None:
        """Every other sequence of the same owner that holds blocks, if all of them may give way."""
        victims = self._candidates(sequence, outranks, sequence.uid)
        return victims if all(other in victims for other in self._others_with_blocks(sequence)) else None

    # Making room

    def make_room(
        self, sequence: Sequence, need: int, outranks: Callable[[Sequence], bool], *, headroom: int = 0
    ) -> Refusal | None:
        """Preempt others until the sequence may take `need` blocks, with `headroom` left in the pool.

        None when it may; else why not, and then nothing was done.
        """
        room = self._quota_room(sequence)
        limit_short, pool_short = need - room, need + headroom - self.available(sequence)
        own: list[Sequence] = []
        if limit_short > 0:
            found = self._victims(sequence, limit_short, outranks, uid=sequence.uid)
            if found is None:
                found = self._all_others(sequence, outranks)
            if found is None:
                limit = self.limits.of(sequence.uid).max_blocks
                return Refusal(f"uid {sequence.uid} would hold more than its max_blocks {limit}", Scope.OWNER)
            own = found
        if pool_short > 0:
            found = self._victims(sequence, pool_short, outranks)
            if found is None:
                spare = max(0, self.available(sequence) - headroom)
                return Refusal(f"needs {need} blocks, {spare} can be had", Scope.ALL)
            own += [victim for victim in found if victim not in own]
        for victim in own:
            self.preempt(victim)
        return None

    def _victims(
        self, needy: Sequence, short: int, outranks: Callable[[Sequence], bool], uid: int | None = None
    ) -> list[Sequence] | None:
        """Who gives way so that `short` blocks become free (of `uid`'s limit, if given); None if all are not enough."""
        held: Counter[int] = Counter()
        chosen: list[Sequence] = []
        for victim in sorted(self._candidates(needy, outranks, uid), key=self._victim_order):
            if short <= 0:
                break
            chosen.append(victim)
            short -= victim.promised_blocks
            for block in victim.live_blocks():
                held[block] += 1
                references = self.pool.ref_count[block] if uid is None else self.pool.references(block, uid)
                short -= held[block] == references
        return chosen if short <= 0 else None

    def _candidates(self, needy: Sequence, outranks: Callable[[Sequence], bool], uid: int | None) -> list[Sequence]:
        return [
            other
            for other in self.roster.sequences.values()
            if (other.block_table or other.promised_blocks)
            and other is not needy
            and other not in self.brought_back
            and not other.in_flight
            and (uid is None or other.uid == uid)
            and (
                other.state is not SequenceState.RUNNING
                or (other.num_computed_tokens > other.protected_until and outranks(other))
            )
        ]

    def _victim_order(self, victim: Sequence) -> tuple[int, int, float, float, int]:
        place = 0 if victim.state is SequenceState.PAUSED else 1 if victim.queued else 2
        usage = self._usage.get(victim.uid, 0.0)
        return place, victim.urgency, -usage, self._loss_per_block(victim), -victim.sequence_id

    def _loss_per_block(self, victim: Sequence) -> float:
        """Work lost per block freed; blocks that others hold too are not freed, nor lost where a cache finds them."""
        shared = sum(self.pool.ref_count[block] > 1 for block in victim.live_blocks())
        freed = victim.num_blocks - shared
        lost_tokens = victim.num_computed_tokens - (shared * self.pool.block_size if self.tables.cache else 0)
        return max(0, lost_tokens) / freed if freed else float("inf")

    def outranked(self, needy: Sequence) -> Callable[[Sequence], bool]:
        """The running sequences that a running one may take blocks from."""
        rank = self.rank(needy)
        return lambda victim: self.rank(victim) > rank

    def displaced(self, waiting: Sequence, blocks: int) -> Callable[[Sequence], bool]:
        """The running sequences that may be put back into the queue for a waiting one's sake.

        Less urgent ones; and those of an owner beyond its fair share, if the waiting one's owner stays within its own.
        The latter cannot take back, so nobody is displaced to and fro.
        """
        modest = bool(self._usage) and self._usage_with(waiting.uid, blocks, 1) <= 1.0
        return lambda victim: (
            victim.urgency < waiting.urgency
            or (victim.urgency == waiting.urgency and modest and self._usage_with(victim.uid, 0, 0) > 1.0)
        )

    def displaceable(self, displaced: Callable[[Sequence], bool]) -> Sequence | None:
        """The running sequence that gives up its place in the step first, if any of them has to."""
        found = [v for v in self.roster.running if v.num_computed_tokens > v.protected_until and displaced(v)]
        return min(found, key=self._victim_order, default=None)

    def enforce_limits(self) -> None:
        """Preempt sequences of owners that hold more than their limit, which was lowered or passed on to them."""
        for uid, charged in self.pool.charges().items():
            limit = self.limits.of(uid).max_blocks
            if limit is not None and charged > limit:
                self._shed(uid, charged - limit)

    def _shed(self, uid: int, surplus: int) -> None:
        own = [other for other in self.roster.sequences.values() if other.uid == uid and other.block_table]
        if own:  # the best one stays, so that the owner's work goes on
            best = min(own, key=lambda other: (other.state is not SequenceState.RUNNING, self.rank(other)))
            victims = self._victims(best, surplus, lambda victim: True, uid)
            for victim in self._candidates(best, lambda victim: True, uid) if victims is None else victims:
                self.preempt(victim)

    def break_deadlock(self) -> bool:
        """No running sequence could take a single block: the last one in rank gives way, protected or not.

        Promises make this unreachable except where forks made more blocks shared after they were given.
        """
        if len(self.roster.running) < 2:
            return False
        self.preempt(max(self.roster.running, key=self.rank))
        self.deadlocks_broken += 1
        return True

    # Taking away, and giving back

    def just_preempted(self, sequence: Sequence) -> bool:
        """Whether it lost its blocks in the step that is being planned."""
        return sequence.preemptions > 0 and sequence in self._plan.preempted

    def preempt(self, victim: Sequence) -> None:
        """Take a sequence's blocks: to the host if that costs less than computing them again, else for good."""
        self.trim(victim, early=False)
        computed = victim.num_computed_tokens
        if self._swaps(victim) and (slots := self.host.allocate(victim.num_blocks)) is not None:
            self._plan.swap_out += zip(victim.live_blocks(), slots, strict=True)
            victim.host_slots = [NO_SLOT] * victim.num_null_blocks + slots
        if self.tables.cache is not None:
            self.tables.cache.abandon(victim)
        self.tables.release(victim)
        if victim.host_slots:
            victim.num_computed_tokens = computed
        victim.protected_until = max(victim.protected_until, computed)
        victim.preemptions += 1
        self._plan.preempted.append(victim)
        if victim.state is SequenceState.RUNNING:
            self.roster.to_queue(victim, "its blocks were needed by others", self._now, SequenceState.PREEMPTED)
        self.promise(victim)

    def _swaps(self, victim: Sequence) -> bool:
        if not self.host.num_slots or not victim.num_computed_tokens:
            return False
        return self.costs.swap_s(victim.num_blocks) <= self.costs.recompute_s(victim.num_computed_tokens)

    def bring_back(self, sequence: Sequence) -> None:
        """Take blocks for a swapped-out sequence and plan the copies into them."""
        slots = [slot for slot in sequence.host_slots if slot != NO_SLOT]
        blocks = self.pool.allocate(sequence.uid, len(slots))
        if blocks is None:
            raise RuntimeError(f"{len(slots)} blocks were planned for {sequence!r}, {self.pool.num_free} are free")
        self._plan.swap_in += zip(slots, blocks, strict=True)
        self.slots_in_use += slots
        self.brought_back.add(sequence)
        sequence.num_null_blocks = len(sequence.host_slots) - len(slots)
        sequence.block_table = [NULL_BLOCK] * sequence.num_null_blocks + blocks
        sequence.host_slots = []

    def collect(self) -> None:
        """The step is done: host slots that it read are free."""
        self.host.release(self.slots_in_use)
        self.slots_in_use = []

    def cut(self, sequence: Sequence, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens are to count as computed, wherever they lie."""
        if not sequence.host_slots:
            self.tables.cut(sequence, num_tokens)
            self.promise(sequence)
            return
        keep = self.tables.blocks_for(num_tokens)
        lost_history = NO_SLOT in sequence.host_slots and num_tokens < sequence.num_computed_tokens
        if lost_history:
            keep = 0
        self.host.release(slot for slot in sequence.host_slots[keep:] if slot != NO_SLOT)
        del sequence.host_slots[keep:]
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens) if keep else 0

    def entitled_tokens(self, sequence: Sequence, *, early: bool = True) -> int:
        """Tokens whose blocks a sequence that is not in flight may hold on demand: the computed ones, and `early` the
        one that a running sequence computes next, if it is known."""
        computed, running = sequence.num_computed_tokens, sequence.state is SequenceState.RUNNING
        return computed + (early and self.works_ahead and running and computed < sequence.num_tokens)

    def trim(self, sequence: Sequence, *, early: bool = True) -> None:
        """Give back a block that was taken early for a token that did not come."""
        if not self.works_ahead or sequence.in_flight:
            return
        if len(sequence.block_table) > self.tables.blocks_for(self.entitled_tokens(sequence, early=early)):
            self.cut(sequence, sequence.num_computed_tokens)

    def stand_down(self, sequence: Sequence) -> None:
        """The sequence runs no more: nobody waits for its blocks, nothing is promised to it; it keeps what it has."""
        if self.tables.cache is not None:
            self.tables.cache.abandon(sequence)
        self.trim(sequence)
        self.promise(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds, on the device and on the host."""
        self.stand_down(sequence)
        self.host.release(slot for slot in sequence.host_slots if slot != NO_SLOT)
        sequence.host_slots = []
        self.tables.release(sequence)

    def check_invariants(self) -> None:
        """Raise RuntimeError if references, promises or host slots do not add up over the sequences alive."""
        self.pool.check_invariants()
        self.host.check_invariants()
        if self.promised != sum(s.promised_blocks for s in self.roster.sequences.values()):
            raise RuntimeError(f"{self.promised} blocks are promised, but not to the sequences alive")
