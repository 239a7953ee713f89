"""RMS norm: out[t] (+)= x[t] / sqrt(mean(x[t]^2) + eps) * weight.

Grid (num_rows,): one block of 256 threads a row, which is read twice (the second time from cache). Thread i sums the
squares of columns 4i .. 4i + 3 of every stretch of 1,024; lanes are added by halves, then the eight warps in order, so
the order depends on the width alone.

    x       (num_rows, width) float32, width a multiple of 4
    weight  (width,) float32
    out     (num_rows, width) float32, or the model's 16-bit format where only products read it
"""

from __future__ import annotations

from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, WARP, Kernel, build, pointer
from .elements import ELEMENTS
from .intrinsics import load_f32x4, rsqrt
from .jit import cuda, types
from .reductions import block_sum

THREADS = 256
WARPS = THREADS // WARP


@kernel_factory
def rms_norm(out: str = "float32", accumulate: bool = False) -> Kernel:
    """Kernel that writes format `out`, or adds to it."""
    load_out, store_out = ELEMENTS[out].load4, ELEMENTS[out].store4

    def rms_norm(x: Any, weight: Any, out: Any, width: Any, eps: Any) -> None:
        partial = cuda.shared.array(WARPS, types.float32)
        row = types.int64(cuda.blockIdx.x) * width
        first = 4 * (cuda.threadIdx.x & (THREADS - 1))
        squares = types.float32(0)
        for column in range(first, width, 4 * THREADS):
            a, b, c, d = load_f32x4(x, row + column)
            squares += a * a + b * b + c * c + d * d
        scale = rsqrt(block_sum(squares, partial, WARPS) / types.float32(width) + eps)
        for column in range(first, width, 4 * THREADS):
            a, b, c, d = load_f32x4(x, row + column)
            wa, wb, wc, wd = load_f32x4(weight, column)
            a, b, c, d = a * scale * wa, b * scale * wb, c * scale * wc, d * scale * wd
            if accumulate:
                oa, ob, oc, od = load_out(out, row + column)
                a, b, c, d = oa + a, ob + b, oc + c, od + d
            store_out(out, row + column, a, b, c, d)

    arguments = {
        "x": pointer(FLOAT32),
        "weight": pointer(FLOAT32),
        "out": pointer(ELEMENTS[out].stored),
        "width": INT32,
        "eps": FLOAT32,
    }
    name = "rms_norm_accumulate" if accumulate else "rms_norm"
    return build(rms_norm, arguments, name=name, threads=THREADS, registers=48)
