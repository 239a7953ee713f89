"""A matrix product over any panels: cuts rows and panels into register tiles."""

from __future__ import annotations

from .jit import kernel
from .memory import call_address, load_i64
from .tile import TABLE_SHAPE

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
    totals: int,
    totals_stride: int,
    out: int,
    out_stride: int,
    bias: int,
    accumulate: int,
    ahead_table: int,
    ahead_step: int,
    ahead_segment_step: int,
    ahead_offset: int,
    ahead_forward: int,
    ahead_span: int,
    step_bytes: int = 64,
) -> None:
    """out (rows, 16 panels) (+)= x (rows, k) times panels, with `tiles` from `tile_table` and the arguments of a tile.

    Rows are cut evenly (7 = 4 + 3, not 5 + 2), because a tile with few rows is slow. Where there is more than one cut,
    all rows pass one panel before the next, which arrives from memory meanwhile: each tile asks for its share of the
    `ahead_span` bytes that will be read. Where there is one, `step_bytes` are asked for in each step.
    """
    formats = tiles + weight_format * FORMAT_BYTES
    cuts = (rows + load_i64(formats) - 1) // load_i64(formats)
    # Divisions are slow beside a tile: each once.
    low, num_taller, share_of_cut = rows // cuts, rows % cuts, ahead_span // cuts
    asked = step_bytes // cuts
    panel = 0
    while panel < panels:
        row, width, groups = 0, panels - panel, 1
        for taller in (1, 0):
            count, height = num_taller if taller else cuts - num_taller, low + taller
            if count == 0:
                continue
            entry = formats + height * ROW_BYTES + min(width, TABLE_SHAPE[2] - 1) * 16
            width = load_i64(entry + 8)  # the first tile is the tallest; lower ones exist at its width
            groups = (panels - panel) // width if cuts == 1 else 1
            share = width * (ahead_forward + (0 if taller else num_taller * share_of_cut)) if cuts > 1 else 0
            arguments = (
                x + row * x_stride,
                x_stride,
                count,
                groups,
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
                totals + row * totals_stride + panel * 64 if totals else 0,
                totals_stride,
                out + row * out_stride + panel * 64,
                out_stride,
                bias + panel * 64 if bias else 0,
                accumulate,
                ahead_table + panel * ahead_step,
                ahead_step,
                ahead_segment_step,
                ahead_offset + panel * ahead_forward + share,
                ahead_forward,
                asked * width if cuts > 1 else step_bytes,
                width * share_of_cut,
            )
            call_address(load_i64(entry), arguments)
            row += count * height
        panel += width * groups
