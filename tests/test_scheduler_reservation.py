"""The old ways of taking memory, in the same scheduler: what they hold, what they refuse, and the same tokens."""

from __future__ import annotations

import pytest

from kvpool.client.wire.errors import NeverFits
from kvpool.daemon.memory.reservation import Reservation, reserved_tokens
from tests.support.scheduling import UID, is_right, make, prompt, sequence, submit


@pytest.mark.parametrize(
    ("policy", "output", "tokens"),
    [
        ("on-demand", 100, 0),
        ("max", 100, 2048),
        ("pow2", 25, 10 + 32),
        ("pow2", 32, 10 + 32),
        ("pow2", 33, 10 + 64),
        ("pow2", 1, 10 + 1),
        ("pow2", 2040, 2048),
        ("oracle", 25, 10 + 25),
    ],
)
def test_reserved_tokens(policy: Reservation, output: int, tokens: int) -> None:
    assert reserved_tokens(policy, num_prompt_tokens=10, output_tokens=output, max_model_len=2048) == tokens


@pytest.mark.parametrize(("policy", "blocks"), [("max", 16), ("pow2", 7), ("oracle", 5), ("on-demand", 3)])
def test_memory_is_taken_at_admission_and_held_to_the_end(policy: Reservation, blocks: int) -> None:
    """10 prompt tokens, max_tokens 30 of which 9 will come, in blocks of 4, max_model_len 64."""
    scheduler, device = make(64, 4, max_model_len=64, reservation=policy)
    made = sequence(prompt(10), 9, expected_output_tokens=9)
    scheduler.add(made)
    device.step()
    held = [scheduler.pool.num_used]
    while scheduler.has_work:
        device.step()
        scheduler.check_invariants()
        held.append(scheduler.pool.num_used)
    assert held[0] == blocks
    assert held[-1] == 0
    assert set(held[:-1]) == ({3, 4, 5} if policy == "on-demand" else {blocks})
    assert is_right(made, 10)


def test_paging_runs_more_sequences_in_the_same_memory() -> None:
    most = {}
    policies: tuple[Reservation, ...] = ("max", "pow2", "oracle", "on-demand")
    for policy in policies:
        scheduler, device = make(32, 4, max_model_len=64, max_num_seqs=32, reservation=policy)
        made = [sequence(prompt(6, n), 18) for n in range(20)]
        for one in made:
            scheduler.add(one)
        running = 0
        while scheduler.has_work:
            device.step()
            running = max(running, len(scheduler.roster.running))
        assert all(is_right(one, 6) for one in made)
        assert scheduler.preemptions_total == 0 or policy == "on-demand"
        most[policy] = running
    assert most["max"] == 2
    assert most["max"] < most["pow2"] < most["oracle"] < most["on-demand"]


def test_what_the_reservation_needs_is_proved_at_the_door() -> None:
    scheduler, _ = make(15, 4, max_model_len=64, reservation="max")
    with pytest.raises(NeverFits):
        scheduler.check_admission(UID, 5, 5)
    scheduler, device = make(16, 4, max_model_len=64, reservation="max")
    first, second = submit(scheduler, prompt(5), 5), submit(scheduler, prompt(5, 1), 5)
    device.step()
    assert second.wait_reason.startswith("needs 16 blocks")
    device.drain()
    assert is_right(first, 5)
    assert is_right(second, 5)
