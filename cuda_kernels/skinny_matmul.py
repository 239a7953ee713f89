"""Products of few rows: out[t, n] (+)= sum_k x[t, k] weight[n, k] (+ bias[n]), bound by reading the weights once.

Tensor cores compute out^T = weight x^T with 16 outputs and 8 rows an `mma`. One block has `outputs` x 16 outputs and
`columns` x 8 rows; warp w of its 8 takes the stretches of 64 k number w, w + 8, ... With g = lane / 4, c = lane % 4, a
lane reads 8 neighbouring k of weight row g and of row g + 8, twice a stretch: whole 128-byte lines a warp, and the A
fragments of four products, if x uses the same order of k, which a dot product does not notice. The warps' sums are
added in order at the end. So an output's bits depend on x's row and the weights alone: not on the number of rows, nor
on which kernel of this file with which tile computed them.

Grid (ceil(N / (16 outputs)), ceil(T / (8 columns))), 256 threads.

    x       (T, K) the weights' 16-bit format, K a multiple of 8
    weight  (N, K) bfloat16 or float16
    bias    (N,) float32, read where has_bias
    out     (T, N) float32, added to where accumulate
"""

from __future__ import annotations

from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, Kernel, build, pointer
from .elements import PACKED
from .intrinsics import load_u32x4
from .jit import cuda, device_function, types

WARPS = 8
THREADS = 32 * WARPS
STRETCH = 64  # k of one warp step
REGISTERS = {1: 64, 2: 80, 4: 128, 8: 208}  # budget by columns
MERGED = 32  # accumulators per lane that are merged at once: 32 KiB of shared memory

_i32, _i64, _u32, _f32 = types.int32, types.int64, types.uint32, types.float32


def tile(num_rows: int) -> tuple[int, int]:
    """(outputs, columns) for a number of rows: wide tiles read x less often, narrow ones keep more blocks busy."""
    columns = min(8, 1 << max(0, -(-num_rows // 8) - 1).bit_length())
    return (2 if columns >= 4 else 1), columns


@kernel_factory
def skinny_matmul(element: str, outputs: int, columns: int) -> Kernel:
    """Kernel for weights and x of format `element`; tile from `tile`."""
    packed = PACKED[element]
    mma = packed.mma
    unroll = 2 if columns <= 2 else 1  # stretches whose loads are in flight together
    w_size, x_size = 16 * outputs * unroll, 8 * columns * unroll
    acc_size = 4 * outputs * columns
    rounds = -(-acc_size // MERGED)
    merged_now = min(acc_size, MERGED)
    merge_size = WARPS * merged_now * 32

    @device_function
    def load_stretch(w: Any, x: Any, u: Any, weight: Any, rows: Any, n: Any, t: Any, k: Any, lane: Any, limits: Any):  # type: ignore[no-untyped-def]
        """Fragments of 64 k from `k` on; past the end, the last k again with x = 0."""
        num_rows, num_outputs, width = limits
        for half in range(2):
            at_k = k + 32 * half + 8 * (lane & 3)
            inside = at_k < width
            at_k = min(at_k, width - 8)
            for m in range(outputs):
                for h in range(2):
                    at = ((u * outputs + m) * 2 + half) * 8 + 4 * h
                    output = min(n + 16 * m + 8 * h + (lane >> 2), num_outputs - 1)
                    w[at], w[at + 1], w[at + 2], w[at + 3] = load_u32x4(weight, _i64(output) * width + at_k)
            for j in range(columns):
                at = ((u * columns + j) * 2 + half) * 4
                row = min(t + 8 * j + (lane >> 2), num_rows - 1)
                a, b, c, d = load_u32x4(rows, _i64(row) * width + at_k)
                zero = _u32(0)
                x[at], x[at + 1] = a if inside else zero, b if inside else zero
                x[at + 2], x[at + 3] = c if inside else zero, d if inside else zero

    @device_function
    def multiply(acc: Any, w: Any, x: Any, u: Any) -> None:
        for half in range(2):
            for m in range(outputs):
                for j in range(columns):
                    a, b, o = (
                        ((u * outputs + m) * 2 + half) * 8,
                        ((u * columns + j) * 2 + half) * 4,
                        4 * (m * columns + j),
                    )
                    for step in range(2):
                        acc[o], acc[o + 1], acc[o + 2], acc[o + 3] = mma(
                            w[a + 2 * step],
                            w[a + 4 + 2 * step],
                            w[a + 1 + 2 * step],
                            w[a + 5 + 2 * step],
                            x[b + 2 * step],
                            x[b + 1 + 2 * step],
                            acc[o],
                            acc[o + 1],
                            acc[o + 2],
                            acc[o + 3],
                        )

    def skinny_matmul(
        rows: Any,
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
        lane, warp = thread & 31, thread >> 5
        n, t = cuda.blockIdx.x * (16 * outputs), cuda.blockIdx.y * (8 * columns)
        w = cuda.local.array(w_size, types.uint32)
        x = cuda.local.array(x_size, types.uint32)
        acc = cuda.local.array(acc_size, types.float32)
        for i in range(acc_size):
            acc[i] = _f32(0)
        limits = num_rows, num_outputs, width
        for k in range(STRETCH * warp, width, STRETCH * WARPS * unroll):
            for u in range(unroll):
                load_stretch(w, x, u, weight, rows, n, t, k + u * (STRETCH * WARPS), lane, limits)
            for u in range(unroll):
                multiply(acc, w, x, u)

        merged = cuda.shared.array(merge_size, types.float32)  # (WARPS, merged_now, 32 lanes)
        for turn in range(rounds):
            cuda.syncthreads()
            for i in range(merged_now):
                merged[(warp * merged_now + i) * 32 + lane] = acc[turn * merged_now + i]
            cuda.syncthreads()
            for i in range(warp, merged_now, WARPS):
                value = merged[i * 32 + lane]
                for other in range(1, WARPS):
                    value += merged[(other * merged_now + i) * 32 + lane]
                o = turn * merged_now + i
                m, j = (o >> 2) // columns, (o >> 2) % columns
                output = n + 16 * m + 8 * ((o >> 1) & 1) + (lane >> 2)
                row = t + 8 * j + 2 * (lane & 3) + (o & 1)
                if output < num_outputs and row < num_rows:
                    at = _i64(row) * num_outputs + output
                    if has_bias:
                        value += bias[output]
                    out[at] = out[at] + value if accumulate else value

    arguments = {
        "rows": pointer(packed.stored),
        "weight": pointer(packed.stored),
        "bias": pointer(FLOAT32),
        "out": pointer(FLOAT32),
        "num_rows": INT32,
        "num_outputs": INT32,
        "width": INT32,
        "has_bias": INT32,
        "accumulate": INT32,
    }
    return build(skinny_matmul, arguments, name="skinny_matmul", threads=THREADS, registers=REGISTERS[columns])
