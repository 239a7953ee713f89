"""What Numba-CUDA compiles, run by the interpreter: kernels of every shape against NumPy, and their counts."""

import math

import numpy as np
import pytest

pytest.importorskip("numba.cuda", reason="the PTX interpreter's input comes from numba-cuda")
pytest.importorskip("numba.cuda.bf16", reason="needs the numba-cuda package, not Numba's built-in CUDA target")

from numba import cuda, float32, float64, int32, types

from tests.ptx import Device, compile_kernel
from tests.ptx.errors import BarrierError, DataRace, LaunchError, OutOfBounds, UnwrittenRead

RNG = np.random.default_rng(2)


def fresh(**options):
    return Device(capacity_bytes=1 << 22, **options)


def saxpy(x, y, a, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = a * x[i] + y[i]


def test_saxpy_and_its_counts():
    kernel = compile_kernel(saxpy, "void(float32[::1], float32[::1], float32, int32)")
    device = fresh()
    x, y = (RNG.standard_normal(1003).astype(np.float32) for _ in range(2))
    dx, dy = device.array(x), device.array(y)
    counters = device.run(kernel, 8, 128, (dx, dy, 2.5, 1003))
    exact = np.float64(2.5) * x + y
    np.testing.assert_allclose(device.read(dy), exact, rtol=1e-6)
    assert counters.global_load_bytes == 2 * 4 * 1003
    assert counters.global_store_bytes == 4 * 1003
    assert counters.global_load_sectors == 2 * math.ceil(1003 / 8)
    assert counters.footprint_read_bytes == 2 * 32 * math.ceil(1003 / 8)
    assert counters.blocks == 8
    assert counters.by_opcode()["st.global"] == 1003
    assert counters.by_opcode(warps=True)["st.global"] == math.ceil(1003 / 32)
    assert counters.max_bank_ways == 0
    assert "sectors" in counters.summary()
    assert "st.global.f32" in counters.table()
    twice = counters + counters
    assert twice.warp_instructions == 2 * counters.warp_instructions
    assert twice.footprint_read_bytes == counters.footprint_read_bytes


def test_slices_and_strides_reach_the_kernel():
    kernel = compile_kernel(saxpy, "void(float32[:], float32[:], float32, int32)")
    device = fresh()
    x = RNG.standard_normal((40, 3)).astype(np.float32)
    dx, dy = device.array(x), device.zeros((40, 3))
    counters = device.run(kernel, 1, 64, (dx[::-1, 1], dy[:, 2], 1.0, 40))
    np.testing.assert_array_equal(device.read(dy)[:, 2], x[::-1, 1])
    assert not dy[:, :2].any()
    assert counters.total("sectors", "global", "store") == 15  # 40 rows of 12 bytes


def block_sum(x, out):
    warps = cuda.shared.array(32, float32)
    lane = cuda.threadIdx.x & 31
    warp = cuda.threadIdx.x >> 5
    total = float32(0)
    i = cuda.grid(1)
    while i < x.shape[0]:
        total += x[i]
        i += cuda.gridsize(1)
    for step in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
    if lane == 0:
        warps[warp] = total
    cuda.syncthreads()
    if warp == 0:
        total = warps[lane] if lane < cuda.blockDim.x >> 5 else float32(0)
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(0xFFFFFFFF, total, step)
        if lane == 0:
            cuda.atomic.add(out, 0, total)


@pytest.mark.parametrize("threads", [32, 96, 256])
def test_reduction_by_shuffles_shared_memory_and_atomics(threads):
    kernel = compile_kernel(block_sum, "void(float32[::1], float32[::1])")
    device = fresh()
    x = RNG.integers(-9, 9, 5001).astype(np.float32)
    out = device.zeros(1)
    counters = device.run(kernel, 5, threads, (device.array(x), out))
    assert device.read(out)[0] == x.sum()
    assert counters.bank_conflicts == 0
    assert counters.select("global", "atomic")[0].threads == 5


def collatz(x, steps):
    i = cuda.grid(1)
    n = x[i]
    count = 0
    while n != 1:
        n = n * 3 + 1 if n & 1 else n // 2
        count += 1
    steps[i] = count


def test_divergent_loops():
    kernel = compile_kernel(collatz, "void(int64[::1], int32[::1])")
    device = fresh()
    out = device.empty(256, np.int32)
    device.run(kernel, 2, 128, (device.array(np.arange(1, 257)), out))

    def steps(n):
        count = 0
        while n != 1:
            n, count = (n * 3 + 1 if n & 1 else n // 2), count + 1
        return count

    np.testing.assert_array_equal(device.read(out), [steps(n) for n in range(1, 257)])


def transposer(width):
    def transpose(a, b):
        tile = cuda.shared.array((32, width), float32)
        column, row = cuda.blockIdx.x * 32, cuda.blockIdx.y * 32
        for k in range(4):
            y = cuda.threadIdx.y + 8 * k
            tile[y, cuda.threadIdx.x] = a[row + y, column + cuda.threadIdx.x]
        cuda.syncthreads()
        for k in range(4):
            y = cuda.threadIdx.y + 8 * k
            b[column + y, row + cuda.threadIdx.x] = tile[cuda.threadIdx.x, y]

    return transpose


@pytest.mark.parametrize(("width", "ways"), [(32, 32), (33, 1), (36, 4), (40, 8)])
def test_transpose_has_the_bank_conflicts_that_arithmetic_predicts(width, ways):
    kernel = compile_kernel(transposer(width), "void(float32[:,::1], float32[:,::1])")
    device = fresh()
    a = RNG.standard_normal((64, 96)).astype(np.float32)
    b = device.empty((96, 64))
    counters = device.run(kernel, (3, 2), (32, 8), (device.array(a), b))
    np.testing.assert_array_equal(device.read(b), a.T)
    loads, stores = (counters.select("shared", way) for way in ("load", "store"))
    assert {line.max_ways for line in loads} == {ways}
    assert {line.max_ways for line in stores} == {1}
    accesses = 6 * 32  # blocks times rows
    assert sum(line.wavefronts for line in loads) == ways * accesses
    assert counters.bank_conflicts == (ways - 1) * accesses
    assert counters.global_store_sectors == counters.total("ideal_sectors", "global", "store")


def gather(x, out, stride):
    i = cuda.grid(1)
    out[i] = x[i * stride]


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32), (64, 32), (0, 1)])
def test_sectors_of_strided_loads(stride, sectors):
    kernel = compile_kernel(gather, "void(float32[::1], float32[::1], int32)")
    device = fresh()
    counters = device.run(kernel, 1, 64, (device.zeros(64 * 64 + 1), device.empty(64), stride))
    assert counters.global_load_sectors == 2 * sectors
    assert counters.total("ideal_sectors", "global", "load") == 8


def histogram(x, bins):
    counts = cuda.shared.array(64, int32)
    if cuda.threadIdx.x < 64:
        counts[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(counts, x[i], 1)
    cuda.syncthreads()
    if cuda.threadIdx.x < 64:
        cuda.atomic.add(bins, cuda.threadIdx.x, counts[cuda.threadIdx.x])


def test_histogram():
    kernel = compile_kernel(histogram, "void(int32[::1], int32[::1])")
    device = fresh()
    x = RNG.integers(0, 64, 3000).astype(np.int32)
    bins = device.zeros(64, np.int32)
    device.run(kernel, 12, 256, (device.array(x), bins))
    np.testing.assert_array_equal(device.read(bins), np.bincount(x, minlength=64))


@cuda.jit(device=True)
def geometric(x, n):
    total = float64(0)
    for k in range(n):
        total += x**k
    return total, n


@cuda.jit(device=True, inline="never")
def factorial(n):
    result = 1.0
    while n > 1:
        result *= n
        n -= 1
    return result


def mathematics(x, out):
    i = cuda.grid(1)
    v = x[i]
    total, _ = geometric(v, 4)
    out[i, 0] = total
    out[i, 1] = factorial(int32(v))
    out[i, 2] = math.exp(-v)
    out[i, 3] = math.log(v)
    out[i, 4] = math.cos(v)
    out[i, 5] = math.sin(v * 1e7)  # a large angle takes the slow path, a function with 128-bit arithmetic
    out[i, 6] = math.tanh(v)
    out[i, 7] = v**1.5
    out[i, 8] = math.erf(v)
    out[i, 9] = math.floor(v) // 3
    out[i, 10] = math.sqrt(v) / 3
    out[i, 11] = math.log1p(v)


def test_device_functions_and_mathematics():
    kernel = compile_kernel(mathematics, "void(float64[::1], float64[:,::1])")
    device = fresh()
    x = RNG.uniform(0.1, 6, 128)
    out = device.empty((128, 12), np.float64)
    device.run(kernel, 2, 64, (device.array(x), out))
    expected = [
        1 + x + x**2 + x**3,
        [math.factorial(int(v)) for v in x],
        np.exp(-x),
        np.log(x),
        np.cos(x),
        np.sin(x * 1e7),
        np.tanh(x),
        x**1.5,
        [math.erf(v) for v in x],
        np.floor(x) // 3,
        np.sqrt(x) / 3,
        np.log1p(x),
    ]
    np.testing.assert_allclose(device.read(out), np.stack(expected, axis=1), rtol=3e-15, atol=1e-300)


def mathematics32(x, out):
    i = cuda.grid(1)
    v = x[i]
    out[i, 0] = math.exp(v)
    out[i, 1] = math.log(v)
    out[i, 2] = math.sin(v)
    out[i, 3] = v / float32(3)
    out[i, 4] = math.sqrt(v)


@pytest.mark.parametrize("fastmath", [False, True])
def test_mathematics_in_float32(fastmath):
    kernel = compile_kernel(mathematics32, "void(float32[::1], float32[:,::1])", fastmath=fastmath)
    device = fresh()
    x = RNG.uniform(0.1, 6, 128).astype(np.float32)
    out = device.empty((128, 5))
    device.run(kernel, 1, 128, (device.array(x), out))
    wide = x.astype(np.float64)
    expected = np.stack([np.exp(wide), np.log(wide), np.sin(wide), wide / 3, np.sqrt(wide)], axis=1)
    np.testing.assert_allclose(
        device.read(out), expected, rtol=2e-6 if fastmath else 2e-7, atol=1e-6 if fastmath else 1e-7
    )


def index_arithmetic(out, base, shape):
    i = cuda.grid(1)
    flat = base + i * shape[1] - 7
    out[i, 0] = flat // shape[0]
    out[i, 1] = flat % shape[0]
    out[i, 2] = (flat << 3) ^ (flat >> 2)


def test_64_bit_index_arithmetic_and_tuples():
    kernel = compile_kernel(index_arithmetic, (types.int64[:, ::1], types.int64, types.UniTuple(types.int64, 2)))
    device = fresh()
    out = device.empty((64, 3), np.int64)
    base, shape = -(2**40) + 3, (-12345, 2**33 + 1)
    device.run(kernel, 1, 64, (out, base, shape))
    flat = base + np.arange(64) * shape[1] - 7
    expected = np.stack([flat // shape[0], flat % shape[0], (flat << 3) ^ (flat >> 2)], axis=1)
    np.testing.assert_array_equal(device.read(out), expected)


def dynamic(x, out):
    buffer = cuda.shared.array(0, float32)
    own = cuda.local.array(8, float32)
    t = cuda.threadIdx.x
    buffer[t] = x[t]
    cuda.syncthreads()
    for k in range(8):
        own[(t + k) % 8] = buffer[(t + k) % cuda.blockDim.x]
    total = float32(0)
    for k in range(8):
        total += own[k] * (k + 1)
    out[t] = total


def test_dynamic_shared_and_local_arrays():
    kernel = compile_kernel(dynamic, "void(float32[::1], float32[::1])")
    device = fresh()
    x = RNG.integers(0, 9, 64).astype(np.float32)
    out = device.empty(64)
    counters = device.run(kernel, 1, 64, (device.array(x), out), shared_bytes=256)
    t = np.arange(64)
    expected = sum(x[(t + k) % 64] * ((t + k) % 8 + 1) for k in range(8))
    np.testing.assert_array_equal(device.read(out), expected)
    assert counters.total("bytes", "shared", "store") == 256
    with pytest.raises(OutOfBounds, match="shared"):
        device.run(kernel, 1, 64, (device.array(x), out), shared_bytes=128)


def racy(x, out):
    buffer = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    buffer[t] = x[t]
    out[t] = buffer[63 - t]


def lopsided(x):
    t = cuda.threadIdx.x
    if x[t] > 3:
        cuda.syncthreads()
    x[t] = cuda.syncthreads_count(int32(x[t]))


def test_faults_name_the_source_line():
    device = fresh()
    x = device.array(np.arange(64, dtype=np.float32))
    kernel = compile_kernel(racy, "void(float32[::1], float32[::1])", lineinfo=True)
    line = racy.__code__.co_firstlineno
    with pytest.raises(DataRace, match=rf"source line {line + 3}.*source line {line + 4}"):
        device.run(kernel, 1, 64, (x, device.empty(64)))
    with pytest.raises(OutOfBounds, match=rf"thread \(64, 0, 0\).*source line {line + 3}.*byte 256 of float32\[64\]"):
        device.run(kernel, 1, 96, (x, device.empty(96)))
    with pytest.raises(UnwrittenRead, match=r"thread \(0, 0, 0\).*ld\.global"):
        device.run(kernel, 1, 64, (device.empty(64), device.empty(64)))
    with pytest.raises(BarrierError, match="waits for block"):
        device.run(compile_kernel(lopsided, "void(float32[::1])"), 1, 64, (x,))


def test_memory_without_poison_may_be_read_at_once():
    device = fresh(poison=False, check_races=False, count=False)
    x, out = device.empty(64), device.empty(64)
    x[:] = 1
    counters = device.run(compile_kernel(racy, "void(float32[::1], float32[::1])"), 1, 64, (x, out))
    assert device.read(out).sum() == 64
    assert counters.global_load_bytes == 0


def test_arguments_must_fit_the_signature():
    device = fresh()
    kernel = compile_kernel(saxpy, "void(float32[::1], float32[::1], float32, int32)")
    x = device.zeros((8, 2))
    for bad in (
        (x[:, 0], x[:, 0], 1.0, 8),
        (x, x, 1.0, 8),
        (x.view(np.int32).reshape(-1), x.reshape(-1), 1.0, 8),
        (x.reshape(-1), x.reshape(-1), 1.0, 8.5),
        (x.reshape(-1), x.reshape(-1), 1.0, 2**40),
        (x.reshape(-1), x.reshape(-1), 1.0),
        (np.zeros(8, np.float32), x.reshape(-1), 1.0, 8),
    ):
        with pytest.raises(LaunchError):
            device.run(kernel, 1, 32, bad)


def test_every_block_sees_the_same_whatever_runs_in_lockstep():
    kernel = compile_kernel(block_sum, "void(float32[::1], float32[::1])")
    x = RNG.standard_normal(4096).astype(np.float32)
    totals, counts = set(), []
    for lanes in (1, 200, 1 << 14):
        device = fresh(lanes_at_once=lanes)
        out = device.zeros(1)
        counters = device.run(kernel, 9, 96, (device.array(x), out))
        totals.add(float(device.read(out)[0]))
        counts.append((counters.by_opcode(), counters.global_load_sectors, counters.shared_wavefronts))
    assert len(totals) == 1
    assert counts[0] == counts[1] == counts[2]
