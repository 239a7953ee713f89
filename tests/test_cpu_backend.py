"""The CPU back end against its NumPy twin, at sizes where things go wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.model.backend import BackendLimits
from kvpool.model.cpu_backend import CpuBackend
from kvpool.model.program import Program
from tests.support.numpy_backend import NumpyBackend
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.steps import Piece, Shape, run_step, tiny_program

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
    """Fill the pool with bits that are NaN in float32 and in bfloat16."""
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
        got, expected = (run_step(b, pieces, block_size, every_row=True, num_logprobs=3) for b in (cpu, twin))
        for name in ("logits", "hidden", "logprobs"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert not got.numeric_errors.any()
