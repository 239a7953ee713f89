"""Blocks shared between sequences: prefix hits, prompts in flight, forks at every position, copy-on-write, groups."""

from __future__ import annotations

import pytest

from kvpool.daemon.memory.sequence import IDLE, Sequence, SequenceState
from tests.support.fake_device import next_token, undisturbed
from tests.support.scheduling import UID, is_right, make, prompt, sequence, submit


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_hit_and_miss_give_the_same_at_every_edge_of_a_block(block_size: int, offset: int) -> None:
    """Lengths k * B - 1, k * B, k * B + 1, four times each; the last prompt token is always computed."""
    scheduler, device = make(64, block_size, caching=True, max_num_batched_tokens=200)
    length = 3 * block_size + offset
    if not length:
        return
    expected = undisturbed(prompt(length), 9)
    for turn in range(4):
        made = submit(scheduler, prompt(length), 9)
        computed = device.step()[0].num_tokens
        device.drain()
        assert made.token_ids == expected
        assert computed == length - made.num_cached_tokens >= 1
        # One token is left over; and generated tokens filled further blocks, so a tail inside a block hits as well.
        assert made.num_cached_tokens == (0 if turn == 0 else length - 1)
    scheduler.check_invariants()
    assert scheduler.pool.num_free == 64


def test_a_wholly_cached_prompt_in_a_pool_that_it_fills_needs_no_block_for_the_copy() -> None:
    scheduler, device = make(3, 4, caching=True)
    first = submit(scheduler, prompt(12), 1)
    device.drain()
    again = submit(scheduler, prompt(12), 1)
    device.drain()
    assert first.token_ids == again.token_ids
    assert again.num_cached_tokens == 11
    assert scheduler.cache is not None
    assert len(scheduler.cache) == 3  # written in place, forgotten, and found full again


def test_a_tail_inside_a_block_is_copied_and_the_cached_block_stays() -> None:
    scheduler, device = make(16, 8, caching=True)
    submit(scheduler, prompt(16), 1)
    device.drain()
    branch = submit(scheduler, [*prompt(13), 63, 62], 3)
    plan, _ = device.step()
    assert branch.num_cached_tokens == 13
    assert len(plan.copies) == 1
    device.drain()
    assert is_right(branch, 15)
    again = submit(scheduler, prompt(16), 1)
    device.drain()
    assert again.num_cached_tokens == 15
    little = submit(scheduler, [*prompt(9), 63, 62], 3)  # one token of a block is not worth a copy
    device.drain()
    assert little.num_cached_tokens == 8


@pytest.mark.parametrize("budget", [128, 600])
def test_many_requests_at_once_compute_their_prefix_once(budget: int) -> None:
    scheduler, device = make(512, 16, caching=True, max_num_seqs=64, max_num_batched_tokens=budget, max_model_len=2000)
    shared = prompt(512)
    made = [submit(scheduler, [*shared, n, n], 2) for n in range(64)]
    device.step()
    assert {s.wait_reason for s in made[1:]} == {"its prefix is being computed" if budget == 600 else "queued"}
    device.drain()
    assert scheduler.tokens_computed_total == 512 + 64 * 3
    assert all(is_right(s, 514) for s in made)
    assert [s.num_cached_tokens for s in made] == [0] + [512] * 63


def test_if_whoever_computes_the_prefix_goes_another_one_takes_over() -> None:
    scheduler, device = make(64, 4, caching=True, max_num_batched_tokens=8)
    first, second, third = (submit(scheduler, [*prompt(30), n], 2) for n in range(3))
    device.step()
    assert second.state is third.state is SequenceState.WAITING
    scheduler.finish(first, "cancelled")
    device.step()
    assert second.state is SequenceState.RUNNING
    assert second.num_cached_tokens == 8
    scheduler.pause(second)
    device.step()
    assert third.state is SequenceState.RUNNING
    scheduler.resume(second)
    device.drain()
    assert is_right(second, 31)
    assert is_right(third, 31)


def test_tenants_do_not_see_each_other_but_published_prefixes_are_seen_by_all() -> None:
    scheduler, device = make(64, 4, caching=True)
    mine = submit(scheduler, prompt(20), 1, keep=True)
    device.drain()
    theirs = submit(scheduler, prompt(20), 1, uid=UID + 1)
    device.drain()
    assert theirs.num_cached_tokens == 0
    assert scheduler.publish(mine, 13) == 3
    assert scheduler.publish(mine, 13) == 3
    third = submit(scheduler, prompt(20), 1, uid=UID + 2)
    device.drain()
    assert third.num_cached_tokens == 12
    again = submit(scheduler, prompt(20), 1)
    device.drain()
    assert again.num_cached_tokens == 19  # its own chain goes on behind the published part
    scheduler.check_invariants()


def test_generated_tokens_are_cached_too() -> None:
    scheduler, device = make(64, 4, caching=True)
    first = submit(scheduler, prompt(6), 15)
    device.drain()
    second = submit(scheduler, [*first.token_ids, 5], 3)
    device.drain()
    assert second.num_cached_tokens == 20  # 21 tokens were known, the last of them was never computed
    assert is_right(second, 22)


def test_a_recomputed_sequence_finds_its_own_blocks() -> None:
    scheduler, device = make(10, 4, caching=True, max_num_batched_tokens=100)
    first, second = submit(scheduler, prompt(8), 20), submit(scheduler, prompt(17, salt=1), 20)
    while not second.preemptions:
        device.step()
    while first.state is SequenceState.RUNNING:
        device.step()
    before = scheduler.tokens_computed_total
    device.drain()
    assert scheduler.tokens_computed_total - before < second.num_tokens
    assert is_right(second, 17)


# Forks


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_fork_at_every_position(block_size: int, caching: bool) -> None:
    scheduler, device = make(128, block_size, caching=caching, max_num_seqs=16)
    parent = submit(scheduler, prompt(9), 6, keep=True)
    device.drain()
    tokens = list(parent.token_ids)
    children = [(at, scheduler.fork(parent, at)) for at in range(1, len(tokens) + 1)]
    assert all(child.wait_reason == IDLE for _, child in children)
    used = scheduler.pool.num_used
    for number, (at, child) in enumerate(children):
        assert child.token_ids == tokens[:at]
        scheduler.append(child, [number])
        scheduler.generate(child, 5)
    assert scheduler.pool.num_used == used  # nothing was copied yet
    device.drain()
    for number, (at, child) in enumerate(children):
        assert child.token_ids == undisturbed([*tokens[:at], number], 5)
        assert child.num_cached_tokens == min(at, 14)
    scheduler.generate(parent, 5)
    device.drain()
    assert parent.token_ids == undisturbed(tokens, 5)


def test_concurrent_writers_copy_the_shared_tail_once_each_but_the_last() -> None:
    scheduler, device = make(64, 8)
    parent = submit(scheduler, prompt(11), 1, keep=True)
    device.drain()
    family = [parent, *(scheduler.fork(parent) for _ in range(3))]
    for member in family:
        scheduler.generate(member, 6)
    plan, _ = device.step()
    assert len(plan.copies) == 3
    assert scheduler.pool.num_used == 1 + 4
    device.drain()
    assert all(member.token_ids == parent.token_ids for member in family)


def test_a_fork_of_a_running_sequence_and_its_parent_go_on_side_by_side() -> None:
    scheduler, device = make(64, 4, caching=True)
    parent = submit(scheduler, prompt(9), 20)
    children: list[Sequence] = []
    for _ in range(6):
        plan = scheduler.schedule(0.0)
        device.launch(plan)
        child = scheduler.fork(parent)
        child.keep = True
        children.append(child)
        scheduler.generate(child, 10)
        scheduler.update(plan, device.collect())
        scheduler.check_invariants()
    device.drain()
    for child in children:
        assert child.token_ids == undisturbed(prompt(9), 20)[: child.num_tokens]
        assert child.num_output_tokens == 10
    assert is_right(parent, 9)


def test_a_fork_for_another_user_is_charged_to_whoever_is_left() -> None:
    scheduler, device = make(64, 4)
    parent = submit(scheduler, prompt(12), 1, keep=True)
    device.drain()
    child = scheduler.fork(parent, uid=UID + 1)
    assert scheduler.pool.charges() == {UID: 3}
    scheduler.finish(parent, "cancelled")
    assert scheduler.pool.charges() == {UID + 1: 3}
    scheduler.check_invariants()
    scheduler.finish(child, "cancelled")
    assert scheduler.pool.charges() == {}


def test_truncate_then_continue_and_append_then_continue() -> None:
    scheduler, device = make(64, 4, caching=True)
    made = submit(scheduler, prompt(10), 9, keep=True)
    device.drain()
    tokens = list(made.token_ids)
    for length in (15, 12, 11, 4, 1):
        scheduler.truncate(made, length)
        scheduler.check_invariants()
        assert made.num_blocks == -(-length // 4)
        scheduler.generate(made, 3)
        device.drain()
        assert made.token_ids == undisturbed(tokens[:length], 3)
        tokens = list(made.token_ids)
    scheduler.append(made, [1, 2, 3, 4, 5])
    scheduler.generate(made, 3)
    device.drain()
    assert made.token_ids == undisturbed([*tokens, 1, 2, 3, 4, 5], 3)


def test_what_was_truncated_and_written_anew_is_found_under_its_new_tokens() -> None:
    scheduler, device = make(64, 4, caching=True)
    made = submit(scheduler, prompt(16), 1, keep=True)
    device.drain()
    scheduler.truncate(made, 6)
    scheduler.append(made, [60, 61, 62, 63, 60, 61])
    scheduler.generate(made, 1)
    device.drain()
    new, old = submit(scheduler, [*made.token_ids[:12], 5], 1), submit(scheduler, [*prompt(16), 5], 1)
    device.drain()
    assert (new.num_cached_tokens, old.num_cached_tokens) == (12, 16)


def test_an_idle_sequence_survives_the_loss_of_its_blocks() -> None:
    for host_blocks in (0, 16):
        scheduler, device = make(8, 4, host_blocks=host_blocks)
        scheduler.costs.compute_s_per_token = 1.0
        chat = submit(scheduler, prompt(12), 4, keep=True)
        device.drain()
        tokens = list(chat.token_ids)
        device_filler = submit(scheduler, prompt(30, salt=1), 2)
        device.drain()
        assert is_right(device_filler, 30)
        assert (chat.num_blocks, bool(chat.host_slots)) == (0, bool(host_blocks))
        scheduler.truncate(chat, 14)
        scheduler.append(chat, [9])
        scheduler.generate(chat, 6)
        device.drain()
        assert chat.token_ids == undisturbed([*tokens[:14], 9], 6)


# Groups


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 12, 30])
def test_a_group_computes_its_prompt_once(length: int, caching: bool) -> None:
    scheduler, device = make(64, 4, caching=caching, max_num_batched_tokens=10)
    group = [sequence(prompt(length), 6) for _ in range(4)]
    scheduler.add_group(group)
    before = scheduler.tokens_computed_total
    device.drain()
    assert all(is_right(made, length) for made in group)
    assert scheduler.tokens_computed_total - before == length + 3 + 4 * 5
    assert scheduler.pool.num_free == 64


def test_members_of_a_group_share_the_prompt_s_blocks() -> None:
    scheduler, device = make(64, 4)
    group = [sequence(prompt(18), 9) for _ in range(4)]
    scheduler.add_group(group)
    for _ in range(3):
        device.step()
    assert all(made.state is SequenceState.RUNNING for made in group)
    assert len({tuple(made.block_table[:4]) for made in group}) == 1
    assert scheduler.pool.num_used == 4 + 4
    assert len({made.block_table[4] for made in group}) == 4


@pytest.mark.parametrize("event", ["finish", "finish in flight", "pause", "deadline"])
def test_a_group_goes_on_without_its_leader(event: str) -> None:
    scheduler, device = make(64, 4, max_num_batched_tokens=8)
    group = [sequence(prompt(20), 5, deadline=1.0 if event == "deadline" and n == 0 else None) for n in range(4)]
    scheduler.add_group(group)
    device.step()
    scheduler.finish(group[2], "cancelled")
    plan = scheduler.schedule(0.0)
    device.launch(plan)
    if event == "finish in flight":
        scheduler.finish(group[0], "cancelled")
    sampled = device.collect()
    scheduler.update(plan, sampled)
    if event == "finish":
        scheduler.finish(group[0], "cancelled")
    elif event == "pause":
        scheduler.pause(group[0])
    computed = scheduler.tokens_computed_total
    device.drain(now=2.0)
    assert is_right(group[1], 20)
    assert is_right(group[3], 20)
    assert scheduler.tokens_computed_total - computed < 20 + 2 * 5  # what the leader computed was not lost
    if event == "pause":
        scheduler.resume(group[0])
        device.drain()
        assert is_right(group[0], 20)
    assert scheduler.pool.num_free == 64


def test_parallel_samples_that_cannot_run_at_once_run_in_turn() -> None:
    scheduler, device = make(8, 4, max_num_seqs=16)
    group = [sequence(prompt(16), 14) for _ in range(12)]
    scheduler.check_admission(UID, 16, 14, 12)
    scheduler.add_group(group)
    device.drain()
    assert all(is_right(made, 16) for made in group)


# Beam search, as an engine does it


def test_beams_by_fork_and_append_share_their_past() -> None:
    """Width 3 over a scorer that knows only tokens: the same beams as a plain search, and fewer blocks than copies."""
    width, steps, start = 3, 12, prompt(21)

    def candidates(tokens: list[int]) -> list[tuple[int, int]]:
        first = next_token(tokens)
        return [(-((first * 7 + k * 13) % 50), (first + k) % 64) for k in range(width)]

    def best(beams: list[tuple[int, list[int]]]) -> list[tuple[int, int, int]]:
        found = [(s + score, n, token) for n, (s, t) in enumerate(beams) for score, token in candidates(t)]
        return sorted(found, key=lambda f: (-f[0], f[1], f[2]))[:width]

    plain: list[tuple[int, list[int]]] = [(0, start)]
    for _ in range(steps):
        plain = [(score, [*plain[n][1], token]) for score, n, token in best(plain)]

    scheduler, device = make(200, 4, max_num_seqs=8)
    beams = [(0, submit(scheduler, start, steps + 1))]
    most_used = 0
    for _ in range(steps):
        while any(s.num_computed_tokens < s.num_tokens for _, s in beams):
            plan = scheduler.schedule(0.0)
            device.launch(plan)
            scheduler.update(plan, dict.fromkeys(device.collect()))
        chosen = best([(score, s.token_ids) for score, s in beams])
        parents = [s for _, s in beams]
        following: list[tuple[int, Sequence]] = []
        for score, n, token in chosen:
            child = scheduler.fork(parents[n])
            scheduler.append(child, [token])
            scheduler.generate(child, steps + 1)
            following.append((score, child))
        for parent in parents:
            scheduler.finish(parent, "stop")
        beams = following
        most_used = max(most_used, scheduler.pool.num_used)
        scheduler.check_invariants()
    assert [(score, made.token_ids) for score, made in beams] == plain
    copies = width * -(-(len(start) + steps) // 4)
    assert most_used < 0.7 * copies
    for _, made in beams:
        scheduler.finish(made, "length")
    assert scheduler.pool.num_free == 200


# Sliding window


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_blocks_that_left_the_window_go_back(window: int) -> None:
    scheduler, device = make(6, 4, window=window, max_num_batched_tokens=6)
    made = submit(scheduler, prompt(50), 60)
    held = []
    while scheduler.has_work:
        device.step()
        scheduler.check_invariants()
        held.append(scheduler.pool.num_used)
    assert is_right(made, 50)
    assert max(held) <= -(-(window + 6) // 4) + 1
    assert scheduler.pool.num_free == 6


def test_window_with_forks_truncation_preemption_and_swap() -> None:
    for host_blocks in (0, 12):
        scheduler, device = make(7, 4, window=9, host_blocks=host_blocks)
        scheduler.costs.compute_s_per_token = 1.0
        chat = submit(scheduler, prompt(30), 5, keep=True)
        device.drain()
        tokens = list(chat.token_ids)
        near, far = scheduler.fork(chat, 33), scheduler.fork(chat, 12)
        assert (near.num_computed_tokens, far.num_computed_tokens) == (33, 0)
        others = [submit(scheduler, prompt(25, salt=n), 20) for n in range(3)]
        for made in (near, far):
            scheduler.generate(made, 7)
        device.drain()
        assert near.token_ids == undisturbed(tokens[:33], 7)
        assert far.token_ids == undisturbed(tokens[:12], 7)
        assert all(is_right(made, 25) for made in others)
        for length in (34, 31, 20):
            scheduler.truncate(chat, length)
            scheduler.generate(chat, 1)
            device.drain()
            assert chat.token_ids == undisturbed(tokens[:length], 1)


def test_ids_are_never_used_again() -> None:
    scheduler, _ = make()
    ids = []
    for _ in range(5):
        made = submit(scheduler, prompt(4))
        ids.append(made.sequence_id)
        scheduler.finish(made, "cancelled")
    assert len(set(ids)) == 5
