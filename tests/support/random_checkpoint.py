"""Random weights for any Program: a checkpoint that makes up whatever tensor it is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from kvpool.model.batch import Float32
from kvpool.model.program import Program
from kvpool.model.weights import RawTensor


class RandomCheckpoint:
    """Fulfils `kvpool.model.weights.Checkpoint`. The same name and shape give the same values, in any order.

    A weight of several tensors is divided evenly over them. Matrices are scaled to keep rows of unit size; vectors
    stay near 1.
    """

    def __init__(self, program: Program) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        for weight in program.weights():
            rows, rest = divmod(weight.rows, len(weight.names))
            if rest:
                raise ValueError(f"{weight.names}: {weight.rows} rows do not divide evenly")
            for name in weight.names:
                self.shapes[name] = (rows,) if weight.cols == 1 else (rows, weight.cols)

    def names(self) -> Iterable[str]:
        return self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def raw(self, name: str) -> RawTensor:
        return RawTensor("F32", self.shapes[name], self.load(name))

    def load(self, name: str) -> Float32:
        shape = self.shapes[name]
        random = np.random.default_rng(zlib.crc32(name.encode()))
        if len(shape) == 1:
            return random.normal(1.0, 0.1, shape).astype(np.float32)
        return (random.normal(0.0, 1.5, shape) / np.sqrt(shape[1])).astype(np.float32)
