"""Beam search and best-of: the same answers as a plain search, whatever the memory; and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.errors import InvalidArgument, NumericError, TooLong
from kvpool.daemon.engine.beam_search import BeamSearch, Branch
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.batch import StepResult
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.loading import LoadedModel
from tests.support.engine_harness import Answer, Harness, prompts
from tests.support.numpy_backend import NumpyBackend

Found = tuple[tuple[int, ...], float, str]  # tokens, rank, finish reason


def cpu(model: LoadedModel, limits: BackendLimits) -> Backend:
    return CpuBackend(model.program, model.checkpoint, limits, dtype="float32", threads=1)


@contextmanager
def engine(**options: Any) -> Iterator[Harness]:
    harness = Harness(**({"num_blocks": 512, "max_num_seqs": 32, "make_backend": cpu} | options))
    yield harness
    harness.assert_clean()
    harness.close()


def answers(harness: Harness, request: Any) -> list[Answer]:
    found = [answer for (name, _), answer in sorted(harness.answers.items()) if name == request.request_id]
    assert len(found) == request.params.n
    return found


# The decisions, against a plain search


def plain_search(
    score: Any, prompt: list[int], width: int, max_tokens: int, stops: frozenset[int], penalty: float, early: bool
) -> list[Found]:
    """`score(tokens)`: (token_ids, logprobs) of the next token, best first. Written for clarity, with whole copies."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[Found] = []

    def rank(tokens: list[int], total: float) -> float:
        return total / len(tokens) ** penalty

    for _ in range(max_tokens):
        rows = [score(prompt + tokens) for tokens, _ in beams]
        totals = np.concatenate([total + logprobs for (_, total), (_, logprobs) in zip(beams, rows, strict=True)])
        places = [(number, token) for number, (token_ids, _) in enumerate(rows) for token in token_ids]
        best = np.argsort(-totals, kind="stable")[: 2 * width]
        new: list[tuple[list[int], float]] = []
        for place, index in enumerate(best):
            number, token = places[index]
            tokens = [*beams[number][0], token]
            if token not in stops:
                new.append((tokens, float(totals[index])))
            elif place < width:
                ended.append((tuple(tokens), rank(tokens, float(totals[index])), "stop"))
        beams = new[:width]
        ended = sorted(ended, key=lambda found: -found[1])[:width]
        if not beams or (len(ended) == width and (early or rank(*beams[0]) <= ended[-1][1])):
            return ended
    ended += [(tuple(tokens), rank(tokens, total), "length") for tokens, total in beams]
    return sorted(ended, key=lambda found: -found[1])[:width]


@settings(max_examples=200)
@given(
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 8),
    stops=st.frozensets(st.integers(0, 11), max_size=6),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_same_beams_as_a_plain_search(
    width: int, max_tokens: int, stops: frozenset[int], penalty: float, early: bool, seed: int
) -> None:
    @cache
    def row(tokens: tuple[int, ...]) -> tuple[list[int], Any]:
        logits = np.random.default_rng([seed, *tokens]).normal(size=12)
        logprobs = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-logprobs, kind="stable")[: 2 * width]
        return best.tolist(), logprobs[best]

    search = BeamSearch(width, max_tokens, stops, length_penalty=penalty, early_stopping=early)
    branches = [Branch(0, -1)]
    while branches:
        rows = [row(tuple(token_id for token_id, *_ in beam.tokens)) for beam in search.beams]
        branches = search.advance([list(zip(ids, values.tolist(), strict=True)) for ids, values in rows])
        assert len(branches) <= width
    found = [(tuple(token_id for token_id, *_ in a.tokens), a.rank, a.finish_reason) for a in search.answers]
    expected = plain_search(lambda tokens: row(tuple(tokens)), [], width, max_tokens, stops, penalty, early)
    assert found == expected


# The engine


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The candidates after some tokens, each computed by a request of its own in an engine that shares nothing."""
    with engine(prefix_cache=False) as harness:

        @cache
        def candidates(tokens: tuple[int, ...]) -> tuple[list[int], Any]:
            answer = harness.generate(list(tokens), max_tokens=1, logprobs=20)
            token_ids, logprobs = zip(*answer.top_logprobs[0], strict=True)
            return list(token_ids), np.array(logprobs)

        def score(tokens: list[int], width: int) -> tuple[list[int], Any]:
            token_ids, logprobs = candidates(tuple(tokens))
            return token_ids[: 2 * width], logprobs[: 2 * width]

        yield score


def expected(alone: Any, prompt: list[int], params: SamplingParams, stops: frozenset[int]) -> list[Found]:
    return plain_search(
        lambda tokens: alone(tokens, params.beam_width),
        prompt,
        params.beam_width,
        params.max_tokens,
        stops,
        params.length_penalty,
        params.early_stopping,
    )[: params.n]


def is_right(alone: Any, harness: Harness, request: Any) -> bool:
    """Tokens, their logprobs and how it ended, bit for bit."""
    params = request.params
    wanted = expected(alone, request.prompt_ids, params, request.stop_token_ids)
    found = answers(harness, request)
    assert [(tuple(a.token_ids), a.reason) for a in found] == [(tokens, reason) for tokens, _, reason in wanted]
    ranks = [sum(a.logprobs) / len(a.token_ids) ** params.length_penalty for a in found]
    assert ranks == pytest.approx([rank for _, rank, _ in wanted], abs=1e-12)
    return True


PROMPT = prompts(1, 21, seed=1)[0]
FREQUENT = list(range(3, 384, 9))  # so many stop tokens that searches end in all ways


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 3, 6, 10])
def test_answers_of_every_width(alone: Any, width: int, block_size: int) -> None:
    with engine(block_size=block_size, num_blocks=2048 // block_size) as harness:
        requests = [
            harness.submit(
                PROMPT, max_tokens=9, beam_width=width, n=(width + 1) // 2, logprobs=0, stop_token_ids=stops,
                length_penalty=penalty, early_stopping=early,
            )
            for stops in ([], FREQUENT)
            for penalty, early in ((1.0, False), (0.0, True), (2.0, False), (-1.0, True))
        ]  # fmt: skip
        harness.run()
        assert all(is_right(alone, harness, request) for request in requests)


def test_one_beam_is_greedy() -> None:
    with engine() as harness:
        greedy = harness.generate(PROMPT, max_tokens=20, logprobs=3)
        beam = harness.generate(PROMPT, max_tokens=20, logprobs=2, beam_width=1)
        assert (beam.token_ids, beam.logprobs, beam.text) == (greedy.token_ids, greedy.logprobs, greedy.text)
        assert [top[:2] for top in greedy.top_logprobs] == [tuple(top) for top in beam.top_logprobs]


@pytest.mark.parametrize("host_blocks", [0, 12])
def test_with_so_little_memory_that_beams_wait_for_each_other(alone: Any, host_blocks: int) -> None:
    with engine(block_size=4, num_blocks=14, host_blocks=host_blocks, max_num_seqs=4) as harness:
        harness.scheduler.costs.compute_s_per_token = 1.0
        requests = [
            harness.submit(prompt, max_tokens=12, beam_width=4, n=2, logprobs=0)
            for prompt in prompts(3, 13, seed=2)
        ]  # fmt: skip
        other = harness.submit(prompts(1, 10, seed=3)[0], max_tokens=30)
        harness.run(5000)
        assert harness.scheduler.preemptions_total > 0
        assert all(is_right(alone, harness, request) for request in requests)
        assert harness.answer(other).reason == "length"


def test_beams_share_what_they_have_in_common() -> None:
    with engine(block_size=4) as harness:
        request = harness.submit(prompts(1, 80, seed=4)[0], max_tokens=16, beam_width=6, n=6)
        most = 0
        while not (request.samples and request.done):
            harness.turn()
            most = max(most, harness.pool.num_used)
            harness.scheduler.check_invariants()
        assert most <= 20 + 6 * 5  # one prompt, and at most what each beam wrote: not six prompts


def test_the_ends_of_a_search() -> None:
    with engine() as harness:
        for max_tokens in (0, 1):
            request = harness.submit(PROMPT, max_tokens=max_tokens, beam_width=3, n=3)
            harness.run()
            assert [len(answer.token_ids) for answer in answers(harness, request)] == [max_tokens] * 3
            assert {answer.reason for answer in answers(harness, request)} == {"length"}
        request = harness.submit(PROMPT, max_tokens=50, beam_width=3, n=2)
        for _ in range(7):
            harness.turn()
        harness.engine.cancel(request)
        harness.run()
        assert [answer.reason for answer in answers(harness, request)] == ["cancelled"] * 2
        late = harness.submit(PROMPT, max_tokens=50, beam_width=3, n=2, deadline_s=1.0)
        for _ in range(7):
            harness.turn()
        harness.now += 2.0
        harness.run()
        assert [answer.reason for answer in answers(harness, late)] == ["deadline"] * 2
        assert harness.pool.num_used == 0


class Faulty(NumpyBackend):
    """Its sixth step fails, or gives NaN for the last row."""

    steps, numeric = 0, False

    def collect(self) -> StepResult:
        result = super().collect()
        self.steps += 1
        if self.steps == 6 and not self.numeric:
            raise RuntimeError("failed for the test")
        result.numeric_errors[-1:] |= self.steps == 6
        return result


@pytest.mark.parametrize("numeric", [False, True])
def test_a_beam_that_fails_takes_the_search_with_it(numeric: bool) -> None:
    def faulty(model: LoadedModel, limits: BackendLimits) -> Backend:
        backend = Faulty(model.program, model.checkpoint, limits)
        backend.numeric = numeric
        return backend

    with engine(make_backend=faulty) as harness:
        request = harness.submit(PROMPT, max_tokens=50, beam_width=3, n=3)
        harness.run()
        found = answers(harness, request)
        assert [answer.reason for answer in found] == ["error"] * 3
        code = NumericError.code if numeric else "internal"
        assert all(answer.finished and answer.finished.error and answer.finished.error.code == code for answer in found)
        assert harness.generate(PROMPT, max_tokens=4).reason == "length"


def test_searches_that_cannot_be_are_refused() -> None:
    for options in ({"best_of": 2}, {"top_p": 0.5}, {"stop": "x"}, {"logit_bias": {1: 1.0}}, {"max_tokens": 5000}):
        with pytest.raises(InvalidArgument) as refusal:
            SamplingParams(beam_width=2, **options)  # type: ignore[arg-type]
        assert refusal.value.field == next(iter(options))
    for wrong in ({"beam_width": 2, "n": 3}, {"best_of": 2, "n": 3}, {"beam_width": 11}, {"beam_width": -1}):
        with pytest.raises(InvalidArgument):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    with engine() as harness:
        with pytest.raises(InvalidArgument):
            harness.submit(PROMPT, beam_width=2, keep=True)
        with pytest.raises(TooLong):
            harness.submit(PROMPT, beam_width=2, max_tokens=250)


# Best of


def test_the_best_of_several_samples_are_given_as_if_alone() -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.2, "seed": 5, "stop_token_ids": FREQUENT[::4]}
    with engine() as harness:
        every = harness.submit(PROMPT, n=8, logprobs=0, **options)
        harness.run()
        ranked = sorted(answers(harness, every), key=lambda a: -sum(a.logprobs) / len(a.token_ids))
        for logprobs in (None, 0):
            best = harness.submit(PROMPT, n=3, best_of=8, logprobs=logprobs, credit=1, **options)
            while harness.scheduler.has_work:
                assert (best.request_id, 0) not in harness.answers  # nothing before all is known
                harness.turn()
            harness.run()
            found = answers(harness, best)
            assert [a.token_ids for a in found] == [a.token_ids for a in ranked[:3]]
            assert [a.text for a in found] == [a.text for a in ranked[:3]]
            assert [a.reason for a in found] == [a.reason for a in ranked[:3]]
            assert [a.logprobs for a in found] == [a.logprobs if logprobs == 0 else [] for a in ranked[:3]]


def test_the_best_of_samples_that_were_cut_short() -> None:
    with engine() as harness:
        request = harness.submit(PROMPT, n=2, best_of=4, max_tokens=50, temperature=1.0)
        for _ in range(6):
            harness.turn()
        harness.engine.cancel(request)
        harness.run()
        assert [answer.reason for answer in answers(harness, request)] == ["cancelled"] * 2
