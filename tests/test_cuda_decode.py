"""Split decode attention, through the PTX interpreter: right at awkward sizes, bit-equal in any company, few bytes."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.cuda_attention import Batch, decode_attention, make_batch
from tests.support.cuda_rooms import layout, paged_decode, paged_float32, tiles
from tests.support.cuda_run import launch
from tests.support.cuda_twins import assert_close, stored, values
from tests.support.real_card import interpreter_only, kernel_device, on_card

Array = NDArray[Any]
Shape = layout.AttentionShape
SPLIT = layout.SPLIT_TOKENS


def edges(block_size: int) -> list[int]:
    return [1, block_size - 1, block_size, block_size + 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 17]


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        (Shape(4, 2, 64, 16, "bfloat16"), 0),
        (Shape(7, 1, 80, 8, "float16"), 100),
        (Shape(9, 1, 256, 32, "float16"), 5),
        (Shape(4, 2, 64, 16, "int8"), 0),
        (Shape(3, 1, 128, 16, "float8_e4m3"), 100),
        pytest.param(Shape(20, 1, 128, 128, "bfloat16"), 300, marks=pytest.mark.slow),
        pytest.param(Shape(2, 2, 128, 32, "float16"), 0, marks=pytest.mark.slow),
        pytest.param(Shape(9, 1, 96, 64, "bfloat16"), 0, marks=pytest.mark.slow),
        pytest.param(Shape(8, 1, 256, 16, "bfloat16"), SPLIT, marks=pytest.mark.slow),
        pytest.param(Shape(16, 2, 80, 16, "int8"), 1, marks=pytest.mark.slow),
        pytest.param(Shape(9, 1, 96, 32, "float8_e4m3"), 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_twin(shape: Shape, window: int) -> None:
    """17 sequences: the edges of blocks and splits, and lengths of no meaning."""
    batch = make_batch(shape, [*edges(shape.block_size), 2, 7, 16, 17, 31, 33, 100, 200, 300], seed=window)
    out, _ = decode_attention(batch, window)
    element = shape.kv if shape.kv in ("bfloat16", "float16") else "float16"
    assert_close(values(out, element), batch.expected(window), shape.kv)


def test_windows_read_nothing_before_their_first_token() -> None:
    shape = Shape(4, 2, 64, 16, "bfloat16")
    for window in (1, 15, 16, 17, SPLIT, SPLIT + 1):
        batch = make_batch(shape, [1, window, window + 1, 2 * SPLIT + 3, SPLIT])
        batch.pool = batch.pool.copy()
        for s, length in enumerate(batch.seq_lens):  # what left the window may have been given to another sequence
            for token in range(max(0, int(length) - window)):
                block = batch.block_tables[s, token // 16]
                batch.pool[block, :, :, token % 16] = stored(np.array(np.nan), "bfloat16")
            batch.block_tables[s, : max(0, int(length) - window) // 16] = -(2**30)
        out, _ = decode_attention(batch, window)
        assert_close(values(out, "bfloat16"), batch.expected(window), "bfloat16")


def test_a_row_has_the_same_bits_alone_in_a_batch_in_a_prompt_and_in_wide_tiles() -> None:
    shape = Shape(4, 2, 64, 16, "bfloat16")
    lens, counts = [SPLIT + 40, 30, 2 * SPLIT + 9], [41, 30, 9]
    batch = make_batch(shape, lens, counts)
    whole, _ = decode_attention(batch)
    assert_close(values(whole, "bfloat16"), batch.expected(), "bfloat16")
    wide, _ = decode_attention(batch, columns=2)
    np.testing.assert_array_equal(wide, whole)
    for row in (0, 40, 41, 70, 71, 79):
        s = int(batch.sequences[row])
        alone = Batch(
            shape,
            batch.qkv[row : row + 1],
            batch.pool,
            batch.scales,
            batch.block_tables[s : s + 1],
            batch.positions[row : row + 1],
            np.zeros(1, np.int32),
            np.array([0, 1], np.int32),
            batch.positions[row : row + 1] + 1,
        )
        np.testing.assert_array_equal(decode_attention(alone)[0][0], whole[row])


def test_a_shared_prefix_is_read_once_and_changes_no_bit() -> None:
    shape = Shape(4, 2, 64, 16, "bfloat16")
    shared = SPLIT + 64
    lens = [shared + extra for extra in (1, 20, 3, SPLIT, 40)] + [shared - 20]
    batch = make_batch(shape, lens, shared=shared // 16 * 16 - 64)
    apart, apart_counters = decode_attention(batch)
    plan = tiles.row_tiles(batch.query_start, batch.seq_lens, paged_decode.rows_per_tile(shape, 1))
    cascade = tiles.shared_prefix_tiles(plan, [([4, 0, 1, 2, 3], SPLIT)])
    together, counters = decode_attention(batch, plan=cascade)
    np.testing.assert_array_equal(together, apart)
    if on_card():
        return
    prefix_bytes = 2 * SPLIT * shape.num_kv_heads * shape.head_dim * 2
    assert counters.global_load_sectors < apart_counters.global_load_sectors - 1.8 * prefix_bytes / 32


@interpreter_only
def test_moves_hardly_more_than_keys_values_queries_outputs_and_parts() -> None:
    shape = Shape(4, 2, 64, 16, "bfloat16")
    batch = make_batch(shape, [4 * SPLIT, 2 * SPLIT, 3 * SPLIT])
    _, counters = decode_attention(batch)
    tokens, splits, rows = 9 * SPLIT, 9, 3
    width = shape.num_heads * shape.head_dim
    kv = 2 * tokens * shape.num_kv_heads * shape.head_dim * 2
    must = kv + rows * width * (4 + 2) + 2 * splits * (width + shape.num_heads) * 4  # parts: written and read
    loads = [line for line in counters.select("global", "load") if ".nc.v4" in line.text]
    assert sum(line.bytes for line in loads) == kv  # each key and value is asked for once, however many queries
    assert all(line.sectors == line.ideal_sectors for line in loads)
    assert counters.footprint_read_bytes + counters.footprint_written_bytes <= 1.05 * must
    assert counters.max_bank_ways <= 2


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "window"), [(64, 3, 1, 0), (16, 4, 2, 20), (256, 4, 1, 0)])
def test_the_float32_kernel_equals_the_twin_and_itself(head_dim: int, heads: int, kv_heads: int, window: int) -> None:
    shape = Shape(heads, kv_heads, head_dim, 16, "float32")
    batch = make_batch(shape, [1, 15, 16, 17, 33, 70], [1, 1, 1, 1, 1, 5])

    def run(rows: slice) -> Array:
        device = kernel_device()
        positions, sequences = batch.positions[rows], batch.sequences[rows]
        out = device.empty((len(positions), heads * head_dim), np.float32)
        given = (batch.qkv[rows], batch.pool, batch.block_tables, sequences, positions)
        inputs = [device.array(each) for each in given]
        scale = head_dim**-0.5 * math.log2(math.e)
        grid = -(-heads // paged_float32.WARPS), len(positions)
        launch(
            device, paged_float32.paged_float32(shape), grid, *inputs, out, batch.block_tables.shape[1], window, scale
        )
        return device.read(out)

    whole = run(slice(None))
    assert_close(whole, batch.expected(window), "float32")
    np.testing.assert_array_equal(run(slice(9, 10)), whole[9:10])
