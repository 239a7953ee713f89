"""Sampling on the device, through the PTX interpreter: the CPU kernel's tokens exactly, the oracle's logprobs."""

from typing import Any

import numpy as np
import pytest

from kvpool.model.batch import Float32, SamplingBatch
from tests.support import numpy_sampling as oracle
from tests.support.cuda_rooms import sampling
from tests.support.cuda_run import launch
from tests.support.real_card import fresh, kernel_device
from tests.support.sampling_batches import run_kernel, sampling_batch

INF = np.float32(np.inf)


def sample(logits: Float32, batch: SamplingBatch) -> tuple[Any, ...]:
    """tokens, logprobs, top_tokens, top_logprobs, errors."""
    device = kernel_device(count=False)
    rows, vocab_size = logits.shape
    width = max(0, int(batch.num_logprobs.max(initial=0)))
    with np.errstate(divide="ignore"):
        floor = np.log(batch.min_p.astype(np.float64)).astype(np.float32)
    fields = {**{name: getattr(batch, name) for name in SamplingBatch.__dataclass_fields__}, "min_p_floor": floor}
    for name in ("penalty_start", "bias_start", "allowed_start"):
        if len(fields[name]) == 1:
            fields[name] = np.zeros(rows + 1, np.int32)
    kernel = sampling.sample()
    names = [name for name, _ in kernel.arguments]
    results = [
        device.empty(rows, np.int32),
        device.empty(rows, np.float32),
        device.empty((rows, width), np.int32) if width else device.zeros((rows, 1), np.int32),
        device.empty((rows, width), np.float32) if width else device.zeros((rows, 1), np.float32),
        device.empty(rows, np.uint8),
    ]
    given = [
        device.array(fields[name] if len(fields[name]) else np.zeros(1, fields[name].dtype)) for name in names[1:20]
    ]
    scaled = device.empty(logits.shape, np.float32)
    launch(device, kernel, (rows,), device.array(logits), *given, scaled, *results, vocab_size, width)
    tokens, logprobs, top_tokens, top_logprobs, errors = (device.read(each) for each in results)
    return tokens, logprobs, top_tokens[:, :width], top_logprobs[:, :width], errors.astype(np.bool_)


def check(logits: Float32, batch: SamplingBatch) -> tuple[Any, ...]:
    tokens, logprobs, top_tokens, top_logprobs, errors = result = sample(logits, batch)
    on_cpu = run_kernel(logits, batch)
    np.testing.assert_array_equal(errors, on_cpu.numeric_errors)
    np.testing.assert_array_equal(tokens, on_cpu.tokens)
    np.testing.assert_array_equal(top_tokens, on_cpu.top_tokens)
    expected = oracle.sample(logits, batch)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(logprobs, expected[1], rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(top_logprobs, expected[3], rtol=1e-6, atol=1e-5)
    return result


def awkward_rows(random: np.random.Generator, rows: int, vocab_size: int) -> Float32:
    """Normal, peaked, full of ties, huge, tiny, constant, mostly -inf."""
    logits = random.standard_normal((rows, vocab_size))
    for r in range(rows):
        logits[r] = (
            logits[r] * 3,
            logits[r] * 12,
            np.round(logits[r] * 2),
            logits[r] * 1e37,
            logits[r] * 1e-40,
            np.full(vocab_size, -7.5),
            np.where(random.random(vocab_size) < 0.9, -np.inf, logits[r]),
        )[r % 7]
        logits[r, random.integers(vocab_size)] = 1.0
    return logits.astype(np.float32)


@pytest.mark.parametrize("vocab_size", [1, pytest.param(31, marks=pytest.mark.slow), 1000])
def test_draws_the_cpus_token_whatever_the_row_and_the_limits(vocab_size: int) -> None:
    random = fresh(vocab_size)
    rows = 14

    def pick(*choices: Any) -> Any:
        return random.choice(np.array(choices), rows)

    def lists(values: Any) -> list[list[tuple[int, Any]]]:
        size = min(5, vocab_size)
        return [
            [
                (int(token), random.choice(values))
                for token in random.permutation(vocab_size)[: random.integers(size + 1)]
            ]
            for _ in range(rows)
        ]

    batch = sampling_batch(
        rows,
        temperature=pick(0, 1e-45, 1e-6, 0.3, 1, 1, 1.7, 100),
        top_k=pick(0, 0, 1, 2, 50, max(1, vocab_size - 1), vocab_size, vocab_size + 1),
        top_p=pick(1, 1, 1e-9, 0.1, 0.37, 0.6, 0.9, 0.97),
        min_p=pick(0, 0, 1e-4, 0.07, 0.3, 1),
        seeds=random.integers(0, 2**64, rows, dtype=np.uint64),
        counters=random.integers(0, 2**40, rows),
        num_logprobs=pick(-1, 0, 1, 5, 20),
        targets=pick(-1, -1, -1, vocab_size - 1),
        repetition_penalty=pick(1, 0.5, 1.3, 2),
        presence_penalty=pick(0, -2, 0.7, 2),
        frequency_penalty=pick(0, -2, 0.1, 2),
        penalties=lists([0, 1, 3]),
        bias=lists([-np.inf, -100, -0.5, 0, 3, 100]),
        allowed=[[token for token, _ in row] for row in lists([0])],
    )
    check(awkward_rows(random, rows, vocab_size), batch)


def test_a_real_vocabulary() -> None:
    random = fresh(5)
    logits = random.standard_normal((3, 49152)).astype(np.float32) * np.float32(3)
    batch = sampling_batch(
        3,
        temperature=[1, 0.8, 0],
        top_k=[50, 5000, 0],
        top_p=[0.9, 1, 1],
        min_p=[0, 0.01, 0],
        num_logprobs=[20, -1, 0],
        seeds=np.arange(3) + 11,
    )
    check(logits, batch)


@pytest.mark.parametrize("bad", [-np.nan, INF])
def test_nan_or_infinity_fails_that_row_alone(bad: float) -> None:
    logits = fresh(1).standard_normal((4, 700)).astype(np.float32)
    logits[1, 600] = bad
    logits[3] = -INF
    batch = sampling_batch(4, temperature=[1, 1, 0, 1], num_logprobs=2, targets=[-1, -1, 5, -1])
    tokens, _, top_tokens, _, errors = check(logits, batch)
    assert errors.tolist() == [False, True, False, True]
    assert tokens[1] == -1
    assert top_tokens[1].tolist() == [-1, -1]


@pytest.mark.parametrize(("name", "token"), [("penalties", -1), ("bias", 300), ("allowed", 2**31 - 1)])
def test_a_token_id_outside_the_vocabulary_fails_that_row_alone(name: str, token: int) -> None:
    rows: dict[str, Any] = {
        "penalties": [[], [(3, 1), (token, 1)]],
        "bias": [[], [(3, 1.0), (token, 1.0)]],
        "allowed": [[], [3, token]],
    }
    logits = np.zeros((2, 300), np.float32)
    batch = sampling_batch(2, temperature=1, **{name: rows[name]})
    tokens, _, _, _, errors = sample(logits, batch)
    assert errors.tolist() == [False, True]
    np.testing.assert_array_equal(tokens, run_kernel(logits, batch).tokens)
