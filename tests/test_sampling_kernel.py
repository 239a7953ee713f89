"""The CPU sampling kernel against the NumPy oracle, and the promises that serving many users rests on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.cpu_kernels.candidates import BLOCK, FEW
from kvpool.cpu_kernels.jit import entry_point
from kvpool.cpu_kernels.philox import draw_u64, philox4x32_10, scale_u64
from kvpool.cpu_kernels.sampling import SampledArrays, scratch_floats
from kvpool.model.batch import Float32, SamplingBatch
from tests.support import numpy_sampling as oracle
from tests.support.sampling_batches import run_kernel, sampling_batch

INF = np.float32(np.inf)
VOCAB_SIZES = (1, 2, 3, FEW, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 1000)

# Derandomized: kernel and oracle compute exp differently in the last bit, so one draw in ten million may differ.
exact = settings(derandomize=True, deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))


def check(logits: Float32, batch: SamplingBatch) -> SampledArrays:
    """Kernel and oracle agree, and the logits are as they were."""
    before = logits.copy()
    sampled = run_kernel(logits, batch)
    tokens, logprobs, top_tokens, top_logprobs, errors = oracle.sample(logits, batch)
    np.testing.assert_array_equal(logits, before)
    np.testing.assert_array_equal(sampled.numeric_errors, errors)
    np.testing.assert_array_equal(sampled.tokens, tokens)
    np.testing.assert_array_equal(sampled.top_tokens, top_tokens)
    np.testing.assert_allclose(sampled.logprobs, logprobs, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(sampled.top_logprobs, top_logprobs, rtol=1e-6, atol=1e-5)
    return sampled


@st.composite
def rows(draw: st.DrawFn, vocab_size: int) -> Float32:
    """One row: normal, quantised (many ties), huge, tiny or constant, with some special values put in."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "peaked", "ties", "huge", "tiny", "constant"]))
    row = rng.standard_normal(vocab_size)
    row = {
        "normal": row * 3,
        "peaked": row * 12,
        "ties": np.round(row * 2),
        "huge": row * 1e37,
        "tiny": row * 1e-40,
        "constant": np.full(vocab_size, draw(st.sampled_from([0.0, -0.0, -7.5, 3e38]))),
    }[kind].astype(np.float32)
    for _ in range(draw(st.integers(0, 3))):
        special = draw(st.sampled_from([-INF, -INF, 0.0, -0.0, 1e-45, 3.4e38, -3.4e38]))
        row[rng.random(vocab_size) < draw(st.sampled_from([0.01, 0.5, 0.99]))] = special
    return row


@st.composite
def cases(draw: st.DrawFn) -> tuple[Float32, SamplingBatch]:
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    num_rows = draw(st.integers(1, 4))
    logits = np.stack([draw(rows(vocab_size)) for _ in range(num_rows)])
    ids = st.integers(0, vocab_size - 1)

    def each(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return [draw(strategy) for _ in range(num_rows)]

    def lists(strategy: st.SearchStrategy[Any]) -> list[Any] | None:
        pairs = st.lists(strategy, max_size=5, unique_by=lambda pair: pair[0])
        return each(pairs) if draw(st.booleans()) else None

    allowed = lists(st.tuples(ids))
    return logits, sampling_batch(
        num_rows,
        temperature=each(st.sampled_from([0, 1e-45, 1e-6, 0.3, 1, 1.7, 100])),
        top_k=each(st.sampled_from([0, 0, 1, 2, 50, FEW, FEW + 1, vocab_size - 1, vocab_size, vocab_size + 1])),
        top_p=each(st.sampled_from([1, 1, 1e-9, 0.1, 0.37, 0.6, 0.9, 0.97])),
        min_p=each(st.sampled_from([0, 0, 1e-4, 0.07, 0.3, 1])),
        seeds=each(st.integers(0, 2**64 - 1)),
        counters=each(st.integers(0, 2**40)),
        num_logprobs=each(st.sampled_from([-1, 0, 1, 5, 20])),
        targets=each(st.one_of(st.just(-1), st.just(-1), ids)),
        repetition_penalty=each(st.sampled_from([1, 0.5, 1.3, 2])),
        presence_penalty=each(st.sampled_from([0, -2, 0.7, 2])),
        frequency_penalty=each(st.sampled_from([0, -2, 0.1, 2])),
        penalties=lists(st.tuples(ids, st.integers(0, 3))),
        bias=lists(st.tuples(ids, st.sampled_from([-np.inf, -100, -0.5, 0, 3, 100]))),
        allowed=[[token for (token,) in row] for row in allowed] if allowed is not None else None,
    )


@exact
@given(cases())
def test_kernel_equals_oracle(case: tuple[Float32, SamplingBatch]) -> None:
    check(*case)


@pytest.mark.parametrize("vocab_size", [49152, 50257, 151936])
def test_kernel_equals_oracle_at_real_vocabularies(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = (rng.standard_normal((8, vocab_size)) * np.array([[1], [2], [3], [3], [4], [0.1], [3], [3]])).astype(
        np.float32
    )
    check(
        logits,
        sampling_batch(
            8,
            temperature=[1, 1, 0.8, 1, 1, 1, 0, 1],
            top_k=[0, 50, 0, 5000, 1, 0, 0, 0],
            top_p=[1, 0.9, 0.95, 0.8, 1, 0.5, 1, 0.999],
            min_p=[0, 0, 0, 0, 0, 0, 0, 0.01],
            num_logprobs=[5, 20, 0, -1, 1, 20, 20, 3],
            seeds=np.arange(8) + 11,
        ),
    )


# --- defined answers to bad rows and values --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, -np.nan, INF])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 299])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_or_infinity_anywhere_fails_that_row_alone(bad: float, place: int, temperature: float) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    logits[1, place] = bad
    batch = sampling_batch(3, temperature=temperature, num_logprobs=2, targets=[-1, -1, 5])
    sampled = check(logits, batch)
    assert sampled.numeric_errors.tolist() == [False, True, False]
    assert sampled.tokens[1] == -1
    assert sampled.top_tokens[1].tolist() == [-1, -1]


def test_nothing_left_to_choose_is_an_error() -> None:
    logits = np.zeros((4, 300), dtype=np.float32)
    logits[0] = -INF
    batch = sampling_batch(
        4,
        temperature=[0, 0, 1, 1],
        num_logprobs=1,
        allowed=[[], [5], [5], []],
        bias=[[], [(5, -np.inf)], [(5, -np.inf)], [(v, -np.inf) for v in range(300)]],
    )
    sampled = check(logits, batch)
    assert sampled.numeric_errors.all()
    assert (sampled.tokens == -1).all()
    assert (sampled.top_tokens == -1).all()


def test_sum_that_overflows_is_an_error() -> None:
    logits = np.full((1, 5), 3.4e38, dtype=np.float32)
    assert check(logits, sampling_batch(1, bias=[[(2, 3.4e38)]])).numeric_errors.all()


@pytest.mark.parametrize("token", [-1, -(2**31), 300, 2**31 - 1])
@pytest.mark.parametrize("name", ["allowed", "bias", "penalties"])
def test_token_ids_outside_the_vocabulary_fail_that_row_alone(token: int, name: str) -> None:
    logits = np.random.default_rng(2).standard_normal((3, 300)).astype(np.float32)
    row = [token] if name == "allowed" else [(token, 1)]
    sampled = run_kernel(logits, sampling_batch(3, **{name: [[], row, []]}))
    alone = run_kernel(logits, sampling_batch(3))
    assert sampled.numeric_errors.tolist() == [False, True, False]
    assert sampled.tokens.tolist() == [alone.tokens[0], -1, alone.tokens[2]]


def test_target_outside_the_vocabulary_is_an_error() -> None:
    assert run_kernel(np.zeros((1, 300), dtype=np.float32), sampling_batch(1, targets=300)).numeric_errors.all()


@pytest.mark.parametrize("top_k", [0, 299, 300, 301, 9_999_999, 2**31 - 1])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    logits = np.random.default_rng(3).standard_normal((64, 300)).astype(np.float32)
    logits[:, 7] = -50  # so that 299 cuts only what is never drawn
    plain = run_kernel(logits, sampling_batch(64, temperature=1, seeds=np.arange(64)))
    sampled = run_kernel(logits, sampling_batch(64, temperature=1, seeds=np.arange(64), top_k=top_k))
    np.testing.assert_array_equal(sampled.tokens, plain.tokens)


def test_smallest_temperature_is_greedy_and_finite() -> None:
    logits = np.array([[3e38, -3e38, 1, -INF, 2]], dtype=np.float32)
    assert check(logits, sampling_batch(1, temperature=1e-45)).tokens.tolist() == [0]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.full((2, 700), -1, dtype=np.float32)
    logits[0, [300, 650]] = 2
    logits[1, 400] = 0.0
    logits[1, 399] = -0.0
    assert check(logits, sampling_batch(2)).tokens.tolist() == [300, 399]


def test_ties_at_the_edge_of_a_kept_set_go_to_the_lowest_ids() -> None:
    logits = np.zeros((512, 1000), dtype=np.float32)
    logits[:, 900] = 1e-3
    drawn = {
        name: set(check(logits, sampling_batch(512, temperature=1, seeds=np.arange(512), **kept)).tokens.tolist())
        for name, kept in {"top_k": {"top_k": 4}, "top_p": {"top_p": 0.004}}.items()
    }
    assert drawn == {"top_k": {0, 1, 2, 900}, "top_p": {0, 1, 2, 900}}


@pytest.mark.parametrize(
    ("options", "counts", "expected"),
    [
        ({"repetition_penalty": 2}, [(0, 0)], 1),  # a token of the prompt counts
        ({"repetition_penalty": 0.5}, [(2, 3)], 0),  # a negative logit is multiplied: -0.5
        ({"presence_penalty": 0.2}, [(0, 0)], 0),  # only generated tokens count
        ({"presence_penalty": 0.2}, [(0, 1)], 1),
        ({"presence_penalty": 0.08}, [(0, 9)], 0),  # however often
        ({"frequency_penalty": 0.06}, [(0, 1)], 0),
        ({"frequency_penalty": 0.06}, [(0, 2)], 1),
        ({"frequency_penalty": -2}, [(2, 2)], 2),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_penalties_by_hand(
    options: dict[str, float], counts: list[tuple[int, int]], expected: int, temperature: float
) -> None:
    logits = np.array([[1, 0.9, -1]], dtype=np.float32)
    sampled = check(logits, sampling_batch(1, temperature=temperature, penalties=[counts], **options))
    assert sampled.tokens.tolist() == [expected]
    assert sampled.logprobs[0] == pytest.approx(oracle.log_softmax(logits[0])[expected], abs=1e-6)  # of raw logits


# --- one row never sees another --------------------------------------------------------------------------------------


def mixed_case(num_rows: int) -> tuple[Float32, SamplingBatch]:
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((num_rows, 777)) * 3).astype(np.float32)
    logits[3, 5] = np.nan
    return logits, sampling_batch(
        num_rows,
        temperature=rng.choice([0, 0.7, 1.5], num_rows),
        top_k=rng.choice([0, 3, 200], num_rows),
        top_p=rng.choice([1, 0.8], num_rows),
        min_p=rng.choice([0, 0.1], num_rows),
        seeds=rng.integers(0, 2**63, num_rows),
        counters=rng.integers(0, 1000, num_rows),
        num_logprobs=4,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        penalties=[[(int(t), int(t) % 3) for t in rng.permutation(777)[: 40 * (r % 2)]] for r in range(num_rows)],
        bias=[[(3, 9.0)] * (r % 3 == 0) for r in range(num_rows)],
        allowed=[list(range(0, 777, 5)) * (r % 4 == 1) for r in range(num_rows)],
    )


def take(batch: SamplingBatch, order: list[int]) -> SamplingBatch:
    """The rows `order` of a batch that has every list."""

    def lists(name: str, *fields: str) -> list[Any]:
        start = getattr(batch, f"{name}_start")
        columns = [getattr(batch, f"{name}_{field}") for field in fields]
        return [list(zip(*(c[start[r] : start[r + 1]].tolist() for c in columns), strict=True)) for r in order]

    plain = {name: getattr(batch, name)[order] for name in sampling_batch(0).__dataclass_fields__ if "_" not in name}
    plain |= {name: getattr(batch, name)[order] for name in ("top_k", "top_p", "min_p", "num_logprobs")}
    plain |= {f"{name}_penalty": getattr(batch, f"{name}_penalty")[order] for name in ("repetition", "presence")}
    return sampling_batch(
        len(order),
        penalties=lists("penalty", "tokens", "counts"),
        bias=lists("bias", "tokens", "values"),
        allowed=[[token for (token,) in row] for row in lists("allowed", "tokens")],
        **plain,
    )


def same_bits(left: SampledArrays, right: SampledArrays, rows: list[int]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a[rows].tobytes() == b.tobytes()


def test_a_row_has_the_same_bits_alone_and_in_any_order() -> None:
    logits, batch = mixed_case(12)
    together = run_kernel(logits, batch)
    for order in [[r] for r in range(12)] + [list(range(12))[::-1], [5, 0, 11, 2]]:
        same_bits(together, run_kernel(logits[order].copy(), take(batch, order)), order)


def test_nothing_of_a_row_is_left_for_the_next_user_of_its_slot() -> None:
    logits, batch = mixed_case(12)
    plain = sampling_batch(12, temperature=0.7, seeds=np.arange(12), num_logprobs=4)
    fresh = run_kernel(logits, plain)
    scratch = np.full(scratch_floats(777), np.inf, dtype=np.float32)
    run_kernel(logits, batch, scratch)
    same_bits(fresh, run_kernel(logits, plain, scratch), list(range(12)))


@pytest.mark.parametrize("offset", range(1, 16))
def test_bits_do_not_depend_on_alignment(offset: int) -> None:
    logits, batch = mixed_case(12)
    shifted = np.zeros(logits.size + offset, dtype=np.float32)[offset:].reshape(logits.shape)
    shifted[:] = logits
    scratch = np.zeros(scratch_floats(777) + offset, dtype=np.float32)[offset:]
    same_bits(run_kernel(logits, batch), run_kernel(shifted, batch, scratch), list(range(12)))


# --- randomness ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def philox() -> dict[str, Callable[..., Any]]:
    """The random number kernels, callable from Python."""

    def words(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> Any:
        return philox4x32_10(c0, c1, c2, c3, k0, k1)

    def draw(seed: int, counter: int) -> Any:
        return draw_u64(seed, counter)

    def scale(bits: int, total: int) -> Any:
        return scale_u64(bits, total)

    return {"words": entry_point(words), "draw": entry_point(draw), "scale": entry_point(scale)}


def test_random_bits_equal_the_oracle(philox: dict[str, Callable[..., Any]]) -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        words = rng.integers(0, 2**32, 6, dtype=np.uint64)
        counter, key = tuple(map(int, words[:4])), tuple(map(int, words[4:]))
        assert philox["words"](*words) == oracle.philox4x32_10(counter, key)  # type: ignore[arg-type]
        seed, count = rng.integers(0, 2**64, dtype=np.uint64), rng.integers(0, 2**63)
        assert philox["draw"](seed, count) == oracle.draw_u64(int(seed), int(count))
        total = rng.integers(1, 2 ** int(rng.integers(1, 63)))
        assert philox["scale"](seed, total) == int(seed) * int(total) >> 64


@pytest.mark.parametrize(
    "kept",
    [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 2.5}, {"top_k": 9, "top_p": 0.9, "min_p": 0.05}],
)
def test_draws_follow_the_distribution(kept: dict[str, float]) -> None:
    """Chi-square over 20,000 fixed seeds; 4.5 standard deviations above its mean would be one chance in 100,000."""
    num_draws, vocab_size = 20_000, 40
    row = (np.random.default_rng(6).standard_normal(vocab_size) * 1.5).astype(np.float32)
    batch = sampling_batch(num_draws, **({"temperature": 1, "seeds": np.arange(num_draws)} | kept))
    drawn = np.bincount(run_kernel(np.tile(row, (num_draws, 1)), batch).tokens, minlength=vocab_size)
    scaled = (row - row.max()) / batch.temperature[0]
    top_k, top_p, min_p = int(batch.top_k[0]), float(batch.top_p[0]), float(batch.min_p[0])
    weights = oracle.kept_weights(scaled, top_k, top_p, min_p)
    expected = num_draws * weights / weights.sum()
    assert drawn[expected == 0].sum() == 0
    inside = expected > 0
    freedom = inside.sum() - 1
    statistic = ((drawn - expected)[inside] ** 2 / expected[inside]).sum()
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom)


def test_one_seed_draws_independent_tokens_at_successive_counters() -> None:
    """Pairs of successive draws from four equal tokens: chi-square over the 16 pairs, fixed seed."""
    num_draws = 20_000
    batch = sampling_batch(num_draws, temperature=1, seeds=99, counters=np.arange(num_draws))
    tokens = run_kernel(np.zeros((num_draws, 4), dtype=np.float32), batch).tokens.reshape(-1, 2)
    pairs = np.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    expected = num_draws / 2 / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 15 + 4.5 * np.sqrt(30)
