"""The number formats that kernels read, multiply and write, as values that a kernel factory closes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import intrinsics
from .jit import device_function, types


@dataclass(frozen=True, slots=True)
class Element:
    """One format. Arrays of 16-bit formats are uint16 to Numba; two of them share a uint32 register.

    `widen(stored) -> float32`, `narrow(float32) -> stored`; `load4(pointer, index)`, `store2(pointer, index, a, b)` and
    `store4(pointer, index, a, b, c, d)` move neighbours as float32, index a multiple of their number.
    """

    name: str
    itemsize: int
    stored: Any
    widen: Callable[..., Any]
    narrow: Callable[..., Any]
    load4: Callable[..., Any]
    store2: Callable[..., Any]
    store4: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PackedElement(Element):
    """A 16-bit format: `pack(low, high) -> uint32`, `low(uint32)`, `high(uint32) -> float32`, and its `mma`."""

    pack: Callable[..., Any]
    low: Callable[..., Any]
    high: Callable[..., Any]
    mma: Callable[..., Any]


@device_function
def _same(value: Any) -> Any:
    return value


@device_function
def _bf16_low(packed: Any) -> Any:
    return intrinsics.f32_from_bits(types.uint32(types.uint32(packed) << types.uint32(16)))


@device_function
def _bf16_high(packed: Any) -> Any:
    return intrinsics.f32_from_bits(types.uint32(packed & types.uint32(0xFFFF0000)))


@device_function
def _f16_low(packed: Any) -> Any:
    return intrinsics.f16_to_f32(types.uint16(packed))


@device_function
def _f16_high(packed: Any) -> Any:
    return intrinsics.f16_to_f32(types.uint16(packed >> types.uint32(16)))


def _packed(
    name: str, pack: Callable[..., Any], low: Callable[..., Any], high: Callable[..., Any], mma: Callable[..., Any]
) -> PackedElement:
    @device_function
    def narrow(value: Any) -> Any:
        return types.uint16(pack(value, value))

    @device_function
    def load4(pointer: Any, index: Any) -> Any:
        ab, cd = intrinsics.load_u32x2(pointer, index)
        return low(ab), high(ab), low(cd), high(cd)

    @device_function
    def store2(pointer: Any, index: Any, a: Any, b: Any) -> None:
        intrinsics.store_u32(pointer, index, pack(a, b))

    @device_function
    def store4(pointer: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> None:
        intrinsics.store_u32x2(pointer, index, pack(a, b), pack(c, d))

    return PackedElement(name, 2, types.uint16, low, narrow, load4, store2, store4, pack, low, high, mma)


FLOAT32 = Element(
    "float32",
    4,
    types.float32,
    _same,
    _same,
    intrinsics.load_f32x4,
    intrinsics.store_f32x2,
    intrinsics.store_f32x4,
)
BFLOAT16 = _packed("bfloat16", intrinsics.pack_bf16, _bf16_low, _bf16_high, intrinsics.mma_bf16)
FLOAT16 = _packed("float16", intrinsics.pack_f16, _f16_low, _f16_high, intrinsics.mma_f16)

ELEMENTS: dict[str, Element] = {element.name: element for element in (FLOAT32, BFLOAT16, FLOAT16)}
PACKED: dict[str, PackedElement] = {element.name: element for element in (BFLOAT16, FLOAT16)}
