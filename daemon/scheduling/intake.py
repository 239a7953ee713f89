"""Letting queued sequences into the pool: who, in which order, and with which blocks they begin."""

from __future__ import annotations

from ..memory.prefix_cache import Hit
from ..memory.reservation import Reservation, reserved_tokens
from ..memory.sequence import Sequence
from .fairness import RateLimiter
from .limits import SchedulerLimits
from .residency import Refusal, Residency, Scope
from .waiting_queue import QueueScan


class Intake:
    """Moves sequences from the queue to the running ones while places, memory and the step's rows last."""

    def __init__(self, residency: Residency, rates: RateLimiter, reservation: Reservation) -> None:
        self._residency = residency
        self._roster = residency.roster
        self._tables = residency.tables
        self._cache = residency.tables.cache
        self._rates = rates
        self._reservation = reservation

    def let_in(self, limits: SchedulerLimits, now: float) -> None:
        """Whoever is refused stays queued and says why in `wait_reason`."""
        if not self._roster.queue:
            return
        missing = [(s.uid, s.num_tokens - s.num_computed_tokens) for s in self._roster.running]
        rows, prompting = sum(count for _, count in missing), {uid for uid, count in missing if count > 1}
        self._roster.queue.note_served(self._roster.running, now)
        scan = QueueScan(self._roster.queue, now, limits.ageing_s, self._residency.served)
        while (sequence := scan.best()) is not None:
            if rows >= limits.max_num_batched_tokens and not self._goes_before(sequence.uid, prompting):
                break
            refusal = self._consider(sequence, limits, now)
            scan.skip(sequence)
            if refusal is None:
                sequence.boost += scan.aged(sequence)
                rows += sequence.num_tokens - sequence.num_computed_tokens
                prompting.add(sequence.uid)
                continue
            sequence.wait_reason = refusal.reason
            if refusal.scope is Scope.OWNER:
                scan.skip_owner(sequence.uid)
            elif refusal.scope is Scope.ALL:
                break  # who comes later is not to pass: large requests would never find room

    def _goes_before(self, uid: int, prompting: set[int]) -> bool:
        """Whether, in a step that is full already, this owner's prompt gets rows before those of the others."""
        value = self._roster.counters.value
        return uid not in prompting and value(uid) <= min(map(value, prompting), default=0.0)

    def _consider(self, sequence: Sequence, limits: SchedulerLimits, now: float) -> Refusal | None:
        """Start the sequence, or say why not."""
        uid, own = sequence.uid, limits.of(sequence.uid)
        if self._residency.just_preempted(sequence):
            return Refusal("its blocks were needed by others", Scope.SEQUENCE)
        if own.max_running is not None and self._roster.running_of(uid) >= own.max_running:
            return Refusal(f"uid {uid} runs {own.max_running} already (max_running)", Scope.OWNER)
        if own.tokens_per_s is not None and self._rates.allowance(uid, own.tokens_per_s, now) < 1:
            return Refusal(f"uid {uid} has used its {own.tokens_per_s:g} tokens/s", Scope.OWNER)
        hit = Hit([], 0, 0)
        may_hit = not (sequence.block_table or sequence.host_slots or sequence.whole_prompt)
        if self._cache is not None and may_hit:
            if self._cache.must_wait(sequence):
                return Refusal("its prefix is being computed", Scope.SEQUENCE)
            hit = self._cache.lookup(sequence)
            if self._cache.await_missing(sequence, hit):
                return Refusal("its prefix is being computed", Scope.SEQUENCE)
        sequence.goal_tokens = self._goal(sequence, limits)
        need = self._need(sequence, hit)
        refusal = self._make_place(sequence, need, limits.max_running)
        if refusal is None:
            self._start(sequence, hit, own.weight)
        return refusal

    def _goal(self, sequence: Sequence, limits: SchedulerLimits) -> int:
        expected = sequence.expected_output_tokens
        reserved = reserved_tokens(
            self._reservation,
            num_prompt_tokens=sequence.num_prompt_tokens,
            output_tokens=sequence.max_tokens if expected is None else expected,
            max_model_len=limits.max_model_len,
        )
        return max(sequence.num_tokens, reserved)

    def _need(self, sequence: Sequence, hit: Hit) -> int:
        """Free blocks with which the sequence reaches its goal."""
        if hit.blocks:
            return self._tables.blocks_to_start(hit, sequence.goal_tokens)
        if self._reservation != "on-demand":
            return self._tables.blocks_short(sequence, sequence.goal_tokens)
        return self._tables.promise(sequence)

    def _make_place(self, sequence: Sequence, need: int, places: int) -> Refusal | None:
        """Memory and a place in the step, taken from others where that is right.

        On demand one block per running sequence stays free: else the next tokens would preempt whoever was let in.
        """
        displaced = self._residency.displaced(sequence, need)
        full = Refusal(f"all {places} places are taken (max_num_seqs)", Scope.ALL)
        if len(self._roster.running) >= places and self._residency.displaceable(displaced) is None:
            return full
        headroom = len(self._roster.running) if self._reservation == "on-demand" else 0
        refusal = self._residency.make_room(sequence, need, displaced, headroom=headroom)
        if refusal is None and len(self._roster.running) >= places:
            victim = self._residency.displaceable(displaced)
            if victim is None:
                return full
            self._residency.preempt(victim)
        return refusal

    def _start(self, sequence: Sequence, hit: Hit, weight: float) -> None:
        if hit.blocks:
            self._tables.adopt(sequence, hit.blocks, hit.num_tokens)
        elif sequence.host_slots:
            self._residency.bring_back(sequence)
        if self._cache is not None:
            self._cache.count_hit(hit, sequence)
        if not sequence.admitted:
            sequence.admitted = True
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._roster.to_running(sequence)
        if self._reservation != "on-demand":
            self._tables.grow(sequence, sequence.goal_tokens, spare=False)
        self._residency.promise(sequence)
        if self._cache is not None:
            self._cache.announce(sequence)
        known = max(sequence.counted_until, sequence.num_computed_tokens)
        if sequence.num_tokens > known:
            self._roster.counters.charge(sequence.uid, sequence.num_tokens - known, weight)
            sequence.counted_until = sequence.num_tokens
