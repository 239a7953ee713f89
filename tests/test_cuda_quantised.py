"""8- and 4-bit weights: codes, packing, products and gathers through the PTX interpreter."""

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize, quantize
from numpy.typing import NDArray

from kvpool.cpu_kernels.groups import Codes
from kvpool.model.quantised import NEAREST, gguf_codes, nearest_codes
from tests.ptx import Device
from tests.support.cuda_rooms import embedding, quantised_matmul, skinny_matmul, weight_formats
from tests.support.cuda_run import launch
from tests.support.cuda_twins import assert_close, code_values, stored, values
from tests.support.real_card import fresh, kernel_device

Array = NDArray[Any]


def matrix(rows: int, cols: int, seed: int = 0) -> NDArray[np.float32]:
    return fresh(seed).normal(0, 0.1, (rows, cols)).astype(np.float32)


def quantise(values: NDArray[np.float32], name: str) -> Codes:
    return nearest_codes(values, NEAREST[name])


def upload(device: Device, name: str, quantised: Codes) -> list[Array]:
    packed = weight_formats.pack(quantised.codes, quantised.scale, quantised.least)
    assert tuple(map(len, packed)) == weight_formats.packed_bytes(name, *quantised.codes.shape)
    return [device.array(each.view(np.uint32)) for each in packed]


def multiply(name: str, element: str, x: Array, quantised: Codes) -> Array:
    device = kernel_device()
    (rows, width), outputs = x.shape, len(quantised.codes)
    columns = skinny_matmul.tile(rows)[1]
    out, bias = device.empty((rows, outputs), np.float32), device.zeros(1)
    grid = -(-outputs // 16), -(-rows // (8 * columns))
    kernel = quantised_matmul.quantised_matmul(name, element, columns)
    weights = upload(device, name, quantised)
    launch(device, kernel, grid, device.array(x), *weights, bias, out, rows, outputs, width, 0, 0)
    return device.read(out)


@pytest.mark.parametrize("name", weight_formats.NAMES)
def test_codes_are_as_near_as_they_can_be(name: str) -> None:
    weights = matrix(20, 96)
    weights[3, 32:64] = 0
    weights[4, :32] = 0.25
    quantised = quantise(weights, name)
    groups = weights.reshape(20, 3, 32)
    step = quantised.scale.astype(np.float64)[..., None]
    error = np.abs(code_values(quantised).reshape(20, 3, 32) - groups)
    assert (error <= 0.51 * step + 0.002 * np.abs(groups).max(axis=-1, keepdims=True)).all()


@pytest.mark.parametrize(("kind", "name"), [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4")])
def test_gguf_blocks_keep_their_values(kind: str, name: str) -> None:
    number = GGMLQuantizationType[kind]
    blocks = quantize(matrix(5, 128), number)
    device = kernel_device()
    packed = upload(device, name, gguf_codes(kind, blocks))
    out = device.empty((5, 128), np.float32)
    kernel, ids = embedding.gather_packed_rows(name), device.array(np.arange(5, dtype=np.int32))
    launch(device, kernel, (1, 5), *packed, ids, out, 128, 1.0)
    np.testing.assert_array_equal(device.read(out), dequantize(blocks, number))


SIZES = [(1, 16, 64), (9, 40, 1056), (64, 33, 608)]


@pytest.mark.parametrize("name", weight_formats.NAMES)
@pytest.mark.parametrize(
    ("element", "rows", "outputs", "width"),
    [
        *[("bfloat16", *size) for size in SIZES],
        ("float16", *SIZES[0]),
        *[pytest.param("float16", *size, marks=pytest.mark.slow) for size in SIZES[1:]],
    ],
)
def test_products_equal_those_of_the_codes_values(name: str, element: str, rows: int, outputs: int, width: int) -> None:
    quantised = quantise(matrix(outputs, width), name)
    x = stored(fresh(1).normal(0, 1, (rows, width)), element)
    out = multiply(name, element, x, quantised)
    assert_close(out, values(x, element) @ code_values(quantised).T, element)


@pytest.mark.parametrize("name", weight_formats.NAMES)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    quantised = quantise(matrix(24, 1184), name)
    x = stored(fresh(2).normal(0, 1, (64, 1184)), "bfloat16")
    alone = multiply(name, "bfloat16", x[5:6], quantised)[0]
    for rows in (8, 16, 64):
        np.testing.assert_array_equal(multiply(name, "bfloat16", x[5 : 5 + rows], quantised)[0], alone)


@pytest.mark.parametrize("name", weight_formats.NAMES)
def test_gathered_rows_are_the_codes_values(name: str) -> None:
    quantised = quantise(matrix(50, 1056), name)
    device = kernel_device()
    ids = np.array([0, 49, 7, 8, 15, 16, 23], np.int32)
    out = device.empty((7, 1056), np.float32)
    grid = -(-1056 // (8 * embedding.THREADS)), 7
    packed = upload(device, name, quantised)
    launch(device, embedding.gather_packed_rows(name), grid, *packed, device.array(ids), out, 1056, 2.0)
    assert_close(device.read(out), 2 * code_values(quantised)[ids], "float32")
