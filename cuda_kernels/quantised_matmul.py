"""Products of few rows with 8- and 4-bit weights: `skinny_matmul` whose weights are read as codes (weight_formats.py).

Codes are turned into 16-bit numbers exactly by moving bits, multiplied on tensor cores group by group, and each group's
sum is scaled in float32:

    out[t, n] = sum over groups of scale * sum_k code[n, k] x[t, k] + least * sum_k x[t, k]

A 4-bit code is put into the low bits of a power of two, whose share goes with `least`; the sums of x come from one more
product, by ones. Order and grid are those of `skinny_matmul` with one tile of outputs; so is the independence of an
output's bits from the number of rows.

    rows    (T, K) bfloat16 or float16, K a multiple of 8
    codes, scales  packed as weight_formats.py says
    bias    (N,) float32, read where has_bias
    out     (T, N) float32, added to where accumulate
"""

from __future__ import annotations

from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, Kernel, build, pointer
from .elements import PACKED
from .intrinsics import f16_to_f32, f32_from_bits, load_u32x2, load_u32x4, permute_bytes
from .jit import cuda, device_function, types
from .skinny_matmul import STRETCH, THREADS, WARPS, Merge, rows_loader

REGISTERS = {1: 80, 2: 80, 4: 128, 8: 208}  # budget by columns

_i64, _u16, _u32, _f32 = types.int64, types.uint16, types.uint32, types.float32

# By element: a power of two whose last bits are units, in both halves of a register; its value; 1.0 twice.
_MAGIC = {"bfloat16": (0x43004300, 128.0, 0x3F803F80), "float16": (0x64006400, 1024.0, 0x3C003C00)}


@device_function
def _halves(packed: Any) -> Any:
    """Two float16 as float32."""
    return f16_to_f32(_u16(packed)), f16_to_f32(_u16(packed >> _u32(16)))


@kernel_factory
def quantised_matmul(weights: str, element: str, columns: int) -> Kernel:
    """Kernel for weights int8 or int4, x of format `element`, and tiles of 16 outputs and 8 x `columns` rows."""
    packed = PACKED[element]
    mma, pack = packed.mma, packed.pack
    four_bits = weights == "int4"
    magic, magic_value, ones = _MAGIC[element]
    w_size, x_size = 8, 8 * columns
    merging = Merge(1, columns)
    acc_size, merge_size = merging.accumulators, merging.shared_size
    merge, load_rows = merging.function(), rows_loader(columns)

    @device_function
    def byte(codes: Any, selector: Any) -> Any:
        """One of four codes + 128 in the last byte of 2^23, back as the code in float32."""
        return f32_from_bits(permute_bytes(codes, _u32(0x4B000000), selector)) - _f32(8388608 + 128)

    @device_function
    def spread(w: Any, at: Any, low: Any, high: Any) -> None:
        """Eight codes of a row as four registers of pairs: of one word of nibbles, or of two words of bytes."""
        if four_bits:
            for i in range(4):
                w[at + i] = _u32((_u32(low >> _u32(4 * i)) & _u32(0x000F000F)) | _u32(magic))
        else:
            low, high = _u32(low ^ _u32(0x80808080)), _u32(high ^ _u32(0x80808080))
            w[at] = pack(byte(low, _u32(0x7540)), byte(low, _u32(0x7541)))
            w[at + 1] = pack(byte(low, _u32(0x7542)), byte(low, _u32(0x7543)))
            w[at + 2] = pack(byte(high, _u32(0x7540)), byte(high, _u32(0x7541)))
            w[at + 3] = pack(byte(high, _u32(0x7542)), byte(high, _u32(0x7543)))

    @device_function
    def product(w0: Any, w1: Any, w2: Any, w3: Any, w4: Any, w5: Any, w6: Any, w7: Any, x: Any, b: Any) -> Any:
        """One group's sums for a tile of 16 outputs and 8 rows: rows g (w0 .. w3) and g + 8 (w4 .. w7)."""
        zero = _f32(0)
        p0, p1, p2, p3 = mma(w0, w4, w1, w5, x[b], x[b + 1], zero, zero, zero, zero)
        return mma(w2, w6, w3, w7, x[b + 2], x[b + 3], p0, p1, p2, p3)

    def quantised_matmul(
        rows: Any,
        codes: Any,
        scales: Any,
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
        n, t = cuda.blockIdx.x * 16, cuda.blockIdx.y * (8 * columns)
        tiles_across = (width + 63) // 64
        w = cuda.local.array(w_size, types.uint32)
        x = cuda.local.array(x_size, types.uint32)
        acc = cuda.local.array(acc_size, types.float32)
        for i in range(acc_size):
            acc[i] = _f32(0)
        one = _u32(ones)
        for k in range(STRETCH * warp, width, STRETCH * WARPS):
            load_rows(x, 0, rows, t, k, num_rows, width, lane)
            tile = _i64(cuda.blockIdx.x) * tiles_across + k // 64
            if four_bits:
                c0, c1, c2, c3 = load_u32x4(codes, tile * 128 + 4 * lane)
                c4 = c5 = c6 = c7 = _u32(0)
                s0, s1, s2, s3 = load_u32x4(scales, tile * 32 + 4 * (lane >> 2))
            else:
                c0, c1, c2, c3 = load_u32x4(codes, tile * 256 + 4 * lane)
                c4, c5, c6, c7 = load_u32x4(codes, tile * 256 + 128 + 4 * lane)
                s0, s1 = load_u32x2(scales, tile * 16 + 2 * (lane >> 2))
                s2 = s3 = _u32(0)
            for half in range(2):
                if four_bits:
                    spread(w, 0, c0 if half == 0 else c2, _u32(0))
                    spread(w, 4, c1 if half == 0 else c3, _u32(0))
                    near, near_least = _halves(s0 if half == 0 else s2)
                    far, far_least = _halves(s1 if half == 0 else s3)
                    near_least -= near * _f32(magic_value)
                    far_least -= far * _f32(magic_value)
                else:
                    spread(w, 0, c0 if half == 0 else c4, c1 if half == 0 else c5)
                    spread(w, 4, c2 if half == 0 else c6, c3 if half == 0 else c7)
                    near0, near1 = _halves(s0)
                    far0, far1 = _halves(s1)
                    near, far = near0 if half == 0 else near1, far0 if half == 0 else far1
                    near_least = far_least = _f32(0)
                for j in range(columns):
                    b, o = (j * 2 + half) * 4, 4 * j
                    p0, p1, p2, p3 = product(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], x, b)
                    acc[o] += near * p0
                    acc[o + 1] += near * p1
                    acc[o + 2] += far * p2
                    acc[o + 3] += far * p3
                    if four_bits:
                        x0, x1, _, _ = product(one, one, one, one, one, one, one, one, x, b)
                        acc[o] += near_least * x0
                        acc[o + 1] += near_least * x1
                        acc[o + 2] += far_least * x0
                        acc[o + 3] += far_least * x1
        merged = cuda.shared.array(merge_size, types.float32)
        merge(acc, merged, (n, t, thread), (bias, out, num_rows, num_outputs, has_bias, accumulate))

    arguments = {
        "rows": pointer(packed.stored),
        "codes": pointer(types.uint32),
        "scales": pointer(types.uint32),
        "bias": pointer(FLOAT32),
        "out": pointer(FLOAT32),
        "num_rows": INT32,
        "num_outputs": INT32,
        "width": INT32,
        "has_bias": INT32,
        "accumulate": INT32,
    }
    name = f"quantised_matmul_{weights}"
    return build(quantised_matmul, arguments, name=name, threads=THREADS, registers=REGISTERS[columns])
