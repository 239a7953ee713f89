# mypy: disable-error-code="no-any-return"
"""Tensor cores: mma.sync, ldmatrix, stmatrix, movmatrix, with the fragment layouts of the PTX manual.

Of a warp's lane l, g = l // 4 and t = l % 4. A 32-bit register holds e elements (1 of tf32, 2 of 16 bits, 4 of 8 bits):

    A (16 x K), register r:  row g + 8 (r % 2),  k = e t + j + 4 e (r // 2)      j = 0 .. e - 1
    B (K x 8),  register r:  column g,           k = e t + j + 4 e r
    C (16 x 8), value i:     row g + 8 (i // 2), column 2 t + i % 2

Products are exact and the sum over k and C is formed in float64, then rounded once to float32. Tensor cores align the
terms and truncate, so the hardware's last bits differ; a kernel's error bound must leave room for that.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import Address, Target
from .decode import Decoder, Registers, Step, handles
from .floats import decode, encode
from .instructions_warp import whole_warps
from .modifiers import Modifiers, unknown
from .parser import Instruction, Operand, Vec
from .scalars import Array, spread

if TYPE_CHECKING:
    from .machine import Lanes

ELEMENTS = {"tf32": 1, "f16": 2, "bf16": 2, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}
# By elements per register: the dtype of one, and K of m16n8kK.
BITS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint32), 2: np.dtype(np.uint16), 4: np.dtype(np.uint8)}
DEPTHS = {1: (4, 8), 2: (8, 16), 4: (16, 32)}

LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4


def fragment_a(elements: int, depth: int) -> Array:
    """(16, depth): position of each element in a warp's A registers flattened as (register, lane, element)."""
    place = np.zeros((16, depth), dtype=np.int64)
    for r in range(depth // (2 * elements)):
        for j in range(elements):
            place[GROUP + 8 * (r % 2), elements * THREAD + j + 4 * elements * (r // 2)] = (r * 32 + LANE) * elements + j
    return place


def fragment_b(elements: int, depth: int) -> Array:
    """(depth, 8): the same for B."""
    place = np.zeros((depth, 8), dtype=np.int64)
    for r in range(depth // (4 * elements)):
        for j in range(elements):
            place[elements * THREAD + j + 4 * elements * r, GROUP] = (r * 32 + LANE) * elements + j
    return place


def registers_of(d: Decoder, i: Instruction, operand: Operand | None, count: int) -> tuple[Operand | None, ...]:
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if len(items) != count:
        raise unknown(i, f"{len(items)} registers where {count} belong")
    return items


@handles("mma")
def multiply_accumulate(d: Decoder, i: Instruction) -> Step:
    names = list(i.modifiers)
    form = re.fullmatch(
        r"sync\.aligned\.m16n8k(\d+)\.row\.col\.(satfinite\.)?(\w+)\.(\w+)\.(\w+)\.(\w+)", ".".join(names)
    )
    if form is None:
        raise unknown(i, "this shape")
    depth, saturate = int(form[1]), bool(form[2])
    result, a_type, b_type, c_type = form[3], form[4], form[5], form[6]
    elements = ELEMENTS.get(a_type, 0)
    integer = a_type in ("s8", "u8")
    accumulators = ("s32",) if integer else ("f32", "f16") if a_type == "f16" else ("f32",)
    same_width = ELEMENTS.get(b_type) == elements and (elements == 4 or a_type == b_type)
    mixed = integer != (b_type in ("s8", "u8"))
    if (
        not elements
        or depth not in DEPTHS[elements]
        or not same_width
        or mixed
        or result != c_type
        or result not in accumulators
    ):
        raise unknown(i, "these types")
    if saturate and not integer:
        raise unknown(i, ".satfinite here")
    d.ready = whole_warps
    a_place, b_place = fragment_a(elements, depth), fragment_b(elements, depth)
    a_count, b_count, c_count = depth // (2 * elements), depth // (4 * elements), 2 if result == "f16" else 4
    c_kind = "b32" if result == "f16" else result
    a_values = [d.value(item, "b32", i) for item in registers_of(d, i, i.operands[1], a_count)]
    b_values = [d.value(item, "b32", i) for item in registers_of(d, i, i.operands[2], b_count)]
    c_values = [d.value(item, c_kind, i) for item in registers_of(d, i, i.operands[3], c_count)]
    stores = [d.store(item, c_kind, i) for item in registers_of(d, i, i.operands[0], c_count)]

    def step(lanes: Lanes, R: Registers) -> None:
        a = elements_of([lanes.spread(value(R)) for value in a_values], a_type, a_place)
        b = elements_of([lanes.spread(value(R)) for value in b_values], b_type, b_place)
        c = [lanes.spread(value(R)).reshape(-1, 32) for value in c_values]
        if result == "f16":
            c = [decode((word >> np.uint32(16 * half)).astype(np.uint16), "f16") for word in c for half in (0, 1)]
        # Rows and columns as (2, g), (t, 2): C's value n of lane (g, t) is product[:, n // 2, g, t, n % 2].
        product = np.matmul(a, b).reshape(-1, 2, 8, 4, 2)
        outcome = [
            (product[:, n // 2, :, :, n % 2].reshape(-1, 32) + accumulator).reshape(-1)
            for n, accumulator in enumerate(c)
        ]
        if integer:
            whole = [exact.astype(np.int64) for exact in outcome]
            outcome = [(np.clip(x, -(2**31), 2**31 - 1) if saturate else x).astype(np.int32) for x in whole]
        elif result == "f32":
            outcome = [exact.astype(np.float32) for exact in outcome]
        else:
            bits = [encode(exact, "f16").astype(np.uint32) for exact in outcome]
            outcome = [bits[n] | (bits[n + 1] << np.uint32(16)) for n in (0, 2)]
        for store, value in zip(stores, outcome, strict=True):
            store(R, value)

    return step


def elements_of(registers: list[Array], kind: str, place: Array) -> Array:
    """(warps, *place.shape) float64: a fragment held as 32-bit registers, one per lane, as a matrix."""
    words = np.empty((len(registers[0]) // 32, len(registers), 32), dtype=np.uint32)
    for n, register in enumerate(registers):
        words[:, n] = register.reshape(-1, 32)
    bits = words.reshape(len(words), -1).view(BITS[ELEMENTS[kind]]).take(place, axis=1)
    if kind == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return values_of(kind)[bits]


@cache
def values_of(kind: str) -> Array:
    """float64 values of all codes of an 8- or 16-bit type."""
    codes = np.arange(1 << 32 // ELEMENTS[kind]).astype(BITS[ELEMENTS[kind]])
    if kind in ("s8", "u8"):
        return codes.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return decode(codes, kind).astype(np.float64)


# --- moving 8x8 matrices of 16-bit elements -----------------------------------------------------------------------


def matrix_form(d: Decoder, i: Instruction) -> tuple[int, bool]:
    """Number of matrices, and whether they are transposed."""
    m = Modifiers(i)
    kind = m.type()
    count = {"x1": 1, "x2": 2, "x4": 4}.get(m.one_of(("x1", "x2", "x4")), 0)
    transposed = m.flag("trans")
    m.one_of(("shared", "shared::cta"))
    well_formed = m.flag("sync") and m.flag("aligned") and m.flag("m8n8")
    m.done()
    if kind != "b16" or not well_formed or not (count or i.opcode == "movmatrix"):
        raise unknown(i, "this form")
    d.ready = whole_warps
    return count, transposed


def rows_target(lanes: Lanes, R: Registers, address: Address, count: int) -> Target:
    """Lane 8 m + r gives the address of row r (16 bytes) of matrix m; further lanes give none."""
    who = np.flatnonzero(lanes.lane_in_warp < 8 * count)
    mask = np.zeros(lanes.n, dtype=np.bool_)
    mask[who] = True
    (target,) = address.targets(lanes, R, mask)
    offset = spread(target.offset, len(who))
    return Target(lanes, target.instruction, target.space, offset, who)


def transpose(words: Array) -> Array:
    """(n, 8, 4) 32-bit words that are 8x8 halves: each matrix transposed."""
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32)


@handles("ldmatrix")
def load_matrix(d: Decoder, i: Instruction) -> Step:
    """Lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l // 4 of each matrix (of its transpose)."""
    count, transposed = matrix_form(d, i)
    at = d.position
    address = Address(d, i, i.operands[1], "shared", 16)
    stores = [d.store(item, "b32", i) for item in registers_of(d, i, i.operands[0], count)]

    def step(lanes: Lanes, R: Registers) -> None:
        target = rows_target(lanes, R, address, count)
        flat = target.locate(16)
        words = target.memory.read(lanes, i, flat, 4, 4, target.who)
        target.observe(at, "load", flat, 16)
        matrices = np.stack(words, axis=1).reshape(-1, 8, 4)
        if transposed:
            matrices = transpose(matrices)
        fragments = matrices.reshape(-1, count, 32)
        for n, store in enumerate(stores):
            store(R, np.ascontiguousarray(fragments[:, n]).reshape(-1))

    return step


@handles("stmatrix")
def store_matrix(d: Decoder, i: Instruction) -> Step:
    """The inverse of ldmatrix."""
    count, transposed = matrix_form(d, i)
    at = d.position
    address = Address(d, i, i.operands[0], "shared", 16)
    values = [d.value(item, "b32", i) for item in registers_of(d, i, i.operands[1], count)]

    def step(lanes: Lanes, R: Registers) -> None:
        target = rows_target(lanes, R, address, count)
        flat = target.locate(16)
        fragments = np.stack([lanes.spread(value(R)).reshape(-1, 32) for value in values], axis=1)
        matrices = fragments.reshape(-1, 8, 4)
        if transposed:
            matrices = transpose(matrices)
        rows = matrices.reshape(-1, 4)
        target.memory.write(lanes, i, flat, 4, [rows[:, n] for n in range(4)], target.who)
        target.observe(at, "store", flat, 16)

    return step


@handles("movmatrix")
def transpose_in_registers(d: Decoder, i: Instruction) -> Step:
    _, transposed = matrix_form(d, i)
    if not transposed:
        raise unknown(i, "movmatrix without .trans")
    value = d.value(i.operands[1], "b32", i)
    store = d.store(i.operands[0], "b32", i)
    return lambda lanes, R: store(R, transpose(lanes.spread(value(R)).reshape(-1, 8, 4)).reshape(-1))
