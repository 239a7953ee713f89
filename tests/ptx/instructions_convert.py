# mypy: disable-error-code="no-any-return"
"""cvt in all its forms, cvt.pack, and conversions between address spaces."""

from __future__ import annotations

import numpy as np

from .decode import Decoder, Step, handles
from .floats import FORMATS, decode, encode, flush, round_integral, saturate, to_float32
from .instructions_float import SMALL
from .memory import GLOBAL_WINDOW, LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BITS
from .modifiers import Modifiers, unknown
from .parser import Instruction
from .scalars import Array, dtype_of, size_of

TO_INTEGER = ("rni", "rzi", "rmi", "rpi")
TO_FLOAT = ("rn", "rz", "rm", "rp", "rna")
PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
FLOATS = {"f32", "f64", "f16", "bf16"}


@handles("cvt")
def convert(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    if m.flag("pack"):
        return pack_integers(d, i, m)
    source, target = m.type(), m.type()
    mode = m.one_of((*TO_INTEGER, *TO_FLOAT))
    ftz, sat, finite, relu = m.flag("ftz"), m.flag("sat"), m.flag("satfinite"), m.flag("relu")
    m.done()
    if target == "tf32":
        return to_tf32(d, i, source, mode)
    if target in PAIRS or source in PAIRS:
        if ftz or sat:
            raise unknown(i, "these modifiers")
        return convert_pairs(d, i, target, source, mode or "rn", finite, relu)
    if finite or mode == "rna":
        raise unknown(i, "these modifiers")
    if target in FLOATS:
        if source not in FLOATS:
            return from_integer(d, i, target, source, mode)
        return between_floats(d, i, target, source, mode, ftz, sat, relu)
    if relu:
        raise unknown(i, ".relu here")
    if source in FLOATS:
        return to_integer(d, i, target, source, mode, ftz)
    if mode:
        raise unknown(i, f".{mode} between integers")
    return between_integers(d, i, target, source, sat)


def between_integers(d: Decoder, i: Instruction, target: str, source: str, sat: bool) -> Step:
    dtype = dtype_of(target)
    if not sat:
        return d.pure(i, lambda a: a.astype(dtype), target, [source])
    limits = np.iinfo(dtype)
    own = np.iinfo(dtype_of(source))
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return d.pure(i, lambda a: np.clip(a, low, high).astype(dtype), target, [source])


def from_integer(d: Decoder, i: Instruction, target: str, source: str, mode: str) -> Step:
    if not mode:
        raise unknown(i, "integer to float without a rounding mode")
    if target in SMALL:
        return d.pure(i, lambda a: encode(a.astype(np.float64), target, mode), target, [source])
    if mode == "rn":
        dtype = dtype_of(target)
        return d.pure(i, lambda a: a.astype(dtype), target, [source])
    if target != "f32" or size_of(source) == 8:
        raise unknown(i, f".{mode} here")
    return d.pure(i, lambda a: to_float32(a.astype(np.float64), mode), target, [source])


def _widened(bits: Array, kind: str) -> Array:
    return decode(bits, kind) if kind in SMALL else bits


def to_integer(d: Decoder, i: Instruction, target: str, source: str, mode: str, ftz: bool) -> Step:
    """Out of range values clamp to the nearest limit; NaN becomes 0."""
    if mode not in TO_INTEGER:
        raise unknown(i, "float to integer without .rni, .rzi, .rmi or .rpi")
    dtype = dtype_of(target)
    limits = np.iinfo(dtype)
    below_top = float(limits.max) if dtype.itemsize < 8 else np.nextafter(float(limits.max), 0.0)

    def clamp(a: Array) -> Array:
        value = _widened(a, source)
        whole = round_integral((flush(value) if ftz else value).astype(np.float64), mode)
        inside = np.clip(np.nan_to_num(whole, nan=0.0, posinf=np.inf, neginf=-np.inf), float(limits.min), below_top)
        return np.where(whole > below_top, dtype.type(limits.max), inside.astype(dtype))

    return d.pure(i, clamp, target, [source])


def between_floats(
    d: Decoder, i: Instruction, target: str, source: str, mode: str, ftz: bool, sat: bool, relu: bool
) -> Step:
    if mode in TO_INTEGER and (target != source or target in SMALL):
        raise unknown(i, "rounding to an integral value of another format")
    narrows = {"f64": 3, "f32": 2, "f16": 1, "bf16": 1}
    if narrows[target] < narrows[source] and mode not in TO_FLOAT:
        raise unknown(i, "narrowing without a rounding mode")

    def run(a: Array) -> Array:
        value = _widened(a, source)
        if ftz:
            value = flush(value)
        if mode in TO_INTEGER:
            value = round_integral(value, mode)
        elif target == "f32" and source == "f64":
            value = to_float32(value, mode)
        elif target == "f64":
            value = value.astype(np.float64)
        if ftz:
            value = flush(value)
        if sat:
            value = saturate(value)
        if relu:
            value = np.where(value < 0, value.dtype.type(0), value)
        return encode(value, target, mode or "rn") if target in SMALL else value

    return d.pure(i, run, target, [source])


def convert_pairs(d: Decoder, i: Instruction, target: str, source: str, mode: str, finite: bool, relu: bool) -> Step:
    """Two values at once. From f32: the first operand becomes the upper half."""
    if target in PAIRS and source == "f32":
        form = PAIRS[target]
        width = FORMATS[form].bits
        if len(i.operands) != 3 or (form in ("e4m3", "e5m2") and not finite):
            raise unknown(i, "this form")
        dtype = dtype_of(target)

        def from_two(a: Array, b: Array) -> Array:
            if relu:
                a, b = (np.where(x < 0, np.float32(0), x) for x in (a, b))
            upper, lower = (encode(x, form, mode, finite).astype(dtype) for x in (a, b))
            return lower | (upper << dtype.type(width))

        return d.pure(i, from_two, target, ["f32", "f32"])
    if relu:
        raise unknown(i, ".relu here")
    if target in ("e4m3x2", "e5m2x2") and source in ("f16x2", "bf16x2"):
        form, half = PAIRS[target], PAIRS[source]

        def narrow(a: Array) -> Array:
            low, high = (decode((a >> np.uint32(s)).astype(np.uint16), half) for s in (0, 16))
            return encode(low, form, mode, True).astype(np.uint16) | (
                encode(high, form, mode, True).astype(np.uint16) << np.uint16(8)
            )

        return d.pure(i, narrow, target, [source])
    if target in ("f16x2", "bf16x2") and source in ("e4m3x2", "e5m2x2"):
        form, half = PAIRS[source], PAIRS[target]

        def widen(a: Array) -> Array:
            low, high = (encode(decode((a >> np.uint16(s)) & np.uint16(255), form), half) for s in (0, 8))
            return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

        return d.pure(i, widen, target, [source])
    raise unknown(i, "this pair of formats")


def to_tf32(d: Decoder, i: Instruction, source: str, mode: str) -> Step:
    """float32 with 10 mantissa bits: nearest, ties away (rna) or to even (rn)."""
    if source != "f32" or mode not in ("rna", "rn"):
        raise unknown(i, "this form")

    def round_bits(a: Array) -> Array:
        bits = a.view(np.uint32)
        half = np.uint32(0x1000) if mode == "rna" else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        return np.where(np.isfinite(a), (bits + half) & np.uint32(0xFFFFE000), bits)

    return d.pure(i, round_bits, "b32", ["f32"])


def pack_integers(d: Decoder, i: Instruction, m: Modifiers) -> Step:
    """cvt.pack.sat.{u8,s8,...}.s32.b32 d, a, b, c: a and b saturated, in the low bits, c shifted up behind them."""
    if m.left and m.left[-1] == "b32":
        m.type()
    source, target = m.type(), m.type()
    if source != "s32" or target not in ("u8", "s8", "u16", "s16") or not m.flag("sat"):
        raise unknown(i, "this form of cvt.pack")
    m.done()
    bits = 8 * size_of(target)
    limits, mask = np.iinfo(dtype_of(target)), np.uint32((1 << bits) - 1)

    def pack(a: Array, b: Array, *rest: Array) -> Array:
        low, high = ((np.clip(x, limits.min, limits.max).view(np.uint32) & mask) for x in (b, a))
        joined = low | (high << np.uint32(bits))
        return joined | (rest[0] << np.uint32(2 * bits)) if rest else joined

    return d.pure(i, pack, "b32", ["s32", "s32", "b32"][: len(i.operands) - 1])


@handles("cvta")
def convert_address(d: Decoder, i: Instruction) -> Step:
    """Generic addresses carry their space in the top bits; a `to` conversion of the wrong space is caught on use."""
    m = Modifiers(i)
    kind = m.type()
    to = m.flag("to")
    space = m.one_of(("global", "shared", "shared::cta", "local", "const"))
    m.done()
    if kind != "u64" or not space:
        raise unknown(i, "this form")
    window = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)
    shift = np.uint64(window << WINDOW_BITS)
    return d.pure(i, (lambda a: a - shift) if to else (lambda a: a + shift), "u64", ["u64"])


@handles("isspacep")
def is_in_space(d: Decoder, i: Instruction) -> Step:
    windows = {"global": GLOBAL_WINDOW, "shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "local": LOCAL_WINDOW}
    if len(i.modifiers) != 1 or i.modifiers[0] not in windows:
        raise unknown(i, "this space")
    window = np.uint64(windows[i.modifiers[0]])
    return d.pure(i, lambda a: (a >> np.uint64(WINDOW_BITS)) == window, "pred", ["u64"])
