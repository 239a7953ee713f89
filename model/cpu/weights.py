"""Weights of the CPU back end: loaded once, packed into panels, held once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...cpu_kernels import packing
from ...cpu_kernels.groups import GROUP_FORMATS, pack_codes
from ...cpu_kernels.isa import BFLOAT16, FLOAT32, INT4, INT4_K, INT8, INT8_K, INT8_LONG, INT16
from ...cpu_kernels.packing import round_up
from ..backend import Progress
from ..host_memory import Bytes, Layout, map_bytes
from ..program import Embed, Linear, Logits, Program, Weight
from ..quantised import GGUF, load_codes
from ..weights import Checkpoint, load_weight
from .weight_cache import WeightCache, cache_name

# What `dtype` may say, and how matrices are held then unless the file holds codes of that width: in the first format
# of which their rows are whole groups. See `format_of`.
WEIGHT_DTYPES: dict[str, tuple[int, ...]] = {
    "auto": (BFLOAT16,),
    "float32": (FLOAT32,),
    "bfloat16": (BFLOAT16,),
    "int16": (INT16, BFLOAT16),
    "int8": (INT8_LONG, INT8, BFLOAT16),
    "int4": (INT4, BFLOAT16),
}
# Formats whose codes are taken over as they are where the file has such.
_KEPT = {"auto": (INT8, INT4, INT8_K, INT4_K), "int8": (INT8,), "int4": (INT4, INT4_K)}


WORTH_KEEPING_BYTES = 16 << 20  # less is packed in no time


def matrices(program: Program) -> set[Weight]:
    """The weights that a product or a gather reads in panels; all others are vectors."""
    found = set()
    for op in program.ops:
        if isinstance(op, Linear | Logits):
            found.add(op.weight)
        elif isinstance(op, Embed):
            found.add(op.table)
    return found


def format_of(checkpoint: Checkpoint, weight: Weight, dtype: str, *, prefers_codes: bool = False) -> int:
    """How a matrix is held. `auto` keeps the codes of quantised files, and holds everything else in 16 bits: as codes
    where the back end `prefers_codes`, else as bfloat16.

    Rows that are not whole groups cannot be codes; they are bfloat16 then.
    """
    kinds = {checkpoint.raw(name).kind for name in weight.names}
    if dtype in _KEPT and kinds <= GGUF.keys():
        held = {GGUF[kind][1] for kind in kinds}
        common = held.pop() if len(held) == 1 else INT4_K if held == {INT4, INT4_K} else INT8_K
        if common in _KEPT[dtype]:
            return common
    wanted = WEIGHT_DTYPES["int16" if dtype == "auto" and prefers_codes else dtype]
    return next(number for number in wanted if not weight.cols % group_size(number))


def group_size(weight_format: int) -> int:
    return GROUP_FORMATS[weight_format].size if weight_format in GROUP_FORMATS else 1


@dataclass(slots=True)
class PackedWeights:
    """All weights in one mapping; `addresses` says where each starts, `formats` how each matrix is held."""

    memory: Bytes
    addresses: dict[Weight, int]
    formats: Mapping[Weight, int]


def pack_weights(
    program: Program,
    checkpoint: Checkpoint,
    dtype: str,
    progress: Progress,
    cache: WeightCache | None = None,
    model_hash: str = "",
    *,
    prefers_codes: bool = False,
) -> PackedWeights:
    """Load every weight once and pack it. Only one unpacked weight is in memory at a time.

    With a `cache`, and `model_hash` saying what the checkpoint holds, they come from there if they were packed before.
    """
    panels, layout, offsets = matrices(program), Layout(), {}
    formats = {
        weight: format_of(checkpoint, weight, dtype, prefers_codes=prefers_codes)
        for weight in program.weights()
        if weight in panels
    }
    sizes = {}
    for weight in program.weights():
        if weight in panels:
            sizes[weight] = -(-weight.rows // 16) * packing.panel_bytes(formats[weight], weight.cols)
        else:
            sizes[weight] = round_up(weight.rows * weight.cols, 16) * 4
        offsets[weight] = layout.reserve(sizes[weight])
    memory = map_bytes(layout.size, "the weights", "use a smaller model or dtype")
    name = ""
    if cache is not None and layout.size >= WORTH_KEEPING_BYTES:
        placed = (f"{weight} {formats.get(weight)} {offset}" for weight, offset in offsets.items())
        name = cache_name([model_hash, *placed])
        progress("reading packed weights", 0.0)
    if not (cache and name and cache.load(name, memory)):
        for weight, offset in offsets.items():
            progress("packing weights", offset / layout.size)
            target = memory[offset : offset + sizes[weight]]
            target[:] = 0  # a cache that could not be believed may have left something
            _pack(checkpoint, weight, formats.get(weight), target)
        problem = cache.store(name, memory) if cache and name else ""
        progress(f"weights will be packed again next time: {problem}" if problem else "packing weights", 1.0)
    start = memory.ctypes.data
    return PackedWeights(memory, {weight: start + offset for weight, offset in offsets.items()}, formats)


def _pack(checkpoint: Checkpoint, weight: Weight, weight_format: int | None, target: Bytes) -> None:
    """Write one weight to `target`; a vector (no format) as float32."""
    if weight_format in GROUP_FORMATS:
        pack_codes(load_codes(checkpoint, weight, weight_format), weight_format, target)
        return
    values = load_weight(checkpoint, weight)
    if weight_format is None:
        target.view(np.float32)[: values.size] = values.reshape(-1)
    else:
        packing.pack(values, weight_format, target)
