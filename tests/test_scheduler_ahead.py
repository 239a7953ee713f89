"""Scheduling for a device that works ahead: blocks one token early, and swaps beside a step."""

from __future__ import annotations

import pytest

from kvpool.daemon.memory.sequence import Sequence
from kvpool.daemon.scheduling.limits import OwnerLimits
from kvpool.daemon.scheduling.scheduler import Scheduler
from kvpool.daemon.scheduling.step_plan import StepPlan
from tests.support.fake_device import FakeDevice, undisturbed
from tests.support.scheduling import UID, is_right, make, prompt, sequence, submit


def next_slots(scheduler: Scheduler, device: FakeDevice) -> list[int]:
    """Of one step; every known one is where the token then goes."""
    plan, _ = device.step()
    scheduler.check_invariants()
    slots = [chunk.next_slot for chunk in plan.chunks]
    for chunk, slot in zip(plan.chunks, slots, strict=True):
        if slot >= 0 and not chunk.sequence.finished:
            assert divmod(slot, 4) == device.slot(chunk.sequence, chunk.start + 1)
    return slots


def test_a_block_is_taken_one_token_early_and_only_then() -> None:
    scheduler, device = make(works_ahead=True)
    one = submit(scheduler, prompt(6), 8)
    assert next_slots(scheduler, device) == [-1]  # a prompt: nobody begins the step after it
    held = []
    while not one.finished:
        assert (next_slots(scheduler, device)[0] >= 0) == (one.num_output_tokens < 8)
        held.append(one.num_blocks)
    assert held == [2, 3, 3, 3, 3, 4, 0]  # 7, 8, ... 12 of 13 tokens are computed
    assert is_right(one, 6)
    assert scheduler.pool.num_free == 64


def test_no_block_is_taken_early_for_a_last_token_or_on_a_device_that_does_not_work_ahead() -> None:
    for max_tokens, works_ahead in ((2, True), (9, False)):
        scheduler, device = make(works_ahead=works_ahead)
        one = submit(scheduler, prompt(7), max_tokens)
        device.step()
        assert next_slots(scheduler, device) == [-1]
        assert one.num_blocks == (0 if works_ahead else 2)


def test_nobody_gives_way_for_a_block_taken_early() -> None:
    scheduler, device = make(num_blocks=5, works_ahead=True)
    pair = [submit(scheduler, prompt(7, salt), 5) for salt in (1, 2)]
    device.step()
    assert scheduler.pool.num_free == 1
    known = [slot >= 0 for slot in next_slots(scheduler, device)]
    assert known == [True, False]
    assert not scheduler.preemptions_total
    device.drain()
    assert all(is_right(each, 7) for each in pair)


def test_an_owner_s_limit_holds_for_blocks_taken_early() -> None:
    scheduler, device = make(works_ahead=True, owners={UID: OwnerLimits(max_blocks=4)})
    pair = [submit(scheduler, prompt(3, salt), 6) for salt in (1, 2)]
    while scheduler.has_work:
        device.step()
        scheduler.check_invariants()
        assert scheduler.pool.charged(UID) <= 4
    assert all(is_right(each, 3) for each in pair)


def about_to_cross(**fields: object) -> tuple[Scheduler, FakeDevice, Sequence, StepPlan]:
    """A sequence whose step in flight computes the last token of its second block; it has the third already."""
    scheduler, device = make(works_ahead=True, host_blocks=16)
    one = sequence(prompt(7), 6, keep=True, **fields)
    scheduler.add(one)
    device.step()
    plan = scheduler.schedule(0.0)
    device.launch(plan)
    assert len(one.block_table) == 3
    return scheduler, device, one, plan


@pytest.mark.parametrize("how", ["stop", "pause", "end"])
def test_a_block_for_a_token_that_does_not_come_goes_back(how: str) -> None:
    stop = frozenset({undisturbed(prompt(7), 2)[-1]}) if how == "stop" else frozenset()
    scheduler, device, one, plan = about_to_cross(stop_token_ids=stop)
    if how == "pause":
        scheduler.pause(one)
    elif how == "end":
        assert scheduler.end_answer(one, "cancelled")
    scheduler.update(plan, device.collect())
    assert len(one.block_table) == 2
    assert one.num_computed_tokens == 8
    scheduler.check_invariants()


@pytest.mark.parametrize("swaps", [True, False])
def test_who_is_pushed_out_between_two_steps_leaves_the_early_block_behind(swaps: bool) -> None:
    scheduler, device, one, plan = about_to_cross()
    scheduler.costs.compute_s_per_token = float(swaps)
    scheduler.costs.swap_s_per_block = float(not swaps)
    scheduler.update(plan, device.collect())
    assert len(one.block_table) == 3
    scheduler.check_invariants()
    scheduler.residency.begin(StepPlan(), 0.0)
    scheduler.residency.preempt(one)
    assert len(one.host_slots) == (2 if swaps else 0)
    scheduler.check_invariants()


def test_who_comes_back_travels_beside_a_step_of_the_others() -> None:
    for works_ahead in (False, True):
        scheduler, device = make(num_blocks=12, max_num_seqs=2, host_blocks=12, works_ahead=works_ahead)
        scheduler.costs.compute_s_per_token = 1.0
        low, other = (submit(scheduler, prompt(9, salt), 12) for salt in (1, 2))
        device.step()
        urgent = submit(scheduler, prompt(3, salt=3), 2, priority=1)
        while not urgent.finished:
            device.step()
        assert bool(other.host_slots) != bool(low.host_slots)
        away = other if other.host_slots else low
        plan, _ = device.step()
        assert plan.swap_in
        assert any(chunk.sequence is away for chunk in plan.chunks) != works_ahead
        assert len(plan.chunks) == 2 - works_ahead
        scheduler.check_invariants()
        plan, _ = device.step()
        assert len(plan.chunks) == 2
        device.drain()
        assert is_right(low, 9)
        assert is_right(other, 9)


def test_who_comes_back_to_an_empty_step_is_moved_at_once() -> None:
    scheduler, device = make(num_blocks=8, max_num_seqs=1, host_blocks=12, works_ahead=True)
    scheduler.costs.compute_s_per_token = 1.0
    low = submit(scheduler, prompt(9), 6)
    device.step()
    urgent = submit(scheduler, prompt(3, salt=3), 2, priority=1)
    while not urgent.finished:
        device.step()
    assert low.host_slots
    plan, _ = device.step()
    assert plan.swap_in
    assert not plan.chunks
    device.drain()
    assert is_right(low, 9)
