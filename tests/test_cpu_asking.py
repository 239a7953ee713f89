"""What a tile asks for before it needs it: recorded by tiles in which asking for a line is a call of this test."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from kvpool.cpu_kernels import group_steps, tile
from kvpool.cpu_kernels.groups import group_of
from kvpool.cpu_kernels.isa import FLOAT32, INT4, INT4_X16, INT8_LONG_X16, INT16_X16, SPREAD16_PLUS, Isa
from kvpool.cpu_kernels.machine_code import load_functions
from kvpool.cpu_kernels.memory import INT64
from kvpool.cpu_kernels.packing import step_bytes
from kvpool.cpu_kernels.steps import LINES_AHEAD, step_of, x_unit
from kvpool.cpu_kernels.tile import ARGUMENTS, FAR, LONG, NEAR, tile_name, tile_names, tiles_module

LINE = 64
TALLEST = 6
HELD = (INT4, INT4_X16, INT8_LONG_X16, INT16_X16)
Lines = set[int]


class Recorder:
    """Addresses that were asked for, and whether to write there."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []
        self._note = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(
            lambda address, to_write: self.asked.append((address, bool(to_write)))
        )

    @property
    def read(self) -> list[int]:
        return [address for address, to_write in self.asked if not to_write]

    def emit(self, builder: Any, pointer: Any, to_write: bool = False) -> None:
        """In place of `memory.prefetch`."""
        kind = ir.FunctionType(ir.VoidType(), [INT64, INT64])
        address = ctypes.cast(self._note, ctypes.c_void_p).value
        function = builder.inttoptr(INT64(address), kind.as_pointer())
        builder.call(function, [builder.ptrtoint(pointer, INT64), INT64(int(to_write))])


@cache
def recorded_tile(weight_format: int, rows: int, width: int, shares_all: bool) -> tuple[Recorder, Callable[..., None]]:
    """A tile, and what notes what it asks for."""
    widths = tuple((width,) if height == rows else () for height in range(1, TALLEST + 1))
    recorder, isa = Recorder(), Isa("recorded", {weight_format: widths}, shares_all=shares_all)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile, "prefetch", recorder.emit)
        patch.setattr(group_steps, "prefetch", recorder.emit)
        names = tile_names(isa, [weight_format])
        addresses = load_functions(lambda: tiles_module(isa, [weight_format]), names, None)
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(ARGUMENTS))
    return recorder, kind(addresses[tile_name(weight_format, rows, width)])


class Product:
    """Zeros of a size for one call of a tile: `cuts` cuts of `rows` rows, `panels` panels over k of `steps` steps."""

    def __init__(
        self, weight_format: int, rows: int, width: int, *, cuts: int, panels: int, steps: int, shares_all: bool = True
    ) -> None:
        self.format, self.rows, self.width, self.cuts, self.panels = weight_format, rows, width, cuts, panels
        self.shares_all = shares_all
        columns, unit = x_unit(weight_format)
        self.k = steps * step_of(weight_format).k_per_step
        self.panel_bytes = steps * step_bytes(weight_format)
        self.x = np.zeros((cuts * rows, self.k // columns * unit), np.uint8)
        self.out = np.zeros((cuts * rows, panels * 16), np.float32)
        memory = np.zeros((panels + width) * self.panel_bytes + LINE, np.uint8)
        self.packed = memory[-memory.ctypes.data % LINE :]  # panels begin on a line
        self.table = np.array([self.packed.ctypes.data], np.int64)

    def run(self, **arguments: int) -> Recorder:
        recorder, function = recorded_tile(self.format, self.rows, self.width, self.shares_all)
        values = dict.fromkeys(ARGUMENTS, 0) | {
            "cuts": self.cuts,
            "groups": self.panels // self.width,
            "blocks": 1,
            "segments": 1,
            "k": self.k,
            "last_k": self.k,
            "step_stride": step_bytes(self.format),
            "x": self.x.ctypes.data,
            "x_stride": self.x.strides[0],
            "table": self.table.ctypes.data,
            "ahead_table": self.table.ctypes.data,
            "panel_stride": self.panel_bytes,
            "out": self.out.ctypes.data,
            "out_stride": self.out.strides[0],
            **arguments,
        }
        recorder.asked.clear()
        function(*(values[name] for name in ARGUMENTS))
        return recorder

    def lines(self, first: int, count: int) -> Lines:
        """Of panels first .. first + count - 1."""
        begin = self.packed.ctypes.data + first * self.panel_bytes
        return lines_of(range(begin, begin + count * self.panel_bytes))


def lines_of(addresses: range | list[int]) -> Lines:
    return {address // LINE for address in addresses}


@pytest.mark.parametrize("weight_format", [FLOAT32, SPREAD16_PLUS, INT16_X16])
@pytest.mark.parametrize("cuts", [1, 3])
def test_a_tile_asks_for_the_lines_of_its_results_before_anything_else(weight_format: int, cuts: int) -> None:
    product = Product(weight_format, 4, 1, cuts=cuts, panels=4, steps=3)
    places = product.out.ctypes.data + np.arange(product.out.size)[::16] * 4
    asked = product.run().asked
    assert sorted(address for address, to_write in asked if to_write) == places.tolist()
    turns = [len(list(turn)) for _, turn in groupby(to_write for _, to_write in asked)]
    assert turns[0::2] == [4] * (4 * cuts)  # its four lines, and then what the sums read


@pytest.mark.parametrize("weight_format", HELD)
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (4, 1)])
def test_a_single_cut_asks_for_all_of_the_next_panels_as_it_reads(weight_format: int, rows: int, width: int) -> None:
    product = Product(weight_format, rows, width, cuts=1, panels=2 * width, steps=4)
    asked = product.run().read
    assert lines_of(asked) >= product.lines(width, 2 * width)
    assert len(asked) == 2 * width * 4 * group_of(weight_format).lines
    first, second = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    assert lines_of(first) >= product.lines(width, width)
    assert lines_of(second) >= product.lines(2 * width, width)


@pytest.mark.parametrize("weight_format", HELD)
def test_a_single_cut_asks_no_further_ahead_than_caches_hold(weight_format: int) -> None:
    steps = FAR // step_bytes(weight_format) + 1
    product = Product(weight_format, 1, 2, cuts=1, panels=2, steps=steps)
    asked, begin = product.run().read, product.packed.ctypes.data + NEAR
    assert lines_of(asked) >= lines_of(range(begin, begin + 2 * product.panel_bytes))
    assert max(asked) < begin + 2 * product.panel_bytes + LINE


@pytest.mark.parametrize("weight_format", [INT4_X16, INT16_X16, SPREAD16_PLUS])
@pytest.mark.parametrize("cuts", [2, 6])
def test_several_cuts_share_the_asking(weight_format: int, cuts: int) -> None:
    """Each asks for its own part of the panel that comes next, `LINES_AHEAD` lines or more in each step."""
    product = Product(weight_format, 4, 1, cuts=cuts, panels=1, steps=6)
    share, step = product.panel_bytes // cuts, step_bytes(weight_format) // cuts
    asked = product.run(ahead_offset=product.panel_bytes, ahead_stride=step, ahead_cut=share).read
    assert len(asked) == cuts * 6 * max(LINES_AHEAD, step_of(weight_format).lines_ahead)
    for cut in range(cuts):
        of_cut = asked[cut * len(asked) // cuts : (cut + 1) * len(asked) // cuts]
        begin = product.packed.ctypes.data + product.panel_bytes + cut * share
        assert min(of_cut) == begin
        if step <= LINES_AHEAD * LINE:
            assert lines_of(of_cut) >= lines_of(range(begin, begin + share))


@pytest.mark.parametrize("weight_format", HELD)
@pytest.mark.parametrize(("cuts", "is_long", "alone"), [(2, False, True), (3, False, False), (3, True, True)])
def test_tall_tiles_share_the_asking_of_short_panels_among_three_cuts(
    weight_format: int, cuts: int, is_long: bool, alone: bool
) -> None:
    """Else each cut asks as a single one does."""
    steps = LONG // step_bytes(weight_format) + 1 if is_long else 6
    single = Product(weight_format, 4, 1, cuts=1, panels=1, steps=steps)
    expected = [address - single.packed.ctypes.data for address in single.run().read]
    product = Product(weight_format, 4, 1, cuts=cuts, panels=1, steps=steps, shares_all=False)
    asked = product.run(ahead_offset=product.panel_bytes, ahead_stride=LINE, ahead_cut=LINE).read
    assert ([address - product.packed.ctypes.data for address in asked] == cuts * expected) == alone
