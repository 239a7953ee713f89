"""Which tokens the next step computes. Knows no socket, no clock and no device: `schedule(now)`, then `update`.

There is one notion of progress: `num_computed_tokens` of every running sequence catches up with `num_tokens`, under a
budget of rows per step. A decode is a sequence that lacks one token, a prompt one that lacks many, a chunk as much of
it as fits; resuming after preemption is the same thing again.

A step is planned in this order: sequences whose deadline passed are ended; the queue is let in as far as places, memory
and the step's rows go; running sequences that lack one token get it first, so that tokens come at an even pace; the
other rows go to prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...client.wire.errors import QuotaExceeded
from ..memory.block_pool import BlockPool
from ..memory.block_tables import BlockTables
from ..memory.host_pool import HostPool, PreemptionCosts
from ..memory.pins import Pins
from ..memory.prefix_cache import PrefixCache
from ..memory.reservation import Reservation
from ..memory.sequence import IDLE, Sequence, SequenceState
from .admission import Admission
from .audit import audit
from .deadlines import Deadlines
from .fairness import RateLimiter
from .intake import Intake
from .limits import SchedulerLimits
from .residency import Residency
from .roster import QUEUED, Roster
from .step_filler import StepFiller
from .step_plan import Chunk, StepPlan
from .waiting_queue import due_at


class Scheduler:
    """Sequences over one pool. At most one plan is in flight: `schedule`, carry it out, `update`; and again.

    Between the two, sequences may be added, ended, paused, resumed and forked at any time. A sequence that is ended
    while the device works on it keeps its blocks until `update`, since the device may still write to them.

    Every sequence ends once: it is in `plan.expired`, or returned by `update`, or `finish` or `end_answer` said True.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        limits: SchedulerLimits,
        prefix_cache: PrefixCache | None = None,
        reservation: Reservation = "on-demand",
        host_blocks: int = 0,
        window: int = 0,
        works_ahead: bool = False,
    ) -> None:
        """`host_blocks`: slots on the host for preempted blocks. `window`: tokens that the layer which looks back
        furthest sees, 0 for everything; with a window there is no prefix cache. `works_ahead`: as `Backend` says."""
        self.pool = pool
        self.tables = BlockTables(pool, prefix_cache, window)
        self.roster = Roster()
        self.pins = Pins(pool)
        self.host = HostPool(host_blocks)
        self.costs = PreemptionCosts()
        self.limits = limits
        self.reservation = reservation
        self.preemptions_total = 0
        self.tokens_computed_total = 0
        ahead = works_ahead and reservation == "on-demand"  # the old ways stay what they were
        self.residency = Residency(self.tables, self.roster, self.pins, self.host, self.costs, limits, ahead)
        self._admission = Admission(self.tables, self.roster, self.pins, reservation)
        self._rates = RateLimiter()
        self._intake = Intake(self.residency, self._rates, reservation)
        self._filler = StepFiller(self.residency, self._rates)
        self._deadlines = Deadlines()
        self._plan: StepPlan | None = None  # in flight
        self._now = 0.0
        self._end_interval_s = 0.1  # between two ends of sequences, smoothed
        self._last_end = 0.0

    # Asking

    @property
    def cache(self) -> PrefixCache | None:
        return self.tables.cache

    @property
    def has_work(self) -> bool:
        """A sequence is queued or running."""
        return bool(self.roster.running or self.roster.queue)

    @property
    def expects_progress(self) -> bool:
        """A sequence is queued or running whose owner has no rate limit that it might be waiting for."""
        return any(self.limits.of(uid).tokens_per_s is None for uid in self.roster.counters.active)

    def check_admission(
        self, uid: int, num_prompt_tokens: int, max_tokens: int, n: int = 1, *, new: bool = True
    ) -> None:
        """Raise TooLong, NeverFits, QuotaExceeded or Busy if `n` such sequences cannot be taken.

        Passing means that each of them can finish. `new=False` for another answer of a sequence that exists.
        """
        self.check_possible(uid, num_prompt_tokens, max_tokens)
        self._admission.check_places(uid, n, self.limits, new=new, retry_after_ms=self.retry_after_ms)

    def check_possible(self, uid: int, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise TooLong, NeverFits or QuotaExceeded if such a sequence, accepted once, can no longer finish."""
        self._admission.check_lengths(num_prompt_tokens, max_tokens, self.limits)
        self._admission.check_blocks(uid, num_prompt_tokens, max_tokens, self.limits)

    @property
    def retry_after_ms(self) -> int:
        """When a place in the queue is likely to be free."""
        return int(1000 * min(30.0, max(0.05, self._end_interval_s)))

    # Life of a sequence

    def add(self, sequence: Sequence, *, idle: bool = False) -> None:
        """Take a new sequence, which gets its id here; `idle`: only hold it, `generate` sets it going."""
        self._clamp(sequence)
        sequence.due = due_at(sequence, sequence.arrival)
        self.roster.register(sequence)
        if idle:
            self.roster.to_paused(sequence, IDLE)
        else:
            self._enqueue(sequence, sequence.arrival)

    def add_group(self, sequences: list[Sequence]) -> None:
        """Take sequences with the same prompt: the first computes it, the others begin as forks of it.

        Each fork computes the prompt's last token itself, and so samples its first token in a row of its own.
        """
        first, *others = sequences
        if any(other.token_ids != first.token_ids or other.uid != first.uid for other in others):
            raise ValueError("the sequences of a group have one prompt and one owner")
        self.add(first)
        for other in others:
            self.add(other, idle=True)
            self._deadlines.watch(other)
            self.roster.to_following(other, first)

    def add_restored(self, sequence: Sequence, num_computed_tokens: int) -> list[int] | None:
        """Take an idle sequence whose first tokens are already known to be computed: the blocks to write them to.

        None where the pool has no room now; then the sequence is there too, and its tokens will be computed again.
        """
        self.add(sequence, idle=True)
        blocks = self.tables.blocks_for(num_computed_tokens)
        if self.tables.window or blocks > self.residency.room(sequence):
            return None
        self.tables.grow(sequence, num_computed_tokens, spare=False)
        sequence.num_computed_tokens = num_computed_tokens
        return list(sequence.block_table)

    def generate(self, sequence: Sequence, max_tokens: int, *, deadline: float | None = None) -> None:
        """Let an idle sequence produce up to `max_tokens` more tokens; what it has so far becomes the prompt."""
        if not sequence.idle or sequence.in_flight:
            raise ValueError(f"{sequence!r} is not idle")
        sequence.num_prompt_tokens = sequence.num_tokens
        sequence.max_tokens, sequence.deadline, sequence.finish_reason = max_tokens, deadline, None
        sequence.admitted, sequence.boost = False, 0
        self._clamp(sequence)
        sequence.due = due_at(sequence, self._now)
        self._enqueue(sequence, self._now)

    def finish(self, sequence: Sequence, reason: str) -> bool:
        """End a sequence for good, in any state. False if it had ended before."""
        if sequence.finished:
            return False
        self._hand_over(sequence)
        self.roster.remove(sequence, reason)
        if sequence.in_flight:  # the device may still write to its blocks: update gives them back
            self.residency.stand_down(sequence)
        else:
            self.residency.leave(sequence)
        self._note_end()
        return True

    def end_answer(self, sequence: Sequence, reason: str) -> bool:
        """End what the sequence is producing: it goes idle if it is kept, else it is finished. False: it had ended."""
        if not sequence.keep:
            return self.finish(sequence, reason)
        if sequence.finished or sequence.idle:
            return False
        self.pause(sequence, IDLE)
        sequence.finish_reason, sequence.deadline = reason, None
        self._note_end()
        return True

    def pause(self, sequence: Sequence, reason: str = "its reader does not read") -> None:
        """Stop working on a sequence. It keeps its blocks, but is the first to lose them. Nothing if it has ended."""
        if not sequence.finished:
            self._hand_over(sequence)
            self.roster.to_paused(sequence, reason)
            self.residency.stand_down(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Go on with a paused sequence. Nothing if it is not paused, or idle."""
        if sequence.state is SequenceState.PAUSED and not sequence.idle:
            self._enqueue(sequence, self._now)

    def fork(self, sequence: Sequence, at: int | None = None, *, uid: int | None = None) -> Sequence:
        """An idle copy of the first `at` tokens (all by default), for `uid` (the same by default).

        Computed blocks are shared; a partly filled one is copied when either side writes to it.
        """
        length = sequence.num_tokens if at is None else at
        if sequence.finished or not 1 <= length <= sequence.num_tokens:
            raise ValueError(f"{sequence!r} cannot be forked at {at}")
        child = Sequence(
            uid=sequence.uid if uid is None else uid,
            token_ids=sequence.token_ids[:length],
            max_tokens=sequence.max_tokens,
            min_tokens=sequence.min_tokens,
            stop_token_ids=sequence.stop_token_ids,
            priority=sequence.priority,
            keep=sequence.keep,
        )
        child.num_prompt_tokens = min(sequence.num_prompt_tokens, length)
        self.add(child, idle=True)
        if sequence.block_table:
            self.tables.share(sequence, child, min(length, sequence.num_computed_tokens))
        return child

    def append(self, sequence: Sequence, token_ids: Iterable[int]) -> None:
        """More tokens at the end; they are computed as soon as the sequence runs. Not while it is being answered."""
        if sequence.finished or (sequence.in_flight and not sequence.idle):
            raise ValueError(f"{sequence!r} cannot be appended to now")
        sequence.token_ids.extend(token_ids)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens. Not while the sequence is in flight."""
        if sequence.finished or sequence.in_flight or not 1 <= num_tokens <= sequence.num_tokens:
            raise ValueError(f"{sequence!r} cannot be truncated to {num_tokens} tokens now")
        if self.cache is not None:
            self.cache.abandon(sequence)
        del sequence.token_ids[num_tokens:]
        kept = num_tokens // self.pool.block_size
        del sequence.block_hashes[kept:], sequence.public_hashes[kept:]
        sequence.num_prompt_tokens = min(sequence.num_prompt_tokens, num_tokens)
        sequence.counted_until = min(sequence.counted_until, num_tokens)
        self.residency.cut(sequence, min(num_tokens, sequence.num_computed_tokens))

    def publish(self, sequence: Sequence, num_tokens: int) -> int:
        """Let all owners find the full blocks of the first `num_tokens` computed tokens; how many blocks that is."""
        return 0 if self.cache is None else self.cache.publish(sequence, num_tokens)

    def pin(self, sequence: Sequence, num_tokens: int, *, expires_at: float | None = None) -> int:
        """Keep the computed full blocks of the first `num_tokens` tokens, until `unpin` or `expires_at`; the pin's id.

        Raises QuotaExceeded if the owner would pin too much, or all owners together.
        """
        blocks = [] if self.cache is None else self.cache.findable(sequence, num_tokens)
        limit = self.limits.of(sequence.uid).max_pinned_blocks
        limit = self.pool.num_blocks // 8 if limit is None else limit
        if self.pins.blocks_of(sequence.uid) + len(blocks) > limit:
            raise QuotaExceeded(f"uid {sequence.uid} may pin {limit} blocks (max_pinned_blocks)", field="num_tokens")
        reserve = self._admission.reserve(self.limits)
        if self.pins.num_blocks + len(blocks) > self.pool.num_blocks - reserve:
            raise QuotaExceeded(f"{reserve} blocks must stay for sequences; pin fewer", field="num_tokens")
        return self.pins.add(sequence.uid, blocks, expires_at)

    def unpin(self, pin_id: int) -> bool:
        """Let go of a pin. False if it had ended already."""
        return self.pins.remove(pin_id)

    def set_limits(self, limits: SchedulerLimits) -> None:
        """Replace all limits; what was accepted before stays accepted."""
        self.limits = self.residency.limits = limits

    # Steps

    def schedule(self, now: float) -> StepPlan:
        """Plan one step. Unless the plan is `empty`, `update` must be called for it before the next one."""
        if self._plan is not None:
            raise RuntimeError("schedule() while a plan is in flight: update() it first")
        self._now = now
        plan = StepPlan()
        for sequence in self._deadlines.passed(now):
            if self.end_answer(sequence, "deadline"):
                plan.expired.append(sequence)
        self.pins.expire(now)
        if self.cache is not None:
            self.cache.expire(now)
        self.residency.begin(plan, now)
        self.residency.enforce_limits()
        self._intake.let_in(self.limits, now)
        while self._filler.fill(plan, self.limits, now) and plan.moves_nothing and self.residency.break_deadlock():
            pass
        self._filler.look_ahead(plan, self.limits)
        plan.copies = self.tables.take_copies()
        self.preemptions_total += len(plan.preempted)
        if not plan.empty:
            self._plan = plan
        if not plan.chunks:
            plan.wake_at = self._wake_at()
        return plan

    def update(self, plan: StepPlan, sampled: Mapping[int, int | None]) -> list[Sequence]:
        """The step was carried out: `sampled` has the next token, by sequence id, for every chunk that samples.

        None instead of a token: the caller will `append` the next token itself (beam search), and the sequence does
        nothing until then. Returns the sequences whose answer ended by a stop token or its length.
        """
        if plan is not self._plan:
            if plan.empty:
                return []
            raise RuntimeError("update() for a plan that is not in flight")
        self._plan = None
        self.residency.collect()
        self.tokens_computed_total += plan.num_tokens
        ended: list[Sequence] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.in_flight = False
            if sequence.finished:
                self.residency.leave(sequence)
                continue
            self._advance(sequence, chunk)
            reason = None
            if chunk.samples and not sequence.idle:
                reason = self._next_token(sequence, sampled[sequence.sequence_id])
            elif sequence.max_tokens == 0 and sequence.num_computed_tokens == sequence.num_tokens:
                reason = "length"
            if reason is not None and self.end_answer(sequence, reason):
                ended.append(sequence)
            self.residency.trim(sequence)
        if self.cache is not None:
            self.cache.note_time(self._now)
        return ended

    def distrust(self, plan: StepPlan) -> None:
        """The plan failed, perhaps while it moved blocks: who has one that was to be written computes all again."""
        written = {block for _, block in plan.copies} | {block for _, block in plan.swap_in}
        for sequence in self.roster.sequences.values():
            never_left = sequence.host_slots and sequence in plan.preempted
            if never_left or (written and not written.isdisjoint(sequence.block_table)):
                self.residency.cut(sequence, 0)

    def _advance(self, sequence: Sequence, chunk: Chunk) -> None:
        """The chunk's tokens are computed: blocks that are full now enter the cache, or leave the window."""
        end, size = chunk.start + chunk.num_tokens, self.pool.block_size
        sequence.num_computed_tokens = end
        if self.cache is not None and end // size > chunk.start // size:
            self.cache.insert(sequence, chunk.start // size, end // size)
        if self.tables.window:
            self.tables.slide(sequence)
        if sequence.followers and end >= sequence.num_prompt_tokens - 1:
            for follower in list(sequence.followers):
                self._start_follower(sequence, follower)

    def _next_token(self, sequence: Sequence, token: int | None) -> str | None:
        """Append the sampled token; a finish reason if it is the last one."""
        if token is None:
            return None
        sequence.token_ids.append(token)
        num_tokens = len(sequence.token_ids)
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        if token in sequence.stop_token_ids and num_output_tokens >= sequence.min_tokens:
            return "stop"
        if num_output_tokens >= sequence.max_tokens or num_tokens >= self.limits.max_model_len:
            return "length"
        return None

    # Small parts

    def _clamp(self, sequence: Sequence) -> None:
        most = self.limits.of(sequence.uid).max_priority
        if most is not None:
            sequence.priority = min(sequence.priority, most)

    def _enqueue(self, sequence: Sequence, since: float) -> None:
        if sequence.num_computed_tokens >= sequence.num_tokens:  # there must be a row to sample from
            self.residency.cut(sequence, sequence.num_tokens - 1)
        sequence.protected_until = min(sequence.protected_until, sequence.num_tokens - 1)
        self.roster.to_queue(sequence, QUEUED, since, SequenceState.WAITING)
        self._deadlines.watch(sequence)

    def _start_follower(self, leader: Sequence, follower: Sequence) -> None:
        self.roster.to_paused(follower, "")
        if leader.block_table:
            shared = min(leader.num_computed_tokens, follower.num_tokens - 1)
            self.tables.share(leader, follower, shared)
            follower.counted_until = shared
        self._enqueue(follower, follower.arrival)

    def _hand_over(self, leader: Sequence) -> None:
        """The leader of a group stops: the next one takes over what is computed of the prompt, and the others."""
        if leader.followers:
            heir, *others = leader.followers
            self._start_follower(leader, heir)
            for other in others:
                self.roster.to_following(other, heir)

    def _note_end(self) -> None:
        if self._now > self._last_end:
            self._end_interval_s += 0.2 * (self._now - self._last_end - self._end_interval_s)
            self._last_end = self._now

    def _wake_at(self) -> float | None:
        """When something may change although nobody calls: a deadline passes, or a rate limit allows a token."""
        times = [] if (first := self._deadlines.first()) is None else [first]
        for uid in {sequence.uid for sequence in [*self.roster.running, *self.roster.queue]}:
            rate = self.limits.of(uid).tokens_per_s
            if rate is not None:
                times.append(self._rates.ready_at(uid, rate, self._now))
        return min(times, default=None)

    def check_invariants(self) -> None:
        """Raise RuntimeError if pool, cache, tables, promises or places disagree. For tests, and for an idle daemon."""
        audit(self, [chunk.sequence for chunk in self._plan.chunks] if self._plan else [])
