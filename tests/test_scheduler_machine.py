"""Any history of calls, also between schedule and update, ends in the tokens of the undisturbed run.

The fake device proves each read; `check_invariants` runs after every rule; at the end of each history whatever is still
alive must come to its end in a bounded number of steps, and every block must be free again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.client.wire.errors import KVPoolError
from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.memory.prefix_cache import PrefixCache
from kvpool.daemon.memory.sequence import Sequence, SequenceState
from kvpool.daemon.scheduling.limits import OwnerLimits, SchedulerLimits
from kvpool.daemon.scheduling.scheduler import Scheduler
from kvpool.daemon.scheduling.step_plan import StepPlan
from tests.support.fake_device import VOCAB_SIZE, FakeDevice, next_token

UIDS = st.integers(min_value=1000, max_value=1002)
TOKENS = st.integers(min_value=0, max_value=VOCAB_SIZE - 1)
PREFIXES = [[7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [7, 1, 8, 2, 8, 1, 8, 2, 3, 3], [3, 1, 4, 1, 5]]
PROMPTS = st.builds(
    lambda prefix, length, rest: prefix[:length] + rest,
    st.sampled_from(PREFIXES),
    st.integers(min_value=0, max_value=12),
    st.lists(TOKENS, min_size=1, max_size=6),
)
OWNERS = st.builds(
    OwnerLimits,
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    max_blocks=st.none() | st.integers(min_value=6, max_value=20),
    max_sequences=st.none() | st.integers(min_value=2, max_value=8),
    max_running=st.none() | st.integers(min_value=1, max_value=3),
    max_queued=st.none() | st.integers(min_value=1, max_value=6),
    max_pinned_blocks=st.none() | st.integers(min_value=0, max_value=4),
    tokens_per_s=st.none() | st.sampled_from([0.5, 20.0]),
    max_priority=st.none() | st.integers(min_value=-1, max_value=1),
)
LIMITS = st.builds(
    SchedulerLimits,
    max_num_seqs=st.integers(min_value=1, max_value=6),
    max_num_batched_tokens=st.integers(min_value=1, max_value=24),
    max_model_len=st.integers(min_value=24, max_value=60),
    max_queued=st.integers(min_value=3, max_value=12),
    ageing_s=st.sampled_from([0.5, 10.0]),
    defaults=OWNERS,
    owners=st.dictionaries(UIDS, OWNERS, max_size=2),
)


def refused(call: Callable[[], object]) -> KVPoolError | None:
    """The typed error that the call raised, if it did."""
    try:
        call()
    except KVPoolError as error:
        return error
    return None


class SchedulerMachine(RuleBasedStateMachine):
    """`tokens` says what each sequence must hold; `answers` how many ends of it are still to come."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(min_value=8, max_value=30),
        caching=st.booleans(),
        host_blocks=st.sampled_from([0, 6, 30]),
        window=st.sampled_from([0, 0, 0, 5]),
        swap_s=st.sampled_from([0.0, 1.0]),
        works_ahead=st.booleans(),
        limits=LIMITS,
    )
    def make(
        self,
        block_size: int,
        num_blocks: int,
        caching: bool,
        host_blocks: int,
        window: int,
        swap_s: float,
        works_ahead: bool,
        limits: SchedulerLimits,
    ) -> None:
        pool = BlockPool(num_blocks, block_size)
        cache = PrefixCache(pool, secret=b"boot", ttl_s=20.0) if caching else None
        self.scheduler = Scheduler(
            pool,
            limits=limits,
            prefix_cache=cache,
            host_blocks=host_blocks,
            window=window,
            works_ahead=works_ahead,
        )
        self.scheduler.costs.swap_s_per_block, self.scheduler.costs.compute_s_per_token = swap_s, 0.5
        self.device = FakeDevice(self.scheduler)
        self.now = 0.0
        self.plan: StepPlan | None = None
        self.tokens: dict[Sequence, list[int]] = {}
        self.answers: Counter[Sequence] = Counter()
        self.gone: set[Sequence] = set()
        self.pins: list[int] = []

    # Helpers

    def alive(self) -> list[Sequence]:
        return [sequence for sequence in self.tokens if sequence not in self.gone]

    def pick(self, data: st.DataObject, found: list[Sequence]) -> Sequence | None:
        return data.draw(st.sampled_from(found)) if found else None

    def note_end(self, sequence: Sequence) -> None:
        """Exactly one end for each answer."""
        assert self.answers[sequence] == 1, sequence
        self.answers[sequence] = 0
        assert sequence.finish_reason in ("stop", "length", "cancelled", "deadline")
        if sequence.finished:
            self.gone.add(sequence)
        else:
            assert sequence.keep
            assert sequence.idle

    def admitted(self, uid: int, prompt: int, max_tokens: int, n: int = 1, *, new: bool = True) -> bool:
        refusal = refused(lambda: self.scheduler.check_admission(uid, prompt, max_tokens, n, new=new))
        if refusal is not None:
            assert refusal.message
            assert refusal.code in ("too_long", "never_fits", "quota", "busy")
            assert (refusal.code == "busy") == (refusal.retry_after_ms is not None)
        return refusal is None

    # Submitting

    @rule(
        uid=UIDS,
        prompt=PROMPTS,
        max_tokens=st.integers(min_value=0, max_value=12),
        min_tokens=st.integers(min_value=0, max_value=3),
        stop=st.frozensets(TOKENS, max_size=4),
        priority=st.sampled_from([-1, 0, 0, 1]),
        deadline_s=st.none() | st.sampled_from([0.0, 1.5, 6.0]),
        keep=st.booleans(),
        n=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(
        self,
        uid: int,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        stop: frozenset[int],
        priority: int,
        deadline_s: float | None,
        keep: bool,
        n: int,
    ) -> None:
        if not self.admitted(uid, len(prompt), max_tokens, n):
            return
        group = [
            Sequence(
                uid=uid,
                token_ids=list(prompt),
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=stop,
                priority=priority,
                deadline=None if deadline_s is None else self.now + deadline_s,
                arrival=self.now,
                keep=keep,
            )
            for _ in range(n)
        ]
        if n == 1:
            self.scheduler.add(group[0])
        else:
            self.scheduler.add_group(group)
        for sequence in group:
            self.tokens[sequence] = list(prompt)
            self.answers[sequence] = 1

    @rule(uid=UIDS, prompt=PROMPTS)
    def open(self, uid: int, prompt: list[int]) -> None:
        if self.admitted(uid, len(prompt), 1):
            sequence = Sequence(uid=uid, token_ids=list(prompt), max_tokens=0, keep=True)
            self.scheduler.add(sequence, idle=True)
            self.tokens[sequence] = list(prompt)

    # Steps

    @precondition(lambda self: self.plan is None)
    @rule(passed=st.sampled_from([0.0, 0.25, 1.0]))
    def schedule(self, passed: float) -> None:
        self.now += passed
        self.plan = self.scheduler.schedule(self.now)
        self.device.launch(self.plan)
        for sequence in self.plan.expired:
            assert sequence.finish_reason == "deadline"
            assert all(chunk.sequence is not sequence for chunk in self.plan.chunks)
            self.note_end(sequence)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def update(self) -> None:
        assert self.plan is not None
        sampled = self.device.collect()
        grows = [chunk.sequence for chunk in self.plan.chunks if chunk.samples and not self.is_over(chunk.sequence)]
        ended = self.scheduler.update(self.plan, sampled)
        self.plan = None
        for sequence in grows:
            self.tokens[sequence].append(next_token(self.tokens[sequence]))
        for sequence in ended:
            assert sequence.finish_reason in ("stop", "length")
            self.note_end(sequence)

    def is_over(self, sequence: Sequence) -> bool:
        """Its answer was ended while it was in flight: the token that comes is nobody's."""
        return sequence in self.gone or not self.answers[sequence]

    @rule()
    def whole_steps(self) -> None:
        for _ in range(3):
            if self.plan is None:
                self.schedule(0.25)
            self.update()
            self.scheduler.check_invariants()

    # Interfering, also while a step is in flight

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = self.pick(data, list(self.tokens))
        if sequence is not None:
            ended = self.scheduler.finish(sequence, "cancelled")
            assert ended == (sequence not in self.gone)
            self.answers[sequence] = 0
            self.gone.add(sequence)

    @rule(data=st.data())
    def end_answer(self, data: st.DataObject) -> None:
        sequence = self.pick(data, self.alive())
        if sequence is not None and self.answers[sequence]:
            assert self.scheduler.end_answer(sequence, "stop")
            self.note_end(sequence)
            assert not self.scheduler.end_answer(sequence, "stop")

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        sequence = self.pick(data, [s for s in self.alive() if self.answers[s]])
        if sequence is not None:
            self.scheduler.pause(sequence)

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        sequence = self.pick(data, [s for s in self.alive() if s.state is SequenceState.PAUSED])
        if sequence is not None:
            self.scheduler.resume(sequence)

    @rule(data=st.data(), other_uid=st.none() | UIDS)
    def fork(self, data: st.DataObject, other_uid: int | None) -> None:
        sequence = self.pick(data, self.alive())
        if sequence is None:
            return
        at = data.draw(st.none() | st.integers(min_value=1, max_value=sequence.num_tokens))
        uid = sequence.uid if other_uid is None else other_uid
        if self.admitted(uid, at or sequence.num_tokens, 1):
            child = self.scheduler.fork(sequence, at, uid=uid)
            child.keep = True
            assert child.idle
            self.tokens[child] = self.tokens[sequence][:at]

    @rule(data=st.data(), more=st.lists(TOKENS, max_size=6))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        sequence = self.pick(data, [s for s in self.alive() if s.idle])
        if sequence is not None and self.admitted(sequence.uid, sequence.num_tokens + len(more), 1, new=False):
            self.scheduler.append(sequence, more)
            self.tokens[sequence] += more

    @rule(data=st.data(), max_tokens=st.integers(min_value=0, max_value=8))
    def generate(self, data: st.DataObject, max_tokens: int) -> None:
        sequence = self.pick(data, [s for s in self.alive() if s.idle and not s.in_flight])
        if sequence is not None and self.admitted(sequence.uid, sequence.num_tokens, max_tokens, new=False):
            self.scheduler.generate(sequence, max_tokens)
            self.answers[sequence] = 1

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.pick(data, [s for s in self.alive() if s.idle and not s.in_flight])
        if sequence is not None:
            length = data.draw(st.integers(min_value=1, max_value=sequence.num_tokens))
            self.scheduler.truncate(sequence, length)
            del self.tokens[sequence][length:]

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """A sequence whose first tokens come from a snapshot of another one."""
        source = self.pick(data, self.alive())
        if source is None or not self.admitted(source.uid, source.num_tokens, 1):
            return
        sequence = Sequence(uid=source.uid, token_ids=list(source.token_ids), max_tokens=0, keep=True)
        computed = data.draw(st.integers(min_value=0, max_value=source.num_tokens))
        blocks = self.scheduler.add_restored(sequence, computed)
        self.tokens[sequence] = list(self.tokens[source])
        if blocks is not None:
            for position in range(computed):
                self.device.memory[self.device.slot(sequence, position)] = (sequence.token_ids[position], position)

    @rule(data=st.data(), length=st.integers(min_value=0, max_value=20))
    def publish(self, data: st.DataObject, length: int) -> None:
        sequence = self.pick(data, self.alive())
        if sequence is not None:
            self.scheduler.publish(sequence, length)

    @rule(data=st.data(), length=st.integers(min_value=0, max_value=20), ttl_s=st.none() | st.just(3.0))
    def pin(self, data: st.DataObject, length: int, ttl_s: float | None) -> None:
        sequence = self.pick(data, self.alive())
        if sequence is not None:
            expires_at = None if ttl_s is None else self.now + ttl_s
            refusal = refused(lambda: self.pins.append(self.scheduler.pin(sequence, length, expires_at=expires_at)))
            assert refusal is None or refusal.code == "quota"

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            self.scheduler.unpin(self.pins.pop(data.draw(st.integers(min_value=0, max_value=len(self.pins) - 1))))

    @precondition(lambda self: self.plan is None)
    @rule(limits=LIMITS)
    def reload(self, limits: SchedulerLimits) -> None:
        self.scheduler.set_limits(replace(limits, max_model_len=self.scheduler.limits.max_model_len))

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        for sequence, tokens in self.tokens.items():
            assert sequence.token_ids == tokens
            assert sequence.finished == (sequence in self.gone)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            self.update()
        for sequence in self.alive():
            self.scheduler.resume(sequence)
        steps = 0
        while self.scheduler.has_work:
            self.schedule(1.0)
            self.update()
            self.scheduler.check_invariants()
            steps += 1
            assert steps < 3000, f"not done: {self.alive()}"
        assert not any(self.answers.values())
        for sequence in self.alive():
            assert self.scheduler.finish(sequence, "cancelled")
        for pin in self.pins:
            self.scheduler.unpin(pin)
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert self.scheduler.host.num_free == self.scheduler.host.num_slots
        assert not self.scheduler.pool.charges()
        assert not self.scheduler.roster.counters.active
        self.scheduler.check_invariants()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase
