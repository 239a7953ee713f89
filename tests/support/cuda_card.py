"""A card for the CUDA back end without a card: memory in NumPy, kernels by the PTX interpreter or by NumPy twins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.model.batch import SamplingBatch
from kvpool.model.cuda.device import Mark
from tests.ptx import Device
from tests.ptx.memory import GLOBAL_BASE
from tests.support import cuda_twins, numpy_sampling
from tests.support.cuda_rooms import compiler, layout, paged_decode

Array = NDArray[Any]
Work = Callable[[], None]


class Card:
    """Fulfils `kvpool.model.cuda.device.CudaDevice` with kernels by the PTX interpreter, strictly.

    The pool's memory counts as unwritten until a kernel writes it.
    """

    def __init__(self, capacity_bytes: int = 1 << 28) -> None:
        self._capacity = capacity_bytes
        self.memory = Device(capacity_bytes, count=False)
        self.allocated = 0
        self.launches: list[str] = []
        self.graphs_allowed = True
        self.closed = False
        self._recording: list[Work] | None = None

    name = "a card made of NumPy"

    def free_bytes(self) -> int:
        return self._capacity - self.allocated

    def allocate(self, size: int, purpose: str, remedy: str) -> int:
        if size > self.free_bytes():
            raise MemoryError(f"{purpose}: {size} bytes, {self.free_bytes()} free; {remedy}")
        self.allocated += size
        made = self.memory.empty(max(size, 1), np.uint8)
        if purpose != "the pool":
            self.memory.write(made, 0)
        return self.memory.pointer(made)

    def staging(self, size: int, purpose: str, remedy: str) -> NDArray[np.uint8]:
        if size > self._capacity:
            raise MemoryError(f"{purpose}: {size} bytes page-locked; {remedy}")
        return np.zeros(size, np.uint8)

    def lane(self) -> Card:
        return self  # nothing goes on beside anything here: see cuda_streams.py

    def view(self, address: int, count: int, dtype: Any) -> Array:
        """Device memory as an array."""
        start = address - GLOBAL_BASE
        return self.memory.memory.data[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    def upload(self, target: int, source: NDArray[np.uint8]) -> None:
        assert self._recording is None
        if source.size:
            self.memory.write(self.view(target, source.size, np.uint8), source)

    def download(self, target: NDArray[np.uint8], source: int) -> None:
        assert self._recording is None
        target[:] = self.view(source, target.size, np.uint8)

    def copy(self, target: int, source: int, size: int) -> None:
        assert self._recording is None
        self.memory.write(self.view(target, size, np.uint8), self.view(source, size, np.uint8))

    def prepare(self, make: Callable[[], compiler.Kernel]) -> None:
        """Kernels are compiled when they are launched: most tests launch few."""

    def launch(self, kernel: compiler.Kernel, grid: tuple[int, ...], arguments: Sequence[int | float]) -> None:
        assert len(arguments) == len(kernel.arguments)
        assert min(grid) > 0
        self._do(lambda: self._run(kernel, grid, tuple(arguments)))

    def _do(self, work: Work) -> None:
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def _run(self, kernel: compiler.Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self.launches.append(kernel.name)
        self.memory.run(kernel.ptx, grid, kernel.threads, arguments, kernel.shared_bytes)

    def multiply(self, element: str, x: int, weight: int, out: int, shape: tuple[int, int, int], add: bool) -> None:
        rows, outputs, width = shape

        def work() -> None:
            dtype = np.float32 if element == "float32" else np.uint16
            left = cuda_twins.values(self.view(x, rows * width, dtype), element).reshape(rows, width)
            right = cuda_twins.values(self.view(weight, outputs * width, dtype), element).reshape(outputs, width)
            target = self.view(out, rows * outputs, np.float32).reshape(rows, outputs)
            self.memory.write(target, (target if add else 0) + left @ right.T)

        self.launches.append("vendor")
        self._do(work)

    def capture(self, work: Work) -> Work | None:
        if not self.graphs_allowed:
            return None
        recorded = self._recording = []
        work()
        self._recording = None

        def replay() -> None:
            for each in recorded:
                self._do(each)

        return replay

    def mark(self) -> Mark:
        return Mark(self.synchronize, time.perf_counter())  # everything is done as soon as it is asked for

    def after(self, mark: Mark) -> None:
        pass

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        return float(end.event - begin.event)

    def notify(self, mark: Mark, descriptor: int) -> None:
        mark()
        os.eventfd_write(descriptor, 1)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class TwinCard(Card):
    """The same seam with every kernel replaced by its NumPy twin: hundreds of times faster, for whole models."""

    def __init__(self, shape: layout.AttentionShape, element: str, capacity_bytes: int = 1 << 28) -> None:
        super().__init__(capacity_bytes)
        self._shape, self._element = shape, element

    def _run(self, kernel: compiler.Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self.launches.append(kernel.name)
        given = dict(zip((name for name, _ in kernel.arguments), arguments, strict=True))
        wide = {name for name, kind in kernel.arguments if kind in ("float32*", "int32*")}
        getattr(self, f"_{kernel.name}")(grid, given, wide)

    def _read(self, at: int, shape: tuple[int, ...], wide: bool) -> Array:
        dtype = np.float32 if wide or self._element == "float32" else np.uint16
        raw = self.view(at, int(np.prod(shape)), dtype).reshape(shape)
        return raw.astype(np.float64) if wide else cuda_twins.values(raw, self._element)

    def _write(self, at: int, values: Array, wide: bool) -> None:
        element = "float32" if wide else self._element
        raw = cuda_twins.stored(values, element).reshape(-1)
        self.memory.write(self.view(at, raw.size, raw.dtype), raw)

    def _gather_rows(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        ids = self.view(a["ids"], grid[1], np.int32)
        itemsize = 4 if "table" in wide else 2
        entries = [self._read(a["table"] + itemsize * a["width"] * int(i), (a["width"],), "table" in wide) for i in ids]
        self._write(a["out"], np.stack(entries).astype(np.float32) * np.float32(a["scale"]), True)

    def _rms_norm(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str], add: bool = False) -> None:
        shape = grid[0], a["width"]
        normed = cuda_twins.rms_norm(
            self._read(a["x"], shape, True), self._read(a["weight"], shape[1:], True), a["eps"]
        )
        before = self._read(a["out"], shape, True) if add else 0
        self._write(a["out"], before + normed, "out" in wide)

    def _rms_norm_accumulate(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        self._rms_norm(grid, a, wide, add=True)

    def _gated_silu(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str], kind: str = "silu") -> None:
        gate_up = self._read(a["gate_up"], (grid[1], 2 * a["width"]), True)
        self._write(a["out"], cuda_twins.gated_activation(kind, gate_up), "out" in wide)

    def _gated_gelu_tanh(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        self._gated_silu(grid, a, wide, "gelu_tanh")

    def _float32_matmul(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        rows, outputs, width = a["num_rows"], a["num_outputs"], a["width"]
        x, weight = a["x" if "x" in a else "rows"], a["weight"]
        if "x" in a:  # float32 stays float32: whole models are multiplied here
            out = self.view(x, rows * width, np.float32).reshape(rows, width)
            out = out @ self.view(weight, outputs * width, np.float32).reshape(outputs, width).T
        else:
            out = self._read(x, (rows, width), False) @ self._read(weight, (outputs, width), False).T
        if a["has_bias"]:
            out = out + self._read(a["bias"], (outputs,), True)
        if a["accumulate"]:
            out = out + self._read(a["out"], (rows, outputs), True)
        self._write(a["out"], out, True)

    _skinny_matmul = _float32_matmul

    def _kv_write(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        s, rows = self._shape, grid[1]
        heads = s.num_heads + 2 * s.num_kv_heads
        qkv = self.view(a["qkv"], rows * s.qkv_width, np.float32).reshape(rows, heads, s.head_dim)
        positions, slots = self.view(a["positions"], rows, np.int32), self.view(a["slot_mapping"], rows, np.int64)
        half = s.head_dim // 2
        for row in np.flatnonzero(slots >= 0):
            cos, sin = (
                self.view(a[name] + 4 * half * int(positions[row]), half, np.float32) for name in ("cos", "sin")
            )
            turned = qkv[row].astype(np.float64)
            split = s.num_heads, s.num_heads + s.num_kv_heads
            if a["q_norm"]:
                for part, name in ((slice(0, split[0]), "q_norm"), (slice(*split), "k_norm")):
                    weight = self._read(a[name], (s.head_dim,), True)
                    turned[part] = cuda_twins.rms_norm(turned[part], weight, a["eps"])
            turned[: split[1]] = cuda_twins.rotate(turned[: split[1]], cos, sin)
            qkv[row, : split[0]] = turned[: split[0]]
            block, offset = divmod(int(slots[row]), s.block_size)
            pool = self._pool(a["kv"], block)
            for side in range(2):
                start = split[0] + side * s.num_kv_heads
                self.memory.write(
                    pool[side, :, offset], cuda_twins.stored(turned[start : start + s.num_kv_heads], s.kv)
                )

    def _pool(self, kv: int, block: int) -> Array:
        """(2, num_kv_heads, block_size, head_dim) stored: one block of a layer."""
        s = self._shape
        shape = 2, s.num_kv_heads, s.block_size, s.head_dim
        dtype = cuda_twins.stored(np.zeros(1), s.kv).dtype
        size = int(np.prod(shape))
        return self.view(kv + block * size * dtype.itemsize, size, dtype).reshape(shape)

    def _attend(self, a: dict[str, Any], row: int, table: Array, wide: set[str]) -> None:
        s = self._shape
        last = int(self.view(a["positions"], row + 1, np.int32)[row])
        tokens = np.arange(max(0, last - a["window"] + 1) if a["window"] else 0, last + 1)
        blocks = np.stack([self._pool(a["kv"], int(block)) for block in table[: last // s.block_size + 1]])
        sides = cuda_twins.values(blocks, s.kv)[tokens // s.block_size, :, :, tokens % s.block_size]
        query = self._read(a["qkv"] + 4 * row * s.qkv_width, (s.num_heads, s.head_dim), True)
        out = cuda_twins.attention(query, sides[:, 0], sides[:, 1], a["scale"] / np.log2(np.e))
        at = a["out"] + row * out.size * (4 if "out" in wide else 2)
        self._write(at, out, "out" in wide)

    def _table(self, a: dict[str, Any], sequence: int) -> Array:
        return self.view(a["block_tables"] + 4 * sequence * a["max_blocks"], a["max_blocks"], np.int32)

    def _paged_float32(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        for row, sequence in enumerate(self.view(a["sequences"], grid[1], np.int32)):
            if sequence >= 0:
                self._attend(a, row, self._table(a, int(sequence)), wide)

    def _paged_decode_8(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str], columns: int = 1) -> None:
        rows_per_tile = paged_decode.rows_per_tile(self._shape, columns)
        for tile in range(grid[2]):
            sequence = int(self.view(a["tiles"] + 12 * tile, 1, np.int32)[0])
            for row in self.view(a["tile_rows"] + 4 * tile * rows_per_tile, rows_per_tile, np.int32):
                if row >= 0:
                    self._attend(a, int(row), self._table(a, sequence), wide)

    def _paged_decode_16(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        self._paged_decode_8(grid, a, wide, columns=2)

    def _combine(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        pass

    def _sample(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        rows, vocab_size, width = grid[0], a["vocab_size"], a["top_width"]
        dtypes = {"seeds": np.uint64, "counters": np.int64}
        whole = ("top_k", "num_logprobs", "targets")
        fields: dict[str, Array] = {}
        for name in SamplingBatch.__dataclass_fields__:
            if name.endswith("_start"):
                fields[name] = self.view(a[name], rows + 1, np.int32)
            elif name == "min_p":
                fields[name] = np.exp(self.view(a["min_p_floor"], rows, np.float32).astype(np.float64)).astype(
                    np.float32
                )
            elif name in a:
                count = rows
                for kind in ("penalty", "bias", "allowed"):
                    if name in (f"{kind}_tokens", f"{kind}_counts", f"{kind}_values"):
                        count = int(fields[f"{kind}_start"][-1])
                integer = name in whole or name.endswith(("_tokens", "_counts"))
                fields[name] = self.view(a[name], count, dtypes.get(name, np.int32 if integer else np.float32))
        logits = self.view(a["logits"], rows * vocab_size, np.float32).reshape(rows, vocab_size)
        tokens, logprobs, top_tokens, top_logprobs, errors = numpy_sampling.sample(logits, SamplingBatch(**fields))
        lists = np.full((rows, width), -1, np.int32), np.zeros((rows, width), np.float32)
        lists[0][:, : top_tokens.shape[1]], lists[1][:, : top_tokens.shape[1]] = top_tokens, top_logprobs
        results = (tokens, logprobs, *lists, errors.astype(np.uint8))
        names = "tokens", "logprobs", "top_tokens", "top_logprobs", "errors"
        for name, values in zip(names, results, strict=True):
            self.memory.write(self.view(a[name], values.size, values.dtype), values.reshape(-1))

    def _copy_blocks(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        def piece(side: str, copy: int, layer: int) -> Array:
            block = int(self.view(a[f"{side}_blocks"], grid[1], np.int32)[copy])
            start = block * a[f"{side}_block_stride"] + layer * a[f"{side}_layer_stride"]
            return self.view(a[side] + 16 * start, 16 * a["piece"], np.uint8)

        for layer in range(grid[2]):
            for copy in range(grid[1]):
                self.memory.write(piece("destination", copy, layer), piece("source", copy, layer))
