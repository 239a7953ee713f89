"""Rows picked by number: the embedding, out[t] = table[ids[t]] * scale, and the rows that need logits (scale 1).

Grid (ceil(width / 512), num_rows), 128 threads, four neighbours a thread; for packed tables (ceil(width / 1024),
num_rows), eight neighbours a thread.

    table  (num_entries, width) float32 or 16-bit, width a multiple of 4; or codes and scales (weight_formats.py),
           width a multiple of 8
    ids    (num_rows,) int32, each within the table; -1, the token of a row in error, is read as 0
    out    (num_rows, width) float32
"""

from __future__ import annotations

from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, Kernel, build, pointer
from .elements import ELEMENTS
from .intrinsics import f16_to_f32, load_u32x2, store_f32x4
from .jit import cuda, device_function, types

THREADS = 128


@kernel_factory
def gather_rows(table: str = "float32") -> Kernel:
    """Kernel for a table of format `table`."""
    load_table = ELEMENTS[table].load4

    def gather_rows(table: Any, ids: Any, out: Any, width: Any, scale: Any) -> None:
        row = types.int64(cuda.blockIdx.y)
        column = 4 * (cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if column < width:
            a, b, c, d = load_table(table, types.int64(max(ids[row], 0)) * width + column)
            store_f32x4(out, row * width + column, a * scale, b * scale, c * scale, d * scale)

    arguments = {
        "table": pointer(ELEMENTS[table].stored),
        "ids": pointer(INT32),
        "out": pointer(FLOAT32),
        "width": INT32,
        "scale": FLOAT32,
    }
    return build(gather_rows, arguments, name="gather_rows", threads=THREADS, registers=32)


@device_function
def _scale_and_least(scales: Any, tile: Any, row: Any, half: Any, four_bits: Any) -> Any:
    """Of one group of 32, as float32. `row` within the tile of 16."""
    if four_bits:
        packed = scales[tile * 32 + 4 * (row & 7) + 2 * half + (row >> 3)]
        return f16_to_f32(types.uint16(packed)), f16_to_f32(types.uint16(packed >> types.uint32(16)))
    packed = scales[tile * 16 + 2 * (row & 7) + (row >> 3)]
    return f16_to_f32(types.uint16(packed >> types.uint32(16 * half))), types.float32(0)


@kernel_factory
def gather_packed_rows(weights: str) -> Kernel:
    """Kernel for a table packed as int8 or int4."""
    four_bits = weights == "int4"

    def gather_packed_rows(codes: Any, scales: Any, ids: Any, out: Any, width: Any, scale: Any) -> None:
        token = types.int64(cuda.blockIdx.y)
        column = 8 * (cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if column >= width:
            return
        entry = max(ids[token], 0)
        tile = types.int64(entry // 16) * ((width + 63) // 64) + column // 64
        row, half = entry % 16, column % 64 // 32
        lane = 4 * (row & 7) + column % 32 // 8
        group_scale, least = _scale_and_least(scales, tile, row, half, four_bits)
        values = cuda.local.array(8, types.float32)
        if four_bits:
            word = codes[tile * 128 + 4 * lane + 2 * half + (row >> 3)]
            for i in range(8):
                values[i] = types.float32((word >> types.uint32(4 * ((i >> 1) + 4 * (i & 1)))) & types.uint32(15))
        else:
            low, high = load_u32x2(codes, tile * 256 + 128 * half + 4 * lane + 2 * (row >> 3))
            for i in range(4):
                values[i] = types.float32(types.int8(low >> types.uint32(8 * i)))
                values[4 + i] = types.float32(types.int8(high >> types.uint32(8 * i)))
        for i in range(8):
            values[i] = (values[i] * group_scale + least) * scale
        at = token * width + column
        store_f32x4(out, at, values[0], values[1], values[2], values[3])
        store_f32x4(out, at + 4, values[4], values[5], values[6], values[7])

    arguments = {
        "codes": pointer(types.uint32),
        "scales": pointer(types.uint32),
        "ids": pointer(INT32),
        "out": pointer(FLOAT32),
        "width": INT32,
        "scale": FLOAT32,
    }
    name = f"gather_packed_rows_{weights}"
    return build(gather_packed_rows, arguments, name=name, threads=THREADS, registers=48)
