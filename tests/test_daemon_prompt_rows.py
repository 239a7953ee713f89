"""Logprobs of the prompt, embeddings and logits from the engine: right, and the same bit for bit whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.client.wire.errors import InvalidArgument, NumericError, Unsupported
from kvpool.daemon.engine.prompt_rows import Pooling, PromptLogprobs, PromptPart
from kvpool.daemon.engine.request import Request
from kvpool.model.batch import StepBatch, StepResult
from kvpool.model.cpu.backend import CpuBackend
from tests.support.engine_harness import Harness, prompts
from tests.support.numpy_backend import NumpyBackend

(LONG,) = prompts(1, 90)
Array = NDArray[Any]


def cpu_engine(**options: Any) -> Harness:
    """On the real CPU back end, whose bits do not depend on the batch."""
    return Harness(
        **{
            "num_blocks": 64,
            "make_backend": lambda model, limits: CpuBackend(
                model.program, model.checkpoint, limits, dtype="float32", threads=2
            ),
        }
        | options
    )


def joined(harness: Harness, request: Request, kind: str) -> Array:
    """All rows of a kind, which follow each other without a gap."""
    found = [rows for rows in harness.answer(request).rows if rows.kind == kind]
    for before, after in pairwise(found):
        assert after.index == before.index + len(before.values)
    return np.concatenate([rows.values for rows in found])


@pytest.fixture
def engine() -> Iterator[Harness]:
    harness = cpu_engine()
    yield harness
    harness.assert_clean()
    harness.close()


def reference(token_ids: list[int]) -> tuple[Array, Array]:
    """(logits, hidden) of every position, (N, vocab_size) and (N, hidden_size), of one step over the whole prompt."""
    kept: list[StepResult] = []

    class Spy(CpuBackend):
        def launch(self, batch: StepBatch) -> None:
            batch.want_logits = batch.want_hidden = True
            super().launch(batch)

        def collect(self) -> StepResult:
            kept.append(super().collect())
            return kept[-1]

    harness = cpu_engine(
        make_backend=lambda model, limits: Spy(model.program, model.checkpoint, limits, dtype="float32", threads=2)
    )
    harness.submit(token_ids, max_tokens=0, pooling="mean")
    harness.run()
    harness.close()
    (result,) = kept
    assert result.logits is not None
    assert result.hidden is not None
    return result.logits, result.hidden


def log_softmax(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def test_prompt_logprobs_are_those_of_each_next_token(engine: Harness) -> None:
    request = engine.submit(LONG, max_tokens=3, prompt_logprobs=4, logprobs=1)
    engine.run()
    logits, _ = reference(LONG)
    expected = log_softmax(logits[:-1])
    got = joined(engine, request, "prompt_logprobs")
    assert engine.answer(request).rows[0].index == 1
    assert got.shape == (len(LONG) - 1,)
    np.testing.assert_allclose(got, expected[np.arange(len(LONG) - 1), LONG[1:]], atol=1e-4)
    ids, tops = joined(engine, request, "prompt_top_token_ids"), joined(engine, request, "prompt_top_logprobs")
    assert ids.shape == tops.shape == (len(LONG) - 1, 4)
    assert (ids[:, 0] == expected.argmax(axis=1)).all()
    np.testing.assert_allclose(tops, np.sort(expected, axis=1)[:, :-5:-1], atol=1e-4)
    answer = engine.answer(request)
    assert len(answer.top_logprobs[0]) == 1  # of the answer's tokens as many as were asked for these
    assert answer.token_ids == engine.generate(LONG, max_tokens=3).token_ids


def test_without_candidates_only_the_logprob(engine: Harness) -> None:
    request = engine.submit(LONG, max_tokens=0, prompt_logprobs=0)
    engine.run()
    assert {rows.kind for rows in engine.answer(request).rows} == {"prompt_logprobs"}
    one = engine.submit([5], max_tokens=0, prompt_logprobs=2)
    engine.run()
    assert engine.answer(one).rows == []


DISTURBANCES: dict[str, dict[str, Any]] = {
    "in small chunks": {"max_num_batched_tokens": 16},
    "in odd chunks": {"max_num_batched_tokens": 37},
    "in small blocks": {"block_size": 4},
    "without a prefix cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("kind", ["prompt_logprobs", "prompt_top_logprobs", "embedding"])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_bit_for_bit_whatever_the_chunks(disturbance: str, kind: str) -> None:
    found = []
    for options in ({}, DISTURBANCES[disturbance]):
        harness = cpu_engine(**({"num_blocks": 256} | options))
        asked = {"pooling": "mean", "max_tokens": 0} if kind == "embedding" else {"prompt_logprobs": 2}
        for other in prompts(3, 40, seed=5):
            harness.submit(other, max_tokens=20, ignore_eos=True)
        harness.turn()
        request = harness.submit(LONG, **asked)
        harness.run()
        found.append(joined(harness, request, kind).tobytes())
        harness.close()
    assert found[0] == found[1]


def test_a_cached_prompt_is_computed_all_the_same(engine: Harness) -> None:
    cold = engine.submit(LONG, prompt_logprobs=1)
    engine.run()
    warm = engine.submit(LONG, prompt_logprobs=1)
    mean = engine.submit(LONG, max_tokens=0, pooling="mean")
    last = engine.submit(LONG, max_tokens=0, pooling="last")
    engine.run()
    for kind in ("prompt_logprobs", "prompt_top_token_ids"):
        assert joined(engine, warm, kind).tobytes() == joined(engine, cold, kind).tobytes()
    assert [request.samples[0].usage.cached_tokens for request in (warm, mean)] == [0, 0]
    assert last.samples[0].usage.cached_tokens > 0  # the last token is always computed
    assert engine.answer(warm).token_ids == engine.answer(cold).token_ids


def test_preempted_in_the_middle_of_its_prompt_nothing_is_told_twice() -> None:
    """A prompt loses its blocks to a more urgent one after a few chunks, and is computed again."""
    expected = cpu_engine()
    wanted = expected.submit(LONG, prompt_logprobs=1)
    expected.run()
    harness = cpu_engine(num_blocks=9, max_num_batched_tokens=16)
    request = harness.submit(LONG, prompt_logprobs=1, max_tokens=4)
    mean = harness.submit(LONG, max_tokens=0, pooling="mean")
    for _ in range(3):
        harness.turn()
    urgent = harness.submit(prompts(1, 100, seed=9)[0], priority=50, max_tokens=8)
    harness.run()
    assert request.samples[0].sequence.preemptions + mean.samples[0].sequence.preemptions > 0
    assert harness.answer(urgent).reason in ("length", "stop")
    for kind in ("prompt_logprobs", "prompt_top_logprobs"):
        assert joined(harness, request, kind).tobytes() == joined(expected, wanted, kind).tobytes()
    assert len(harness.answer(mean).rows) == 1
    harness.assert_clean()
    harness.close()
    expected.close()


def test_of_several_samples_the_first_tells_of_the_prompt(engine: Harness) -> None:
    request = engine.submit(LONG, n=3, prompt_logprobs=0, temperature=1.0, seed=4)
    engine.run()
    assert len(joined(engine, request, "prompt_logprobs")) == len(LONG) - 1
    assert {rows.sample for rows in engine.answer(request).rows} == {0}


def test_embeddings_are_the_mean_and_the_last_of_the_hidden_rows(engine: Harness) -> None:
    mean = engine.submit(LONG, max_tokens=0, pooling="mean")
    last = engine.submit(LONG, max_tokens=0, pooling="last")
    engine.run()
    _, hidden = reference(LONG)
    np.testing.assert_allclose(joined(engine, mean, "embedding")[0], hidden.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert joined(engine, last, "embedding")[0].tobytes() == hidden[-1].tobytes()
    assert engine.answer(mean).reason == engine.answer(last).reason == "length"
    assert engine.answer(mean).token_ids == []


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"n": 2, "max_tokens": 0, "temperature": 1.0}])
def test_what_an_embedding_cannot_do(engine: Harness, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        engine.submit(LONG, pooling="mean", **options)
    assert refusal.value.field == "pooling"


def test_an_idle_sequence_has_no_prompt_to_tell_of(engine: Harness) -> None:
    from kvpool.daemon.memory.sequence import Sequence

    sequence = Sequence(uid=1, token_ids=list(LONG), max_tokens=0, keep=True)
    engine.scheduler.add(sequence, idle=True)
    request = engine.submit(LONG, max_tokens=1)  # only to have one
    engine.run()
    with pytest.raises(Unsupported) as refusal:
        engine.engine.submit(Request("x", 1, list(LONG), params_with_prompt_logprobs(), 0, frozenset(), None), sequence)
    assert refusal.value.field == "prompt_logprobs"
    assert request.done
    engine.scheduler.finish(sequence, "cancelled")


def params_with_prompt_logprobs() -> Any:
    from kvpool.client.sampling_params import SamplingParams

    return SamplingParams(prompt_logprobs=1)


def test_logits_are_what_each_token_was_drawn_from(engine: Harness) -> None:
    request = engine.submit(LONG, max_tokens=6, want_logits=True, logprobs=0, logit_bias={7: -100.0})
    plain = engine.submit(LONG, max_tokens=6, logprobs=0, logit_bias={7: -100.0})
    engine.run()
    answer, logits = engine.answer(request), joined(engine, request, "logits")
    assert logits.shape == (6, 384)
    assert answer.token_ids == engine.answer(plain).token_ids
    logprobs = log_softmax(logits)
    np.testing.assert_allclose(logprobs[np.arange(6), answer.token_ids], answer.logprobs, atol=1e-4)
    first, _ = reference(LONG)
    assert logits[0].tobytes() == first[-1].tobytes()
    assert engine.answer(plain).rows == []


def test_nan_in_the_prompt_fails_this_request_alone() -> None:
    class Spoiled(NumpyBackend):
        def collect(self) -> StepResult:
            result = super().collect()
            result.numeric_errors[-1] = len(result.tokens) > 1
            return result

    harness = Harness(make_backend=lambda model, limits: Spoiled(model.program, model.checkpoint, limits))
    request = harness.submit(LONG, prompt_logprobs=0)
    harness.run()
    assert harness.answer(request).reason == "error"
    assert isinstance(request.samples[0].error, NumericError)
    assert harness.generate(LONG).reason == "length"
    harness.assert_clean()
    harness.close()


def test_collectors_take_each_position_once() -> None:
    hidden = np.arange(12, dtype=np.float32).reshape(6, 2)
    none = np.zeros((6, 0), np.float32)

    def part(positions: range) -> PromptPart:
        found = hidden[positions.start : positions.stop]
        return PromptPart(positions, found[:, 0], none.astype(np.int32), none, found, numeric_error=False)

    mean, last, logprobs = Pooling(6, "mean"), Pooling(6, "last"), PromptLogprobs(6, 0)
    assert [collector.missing(0, 4) for collector in (mean, last, logprobs)] == [range(4), range(5, 4), range(4)]
    assert mean.take(part(range(4))) == []
    assert mean.missing(0, 6) == range(4, 6)  # computed again from the beginning: only what is new
    (rows,) = mean.take(part(range(4, 6)))
    assert rows.values.tolist() == [[5.0, 6.0]]
    (rows,) = last.take(part(range(5, 6)))
    assert rows.values.tolist() == [[10.0, 11.0]]
    assert logprobs.take(part(range(4)))[0].index == 1
    assert logprobs.missing(0, 6) == range(4, 5)
    assert not logprobs.missing(5, 9)
