"""The guarantee: tokens and logprobs are the same bit for bit, whatever else the daemon does at the time.

Every test runs the same few requests in other circumstances, on the real CPU back end, and compares with each request
alone in a fresh engine. Nothing is compared within a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.daemon.engine.request import Request
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.loading import LoadedModel
from tests.support.engine_harness import Answer, Harness, prompts

OPTIONS: dict[str, Any] = {"num_blocks": 1024, "max_num_seqs": 64}
MAX_TOKENS = 24
LENGTHS = (1, 16, 33, 90)  # one token, a whole block, a block and more, several chunks
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (prompts(1, length, seed=length)[0], {"temperature": temperature, "seed": length, "logprobs": 3})
    for length in LENGTHS
    for temperature in (0.0, 0.9)
]


@pytest.fixture(scope="module", params=["float32", "int8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    """Every test below runs with keys and values that are numbers, and with codes that have scales."""
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def make_backend(kv_dtype: str) -> Iterator[None]:
    def cpu(model: LoadedModel, limits: BackendLimits) -> Backend:
        return CpuBackend(model.program, model.checkpoint, limits, dtype="float32", kv_dtype=kv_dtype, threads=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "make_backend", cpu)
        yield


@contextmanager
def engine(**options: Any) -> Iterator[Harness]:
    harness = Harness(**(OPTIONS | options))
    yield harness
    harness.assert_clean()
    harness.close()


def bits(answer: Answer) -> tuple[Any, ...]:
    assert answer.reason in ("length", "stop")
    return answer.token_ids, answer.logprobs, answer.top_logprobs, answer.text


def start(harness: Harness, number: int) -> Request:
    prompt, options = REQUESTS[number]
    return harness.submit(prompt, max_tokens=MAX_TOKENS, **options)


def everything(harness: Harness) -> list[tuple[Any, ...]]:
    """All requests at once."""
    running = [start(harness, number) for number in range(len(REQUESTS))]
    harness.run()
    return [bits(harness.answer(request)) for request in running]


@pytest.fixture(scope="module")
def alone(make_backend: None) -> list[tuple[Any, ...]]:
    """Each request by itself, with a cold cache, its prompt in one chunk."""
    found = []
    for number in range(len(REQUESTS)):
        with engine(prefix_cache=False) as harness:
            request = start(harness, number)
            harness.run()
            found.append(bits(harness.answer(request)))
    return found


@pytest.mark.parametrize("size", [2, 8, 64])
def test_in_a_batch(alone: list[tuple[Any, ...]], size: int) -> None:
    with engine(max_num_batched_tokens=512) as harness:
        for prompt in prompts(size - 1, 20, seed=99):
            harness.submit(prompt, max_tokens=MAX_TOKENS + 20, temperature=1.0, seed=1)
        harness.turn()
        for number, expected in enumerate(alone):
            if number % size == 0 or size == 64:
                request = start(harness, number)
                while harness.answers.get((request.request_id, 0), Answer()).finished is None:
                    harness.turn()
                assert bits(harness.answer(request)) == expected
        harness.run()


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_in_chunks(alone: list[tuple[Any, ...]], budget: int) -> None:
    with engine(max_num_batched_tokens=budget, max_num_seqs=min(budget, 64)) as harness:
        assert everything(harness) == alone


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_with_so_little_memory_that_sequences_are_preempted(alone: list[tuple[Any, ...]], host_blocks: int) -> None:
    with engine(num_blocks=12, host_blocks=host_blocks, max_num_seqs=4) as harness:
        harness.scheduler.costs.compute_s_per_token = 1.0  # so that blocks are swapped where there is room for them
        low = [start(harness, number) for number in range(len(REQUESTS))]
        for _ in range(12):
            harness.turn()
        urgent = [harness.submit(prompt, max_tokens=60, priority=9) for prompt in prompts(3, 60, seed=5)]
        harness.run()
        assert harness.scheduler.preemptions_total > 0
        assert [bits(harness.answer(request)) for request in low] == alone
        assert all(harness.answer(request).reason for request in urgent)


@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 64])
def test_preempted_with_blocks_of_every_size(alone: list[tuple[Any, ...]], block_size: int) -> None:
    """By both ways: what does not fit on the host any more is computed again."""
    with engine(block_size=block_size, num_blocks=256 // block_size, host_blocks=64 // block_size) as harness:
        harness.scheduler.costs.compute_s_per_token = 1.0
        running = [start(harness, number) for number in range(len(REQUESTS))]
        for _ in range(6):
            harness.turn()
        harness.submit(prompts(1, 90, seed=5)[0], max_tokens=60, priority=9)
        harness.run()
        assert harness.scheduler.preemptions_total > 0
        assert [bits(harness.answer(request)) for request in running] == alone


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 64])
def test_hits_and_misses_around_the_edges_of_blocks(block_size: int) -> None:
    """Prompts of k * B - 1, k * B and k * B + 1 tokens, four times each: the first misses, the others hit."""
    lengths = sorted({max(1, blocks * block_size + more) for blocks in (1, 2, 3) for more in (-1, 0, 1)})
    wanted = {"max_tokens": 4, "temperature": 0.8, "seed": 3, "logprobs": 2}
    with engine(prefix_cache=False, block_size=block_size) as cold, engine(block_size=block_size) as warm:
        for length in lengths:
            prompt = prompts(1, length, seed=length)[0]
            expected = bits(cold.generate(prompt, **wanted))
            for number in range(4):
                request = warm.submit(prompt, **wanted)
                warm.run()
                assert bits(warm.answer(request)) == expected
                cached = request.samples[0].usage.cached_tokens
                assert cached < length  # at least one token is computed
                assert (cached >= (length - 1) // block_size * block_size) if number else cached == 0


def test_after_unrelated_traffic_and_with_a_warm_cache(alone: list[tuple[Any, ...]]) -> None:
    with engine() as harness:
        for round_number in range(3):
            for prompt in prompts(8, 40, seed=round_number):
                harness.submit(prompt, max_tokens=10, temperature=1.0, repetition_penalty=1.3, min_tokens=3)
            harness.run()
            assert everything(harness) == alone
        assert harness.metrics.cached_tokens_total > 0


def test_of_a_group_of_samples(alone: list[tuple[Any, ...]]) -> None:
    with engine() as harness:
        for number in (3, 7):
            prompt, options = REQUESTS[number]
            group = harness.submit(prompt, max_tokens=MAX_TOKENS, n=5, **options)
            harness.run()
            assert bits(harness.answer(group, 0)) == alone[number]


def test_with_pauses(alone: list[tuple[Any, ...]]) -> None:
    with engine() as harness:
        running = [harness.submit(prompt, max_tokens=MAX_TOKENS, credit=1, **options) for prompt, options in REQUESTS]
        for _ in range(MAX_TOKENS):
            harness.run()
            for request in running:
                harness.engine.pace.grant(request, 1)
        harness.run()
        assert [bits(harness.answer(request)) for request in running] == alone
