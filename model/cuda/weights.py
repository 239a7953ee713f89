"""Weights of the CUDA back end: straight to the card, one after the other, matrices in the products' format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...cuda_kernels import weight_formats
from ..backend import Progress
from ..host_memory import Layout
from ..program import Embed, Linear, Logits, Program, Weight
from ..quantised import NEAREST, load_codes
from ..weights import Checkpoint, load_weight
from .device import Bytes, CudaDevice

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclass(frozen=True, slots=True)
class CudaWeights:
    """Addresses of all weights. Vectors are float32; matrices (rows, cols) of `element`, or packed as `packing` says.

    `packing` is "", int8 or int4 (cuda_kernels/weight_formats.py); packed matrices have their scales elsewhere.
    """

    addresses: dict[Weight, int]
    scales: dict[Weight, int]
    size: int
    element: str
    packing: str


def matrices(program: Program) -> set[Weight]:
    """The weights that products and gathers read; all others are vectors."""
    found = set()
    for op in program.ops:
        if isinstance(op, Linear | Logits):
            found.add(op.weight)
        elif isinstance(op, Embed):
            found.add(op.table)
    return found


def upload_weights(
    program: Program, checkpoint: Checkpoint, element: str, packing: str, device: CudaDevice, progress: Progress
) -> CudaWeights:
    """Load every weight once; only one is in host memory at a time. Raises MemoryError naming what to change."""
    wide, layout = matrices(program), Layout()
    offsets, scale_offsets = {}, {}
    for weight in program.weights():
        numbers = weight.rows * weight.cols
        if weight in wide and packing:
            codes, scales = weight_formats.packed_bytes(packing, weight.rows, weight.cols)
            offsets[weight], scale_offsets[weight] = layout.reserve(codes), layout.reserve(scales)
        else:
            offsets[weight] = layout.reserve(numbers * (np.dtype(DTYPES[element]).itemsize if weight in wide else 4))
    base = device.allocate(layout.size, "the weights", "use a smaller model or dtype")
    for weight, offset in offsets.items():
        progress("loading weights", offset / layout.size)
        parts = _parts(checkpoint, weight, DTYPES[element] if weight in wide else np.float32, packing, weight in wide)
        for part, at in zip(parts, (offset, scale_offsets.get(weight, 0)), strict=False):
            device.upload(base + at, part)
        device.synchronize()  # before `parts` go
    progress("loading weights", 1.0)
    return CudaWeights(
        {weight: base + offset for weight, offset in offsets.items()},
        {weight: base + offset for weight, offset in scale_offsets.items()},
        layout.size,
        element,
        packing,
    )


def _parts(checkpoint: Checkpoint, weight: Weight, dtype: Any, packing: str, wide: bool) -> tuple[Bytes, ...]:
    """What goes to the card: the numbers, or codes and scales."""
    if wide and packing:
        found = load_codes(checkpoint, weight, NEAREST[packing])
        return weight_formats.pack(found.codes, found.scale, found.least)
    values: NDArray[Any] = load_weight(checkpoint, weight).astype(dtype, copy=False)
    return (values.reshape(-1).view(np.uint8),)
