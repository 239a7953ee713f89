"""Weights of the CUDA back end: straight to the card, one after the other, matrices in the products' format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .backend import Progress
from .cpu_memory import Layout
from .cuda_device import CudaDevice
from .program import Embed, Linear, Logits, Program, Weight
from .weights import Checkpoint, load_weight

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclass(frozen=True, slots=True)
class CudaWeights:
    """Addresses of all weights; matrices are (rows, cols) of `element`, vectors float32."""

    addresses: dict[Weight, int]
    size: int
    element: str


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
    program: Program, checkpoint: Checkpoint, element: str, device: CudaDevice, progress: Progress
) -> CudaWeights:
    """Load every weight once; only one is in host memory at a time. Raises MemoryError naming what to change."""
    wide, layout = matrices(program), Layout()
    itemsizes = {weight: np.dtype(DTYPES[element]).itemsize if weight in wide else 4 for weight in program.weights()}
    offsets = {weight: layout.reserve(weight.rows * weight.cols * size) for weight, size in itemsizes.items()}
    base = device.allocate(layout.size, "the weights", "use a smaller model or dtype")
    for weight, offset in offsets.items():
        progress("loading weights", offset / layout.size)
        values: NDArray[Any] = load_weight(checkpoint, weight)
        if weight in wide:
            values = values.astype(DTYPES[element], copy=False)
        device.upload(base + offset, values.reshape(-1).view(np.uint8))
        device.synchronize()  # before `values` goes
    progress("loading weights", 1.0)
    return CudaWeights({weight: base + offset for weight, offset in offsets.items()}, layout.size, element)
