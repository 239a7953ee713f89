"""What each CUDA kernel moves, by the counts of the PTX interpreter, and the time that these counts predict. No GPU.

    python -m bench.cuda_counts [--only decode,prefill,...]

Columns, for a launch as the back end makes it: bytes that the kernel must move, and bytes it moves (distinct 32-byte
sectors read and written: what a cache serves twice counts once); sectors of all loads and stores beside the fewest
that could hold the bytes asked for (less than 1 where lanes ask for the same ones); the worst bank conflict of shared
memory; bytes read from shared memory for each multiplication on tensor cores. Then what an H200 needs at least: for the
bytes at 4.3 TB/s (a copy rate known of such a card, not measured by us; its peak is 4.8), for its schedulers to issue
the warp instructions, and for its shared memory; and the share of that copy rate which the useful bytes (of decode: K
and V) reach if the slowest of the three decides. Latency, launches and caches are in no count: these are bounds.

Decode is counted for one sequence and multiplied: sequences share no block.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.model.quantised import NEAREST, nearest_codes
from tests.ptx import Counters, Device
from tests.support.cuda_attention import decode_attention, make_batch, prefill_attention
from tests.support.cuda_rooms import (
    activations,
    block_copy,
    embedding,
    kv_write,
    layout,
    norms,
    paged_decode,
    quantised_matmul,
    skinny_matmul,
    tiles,
    weight_formats,
)
from tests.support.cuda_run import launch
from tests.support.cuda_twins import stored

COPY_BYTES_S = 4.3e12
CLOCKS_S = 132 * 1.7e9  # multiprocessors, clock under load: each issues 4 instructions and serves 1 wavefront a clock
MMA_PAIRS = 16 * 8 * 16  # multiplications of one `mma` of a warp

LLAMA = layout.AttentionShape(32, 8, 128, 16, "bfloat16")  # Llama-3-8B
QWEN = layout.AttentionShape(14, 2, 64, 16, "bfloat16")  # Qwen2.5-0.5B


@dataclass(frozen=True, slots=True)
class Counted:
    """One launch (or `times` as much): what it must move and what was counted."""

    name: str
    must_bytes: float
    counters: Counters
    times: int = 1
    useful_bytes: float = 0.0  # 0: all that must move

    @property
    def moved_bytes(self) -> int:
        return self.counters.footprint_read_bytes + self.counters.footprint_written_bytes

    @property
    def ratio(self) -> float:
        return self.moved_bytes / self.must_bytes

    @property
    def sector_ratio(self) -> float:
        """Sectors of all accesses beside the fewest possible."""
        ideal = self.counters.total("ideal_sectors", "global")
        return self.counters.total("sectors", "global") / ideal if ideal else 1.0

    @property
    def memory_s(self) -> float:
        return self.times * self.moved_bytes / COPY_BYTES_S

    @property
    def issue_s(self) -> float:
        return self.times * self.counters.warp_instructions / (4 * CLOCKS_S)

    @property
    def shared_s(self) -> float:
        return self.times * self.counters.shared_wavefronts / CLOCKS_S

    @property
    def copy_share(self) -> float:
        """The useful bytes, in the time predicted, as a share of the copy rate."""
        useful = self.times * (self.useful_bytes or self.must_bytes)
        return useful / max(self.memory_s, self.issue_s, self.shared_s) / COPY_BYTES_S

    @property
    def shared_bytes_per_multiply(self) -> float:
        """Bytes read from shared memory for each multiplication on tensor cores."""
        products = sum(line.warps for line in self.counters.lines if line.opcode.startswith("mma"))
        read = self.counters.total("bytes", "shared", "load")
        return read / (products * MMA_PAIRS) if products else 0.0

    def line(self) -> str:
        """A row of the table."""
        ways, shared = self.counters.max_bank_ways, self.shared_bytes_per_multiply
        banks, per_multiply = f"{ways}-way" if ways else "-", f"{shared:.3f}" if shared else "-"
        must = self.times * self.must_bytes / 1e6
        counted = f"{must:>9.2f} {self.ratio:>6.3f}x {self.sector_ratio:>6.3f}x {banks:>6} {per_multiply:>6}"
        times = f"{self.memory_s * 1e6:>8.2f} {self.issue_s * 1e6:>8.2f} {self.shared_s * 1e6:>8.2f}"
        return f"{self.name:<39} {counted} {times} {self.copy_share:>5.0%}"


HEADER = (
    f"{'':<39} {'must':>9} {'':>7} {'':>7} {'':>6} {'bytes/':>6} {'memory':>8} {'issue':>8} {'shared':>8}\n"
    f"{'kernel':<39} {'MB':>9} {'moved':>7} {'sectors':>7} {'banks':>6} {'mult.':>6} {'us':>8} {'us':>8} {'us':>8} "
    "share"
)


def decode(shape: layout.AttentionShape, sequences: int, context: int) -> Counted:
    """`must`: K and V once per KV head (with scales), queries, outputs, and parts written and read."""
    batch = make_batch(shape, [context])
    _, counters = decode_attention(batch)
    width, splits = shape.num_heads * shape.head_dim, -(-context // layout.SPLIT_TOKENS)
    itemsize = batch.pool.itemsize
    kv = 2 * context * shape.num_kv_heads * (shape.head_dim * itemsize + (4 if itemsize == 1 else 0))
    parts = 2 * splits * (width + shape.num_heads) * 4 if splits > 1 else 0
    heads = f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}"
    name = f"decode {sequences} x {context}, {heads}, {shape.kv}"
    return Counted(name, kv + width * 6 + parts, counters, sequences, kv)


def cascade(shape: layout.AttentionShape, sequences: int, shared: int, own: int) -> Counted:
    """Sequences with a common prefix, which is read once for as many rows as a tile holds."""
    batch = make_batch(shape, [shared + own] * sequences, shared=shared)
    columns = paged_decode.max_columns(shape)
    plan = tiles.row_tiles(batch.query_start, batch.seq_lens, paged_decode.rows_per_tile(shape, columns))
    plan = tiles.shared_prefix_tiles(plan, [(list(range(sequences)), shared)])
    _, counters = decode_attention(batch, columns=columns, plan=plan)
    width, splits = shape.num_heads * shape.head_dim, -(-(shared + own) // layout.SPLIT_TOKENS)
    kv = 2 * (shared + sequences * own) * shape.num_kv_heads * shape.head_dim * 2
    must = kv + sequences * (width * 6 + 2 * splits * (width + shape.num_heads) * 4)
    return Counted(f"decode {sequences} x ({shared} shared + {own})", must, counters, 1, kv)


def prefill(shape: layout.AttentionShape, queries: int, context: int) -> Counted:
    batch = make_batch(shape, [context], [queries])
    _, counters = prefill_attention(batch)
    kv = 2 * context * shape.num_kv_heads * shape.head_dim * 2
    must = kv + queries * shape.num_heads * shape.head_dim * 6
    heads = f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}"
    return Counted(f"prefill {queries} of {context}, {heads}", must, counters)


def product(rows: int, outputs: int, width: int, packing: str = "") -> Counted:
    """A skinny product; `must`: weights once, rows, outputs."""
    device, random = Device(), np.random.default_rng(0)
    x = device.array(stored(random.normal(0, 1, (rows, width)), "bfloat16"))
    numbers = random.normal(0, 0.1, (outputs, width)).astype(np.float32)
    wide, columns = skinny_matmul.tile(rows)
    if packing:
        codes = nearest_codes(numbers, NEAREST[packing])
        packed = [each.view(np.uint32) for each in weight_formats.pack(codes.codes, codes.scale, codes.least)]
        kernel, wide = quantised_matmul.quantised_matmul(packing, "bfloat16", columns), 1
    else:
        packed = [stored(numbers, "bfloat16")]
        kernel = skinny_matmul.skinny_matmul("bfloat16", wide, columns)
    out = device.empty((rows, outputs), np.float32)
    grid = -(-outputs // (16 * wide)), -(-rows // (8 * columns))
    weights = [device.array(each) for each in packed]
    counters = launch(device, kernel, grid, x, *weights, device.zeros(1), out, rows, outputs, width, 0, 0)
    must = sum(each.nbytes for each in packed) + rows * (2 * width + 4 * outputs)
    return Counted(f"product {rows} x {width} x {outputs}, {packing or 'bfloat16'}", must, counters)


def on_rows(rows: int, shape: layout.AttentionShape, width: int) -> Iterator[Counted]:
    """Norm, activation, gather, RoPE with the KV write, block copy."""
    random = np.random.default_rng(0)

    def numbers(*size: int) -> Any:
        return random.normal(0, 1, size).astype(np.float32)

    device = Device()
    x, weight, out = (
        device.array(numbers(rows, width)),
        device.array(numbers(width)),
        device.empty((rows, width), np.uint16),
    )
    counters = launch(device, norms.rms_norm("bfloat16"), (rows,), x, weight, out, width, 1e-5)
    yield Counted(f"rms_norm {rows} x {width}", rows * width * 6 + width * 4, counters)

    gate_up = device.array(numbers(rows, 2 * width))
    grid = -(-width // (4 * activations.THREADS)), rows
    counters = launch(device, activations.gated_activation("silu", "bfloat16"), grid, gate_up, out, width)
    yield Counted(f"gated_silu {rows} x {width}", rows * width * 10, counters)

    table, ids = device.array(stored(numbers(64, width), "bfloat16")), device.array(np.arange(rows, dtype=np.int32))
    wide = device.empty((rows, width), np.float32)
    grid = -(-width // (4 * embedding.THREADS)), rows
    counters = launch(device, embedding.gather_rows("bfloat16"), grid, table, ids, wide, width, 1.0)
    yield Counted(f"gather {rows} x {width}", rows * (width * 6 + 4), counters)

    qkv = device.array(numbers(rows, shape.qkv_width))
    pool = device.empty((rows, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), np.uint16)
    half = shape.head_dim // 2
    given = np.arange(rows, dtype=np.int32), 16 * np.arange(rows), *numbers(2, rows, half), *numbers(2, shape.head_dim)
    tables = [device.array(each) for each in given]
    heads = shape.num_heads + 2 * shape.num_kv_heads
    grid = -(-heads // kv_write.HEADS_PER_BLOCK), rows
    kernel = kv_write.kv_write(shape, shape.head_dim, False)
    counters = launch(device, kernel, grid, qkv, *tables, pool, device.zeros(1), 1e-6)
    must = rows * (shape.head_dim * (8 * shape.num_heads + 2 * 6 * shape.num_kv_heads) + 8 * half + 12)
    yield Counted(f"rope and kv_write {rows} rows", must, counters)

    words = 2 * shape.num_kv_heads * shape.plane * 2 // 16
    blocks, moved = device.array(numbers(8, 4 * words)), device.empty((8, 4 * words), np.uint32)
    ids = device.array(np.arange(8, dtype=np.int32))
    grid = -(-words // block_copy.WORDS_PER_BLOCK), 8, 1
    strides = words, 0, words, 0
    counters = launch(device, block_copy.copy_blocks(), grid, blocks, moved, ids, ids, *strides, words)
    yield Counted("copy_blocks, 8 blocks of a layer", 2 * 8 * 16 * words + 64, counters)


GROUPS: dict[str, Callable[[], Iterator[Counted]]] = {
    "decode": lambda: (
        decode(shape, sequences, context)
        for shape, sequences, context in (
            (LLAMA, 64, 4096),
            (QWEN, 64, 4096),
            (layout.AttentionShape(32, 8, 128, 16, "int8"), 64, 4096),
            (layout.AttentionShape(32, 8, 128, 16, "float8_e4m3"), 64, 4096),
            (LLAMA, 1, 4096),
            (LLAMA, 256, 300),
        )
    ),
    "cascade": lambda: iter([cascade(layout.AttentionShape(8, 2, 128, 16, "bfloat16"), 8, 1024, 64)]),
    "prefill": lambda: (
        prefill(shape, queries, context)
        for shape, queries, context in (
            (layout.AttentionShape(8, 2, 128, 16, "bfloat16"), 512, 512),
            (layout.AttentionShape(7, 1, 64, 16, "bfloat16"), 512, 512),
            (layout.AttentionShape(8, 2, 128, 16, "bfloat16"), 64, 1024),
        )
    ),
    "product": lambda: (
        product(rows, 256, 4096, packing)
        for packing in ("", "int8", "int4")
        for rows in ((1, 8, 64) if not packing else (1, 64))
    ),
    "rows": lambda: on_rows(8, LLAMA, 4096),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS))
    options = parser.parse_args()
    print("python -m bench.cuda_counts")
    print(HEADER)
    for name in options.only.split(","):
        for counted in GROUPS[name]():
            print(counted.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
