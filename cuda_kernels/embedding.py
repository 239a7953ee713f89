"""Rows picked by number: the embedding, out[t] = table[ids[t]] * scale, and the rows that need logits (scale 1).

Grid (ceil(width / 512), num_rows), 128 threads, four neighbours a thread.

    table  (num_entries, width) float32 or 16-bit, width a multiple of 4
    ids    (num_rows,) int32, each within the table
    out    (num_rows, width) float32
"""

from __future__ import annotations

from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, Kernel, build, pointer
from .elements import ELEMENTS
from .intrinsics import store_f32x4
from .jit import cuda, types

THREADS = 128


@kernel_factory
def gather_rows(table: str = "float32") -> Kernel:
    """Kernel for a table of format `table`."""
    load_table = ELEMENTS[table].load4

    def gather_rows(table: Any, ids: Any, out: Any, width: Any, scale: Any) -> None:
        row = types.int64(cuda.blockIdx.y)
        column = 4 * (cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if column < width:
            a, b, c, d = load_table(table, types.int64(ids[row]) * width + column)
            store_f32x4(out, row * width + column, a * scale, b * scale, c * scale, d * scale)

    arguments = {
        "table": pointer(ELEMENTS[table].stored),
        "ids": pointer(INT32),
        "out": pointer(FLOAT32),
        "width": INT32,
        "scale": FLOAT32,
    }
    return build(gather_rows, arguments, name="gather_rows", threads=THREADS, registers=32)
