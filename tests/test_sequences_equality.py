"""A sequence that goes on is bit for bit what one request for all of its tokens would have been.

On the real CPU back end, with blocks of every size, and nothing within a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from kvpool.client.protocol import Submit, pack_token_ids
from kvpool.client.sampling_params import SamplingParams
from kvpool.daemon.request import Request
from kvpool.daemon.sequence import Sequence
from kvpool.daemon.submission import make_request
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.batch import StepBatch
from kvpool.model.cpu_backend import CpuBackend
from kvpool.model.loading import LoadedModel
from tests.support.engine_harness import Answer, Harness, numpy_backend, prompts
from tests.support.numpy_backend import NumpyBackend

BLOCK_SIZES = (1, 2, 8, 16, 32, 64)
SAMPLED = {"temperature": 0.8, "seed": 11, "logprobs": 2, "max_tokens": 6, "ignore_eos": True}
_names = count()


def cpu(model: LoadedModel, limits: BackendLimits) -> Backend:
    return CpuBackend(model.program, model.checkpoint, limits, dtype="float32", threads=1)


@contextmanager
def engine(**options: Any) -> Iterator[Harness]:
    harness = Harness(**({"num_blocks": 512, "max_num_seqs": 128, "make_backend": cpu} | options))
    yield harness
    for sequence in list(harness.scheduler.roster.sequences.values()):
        harness.scheduler.finish(sequence, "cancelled")
    harness.assert_clean()
    harness.close()


def bits(answer: Answer) -> tuple[Any, ...]:
    assert answer.reason == "length"
    return answer.token_ids, answer.logprobs, answer.top_logprobs, answer.text


def opened(harness: Harness, token_ids: list[int]) -> Sequence:
    sequence = Sequence(uid=1, token_ids=list(token_ids), max_tokens=0, keep=True)
    harness.scheduler.add(sequence, idle=True)
    return sequence


def go_on(harness: Harness, sequence: Sequence, **params: Any) -> Request:
    message = Submit(
        f"g{next(_names)}",
        prompt=pack_token_ids(sequence.token_ids),
        params=SamplingParams(**(SAMPLED | params)).to_wire(),
    )
    request = make_request(message, harness.text, 1, harness.now)
    harness.engine.submit(request, sequence)
    return request


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The answer to some tokens, in an engine that shares nothing; computed once for all block sizes."""
    known: dict[tuple[int, ...], tuple[Any, ...]] = {}
    with engine(prefix_cache=False) as harness:

        def answer(token_ids: list[int]) -> tuple[Any, ...]:
            if tuple(token_ids) not in known:
                known[tuple(token_ids)] = bits(harness.generate(token_ids, **SAMPLED))
            return known[tuple(token_ids)]

        yield answer


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_forks_at_every_position_that_write_at_once(alone: Any, block_size: int, caching: bool) -> None:
    with engine(block_size=block_size, prefix_cache=caching, num_blocks=4096 // block_size) as harness:
        parent = opened(harness, prompts(1, 29, seed=1)[0])
        first = go_on(harness, parent)
        harness.run()
        assert bits(harness.answer(first)) == alone(prompts(1, 29, seed=1)[0])
        tokens = list(parent.token_ids)
        children = [harness.scheduler.fork(parent, at) for at in range(1, len(tokens) + 1)]
        running = [go_on(harness, member) for member in [parent, *children]]
        harness.run()
        for request, at in zip(running, [len(tokens), *range(1, len(tokens) + 1)], strict=True):
            assert bits(harness.answer(request)) == alone(tokens[:at])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_truncated_and_gone_on_with(alone: Any, block_size: int) -> None:
    with engine(block_size=block_size, num_blocks=1024 // block_size) as harness:
        sequence = opened(harness, prompts(1, 33, seed=2)[0])
        go_on(harness, sequence)
        harness.run()
        for length in (38, 33, 32, 31, 17, 16, 9, 1):
            harness.scheduler.truncate(sequence, length)
            tokens = list(sequence.token_ids)
            request = go_on(harness, sequence)
            harness.run()
            assert bits(harness.answer(request)) == alone(tokens)


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_blocks_lost_while_idle(alone: Any, host_blocks: int) -> None:
    with engine(num_blocks=8, host_blocks=host_blocks, max_num_seqs=4) as harness:
        harness.scheduler.costs.compute_s_per_token = 1.0  # so that blocks are swapped where there is room for them
        tokens = prompts(1, 40, seed=3)[0]
        sequence = opened(harness, tokens)
        for _ in range(3):
            tokens = list(sequence.token_ids)
            request = go_on(harness, sequence)
            harness.run()
            assert bits(harness.answer(request)) == alone(tokens)
            harness.generate(prompts(1, 90, seed=4)[0], max_tokens=2)
            assert not sequence.block_table
            assert bool(sequence.host_slots) == bool(host_blocks)
        assert sequence.preemptions == 3


def test_a_stop_string_ends_the_answer_while_the_device_goes_on() -> None:
    with engine() as harness:
        token_ids = prompts(1, 14, seed=5)[0]
        plain = harness.generate(token_ids, **(SAMPLED | {"max_tokens": 16}))
        stop = next(
            text for text in (plain.text[n : n + 2] for n in range(4, 20)) if text.strip() and "\ufffd" not in text
        )
        sequence = opened(harness, token_ids)
        request = go_on(harness, sequence, max_tokens=16, stop=[stop])
        while not request.samples[0].stopped:
            harness.turn()
        assert sequence.idle
        assert sequence.in_flight
        assert not request.done  # its owner may not use it before the device is done with it
        harness.run()
        answer = harness.answer(request)
        assert answer.reason == "stop"
        assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
        assert sequence.token_ids == token_ids + answer.token_ids
        harness.scheduler.check_invariants()


class FailsOnce(NumpyBackend):
    """Its third step fails, and leaves garbage in the blocks that it wrote to."""

    steps = 0

    def launch(self, batch: StepBatch) -> None:
        super().launch(batch)
        self.steps += 1
        if self.steps == 3:
            self.pool[batch.slot_mapping // self.limits.block_size] = float("nan")
            self._result = RuntimeError("failed for the test")


def fails_once(model: LoadedModel, limits: BackendLimits) -> Backend:
    return FailsOnce(model.program, model.checkpoint, limits)


def test_a_sequence_survives_a_step_that_failed() -> None:
    token_ids = prompts(1, 20, seed=6)[0]
    with engine(make_backend=numpy_backend) as harness:
        expected = harness.generate(token_ids, **SAMPLED).token_ids
    with engine(make_backend=fails_once, max_num_batched_tokens=8, max_num_seqs=8) as harness:
        sequence = opened(harness, token_ids)
        request = go_on(harness, sequence)
        harness.run()
        assert harness.answer(request).reason == "error"
        assert sequence.idle
        assert (sequence.num_computed_tokens, sequence.num_blocks) == (16, 1)
        harness.scheduler.check_invariants()
        request = go_on(harness, sequence)
        harness.run()
        assert harness.answer(request).token_ids == expected
