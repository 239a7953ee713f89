"""A matrix product over any panels: cuts rows and panels into register tiles."""

from __future__ import annotations

from .jit import kernel
from .memory import load_i64
from .tile import TABLE_SHAPE, call_tile

FORMAT_BYTES = TABLE_SHAPE[1] * TABLE_SHAPE[2] * 16
ROW_BYTES = TABLE_SHAPE[2] * 16


@kernel
def product(
    tiles: int,
    weight_format: int,
    rows: int,
    panels: int,
    x: int,
    x_stride: int,
    table: int,
    segment_step: int,
    panel_step: int,
    panel_stride: int,
    panel_offset: int,
    blocks: int,
    block_stride: int,
    segments: int,
    k: int,
    last_k: int,
    step_stride: int,
    out: int,
    out_stride: int,
    bias: int,
    accumulate: int,
) -> None:
    """out (rows, 16 panels) (+)= x (rows, k) times panels, with `tiles` from `tile_table` and the arguments of a tile.

    Rows are cut evenly (7 = 4 + 3, not 6 + 1), because a tile with few rows is slow and streams the panels once more.
    """
    row = 0
    table_of_format = tiles + weight_format * FORMAT_BYTES
    most = load_i64(table_of_format)
    cuts = (rows + most - 1) // most
    for index in range(cuts):
        height = (rows - row + cuts - index - 1) // (cuts - index)
        panel = 0
        while panel < panels:
            entry = table_of_format + height * ROW_BYTES + min(panels - panel, TABLE_SHAPE[2] - 1) * 16
            arguments = (
                x + row * x_stride,
                x_stride,
                table + panel * panel_step,
                segment_step,
                panel_step,
                panel_stride,
                panel_offset + panel * panel_stride,
                blocks,
                block_stride,
                segments,
                k,
                last_k,
                step_stride,
                out + row * out_stride + panel * 64,
                out_stride,
                bias + panel * 64 if bias else 0,
                accumulate,
            )
            call_tile(load_i64(entry), arguments)
            panel += load_i64(entry + 8)
        row += height
