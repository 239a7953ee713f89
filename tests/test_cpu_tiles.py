"""The register tile of every processor family, run on this one: LLVM splits the vectors, the arithmetic is the same."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvpool.cpu_kernels import steps, vectors
from kvpool.cpu_kernels.isa import AVX2, AVX512, BFLOAT16, BFLOAT16_DOT, FLOAT32, NEON, PLAIN, Isa
from kvpool.cpu_kernels.machine_code import load_functions, machine, optimise
from kvpool.cpu_kernels.packing import from_bfloat16, pack, panel_bytes, round_up, to_bfloat16
from kvpool.cpu_kernels.selfcheck import dot_agrees
from kvpool.cpu_kernels.steps import ROUNDING
from kvpool.cpu_kernels.tile import ARGUMENTS, tile_name, tile_names, tile_table, tiles_module
from kvpool.model.batch import Float32

FORMATS = (FLOAT32, BFLOAT16, BFLOAT16_DOT)
ISAS = {isa.name: isa for isa in (AVX2, AVX512, NEON, PLAIN)}
NAN_PAIR = np.uint16(0xFFFF)


@cache
def tiles(isa: Isa) -> dict[str, Callable[..., None]]:
    names = tile_names(isa, FORMATS)
    addresses = load_functions(lambda: tiles_module(isa, FORMATS), names, None)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(ARGUMENTS))
    return {name: kind(address) for name, address in addresses.items()}


def all_tiles(isa: Isa, weight_format: int) -> list[tuple[int, int]]:
    return [(rows, width) for rows, widths in enumerate(isa.tiles[weight_format], start=1) for width in widths]


def aligned(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Zeros that start on a cache line."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + count].view(dtype).reshape(shape)


def rounded(values: Float32, weight_format: int) -> Float32:
    return values if weight_format == FLOAT32 else from_bfloat16(to_bfloat16(values))


def as_read(x: Float32, weight_format: int) -> np.ndarray:
    """Rows of x in the form that the tile reads."""
    return to_bfloat16(x) if weight_format == BFLOAT16_DOT else x


def seen(x: Float32, weight_format: int) -> Float32:
    """The values that the tile computes with."""
    return rounded(x, weight_format) if weight_format == BFLOAT16_DOT else x


def stored(weight_format: int) -> int:
    """How the panels lie in memory."""
    return FLOAT32 if weight_format == FLOAT32 else BFLOAT16


def call(isa: Isa, weight_format: int, rows: int, width: int, **arguments: int) -> None:
    defaults = dict.fromkeys(ARGUMENTS, 0) | {"cuts": 1, "groups": 1, "blocks": 1, "segments": 1, "step_stride": 64}
    values = defaults | arguments
    values["ahead_table"] = values["table"]
    tiles(isa)[tile_name(weight_format, rows, width)](*(values[name] for name in ARGUMENTS))


def chain(x: Float32, panel: Float32, start: int = 0) -> Float32:
    """The sum over k in order with one rounding for each k: what a chain of fused multiply-adds gives."""
    total = np.zeros((len(x), panel.shape[1]), np.float32)
    for k in range(panel.shape[0]):
        total = (total.astype(np.float64) + x[:, k : k + 1].astype(np.float64) * panel[k].astype(np.float64)).astype(
            np.float32
        )
    return total


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("name", ISAS)
def test_matrix_product_in_blocks(name: str, weight_format: int) -> None:
    """x @ W.T + bias + existing for every tile: 2 groups of panels, k = 2 blocks of 8 and a rest of 5 (6 if padded)."""
    isa, random = ISAS[name], np.random.default_rng(0)
    for rows, width in all_tiles(isa, weight_format):
        columns, k = 2 * width * 16, 21
        weights = rounded(random.normal(size=(columns, k)).astype(np.float32), weight_format)
        size = panel_bytes(stored(weight_format), k)
        packed = aligned((2 * width * size,), np.uint8)
        pack(weights, stored(weight_format), packed)
        x = np.zeros((rows, 24), np.float32)
        x[:, :k] = random.normal(size=(rows, k))
        given = as_read(x, weight_format)
        bias, existing = (random.normal(size=shape).astype(np.float32) for shape in ((columns,), (rows, columns)))
        out = existing.copy()
        table = np.array([packed.ctypes.data], np.int64)
        padded = k if weight_format == FLOAT32 else round_up(k, 2)
        call(
            isa, weight_format, rows, width, x=given.ctypes.data, x_stride=given.strides[0], groups=2,
            table=table.ctypes.data, panel_stride=size, blocks=3, block_stride=8 * size // padded,
            k=8, last_k=padded - 16, bias=bias.ctypes.data, accumulate=1,
            out=out.ctypes.data, out_stride=out.strides[0],
        )  # fmt: skip
        expected = np.zeros((rows, columns), np.float32)
        for first in (0, 8, 16):
            expected = expected + chain(
                seen(x, weight_format)[:, first : min(first + 8, k)], weights.T[first : first + 8]
            )
        np.testing.assert_allclose(out, expected + bias + existing, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("name", ISAS)
def test_a_result_does_not_depend_on_the_tile(name: str, weight_format: int) -> None:
    isa, random, k = ISAS[name], np.random.default_rng(1), 64
    most, widest = len(isa.tiles[weight_format]), max(width for _, width in all_tiles(isa, weight_format))
    weights = random.normal(size=(16 * widest, k)).astype(np.float32)
    size = panel_bytes(stored(weight_format), k)
    packed = aligned((widest * size,), np.uint8)
    pack(weights, stored(weight_format), packed)
    given = as_read(random.normal(size=(most, k)).astype(np.float32), weight_format)
    table = np.array([packed.ctypes.data], np.int64)
    results = []
    for rows, width in all_tiles(isa, weight_format):
        out = np.zeros((rows, 16 * width), np.float32)
        call(
            isa, weight_format, rows, width, x=given.ctypes.data, x_stride=given.strides[0], table=table.ctypes.data,
            panel_stride=size, k=k, last_k=k, out=out.ctypes.data, out_stride=out.strides[0],
        )  # fmt: skip
        results.append(out)
    tallest = results[-1]
    for out in results:
        np.testing.assert_array_equal(out[0, :16].view(np.uint32), tallest[0, :16].view(np.uint32))
    wide = next(out for out in results if out.shape[1] == 16 * widest)
    for out in results:
        np.testing.assert_array_equal(out[0].view(np.uint32), wide[0, : out.shape[1]].view(np.uint32))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("last_k", [1, 2, 15, 16])
def test_panels_that_continue_elsewhere(name: str, weight_format: int, last_k: int) -> None:
    """V panels of 16 tokens in three places; what lies past the last token is NaN and must not count."""
    isa, random, head_width = ISAS[name], np.random.default_rng(2), 32
    tokens = 32 + last_k
    values = rounded(random.normal(size=(48, head_width)).astype(np.float32), weight_format)
    pieces = []
    for first in (0, 16, 32):
        if weight_format == FLOAT32:
            piece = aligned((16, head_width))
            piece[:] = values[first : first + 16]
            piece[max(0, tokens - first) :] = np.nan
        else:
            piece = aligned((8, head_width, 2), np.uint16)
            pairs = to_bfloat16(values[first : first + 16])
            pairs[max(0, tokens - first) :] = NAN_PAIR
            piece[:] = pairs.reshape(8, 2, head_width).transpose(0, 2, 1)
        pieces.append(piece)
    table = np.array([piece.ctypes.data for piece in pieces], np.int64)
    for rows, width in all_tiles(isa, weight_format):
        groups = max(1, 2 // width)
        if width > 2:
            continue
        x = random.normal(size=(rows, 48)).astype(np.float32)
        given = as_read(x, weight_format)
        out = np.zeros((rows, head_width), np.float32)
        call(
            isa, weight_format, rows, width, x=given.ctypes.data, x_stride=given.strides[0], groups=groups,
            table=table.ctypes.data, segment_step=8, panel_stride=64, segments=3, k=16, last_k=last_k,
            step_stride=head_width * 4, out=out.ctypes.data, out_stride=out.strides[0],
        )  # fmt: skip
        np.testing.assert_allclose(
            out, chain(seen(x, weight_format)[:, :tokens], values[:tokens]), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("isa", ISAS.values(), ids=ISAS)
def test_low_tiles_exist_at_the_width_of_tall_ones(isa: Isa) -> None:
    """Rows are cut into tiles that differ by one row and go through the panels side by side."""
    formats = tuple(isa.tiles)
    table = tile_table(isa, formats, dict.fromkeys(tile_names(isa, formats), 7))
    for weight_format, tiles_of_format in isa.tiles.items():
        most = len(tiles_of_format)
        for lower, taller in itertools.pairwise(tiles_of_format):
            assert set(taller) <= set(lower)
            assert 1 in taller
        assert table[weight_format, 0, 0, 0] == most
        assert (table[weight_format, 1 : most + 1, 1:, 1] >= 1).all()
        assert (table[weight_format, 1 : most + 1, 1:, 1] <= np.arange(1, 16)).all()


def test_rows_are_rounded_like_weights() -> None:
    """Activations on their way into dot products: 3 rows of 64, ties and NaN among them."""
    x = np.random.default_rng(5).normal(size=(3, 70)).astype(np.float32)
    x[0, :3] = [np.nan, 1.00390625, -np.inf]
    out = np.zeros((3, 64), np.uint16)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)
    address = load_functions(lambda: tiles_module(PLAIN, [BFLOAT16_DOT]), [ROUNDING], None)[ROUNDING]
    kind(address)(x.ctypes.data, x.strides[0], out.ctypes.data, out.strides[0], 3, 2)
    np.testing.assert_array_equal(from_bfloat16(out)[:, :64], rounded(x, BFLOAT16)[:, :64])


def test_the_instruction_comes_out_on_processors_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for two processors that this one need not be: VDPBF16PS, and no spilled vector in a tall tile."""
    monkeypatch.setattr(steps, "host_has_dot", lambda: True)
    monkeypatch.setattr(vectors, "host_fuses", lambda: True)
    for processor in ("znver5", "sapphirerapids"):
        target = machine(processor)
        text = target.emit_assembly(optimise(tiles_module(AVX512, [BFLOAT16_DOT]), target))
        tile = text[text.index(f"{tile_name(BFLOAT16_DOT, 8, 2)}:") :]
        body = max(re.split(r"\n\.L\w+:", tile[: tile.index(".size")]), key=lambda part: part.count("vdpbf16ps"))
        assert body.count("vdpbf16ps") == 8 * 2 * 2  # rows, panels, and the loop unrolled twice
        assert not re.search(r"vmov\w+\s.*%rsp", body)
        assert "vcvtne2ps2bf16" in text


def test_dot_products_are_checked_before_use() -> None:
    names = tile_names(AVX2, [BFLOAT16, BFLOAT16_DOT])
    formats = [BFLOAT16, BFLOAT16_DOT]
    addresses = load_functions(lambda: tiles_module(AVX2, formats), names, None)
    assert dot_agrees(tile_table(AVX2, formats, addresses))
    swapped = dict(addresses)
    swapped[tile_name(BFLOAT16_DOT, 3, 1)] = addresses[tile_name(BFLOAT16_DOT, 2, 1)]  # leaves a row out
    assert not dot_agrees(tile_table(AVX2, formats, swapped))


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 32, 20000, dtype=np.uint64).astype(np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x80000001]  # two ties, one that rounds to infinity, a denormal
    values = bits.view(np.float32)
    expected = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    got, nan = to_bfloat16(values), np.isnan(values)
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    assert got[:4].tolist() == [0x3F80, 0x3F82, 0x7F80, 0x8000]
    assert np.isnan(from_bfloat16(got[nan])).all()


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 2), (17, 3), (40, 33), (3000, 700)])
@pytest.mark.parametrize("weight_format", [FLOAT32, BFLOAT16])
def test_packing_fills_up_with_zeros(rows: int, cols: int, weight_format: int) -> None:
    matrix = rounded(np.random.default_rng(4).normal(size=(rows, cols)).astype(np.float32), weight_format)
    panels = -(-rows // 16)
    out = np.full(panels * panel_bytes(weight_format, cols), 0xAA, np.uint8)
    pack(matrix, weight_format, out)
    if weight_format == FLOAT32:
        restored = out.view(np.float32).reshape(panels, cols, 16).transpose(0, 2, 1)
    else:
        lanes = from_bfloat16(out.view(np.uint16)).reshape(panels, -1, 16, 2)
        restored = lanes.transpose(0, 2, 1, 3).reshape(panels, 16, -1)
    filled = restored.reshape(panels * 16, -1)
    np.testing.assert_array_equal(filled[:rows, :cols], matrix)
    assert not filled[rows:].any()
    assert not filled[:, cols:].any()


def test_a_torn_object_file_is_compiled_again(tmp_path: Path) -> None:
    names = [tile_name(FLOAT32, 1, 1)]
    single = Isa("single", {FLOAT32: ((1,),)})
    file = tmp_path / "tiles.o"
    load_functions(lambda: tiles_module(single, [FLOAT32]), names, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    builds = []

    def build() -> object:
        builds.append(1)
        return tiles_module(single, [FLOAT32])

    load_functions(build, names, file)
    assert builds == [1]
    assert file.read_bytes() == whole
    load_functions(build, names, file)
    assert builds == [1]
