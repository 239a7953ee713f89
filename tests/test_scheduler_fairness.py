"""Owners against each other: virtual counters and weights, floods, limits that hold, and their change at run time."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpool.daemon.memory.sequence import Sequence, SequenceState
from kvpool.daemon.scheduling.deadlines import FEWEST
from kvpool.daemon.scheduling.fairness import RateLimiter, VirtualCounters, share_rows
from kvpool.daemon.scheduling.limits import OwnerLimits, SchedulerLimits
from tests.support.scheduling import UID, is_right, make, prompt, submit

ALICE, BOB, CAROL = 1000, 1001, 1002


def test_an_owner_that_was_away_earns_no_credit() -> None:
    counters = VirtualCounters()
    counters.enter(ALICE)
    counters.charge(ALICE, 1000, 1.0)
    counters.enter(BOB)
    assert counters.value(BOB) == 1000
    counters.charge(BOB, 500, 2.0)
    counters.leave(BOB)
    counters.charge(ALICE, 5000, 1.0)
    counters.enter(BOB)
    assert counters.value(BOB) == 6000
    counters.leave(BOB)
    counters.leave(ALICE)
    counters.enter(CAROL)
    assert counters.value(CAROL) == 6000


def test_an_owner_that_is_ahead_cannot_reset_itself_by_leaving() -> None:
    counters = VirtualCounters()
    counters.enter(ALICE)
    counters.enter(BOB)
    counters.charge(ALICE, 900, 1.0)
    counters.leave(ALICE)
    counters.enter(ALICE)
    assert counters.value(ALICE) == 900


def test_a_token_bucket_fills_and_holds_one_second() -> None:
    rates = RateLimiter()
    assert rates.allowance(ALICE, 10.0, 0.0) == 10
    rates.spend(ALICE, 10)
    assert rates.allowance(ALICE, 10.0, 0.05) == 0
    assert rates.ready_at(ALICE, 10.0, 0.05) == pytest.approx(0.1)
    assert rates.allowance(ALICE, 10.0, 0.31) == 3
    assert rates.allowance(ALICE, 10.0, 60.0) == 10
    rates.spend(BOB, 5)  # no limit, no bucket


def test_rows_of_a_step_are_shared_among_owners() -> None:
    weights = {ALICE: 1.0, BOB: 3.0}.__getitem__
    assert share_rows([(ALICE, 500), (ALICE, 500)], 64, weights) == [63, 1]
    assert share_rows([(ALICE, 500), (BOB, 20)], 64, weights) == [44, 20]
    assert share_rows([(ALICE, 500), (BOB, 500)], 66, weights) == [17, 49]
    assert share_rows([(ALICE, 3), (BOB, 4)], 64, weights) == [3, 4]
    assert share_rows([(ALICE, 9), (BOB, 9), (BOB, 9)], 2, weights) == [1, 1, 0]
    assert share_rows([], 64, weights) == []


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (1.0, 4.0)])
def test_service_converges_to_the_weights(weights: tuple[float, float]) -> None:
    owners = {ALICE: OwnerLimits(weight=weights[0]), BOB: OwnerLimits(weight=weights[1])}
    scheduler, device = make(256, 4, owners=owners, max_num_seqs=10, max_num_batched_tokens=24)
    served: Counter[int] = Counter()
    reached: Counter[Sequence] = Counter()
    salt = 0
    for step in range(1200):
        for uid, length, output in ((ALICE, 6, 9), (BOB, 30, 12)):  # different shapes of requests
            while scheduler.roster.waiting_of(uid) < 12:
                salt += 1
                submit(scheduler, prompt(length, salt), output, uid=uid)
        for chunk in device.step()[0].chunks:
            # What is computed again after preemption is no service.
            new = max(0, chunk.start + chunk.num_tokens - reached[chunk.sequence])
            reached[chunk.sequence] += new
            served[chunk.sequence.uid] += new if step >= 100 else 0
    ratio = served[ALICE] / served[BOB]
    assert ratio == pytest.approx(weights[0] / weights[1], rel=0.15)


def steps_to_first_token(flood: int) -> list[int]:
    """TTFT in steps of one user's short requests, while another floods the daemon with long ones."""
    scheduler, device = make(400, 4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=400)
    for salt in range(flood):
        submit(scheduler, prompt(60, salt), 200, uid=ALICE)
    for _ in range(50):
        device.step()
    waits = []
    for turn in range(40):
        made = submit(scheduler, prompt(20, 1000 + turn), 6, uid=BOB)
        waited = 0
        while not made.num_output_tokens:
            device.step()
            waited += 1
        waits.append(waited)
        for _ in range(7):
            device.step()
        assert made.finished
        assert is_right(made, 20)
        scheduler.check_invariants()
    return sorted(waits)


def test_a_flood_by_one_user_does_not_delay_another() -> None:
    assert steps_to_first_token(flood=0)[-1] == 1
    assert steps_to_first_token(flood=500)[-1] <= 2


def test_fair_displacement_does_not_go_to_and_fro() -> None:
    """Two floods: each gets half of the places, and then nobody is preempted for fairness any more."""
    scheduler, device = make(400, 4, max_num_seqs=8)
    for salt in range(30):
        submit(scheduler, prompt(6, salt), 60, uid=ALICE)
    for _ in range(5):
        device.step()
    for salt in range(30):
        submit(scheduler, prompt(6, 100 + salt), 60, uid=BOB)
    preempted = [len(device.step()[0].preempted) for _ in range(40)]
    assert sum(preempted) == 4
    assert Counter(made.uid for made in scheduler.roster.running) == {ALICE: 4, BOB: 4}
    device.drain()


def test_limits_of_an_owner_hold_at_every_step() -> None:
    owners = {ALICE: OwnerLimits(max_blocks=12, max_running=2), BOB: OwnerLimits(max_blocks=9)}
    scheduler, device = make(64, 4, owners=owners, caching=True)
    made = [submit(scheduler, prompt(10, n), 24, uid=uid) for n in range(6) for uid in (ALICE, BOB)]
    carol = submit(scheduler, prompt(10), 24, uid=CAROL)
    reasons = set()
    while scheduler.has_work:
        device.step()
        scheduler.check_invariants()
        assert scheduler.pool.charged(ALICE) <= 12
        assert scheduler.pool.charged(BOB) <= 9
        assert scheduler.roster.running_of(ALICE) <= 2
        reasons |= {s.wait_reason for s in made if s.queued}
    assert carol.num_output_tokens == 24
    assert carol.preemptions == 0
    assert all(is_right(s, 10) for s in made)
    assert {"uid 1000 runs 2 already (max_running)", "uid 1001 would hold more than its max_blocks 9"} <= reasons


def test_tokens_per_second_are_obeyed_and_the_daemon_may_sleep_until_then() -> None:
    scheduler, device = make(64, 4, owners={ALICE: OwnerLimits(tokens_per_s=8.0)})
    made = submit(scheduler, prompt(30), 10, uid=ALICE)
    now, rows, sleeps = 0.0, 0, 0
    while scheduler.has_work:
        plan, _ = device.step(now)
        rows += plan.num_tokens
        assert rows <= 8.0 * (now + 1.0)
        if plan.empty:
            assert plan.wake_at is not None
            assert plan.wake_at > now
            now = plan.wake_at
            sleeps += 1
    assert is_right(made, 30)
    assert now == pytest.approx((39 - 8) / 8, abs=0.3)
    assert sleeps > 3


def test_priority_is_capped_per_owner() -> None:
    scheduler, device = make(64, 4, owners={ALICE: OwnerLimits(max_priority=0)}, max_num_seqs=1)
    running = submit(scheduler, prompt(6), 20, uid=BOB)
    device.step()
    pushy = submit(scheduler, prompt(6), 5, uid=ALICE, priority=100)
    device.step()
    assert pushy.priority == 0
    assert pushy.state is SequenceState.WAITING
    assert running.state is SequenceState.RUNNING


def test_limits_change_while_everything_runs_and_what_was_accepted_ends() -> None:
    scheduler, device = make(64, 4, max_num_seqs=8)
    made: list[Sequence] = [submit(scheduler, prompt(20, n), 30) for n in range(8)]
    for _ in range(4):
        device.step()
    tight = SchedulerLimits(
        max_num_seqs=2,
        max_num_batched_tokens=5,
        max_model_len=200,
        max_queued=1,
        owners={UID: OwnerLimits(max_blocks=6)},
    )
    scheduler.set_limits(tight)
    device.step()
    assert scheduler.pool.charged(UID) <= 13  # one sequence may go on alone, although it needs more than 6 blocks
    device.drain()
    assert all(is_right(s, 20) for s in made)


def test_within_an_owner_whoever_is_due_first_goes_first() -> None:
    """A deadline is a place in the line; who has none lets others pass for a minute, and not longer."""
    scheduler, device = make(64, 4, max_num_seqs=1)
    order: list[Sequence] = []

    def add(salt: int, arrival: float, deadline: float | None) -> Sequence:
        return submit(scheduler, prompt(6, salt), 2, arrival=arrival, deadline=deadline)

    first, patient = add(1, 0.0, None), add(2, 1.0, None)
    late, urgent, soon = add(3, 2.0, 100.0), add(4, 3.0, 20.0), add(5, 4.0, 30.0)
    while scheduler.has_work:
        order += device.step(5.0)[1]
        scheduler.check_invariants()
    assert order == [urgent, soon, first, patient, late]
    assert all(is_right(made, 6) for made in order)


def test_deadlines_of_sequences_that_ended_are_forgotten() -> None:
    scheduler, device = make(64, 4)
    for salt in range(1000):
        submit(scheduler, prompt(4, salt), 1, deadline=1e6)
        device.drain()
    assert len(scheduler._deadlines._heap) <= 2 * FEWEST
    kept = submit(scheduler, prompt(4, 1), 50, deadline=1e6)
    device.step()
    assert device.step(1e6)[1] == [kept]
    assert kept.finish_reason == "deadline"


def test_a_flood_does_not_age_while_it_is_served() -> None:
    """Hundreds of steps in which the flood's line hardly moves, longer than `ageing_s`: others still go first."""
    scheduler, device = make(2000, 4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=400, ageing_s=10.0)
    for salt in range(100):
        submit(scheduler, prompt(60, salt), 200, uid=ALICE)
    now = 0.0
    for turn in range(40):
        for _ in range(5):
            now += 1.0
            device.step(now)
        made = submit(scheduler, prompt(12, 1000 + turn), 4, uid=BOB, arrival=now)
        for _ in range(2):
            now += 1.0
            device.step(now)
        assert made.num_output_tokens, turn
        while not made.finished:
            now += 1.0
            device.step(now)
    scheduler.check_invariants()
