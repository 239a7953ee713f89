"""The engine without sockets: every way in which a sequence can end, each exactly once, with nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.client.wire.errors import Busy, InvalidArgument, KVPoolError, NeverFits, TooLong
from kvpool.daemon.engine.engine import DeviceLost
from kvpool.daemon.engine.request import Request, sample_seed
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.loading import LoadedModel
from tests.support.engine_harness import Harness, prompts, reasons, tiny_model
from tests.support.numpy_backend import NumpyBackend

PROMPT = "The sea is"
LONG = prompts(1, 100)[0]


@pytest.fixture
def engine() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.assert_clean()
    harness.close()


def small(**options: Any) -> Harness:
    return Harness(**({"max_num_batched_tokens": 32, "num_blocks": 12} | options))


# Text and ends


def test_text_is_the_tokenizers_text(engine: Harness) -> None:
    answer = engine.generate(PROMPT, max_tokens=24)
    assert answer.reason == "length"
    assert len(answer.token_ids) == 24
    assert answer.text == tiny_model().tokenizer.decode(answer.token_ids, continuing=True)


def test_nobody_asked_for_text_or_logprobs(engine: Harness) -> None:
    answer = engine.generate(PROMPT, want_text=False)
    assert (answer.text, answer.logprobs, answer.top_logprobs) == ("", [], [])
    assert answer.token_ids == engine.generate(PROMPT).token_ids


def test_logprobs(engine: Harness) -> None:
    answer = engine.generate(PROMPT, logprobs=3)
    assert [top[0][0] for top in answer.top_logprobs] == answer.token_ids
    assert [top[0][1] for top in answer.top_logprobs] == answer.logprobs
    assert all(len(top) == 3 for top in answer.top_logprobs)
    assert engine.generate(PROMPT, logprobs=0).top_logprobs == []


@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_stop_string_over_token_borders_never_shows(engine: Harness, length: int) -> None:
    whole = engine.generate(PROMPT, max_tokens=24)
    at = 5
    stop = whole.text[at : at + length]
    answer = engine.generate(PROMPT, max_tokens=24, stop=[stop])
    assert answer.reason == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    shown = engine.generate(PROMPT, max_tokens=24, stop=[stop], include_stop_str_in_output=True)
    assert shown.text == answer.text + stop


def test_text_held_for_a_stop_string_that_does_not_come(engine: Harness) -> None:
    whole = engine.generate(PROMPT)
    answer = engine.generate(PROMPT, stop=[whole.text[-2:] + "never"])
    assert (answer.text, answer.reason) == (whole.text, "length")
    assert answer.finished is not None
    assert answer.finished.text == whole.text[-2:]


def test_a_stop_string_in_the_last_token_is_a_stop(engine: Harness) -> None:
    whole = engine.generate(PROMPT)
    answer = engine.generate(PROMPT, stop=[whole.text[-1]])
    assert answer.reason == "stop"


def test_stop_token_ids_end_the_text_before_them(engine: Harness) -> None:
    whole = engine.generate(PROMPT)
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop) + 1
    answer = engine.generate(PROMPT, stop_token_ids=[stop])
    assert answer.reason == "stop"
    assert answer.token_ids == whole.token_ids[:first]
    assert answer.text == tiny_model().tokenizer.decode(whole.token_ids[: first - 1], continuing=True)


def test_min_tokens_bans_the_stop_tokens(engine: Harness) -> None:
    stop = engine.generate(PROMPT).token_ids[0]
    answer = engine.generate(PROMPT, stop_token_ids=[stop], min_tokens=4)
    assert stop not in answer.token_ids[:4]
    assert len(answer.token_ids) >= 4


def test_end_of_text_counts_only_when_generated(engine: Harness) -> None:
    end = tiny_model().tokenizer.eos_token_ids[0]
    for prompt in ([5, end, 9], [5, 9, end], [end]):
        assert engine.generate(prompt).token_ids
    forced = engine.generate(PROMPT, allowed_token_ids=[end])
    assert (forced.token_ids, forced.text, forced.reason) == ([end], "", "stop")
    ignoring = engine.generate(PROMPT, allowed_token_ids=[end], ignore_eos=True, max_tokens=3)
    assert (ignoring.token_ids, ignoring.reason) == ([end] * 3, "length")
    assert engine.generate(
        PROMPT, allowed_token_ids=[end], ignore_eos=True, max_tokens=1, skip_special_tokens=False
    ).text


def test_max_tokens_zero_only_computes_the_prompt(engine: Harness) -> None:
    answer = engine.generate(LONG, max_tokens=0)
    assert (answer.token_ids, answer.text, answer.reason) == ([], "", "length")
    again = engine.generate(LONG, max_tokens=1)
    assert again.finished is not None
    assert again.finished.usage.cached_tokens == 96


@pytest.mark.parametrize(
    ("prompt", "options", "error", "field"),
    [
        ([], {}, InvalidArgument, "prompt"),
        ("", {}, InvalidArgument, "prompt"),
        ([384], {}, InvalidArgument, "prompt[0]"),
        ([3, 2**31 - 1], {}, InvalidArgument, "prompt[1]"),
        (LONG * 3, {}, TooLong, "prompt"),
        (LONG, {"max_tokens": 157}, TooLong, "max_tokens"),
        ("x" * 70_000, {}, TooLong, "prompt"),
        (PROMPT, {"logit_bias": {384: 1.0}}, InvalidArgument, "logit_bias"),
        (PROMPT, {"allowed_token_ids": [384]}, InvalidArgument, "allowed_token_ids"),
        (PROMPT, {"stop_token_ids": [2**31 - 1]}, InvalidArgument, "stop_token_ids"),
        (PROMPT, {"allowed_token_ids": [2], "min_tokens": 1}, InvalidArgument, "allowed_token_ids"),
        (PROMPT, {"pooling": "mean"}, InvalidArgument, "pooling"),
        (PROMPT, {"keep": True, "n": 2}, InvalidArgument, "keep"),
    ],
)
def test_what_cannot_be_is_refused_and_keeps_nothing(
    engine: Harness, prompt: Any, options: dict[str, Any], error: type[KVPoolError], field: str
) -> None:
    with pytest.raises(error) as refusal:
        engine.submit(prompt, **options)
    assert refusal.value.field == field
    assert engine.generate(PROMPT).reason == "length"


def test_what_never_fits_is_refused_and_a_small_one_runs() -> None:
    harness = small(num_blocks=4)
    with pytest.raises(NeverFits, match="set pool_bytes to hold 7 blocks"):
        harness.submit(LONG)
    assert harness.generate(PROMPT).reason == "length"
    harness.assert_clean()


def test_the_queue_has_an_end() -> None:
    harness = small(max_num_seqs=1, max_queued=10)
    accepted = [harness.submit([5], max_tokens=2) for _ in range(10)]
    with pytest.raises(Busy) as refusal:
        harness.submit([5])
    assert refusal.value.retry_after_ms
    harness.run()
    assert reasons(harness.answer(request) for request in accepted) == ["length"] * 10
    harness.assert_clean()


# n samples and seeds


def test_samples_have_their_own_randomness_and_the_first_is_the_request_alone(engine: Harness) -> None:
    alone = engine.generate(PROMPT, temperature=1.0, seed=3)
    group = engine.submit(PROMPT, temperature=1.0, seed=3, n=3)
    engine.run()
    answers = [engine.answer(group, index) for index in range(3)]
    assert answers[0].token_ids == alone.token_ids
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    second = engine.generate(PROMPT, temperature=1.0, seed=sample_seed(3, 1))
    assert answers[1].token_ids == second.token_ids


def test_no_seed_is_a_fresh_seed(engine: Harness) -> None:
    requests = [engine.submit(PROMPT, temperature=1.0, max_tokens=16) for _ in range(2)]
    engine.run()
    assert requests[0].seed != requests[1].seed
    assert engine.answer(requests[0]).token_ids != engine.answer(requests[1]).token_ids


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_is_defined(engine: Harness, seed: int) -> None:
    first = engine.generate(PROMPT, temperature=1.0, seed=seed)
    assert engine.generate(PROMPT, temperature=1.0, seed=seed).token_ids == first.token_ids


def test_more_samples_than_the_pool_holds_finish_one_after_the_other() -> None:
    harness = small(num_blocks=6, max_num_seqs=4)
    group = harness.submit(prompts(1, 20)[0], n=12, max_tokens=20, temperature=1.0, seed=1)
    harness.run()
    assert reasons(harness.answer(group, index) for index in range(12)) == ["length"] * 12
    harness.assert_clean()


# Ends from outside, in every state


def test_cancel_while_queued_leaves_the_active_one_alone() -> None:
    harness = small(max_num_seqs=1)
    expected = harness.generate(PROMPT).token_ids
    active, queued = harness.submit(PROMPT), harness.submit(PROMPT)
    harness.turn()
    harness.engine.cancel(queued)
    harness.run()
    assert harness.answer(queued).reason == "cancelled"
    assert harness.answer(active).token_ids == expected
    harness.assert_clean()


@pytest.mark.parametrize("turns", range(1, 9))
def test_cancel_at_any_turn_from_the_first_chunk_to_the_last_token(turns: int) -> None:
    harness = small(prefix_cache=False)
    request = harness.submit(LONG, max_tokens=4)
    other = harness.submit(PROMPT, max_tokens=8)
    for _ in range(turns):
        harness.turn()
    harness.engine.cancel(request)
    harness.engine.cancel(request)
    harness.run()
    assert harness.answer(request).reason in ("cancelled", "length")
    assert harness.answer(other).reason == "length"
    harness.assert_clean()


def test_cancel_a_group_while_its_prompt_is_computed() -> None:
    harness = small()
    group = harness.submit(LONG, n=3)
    harness.turn()
    harness.engine.cancel(group)
    harness.run()
    assert reasons(harness.answer(group, index) for index in range(3)) == ["cancelled"] * 3
    harness.assert_clean()


def test_cancel_while_paused(engine: Harness) -> None:
    request = engine.submit(PROMPT, credit=2)
    engine.run()
    engine.engine.cancel(request)
    engine.run()
    assert (engine.answer(request).reason, len(engine.answer(request).token_ids)) == ("cancelled", 2)


def crowded(host_blocks: int = 0) -> tuple[Harness, Request, Request]:
    """A low request that has just lost its blocks to a high one."""
    harness = small(num_blocks=6, host_blocks=host_blocks, prefix_cache=False)
    harness.scheduler.costs.compute_s_per_token = 1.0  # so that swapping is the cheaper way, where there is room
    low_prompt, high_prompt = prompts(2, 40)
    low = harness.submit(low_prompt, max_tokens=40)
    for _ in range(10):
        harness.turn()
    high = harness.submit(high_prompt, max_tokens=20, priority=5)
    while not harness.scheduler.preemptions_total:
        harness.turn()
    return harness, low, high


def test_cancel_while_preempted() -> None:
    harness, low, high = crowded()
    assert [notice.kind for notice in harness.answer(low).notices] == ["preempted"]
    harness.engine.cancel(low)
    harness.run()
    assert reasons([harness.answer(low), harness.answer(high)]) == ["cancelled", "length"]
    harness.assert_clean()


def test_a_deadline_in_the_queue_ends_with_no_token() -> None:
    harness = small(max_num_seqs=1)
    active = harness.submit(PROMPT, max_tokens=30)
    harness.turn()
    late = harness.submit(PROMPT, deadline_s=0.01)
    harness.turn()
    harness.now += 0.02
    harness.run()
    assert (harness.answer(late).reason, harness.answer(late).token_ids) == ("deadline", [])
    assert harness.answer(active).reason == "length"
    harness.assert_clean()


def test_a_deadline_keeps_the_tokens_so_far(engine: Harness) -> None:
    request = engine.submit(PROMPT, max_tokens=100, deadline_s=1.0)
    for _ in range(5):
        engine.turn()
    engine.now += 2.0
    engine.run()
    answer = engine.answer(request)
    assert answer.reason == "deadline"
    assert 0 < len(answer.token_ids) < 100


def test_a_deadline_passes_while_nothing_runs(engine: Harness) -> None:
    request = engine.submit(PROMPT, credit=1, deadline_s=5.0)
    engine.run()
    assert engine.engine.wake_at == engine.now + 5.0
    engine.now += 5.0
    engine.turn()
    assert engine.answer(request).reason == "deadline"


# Flow control


@pytest.mark.parametrize("credit", [0, 1, 3])
def test_credit_is_exact_and_loses_nothing(engine: Harness, credit: int) -> None:
    expected = engine.generate(PROMPT)
    request = engine.submit(PROMPT, credit=credit)
    engine.submit(PROMPT)
    engine.run()
    answer = engine.answers.get((request.request_id, 0))
    assert answer is not None
    assert len(answer.token_ids) == credit
    assert [notice.kind for notice in answer.notices] == ["paused"]
    engine.engine.pace.grant(request, 2)
    engine.run()
    assert len(answer.token_ids) == credit + 2
    engine.engine.pace.grant(request, 100, 0)
    engine.run()
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert [notice.kind for notice in answer.notices] == ["paused", "resumed", "paused", "resumed"]


def test_a_held_request_goes_on_where_it_was(engine: Harness) -> None:
    expected = engine.generate(PROMPT)
    request, other = engine.submit(PROMPT), engine.submit(PROMPT)
    engine.turn()
    engine.turn()
    engine.engine.pace.hold(request, "its reader is slow")
    engine.engine.pace.grant(request, 5)
    engine.run()
    assert engine.answer(request).reason is None
    assert engine.answer(other).token_ids == expected.token_ids
    engine.engine.pace.unhold(request)
    engine.run()
    assert engine.answer(request).token_ids == expected.token_ids


# Memory pressure


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_preemption_changes_no_token(host_blocks: int) -> None:
    alone = Harness()
    expected = [alone.generate(prompt, max_tokens=40).token_ids for prompt in prompts(2, 40)]
    harness, low, high = crowded(host_blocks)
    assert bool(low.samples[0].sequence.host_slots) == bool(host_blocks)
    harness.run()
    assert harness.answer(low).token_ids == expected[0]
    assert harness.answer(high).token_ids == expected[1][:20]
    harness.assert_clean()


def test_waste_is_at_most_the_tails(engine: Harness) -> None:
    engine.generate(LONG, max_tokens=20)
    assert 0.0 < engine.metrics.kv_waste_ratio < 16 / 101


# The device


class Faulty(NumpyBackend):
    """Fails, or answers NaN, when told to."""

    nan_rows: tuple[int, ...] = ()
    failing = 0

    def collect(self) -> Any:
        result = super().collect()
        if self.failing:
            self.failing -= 1
            raise RuntimeError("out of order")
        for row in self.nan_rows:
            result.numeric_errors[row] = True
        self.nan_rows = ()
        return result


def faulty(model: LoadedModel, limits: BackendLimits) -> Backend:
    return Faulty(model.program, model.checkpoint, limits)


def test_nan_in_one_row_fails_that_sequence_alone() -> None:
    harness = Harness(make_backend=faulty)
    expected = harness.generate(PROMPT).token_ids
    first, second = harness.submit(PROMPT), harness.submit(LONG)
    harness.turn()
    harness.turn()
    harness.backend.nan_rows = (1,)
    harness.run()
    failed = harness.answer(second).finished
    assert failed is not None
    assert (failed.finish_reason, failed.error and failed.error.code) == ("error", "numeric")
    assert harness.answer(first).token_ids == expected
    harness.assert_clean()


def test_a_failed_step_ends_its_sequences_and_the_next_request_is_right() -> None:
    harness = Harness(make_backend=faulty)
    expected = harness.generate(PROMPT).token_ids
    requests = [harness.submit(prompt) for prompt in prompts(3, 5)]
    for _ in range(3):
        harness.turn()
    harness.backend.failing = 1
    harness.run()
    for request in requests:
        finished = harness.answer(request).finished
        assert finished is not None
        assert (finished.finish_reason, finished.error and finished.error.code) == ("error", "internal")
    assert harness.generate(PROMPT).token_ids == expected
    harness.assert_clean()


def test_a_device_that_fails_again_and_again_is_lost() -> None:
    harness = Harness(make_backend=faulty)
    harness.backend.failing = 3
    for _ in range(2):
        harness.generate(PROMPT)
    harness.submit(PROMPT)
    harness.turn()
    with pytest.raises(DeviceLost, match="3 steps in a row failed; the last: out of order"):
        harness.turn()


# The last user's state


def test_nothing_of_the_last_user_is_left_in_a_row(engine: Harness) -> None:
    plain = engine.generate(PROMPT).token_ids
    engine.generate(
        PROMPT,
        temperature=1.0,
        seed=1,
        top_k=3,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias={7: 50.0},
        allowed_token_ids=[7, 8, 9],
        min_tokens=4,
    )
    assert engine.generate(PROMPT).token_ids == plain


def test_penalties_see_what_was_generated(engine: Harness) -> None:
    banned = engine.generate(PROMPT, allowed_token_ids=[7, 8], logit_bias={7: 3.0}, frequency_penalty=2.0, max_tokens=6)
    assert set(banned.token_ids) == {7, 8}
