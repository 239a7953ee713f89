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

from collections.abc import Callable
from dataclasses import dataclass
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


def rows_loader(columns: int) -> Callable[..., Any]:
    """A device function that loads the B fragments of 64 k from `k` on: 8 registers a column tile, from `x[at]`.

    Past the end of a row it gives zeros, past the last row the last row again.
    """

    @device_function
    def load_rows(x: Any, at: Any, rows: Any, t: Any, k: Any, num_rows: Any, width: Any, lane: Any) -> None:
        for half in range(2):
            at_k = k + 32 * half + 8 * (lane & 3)
            inside = at_k < width
            at_k = min(at_k, width - 8)
            for j in range(columns):
                i = at + (j * 2 + half) * 4
                row = min(t + 8 * j + (lane >> 2), num_rows - 1)
                a, b, c, d = load_u32x4(rows, _i64(row) * width + at_k)
                zero = _u32(0)
                x[i], x[i + 1] = a if inside else zero, b if inside else zero
                x[i + 2], x[i + 3] = c if inside else zero, d if inside else zero

    return load_rows


@dataclass(frozen=True, slots=True)
class Merge:
    """How the warps' accumulators, 4 a tile of 16 outputs and 8 rows, become numbers of `out`."""

    outputs: int
    columns: int

    @property
    def accumulators(self) -> int:
        return 4 * self.outputs * self.columns

    @property
    def shared_size(self) -> int:
        """float32 of shared memory."""
        return WARPS * min(self.accumulators, MERGED) * 32

    def function(self) -> Callable[..., Any]:
        """A device function that adds the warps in order, adds bias and `out` where wanted, and writes.

        `where` is (first output, first row, thread), `given` the kernel's (bias, out, num_rows, num_outputs, has_bias,
        accumulate); all threads take part.
        """
        columns, now = self.columns, min(self.accumulators, MERGED)
        turns = -(-self.accumulators // now)

        @device_function
        def merge(acc: Any, merged: Any, where: Any, given: Any) -> None:
            n, t, thread = where
            bias, out, num_rows, num_outputs, has_bias, accumulate = given
            lane, warp = thread & 31, thread >> 5
            for turn in range(turns):
                cuda.syncthreads()
                for i in range(now):
                    merged[(warp * now + i) * 32 + lane] = acc[turn * now + i]
                cuda.syncthreads()
                for i in range(warp, now, WARPS):
                    value = merged[i * 32 + lane]
                    for other in range(1, WARPS):
                        value += merged[(other * now + i) * 32 + lane]
                    o = turn * now + i
                    m, j = (o >> 2) // columns, (o >> 2) % columns
                    output = n + 16 * m + 8 * ((o >> 1) & 1) + (lane >> 2)
                    row = t + 8 * j + 2 * (lane & 3) + (o & 1)
                    if output < num_outputs and row < num_rows:
                        at = _i64(row) * num_outputs + output
                        if has_bias:
                            value += bias[output]
                        out[at] = out[at] + value if accumulate else value

        return merge


@kernel_factory
def skinny_matmul(element: str, outputs: int, columns: int) -> Kernel:
    """Kernel for weights and x of format `element`; tile from `tile`."""
    packed = PACKED[element]
    mma = packed.mma
    unroll = 2 if columns <= 2 else 1  # stretches whose loads are in flight together
    w_size, x_size = 16 * outputs * unroll, 8 * columns * unroll
    merging = Merge(outputs, columns)
    acc_size, merge_size = merging.accumulators, merging.shared_size
    merge, load_rows = merging.function(), rows_loader(columns)

    @device_function
    def load_weights(w: Any, at: Any, weight: Any, n: Any, k: Any, num_outputs: Any, width: Any, lane: Any) -> None:
        """A fragments of 64 k from `k` on, past the end the last k again: x is zero there."""
        for half in range(2):
            at_k = min(k + 32 * half + 8 * (lane & 3), width - 8)
            for m in range(outputs):
                for h in range(2):
                    i = at + (m * 2 + half) * 8 + 4 * h
                    output = min(n + 16 * m + 8 * h + (lane >> 2), num_outputs - 1)
                    w[i], w[i + 1], w[i + 2], w[i + 3] = load_u32x4(weight, _i64(output) * width + at_k)

    @device_function
    def multiply(acc: Any, w: Any, x: Any, u: Any) -> None:
        for half in range(2):
            for m in range(outputs):
                for j in range(columns):
                    o = 4 * (m * columns + j)
                    for step in range(2):
                        a = ((u * outputs + m) * 2 + half) * 8 + 2 * step
                        b = ((u * columns + j) * 2 + half) * 4 + 2 * step
                        acc[o], acc[o + 1], acc[o + 2], acc[o + 3] = mma(
                            w[a],
                            w[a + 4],
                            w[a + 1],
                            w[a + 5],
                            x[b],
                            x[b + 1],
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
        for k in range(STRETCH * warp, width, STRETCH * WARPS * unroll):
            for u in range(unroll):
                at_k = k + u * (STRETCH * WARPS)
                load_weights(w, 16 * outputs * u, weight, n, at_k, num_outputs, width, lane)
                load_rows(x, 8 * columns * u, rows, t, at_k, num_rows, width, lane)
            for u in range(unroll):
                multiply(acc, w, x, u)
        merged = cuda.shared.array(merge_size, types.float32)
        merge(acc, merged, (n, t, thread), (bias, out, num_rows, num_outputs, has_bias, accumulate))

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
