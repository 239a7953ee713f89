"""An engine dies at any turn, and the next one goes on with the same bits: tokens, text, logprobs, ends."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.wire.protocol import Submit, pack_token_ids
from kvpool.daemon.engine.submission import make_request, submit_of
from kvpool.daemon.persistence.journal import Journal
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from tests.support.engine_harness import MAX_MODEL_LEN, Harness, prompts, tiny_model
from tests.support.journals import open_journal

LIMITS = BackendLimits(16, 4, 32, MAX_MODEL_LEN)

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "The sea is", "max_tokens": 20, "ignore_eos": True},
    "drawn": {"prompt": "No seed", "max_tokens": 15, "temperature": 1.0, "logprobs": 2},
    "three": {"prompt": "Three of them", "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3, "logprobs": 0},
    "long": {"prompt": prompts(1, 100)[0], "max_tokens": 8, "ignore_eos": True},
    "penalties": {"prompt": "aaa", "max_tokens": 18, "presence_penalty": 1.0, "repetition_penalty": 1.3, "seed": 5},
    "stop": {"prompt": "Stop", "max_tokens": 40, "temperature": 1.0, "seed": 11, "stop": ("e", "qu"), "min_tokens": 3},
    "kept": {"prompt": "Keep", "max_tokens": 40, "temperature": 1.0, "seed": 12, "stop": ("a", "e"), "keep": True},
    "stop ids": {"prompt": "Ends", "max_tokens": 30, "stop_token_ids": tuple(range(0, 384, 5)), "min_tokens": 2},
    "silent": {"prompt": "No text", "max_tokens": 10, "want_text": False, "temperature": 1.0, "seed": 2**64 - 1},
    "slow": {"prompt": "Few at a time", "max_tokens": 16, "credit": 5, "ignore_eos": True},
    "hidden": {"prompt": "Layers", "max_tokens": 6, "ignore_eos": True, "hidden_layers": (0, -1)},
    "nothing": {"prompt": "Only the prompt", "max_tokens": 0},
}


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """The real one: its bits do not depend on what runs together."""
    model = tiny_model()
    made = CpuBackend(model.program, model.checkpoint, LIMITS, dtype="float32", threads=1)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def start(backend: Backend, journal: Journal | None) -> Harness:
    return Harness(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        make_backend=lambda model, limits: backend,
        journal=journal,
    )


def first_daemon(backend: Backend, path: Path) -> Harness:
    journal = open_journal(path)
    journal.recover(0.0, 0.0)
    return start(backend, journal)


def submit_all(harness: Harness, seed: int) -> None:
    """Whoever draws a seed draws this one."""
    for name, arguments in REQUESTS.items():
        fixed = {"seed": seed} if name == "drawn" else {}
        harness.submit(request_id=name, **(arguments | fixed))


def next_daemon(backend: Backend, path: Path, last: Harness) -> Harness:
    """What `recovery` does, without clients; answers go on where the last daemon's stopped."""
    journal = open_journal(path)
    found = journal.recover(last.now, 0.0)
    harness = start(backend, journal)
    harness.now = last.now
    harness.answers = copy.deepcopy(last.answers)
    for known in found.requests.values():
        accept = known.accept
        request = make_request(accept.submit, harness.text, accept.uid, accept.arrival, seed=accept.seed)
        harness.engine.take_up(request, known)
    return harness


def finish(harness: Harness) -> dict[tuple[str, int], Any]:
    """Run to the end, granting credit to whoever waits for it."""
    for _ in range(10):
        harness.run()
        for sample in list(harness.engine._samples.values()):
            harness.engine.pace.grant(sample.request, 3)
    harness.run()
    return {
        name: (answer.token_ids, answer.text, answer.logprobs, answer.top_logprobs, answer.reason)
        for name, answer in harness.answers.items()
    }


def crash(harness: Harness) -> None:
    """Nothing is closed but what the kernel closes."""
    if harness.engine.in_flight:
        harness.backend.collect()
    journal = harness.engine.journal
    assert journal is not None
    journal._file.close()
    harness.text.close()


@pytest.fixture(scope="module")
def undisturbed(backend: Backend) -> dict[tuple[str, int], Any]:
    harness = start(backend, None)
    submit_all(harness, seed=77)
    answers = finish(harness)
    assert len(answers) == len(REQUESTS) + 2
    assert {answer[4] for answer in answers.values()} == {"stop", "length"}
    harness.text.close()
    return answers


@pytest.mark.parametrize("turns", range(1, 64, 2))
def test_a_restart_at_any_turn_changes_nothing(
    backend: Backend, path: Path, undisturbed: dict[tuple[str, int], Any], turns: int
) -> None:
    first = first_daemon(backend, path)
    submit_all(first, seed=77)
    for _ in range(turns):
        first.turn()
    crash(first)
    second = next_daemon(backend, path, first)
    assert second.metrics.requests_taken_up_total == len(REQUESTS)
    assert finish(second) == undisturbed
    second.scheduler.check_invariants()
    crash(second)


def test_restart_after_restart(backend: Backend, path: Path, undisturbed: dict[tuple[str, int], Any]) -> None:
    harness = first_daemon(backend, path)
    submit_all(harness, seed=77)
    for life in range(20):
        for _ in range(4 + 5 * (life % 3)):
            harness.turn()
        crash(harness)
        harness = next_daemon(backend, path, harness)
    assert finish(harness) == undisturbed
    crash(harness)


def test_a_request_is_written_down_whole(backend: Backend) -> None:
    """A new field of Submit has to be thought of in `submit_of`."""
    harness = start(backend, None)
    plain = Submit("r", prompt=pack_token_ids([5, 6]), params={"max_tokens": 3})
    full: dict[str, Any] = {
        "priority": 3,
        "deadline_s": 50.0,
        "credit": 7,
        "want_text": False,
        "keep": True,
        "linger_s": 4.0,
        "want_logits": True,
        "hidden_layers": (0, 1),
    }
    elsewhere = {"request_id", "prompt", "messages", "params", "upload", "handle"}
    messages = [replace(plain, **full), replace(plain, params={"max_tokens": 0}, pooling="mean")]
    assert elsewhere | set(full) | {"pooling"} == {field.name for field in dataclasses.fields(Submit)}
    for message in messages:
        assert submit_of(make_request(message, harness.text, 1, 100.0)) == message
    harness.text.close()


def test_drawn_seeds_are_kept(backend: Backend, path: Path) -> None:
    first = first_daemon(backend, path)
    request = first.submit("No seed", max_tokens=20, temperature=1.0, ignore_eos=True, request_id="r")
    for _ in range(6):
        first.turn()
    crash(first)
    alone = start(backend, None)
    alone.submit("No seed", max_tokens=20, temperature=1.0, ignore_eos=True, request_id="r", seed=request.seed)
    second = next_daemon(backend, path, first)
    assert finish(second) == finish(alone)
    crash(second)


def test_what_ended_does_not_come_back(backend: Backend, path: Path) -> None:
    first = first_daemon(backend, path)
    done = first.submit("done", request_id="done", max_tokens=2)
    first.run()
    cancelled = first.submit("cancelled", request_id="cancelled", max_tokens=50, ignore_eos=True)
    for _ in range(5):
        first.turn()
    first.engine.cancel(cancelled)
    first.turn()
    crash(first)
    second = next_daemon(backend, path, first)
    assert second.engine.idle
    second.run()
    assert second.answers == first.answers
    assert second.answer(done).reason == "length"
    assert second.answer(cancelled).reason == "cancelled"
    crash(second)


def test_deadlines_go_on_over_a_restart(backend: Backend, path: Path) -> None:
    first = first_daemon(backend, path)
    late = first.submit("late", request_id="late", max_tokens=100, ignore_eos=True, deadline_s=10.0)
    for _ in range(4):
        first.turn()
    crash(first)
    first.now += 11.0
    second = next_daemon(backend, path, first)
    second.run()
    assert second.answer(late).reason == "deadline"
    assert len(second.answer(late).token_ids) == len(first.answer(late).token_ids) > 0
    crash(second)


def test_what_is_no_longer_possible_ends_with_the_reason(backend: Backend, path: Path) -> None:
    first = first_daemon(backend, path)
    request = first.submit("long", request_id="r", max_tokens=100, ignore_eos=True)
    for _ in range(4):
        first.turn()
    crash(first)
    journal = open_journal(path)
    found = journal.recover(0.0, 0.0)
    second = start(backend, journal)
    second.scheduler.set_limits(dataclasses.replace(second.scheduler.limits, max_model_len=64))
    second.answers = copy.deepcopy(first.answers)
    (known,) = found.requests.values()
    accept = known.accept
    second.engine.take_up(make_request(accept.submit, second.text, 1, accept.arrival, seed=accept.seed), known)
    second.run()
    finished = second.answer(request).finished
    assert finished is not None
    assert finished.error is not None
    assert (finished.finish_reason, finished.error.code) == ("error", "too_long")
    crash(second)


def lives(backend: Backend, path: Path, deadly: set[str], limit: int) -> tuple[Harness, int]:
    """Daemons that die in every step with a deadly request; the one that gets to the end, and how many died."""
    harness = first_daemon(backend, path)
    submit_all(harness, seed=77)
    for deaths in range(limit):
        while not harness.engine.idle:
            harness.turn()
            plan = harness.engine._plan
            names = {chunk.sequence.client_data.request.request_id for chunk in plan.chunks} if plan else set()
            if deadly & names:
                break
            for sample in list(harness.engine._samples.values()):
                harness.engine.pace.grant(sample.request, 3)
        else:
            return harness, deaths
        crash(harness)
        harness = next_daemon(backend, path, harness)
    raise AssertionError("daemons die for ever")


@pytest.mark.parametrize("deadly", [{"greedy"}, {"long"}, {"three", "stop"}])
def test_a_request_that_kills_daemons_is_given_up_and_the_others_are_not(
    backend: Backend, path: Path, undisturbed: dict[tuple[str, int], Any], deadly: set[str]
) -> None:
    harness, deaths = lives(backend, path, deadly, limit=12)
    assert deaths <= 4 * len(deadly)
    answers = finish(harness)
    for (name, index), answer in undisturbed.items():
        if name not in deadly:
            assert answers[name, index] == answer, name
        else:
            error = harness.answers[name, index].finished.error  # type: ignore[union-attr]
            assert error is not None
            assert (error.code, "daemons in a row died" in error.message) == ("internal", True)
    crash(harness)


def test_what_gets_on_is_not_given_up(backend: Backend, path: Path) -> None:
    """However often daemons die, as long as each gives a token, or gets further, or less far."""
    harness = first_daemon(backend, path)
    harness.submit(request_id="r", prompt=prompts(1, 100)[0], max_tokens=3, ignore_eos=True)
    for life in range(9):
        for _ in range(1 + life % 2):
            harness.turn()
        crash(harness)
        harness = next_daemon(backend, path, harness)
    assert finish(harness)["r", 0][4] == "length"
    crash(harness)
