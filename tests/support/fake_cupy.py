"""As much of CuPy as `CupyDevice` uses, over the PTX interpreter: same names, same arguments, and what CuPy refuses.

Addresses, machine words and argument lists are real, so what the device class hands to the driver is what runs. While a
stream is captured nothing runs, whatever waits or moves host memory fails, and cuBLAS is refused, as CuPy does.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.ptx.compile import Kernel
from tests.ptx.scalars import DTYPES
from tests.support.cuda_card import Card
from tests.support.cuda_twins import values


class CUDARuntimeError(RuntimeError):
    """As CuPy's, which is a RuntimeError too."""


class CUDADriverError(RuntimeError):
    """As CuPy's."""


class FakeCupy:
    """Stands for the module; `card` is the memory and the interpreter behind it."""

    def __init__(self) -> None:
        self.card = Card()
        self.freed: list[int] = []
        self.failing = False  # every wait fails, as after an illegal access
        self.capturing: list[Callable[[], None]] | None = None
        self.stream_ids = count()
        self._functions: list[Kernel] = []
        cuda = SimpleNamespace(runtime=Runtime(self), driver=Driver(self), cublas=Cublas(self))
        cuda.Stream = lambda non_blocking=False: Stream(self)
        cuda.Event = lambda block=False, disable_timing=False: Event(self, timed=not disable_timing)
        cuda.get_elapsed_time = elapsed_ms
        cuda.alloc_pinned_memory = bytearray
        cuda.function = SimpleNamespace(Module=lambda: Module(self))
        cuda.device = SimpleNamespace(get_cublas_handle=lambda: 77)
        self.cuda = cuda

    def do(self, work: Callable[[], None]) -> None:
        """Now, or when the graph is launched."""
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)

    def outside_capture(self) -> None:
        if self.capturing is not None:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")

    def wait(self) -> None:
        self.outside_capture()
        if self.failing:
            raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def add_function(self, kernel: Kernel) -> int:
        self._functions.append(kernel)
        return 1000 + len(self._functions)

    def function(self, handle: int) -> Kernel:
        return self._functions[handle - 1001]


class Runtime:
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    streamCaptureModeThreadLocal = 1
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy

    def setDevice(self, device: int) -> None:
        assert device == 0

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {"name": b"a card of CuPy's", "major": 9, "minor": 0}

    def memGetInfo(self) -> tuple[int, int]:
        return self._cupy.card.free_bytes(), 1 << 28

    def malloc(self, size: int) -> int:
        self._cupy.outside_capture()
        return self._cupy.card.allocate(size, "", "")

    def free(self, ptr: int) -> None:
        self._cupy.freed.append(ptr)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._cupy.do(lambda: self._cupy.card.upload(ptr, np.full(size, value, np.uint8)))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        card = self._cupy.card
        if kind == self.memcpyDeviceToDevice:
            self._cupy.do(lambda: card.copy(dst, src, size))
            return
        self._cupy.outside_capture()
        if kind == self.memcpyHostToDevice:
            card.upload(dst, np.frombuffer(ctypes.string_at(src, size), np.uint8))
        else:
            ctypes.memmove(dst, card.view(src, size, np.uint8).tobytes(), size)


class Driver:
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CUDADriverError = CUDADriverError

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self.shared_limits: dict[int, int] = {}

    def funcSetAttribute(self, f: int, attribute: int, value: int) -> None:
        self.shared_limits[f] = value

    def launchKernel(
        self, f: int, grid_dim_x: int, grid_dim_y: int, grid_dim_z: int, block_dim_x: int, block_dim_y: int,
        block_dim_z: int, shared_mem_bytes: int, stream: int, kernel_params: int, extra: int,
    ) -> None:  # fmt: skip
        kernel = self._cupy.function(f)
        if shared_mem_bytes > self.shared_limits.get(f, 48 << 10):
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE")
        params = kernel.decoded.program.params
        where = np.frombuffer(ctypes.string_at(kernel_params, 8 * len(params)), np.uint64).tolist()
        given = [ctypes.string_at(at, DTYPES[param.type].itemsize) for at, param in zip(where, params, strict=True)]
        grid, block = (grid_dim_x, grid_dim_y, grid_dim_z), (block_dim_x, block_dim_y, block_dim_z)
        memory = self._cupy.card.memory
        self._cupy.do(lambda: memory.run(kernel, grid, block, given, shared_mem_bytes) and None)


class Cublas:
    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 0, 1, 68, -1

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy

    def gemmEx(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
        B: int, Btype: int, ldb: int, beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int,
    ) -> None:  # fmt: skip
        """Column-major C (m, n) = alpha A^T B + beta C: what the device class asks for."""
        if self._cupy.capturing is not None:
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
        assert (handle, transa, transb, Ctype) == (77, self.CUBLAS_OP_T, self.CUBLAS_OP_N, 0)
        one, add = (np.frombuffer(ctypes.string_at(at, 4), np.float32)[0] for at in (alpha, beta))
        element = {14: "bfloat16", 2: "float16", 0: "float32"}[Atype]
        dtype, card = np.float32 if element == "float32" else np.uint16, self._cupy.card
        a = values(card.view(A, m * lda, dtype), element).reshape(m, lda)[:, :k]
        b = values(card.view(B, n * ldb, dtype), element).reshape(n, ldb)[:, :k]
        c = card.view(C, n * ldc, np.float32).reshape(n, ldc)
        card.memory.write(c, one * (b @ a.T) + (add * c if add else 0))


class Module:
    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy, self._image = cupy, b""

    def load(self, cubin: bytes) -> None:
        self._cupy.outside_capture()
        self._image = cubin

    def get_function(self, name: str) -> Any:
        kernel = Kernel(self._image.decode())
        assert kernel.decoded.program.name == name
        return SimpleNamespace(ptr=self._cupy.add_function(kernel), module=self)


class Event:
    def __init__(self, cupy: FakeCupy, *, timed: bool) -> None:
        self._cupy, self.timed, self.recorded_s = cupy, timed, 0.0

    def record(self, stream: Any = None) -> None:
        assert stream is not None, "the null stream knows nothing of ours"
        self._cupy.outside_capture()
        self.recorded_s = time.perf_counter()

    @property
    def done(self) -> bool:
        return bool(self.recorded_s) and not self._cupy.failing

    def synchronize(self) -> None:
        assert self.recorded_s
        self._cupy.wait()


def elapsed_ms(start_event: Event, end_event: Event) -> float:
    """As CuPy's get_elapsed_time."""
    assert start_event.timed
    assert end_event.timed
    return 1e3 * (end_event.recorded_s - start_event.recorded_s)


class Stream:
    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        self.ptr = 55 + next(cupy.stream_ids)

    def wait_event(self, event: Event) -> None:
        self._cupy.outside_capture()
        assert event.recorded_s

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        self._cupy.wait()

    def begin_capture(self, mode: int | None = None) -> None:
        self._cupy.outside_capture()
        self._cupy.capturing = []

    def end_capture(self) -> Any:
        if self._cupy.capturing is None:
            raise CUDARuntimeError("cudaErrorIllegalState: not capturing")
        recorded, self._cupy.capturing = self._cupy.capturing, None

        def launch(stream: Any = None) -> None:
            assert stream is self
            for work in recorded:
                work()

        return SimpleNamespace(launch=launch)
