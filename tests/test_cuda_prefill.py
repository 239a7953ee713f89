"""Prefill attention, through the PTX interpreter: right over cached prefixes, windows and ragged batches."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.cuda_attention import Batch, make_batch, prefill_attention
from tests.support.cuda_rooms import layout
from tests.support.cuda_twins import assert_close, values
from tests.support.real_card import interpreter_only

Array = NDArray[Any]
Shape = layout.AttentionShape


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        (Shape(4, 2, 64, 16, "bfloat16"), 0),
        (Shape(4, 2, 64, 16, "bfloat16"), 37),
        (Shape(3, 1, 256, 32, "float16"), 0),
        pytest.param(Shape(7, 1, 80, 8, "float16"), 37, marks=pytest.mark.slow),
        pytest.param(Shape(2, 2, 128, 128, "float16"), 100, marks=pytest.mark.slow),
        pytest.param(Shape(6, 2, 96, 64, "bfloat16"), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_twin_for_a_ragged_batch(shape: Shape, window: int) -> None:
    size = shape.block_size
    lens = [1, size, size + 1, 70, 150, 200, 65]
    counts = [1, size, 1, 70, 33, 3, 64]
    batch = make_batch(shape, lens, counts, shared=0, seed=window)
    out, counters = prefill_attention(batch, window)
    assert_close(values(out, shape.kv), batch.expected(window), shape.kv)
    assert counters.max_bank_ways <= 2


def test_a_row_has_the_same_bits_whole_in_chunks_and_after_a_cached_prefix() -> None:
    shape = Shape(4, 2, 64, 16, "bfloat16")
    batch = make_batch(shape, [150], [150])
    whole, _ = prefill_attention(batch)
    for start, stop in ((0, 40), (40, 41), (41, 150), (149, 150)):
        chunk = Batch(
            shape,
            batch.qkv[start:stop],
            batch.pool,
            batch.scales,
            batch.block_tables,
            batch.positions[start:stop],
            batch.sequences[start:stop],
            np.array([0, stop - start], np.int32),
            np.array([stop], np.int32),
        )
        np.testing.assert_array_equal(prefill_attention(chunk)[0], whole[start:stop])


@interpreter_only
def test_matrices_leave_shared_memory_without_conflicts_and_serve_many_multiplications() -> None:
    shape = Shape(4, 2, 64, 16, "bfloat16")
    _, counters = prefill_attention(make_batch(shape, [256], [256]))
    matrices = [line for line in counters.select("shared", "load") if line.opcode.startswith("ldmatrix")]
    products = sum(line.warps for line in counters.lines if line.opcode.startswith("mma"))
    assert all(line.max_ways == 1 for line in matrices)
    assert sum(line.bytes for line in matrices) < 0.08 * products * 16 * 8 * 16  # bytes per multiplication
