"""Bit-exactness on the CPU: a row of logits is the same bits whatever else is in the step and however it came there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from kvpool.cpu_kernels.table import NUM_SHARED_UNITS
from kvpool.model.backend import BackendLimits
from kvpool.model.batch import Float32
from kvpool.model.cpu.backend import CpuBackend
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.steps import Piece, Shape, run_step, tiny_program

SHAPE = Shape(num_layers=2, windows=(0, 90))
PROGRAM = tiny_program(SHAPE)
LENGTH = 600  # three splits of the context
NUM_BLOCKS = 4000
TOKENS = np.random.default_rng(7).integers(0, SHAPE.vocab_size, LENGTH).tolist()
DTYPES = ["float32", "bfloat16", "float32/float16", "bfloat16/int8"]  # of weights, and of keys and values


def make(dtypes: str, block_size: int = 16, threads: int = 2) -> CpuBackend:
    limits = BackendLimits(block_size, 64, 1300, 700)
    dtype, _, kv_dtype = dtypes.partition("/")
    options = {"dtype": dtype, "kv_dtype": kv_dtype or "auto", "threads": threads}
    backend = CpuBackend(PROGRAM, RandomCheckpoint(PROGRAM), limits, **options)  # type: ignore[arg-type]
    backend.allocate_pool(NUM_BLOCKS)
    poison = np.full((NUM_BLOCKS, backend.block_bytes), 0xFF, dtype=np.uint8)
    backend.write_blocks(range(NUM_BLOCKS), poison)
    return backend


def table(seed: int, block_size: int) -> list[int]:
    """A block table for LENGTH tokens; different seeds share no block."""
    blocks = -(-LENGTH // block_size)
    rows = np.random.default_rng(0).permutation(NUM_BLOCKS)
    return rows[seed * blocks : (seed + 1) * blocks].tolist()


@cache
def reference(dtype: str) -> Float32:
    """(LENGTH, vocab_size): the whole sequence alone in one step."""
    backend = make(dtype)
    result = run_step(backend, [Piece(TOKENS, 0, table(0, 16))], 16, every_row=True)
    backend.close()
    assert result.logits is not None
    assert np.isfinite(result.logits).all()
    return result.logits


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    made = make(*request.param) if isinstance(request.param, tuple) else make(request.param)
    yield made
    made.close()


def same(got: Float32 | None, expected: Float32) -> bool:
    assert got is not None
    return np.array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("backend", DTYPES, indirect=True)
@pytest.mark.parametrize("others", [1, 7, 63])
def test_company_in_the_step(backend: CpuBackend, others: int, request: pytest.FixtureRequest) -> None:
    """Prefill of 40 tokens, then decode, among neighbours of other lengths, before and after it in the step."""
    dtype = request.node.callspec.params["backend"]
    blocks = [[1000 + 12 * i + j for j in range(12)] for i in range(others)]
    lengths = [3 + (i * 5) % 11 for i in range(others)]
    company = [Piece([i % 90] * n, 0, row) for i, (n, row) in enumerate(zip(lengths, blocks, strict=True))]
    half = others // 2
    own = Piece(TOKENS[:40], 0, table(0, 16))
    run_step(backend, [*company[:half], own, *company[half:]], 16)
    for position in range(40, 44):
        decodes = [Piece([5], n + position - 40, row) for n, row in zip(lengths, blocks, strict=True)]
        pieces = [*decodes[:half], Piece([TOKENS[position]], position, table(0, 16)), *decodes[half:]]
        result = run_step(backend, pieces, 16)
        assert result.logits is not None
        assert same(result.logits[half], reference(dtype)[position])


@pytest.mark.parametrize("backend", DTYPES, indirect=True)
@pytest.mark.parametrize("chunk", [1, 3, 16, 64, 257])
def test_chunks(backend: CpuBackend, chunk: int, request: pytest.FixtureRequest) -> None:
    dtype = request.node.callspec.params["backend"]
    last = 120 if chunk == 1 else LENGTH
    for start in range(0, last, chunk):
        piece = Piece(TOKENS[start : min(start + chunk, last)], start, table(0, 16))
        result = run_step(backend, [piece], 16, every_row=True)
        assert same(result.logits, reference(dtype)[start : start + len(piece.tokens)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 5, 8, 32, 64, 128])
def test_block_sizes(dtype: str, block_size: int) -> None:
    """A prefill over shuffled blocks, then a chunk that starts inside a block."""
    backend = make(dtype, block_size)
    first = run_step(backend, [Piece(TOKENS[:531], 0, table(1, block_size))], block_size, every_row=True)
    rest = run_step(backend, [Piece(TOKENS[531:], 531, table(1, block_size))], block_size, every_row=True)
    backend.close()
    assert same(first.logits, reference(dtype)[:531])
    assert same(rest.logits, reference(dtype)[531:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_threads(dtype: str, threads: int) -> None:
    backend = make(dtype, threads=threads)
    whole = run_step(backend, [Piece(TOKENS[:-1], 0, table(2, 16))], 16, every_row=True)
    decode = run_step(backend, [Piece(TOKENS[-1:], LENGTH - 1, table(2, 16))], 16)
    backend.close()
    assert same(whole.logits, reference(dtype)[:-1])
    assert same(decode.logits, reference(dtype)[-1:])


@pytest.mark.parametrize("backend", DTYPES, indirect=True)
def test_shared_prefix_and_copied_blocks(backend: CpuBackend, request: pytest.FixtureRequest) -> None:
    """Two sequences on the same first blocks; one whose blocks were copied; one that went out and came back."""
    dtype = request.node.callspec.params["backend"]
    own = table(3, 16)
    run_step(backend, [Piece(TOKENS[:320], 0, own)], 16)
    forks = [own[:20] + table(seed, 16)[20:] for seed in (4, 5)]
    copied = table(6, 16)
    backend.copy_blocks(own[:20], copied[:20])
    moved = table(7, 16)
    data = backend.read_blocks(own[:20])
    backend.write_blocks(moved[:20], data)
    pieces = [Piece(TOKENS[320:400], 320, blocks) for blocks in (*forks, copied, moved)]
    result = run_step(backend, pieces, 16, every_row=True)
    assert result.logits is not None
    for part in np.split(result.logits, 4):
        assert same(part, reference(dtype)[320:400])


@pytest.mark.parametrize("backend", [*DTYPES, ("bfloat16", 8), ("float32", 5)], indirect=True)
@pytest.mark.parametrize("num_shared", [255, 256, 540])
def test_decodes_that_share_a_beginning(backend: CpuBackend, num_shared: int, request: pytest.FixtureRequest) -> None:
    """More of them than share a tile, of different lengths, with strangers between; alone, each gives the same bits.

    One layer of the model looks back 90 tokens only.
    """
    kind = request.node.callspec.params["backend"]
    dtype, block_size = kind if isinstance(kind, tuple) else (kind, 16)
    own = table(0, block_size)
    run_step(backend, [Piece(TOKENS[:560], 0, own)], block_size)
    shared = num_shared // block_size
    decodes = []
    for number in range(11):
        blocks = (
            own[:shared] + table(number + 1, block_size)[shared:] if number % 4 != 3 else table(12 + number, block_size)
        )
        length = 545 + number
        start = shared * block_size if number % 4 != 3 else 0
        run_step(backend, [Piece(TOKENS[start:length], start, blocks)], block_size)
        decodes.append(Piece(TOKENS[length : length + 1], length, blocks))
    decodes = [piece for number, piece in enumerate(decodes) if number not in (3, 7)] + [decodes[3], decodes[7]]
    together = run_step(backend, decodes, block_size)
    assert together.logits is not None
    assert (backend._state[NUM_SHARED_UNITS] > 0) == (shared * block_size >= 256)  # else this tests nothing
    for row, piece in enumerate(decodes):
        assert same(together.logits[row], reference(dtype)[piece.start])


@pytest.mark.parametrize("backend", DTYPES, indirect=True)
def test_many_logit_rows_go_through_in_chunks(backend: CpuBackend, request: pytest.FixtureRequest) -> None:
    """More logit rows than sequences: the vocabulary product works on 64 at a time."""
    dtype = request.node.callspec.params["backend"]
    result = run_step(backend, [Piece(TOKENS, 0, table(8, 16))], 16, every_row=True, num_logprobs=2)
    assert same(result.logits, reference(dtype))
    np.testing.assert_array_equal(result.tokens, reference(dtype).argmax(axis=1))
    np.testing.assert_array_equal(result.top_tokens[:, 0], result.tokens)


@pytest.mark.parametrize("has_dot", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rows_too_long_for_the_cache(dtype: str, has_dot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products over 2,600 k go in stretches for many rows, and at once for few."""
    monkeypatch.setattr("kvpool.model.cpu.backend.host_prefers_dot", lambda: has_dot)
    program = tiny_program(Shape(num_layers=1, intermediate_size=2600))
    backend = CpuBackend(program, RandomCheckpoint(program), BackendLimits(16, 64, 700, 700), dtype=dtype, threads=2)
    backend.allocate_pool(60)
    whole = run_step(backend, [Piece(TOKENS[:130], 0, list(range(9)))], 16, every_row=True)
    for start, end in ((0, 1), (1, 4), (4, 100), (100, 130)):
        piece = Piece(TOKENS[start:end], start, list(range(20, 29)))
        assert same(run_step(backend, [piece], 16, every_row=True).logits, whole.logits[start:end])
    backend.close()


def test_dot_products_are_exact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations rounded to bfloat16 (emulated where the processor lacks the instruction): chunks, company, threads.

    The values are near those of float32 activations, but not the same ones.
    """
    monkeypatch.setattr("kvpool.model.cpu.backend.host_prefers_dot", lambda: False)
    without = make("bfloat16")
    assert "with dot products" not in without.description
    plain = run_step(without, [Piece(TOKENS[:200], 0, table(0, 16))], 16, every_row=True).logits
    without.close()
    assert plain is not None
    monkeypatch.setattr("kvpool.model.cpu.backend.host_prefers_dot", lambda: True)
    backend = make("bfloat16")
    assert "with dot products" in backend.description
    whole = run_step(backend, [Piece(TOKENS[:200], 0, table(0, 16))], 16, every_row=True)
    company = [Piece([9] * 30, 0, table(2, 16)), Piece(TOKENS[:37], 0, table(1, 16)), Piece([8], 0, table(3, 16))]
    parts = [run_step(backend, company, 16, every_row=True).logits[30:67]]
    for start in range(37, 200, 41):
        piece = Piece(TOKENS[start : min(start + 41, 200)], start, table(1, 16))
        parts.append(run_step(backend, [piece], 16, every_row=True).logits)
    backend.close()
    assert same(np.concatenate(parts), whole.logits)
    assert not same(whole.logits, plain)
    assert np.abs(whole.logits - plain).mean() < 0.03
