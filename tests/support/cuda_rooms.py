"""The CUDA kernels, for tests: a file that imports them from here is skipped where numba-cuda is not installed.

Compiled kernels are kept beside pytest's own cache, so that only the first run of a version pays for compiling.
"""

from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install numba-cuda[cu13])")

from kvpool.cuda_kernels import (
    activations,
    block_copy,
    cache,
    compiler,
    embedding,
    float32_matmul,
    kv_write,
    layout,
    norms,
    paged_decode,
    paged_float32,
    paged_prefill,
    quantised_matmul,
    sampling,
    skinny_matmul,
    tiles,
    weight_formats,
)

cache.use_folder(Path(__file__).resolve().parents[2] / ".pytest_cache" / "cuda_kernels")

__all__ = [
    "activations",
    "block_copy",
    "cache",
    "compiler",
    "embedding",
    "float32_matmul",
    "kv_write",
    "layout",
    "norms",
    "paged_decode",
    "paged_float32",
    "paged_prefill",
    "quantised_matmul",
    "sampling",
    "skinny_matmul",
    "tiles",
    "weight_formats",
]
