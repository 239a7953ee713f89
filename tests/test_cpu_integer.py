"""Products of codes: activations in codes, exact integer sums, the same bits on every processor and in every tile."""

from __future__ import annotations

import ctypes
import re
from functools import partial

import numpy as np
import pytest

from kvpool.cpu_kernels import integer_steps, vectors
from kvpool.cpu_kernels.activations import encode_name, form_of
from kvpool.cpu_kernels.groups import GROUP_FORMATS, HELD_AS, INT16_LIMIT, Codes, group_of, pack_codes
from kvpool.cpu_kernels.isa import (
    AVX2,
    AVX512,
    FORMAT_NAMES,
    INT4_X8,
    INT4_X16,
    INT8_K_X16,
    INT8_X16,
    INT16_X16,
    INTEGER,
    PLAIN,
    Isa,
)
from kvpool.cpu_kernels.machine_code import FUSED_PAIRS, host_machine, load_functions, machine, optimise
from kvpool.cpu_kernels.packing import panel_bytes, step_bytes
from kvpool.cpu_kernels.tile import ARGUMENTS, tile_name, tile_names, tiles_module
from kvpool.cpu_kernels.unpacking import unpack_name
from kvpool.model.backend import BackendLimits
from kvpool.model.batch import Float32
from kvpool.model.cpu.backend import CpuBackend
from tests.support.gguf_checkpoint import BlockCheckpoint
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.steps import Piece, Shape, run_step, tiny_program

PROGRAM = tiny_program(
    Shape(hidden_size=256, intermediate_size=1280, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
)
TOKENS = np.random.default_rng(7).integers(0, 90, 160).tolist()
ALIKE = ("int4_kx16", "int4_kx8")  # their tiles differ from those without k in how scales are read
WIDE = Isa("wide", dict.fromkeys(INTEGER, ((4,), (4,), (2,))))  # more than AVX2 has registers for
FORMATS = [
    pytest.param(number, id=FORMAT_NAMES[number], marks=[pytest.mark.slow] if FORMAT_NAMES[number] in ALIKE else [])
    for number in INTEGER
]


def call(address: int, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def functions(isa: Isa, read_as: int) -> dict[str, int]:
    return load_functions(partial(tiles_module, isa, [read_as]), tile_names(isa, [read_as]), None)


def one_tile(read_as: int) -> Isa:
    return Isa("one", {read_as: ((1,),)})


def encoded(x: Float32, read_as: int, address: int) -> np.ndarray:
    """(rows, groups, bytes of a group) uint8."""
    form = form_of(read_as)
    out = np.zeros((len(x), x.shape[1] // form.size, form.bytes), np.uint8)
    call(address, x.ctypes.data, x.strides[0], out.ctypes.data, out.strides[0], len(x), out.shape[1])
    return out


def decoded(groups: np.ndarray, read_as: int) -> tuple[np.ndarray, Float32, Float32]:
    """Numbers (rows, groups, size) in order of k; step and step * sum of each group."""
    form = form_of(read_as)
    words = groups[..., : form.codes_bytes].copy().view(np.int16 if form.bits == 16 else np.int8)
    numbers = words.reshape(*groups.shape[:2], form.words, -1).swapaxes(-1, -2).reshape(*groups.shape[:2], form.size)
    tail = groups[..., form.codes_bytes :].copy()
    step, total, count = tail.view(np.float32)[..., 0], tail.view(np.float32)[..., 1], tail.view(np.int32)[..., 2]
    whole = np.isfinite(step)
    np.testing.assert_array_equal(count[whole], numbers.sum(axis=-1, dtype=np.int32)[whole])
    return numbers, step, total


@pytest.mark.parametrize("read_as", [INT4_X16, INT8_K_X16, INT4_X8, INT16_X16], ids=FORMAT_NAMES.get)
def test_activations_become_the_nearest_codes(read_as: int) -> None:
    form = form_of(read_as)
    x = np.random.default_rng(0).normal(size=(5, 4 * form.size)).astype(np.float32)
    x[0, : form.size] = 0.0
    x[1, : form.size] = 1e-36
    x[2, : form.size] *= 1e30
    x[3, 3], x[3, form.size + 1] = np.nan, -np.inf
    numbers, step, total = decoded(
        encoded(x, read_as, functions(one_tile(read_as), read_as)[encode_name(read_as)]), read_as
    )
    groups = x.reshape(5, 4, form.size)
    assert not numbers[0, 0].any()
    assert not numbers[1, 0].any()
    assert step[0, 0] == step[1, 0] == total[0, 0] == 0.0
    assert np.isnan(step[3, :2]).all()
    assert np.isnan(total[3, :2]).all()
    good = np.ones((5, 4), bool)
    good[1, 0] = good[3, 0] = good[3, 1] = False
    held = numbers[good] * step[good][:, None].astype(np.float64)
    largest = np.abs(groups[good]).max(axis=-1, keepdims=True).astype(np.float64)
    assert (np.abs(held - groups[good]) <= largest / form.limit * 0.505).all()
    assert np.abs(numbers[good]).max() == form.limit
    np.testing.assert_array_equal(
        total[good], step[good] * numbers[good].sum(axis=-1, dtype=np.int64).astype(np.float32)
    )


class Operands:
    """Weights in random codes, packed, and rows of activations in codes."""

    def __init__(self, read_as: int, rows: int, panels: int, cols: int, encode: int) -> None:
        random, held, form = np.random.default_rng(1), HELD_AS[read_as], form_of(read_as)
        group = GROUP_FORMATS[held]
        low, high = (-INT16_LIMIT, INT16_LIMIT) if group.is_signed else (0, (1 << group.bits) - 1)
        codes = random.integers(low, high + 1, (16 * panels, cols)).astype(np.int16 if group.is_signed else np.uint8)
        codes[0], codes[1] = high, low
        scale, least = random.uniform(0.5, 1.0, (2, 16 * panels, cols // form.size)).astype(np.float16)
        scale, least = scale.astype(np.float32), -least.astype(np.float32)
        self.size = panel_bytes(held, cols)
        self.packed = np.zeros(panels * self.size, np.uint8)
        pack_codes(Codes(codes, scale, least if group.has_least else None), held, self.packed)
        if not group.has_least:
            least = -group.zero * scale
        x = random.normal(size=(rows, cols)).astype(np.float32)
        x[0] = np.abs(x).max()  # every number is the largest: sums as large as they get
        self.x = encoded(x, read_as, encode)
        numbers, step, _ = decoded(self.x, read_as)
        weights = scale[..., None].astype(np.float64) * codes.reshape(*scale.shape, form.size) + least[..., None]
        self.expected = np.einsum("rgk,ngk->rn", numbers * step[..., None].astype(np.float64), weights)
        self.scale = np.einsum("rgk,ngk->rn", np.abs(numbers * step[..., None].astype(np.float64)), np.abs(weights))

    def spread(self, unpack: int, read_as: int) -> np.ndarray:
        """All panels through an unpacking function, as those of `read_as`."""
        panels, groups = len(self.packed) // self.size, self.x.shape[1]
        out = np.zeros((panels, groups * group_of(read_as).bytes), np.uint8)
        for number in range(panels):
            call(unpack, self.packed.ctypes.data + number * self.size, out[number].ctypes.data, groups)
        return out

    def product(
        self, read_as: int, tile: int, rows: int, width: int, packed: np.ndarray | None = None, first: int = 0
    ) -> Float32:
        """All panels, in two blocks of groups of k: as many groups as there are, but one, and one."""
        packed = self.packed if packed is None else packed
        form, (_, groups, _), panels = form_of(read_as), self.x.shape, len(self.packed) // self.size
        out, table = np.zeros((rows, 16 * panels), np.float32), np.array([packed.ctypes.data], np.int64)
        step = step_bytes(read_as)
        given = dict.fromkeys(ARGUMENTS, 0) | {
            "x": self.x[first:].ctypes.data, "x_stride": self.x.strides[0], "cuts": 1, "groups": panels // width,
            "table": table.ctypes.data, "panel_stride": step * groups, "blocks": 2, "block_stride": step * (groups - 1),
            "segments": 1, "k": form.size * (groups - 1), "last_k": form.size, "step_stride": step,
            "out": out.ctypes.data, "out_stride": out.strides[0], "ahead_table": table.ctypes.data,
        }  # fmt: skip
        call(tile, *(given[name] for name in ARGUMENTS))
        return out


@pytest.mark.parametrize("read_as", FORMATS)
def test_every_tile_gives_the_sums_of_codes(read_as: int) -> None:
    """Near the exact sums, the largest codes among them, and the same bits from every tile."""
    addresses = functions(AVX2, read_as)
    most, widest = len(AVX2.tiles[read_as]), max(map(max, AVX2.tiles[read_as]))
    operands = Operands(read_as, most, 2 * widest, 5 * form_of(read_as).size, addresses[encode_name(read_as)])
    expected = operands.product(read_as, addresses[tile_name(read_as, 1, 1)], 1, 1)
    for rows, widths in enumerate(AVX2.tiles[read_as], start=1):
        for width in widths:
            got = operands.product(read_as, addresses[tile_name(read_as, rows, width)], rows, width)
            assert (np.abs(got - operands.expected[:rows]) <= 1e-6 * operands.scale[:rows]).all()
            np.testing.assert_array_equal(got[0].view(np.uint32), expected[0].view(np.uint32))


@pytest.mark.parametrize("read_as", [case for case in FORMATS if case.values[0] in AVX2.unpacked])
def test_unpacked_panels_give_the_same_bits(read_as: int) -> None:
    """Tiles of many rows read codes that were spread to the width of activations, where a processor gains by it."""
    unpacked = AVX2.unpacked[read_as]
    addresses = functions(AVX2, read_as) | functions(AVX2, unpacked)
    most = len(AVX2.tiles[unpacked])
    operands = Operands(read_as, most, 2, 5 * form_of(read_as).size, addresses[encode_name(read_as)])
    panels = operands.spread(addresses[unpack_name(read_as, unpacked)], unpacked)
    one = addresses[tile_name(read_as, 1, 1)]
    expected = np.concatenate([operands.product(read_as, one, 1, 1, first=row) for row in range(most)])
    for rows, (width,) in enumerate(AVX2.tiles[unpacked], start=1):
        got = operands.product(unpacked, addresses[tile_name(unpacked, rows, width)], rows, width, panels)
        np.testing.assert_array_equal(got.view(np.uint32), expected[:rows].view(np.uint32))


@pytest.mark.parametrize("read_as", [INT8_X16, INT4_X8, INT16_X16], ids=FORMAT_NAMES.get)
@pytest.mark.parametrize(
    ("isa", "bits", "quad_bits"), [(PLAIN, 0, 0), (WIDE, 256, 0), (WIDE, 256, 256)], ids=["plain", "wide", "quads"]
)
def test_every_processor_gives_the_same_bits(
    read_as: int, isa: Isa, bits: int, quad_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the instructions, with narrower ones, and with the tiles of a larger register file, against one row with
    what is here."""
    if quad_bits > integer_steps.host_quad_bits():
        pytest.skip("this processor multiplies no quadruples of bytes")
    addresses = functions(one_tile(read_as), read_as)
    most, widest = len(isa.tiles[read_as]), max(map(max, isa.tiles[read_as]))
    operands = Operands(read_as, most, widest, 3 * form_of(read_as).size, addresses[encode_name(read_as)])
    expected = operands.product(read_as, addresses[tile_name(read_as, 1, 1)], 1, 1)
    host = integer_steps.host_pair_bits()
    monkeypatch.setattr(integer_steps, "host_pair_bits", lambda: min(bits, host))
    monkeypatch.setattr(integer_steps, "host_quad_bits", lambda: quad_bits)
    others = functions(isa, read_as)
    for rows, widths in enumerate(isa.tiles[read_as], start=1):
        got = operands.product(read_as, others[tile_name(read_as, rows, widths[0])], rows, widths[0])
        np.testing.assert_array_equal(got[0].view(np.uint32), expected[0].view(np.uint32))


def backend(checkpoint: RandomCheckpoint, **options: object) -> CpuBackend:
    settings = {"threads": 2, "kv_dtype": "float32"} | options
    made = CpuBackend(PROGRAM, checkpoint, BackendLimits(16, 64, 256, 256), **settings)  # type: ignore[arg-type]
    made.allocate_pool(32)
    return made


def logits(cpu: CpuBackend, first: int, last: int, blocks: int = 0) -> Float32:
    piece = Piece(TOKENS[first:last], first, list(range(blocks, blocks + 10)))
    got = run_step(cpu, [piece], 16, every_row=True).logits
    assert got is not None
    return got


@pytest.mark.parametrize(
    ("kinds", "activations", "most"),
    [({"": "Q4_K", "0.down": "Q6_K"}, "int16", 2e-4), ({"": "Q4_1", "embed": "Q8_0"}, "int8", 3e-2)],
    ids=["Q4_K-int16", "Q4_1-int8"],
)
def test_a_model_in_codes(kinds: dict[str, str], activations: str, most: float) -> None:
    """Near float32 activations, and the same bits however a prompt is cut and with any threads."""
    checkpoint = BlockCheckpoint(PROGRAM, kinds)
    exact, held = backend(checkpoint, activations="float32"), backend(checkpoint, activations=activations)
    alone = backend(checkpoint, activations=activations, threads=1)
    expected, whole = logits(exact, 0, 160), logits(held, 0, 160)
    error = np.abs(whole - expected).mean() / np.abs(expected).mean()
    assert 0 < error < most
    start = 0
    for rows in (1, 2, 3, 4, 5, 6, 7, 33, 63):
        np.testing.assert_array_equal(logits(held, start, start + rows, 10), whole[start : start + rows])
        start += rows
    np.testing.assert_array_equal(logits(alone, 0, 130), whole[:130])
    assert f"{activations} activations" in held.description
    assert held.kv_layout != exact.kv_layout
    for each in (exact, held, alone):
        each.close()


@pytest.mark.parametrize("cpu", ["znver5", "sapphirerapids"])
@pytest.mark.parametrize(  # products: of a half word of weights, or of two whole ones
    ("read_as", "instruction", "products"), [(INT4_X16, "vpdpwssd", 4), (INT4_X8, "vpdpbusd", 2)], ids=["16", "8"]
)
def test_larger_instructions_come_out_on_processors_that_have_them(
    read_as: int, instruction: str, products: int, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for a processor that this one need not be: VPDPWSSD for 16 bits, VPDPBUSD for 8, and while a group is
    read no spilled vector in a tall tile."""
    monkeypatch.setattr(integer_steps, "host_pair_bits", lambda: 512)
    monkeypatch.setattr(integer_steps, "host_quad_bits", lambda: 512)
    monkeypatch.setattr(vectors, "host_fuses", lambda: True)
    host_machine()  # makes LLVM know its targets
    target, rows = machine(cpu, FUSED_PAIRS), len(AVX512.tiles[read_as])
    text = target.emit_assembly(optimise(tiles_module(Isa("tall", {read_as: ((2,),) * rows}), [read_as]), target))
    tile = text[text.index(f"{tile_name(read_as, rows, 2)}:") :]
    loops = re.findall(r"\n(\.L\w+):((?:(?!\n\.L).)*)\n\tj\w+\t\1\n", tile[: tile.index(".size")], re.DOTALL)
    words = max((body for _, body in loops), key=lambda body: body.count(instruction))
    assert words.count(instruction) == rows * 2 * products
    assert not re.search(r"vmov\w+\s.*%rsp", words)


def test_activations_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="set activations to auto, float32, int16, int8"):
        backend(RandomCheckpoint(PROGRAM), activations="int4")
