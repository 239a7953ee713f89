"""Weights of the CPU back end: loaded once, packed into panels, held once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cpu_kernels import packing
from ..cpu_kernels.packing import round_up
from .backend import Progress
from .cpu_memory import Bytes, Layout, map_bytes
from .program import Embed, Linear, Logits, Program, Weight
from .weights import Checkpoint, load_weight


def matrices(program: Program) -> set[Weight]:
    """The weights that a product or a gather reads in panels; all others are vectors."""
    found = set()
    for op in program.ops:
        if isinstance(op, Linear | Logits):
            found.add(op.weight)
        elif isinstance(op, Embed):
            found.add(op.table)
    return found


@dataclass(slots=True)
class PackedWeights:
    """All weights in one mapping; `addresses` says where each starts."""

    memory: Bytes
    addresses: dict[Weight, int]
    weight_format: int


def pack_weights(program: Program, checkpoint: Checkpoint, weight_format: int, progress: Progress) -> PackedWeights:
    """Load every weight once and pack it. Only one unpacked weight is in memory at a time."""
    panels, layout, offsets = matrices(program), Layout(), {}
    sizes = {}
    for weight in program.weights():
        if weight in panels:
            sizes[weight] = -(-weight.rows // 16) * packing.panel_bytes(weight_format, weight.cols)
        else:
            sizes[weight] = round_up(weight.rows * weight.cols, 16) * 4
        offsets[weight] = layout.reserve(sizes[weight])
    memory = map_bytes(layout.size, "the weights", "use a smaller model or dtype")
    for weight, offset in offsets.items():
        progress("loading weights", offset / layout.size)
        values, target = load_weight(checkpoint, weight), memory[offset : offset + sizes[weight]]
        if weight in panels:
            packing.pack(values, weight_format, target)
        else:
            target.view(np.float32)[: values.size] = values.reshape(-1)
    progress("loading weights", 1.0)
    start = memory.ctypes.data
    return PackedWeights(memory, {weight: start + offset for weight, offset in offsets.items()}, weight_format)
