"""Operations on one row at a time: embedding, RMS norm, gated activation, outputs of layers, row selection.

Rows are float32 and start 64 bytes apart, so whole vectors may be read and written: the lanes past a row's width are
always zero.
"""

from __future__ import annotations

import numpy as np

from . import table as t
from .isa import BFLOAT16, FIRST_GROUPED
from .jit import kernel
from .memory import call_address, float_of_bits, load_f32, load_i32, load_i64, load_u32, store_f32
from .product import FORMAT_BYTES
from .rounding import round_rows
from .table import float_word, rows_of_unit, word
from .vectors import Vector, exp, fma, load, select_range, splat, store, sum_lanes

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
# gelu_tanh(x) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
GELU_LINEAR = np.float32(2.0 * np.sqrt(2.0 / np.pi))
GELU_CUBIC = np.float32(2.0 * np.sqrt(2.0 / np.pi) * 0.044715)


def embed(row: int, state: int, unit: int, thread: int) -> None:
    """out[t] = table[tokens[t]] * scale, gathered out of the packed panels."""
    scale, width = float_word(row, t.SCALAR), word(row, t.WIDTH)
    unpacked = word(state, t.LINEAR_SCRATCH) + thread * word(state, t.LINEAR_BYTES) + word(state, t.UNPACKED_OFFSET)
    unpack = load_i64(word(state, t.TILES) + word(row, t.WEIGHT_FORMAT) * FORMAT_BYTES + 48)
    for index in range(*rows_of_unit(row, state, unit)):
        token = load_i32(word(state, t.TOKENS) + 4 * index)
        panel = word(row, t.WEIGHT) + (token >> 4) * word(row, t.PANEL_BYTES)
        if word(row, t.WEIGHT_FORMAT) >= FIRST_GROUPED:
            call_address(unpack, (panel, unpacked, word(row, t.PANEL_BYTES) // word(row, t.STEP_BYTES)))
            panel = unpacked
        source = panel + (token & 15) * 4
        out = word(row, t.OUT) + index * word(row, t.OUT_STRIDE)
        if word(row, t.WEIGHT_FORMAT) == BFLOAT16:
            for k in range(0, width, 2):  # a lane holds two k; the second of an odd width is a zero
                pair = np.int64(load_u32(source + k * 32))
                store_f32(out + 4 * k, float_of_bits(pair << 16) * scale)
                store_f32(out + 4 * k + 4, float_of_bits(pair & 0xFFFF0000) * scale)
        else:
            for k in range(width):
                store_f32(out + 4 * k, load_f32(source + k * 64) * scale)


@kernel
def copy_floats(source: int, out: int, count: int) -> None:
    """Copy `count` floats and nothing past them."""
    whole = count & -16
    for i in range(0, 4 * whole, 64):
        store(out + i, load(source + i))
    for i in range(4 * whole, 4 * count, 4):
        store_f32(out + i, load_f32(source + i))


@kernel
def inverse_rms(x: int, width: int, eps: float) -> float:
    """1 / sqrt(mean(x^2) + eps) of `width` floats. Each lane sums in order, then the lanes as a tree."""
    total = splat(ZERO)
    for i in range(0, width, 16):
        value = load(x + 4 * i)
        if i + 16 > width:
            value = select_range(0, width - i, value, splat(ZERO))
        total = fma(value, value, total)
    return ONE / np.sqrt(sum_lanes(total) / np.float32(width) + eps)


def rms_norm(row: int, state: int, unit: int, thread: int) -> None:
    """out[t] (+)= x[t] / sqrt(mean(x[t]^2) + eps) * weight."""
    width, weight = word(row, t.WIDTH), word(row, t.WEIGHT)
    accumulate = word(row, t.ACCUMULATE) != 0
    first, last = rows_of_unit(row, state, unit)
    for index in range(first, last):
        x = word(row, t.X) + index * word(row, t.X_STRIDE)
        out = word(row, t.OUT) + index * word(row, t.OUT_STRIDE)
        scale = splat(inverse_rms(x, width, float_word(row, t.SCALAR)))
        for i in range(0, 4 * width, 64):
            value = load(x + i) * scale * load(weight + i)
            store(out + i, load(out + i) + value if accumulate else value)
    round_rows(row, state, first, last)


@kernel
def activated(kind: int, gate: Vector, up: Vector) -> Vector:
    """act(gate) * up; both activations are gate * sigmoid(z)."""
    z = gate
    if kind == t.GELU_TANH:
        z = gate * fma(splat(GELU_CUBIC), gate * gate, splat(GELU_LINEAR))
    return gate / (splat(ONE) + exp(splat(ZERO) - z)) * up


@kernel
def activate(kind: int, gate: int, up: int, out: int, width: int) -> None:
    """out = act(gate) * up on `width` floats; the lanes past the width become zero."""
    for i in range(0, width, 16):
        value = activated(kind, load(gate + 4 * i), load(up + 4 * i))
        if i + 16 > width:
            value = select_range(0, width - i, value, splat(ZERO))
        store(out + 4 * i, value)


def gated_activation(row: int, state: int, unit: int, thread: int) -> None:
    """out[t] = act(x[t, :n]) * x[t, n:]."""
    width = word(row, t.WIDTH)
    first, last = rows_of_unit(row, state, unit)
    for index in range(first, last):
        gate = word(row, t.X) + index * word(row, t.X_STRIDE)
        out = word(row, t.OUT) + index * word(row, t.OUT_STRIDE)
        activate(word(row, t.KIND), gate, gate + 4 * width, out, width)
    round_rows(row, state, first, last)


def layer_output(row: int, state: int, unit: int, thread: int) -> None:
    """Copy x[layer_rows[n]] to row n of this layer's output, where the step asks for it."""
    width = word(row, t.WIDTH)
    out = load_i64(word(state, t.LAYERS_OUT) + 8 * word(row, t.LAYER))
    if out == 0:
        return
    for index in range(*rows_of_unit(row, state, unit)):
        source = load_i32(word(state, t.LAYER_ROW_INDEX) + 4 * index)
        copy_floats(word(row, t.X) + source * word(row, t.X_STRIDE), out + index * width * 4, width)


def select_rows(row: int, state: int, unit: int, thread: int) -> None:
    """out[r] = x[logit_rows[r]]."""
    for index in range(*rows_of_unit(row, state, unit)):
        source = load_i32(word(state, t.LOGIT_ROW_INDEX) + 4 * index)
        x = word(row, t.X) + source * word(row, t.X_STRIDE)
        out = word(row, t.OUT) + index * word(row, t.OUT_STRIDE)
        for i in range(0, 4 * word(row, t.WIDTH), 64):
            store(out + i, load(x + i))
