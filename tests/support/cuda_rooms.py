"""The CUDA kernels, for tests: a file that imports them from here is skipped where numba-cuda is not installed."""

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install numba-cuda[cu13])")

from kvpool.cuda_kernels import (
    activations,
    block_copy,
    compiler,
    embedding,
    float32_matmul,
    kv_write,
    layout,
    norms,
    paged_decode,
    paged_float32,
    paged_prefill,
    skinny_matmul,
    tiles,
)

__all__ = [
    "activations",
    "block_copy",
    "compiler",
    "embedding",
    "float32_matmul",
    "kv_write",
    "layout",
    "norms",
    "paged_decode",
    "paged_float32",
    "paged_prefill",
    "skinny_matmul",
    "tiles",
]
