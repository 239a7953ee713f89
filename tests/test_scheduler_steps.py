"""Steps, one at a time: chunked prefill beside decodes, ends, cancellation in every state, deadlines, refusals."""

from __future__ import annotations

import pytest

from kvpool.client.wire.errors import Busy, NeverFits, QuotaExceeded, TooLong
from kvpool.daemon.memory.sequence import SequenceState
from kvpool.daemon.scheduling.limits import OwnerLimits, SchedulerLimits
from tests.support.fake_device import next_token, undisturbed
from tests.support.scheduling import UID, is_right, make, prompt, sequence, submit


def shape(plan) -> list[tuple[int, int, int, bool]]:  # type: ignore[no-untyped-def]
    """(id, start, rows, samples) of each chunk."""
    return [(c.sequence.sequence_id, c.start, c.num_tokens, c.samples) for c in plan.chunks]


def test_a_prompt_is_computed_in_chunks_beside_decodes_which_come_first() -> None:
    scheduler, device = make(max_num_batched_tokens=8)
    short = submit(scheduler, prompt(3), 6)
    assert shape(device.step()[0]) == [(1, 0, 3, True)]
    long = submit(scheduler, prompt(17, salt=1), 2)
    assert shape(device.step()[0]) == [(1, 3, 1, True), (2, 0, 7, False)]
    assert shape(device.step()[0]) == [(1, 4, 1, True), (2, 7, 7, False)]
    assert shape(device.step()[0]) == [(1, 5, 1, True), (2, 14, 3, True)]
    assert shape(device.step()[0]) == [(1, 6, 1, True), (2, 17, 1, True)]
    assert long.finished
    assert is_right(long, 17)
    device.drain()
    assert is_right(short, 3)
    assert scheduler.pool.num_free == 64


def test_blocks_are_taken_when_tokens_come_and_not_before() -> None:
    scheduler, device = make(max_num_batched_tokens=5)
    submit(scheduler, prompt(11), 8)
    held = []
    while scheduler.has_work:
        device.step()
        held.append(scheduler.pool.num_used)
    assert held == [2, 3, 3, 3, 4, 4, 4, 4, 5, 0]  # 5, 10, 11, 12 ... 18 tokens in blocks of 4


def test_every_running_prompt_gets_a_row_of_every_step() -> None:
    scheduler, device = make(max_num_batched_tokens=6, max_num_seqs=3)
    first, second, third = (submit(scheduler, prompt(n, salt=n), 2) for n in (4, 30, 20))
    device.step()
    assert (first.num_computed_tokens, second.num_computed_tokens) == (4, 2)
    plan, _ = device.step()
    assert sum(chunk.num_tokens for chunk in plan.chunks) == 6
    device.drain()
    assert all(is_right(s, n) for s, n in ((first, 4), (second, 30), (third, 20)))


def test_stop_tokens_end_an_answer_and_min_tokens_holds_them_back() -> None:
    start = prompt(5)
    outputs = undisturbed(start, 8)[5:]
    stop = frozenset({outputs[3]})
    first_stop = outputs.index(outputs[3]) + 1
    scheduler, device = make()
    plain = submit(scheduler, start, 8, stop_token_ids=stop)
    patient = submit(scheduler, start, 8, stop_token_ids=frozenset(outputs), min_tokens=6)
    device.drain()
    assert (plain.finish_reason, plain.num_output_tokens) == ("stop", first_stop)
    assert (patient.finish_reason, patient.num_output_tokens) == ("stop", 6)


def test_max_tokens_zero_computes_the_prompt_only() -> None:
    scheduler, device = make(max_num_batched_tokens=4)
    made = submit(scheduler, prompt(10), 0)
    plans = [device.step()[0] for _ in range(3)]
    assert [chunk.samples for plan in plans for chunk in plan.chunks] == [False] * 3
    assert (made.finish_reason, made.token_ids) == ("length", prompt(10))


def test_a_sequence_ends_at_max_model_len() -> None:
    scheduler, device = make(max_model_len=12)
    made = sequence(prompt(9), 50)  # not checked at the door
    scheduler.add(made)
    device.drain()
    assert (made.finish_reason, made.num_tokens) == ("length", 12)


def test_one_plan_at_a_time() -> None:
    scheduler, device = make()
    submit(scheduler, prompt(5))
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule(0.0)
    device.launch(plan)
    sampled = device.collect()
    scheduler.update(plan, sampled)
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.update(plan, sampled)


def test_a_missing_token_is_a_bug_and_none_leaves_it_to_the_caller() -> None:
    scheduler, device = make()
    made = submit(scheduler, prompt(5), 3)
    plan = scheduler.schedule(0.0)
    device.launch(plan)
    device.collect()
    with pytest.raises(KeyError):
        scheduler.update(plan, {})
    scheduler, device = make()
    made = submit(scheduler, prompt(5), 3)
    plan = scheduler.schedule(0.0)
    device.launch(plan)
    assert scheduler.update(plan, dict.fromkeys(device.collect())) == []
    assert scheduler.schedule(0.0).empty
    scheduler.append(made, [next_token(made.token_ids)])
    device.drain()
    assert is_right(made, 5)


# Cancellation


def test_cancelled_while_queued_others_go_on() -> None:
    scheduler, device = make(max_num_seqs=1)
    running, queued, last = (submit(scheduler, prompt(6, salt=n), 5) for n in range(3))
    device.step()
    assert scheduler.finish(queued, "cancelled")
    assert not scheduler.finish(queued, "cancelled")
    device.drain()
    assert is_right(running, 6)
    assert is_right(last, 6)
    assert queued.token_ids == prompt(6, salt=1)


def test_cancelled_between_chunks_gives_every_block_back() -> None:
    scheduler, device = make(max_num_batched_tokens=8)
    made = submit(scheduler, prompt(32))
    device.step()
    assert scheduler.pool.num_used == 2
    scheduler.finish(made, "cancelled")
    scheduler.check_invariants()
    assert scheduler.pool.num_free == 64
    assert scheduler.schedule(0.0).empty


def test_cancelled_in_flight_keeps_its_blocks_until_the_device_is_done() -> None:
    scheduler, device = make()
    made, other = submit(scheduler, prompt(9)), submit(scheduler, prompt(6, salt=1))
    device.step()
    plan = scheduler.schedule(0.0)
    device.launch(plan)
    assert scheduler.finish(made, "cancelled")
    scheduler.check_invariants()
    assert made.num_blocks == 3
    late = submit(scheduler, prompt(40, salt=2))
    assert device.collect()  # the fake device checks that nobody else got the blocks
    scheduler.update(plan, {chunk.sequence.sequence_id: 1 for chunk in plan.chunks})
    scheduler.check_invariants()
    assert made.num_blocks == 0
    assert made.num_output_tokens == 1
    other.token_ids[-1] = next_token(other.token_ids[:-1])
    device.drain()
    assert is_right(other, 6)
    assert is_right(late, 40)


def test_a_token_that_was_in_flight_when_the_answer_ended_is_dropped() -> None:
    scheduler, device = make()
    chat = submit(scheduler, prompt(5), 9, keep=True)
    device.step()
    plan = scheduler.schedule(0.0)
    device.launch(plan)
    assert scheduler.end_answer(chat, "stop")
    assert not scheduler.end_answer(chat, "stop")
    with pytest.raises(ValueError, match="not idle"):
        scheduler.generate(chat, 3)
    assert scheduler.update(plan, device.collect()) == []
    assert (chat.idle, chat.num_output_tokens, chat.num_computed_tokens) == (True, 1, 6)
    assert scheduler.schedule(0.0).empty
    scheduler.generate(chat, 3)
    device.drain()
    assert chat.token_ids == undisturbed(prompt(5), 4)


def test_cancelled_while_preempted_paused_and_following() -> None:
    scheduler, device = make(num_blocks=10, max_num_seqs=4)
    old, young = submit(scheduler, prompt(12), 20), submit(scheduler, prompt(12, salt=1), 20)
    while young.state is not SequenceState.PREEMPTED:
        device.step()
    scheduler.finish(young, "cancelled")
    scheduler.pause(old)
    scheduler.check_invariants()
    scheduler.finish(old, "cancelled")
    group = [sequence(prompt(20, salt=2)) for _ in range(3)]
    scheduler.add_group(group)
    scheduler.finish(group[2], "cancelled")
    scheduler.check_invariants()
    device.drain()
    assert scheduler.pool.num_free == 10
    assert [is_right(made, 20) for made in group] == [True, True, False]


# Deadlines


def test_a_deadline_that_passes_in_the_queue_is_never_prefilled() -> None:
    scheduler, device = make(max_num_seqs=1)
    running = submit(scheduler, prompt(6), 30)
    device.step(0.0)
    late = submit(scheduler, prompt(6, salt=1), 5, deadline=0.01)
    plan, ended = device.step(0.02)
    assert plan.expired == ended == [late]
    assert (late.finish_reason, late.num_computed_tokens, late.num_output_tokens) == ("deadline", 0, 0)
    assert not late.admitted
    device.drain(now=0.03)
    assert is_right(running, 6)


def test_a_deadline_ends_running_and_paused_sequences_and_wakes_the_daemon() -> None:
    scheduler, device = make()
    running, paused = submit(scheduler, prompt(6), 90, deadline=5.0), submit(scheduler, prompt(6), 9, deadline=4.0)
    device.step(0.0)
    scheduler.pause(paused)
    scheduler.finish(submit(scheduler, prompt(6), 9, deadline=3.0), "cancelled")
    device.step(1.0)
    assert device.step(4.5)[0].expired == [paused]
    scheduler.pause(running)
    plan = scheduler.schedule(4.6)
    assert plan.empty
    assert plan.wake_at == 5.0
    assert device.step(5.0)[0].expired == [running]
    assert running.num_output_tokens == 3
    assert scheduler.schedule(6.0).wake_at is None


# Refusals


def test_what_can_never_run_is_refused_and_the_next_one_runs() -> None:
    scheduler, device = make(num_blocks=50, block_size=16, max_model_len=2000)
    with pytest.raises(NeverFits, match="pool_bytes"):
        submit(scheduler, prompt(60 * 16), 4)
    small = submit(scheduler, prompt(10), 4)
    device.drain()
    assert is_right(small, 10)


def test_the_largest_request_that_fits_runs_and_one_more_token_is_refused() -> None:
    scheduler, device = make(num_blocks=5, block_size=4)
    with pytest.raises(NeverFits):
        submit(scheduler, prompt(12), 10)
    made = submit(scheduler, prompt(12), 9)  # the last sampled token is never computed: 20 slots
    device.drain()
    assert is_right(made, 12)


def test_too_long_names_the_field() -> None:
    scheduler, _ = make(max_model_len=100)
    with pytest.raises(TooLong) as caught:
        scheduler.check_admission(UID, 101, 0)
    assert caught.value.field == "prompt"
    with pytest.raises(TooLong, match="set max_tokens to 40 or less") as caught:
        scheduler.check_admission(UID, 60, 41)
    assert caught.value.field == "max_tokens"
    scheduler.check_admission(UID, 60, 40)


def test_a_full_queue_is_busy_and_says_when_to_come_back() -> None:
    scheduler, _ = make(max_queued=10, max_num_seqs=1)
    accepted = refused = 0
    for salt in range(1000):
        try:
            submit(scheduler, prompt(5, salt=salt))
            accepted += 1
        except Busy as busy:
            refused += busy.retry_after_ms is not None and busy.retry_after_ms > 0
    assert (accepted, refused) == (10, 990)
    with pytest.raises(QuotaExceeded, match="max_queued"):
        scheduler.check_admission(UID, 5, 5, 11)


def test_owner_limits_are_refused_with_their_names() -> None:
    limits = {UID: OwnerLimits(max_blocks=4, max_sequences=3, max_queued=2)}
    scheduler, _ = make(owners=limits)
    with pytest.raises(QuotaExceeded, match="max_blocks"):
        scheduler.check_admission(UID, 15, 3)
    scheduler.check_admission(UID + 1, 15, 3)
    scheduler.check_admission(UID, 15, 2)
    with pytest.raises(QuotaExceeded, match="max_sequences"):
        scheduler.check_admission(UID, 5, 2, 4)
    submit(scheduler, prompt(5))
    submit(scheduler, prompt(5))
    with pytest.raises(Busy, match="max_queued of uid 1000"):
        submit(scheduler, prompt(5))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queued", "ageing_s"])
def test_senseless_limits_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(**{name: 0})


def test_misuse_is_an_error_not_a_corruption() -> None:
    scheduler, device = make()
    made = submit(scheduler, prompt(5), keep=True)
    with pytest.raises(ValueError, match="before"):
        scheduler.add(made)
    with pytest.raises(ValueError, match="not idle"):
        scheduler.generate(made, 4)
    with pytest.raises(ValueError, match="forked"):
        scheduler.fork(made, 9)
    with pytest.raises(ValueError, match="one prompt"):
        scheduler.add_group([sequence(prompt(4)), sequence(prompt(5))])
    plan = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="truncated"):
        scheduler.truncate(made, 2)
    with pytest.raises(ValueError, match="appended"):
        scheduler.append(made, [1])
    device.launch(plan)
    scheduler.update(plan, device.collect())
    scheduler.finish(made, "cancelled")
    with pytest.raises(ValueError, match="appended"):
        scheduler.append(made, [1])
    with pytest.raises(ValueError, match="at least one token"):
        sequence([])
    scheduler.check_invariants()
