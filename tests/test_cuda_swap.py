"""Swaps beside the steps, and steps begun early over the ends of blocks: the same bits, whatever the card does when."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kvpool.daemon.engine.request import Request
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.loading import LoadedModel
from tests.support.cuda_rooms import layout
from tests.support.cuda_streams import StreamedCard
from tests.support.engine_harness import Harness, prompts

cuda_backend = pytest.importorskip("kvpool.model.cuda.backend")
cuda_pool = pytest.importorskip("kvpool.model.cuda.pool")

ORDERS = {
    "late": {"main": 0.0, "side": 0.0},
    "steps-first": {"main": 1.0, "side": 0.0},
    "copies-first": {"main": 0.0, "side": 1.0},
    "any": {"main": 0.8, "side": 0.6},
}
SAMPLED: dict[str, Any] = {"ignore_eos": True, "temperature": 0.8, "seed": 3, "n": 2}


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence needs both rooms several times over."""
    monkeypatch.setattr(cuda_pool, "ROOM_BYTES", 1)


def harness(order: str, num_blocks: int, *, ahead: bool = True, host_blocks: int = 0) -> Harness:
    def make(model: LoadedModel, limits: BackendLimits) -> Backend:
        config = model.config
        shape = layout.AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, 8, "float32")
        card = StreamedCard(shape, "float32", **ORDERS[order], seed=num_blocks)
        made: Backend = cuda_backend.CudaBackend(
            model.program, model.checkpoint, limits, dtype="float32", device=card, ahead=ahead
        )
        return made

    made = Harness(
        block_size=8,
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefix_cache=False,
        make_backend=make,
    )
    made.scheduler.costs.compute_s_per_token = 1.0  # swap, whenever it is possible
    return made


Answers = list[tuple[list[int], list[float]]]


def answers(made: Harness) -> Answers:
    """Of a crowd whose urgent members push the others out, again and again; tokens and logprobs, bit for bit."""
    ids = prompts(5, 30, seed=5)
    requests: list[Request] = [made.submit(ids[0], max_tokens=24, **SAMPLED)]
    requests.append(made.submit(ids[1][:21], max_tokens=32, ignore_eos=True))
    for urgent in ids[2:]:
        for _ in range(7):
            made.turn()
        requests.append(made.submit(urgent, max_tokens=9, ignore_eos=True, priority=3))
    made.run()
    told = [made.answer(request, sample) for request in requests for sample in range(len(request.samples))]
    made.assert_clean()
    made.close()
    return [(answer.token_ids, answer.logprobs) for answer in told]


@functools.cache
def undisturbed() -> Answers:
    return answers(harness("copies-first", 64, ahead=False))


@pytest.mark.parametrize(("order", "ahead"), [*((order, True) for order in ORDERS), ("late", False)])
def test_swapped_sequences_keep_their_bits(order: str, ahead: bool) -> None:
    made = harness(order, 13, ahead=ahead, host_blocks=40)
    assert answers(made) == undisturbed()
    assert made.scheduler.preemptions_total >= 4


@pytest.mark.parametrize("order", ORDERS)
def test_moves_find_what_was_asked_for_before_them(order: str) -> None:
    made = harness(order, 13)
    backend = made.backend
    backend.allocate_host(4)
    data = np.random.default_rng(0).integers(0, 256, (4, backend.block_bytes)).astype(np.uint8)
    backend.write_blocks([0, 1, 2, 3], data)
    backend.swap_out([0, 1, 2], [3, 0, 1])
    backend.write_blocks([0, 1], data[[3, 3]])  # the blocks have other owners now
    backend.swap_in([0, 3], [8, 7])
    backend.swap_out([7], [2])  # out again, before anything waited for it
    backend.swap_in([0, 1], [9, 10])
    backend.copy_blocks([9], [11])
    backend.swap_in([0], [12])
    backend.write_blocks([12], data[3:])  # its block has another owner already
    np.testing.assert_array_equal(backend.read_host([3, 0, 1, 2]), data[[0, 1, 2, 0]])
    for blocks, expected in (([7, 8, 9, 10, 11, 12], [0, 1, 1, 2, 1, 3]), ([0, 1, 2, 3], [3, 3, 2, 3])):
        np.testing.assert_array_equal(backend.read_blocks(blocks), data[expected])
    backend.swap_out([8], [1])
    np.testing.assert_array_equal(backend.read_host([1]), data[[1]])
    num_blocks, seconds = backend.take_swap_times()
    assert num_blocks == 10
    assert seconds > 0
    assert backend.take_swap_times() == (0, 0.0)
    made.close()


@pytest.mark.parametrize("order", ORDERS)
def test_what_comes_in_waits_for_the_steps_before_it(order: str) -> None:
    """A step that was begun early, and is never asked for, still writes into blocks that have another owner now."""
    made = harness(order, 13)
    backend = made.backend
    backend.allocate_host(1)
    data = np.random.default_rng(0).integers(0, 256, (1, backend.block_bytes)).astype(np.uint8)
    backend.write_blocks([12], data)
    backend.swap_out([12], [0])
    made.submit([5, 6, 7], max_tokens=20, ignore_eos=True)
    for _ in range(3):
        made.turn()
    (sequence,) = made.scheduler.roster.sequences.values()
    backend.collect()
    backend.swap_in([0], sequence.block_table)
    np.testing.assert_array_equal(backend.read_blocks(sequence.block_table), data)
    made.close()


def test_steps_are_begun_early_over_the_ends_of_blocks_and_never_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    is_same_step = cuda_backend.is_same_step
    monkeypatch.setattr(cuda_backend, "is_same_step", lambda *each: found.append(is_same_step(*each)) or found[-1])
    told, counts = [], []
    for ahead in (False, True):
        made = harness("late", 64, ahead=ahead)
        card: Any = made.backend
        requests = [made.submit(ids, max_tokens=40, ignore_eos=True) for ids in prompts(2, 11)]
        made.run()
        told.append([(made.answer(each).token_ids, made.answer(each).logprobs) for each in requests])
        counts.append(card._device.launches.count("sample"))
        made.assert_clean()
        made.close()
    assert told[0] == told[1]
    assert counts == [40, 40]
    assert found == [True] * 38  # all but the prompts' step and the first after it
