"""Random weights as GGUF blocks of any kind, for any Program."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvpool.model.batch import Float32
from kvpool.model.program import Program
from kvpool.model.weights import RawTensor
from tests.support.random_checkpoint import RandomCheckpoint

# Kind -> byte offsets of the float16 in a block; everything else may be any bits.
_HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip


def random_blocks(kind: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """(rows, bytes) uint8: blocks of arbitrary codes whose scales keep a product of unit rows near unit size."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, cols // values, size), dtype=np.uint8)
    largest = {"Q8_0": 128, "Q6_K": 128 * 32}.get(kind, 64 * 16 if kind.endswith("K") else 16)
    for offset in _HALVES[kind]:
        scale = random.uniform(-2, 2, (rows, cols // values, 1)) / largest / np.sqrt(cols)
        blocks[..., offset : offset + 2] = scale.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


class BlockCheckpoint(RandomCheckpoint):
    """RandomCheckpoint with the matrices that `kinds` names as blocks of those kinds; "" names all other matrices."""

    def __init__(self, program: Program, kinds: Mapping[str, str]) -> None:
        super().__init__(program)
        self._kinds = kinds

    def names(self) -> Iterable[str]:
        return self.shapes

    def raw(self, name: str) -> RawTensor:
        shape = self.shapes[name]
        kind = self._kinds.get(name, self._kinds.get(""))
        if len(shape) == 1 or kind is None:
            return super().raw(name)
        return RawTensor(kind, shape, random_blocks(kind, *shape, seed=zlib.crc32(name.encode())))

    def load(self, name: str) -> Float32:
        kind = self._kinds.get(name, self._kinds.get(""))
        if len(self.shapes[name]) == 1 or kind is None:
            return super().load(name)
        values: Float32 = dequantize(self.raw(name).data, GGMLQuantizationType[kind])
        return values
