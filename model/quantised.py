"""Matrices as codes in groups, for every back end: GGUF's blocks as they are, and float32 rounded to the nearest codes.

The codes are those of `cpu_kernels.groups`: w = scale * code + least with code >= 0. Block layouts are GGML's
(ggml-quants.h); what is taken over stands for exactly the numbers of GGML's own dequantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cpu_kernels.groups import GROUP_FORMATS, INT16_LIMIT, Codes
from ..cpu_kernels.isa import INT4, INT4_K, INT8, INT8_K, INT16
from .program import Weight
from .weights import Checkpoint, check_weight

NEAREST = {"int8": INT8, "int4": INT4}
"""The formats that float32 can be rounded to, by the names that `dtype` has for them."""

Blocks = NDArray[np.uint8]  # (N, blocks, bytes of one)


def _codes(codes: NDArray[Any], scale: NDArray[Any], least: NDArray[Any] | None) -> Codes:
    """From (N, blocks, groups, size) codes and (N, blocks, groups) scales."""
    rows = len(codes)
    flat = None if least is None else least.reshape(rows, -1)
    return Codes(codes.reshape(rows, -1).astype(np.uint8), scale.reshape(rows, -1), flat)


def _half(blocks: Blocks, at: int) -> NDArray[np.float16]:
    """(N, blocks, 1): the float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _nibbles(data: NDArray[np.uint8], run: int) -> NDArray[np.uint8]:
    """(N, blocks, 2 bytes): of every `run` bytes first all low halves, then all high ones."""
    runs = data.reshape(*data.shape[:2], -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=-2).reshape(*data.shape[:2], -1)


def _bits(data: NDArray[np.uint8], width: int, run: int) -> NDArray[np.uint8]:
    """The same for fields of `width` bits: of every `run` bytes first all lowest fields, and so on upwards."""
    runs = data.reshape(*data.shape[:2], -1, 1, run)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8((1 << width) - 1)).reshape(*data.shape[:2], -1)


def _q8_0(blocks: Blocks) -> Codes:
    return _codes(blocks[..., 2:] ^ 0x80, _half(blocks, 0), None)


def _q4_0(blocks: Blocks) -> Codes:
    scale = _half(blocks, 0)
    return _codes(_nibbles(blocks[..., 2:], 16), scale, -8 * scale.astype(np.float32))


def _q4_1(blocks: Blocks) -> Codes:
    return _codes(_nibbles(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(N, blocks, 32): bit k of each block's 32."""
    return np.unpackbits(np.ascontiguousarray(data), axis=-1, bitorder="little").astype(np.uint8, copy=False)


def _in_sixteens(codes: NDArray[Any], scale: NDArray[Any], least: NDArray[Any]) -> Codes:
    """Groups of 32 as pairs of groups of 16."""
    rows = len(codes)
    pairs = [np.repeat(values.reshape(rows, -1), 2, axis=1) for values in (scale, least)]
    return Codes(codes.reshape(rows, -1).astype(np.uint8, copy=False), *pairs)


def _q5_0(blocks: Blocks) -> Codes:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6]) << 4
    scale = _half(blocks, 0).astype(np.float32)
    return _in_sixteens(codes, scale, -16 * scale)


def _q5_1(blocks: Blocks) -> Codes:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8]) << 4
    return _in_sixteens(codes, _half(blocks, 0), _half(blocks, 2))


def _nested_scales(blocks: Blocks) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(N, blocks, 8) scales and least values of Q4_K and Q5_K: 6-bit factors of two float16."""
    low, high = blocks[..., 4:12], blocks[..., 12:16]
    scale = np.concatenate([low[..., :4] & 63, high & 15 | (low[..., :4] >> 6) << 4], axis=-1)
    least = np.concatenate([low[..., 4:] & 63, high >> 4 | (low[..., 4:] >> 6) << 4], axis=-1)
    return _half(blocks, 0).astype(np.float32) * scale, -(_half(blocks, 2).astype(np.float32) * least)


def _q4_k(blocks: Blocks) -> Codes:
    return _codes(_nibbles(blocks[..., 16:], 32), *_nested_scales(blocks))


def _q5_k(blocks: Blocks) -> Codes:
    codes = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 1, 32) << 4
    return _in_sixteens(codes, *_nested_scales(blocks))


def _q6_k(blocks: Blocks) -> Codes:
    codes = _nibbles(blocks[..., :128], 64) | _bits(blocks[..., 128:192], 2, 32) << 4
    scale = _half(blocks, 208).astype(np.float32) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _codes(codes, scale, -32 * scale)


# Kind of a GGUF tensor -> bytes of a block, the format that holds its codes, and how they get there.
GGUF: dict[str, tuple[int, int, Callable[[Blocks], Codes]]] = {
    "Q8_0": (34, INT8, _q8_0),
    "Q4_0": (18, INT4, _q4_0),
    "Q4_1": (20, INT4, _q4_1),
    "Q5_0": (22, INT8_K, _q5_0),
    "Q5_1": (24, INT8_K, _q5_1),
    "Q4_K": (144, INT4_K, _q4_k),
    "Q5_K": (176, INT8_K, _q5_k),
    "Q6_K": (210, INT8_K, _q6_k),
}


def gguf_codes(kind: str, data: NDArray[np.uint8]) -> Codes:
    """The codes of a tensor (N, bytes of a row) of a kind in GGUF."""
    block_bytes, _, convert = GGUF[kind]
    return convert(data.reshape(len(data), -1, block_bytes))


def load_codes(checkpoint: Checkpoint, weight: Weight, weight_format: int) -> Codes:
    """A matrix in codes of `weight_format`: the file's own where they fit, else the nearest."""
    check_weight(checkpoint, weight)
    parts = []
    for name in weight.names:
        raw = checkpoint.raw(name)
        held = GGUF[raw.kind][1] if raw.kind in GGUF else None
        if held is not None and (held == weight_format or weight_format in (INT8_K, INT4_K)):
            codes = gguf_codes(raw.kind, raw.data)
            parts.append(codes if held == weight_format else widen(codes, weight_format, held))
        else:
            parts.append(nearest_codes(checkpoint.load(name).reshape(-1, weight.cols), weight_format))
    return joined(parts)


def nearest_codes(values: NDArray[np.float32], weight_format: int) -> Codes:
    """The nearest codes of a float32 matrix (N, K): with 16 and 8 bits around zero, with 4 from least up. K is filled
    up with zeros to whole groups."""
    if missing := -values.shape[1] % GROUP_FORMATS[weight_format].size:
        values = np.pad(values, ((0, 0), (0, missing)))
    rows = max(1, (1 << 20) // values.shape[1])  # of about 4 MiB, so that temporaries stay small
    parts = [_nearest(values[first : first + rows], weight_format) for first in range(0, len(values), rows)]
    return joined(parts)


def joined(parts: Sequence[Codes]) -> Codes:
    """Matrices of one format, one below the other."""
    least = [part.least for part in parts if part.least is not None]
    return Codes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate(least) if least else None,
    )


def _nearest(values: NDArray[np.float32], weight_format: int) -> Codes:
    group = GROUP_FORMATS[weight_format]
    groups = values.reshape(len(values), 1, -1, group.size)
    if weight_format == INT16:
        scale = np.abs(groups).max(axis=-1) / np.float32(INT16_LIMIT)
        codes = np.rint(groups / _nonzero(scale)).clip(-INT16_LIMIT, INT16_LIMIT).astype(np.int16)
        return Codes(codes.reshape(len(values), -1), scale.reshape(len(values), -1), None)
    if not group.has_least:
        scale = (np.abs(groups).max(axis=-1) / 127).astype(np.float16)
        return _codes(np.rint(groups / _nonzero(scale)).clip(-127, 127) + 128, scale, None)
    least = groups.min(axis=-1).astype(np.float16)
    scale = ((groups.max(axis=-1) - least) / 15).astype(np.float16)
    return _codes(np.rint((groups - least[..., None]) / _nonzero(scale)).clip(0, 15), scale, least)


def _nonzero(scale: NDArray[Any]) -> NDArray[np.float32]:
    return np.where(scale > 0, scale, 1).astype(np.float32)[..., None]


def widen(codes: Codes, weight_format: int, held: int) -> Codes:
    """The same numbers in a format that has more: what stacked tensors of several kinds need."""
    group, wide = GROUP_FORMATS[held], GROUP_FORMATS[weight_format]
    scale, least = codes.scale.astype(np.float32), codes.least
    if least is None:
        least = -(2.0 ** (group.bits - 1)) * scale
    repeats = group.size // wide.size
    return Codes(codes.codes, *(np.repeat(values.astype(np.float32), repeats, axis=1) for values in (scale, least)))
