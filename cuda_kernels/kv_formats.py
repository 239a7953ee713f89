"""Formats of the pool: how keys and values are written, and how they come back as operands of tensor cores.

8-bit formats keep a scale per token, KV head and side (value = scale * code), so that nothing has to be known in
advance. Codes become float16 exactly by moving bits; scales multiply the scores and the weights, not the operands:

    int8          code + 128 in the low byte of the float16 1024 is 1152 + code
    float8_e4m3   sign and the seven other bits moved into a float16 give code / 256
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import intrinsics
from .elements import BFLOAT16, FLOAT16, FLOAT32, PackedElement
from .intrinsics import f32_bits, permute_bytes
from .jit import device_function, types

_u8, _u32, _f32 = types.uint8, types.uint32, types.float32


def _no_tensor_cores(*_: Any) -> Any:
    raise TypeError("float32 pools have kernels of their own")


@dataclass(frozen=True, slots=True)
class KvFormat:
    """`encode(float32) -> stored` writes one number, relative to the scale where `scaled`.

    `load8(pool, index)` gives eight neighbours as four registers of pairs for `mma`, whose other operand `pack` makes.
    `largest` is the largest code: a head's scale is its largest magnitude / largest. A code is `unit` times what
    `load8` makes of it. `gain` brings scale * weight into float16's range; outputs are divided by gain / unit.
    """

    name: str
    itemsize: int
    stored: Any
    encode: Callable[..., Any]
    load8: Callable[..., Any] = _no_tensor_cores
    pack: Callable[..., Any] = _no_tensor_cores
    mma: Callable[..., Any] = _no_tensor_cores
    scaled: bool = False
    largest: float = 1.0
    unit: float = 1.0
    gain: float = 1.0


@device_function
def _int8_encode(x: Any) -> Any:
    return _u8(_u32(intrinsics.round_to_i32(x)))


@device_function
def _int8_pair(codes: Any, selector: Any) -> Any:
    """Two of four codes as float16; `selector` puts each into the low byte of 0x6400, the float16 1024."""
    biased = permute_bytes(_u32(codes ^ _u32(0x80808080)), _u32(0x64646464), selector)
    return intrinsics.subtract_f16x2(biased, _u32(0x64806480))


@device_function
def _int8_load8(pool: Any, index: Any) -> Any:
    low, high = intrinsics.load_u32x2(pool, index)
    first, second = _u32(0x4140), _u32(0x4342)
    return _int8_pair(low, first), _int8_pair(low, second), _int8_pair(high, first), _int8_pair(high, second)


@device_function
def _e4m3_encode(x: Any) -> Any:
    """The nearest e4m3 number, ties to even; |x| <= 448. The product brings e4m3's exponents to float32's lowest."""
    bits = f32_bits(x * _f32(2.0**-120))
    magnitude = _u32(bits & _u32(0x7FFFFFFF))
    rounded = _u32(magnitude + _u32(0x7FFFF) + (_u32(magnitude >> _u32(20)) & _u32(1)))
    return _u8(_u32(_u32(bits >> _u32(24)) & _u32(0x80)) | _u32(rounded >> _u32(20)))


@device_function
def _e4m3_pair(codes: Any, selector: Any) -> Any:
    """Two of four codes / 256 as float16; `selector` puts each into the high byte of a half."""
    spread = permute_bytes(codes, _u32(0), selector)
    return _u32((spread & _u32(0x80008000)) | _u32(_u32(spread & _u32(0x7F007F00)) >> _u32(1)))


@device_function
def _e4m3_load8(pool: Any, index: Any) -> Any:
    low, high = intrinsics.load_u32x2(pool, index)
    first, second = _u32(0x1404), _u32(0x3424)
    return _e4m3_pair(low, first), _e4m3_pair(low, second), _e4m3_pair(high, first), _e4m3_pair(high, second)


def _wide(element: PackedElement) -> KvFormat:
    return KvFormat(element.name, 2, element.stored, element.narrow, intrinsics.load_u32x4, element.pack, element.mma)


def _scaled(
    name: str, encode: Callable[..., Any], load8: Callable[..., Any], largest: float, unit: float, gain: float
) -> KvFormat:
    return KvFormat(name, 1, types.uint8, encode, load8, FLOAT16.pack, FLOAT16.mma, True, largest, unit, gain)


KV_FORMATS: dict[str, KvFormat] = {
    each.name: each
    for each in (
        KvFormat("float32", 4, FLOAT32.stored, FLOAT32.narrow),
        _wide(BFLOAT16),
        _wide(FLOAT16),
        _scaled("int8", _int8_encode, _int8_load8, largest=127.0, unit=1.0, gain=128.0),
        _scaled("float8_e4m3", _e4m3_encode, _e4m3_load8, largest=448.0, unit=256.0, gain=256.0),
    )
}
