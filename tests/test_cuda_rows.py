"""Kernels on rows, through the PTX interpreter: norms, activations, gathers, block copies."""

import numpy as np
import pytest

from tests.support import cuda_twins
from tests.support.cuda_rooms import activations, block_copy, embedding, norms
from tests.support.cuda_run import launch
from tests.support.cuda_twins import assert_close, stored, values
from tests.support.real_card import fresh, kernel_device


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (17, 576), (3, 1028), (2, 4096)])
def test_rms_norm(out: str, rows: int, width: int) -> None:
    random = fresh(width)
    device = kernel_device()
    x, weight = random.normal(0, 3, (rows, width)).astype(np.float32), random.normal(1, 0.2, width).astype(np.float32)
    result = device.empty((rows, width), stored(np.zeros(1), out).dtype)
    launch(device, norms.rms_norm(out), (rows,), device.array(x), device.array(weight), result, width, 1e-5)
    assert_close(values(device.read(result), out), cuda_twins.rms_norm(x, weight, 1e-5), out)


def test_rms_norm_accumulates_into_the_residual() -> None:
    random = fresh(0)
    device = kernel_device()
    x, residual = random.normal(0, 3, (2, 5, 640)).astype(np.float32)
    weight = random.normal(1, 0.2, 640).astype(np.float32)
    result = device.array(residual)
    launch(device, norms.rms_norm("float32", True), (5,), device.array(x), device.array(weight), result, 640, 1e-6)
    assert_close(device.read(result), residual + cuda_twins.rms_norm(x, weight, 1e-6), "float32")


def test_a_row_is_normed_alike_in_any_batch() -> None:
    random = fresh(1)
    x, weight = random.normal(0, 3, (9, 1536)).astype(np.float32), random.normal(1, 0.2, 1536).astype(np.float32)

    def run(rows: np.ndarray) -> np.ndarray:
        device = kernel_device()
        result = device.empty(rows.shape, np.float32)
        launch(device, norms.rms_norm(), (len(rows),), device.array(rows), device.array(weight), result, 1536, 1e-5)
        return device.read(result)

    together = run(x)
    for row in range(9):
        np.testing.assert_array_equal(run(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_gated_activation(kind: str, out: str) -> None:
    random = fresh(2)
    for rows, width in ((1, 4), (17, 172), (2, 1536)):
        device = kernel_device()
        gate_up = random.normal(0, 3, (rows, 2 * width)).astype(np.float32)
        gate_up[0, :3] = 0, 60, -60
        result = device.empty((rows, width), stored(np.zeros(1), out).dtype)
        kernel = activations.gated_activation(kind, out)
        launch(device, kernel, (-(-width // 1024), rows), device.array(gate_up), result, width)
        assert_close(values(device.read(result), out), cuda_twins.gated_activation(kind, gate_up), out)


@pytest.mark.parametrize("table", ["float32", "bfloat16", "float16"])
def test_gather_rows(table: str) -> None:
    random = fresh(3)
    for rows, width in ((1, 4), (17, 576), (5, 2052)):
        device = kernel_device()
        entries = stored(random.normal(0, 1, (40, width)), table)
        ids = random.integers(0, 40, rows).astype(np.int32)
        result = device.empty((rows, width), np.float32)
        grid = (-(-width // (4 * embedding.THREADS)), rows)
        launch(device, embedding.gather_rows(table), grid, device.array(entries), device.array(ids), result, width, 2.5)
        np.testing.assert_array_equal(device.read(result), values(entries, table)[ids].astype(np.float32) * 2.5)


def test_copy_blocks_moves_all_layers_in_the_pool_to_staging_and_back() -> None:
    random = fresh(4)
    device = kernel_device()
    layers, blocks, words = 3, 9, 600  # more than one stretch of 512 words, not a multiple of it
    content = random.integers(0, 2**32, (layers, blocks, 4 * words), dtype=np.uint32)
    pool = device.array(content)
    kernel = block_copy.copy_blocks()
    pool_strides, packed_strides = (words, blocks * words), (layers * words, words)  # block, layer

    def copy(source, destination, pairs, source_strides, destination_strides):  # type: ignore[no-untyped-def]
        arrays = [device.array(np.array(each, np.int32)) for each in zip(*pairs, strict=True)]
        grid = (-(-words // block_copy.WORDS_PER_BLOCK), len(pairs), layers)
        launch(device, kernel, grid, source, destination, *arrays, *source_strides, *destination_strides, words)

    copy(pool, pool, [(8, 0), (3, 5)], pool_strides, pool_strides)
    content[:, [0, 5]] = content[:, [8, 3]]
    np.testing.assert_array_equal(device.read(pool), content)

    staging = device.empty((2, layers, 4 * words), np.uint32)
    copy(pool, staging, [(7, 0), (2, 1)], pool_strides, packed_strides)
    np.testing.assert_array_equal(device.read(staging), content[:, [7, 2]].swapaxes(0, 1))

    copy(staging, pool, [(0, 1), (1, 4)], packed_strides, pool_strides)
    content[:, [1, 4]] = content[:, [7, 2]]
    np.testing.assert_array_equal(device.read(pool), content)
