"""Weights in groups: the numbers of GGUF's own definition, bit for bit, through every kernel that reads them."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from kvpool.cpu_kernels import group_steps
from kvpool.cpu_kernels.groups import GROUP_FORMATS, Codes, pack_codes
from kvpool.cpu_kernels.isa import (
    AVX2,
    AVX512,
    BFLOAT16,
    FLOAT32,
    FORMAT_NAMES,
    GROUPED,
    INT4,
    INT4_K,
    INT8,
    INT8_K,
    INT8_LONG,
    INT16,
    Isa,
)
from kvpool.cpu_kernels.machine_code import load_functions
from kvpool.cpu_kernels.packing import from_bfloat16, pack, panel_bytes, step_bytes, to_bfloat16
from kvpool.cpu_kernels.tile import ARGUMENTS, tile_name, tile_names, tiles_module
from kvpool.cpu_kernels.unpacking import unpack_name
from kvpool.model.backend import BackendLimits
from kvpool.model.batch import Float32
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.quantised import GGUF, gguf_codes, nearest_codes, widen
from kvpool.model.weights import RawTensor
from tests.support.gguf_checkpoint import BlockCheckpoint, random_blocks
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.steps import Piece, Shape, run_step, tiny_program

UNPACKED = (*GROUPED, BFLOAT16)
ONE_TILE = Isa("one", dict.fromkeys(UNPACKED, ((1,),)), dict.fromkeys(UNPACKED, FLOAT32))
SHAPE = Shape(hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
PROGRAM = tiny_program(SHAPE)
TOKENS = np.random.default_rng(7).integers(0, SHAPE.vocab_size, 160).tolist()
LIMITS = BackendLimits(16, 64, 256, 256)


def same(got: Float32 | None, expected: Float32 | None) -> bool:
    assert got is not None
    assert expected is not None
    assert np.isfinite(expected).all()
    return np.array_equal(got.view(np.uint32), expected.view(np.uint32))


def unpacked(codes: Codes, weight_format: int) -> Float32:
    """(N filled up to 16, K) through packing and the unpacking function."""
    panels, cols = -(-len(codes.codes) // 16), codes.codes.shape[1]
    packed = np.zeros(panels * panel_bytes(weight_format, cols), np.uint8)
    pack_codes(codes, weight_format, packed)
    return floats(packed, panels, cols, weight_format)


def floats(packed: np.ndarray, panels: int, cols: int, weight_format: int) -> Float32:
    """(16 panels, K) through the unpacking function."""
    size = panel_bytes(weight_format, cols)
    names = tile_names(ONE_TILE, [weight_format])
    addresses = load_functions(lambda: tiles_module(ONE_TILE, [weight_format]), names, None)
    unpack = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(addresses[unpack_name(weight_format, FLOAT32)])
    out = np.full((panels, cols, 16), np.nan, np.float32)
    for number in range(panels):
        unpack(packed.ctypes.data + number * size, out[number].ctypes.data, size // step_bytes(weight_format))
    return out.transpose(0, 2, 1).reshape(panels * 16, cols)


@pytest.mark.parametrize("kind", GGUF)
def test_every_kind_of_block_stands_for_its_own_numbers(kind: str) -> None:
    data = random_blocks(kind, 37, 512)
    expected = dequantize(data, GGMLQuantizationType[kind])
    got = unpacked(gguf_codes(kind, data), GGUF[kind][1])
    assert same(got[:37] + 0.0, expected + 0.0)  # a zero may have either sign
    assert not got[37:].any()


@pytest.mark.parametrize(("kind", "wide"), [("Q8_0", INT8_K), ("Q4_1", INT8_K), ("Q4_1", INT4_K), ("Q4_K", INT8_K)])
def test_stacked_tensors_of_several_kinds_share_a_wider_format(kind: str, wide: int) -> None:
    data = random_blocks(kind, 20, 256)
    got = unpacked(widen(gguf_codes(kind, data), wide, GGUF[kind][1]), wide)
    assert same(got[:20] + 0.0, dequantize(data, GGMLQuantizationType[kind]) + 0.0)


@pytest.mark.parametrize("has_half", [False, True])
def test_half_precision_scales_on_every_processor(has_half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every finite float16, denormals too, as the scale of code 128 + 1 around zero."""
    if has_half and not group_steps.host_has_half():
        pytest.skip("no such instruction here")
    monkeypatch.setattr(group_steps, "host_has_half", lambda: has_half)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].reshape(-1, 1)
    codes = Codes(np.full((len(halves), 32), 129, np.uint8), halves, None)
    assert same(unpacked(codes, INT8)[: len(halves), 0] + 0.0, halves[:, 0].astype(np.float32) + 0.0)


@pytest.mark.parametrize(("weight_format", "steps"), [(INT16, 8190), (INT8, 254), (INT8_LONG, 254), (INT4, 15)])
def test_nearest_codes_err_by_half_a_step(weight_format: int, steps: int) -> None:
    size, half = GROUP_FORMATS[weight_format].size, GROUP_FORMATS[weight_format].scale == np.float16
    values = np.random.default_rng(1).normal(size=(33, 3 * size)).astype(np.float32)
    values[3] = 0.0
    values[4, :size] = 7.0
    got = unpacked(nearest_codes(values, weight_format), weight_format)[:33]
    groups = values.reshape(33, 3, size)
    span = np.ptp(groups, axis=-1) if weight_format == INT4 else 2 * np.abs(groups).max(axis=-1)
    limit = span / steps * 0.51 + half * 2.0**-10 * np.abs(groups).max(axis=-1)
    assert (np.abs(got - values).reshape(33, 3, size) <= limit[..., None]).all()


def test_bfloat16_unpacks_to_its_numbers() -> None:
    values = from_bfloat16(to_bfloat16(np.random.default_rng(2).normal(size=(40, 37)).astype(np.float32)))
    packed = np.zeros(3 * panel_bytes(BFLOAT16, 37), np.uint8)
    pack(values, BFLOAT16, packed)
    got = floats(packed, 3, 38, BFLOAT16)
    assert same(got[:40, :37], values)
    assert not got[40:].any()
    assert not got[:, 37].any()


def backend(checkpoint: RandomCheckpoint, **options: object) -> CpuBackend:
    settings = {"threads": 2, "kv_dtype": "float32", "activations": "float32"} | options
    made = CpuBackend(PROGRAM, checkpoint, LIMITS, **settings)  # type: ignore[arg-type]
    made.allocate_pool(32)
    return made


CASES = {
    "Q8_0": ({"": "Q8_0"}, "int8 weights"),
    "Q4_1": ({"": "Q4_1"}, "int4 weights"),
    "Q4_K": ({"": "Q4_K"}, "int4_k weights"),
    "Q6_K": ({"": "Q6_K"}, "int8_k weights"),
    "mixed": ({"": "Q4_0", "embed": "Q8_0", "0.down": "Q5_K"}, "bfloat16+int8+int4+int8_k weights"),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_float32_weights_for_any_number_of_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept codes against the same numbers in float32: few rows read packed panels, many rows unpacked ones."""
    monkeypatch.setattr("kvpool.model.cpu.backend.host_prefers_dot", lambda: False)  # it rounds bfloat16's activations
    kinds, described = CASES[name]
    checkpoint = (_Rounded if name == "mixed" else BlockCheckpoint)(PROGRAM, kinds)
    plain, kept = backend(checkpoint, dtype="float32"), backend(checkpoint)
    assert described in kept.description
    whole = run_step(plain, [Piece(TOKENS, 0, list(range(10)))], 16, every_row=True)
    start = 0
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 11, 16, 33, 63):
        piece = Piece(TOKENS[start : start + rows], start, list(range(10, 20)))
        got = run_step(kept, [piece], 16, every_row=True)
        assert whole.logits is not None
        assert same(got.logits, whole.logits[start : start + rows])
        start += rows
    again = run_step(kept, [Piece(TOKENS[:128], 0, list(range(8)))], 16, every_row=True)
    assert same(again.logits, whole.logits[:128])
    plain.close()
    kept.close()


class _Rounded(BlockCheckpoint):
    """One matrix, `0.o`, that is no blocks but bfloat16 numbers: what is not quantised is held as bfloat16."""

    def raw(self, name: str) -> RawTensor:
        return RawTensor("F32", self.shapes[name], self.load(name)) if name == "0.o" else super().raw(name)

    def load(self, name: str) -> Float32:
        if name != "0.o":
            return super().load(name)
        return from_bfloat16(to_bfloat16(RandomCheckpoint.load(self, name)))


@pytest.mark.parametrize("dtype", ["int16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 3])
def test_weights_that_are_quantised_here(dtype: str, threads: int) -> None:
    """Of a float32 checkpoint: near its numbers, the same bits however the prompt is cut and with any threads."""
    checkpoint = RandomCheckpoint(PROGRAM)
    exact, held = backend(checkpoint, dtype="float32"), backend(checkpoint, dtype=dtype, threads=threads)
    expected = run_step(exact, [Piece(TOKENS[:70], 0, list(range(5)))], 16, every_row=True).logits
    whole = run_step(held, [Piece(TOKENS[:70], 0, list(range(5)))], 16, every_row=True).logits
    assert whole is not None
    assert expected is not None
    parts = [
        run_step(held, [Piece(TOKENS[first:last], first, list(range(5, 10)))], 16, every_row=True).logits
        for first, last in ((0, 1), (1, 4), (4, 40), (40, 70))
    ]
    assert same(np.concatenate([part for part in parts if part is not None]), whole)
    error = np.abs(whole - expected).mean() / np.abs(expected).mean()
    assert 0 < error < {"int16": 1e-3, "int8": 0.05, "int4": 0.6}[dtype]
    assert held.weights_bytes < exact.weights_bytes * {"int16": 0.53, "int8": 0.28, "int4": 0.17}[dtype]
    exact.close()
    held.close()


def test_rows_that_are_not_whole_groups_are_bfloat16() -> None:
    program = tiny_program(Shape(hidden_size=48, intermediate_size=96, num_layers=1))
    held = CpuBackend(program, RandomCheckpoint(program), LIMITS, dtype="int4", threads=1)
    assert "bfloat16+int4 weights" in held.description
    held.close()


def test_groups_of_another_size_are_refused() -> None:
    codes = nearest_codes(np.zeros((16, 32), np.float32), INT4)
    with pytest.raises(ValueError, match="groups of 32"):
        pack_codes(codes, INT8_K, np.zeros(panel_bytes(INT8_K, 32), np.uint8))


@pytest.mark.parametrize(
    ("isa", "weight_format"),
    [*((AVX2, number) for number in GROUPED), (AVX512, INT4)],
    ids=lambda value: FORMAT_NAMES[value] if isinstance(value, int) else value.name,
)
def test_tiles_give_the_bits_of_float32_panels(isa: Isa, weight_format: int) -> None:
    """Every tile over two groups of panels, k = a chain of 128 and a short one, against one float32 tile of one row."""
    cols = 128 + max(32, GROUP_FORMATS[weight_format].size)
    widest, most = max(map(max, isa.tiles[weight_format])), len(isa.tiles[weight_format])
    values = np.random.default_rng(4).normal(size=(32 * widest, cols)).astype(np.float32)
    held = {INT8_K: INT8, INT4_K: INT4}.get(weight_format, weight_format)  # what floats can be rounded to
    codes = nearest_codes(values, held)
    if held != weight_format:
        codes = widen(codes, weight_format, held)
    plain = unpacked(codes, weight_format).reshape(2 * widest, 16, cols).transpose(0, 2, 1).copy()
    packed = np.zeros(2 * widest * panel_bytes(weight_format, cols), np.uint8)
    pack_codes(codes, weight_format, packed)
    x = np.random.default_rng(3).normal(size=(most, cols)).astype(np.float32)
    addresses: dict[str, int] = {}
    for number in (FLOAT32, weight_format):
        addresses |= load_functions(partial(tiles_module, isa, [number]), tile_names(isa, [number]), None)

    def product(number: int, rows: int, width: int, first_row: int, panels: np.ndarray) -> Float32:
        out, table = np.zeros((rows, 32 * widest), np.float32), np.array([panels.ctypes.data], np.int64)
        size = panel_bytes(number, cols)
        given = dict.fromkeys(ARGUMENTS, 0) | {
            "x": x[first_row:].ctypes.data, "x_stride": x.strides[0], "cuts": 1, "groups": 2 * widest // width,
            "table": table.ctypes.data, "panel_stride": size, "blocks": 2, "block_stride": size * 128 // cols,
            "segments": 1, "k": 128, "last_k": cols - 128, "step_stride": step_bytes(number), "out": out.ctypes.data,
            "out_stride": out.strides[0], "ahead_table": table.ctypes.data,
        }  # fmt: skip
        tile = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(ARGUMENTS))(addresses[tile_name(number, rows, width)])
        tile(*(given[name] for name in ARGUMENTS))
        return out

    expected = np.concatenate([product(FLOAT32, 1, 1, row, plain) for row in range(most)])
    for rows, widths in enumerate(isa.tiles[weight_format], start=1):
        for width in widths:
            assert same(product(weight_format, rows, width, 0, packed), expected[:rows])
