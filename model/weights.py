"""Weights by their Hugging Face tensor names, whatever file format holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import ModelError
from .program import Weight

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as its file stores it. Where no row had to be moved, `data` is a view of the mapped file.

    `kind` is F32, F16, BF16 (then `data` has `shape` and that dtype), or a GGUF block type such as Q4_1 or Q6_K (then
    `data` is (rows, bytes per row) uint8 and every row is whole blocks).
    """

    kind: str
    shape: tuple[int, ...]
    data: NDArray[Any]


class Checkpoint(Protocol):
    """Lazy access to one model's tensors. Nothing is read before it is asked for, nothing is kept after."""

    def names(self) -> Iterable[str]:
        """Canonical tensor names."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelError if there is no such tensor."""

    def raw(self, name: str) -> RawTensor:
        """As stored, rows in Hugging Face's order. Raises ModelError if there is no such tensor."""

    def load(self, name: str) -> Float32:
        """`shape(name)` float32, dequantised. May be a read-only view of the file. Raises ModelError."""


def load_weight(checkpoint: Checkpoint, weight: Weight) -> Float32:
    """(rows, cols) float32, writable: the tensors of `weight` one below the other, plus its offset.

    Raises ModelError where the checkpoint lacks a tensor or its shape does not fit.
    """
    check_weight(checkpoint, weight)
    out = np.empty((weight.rows, weight.cols), dtype=np.float32)
    row = 0
    for name in weight.names:
        part = checkpoint.load(name).reshape(-1, weight.cols)
        out[row : row + len(part)] = part
        row += len(part)
    if weight.offset:
        out += np.float32(weight.offset)
    return out


def check_weight(checkpoint: Checkpoint, weight: Weight) -> None:
    """Raise ModelError unless the tensors of `weight` exist and stack to (rows, cols). Reads no data."""
    shapes = [checkpoint.shape(name) for name in weight.names]
    for name, shape in zip(weight.names, shapes, strict=True):
        if (shape[1:] or (1,)) != (weight.cols,):
            raise ModelError(f"tensor {name} has shape {shape}; config.json says {weight.cols} columns")
    rows = sum(shape[0] for shape in shapes)
    if rows != weight.rows:
        raise ModelError(f"{', '.join(weight.names)}: {rows} rows; the model's configuration says {weight.rows}")
