"""RoPE fused with the KV write, through the PTX interpreter."""

import numpy as np
import pytest

from tests.support import cuda_twins
from tests.support.cuda_rooms import kv_write, layout
from tests.support.cuda_run import launch
from tests.support.cuda_twins import assert_close, stored, values
from tests.support.real_card import fresh, kernel_device, on_card


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "kv", "qk_norm"),
    [
        (3, 1, 64, 64, "float32", False),
        (4, 2, 128, 128, "bfloat16", True),
        (2, 2, 80, 32, "float16", False),
        (2, 1, 256, 256, "bfloat16", True),
        (2, 1, 96, 96, "float16", True),
        (4, 2, 16, 16, "float32", True),
        (4, 2, 64, 64, "int8", False),
        (2, 1, 128, 128, "float8_e4m3", True),
    ],
)
def test_rotates_and_writes_where_the_slots_say(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, kv: str, qk_norm: bool
) -> None:
    random = fresh(head_dim)
    shape = layout.AttentionShape(heads, kv_heads, head_dim, 8, kv)
    device = kernel_device()
    num_blocks, rows, max_len = 4, 7, 50
    qkv = random.normal(0, 1, (rows, shape.qkv_width)).astype(np.float32)
    positions = random.integers(0, max_len, rows).astype(np.int32)
    slots = random.permutation(num_blocks * shape.block_size)[:rows].astype(np.int64)
    slots[2] = -1
    angles = random.uniform(0, 6, (max_len, rotary_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q_norm, k_norm = random.normal(1, 0.1, (2, head_dim)).astype(np.float32)

    rotated = device.array(qkv)
    pool = device.empty((num_blocks, 2, kv_heads, shape.block_size, head_dim), stored(np.zeros(1), kv).dtype)
    grid = (-(-(heads + 2 * kv_heads) // kv_write.HEADS_PER_BLOCK), rows)
    tables = [device.array(each) for each in (positions, slots, cos, sin, q_norm, k_norm)]
    scaled = kv in cuda_twins.LARGEST_CODE
    scales = device.empty(pool.shape[:4] if scaled else (1,), np.float32)
    launch(device, kv_write.kv_write(shape, rotary_dim, qk_norm), grid, rotated, *tables, pool, scales, 1e-6)

    written = np.zeros(pool.shape[:4], np.bool_)
    expected_q, got_q = [], []
    for row in range(rows):
        split = np.split(qkv[row].reshape(-1, head_dim), [heads, heads + kv_heads])
        q, k, v = (part.astype(np.float64) for part in split)
        if qk_norm:
            q, k = cuda_twins.rms_norm(q, q_norm, 1e-6), cuda_twins.rms_norm(k, k_norm, 1e-6)
        q, k = (cuda_twins.rotate(part, cos[positions[row]], sin[positions[row]]) for part in (q, k))
        result = device.read(rotated[row]).reshape(-1, head_dim)
        np.testing.assert_array_equal(result[heads:], qkv[row].reshape(-1, head_dim)[heads:])
        if slots[row] < 0:
            np.testing.assert_array_equal(result, qkv[row].reshape(-1, head_dim))
            continue
        expected_q.append(q)
        got_q.append(result[:heads])
        block, offset = divmod(int(slots[row]), shape.block_size)
        for side, part in enumerate((k, v)):
            if scaled:
                assert_close(device.read(scales[block, side, :, offset]), cuda_twins.head_scales(part, kv), "float32")
                part = part / scales[block, side, :, offset, None]
                differ = pool[block, side, :, offset] != stored(part, kv)
                assert differ.mean() < 0.01  # neighbouring codes where float32 rounds otherwise than float64
            else:
                assert_close(values(pool[block, side, :, offset], kv), part, kv)
        written[block, :, :, offset] = True
    assert_close(np.stack(got_q).astype(np.float64), np.stack(expected_q), "float32")
    whole = np.any if on_card() else np.all  # on a card, a code that equals the poison does not show
    np.testing.assert_array_equal(whole(device.written(pool), axis=-1), written)
    if scaled:
        np.testing.assert_array_equal(device.written(scales), written)


def test_a_head_that_holds_nan_or_infinity_keeps_it_in_an_8_bit_pool() -> None:
    shape = layout.AttentionShape(1, 1, 64, 8, "int8")
    device = kernel_device()
    qkv = np.ones((2, shape.qkv_width), np.float32)
    qkv[0, 70], qkv[1, 150] = np.nan, np.inf
    tables = [np.zeros(2, np.int32), np.arange(2), *np.zeros((4, 64), np.float32)]
    pool, scales = device.empty((1, 2, 1, 8, 64), np.uint8), device.empty((1, 2, 1, 8), np.float32)
    inputs = [device.array(each) for each in (qkv, *tables)]
    launch(device, kv_write.kv_write(shape, 64, False), (1, 2), *inputs, pool, scales, 1e-6)
    assert np.isnan(scales[0, :, 0, :2]).tolist() == [[True, False], [False, True]]
