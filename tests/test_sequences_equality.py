"""A sequence that goes on is bit for bit what one request for all of its tokens would have been.

On the real CPU back end, with blocks of every size, and nothing within a tolerance.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.protocol import Submit, pack_token_ids
from kvpool.daemon.engine.request import Request
from kvpool.daemon.engine.submission import make_request
from kvpool.daemon.memory.sequence import Sequence
from kvpool.daemon.persistence.snapshot_file import Image, Suitability, pieces, read
from kvpool.daemon.serving.sequence_objects import SequenceObject, SequenceObjects
from kvpool.daemon.system.timers import Timers
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.batch import StepBatch
from kvpool.model.cpu.backend import CpuBackend
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


def suitability(harness: Harness) -> Suitability:
    runner = harness.engine.runner
    return Suitability("tiny", runner.kv_layout, harness.pool.block_size, runner.block_bytes, 384, 256)


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


def stored(harness: Harness, sequence: Sequence, here: Suitability) -> bytes:
    runner = harness.engine.runner
    token_ids = np.array(sequence.token_ids, dtype=np.int32)
    return b"".join(pieces(Image(token_ids, sequence.num_computed_tokens, runner.read(sequence)), 1, here))


def restored(harness: Harness, data: bytes, here: Suitability) -> Sequence:
    image = read(io.BytesIO(data), len(data), 1, here)
    sequence = Sequence(uid=1, token_ids=image.token_ids.tolist(), max_tokens=0, keep=True)
    blocks = harness.scheduler.add_restored(sequence, image.num_computed_tokens)
    if blocks:
        harness.engine.runner.write(blocks, image.blocks)
    return sequence


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_stored_and_restored_in_another_engine(alone: Any, block_size: int) -> None:
    token_ids = prompts(1, 41, seed=7)[0]
    files = []
    with engine(block_size=block_size, num_blocks=1024 // block_size) as first:
        here = suitability(first)
        sequence = opened(first, token_ids)
        for length in (41, 32, 31, 9):
            first.scheduler.truncate(sequence, length)
            go_on(first, sequence)
            first.run()
            files.append((list(sequence.token_ids), stored(first, sequence, here)))
    with engine(block_size=block_size, num_blocks=1024 // block_size) as second:
        assert suitability(second) == here
        for tokens, file in files:
            sequence = restored(second, file, here)
            assert (sequence.token_ids, sequence.num_computed_tokens) == (tokens, len(tokens) - 1)
            second.scheduler.check_invariants()
            request = go_on(second, sequence)
            child = second.scheduler.fork(sequence, len(tokens) - 3)
            again = go_on(second, child)
            second.run()
            assert bits(second.answer(request)) == alone(tokens)
            assert bits(second.answer(again)) == alone(tokens[:-3])
            assert request.samples[0].usage.cached_tokens == len(tokens) - 1  # nothing was computed again


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
def test_narrow_keys_and_values_go_everywhere(kv_dtype: str) -> None:
    """Forked inside a block, swapped out, stored and restored: the bits of an undisturbed run, whatever the format."""

    def narrow(model: LoadedModel, limits: BackendLimits) -> Backend:
        return CpuBackend(model.program, model.checkpoint, limits, dtype="float32", kv_dtype=kv_dtype, threads=1)

    tokens = prompts(1, 60, seed=8)[0]
    with engine(make_backend=narrow, prefix_cache=False) as harness:
        expected = bits(harness.generate(tokens, **SAMPLED))
    with engine(make_backend=narrow, num_blocks=12, host_blocks=16, max_num_seqs=4) as harness:
        harness.scheduler.costs.compute_s_per_token = 1.0
        here = suitability(harness)
        assert here.kv_layout.endswith(kv_dtype)
        sequence = opened(harness, tokens)
        go_on(harness, sequence, max_tokens=0)
        harness.run()
        fork = harness.scheduler.fork(sequence, len(tokens))
        harness.generate(prompts(1, 150, seed=4)[0], max_tokens=2)
        assert sequence.host_slots
        again = restored(harness, stored(harness, sequence, here), here)
        for one in (fork, sequence, again):
            request = go_on(harness, one)
            harness.run()
            assert bits(harness.answer(request)) == expected


def test_stored_from_the_host_and_restored_without_room(alone: Any) -> None:
    tokens = prompts(1, 60, seed=8)[0]
    with engine(num_blocks=8, host_blocks=8, max_num_seqs=4) as harness:
        harness.scheduler.costs.compute_s_per_token = 1.0
        here = suitability(harness)
        sequence = opened(harness, tokens)
        go_on(harness, sequence, max_tokens=0)
        harness.run()
        harness.generate(prompts(1, 90, seed=4)[0], max_tokens=2)
        assert sequence.host_slots
        file = stored(harness, sequence, here)
        filler = opened(harness, prompts(1, 100, seed=9)[0])
        go_on(harness, filler, max_tokens=0)
        harness.run()
        again = restored(harness, file, here)
        assert again.num_computed_tokens == 0  # its tokens are there, its blocks will be computed
        for one in (again, sequence):
            request = go_on(harness, one)
            harness.run()
            assert bits(harness.answer(request)) == alone(tokens)


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


class FailsToMove(NumpyBackend):
    """`failing` names what fails when it is called next, after it has left garbage where blocks were to be written."""

    failing = ""

    def _fail(self, name: str, blocks: Items[int]) -> None:
        if self.failing == name:
            self.failing = ""
            self.pool[list(blocks)] = float("nan")
            raise RuntimeError("failed for the test")

    def read_blocks(self, blocks: Items[int]) -> NDArray[np.uint8]:
        self._fail("read_blocks", [])
        return super().read_blocks(blocks)

    def write_blocks(self, blocks: Items[int], data: NDArray[np.uint8]) -> None:
        self._fail("write_blocks", blocks)
        super().write_blocks(blocks, data)

    def copy_blocks(self, source: Items[int], destination: Items[int]) -> None:
        self._fail("copy_blocks", destination)
        super().copy_blocks(source, destination)


@pytest.mark.parametrize("failing", ["read_blocks", "write_blocks", "copy_blocks"])
def test_blocks_that_were_not_moved_are_computed_again(failing: str) -> None:
    """A swap out, a swap in, and a copy before a fork's first write: after each, everybody's answers are right."""
    token_ids, filler = prompts(1, 40, seed=3)[0], prompts(1, 90, seed=4)[0]
    with engine(make_backend=numpy_backend) as harness:
        expected = harness.generate(token_ids, **SAMPLED).token_ids

    def make(model: LoadedModel, limits: BackendLimits) -> Backend:
        return FailsToMove(model.program, model.checkpoint, limits)

    with engine(make_backend=make, num_blocks=8, host_blocks=8, max_num_seqs=4) as harness:
        backend, failed = harness.backend, 0
        assert isinstance(backend, FailsToMove)
        harness.scheduler.costs.compute_s_per_token = 1.0
        sequence = opened(harness, token_ids)
        go_on(harness, sequence, max_tokens=0)
        harness.run()
        child = harness.scheduler.fork(sequence)
        backend.failing = failing
        for one in (child, None, sequence, child, None, sequence):
            length = 90 if one is None else len(one.token_ids)
            request = harness.submit(filler, max_tokens=2) if one is None else go_on(harness, one)
            harness.run()
            harness.scheduler.check_invariants()
            answer = harness.answer(request)
            if answer.reason == "error":
                failed += 1
            elif one is not None:
                assert answer.token_ids == expected
            if one is not None:
                harness.scheduler.truncate(one, length)
        assert failed == 1
        assert not backend.failing


def test_the_audit_finds_what_belongs_to_nobody() -> None:
    with engine(make_backend=numpy_backend) as harness:
        objects = SequenceObjects(harness.engine, Timers())
        objects.check_invariants()
        sequence = opened(harness, prompts(1, 20, seed=6)[0])
        with pytest.raises(RuntimeError, match="hold blocks for nobody"):
            objects.check_invariants()
        request = go_on(harness, sequence)
        objects.check_invariants()  # a request waits for it
        harness.engine.cancel(request)
        objects.adopt(SequenceObject("x", 1, sequence))
        harness.run()
        objects.check_invariants()
        harness.scheduler.finish(sequence, "cancelled")
        with pytest.raises(RuntimeError, match="are over"):
            objects.check_invariants()
