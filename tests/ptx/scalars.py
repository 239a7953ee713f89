"""PTX's fundamental types: how wide each is, and the NumPy dtype that holds it."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_U8, _U16, _U32, _U64 = (np.dtype(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64))
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)

# Formats that NumPy lacks (bf16, fp8 pairs, f16 too for a uniform treatment) are held as their bits.
DTYPES: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "b8": _U8,
    "u8": _U8,
    "s8": np.dtype(np.int8),
    "b16": _U16,
    "u16": _U16,
    "s16": np.dtype(np.int16),
    "f16": _U16,
    "bf16": _U16,
    "e4m3x2": _U16,
    "e5m2x2": _U16,
    "b32": _U32,
    "u32": _U32,
    "s32": np.dtype(np.int32),
    "f16x2": _U32,
    "bf16x2": _U32,
    "tf32": _U32,
    "f32": _F32,
    "b64": _U64,
    "u64": _U64,
    "s64": np.dtype(np.int64),
    "f64": _F64,
}

UNSIGNED = {1: _U8, 2: _U16, 4: _U32, 8: _U64}


def dtype_of(ptx_type: str) -> np.dtype[Any]:
    return DTYPES[ptx_type]


def size_of(ptx_type: str) -> int:
    """Bytes of one value in memory."""
    return DTYPES[ptx_type].itemsize


def unsigned(ptx_type: str) -> np.dtype[Any]:
    """The unsigned dtype of the same width: add, mul.lo and bit operations wrap there without regard to sign."""
    return UNSIGNED[size_of(ptx_type)]


def is_float(ptx_type: str) -> bool:
    return ptx_type in ("f32", "f64")


def is_signed(ptx_type: str) -> bool:
    return ptx_type.startswith("s")


def spread(values: Array, count: int) -> Array:
    """One value per lane, of an array that may hold one for all."""
    return values if len(values) == count else np.broadcast_to(values, count)
