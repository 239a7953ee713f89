"""What a block contains as numbers: keys and values in the layouts of both back ends, read back with NumPy.

For people who want to look at a sequence's K and V, not for attention: (num_blocks, num_layers, 2, block_size,
num_kv_heads, head_dim) float32, whatever the pool's format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..cpu_kernels.isa import BFLOAT16, CODES, FLOAT16, FLOAT32
from ..cpu_kernels.kv_formats import KvFormat
from ..cpu_kernels.packing import round_up
from .batch import Float32
from .config import ModelConfig

if TYPE_CHECKING:
    from ..cuda_kernels.layout import AttentionShape
    from .cpu.program import PoolLayout

Bytes = NDArray[np.uint8]


def panels_as_numbers(data: Bytes, layout: PoolLayout, config: ModelConfig, block_size: int) -> Float32:
    """Blocks of the CPU's pool, (num_blocks, block_bytes); their shapes are in `cpu_kernels.kv_formats`."""
    head_dim, num_heads = config.head_dim, config.num_kv_heads
    out = np.empty((len(data), config.num_layers, 2, block_size, num_heads, head_dim), dtype=np.float32)
    heads = data.reshape(len(data), config.num_layers, layout.layer_bytes)
    keys_data, values_data = heads[..., : layout.values_offset], heads[..., layout.values_offset :]
    keys = _panels(keys_data, num_heads, head_dim, block_size, layout.kv)
    values = _panels(values_data, num_heads, block_size, round_up(head_dim, 16), layout.kv)
    if layout.kv.scaled:
        keys *= _scales(keys_data, num_heads, block_size)[..., None, :]
        values *= _scales(values_data, num_heads, block_size)[..., None]
    out[:, :, 0] = keys.transpose(0, 1, 4, 2, 3)
    out[:, :, 1] = values[..., :head_dim].transpose(0, 1, 3, 2, 4)
    return out


def _panels(data: Bytes, num_heads: int, rows: int, columns: int, kv: KvFormat) -> Float32:
    """(num_blocks, num_layers, num_heads, rows, columns); in bfloat16 the numbers of two rows lie in turn."""
    lanes = -(-rows // kv.pair) * columns * kv.lane_bytes
    packed = np.ascontiguousarray(data.reshape(*data.shape[:2], num_heads, -1)[..., -lanes:])
    if kv.tile_format == BFLOAT16:
        pairs = _widened(packed).reshape(*packed.shape[:3], -1, columns, 2)
        return pairs.swapaxes(-1, -2).reshape(*packed.shape[:3], -1, columns)[..., :rows, :]
    kind = {FLOAT32: np.float32, FLOAT16: np.float16, CODES: np.int8}[kv.tile_format]
    return packed.view(kind).reshape(*packed.shape[:3], rows, columns).astype(np.float32)


def _scales(data: Bytes, num_heads: int, block_size: int) -> Float32:
    """(num_blocks, num_layers, num_heads, block_size)."""
    first = data.reshape(*data.shape[:2], num_heads, -1)[..., : 4 * block_size]
    return np.ascontiguousarray(first).view(np.float32)


def planes_as_numbers(data: Bytes, shape: AttentionShape, num_layers: int) -> Float32:
    """Blocks as `CudaPool.read` returns them: each its layers, then (in 8-bit formats) its layers' scales."""
    planes = (num_layers, 2, shape.num_kv_heads, shape.block_size)
    count = int(np.prod(planes))
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}.get(shape.kv, 1)
    codes = np.ascontiguousarray(data[:, : count * shape.head_dim * itemsize])
    numbers = _decoded(codes, shape.kv).reshape(len(data), *planes, shape.head_dim)
    if itemsize == 1:
        scales = np.ascontiguousarray(data[:, codes.shape[1] : codes.shape[1] + 4 * count]).view(np.float32)
        numbers = numbers * scales.reshape(len(data), *planes, 1)
    return numbers.transpose(0, 1, 2, 4, 3, 5)


def _decoded(codes: Bytes, kv_format: str) -> Float32:
    if kv_format == "bfloat16":
        return _widened(codes)
    kinds: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
    if kv_format == "float8_e4m3":
        from ml_dtypes import float8_e4m3fn

        kinds[kv_format] = float8_e4m3fn
    numbers: Float32 = codes.view(kinds[kv_format]).astype(np.float32)
    return numbers


def _widened(bfloat16: Bytes) -> Float32:
    return (bfloat16.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
