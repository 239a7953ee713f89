"""Whole blocks, all layers, copied between two arrays of blocks: copy-on-write, and gather or scatter for swap.

A block is one piece per layer (layout.py: pieces of a layer are neighbours). Each array states its strides, so one
kernel serves pool to pool, pool to a packed staging buffer (one block after the other), and back.

Grid (ceil(piece / 512), num_copies, num_layers), 128 threads, four 16-byte words a thread.

    source, destination                 arrays of 16-byte words; no destination block may be a source of the same call
    source_blocks, destination_blocks   (num_copies,) int32
    *_block_stride, *_layer_stride      words from one block (layer) to the next
    piece                               words of one block in one layer
"""

from __future__ import annotations

from typing import Any

from .cache import kernel_factory
from .compiler import INT32, INT64, Kernel, build, pointer
from .intrinsics import load_u32x4, store_u32x4
from .jit import cuda, types

THREADS = 128
WORDS_PER_THREAD = 4
WORDS_PER_BLOCK = THREADS * WORDS_PER_THREAD


@kernel_factory
def copy_blocks() -> Kernel:
    """The kernel; a word is four uint32, so strides are multiplied by 4 to index."""

    def copy_blocks(
        source: Any,
        destination: Any,
        source_blocks: Any,
        destination_blocks: Any,
        source_block_stride: Any,
        source_layer_stride: Any,
        destination_block_stride: Any,
        destination_layer_stride: Any,
        piece: Any,
    ) -> None:
        copy, layer = cuda.blockIdx.y, types.int64(cuda.blockIdx.z)
        start = source_blocks[copy] * source_block_stride + layer * source_layer_stride
        end = destination_blocks[copy] * destination_block_stride + layer * destination_layer_stride
        first = cuda.blockIdx.x * WORDS_PER_BLOCK + cuda.threadIdx.x
        for i in range(WORDS_PER_THREAD):
            word = first + i * THREADS
            if word < piece:
                a, b, c, d = load_u32x4(source, 4 * (start + word))
                store_u32x4(destination, 4 * (end + word), a, b, c, d)

    arguments = {
        "source": pointer(types.uint32),
        "destination": pointer(types.uint32),
        "source_blocks": pointer(INT32),
        "destination_blocks": pointer(INT32),
        "source_block_stride": INT64,
        "source_layer_stride": INT64,
        "destination_block_stride": INT64,
        "destination_layer_stride": INT64,
        "piece": INT32,
    }
    return build(copy_blocks, arguments, name="copy_blocks", threads=THREADS, registers=40)
