"""Products of few rows, through the PTX interpreter: right at awkward sizes, the same bits for a row in any company."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptx import Counters
from tests.support.cuda_rooms import float32_matmul, skinny_matmul
from tests.support.cuda_run import launch
from tests.support.cuda_twins import assert_close, stored, values
from tests.support.real_card import fresh, interpreter_only, kernel_device

Array = NDArray[Any]


def multiply(
    element: str, x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None
) -> tuple[Array, Counters]:
    """out of one launch; x and weight in their stored form."""
    device = kernel_device()
    rows, outputs, width = len(x), len(weight), x.shape[1]
    out = device.empty((rows, outputs), np.float32) if residual is None else device.array(residual)
    given = device.array(np.zeros(1, np.float32) if bias is None else bias)
    flags = rows, outputs, width, bias is not None, residual is not None
    if element == "float32":
        kernel = float32_matmul.float32_matmul()
        grid = -(-outputs // float32_matmul.OUTPUTS_PER_BLOCK), -(-rows // float32_matmul.ROWS_PER_BLOCK)
    else:
        tile = skinny_matmul.tile(rows)
        kernel = skinny_matmul.skinny_matmul(element, *tile)
        grid = -(-outputs // (16 * tile[0])), -(-rows // (8 * tile[1]))
    counters = launch(device, kernel, grid, device.array(x), device.array(weight), given, out, *flags)
    return device.read(out), counters


def numbers(element: str, rows: int, outputs: int, width: int, seed: int = 0) -> tuple[Array, Array]:
    random = fresh(seed)
    return stored(random.normal(0, 1, (rows, width)), element), stored(random.normal(0, 1, (outputs, width)), element)


SIZES = [(1, 16, 64), (1, 37, 1032), (9, 40, 576), (17, 33, 200), (64, 50, 1100), (67, 7, 8)]
FLOAT16 = [pytest.param("float16", *size, marks=pytest.mark.slow if size[0] != 9 else ()) for size in SIZES]


@pytest.mark.parametrize(
    ("element", "rows", "outputs", "width"),
    [(each, *size) for each in ("float32", "bfloat16") for size in SIZES] + FLOAT16,
)
def test_equals_the_product(element: str, rows: int, outputs: int, width: int) -> None:
    if width % 8 and element != "float32":
        width += 4
    x, weight = numbers(element, rows, outputs, width)
    out, _ = multiply(element, x, weight)
    assert_close(out, values(x, element) @ values(weight, element).T, "float32")


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_bias_and_residual(element: str) -> None:
    x, weight = numbers(element, 3, 20, 128)
    random = fresh(9)
    bias, residual = random.normal(0, 9, 20).astype(np.float32), random.normal(0, 9, (3, 20)).astype(np.float32)
    product = values(x, element) @ values(weight, element).T
    assert_close(multiply(element, x, weight, bias=bias)[0], product + bias, "float32")
    assert_close(multiply(element, x, weight, residual=residual)[0], product + residual, "float32")
    assert_close(multiply(element, x, weight, bias, residual)[0], product + bias + residual, "float32")


@pytest.mark.parametrize("element", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_any_company(element: str) -> None:
    x, weight = numbers(element, 64, 24, 1160)
    alone = np.concatenate([multiply(element, x[row : row + 1], weight)[0] for row in (0, 5, 63)])
    for rows in (8, 16, 32, 64):
        some = np.concatenate([x[[0, 5, 63]], x[: rows - 3]]) if rows < 64 else x[[0, 5, 63, *range(61)]]
        np.testing.assert_array_equal(multiply(element, some, weight)[0][:3].view(np.uint32), alone.view(np.uint32))


@interpreter_only
def test_weights_are_read_once_in_full_sectors_and_without_bank_conflicts() -> None:
    x, weight = numbers("bfloat16", 8, 64, 2048)
    _, counters = multiply("bfloat16", x, weight)
    loads = [line for line in counters.select("global", "load") if ".nc.v4" in line.text]
    assert sum(line.bytes for line in loads) == weight.nbytes + x.nbytes * 4  # four blocks read the same 8 rows
    assert all(line.sectors == line.ideal_sectors for line in loads)
    assert counters.max_bank_ways == 1
