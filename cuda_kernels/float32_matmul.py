"""Products in float32: out[t, n] (+)= sum_k x[t, k] weight[n, k] (+ bias[n]), for exact comparison with other devices.

Grid (ceil(N / 4), ceil(T / 8)), 128 threads: one output and up to 8 rows a warp. Lane l sums k = 4 l .. 4 l + 3 of
every 128, then the lanes are added by halves: the order depends on K alone.

    x       (T, K) float32, K a multiple of 4
    weight  (N, K) float32
    bias    (N,) float32, read where has_bias
    out     (T, N) float32, added to where accumulate
"""

from __future__ import annotations

from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, WARP, Kernel, build, pointer
from .intrinsics import load_f32x4
from .jit import cuda, types
from .reductions import warp_sum

THREADS = 128
OUTPUTS_PER_BLOCK = THREADS // WARP
ROWS_PER_BLOCK = 8


@kernel_factory
def float32_matmul() -> Kernel:
    """The kernel."""

    def float32_matmul(
        x: Any,
        weight: Any,
        bias: Any,
        out: Any,
        num_rows: Any,
        num_outputs: Any,
        width: Any,
        has_bias: Any,
        accumulate: Any,
    ) -> None:
        thread = cuda.threadIdx.x & (THREADS - 1)
        lane = thread & (WARP - 1)
        output = cuda.blockIdx.x * OUTPUTS_PER_BLOCK + (thread >> 5)
        first_row = cuda.blockIdx.y * ROWS_PER_BLOCK
        if output >= num_outputs:
            return
        sums = cuda.local.array(ROWS_PER_BLOCK, types.float32)
        for i in range(ROWS_PER_BLOCK):
            sums[i] = types.float32(0)
        for k in range(4 * lane, width, 4 * WARP):
            wa, wb, wc, wd = load_f32x4(weight, types.int64(output) * width + k)
            for i in range(ROWS_PER_BLOCK):
                row = min(first_row + i, num_rows - 1)
                a, b, c, d = load_f32x4(x, types.int64(row) * width + k)
                sums[i] += a * wa + b * wb + c * wc + d * wd
        for i in range(ROWS_PER_BLOCK):
            value = warp_sum(sums[i])
            row = first_row + i
            if lane == i and row < num_rows:
                at = types.int64(row) * num_outputs + output
                if has_bias:
                    value += bias[output]
                out[at] = out[at] + value if accumulate else value

    arguments = {
        "x": pointer(FLOAT32),
        "weight": pointer(FLOAT32),
        "bias": pointer(FLOAT32),
        "out": pointer(FLOAT32),
        "num_rows": INT32,
        "num_outputs": INT32,
        "width": INT32,
        "has_bias": INT32,
        "accumulate": INT32,
    }
    return build(float32_matmul, arguments, name="float32_matmul", threads=THREADS, registers=64)
