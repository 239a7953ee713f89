"""One card as the CUDA back end uses it: memory, and lanes of copies and launches, each in the order asked for.

`CudaDevice` is all that the back end knows of a card, so that tests can put NumPy and a PTX interpreter in its place;
`CupyDevice` is the real one.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...cuda_kernels.assembler import assemble
from ...cuda_kernels.compiler import Kernel
from ..host import available_memory

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Work = Callable[[], None]
KernelMaker = Callable[[], Kernel]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment in the order of work of one lane: call it to wait until all that was asked for before it is done.

    Raises RuntimeError if the card failed. `event` is the device's own.
    """

    wait: Work
    event: Any = None

    def __call__(self) -> None:
        self.wait()


REACHED = Mark(lambda: None)
"""The mark of what was never asked for."""


class Lane(Protocol):
    """Copies and launches, done in the order asked for; nothing here waits. Addresses are plain integers."""

    def upload(self, target: int, source: Bytes) -> None: ...

    def download(self, target: Bytes, source: int) -> None: ...

    def launch(self, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[int | float]) -> None: ...

    def mark(self) -> Mark:
        """This moment, after everything asked for so far."""

    def after(self, mark: Mark) -> None:
        """What is asked for from here on begins once a mark of any lane is reached."""


class CudaDevice(Lane, Protocol):
    """A card, and its main lane. Everything but `allocate`, `staging` and `synchronize` is asynchronous."""

    @property
    def name(self) -> str:
        """For people: the card and its compute capability."""

    def free_bytes(self) -> int:
        """Memory that can be allocated now, by the driver's account."""

    def allocate(self, size: int, purpose: str, remedy: str) -> int:
        """The address of `size` bytes, aligned to 256 and zero. Raises MemoryError: purpose, sizes, remedy."""

    def staging(self, size: int, purpose: str, remedy: str) -> Bytes:
        """(size,) page-locked host memory, zero: what `upload` and `download` move without waiting. Raises MemoryError:
        purpose, sizes, remedy."""

    def lane(self) -> Lane:
        """Another lane, whose work goes on beside that of the others."""

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        """Seconds from one mark of a `lane` to a later one; None while that is not reached."""

    def copy(self, target: int, source: int, size: int) -> None:
        """`size` bytes from one place on the card to another."""

    def prepare(self, make: KernelMaker) -> None:
        """Compile and load a kernel, so that its first launch does not."""

    def multiply(self, element: str, x: int, weight: int, out: int, shape: tuple[int, int, int], add: bool) -> None:
        """out (T, N) float32 = (out if `add`) + x (T, K) @ weight (N, K).T, by the vendor; shape is (T, N, K)."""

    def capture(self, work: Work) -> Work | None:
        """Record the launches of `work` and return what repeats them at once; None where the driver refuses."""

    def notify(self, mark: Mark, descriptor: int) -> None:
        """Add 1 to an eventfd once a mark is reached, or the card has failed."""

    def synchronize(self) -> None:
        """Wait for everything. Raises RuntimeError if the card failed."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class CupyLane:
    """A stream of CuPy's. `timed`: its marks say when they were reached."""

    def __init__(self, cupy: Any, kernels: _Kernels, *, timed: bool) -> None:
        self._cupy, self._kernels, self._timed = cupy, kernels, timed
        self._runtime, self._driver = cupy.cuda.runtime, cupy.cuda.driver
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def upload(self, target: int, source: Bytes) -> None:
        kind = self._runtime.memcpyHostToDevice
        self._runtime.memcpyAsync(target, source.ctypes.data, source.nbytes, kind, self._stream.ptr)

    def download(self, target: Bytes, source: int) -> None:
        kind = self._runtime.memcpyDeviceToHost
        self._runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, kind, self._stream.ptr)

    def launch(self, kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[int | float]) -> None:
        loaded = self._kernels.load(kernel)
        x, y, z = (*grid, 1, 1)[:3]
        self._driver.launchKernel(
            loaded.function.ptr,
            x, y, z, kernel.threads, 1, 1,
            kernel.shared_bytes,
            self._stream.ptr,
            loaded.arguments.fill(arguments),
            0,
        )  # fmt: skip

    def mark(self) -> Mark:
        event = self._cupy.cuda.Event(block=True, disable_timing=not self._timed)
        event.record(self._stream)
        return Mark(lambda: self._wait(event), event)

    def after(self, mark: Mark) -> None:
        if mark.event is not None:
            self._stream.wait_event(mark.event)

    def _wait(self, what: Any) -> None:
        """For an event or a stream."""
        try:
            what.synchronize()
        except self._runtime.CUDARuntimeError as error:
            raise RuntimeError(f"the card failed: {error}") from error


class CupyDevice(CupyLane):
    """A card through CuPy: its memory, streams and graphs; kernels as machine code of our own."""

    def __init__(self, ordinal: int = 0) -> None:
        cupy: Any = importlib.import_module("cupy")
        cupy.cuda.runtime.setDevice(ordinal)
        properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
        capability = (int(properties["major"]), int(properties["minor"]))
        self._name = f"{properties['name'].decode()} (sm_{capability[0]}{capability[1]})"
        if capability < (8, 0):
            raise RuntimeError(f"{self._name} is too old: kvpool needs compute capability 8.0 (Ampere) or later")
        super().__init__(cupy, _Kernels(cupy, capability), timed=False)
        self._allocations: list[int] = []
        self._pinned: list[Any] = []
        self._waiter = _Waiter(lambda: self._runtime.setDevice(ordinal))

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

    def staging(self, size: int, purpose: str, remedy: str) -> Bytes:
        free = available_memory()
        need = f"{purpose} needs {size / 2**20:.0f} MiB of page-locked memory, {free / 2**20:.0f} MiB are available"
        if size > free:
            raise MemoryError(f"{need}; {remedy}")
        try:
            memory = self._cupy.cuda.alloc_pinned_memory(max(size, 1))
        except self._runtime.CUDARuntimeError as error:
            raise MemoryError(f"{need} and the driver refuses ({error}); {remedy}") from error
        self._pinned.append(memory)
        array = np.frombuffer(memory, np.uint8, size)
        array[:] = 0
        return array

    def lane(self) -> CupyLane:
        return CupyLane(self._cupy, self._kernels, timed=True)

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        return self._cupy.cuda.get_elapsed_time(begin.event, end.event) / 1e3 if end.event.done else None

    def copy(self, target: int, source: int, size: int) -> None:
        self._runtime.memcpyAsync(target, source, size, self._runtime.memcpyDeviceToDevice, self._stream.ptr)

    def prepare(self, make: KernelMaker) -> None:
        self._kernels.load(make())

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
        except (NotImplementedError, self._runtime.CUDARuntimeError, self._driver.CUDADriverError) as error:
            # CuPy refuses to capture the vendor's products; a driver may refuse more.
            with contextlib.suppress(self._runtime.CUDARuntimeError):
                self._stream.end_capture()
            log.warning("a step cannot be captured as a graph and is launched kernel by kernel: %s", error)
            return None
        return lambda: graph.launch(self._stream)

    def notify(self, mark: Mark, descriptor: int) -> None:
        self._waiter.notify(mark, descriptor)

    def synchronize(self) -> None:
        self._wait(self._stream)

    def close(self) -> None:
        self._waiter.close()
        for address in self._allocations:
            self._runtime.free(address)
        self._allocations.clear()
        self._kernels.clear()
        self._pinned.clear()


_FORMATS = {"int32": "i4x", "int64": "q", "uint64": "Q", "float32": "f4x"}  # of `struct`; addresses are uint64


class Arguments:
    """Room for the arguments of one launch of a kernel, each in 8 bytes of its own; the driver copies them at once."""

    def __init__(self, kernel: Kernel) -> None:
        kinds = [_FORMATS.get(kind, "Q") for _, kind in kernel.arguments]
        self._name, self._struct = kernel.name, struct.Struct("<" + "".join(kinds))
        self._buffer = bytearray(self._struct.size)
        self.values = np.frombuffer(self._buffer, np.uint64)
        self._addresses = self.values.ctypes.data + 8 * np.arange(len(kinds), dtype=np.uint64)
        self._address = int(self._addresses.ctypes.data)

    def fill(self, arguments: Sequence[int | float]) -> int:
        """The address of the addresses of these values: what the driver wants. Raises TypeError if they do not fit."""
        try:
            self._struct.pack_into(self._buffer, 0, *arguments)
        except struct.error as error:
            raise TypeError(f"kernel {self._name} cannot take {tuple(arguments)}: {error}") from None
        return self._address


class _Loaded:
    """A kernel that is on the card. Kept here, it keeps its id."""

    def __init__(self, kernel: Kernel, function: Any) -> None:
        self.kernel, self.function = kernel, function  # which keeps its module
        self.arguments = Arguments(kernel)


class _Kernels:
    """Those that are on the card, by their id."""

    def __init__(self, cupy: Any, capability: tuple[int, int]) -> None:
        self._cupy, self._capability = cupy, capability
        self._loaded: dict[int, _Loaded] = {}

    def load(self, kernel: Kernel) -> _Loaded:
        """Bring a kernel onto the card, unless it is there."""
        loaded = self._loaded.get(id(kernel))
        if loaded is None:
            module = self._cupy.cuda.function.Module()
            module.load(assemble(kernel, self._capability))
            function = module.get_function(kernel.name)
            if kernel.shared_bytes:
                driver = self._cupy.cuda.driver
                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(function.ptr, attribute, kernel.shared_bytes)
            loaded = self._loaded[id(kernel)] = _Loaded(kernel, function)
        return loaded

    def clear(self) -> None:
        self._loaded.clear()


class _Waiter:
    """A thread that waits for marks, so that an eventfd is written even if the card fails and no callback comes."""

    def __init__(self, begin: Work) -> None:
        self._begin = begin
        self._marks: queue.SimpleQueue[tuple[Mark, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvpool-cuda-wait", daemon=True)
        self._thread.start()

    def notify(self, mark: Mark, descriptor: int) -> None:
        self._marks.put((mark, descriptor))

    def _run(self) -> None:
        self._begin()
        while (entry := self._marks.get()) is not None:
            mark, descriptor = entry
            with contextlib.suppress(RuntimeError):  # whoever waits for the mark itself hears of it
                mark()
            os.eventfd_write(descriptor, 1)

    def close(self) -> None:
        self._marks.put(None)
        self._thread.join()
