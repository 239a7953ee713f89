"""A matrix product over any panels: cuts rows and panels into register tiles."""

from __future__ import annotations

from .jit import kernel
from .tile import max_tile_rows, tile, widest_tile
from .variant import Variant


@kernel
def product(
    variant: Variant,
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
    segments: int,
    k: int,
    last_k: int,
    step_stride: int,
    out: int,
    out_stride: int,
    bias: int,
    accumulate: int,
) -> None:
    """out (rows, 16 panels) (+)= x (rows, k) times panels, with the arguments of `tile`.

    Rows are cut evenly (7 = 4 + 3, not 6 + 1), because a tile with few rows is slow and streams the panels once more.
    """
    row = 0
    tiles = (rows + max_tile_rows(variant) - 1) // max_tile_rows(variant)
    for index in range(tiles):
        height = (rows - row + tiles - index - 1) // (tiles - index)
        panel = 0
        while panel < panels:
            width = widest_tile(variant, height, panels - panel)
            arguments = (
                x + row * x_stride,
                x_stride,
                table + panel * panel_step,
                segment_step,
                panel_step,
                panel_stride,
                panel_offset + panel * panel_stride,
                segments,
                k,
                last_k,
                step_stride,
                out + row * out_stride + panel * 64,
                out_stride,
                bias + panel * 64 if bias else 0,
                accumulate,
            )
            tile(variant, weight_format, height, width, arguments)
            panel += width
        row += height
