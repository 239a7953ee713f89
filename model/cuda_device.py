"""One card as the CUDA back end uses it: memory, copies and launches on one stream, in the order asked for.

`CudaDevice` is all that the back end knows of a card, so that tests can put NumPy and a PTX interpreter in its place;
`CupyDevice` is the real one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..cuda_kernels.assembler import assemble
from ..cuda_kernels.compiler import Kernel

Bytes = NDArray[np.uint8]
Work = Callable[[], None]
KernelMaker = Callable[[], Kernel]


class CudaDevice(Protocol):
    """A card. Addresses are plain integers; everything but `allocate`, `staging` and `synchronize` is asynchronous."""

    @property
    def name(self) -> str:
        """For people: the card and its compute capability."""

    def free_bytes(self) -> int:
        """Memory that can be allocated now, by the driver's account."""

    def allocate(self, size: int, purpose: str, remedy: str) -> int:
        """The address of `size` bytes, aligned to 256 and zero. Raises MemoryError: purpose, sizes, remedy."""

    def staging(self, size: int) -> Bytes:
        """(size,) page-locked host memory, zero: what `upload` and `download` move without waiting."""

    def upload(self, target: int, source: Bytes) -> None: ...

    def download(self, target: Bytes, source: int) -> None: ...

    def prepare(self, make: KernelMaker) -> None:
        """Compile and load a kernel, so that its first launch does not."""

    def launch(self, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[int | float]) -> None: ...

    def multiply(self, element: str, x: int, weight: int, out: int, shape: tuple[int, int, int], add: bool) -> None:
        """out (T, N) float32 = (out if `add`) + x (T, K) @ weight (N, K).T, by the vendor; shape is (T, N, K)."""

    def capture(self, work: Work) -> Work | None:
        """Record the launches of `work` and return what repeats them at once; None where the driver refuses."""

    def notify(self, descriptor: int) -> None:
        """Add 1 to an eventfd once everything asked for so far is done, or has failed."""

    def synchronize(self) -> None:
        """Wait for everything. Raises RuntimeError if the card failed."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class CupyDevice:
    """A card through CuPy: its memory, streams and graphs; kernels as machine code of our own."""

    def __init__(self, ordinal: int = 0) -> None:
        cupy: Any = importlib.import_module("cupy")
        self._runtime, self._driver = cupy.cuda.runtime, cupy.cuda.driver
        self._cupy = cupy
        self._runtime.setDevice(ordinal)
        properties = self._runtime.getDeviceProperties(ordinal)
        self._capability = (int(properties["major"]), int(properties["minor"]))
        self._name = f"{properties['name'].decode()} (sm_{self._capability[0]}{self._capability[1]})"
        if self._capability < (8, 0):
            raise RuntimeError(f"{self._name} is too old: kvpool needs compute capability 8.0 (Ampere) or later")
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._functions: dict[int, Any] = {}
        self._kept: list[Any] = []  # kernels and modules whose functions are in use
        self._allocations: list[int] = []
        self._pinned: list[Any] = []
        self._waiter = _Waiter(lambda: cupy.cuda.Event(block=True, disable_timing=True), ordinal, self._runtime)

    @property
    def name(self) -> str:
        return self._name

    def free_bytes(self) -> int:
        return int(self._runtime.memGetInfo()[0])

    def allocate(self, size: int, purpose: str, remedy: str) -> int:
        size = max(size, 256)
        if size > self.free_bytes():
            raise self._out_of_memory(size, purpose, remedy)
        try:
            address = int(self._runtime.malloc(size))
        except self._runtime.CUDARuntimeError as error:
            raise self._out_of_memory(size, purpose, remedy) from error
        self._allocations.append(address)
        self._runtime.memsetAsync(address, 0, size, self._stream.ptr)
        return address

    def _out_of_memory(self, size: int, purpose: str, remedy: str) -> MemoryError:
        free = self.free_bytes()
        return MemoryError(
            f"{purpose} needs {size / 2**30:.2f} GiB on the card, {free / 2**30:.2f} GiB are free, "
            f"{(size - free) / 2**30:.2f} GiB too few; {remedy}"
        )

    def staging(self, size: int) -> Bytes:
        memory = self._cupy.cuda.alloc_pinned_memory(max(size, 1))
        self._pinned.append(memory)
        array = np.frombuffer(memory, np.uint8, size)
        array[:] = 0
        return array

    def upload(self, target: int, source: Bytes) -> None:
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(target, source.ctypes.data, source.nbytes, kind, self._stream.ptr)

    def download(self, target: Bytes, source: int) -> None:
        kind = self._runtime.memcpyDeviceToHost
        self._runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, kind, self._stream.ptr)

    def prepare(self, make: KernelMaker) -> None:
        kernel = make()
        if id(kernel) not in self._functions:
            self._load(kernel)

    def _load(self, kernel: Kernel) -> None:
        module = self._cupy.cuda.function.Module()
        module.load(assemble(kernel, self._capability))
        function = module.get_function(kernel.name)
        if kernel.shared_bytes:
            attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._driver.funcSetAttribute(function.ptr, attribute, kernel.shared_bytes)
        self._functions[id(kernel)] = function
        self._kept += [kernel, module]

    def launch(self, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[int | float]) -> None:
        if id(kernel) not in self._functions:
            self._load(kernel)
        x, y, z = (*grid, 1, 1)[:3]
        values = pack_arguments(kernel, arguments)
        addresses = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        self._driver.launchKernel(
            self._functions[id(kernel)].ptr,
            x, y, z, kernel.threads, 1, 1,
            kernel.shared_bytes,
            self._stream.ptr,
            addresses.ctypes.data,
            0,
        )  # fmt: skip

    def multiply(self, element: str, x: int, weight: int, out: int, shape: tuple[int, int, int], add: bool) -> None:
        cublas = self._cupy.cuda.cublas
        rows, outputs, width = shape
        kind = {"bfloat16": 14, "float16": 2, "float32": 0}[element]  # cudaDataType
        one, beta = np.ones(1, np.float32), np.full(1, float(add), np.float32)
        with self._stream:
            cublas.gemmEx(
                self._cupy.cuda.device.get_cublas_handle(),
                cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, outputs, rows, width,
                one.ctypes.data, weight, kind, width, x, kind, width,
                beta.ctypes.data, out, 0, outputs,
                cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT,
            )  # fmt: skip

    def capture(self, work: Work) -> Work | None:
        self._stream.begin_capture(self._runtime.streamCaptureModeThreadLocal)
        try:
            work()
            graph = self._stream.end_capture()
        except (NotImplementedError, self._runtime.CUDARuntimeError):  # the vendor's products cannot be captured
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                self._stream.end_capture()
            return None
        return lambda: graph.launch(self._stream)

    def notify(self, descriptor: int) -> None:
        self._waiter.notify(self._stream, descriptor)

    def synchronize(self) -> None:
        try:
            self._stream.synchronize()
        except self._runtime.CUDARuntimeError as error:
            raise RuntimeError(f"the card failed: {error}") from error

    def close(self) -> None:
        self._waiter.close()
        for address in self._allocations:
            self._runtime.free(address)
        self._allocations.clear()
        self._functions.clear()
        self._kept.clear()
        self._pinned.clear()


def pack_arguments(kernel: Kernel, arguments: Sequence[int | float]) -> NDArray[np.uint64]:
    """(number of arguments,) uint64: each argument's bytes, little-endian, in a slot of its own."""
    if len(arguments) != len(kernel.arguments):
        raise TypeError(f"kernel {kernel.name} takes {len(kernel.arguments)} arguments, {len(arguments)} were given")
    values = np.zeros(len(arguments), np.uint64)
    for slot, (_, kind), value in zip(values.view(np.uint8).reshape(-1, 8), kernel.arguments, arguments, strict=True):
        dtype = np.dtype(np.uint64 if kind.endswith("*") else kind)
        slot[: dtype.itemsize] = np.array([value], dtype).view(np.uint8)
    return values


class _Waiter:
    """A thread that waits for events, so that an eventfd is written even if the card fails and no callback comes."""

    def __init__(self, make_event: Callable[[], Any], ordinal: int, runtime: Any) -> None:
        self._make_event, self._ordinal, self._runtime = make_event, ordinal, runtime
        self._events: queue.SimpleQueue[tuple[Any, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvpool-cuda-wait", daemon=True)
        self._thread.start()

    def notify(self, stream: Any, descriptor: int) -> None:
        event = self._make_event()
        event.record(stream)
        self._events.put((event, descriptor))

    def _run(self) -> None:
        self._runtime.setDevice(self._ordinal)
        while (entry := self._events.get()) is not None:
            event, descriptor = entry
            with contextlib.suppress(self._runtime.CUDARuntimeError):  # `CudaDevice.synchronize` raises it again
                event.synchronize()
            os.eventfd_write(descriptor, 1)

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()
