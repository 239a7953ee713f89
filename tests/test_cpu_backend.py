"""The CPU back end against its NumPy twin, at sizes where things go wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.model.backend import BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.program import Program
from tests.support.numpy_backend import NumpyBackend
from tests.support.numpy_sampling import sample
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.sampling_batches import sampling_batch
from tests.support.steps import UNREADABLE, Piece, Shape, run_step, step_batch, tiny_program

SHAPES = {
    "plain": Shape(),
    "one-head": Shape(num_heads=1, num_kv_heads=1, head_dim=8, hidden_size=8, intermediate_size=16, vocab_size=16),
    "nothing-divides": Shape(
        vocab_size=83, hidden_size=37, intermediate_size=51, num_heads=3, num_kv_heads=1, head_dim=13, rotary_dim=10
    ),
    "wide-heads": Shape(num_heads=2, num_kv_heads=2, head_dim=80, rotary_dim=32, bias=True),
    "many-queries": Shape(num_heads=50, num_kv_heads=1, head_dim=16),
    "window": Shape(windows=(5, 0), head_norms=True, post_norm=True, activation="gelu_tanh", embedding_scale=3.5),
    "untied": Shape(tied=False, num_layers=1),
}
LIMITS = BackendLimits(block_size=4, max_num_seqs=64, max_num_batched_tokens=700, max_model_len=700)


def tokens_of(seed: int, count: int, program: Program) -> list[int]:
    return np.random.default_rng(seed).integers(0, program.config.vocab_size, count).tolist()


def limits(block_size: int) -> BackendLimits:
    return BackendLimits(block_size, LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens, LIMITS.max_model_len)


def both(shape: Shape, block_size: int, num_blocks: int, **options: object) -> tuple[CpuBackend, NumpyBackend]:
    """A CPU back end whose pool is poisoned with NaN, and its twin, on the same weights."""
    program = tiny_program(shape)
    cpu = CpuBackend(program, RandomCheckpoint(program), limits(block_size), **options)  # type: ignore[arg-type]
    twin = NumpyBackend(program, RandomCheckpoint(program), limits(block_size))
    for backend in (cpu, twin):
        backend.allocate_pool(num_blocks)
    poison(cpu, num_blocks)
    return cpu, twin


def poison(backend: CpuBackend, num_blocks: int) -> None:
    """Fill the pool with bits that are NaN in every format; of int8 the scales."""
    backend.write_blocks(range(num_blocks), np.full((num_blocks, backend.block_bytes), 0xFF, dtype=np.uint8))


@pytest.fixture
def closing() -> Iterator[list[CpuBackend]]:
    backends: list[CpuBackend] = []
    yield backends
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 32])
def test_prefill_and_decode_match_the_twin(name: str, block_size: int, closing: list[CpuBackend]) -> None:
    """Sequences of B - 1, B, B + 1, 1 and 40 tokens in shuffled blocks, then two steps of decode together."""
    lengths = [max(1, block_size - 1), block_size, block_size + 1, 1, 40]
    blocks = iter(np.random.default_rng(0).permutation(200).tolist())
    tables = [[next(blocks) for _ in range(-(-(length + 3) // block_size))] for length in lengths]
    cpu, twin = both(SHAPES[name], block_size, 200, dtype="float32", threads=2)
    closing.append(cpu)
    prompts = [tokens_of(i, length, twin.program) for i, length in enumerate(lengths)]
    steps = [[Piece(p, 0, table) for p, table in zip(prompts, tables, strict=True)]]
    steps += [
        [Piece([extra + 3], n + extra, table) for n, table in zip(lengths, tables, strict=True)] for extra in range(2)
    ]
    for pieces in steps:
        asked = {"every_row": True, "layers": range(twin.program.config.num_layers), "num_logprobs": 3}
        got, expected = (run_step(b, pieces, block_size, **asked) for b in (cpu, twin))
        for name in ("logits", "hidden", "logprobs", "layer_outputs"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert not got.numeric_errors.any()


@pytest.mark.parametrize("name", ["plain", "nothing-divides", "window", "wide-heads"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_narrow_keys_and_values_match_a_twin_that_rounds_them(
    name: str, kv_dtype: str, block_size: int, closing: list[CpuBackend]
) -> None:
    """A number that lies between two of the format may go the other way in the twin: few differ, and by little."""
    program, length = tiny_program(SHAPES[name]), 40
    made = limits(block_size)
    cpu = CpuBackend(program, RandomCheckpoint(program), made, dtype="float32", kv_dtype=kv_dtype, threads=2)
    twins = [NumpyBackend(program, RandomCheckpoint(program), made, kind) for kind in (kv_dtype, "float32")]
    closing.append(cpu)
    table = np.random.default_rng(0).permutation(60)[: -(-length // block_size)].tolist()
    tokens = tokens_of(1, length, program)
    logits, held = [], []
    for backend in (cpu, *twins):
        backend.allocate_pool(60)
        if backend is cpu:
            poison(cpu, 60)
        parts = [Piece(tokens[:37], 0, table), Piece(tokens[37:], 37, table)]
        logits.append(np.concatenate([run_step(backend, [p], block_size, every_row=True).logits for p in parts]))
        blocks = backend.keys_values(backend.read_blocks(table))  # (blocks, layers, 2, block_size, heads, head_dim)
        held.append(blocks.transpose(0, 3, 1, 2, 4, 5).reshape(-1, *blocks.shape[1:3], *blocks.shape[4:])[:length])
    assert 10 * np.abs(logits[0] - logits[1]).mean() < np.abs(logits[0] - logits[2]).mean()
    assert 10 * np.abs(held[0] - held[1]).mean() < np.abs(held[0] - held[2]).mean()
    bound = {"bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 250}[kv_dtype]
    first, exact = held[0][:, 0], held[2][:, 0]  # later layers see what the first one's rounding did
    assert (np.abs(first - exact) <= bound * np.abs(exact).max(axis=-1, keepdims=True) + 1e-4).all()


def one_layer(**options: object) -> CpuBackend:
    program = tiny_program(Shape(num_layers=1, windows=(20,)))
    backend = CpuBackend(program, RandomCheckpoint(program), limits(16), threads=2, **options)  # type: ignore[arg-type]
    backend.allocate_pool(40)
    poison(backend, 40)
    return backend


def test_blocks_that_left_the_window_are_not_read(closing: list[CpuBackend]) -> None:
    """Their table entries may be anything, and the blocks somebody else's."""
    backend = one_layer(dtype="float32")
    closing.append(backend)
    tokens, blocks = [i % 90 for i in range(100)], list(range(7))
    run_step(backend, [Piece(tokens[:99], 0, blocks)], 16)
    expected = run_step(backend, [Piece(tokens[99:], 99, blocks)], 16)
    backend.write_blocks(range(5), np.full((5, backend.block_bytes), 0xFF, dtype=np.uint8))
    left = [UNREADABLE] * 5 + blocks[5:]  # positions 80 to 99 are seen
    got = run_step(backend, [Piece(tokens[99:], 99, left)], 16)
    assert np.isfinite(got.logits).all()
    np.testing.assert_array_equal(got.logits, expected.logits)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
def test_a_nan_fails_its_sequence_alone(kv_dtype: str, closing: list[CpuBackend]) -> None:
    backend = one_layer(kv_dtype=kv_dtype)
    closing.append(backend)
    pieces = [Piece([seed + 1] * 10, 0, [3 * seed, 3 * seed + 1]) for seed in range(3)]
    run_step(backend, pieces, 16)
    decodes = [Piece([7], 10, piece.blocks) for piece in pieces]
    expected = run_step(backend, decodes, 16)
    backend.write_blocks([3], np.full((1, backend.block_bytes), 0xFF, dtype=np.uint8))
    got = run_step(backend, decodes, 16)
    assert got.numeric_errors.tolist() == [False, True, False]
    for row in (0, 2):
        np.testing.assert_array_equal(got.logits[row], expected.logits[row])
    # The workspace rows that held NaN serve somebody else in the next step.
    again = run_step(backend, [decodes[2], decodes[0]], 16)
    assert not again.numeric_errors.any()
    np.testing.assert_array_equal(again.logits, expected.logits[[2, 0]])


@pytest.mark.parametrize("name", SHAPES)
def test_dot_products_round_activations_and_nothing_else(
    name: str, closing: list[CpuBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated where the processor has no such instruction: near the same weights with float32 activations."""
    program = tiny_program(SHAPES[name])
    pieces = [
        Piece(tokens_of(seed, count, program), 0, [2 * seed, 2 * seed + 1]) for seed, count in enumerate((1, 5, 23))
    ]
    results = []
    for has_dot in (False, True):
        monkeypatch.setattr("kvpool.model.cpu.backend.host_prefers_dot", lambda has_dot=has_dot: has_dot)
        backend = CpuBackend(program, RandomCheckpoint(program), limits(16), dtype="bfloat16", threads=2)
        closing.append(backend)
        backend.allocate_pool(6)
        poison(backend, 6)
        results.append(run_step(backend, pieces, 16, every_row=True).logits)
    plain, dot = results
    assert np.isfinite(dot).all()
    assert not np.array_equal(dot, plain)
    assert np.abs(dot - plain).mean() < 0.02 * np.abs(plain).mean() + 0.01


def test_blocks_go_out_and_come_back(closing: list[CpuBackend]) -> None:
    backend = one_layer()
    closing.append(backend)
    data = np.random.default_rng(0).integers(0, 256, (3, backend.block_bytes), dtype=np.uint8)
    backend.write_blocks([5, 2, 9], data)
    np.testing.assert_array_equal(backend.read_blocks([9, 5]), data[[2, 0]])
    backend.copy_blocks([2, 9], [30, 31])
    np.testing.assert_array_equal(backend.read_blocks([30, 31]), data[[1, 2]])
    backend.allocate_host(4)
    backend.swap_out([30, 31], [3, 0])
    backend.swap_in([0, 3], [1, 2])
    np.testing.assert_array_equal(backend.read_blocks([2, 1]), data[[1, 2]])
    np.testing.assert_array_equal(backend.read_host([3, 0]), data[[1, 2]])
    assert backend.take_swap_times()[0] == 4
    assert backend.take_swap_times() == (0, 0.0)


def test_sampling_goes_through_the_kernel(closing: list[CpuBackend]) -> None:
    """Temperature, bias, targets and logprobs of each row, as the sampling oracle has them."""
    backend = one_layer(dtype="float32")
    closing.append(backend)
    pieces = [Piece([i + 1] * 3, 0, [i]) for i in range(4)]
    options = {
        "temperature": [0.0, 0.9, 1.3, 0.0],
        "top_k": [0, 5, 0, 0],
        "seeds": [1, 2, 3, 4],
        "counters": [0, 7, 1, 2],
        "targets": [-1, -1, -1, 11],
        "num_logprobs": [2, -1, 0, 3],
        "bias": [[(4, 50.0)], [], [(2, float("-inf"))], []],
    }
    batch = step_batch(pieces, 16, **options)
    backend.launch(batch)
    got = backend.collect()
    tokens, logprobs, top_tokens, top_logprobs, errors = sample(got.logits, batch.sampling)
    assert got.tokens.tolist() == tokens.tolist()
    assert (got.tokens[0], got.tokens[3]) == (4, 11)
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-5)
    assert got.top_tokens.tolist() == top_tokens.tolist()
    np.testing.assert_allclose(got.top_logprobs, top_logprobs, atol=1e-5)
    assert not errors.any()


def test_a_step_without_logits_or_wishes(closing: list[CpuBackend]) -> None:
    """A prefill chunk in the middle of a prompt: no row is sampled."""
    backend = one_layer()
    closing.append(backend)
    batch = step_batch([Piece([1, 2, 3], 0, [0])], 16)
    batch.logit_rows, batch.sampling = np.zeros(0, np.int32), sampling_batch(0)
    batch.want_logits = batch.want_hidden = False
    backend.launch(batch)
    result = backend.collect()
    assert result.tokens.shape == (0,)
    assert result.logits is None
    assert result.hidden is None


def test_outputs_of_some_layers_for_some_rows(closing: list[CpuBackend]) -> None:
    """Exactly those that are asked for, and the next step, which asks for none, has none."""
    program = tiny_program(Shape(num_layers=3, hidden_size=50))
    backend = CpuBackend(program, RandomCheckpoint(program), limits(16), dtype="float32", threads=2)
    closing.append(backend)
    backend.allocate_pool(8)
    pieces = [Piece([1, 2, 3, 4, 5], 0, [0]), Piece([6, 7, 8], 0, [1])]
    whole = run_step(backend, pieces, 16, every_row=True, layers=(0, 1, 2)).layer_outputs
    assert whole is not None
    assert whole.shape == (3, 8, 50)
    batch = step_batch(pieces, 16, layers=(0, 2))
    batch.layer_rows = np.array([7, 0, 3], np.int32)
    backend.launch(batch)
    some = backend.collect().layer_outputs
    assert some is not None
    np.testing.assert_array_equal(some, whole[np.ix_([0, 2], [7, 0, 3])])
    assert run_step(backend, pieces, 16).layer_outputs is None


def test_misuse_says_what_is_wrong(closing: list[CpuBackend]) -> None:
    backend = one_layer()
    closing.append(backend)
    with pytest.raises(RuntimeError, match="no step is in flight"):
        backend.collect()
    batch = step_batch([Piece([1], 0, [0])], 16)
    backend.launch(batch)
    with pytest.raises(RuntimeError, match="already in flight"):
        backend.launch(batch)
    backend.collect()
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        backend.launch(step_batch([Piece([1] * 701, 0, list(range(44)))], 16))
    with pytest.raises(ValueError, match="max_num_seqs"):
        backend.launch(step_batch([Piece([1], 0, [0])] * 65, 16))
    with pytest.raises(MemoryError, match="pool_bytes"):
        backend.allocate_pool(1 << 40)
    with pytest.raises(MemoryError, match=r"the host pool needs .* lower host_pool_bytes"):
        backend.allocate_host(1 << 40)
    with pytest.raises(ValueError, match="set kv_dtype to auto, float32, bfloat16, float16, int8"):
        one_layer(kv_dtype="fp8")
    with pytest.raises(ValueError, match="set dtype to auto, float32, bfloat16"):
        one_layer(dtype="float8")


def test_description_and_sizes(closing: list[CpuBackend]) -> None:
    wide, narrow = one_layer(dtype="float32"), one_layer(dtype="bfloat16")
    mixed = one_layer(dtype="bfloat16", kv_dtype="float32")
    closing += [wide, narrow, mixed]
    shape = Shape(num_layers=1)
    assert wide.block_bytes == 2 * shape.num_kv_heads * shape.head_dim * 16 * 4
    assert narrow.block_bytes * 2 == wide.block_bytes == mixed.block_bytes
    halves, codes = one_layer(kv_dtype="float16"), one_layer(kv_dtype="int8")
    closing += [halves, codes]
    assert halves.block_bytes == narrow.block_bytes
    assert codes.block_bytes == 2 * shape.num_kv_heads * (shape.head_dim + 4) * 16
    assert narrow.weights_bytes < wide.weights_bytes
    assert "bfloat16 weights, float32 KV, 2 threads" in mixed.description
    assert 0 < wide.available_bytes() < 1 << 50
