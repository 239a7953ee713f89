"""What the sections of `bench/gpu_check.py` stand on: a card, memory on it, a stopwatch, weights made up at once."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvpool.model.batch import Float32
from kvpool.model.cuda.device import CudaDevice, CupyDevice
from kvpool.model.program import Program
from kvpool.model.weights import RawTensor

Work = Callable[[], None]
CACHE_BYTES = 256 << 20  # more than a card's L2: what is read again after so much comes from memory
BLOCK_SIZE = 16


class Bed:
    """A card and one stretch of its memory, handed out in pieces. `dry`: an interpreter, whose times mean nothing."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.card: CudaDevice = _interpreter() if dry else CupyDevice()
        size = (1 << 26) if dry else min(24 << 30, self.card.free_bytes() // 2)
        self._start = self.card.allocate(size, "room for measurements", "free memory on the card")
        self._end, self._size = self._start, size

    def clear(self) -> None:
        """Take everything back."""
        self._end = self._start

    def empty(self, size: int) -> int:
        """The address of `size` bytes that hold whatever they held."""
        address, self._end = self._end, self._end + -(-size // 256) * 256
        if self._end > self._start + self._size:
            raise MemoryError(f"measurements need more than the {self._size >> 20} MiB set aside")
        return address

    def array(self, values: NDArray[Any]) -> int:
        """The address of a copy of `values`."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        address = self.empty(flat.size)
        self.card.upload(address, flat)
        self.card.synchronize()
        return address

    def numbers(self, size: int) -> int:
        """`size` bytes of bfloat16 numbers around 1: the same few megabytes over and over."""
        tile = np.random.default_rng(0).normal(0, 1, min(size // 2, 1 << 22)).astype(ml_dtypes.bfloat16).view(np.uint8)
        address = self.empty(size)
        for offset in range(0, size, tile.size):
            self.card.upload(address + offset, tile[: size - offset])
        self.card.synchronize()
        return address

    def seconds(self, work: Work, times: int = 10) -> float:
        """Seconds that the card needs for `work`, captured `times` in a row; the median of five runs. NaN when dry."""
        work()  # kernels are loaded here, and not while a graph is captured
        self.card.synchronize()
        if self.dry:
            return math.nan

        def repeated() -> None:
            for _ in range(times):
                work()

        replay = self.card.capture(repeated) or repeated
        replay()
        self.card.synchronize()
        return statistics.median(elapsed(lambda: (replay(), self.card.synchronize())) for _ in range(5)) / times


def elapsed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _interpreter() -> CudaDevice:
    from tests.support.cuda_card import Card

    return Card()


class TiledCheckpoint:
    """Weights for any program, made as fast as memory is written: one stretch of random numbers over and over."""

    def __init__(self, program: Program) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        for weight in program.weights():
            rows, rest = divmod(weight.rows, len(weight.names))  # how stacked weights divide does not matter here
            for i, name in enumerate(weight.names):
                own = rows + rest if i == 0 else rows
                self._shapes[name] = (own,) if weight.cols == 1 else (own, weight.cols)
        self._tile = np.random.default_rng(0).normal(0, 0.02, (1 << 20) + 7).astype(np.float32)

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def raw(self, name: str) -> RawTensor:
        return RawTensor("F32", self._shapes[name], self.load(name))

    def load(self, name: str) -> Float32:
        shape = self._shapes[name]
        return np.ones(shape, np.float32) if len(shape) == 1 else np.resize(self._tile, shape)


def torch_attention_seconds(
    batch: int, queries: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> float | None:
    """PyTorch's `scaled_dot_product_attention` over contiguous keys and values; None where PyTorch is not installed.

    `queries` 1: decode. Otherwise causal over `queries` == `context` tokens.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None

    def made(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query = made(batch, heads, queries, head_dim)
    keys, values = made(batch, kv_heads, context, head_dim), made(batch, kv_heads, context, head_dim)

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, is_causal=queries > 1, enable_gqa=heads != kv_heads
        )

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e4)
    return statistics.median(times)
