"""When memory runs out: who gives way, by recompute or swap, and that everything ends all the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.daemon.memory.sequence import Sequence, SequenceState
from tests.support.fake_device import FakeDevice
from tests.support.scheduling import is_right, make, prompt, sequence, submit


def test_two_sequences_that_each_need_the_whole_pool_finish_one_after_the_other() -> None:
    scheduler, device = make(num_blocks=6)
    first, second = submit(scheduler, prompt(8), 17), submit(scheduler, prompt(8, salt=1), 17)
    order: list[Sequence] = []
    while scheduler.has_work:
        order += device.step()[1]
        scheduler.check_invariants()
    assert order == [first, second]
    assert is_right(first, 8)
    assert is_right(second, 8)
    assert first.preemptions == 0
    assert scheduler.preemptions_total == second.preemptions <= 2


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(min_value=0, max_value=2**32),
    block_size=st.sampled_from([1, 2, 4, 8]),
    caching=st.booleans(),
    host_blocks=st.sampled_from([0, 8, 100]),
    max_num_seqs=st.integers(min_value=1, max_value=8),
    budget=st.integers(min_value=1, max_value=40),
)
@example(seed=39, block_size=1, caching=False, host_blocks=0, max_num_seqs=4, budget=5)  # fail without protection
@example(seed=83, block_size=2, caching=False, host_blocks=0, max_num_seqs=8, budget=5)
def test_everything_admitted_terminates_and_progress_protects(
    seed: int, block_size: int, caching: bool, host_blocks: int, max_num_seqs: int, budget: int
) -> None:
    """A running sequence is not preempted again before it computed a token that it had not when it was preempted."""
    dice = random.Random(seed)
    pool_tokens = 48
    scheduler, device = make(
        pool_tokens // block_size,
        block_size,
        caching=caching,
        host_blocks=host_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    scheduler.costs.swap_s_per_block, scheduler.costs.compute_s_per_token = dice.choice([(0.0, 1.0), (0.5, 0.3)])
    made = []
    for salt in range(10):
        length = dice.randint(1, pool_tokens - 1)
        made.append((submit(scheduler, prompt(length, salt % 3), dice.randint(1, pool_tokens + 1 - length)), length))
    had = dict.fromkeys((s for s, _ in made), -1)
    for _ in range(20_000):
        if not scheduler.has_work:
            break
        before = {s: s.num_computed_tokens for s, _ in made}
        for victim in device.step()[0].preempted:
            assert before[victim] > had[victim]
            had[victim] = before[victim]
        scheduler.check_invariants()
    assert all(s.finish_reason == "length" and is_right(s, length) for s, length in made)
    assert scheduler.residency.deadlocks_broken == 0


def until_preempted(device: FakeDevice, steps: int = 200) -> list[Sequence]:
    for _ in range(steps):
        preempted = device.step()[0].preempted
        device.scheduler.check_invariants()
        if preempted:
            return preempted
    raise AssertionError("nobody was preempted")


def test_the_paused_one_goes_first_whatever_its_rank() -> None:
    scheduler, device = make(num_blocks=9)
    old, middle, young = (submit(scheduler, prompt(8, salt=n), 20) for n in range(3))
    device.step()
    scheduler.pause(old)
    assert until_preempted(device) == [old]
    assert old.state is SequenceState.PAUSED
    assert (old.block_table, old.num_computed_tokens) == ([], 0)
    device.drain()
    assert not old.finished
    scheduler.resume(old)
    device.drain()
    assert all(is_right(s, 8) for s in (old, middle, young))


def test_the_least_urgent_gives_way_and_then_the_one_that_loses_least() -> None:
    scheduler, device = make(num_blocks=12)
    slim = submit(scheduler, prompt(13, salt=1), 1, keep=True)  # 13 tokens in 4 blocks
    full = submit(scheduler, prompt(16, salt=2), 1, keep=True)  # 16 tokens in 4 blocks, and younger
    device.drain()
    submit(scheduler, prompt(12, salt=3), 10)
    assert until_preempted(device) == [slim]
    assert full.num_blocks == 4

    scheduler, device = make(num_blocks=12)
    urgent = [submit(scheduler, prompt(8, salt=n), 30, priority=1) for n in range(2)]
    low = sequence(prompt(12, salt=5), 30, priority=-1)
    scheduler.add(low)
    assert until_preempted(device) == [low]
    device.drain()
    assert all(is_right(s, 8) for s in urgent)
    assert is_right(low, 12)


def test_shared_blocks_are_no_gain() -> None:
    """Two idle forks that share all their blocks: neither alone frees anything, together they do."""
    scheduler, device = make(num_blocks=8)
    parent = submit(scheduler, prompt(16), 1, keep=True)
    device.drain()
    child = scheduler.fork(parent)
    other = submit(scheduler, prompt(20, salt=1), 10)
    device.drain()
    assert is_right(other, 20)
    assert parent.num_blocks == child.num_blocks == 0
    for made in (parent, child):
        scheduler.generate(made, 5)
    device.drain()
    assert parent.token_ids == child.token_ids


@pytest.mark.parametrize(("swap_s", "swaps"), [(0.001, True), (10.0, False)])
def test_the_cheaper_way_is_taken(swap_s: float, swaps: bool) -> None:
    scheduler, device = make(num_blocks=8, host_blocks=8)
    scheduler.costs.swap_s_per_block, scheduler.costs.compute_s_per_token = swap_s, 0.01
    first, second = submit(scheduler, prompt(12), 18), submit(scheduler, prompt(12, salt=1), 18)
    assert until_preempted(device) == [second]
    assert second.state is SequenceState.PREEMPTED
    assert bool(second.host_slots) == swaps
    assert (second.num_computed_tokens > 12) == swaps
    computed = 0
    while scheduler.has_work:
        plan, _ = device.step()
        computed += sum(chunk.num_tokens for chunk in plan.chunks if chunk.sequence is second)
        scheduler.check_invariants()
    assert is_right(first, 12)
    assert is_right(second, 12)
    assert (computed < 18) == swaps
    assert scheduler.host.num_free == 8


def test_a_full_host_pool_falls_back_to_recompute() -> None:
    scheduler, device = make(num_blocks=8, host_blocks=2)
    scheduler.costs.compute_s_per_token = 1.0
    made = [submit(scheduler, prompt(12, salt=n), 18) for n in range(3)]
    device.drain()
    assert all(is_right(s, 12) for s in made)


def test_ended_while_swapped_out_gives_the_host_slots_back() -> None:
    scheduler, device = make(num_blocks=8, host_blocks=8)
    scheduler.costs.compute_s_per_token = 1.0
    submit(scheduler, prompt(12), 18)
    second = submit(scheduler, prompt(12, salt=1), 18)
    until_preempted(device)
    scheduler.finish(second, "cancelled")
    assert scheduler.host.num_free == 8
    scheduler.check_invariants()
    device.drain()


def test_an_urgent_request_displaces_a_low_one_and_both_finish() -> None:
    scheduler, device = make(num_blocks=16, max_num_seqs=3)
    low = [submit(scheduler, prompt(10, salt=n), 20, priority=0) for n in range(6)]
    for _ in range(4):
        device.step()
    high = submit(scheduler, prompt(10, salt=9), 5, priority=5)
    steps = 0
    while not high.finished:
        device.step()
        scheduler.check_invariants()
        steps += 1
    assert steps == 5
    device.drain()
    assert is_right(high, 10)
    assert all(is_right(s, 10) for s in low)


def test_a_low_request_under_a_flood_of_urgent_ones_ages_and_finishes() -> None:
    scheduler, device = make(num_blocks=16, max_num_seqs=2, ageing_s=5.0)
    now = 0.0
    flood = [submit(scheduler, prompt(6, salt=salt), 6, priority=1, arrival=now) for salt in range(2)]
    low = submit(scheduler, prompt(6, salt=99), 6, priority=-1, arrival=now)
    for salt in range(100):
        if low.finished:
            break
        if sum(not s.finished for s in flood) < 4:
            flood.append(submit(scheduler, prompt(6, salt=salt + 2), 6, priority=1, arrival=now))
        now += 1.0
        device.step(now)
    assert low.finished
    assert 10 <= now <= 40  # three classes behind, then its turn
    device.drain(now=now)
    assert is_right(low, 6)


def test_a_host_slot_that_is_being_read_is_not_written_in_the_same_step() -> None:
    scheduler, device = make(num_blocks=12, host_blocks=5)
    scheduler.costs.compute_s_per_token = 1.0
    first = submit(scheduler, prompt(12), 9, priority=1)
    device.step()
    scheduler.pause(first)
    low, filler = submit(scheduler, prompt(18, salt=1), 9), submit(scheduler, prompt(16, salt=2), 9)
    device.step()
    assert len(first.host_slots) == 3
    scheduler.finish(filler, "cancelled")
    scheduler.resume(first)
    second = submit(scheduler, prompt(14, salt=3), 9, priority=1)
    plan, _ = device.step()  # brings one back and displaces another: five slots would be needed, two are free
    assert len(plan.swap_in) == 3
    assert (plan.preempted, plan.swap_out) == ([low], [])
    device.drain()
    assert is_right(first, 12)
    assert is_right(second, 14)
    assert is_right(low, 18)
