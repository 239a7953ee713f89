"""What the processor can do at most, measured: multiply-adds of floats and codes from registers, and memory reads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from .emit import BYTE, Values, loop
from .integer_steps import add_byte_pairs, add_byte_quads, add_pairs, constant, halves, has_byte_quads, integers
from .isa import AVX512, host_isa, host_pair_bits
from .machine_code import load_functions
from .memory import INT64, POINTER
from .vectors import FLOATS, LANES, float_constant, multiply_add

# Independent chains of 16 lanes: enough to hide five cycles of latency of two instructions a cycle where there are 32
# registers of 16 lanes, and few enough for 16 registers of 8.
CHAINS = 12 if host_isa() is AVX512 else 6
READS = 4
WINDOW = 1 << 25  # bytes of one run


def _peak_body(builder: ir.IRBuilder, address: Any, count: Any) -> list[Any]:
    factor, addend = float_constant(0.999), float_constant(0.001)

    def step(index: Any, sums: Sequence[Any]) -> Values:
        return [multiply_add(builder, value, factor, addend) for value in sums]

    return loop(builder, count, [float_constant(float(i)) for i in range(CHAINS)], step)


def _pairs_body(builder: ir.IRBuilder, address: Any, count: Any) -> list[Any]:
    """What a product does with codes of 16 bits: pairs multiplied and added, and that added to a sum."""
    return _codes_body(builder, count, add_pairs, integers)


def _bytes_body(builder: ir.IRBuilder, address: Any, count: Any) -> list[Any]:
    if has_byte_quads(host_pair_bits() // 32):
        return _codes_body(builder, count, add_byte_quads, integers)
    return _codes_body(builder, count, add_byte_pairs, halves)


def _codes_body(builder: ir.IRBuilder, count: Any, multiply: Callable[..., Any], kind: Callable[[int], Any]) -> Values:
    """Vectors as wide as the instructions are. (A sum is a factor of the next product, or LLVM would multiply once.)"""
    words = host_pair_bits() // 32 or LANES
    factor = constant(halves(words), 257)
    starts = [constant(kind(words), 1 + i) for i in range(CHAINS * LANES // words)]

    def step(index: Any, sums: Sequence[Any]) -> Values:
        factors = [builder.bitcast(value, halves(words)) for value in sums]
        return [multiply(builder, f, factor, words, v) for v, f in zip(sums, factors, strict=True)]

    sums = loop(builder, count, starts, step)
    return [builder.bitcast(value, ir.VectorType(ir.FloatType(), words)) for value in sums]


def _read_body(builder: ir.IRBuilder, address: Any, count: Any) -> list[Any]:
    """READS streams side by side, which is how most processors read fastest."""
    start = builder.inttoptr(address, POINTER)
    stream = builder.mul(count, INT64(64))

    def step(index: Any, sums: Sequence[Any]) -> Values:
        base = builder.mul(index, INT64(64))
        offsets = [builder.add(base, builder.mul(stream, INT64(i))) for i in range(READS)]
        places = [builder.gep(start, [offset], source_etype=BYTE) for offset in offsets]
        loads = [builder.load(place, align=64, typ=FLOATS) for place in places]
        return [builder.fadd(value, loaded) for value, loaded in zip(sums, loads, strict=True)]

    return loop(builder, count, [float_constant(0.0)] * READS, step)


BODIES = {
    "fma_peak": _peak_body,
    "pairs_peak": _pairs_body,
    "bytes_peak": _bytes_body,
    "read_all": _read_body,
}


PEAKS = {32: ("fma_peak", 1), 16: ("pairs_peak", 2), 8: ("bytes_peak", 4)}
"""By the bits of what is multiplied: the function, and its products in a lane of 32 bits."""


def _module() -> ir.Module:
    """A function(address, count) of each of BODIES: the sums are stored so that nothing is dropped."""
    module = ir.Module("kvpool_roofline")
    for name, body in BODIES.items():
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64, INT64]), name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        address, count = function.args
        sums = body(builder, address, count)
        total = sums[0]
        for value in sums[1:]:
            total = builder.fadd(total, value)
        builder.store(total, builder.inttoptr(address, POINTER), align=32)
        builder.ret_void()
    return module


class Roofline:
    """Measures on `num_threads` threads at once. `ops` and `read_bytes` are the best of many short runs: one that
    shares its processor with another process says nothing about the processor. `ops_now` and `read_bytes_now` are means
    over some 10 ms, to put beside what is measured right before or after, under the same conditions."""

    def __init__(self, num_threads: int, buffer_bytes: int = 1 << 28) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
        addresses = load_functions(_module, list(BODIES), None)
        self._functions = {name: kind(address) for name, address in addresses.items()}
        self._num_threads = num_threads
        self._buffers = [_aligned(buffer_bytes // num_threads // WINDOW * WINDOW) for _ in range(num_threads)]
        self._pool = ThreadPoolExecutor(num_threads)
        self._next_window = 0

    def ops(self, bits: int) -> float:
        """Operations per second (a multiply-add is two) of floats (32 bits) or codes (16 or 8)."""
        return max(self._peaks(bits, 50))

    def ops_now(self, bits: int) -> float:
        """The same as it is at this moment."""
        return _mean(self._peaks(bits, 4))

    def read_bytes(self) -> float:
        """Bytes per second read from memory: window after window of a buffer that no cache holds."""
        return max(self._reads(4 * self._buffers[0].nbytes // WINDOW))

    def read_bytes_now(self) -> float:
        return _mean(self._reads(4))

    def _peaks(self, bits: int, runs: int) -> list[float]:
        count, (name, products) = 1_000_000, PEAKS[bits]
        return self._rates(name, [0] * runs, count, 2.0 * products * LANES * CHAINS * count)

    def _reads(self, runs: int) -> list[float]:
        numbers = range(self._next_window, self._next_window + runs)
        self._next_window += runs
        offsets = [number * WINDOW % self._buffers[0].nbytes for number in numbers]
        return self._rates("read_all", offsets, WINDOW // (64 * READS), float(WINDOW))

    def _rates(self, name: str, offsets: Sequence[int], count: int, amount: float) -> list[float]:
        function, rates = self._functions[name], []
        for offset in offsets:
            start = time.perf_counter()
            list(self._pool.map(lambda buffer, at=offset: function(buffer.ctypes.data + at, count), self._buffers))
            rates.append(amount * self._num_threads / (time.perf_counter() - start))
        return rates


def _mean(rates: Sequence[float]) -> float:
    """Of runs of equal work, one after the other."""
    return len(rates) / sum(1 / rate for rate in rates)


def _aligned(size: int) -> NDArray[np.uint8]:
    """`size` touched zero bytes that start on a cache line."""
    raw = np.zeros(size + 64, dtype=np.uint8)
    raw[::4096] = 0
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size]
