# mypy: disable-error-code="no-any-return"
"""The device as tests see it: memory that NumPy can look into, and launches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .compile import Kernel, compile_kernel
from .counters import Counters
from .decode import Decoded
from .errors import LaunchError, UnwrittenRead
from .machine import Dim3, Machine
from .memory import GLOBAL_BASE, UNWRITTEN, WRITTEN, GlobalSpace
from .parser import Declaration
from .scalars import DTYPES, Array, dtype_of

MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024  # what a block may have on sm_90
_texts: dict[str, Kernel] = {}


class Device:
    """Global memory shared by a sequence of launches.

    `poison`: fresh memory counts as unwritten and kernels may not read it before something writes it. `check_races` and
    `count` can be turned off for speed; `lanes_at_once` is how many threads (in whole blocks) run in lockstep.
    """

    def __init__(
        self,
        capacity_bytes: int = 1 << 30,
        poison: bool = True,
        check_races: bool = True,
        count: bool = True,
        lanes_at_once: int = 8192,
        max_steps: int = 50_000_000,
    ) -> None:
        self.memory = GlobalSpace(capacity_bytes)
        self.poison = poison
        self.check_races = check_races
        self.count = count
        self.lanes_at_once = lanes_at_once
        self.max_steps = max_steps
        self.globals: dict[tuple[str, str], int] = {}  # (module text, variable) -> address

    # --- memory -----------------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """A NumPy array in device memory. Nothing has been written: a kernel that reads it first fails."""
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        count = int(np.prod(size, dtype=np.int64))
        start = self.memory.allocate(count * kind.itemsize, f"{kind}{list(size)}", written=not self.poison)
        return self.memory.data[start : start + count * kind.itemsize].view(kind).reshape(size)

    def array(self, values: Any) -> NDArray[Any]:
        """A copy of `values` in device memory."""
        host = np.ascontiguousarray(values)
        made = self.empty(host.shape, host.dtype)
        self.write(made, host)
        return made

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        made = self.empty(shape, dtype)
        self.write(made, 0)
        return made

    def write(self, array: NDArray[Any], values: Any) -> None:
        """Set device memory from the host."""
        array[...] = values
        self.wrote(array)

    def wrote(self, array: NDArray[Any]) -> None:
        """Declare that the host wrote all of `array` by other means."""
        self._state(array)[...] = WRITTEN

    def discard(self, array: NDArray[Any]) -> None:
        """Forget the contents: a kernel that reads before writing fails again."""
        array.view(np.uint8)[...] = 0xFF
        self._state(array)[...] = UNWRITTEN

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy on the host. Raises UnwrittenRead if anything in it was never written."""
        missing = np.argwhere(self._state(array) != WRITTEN)
        if len(missing):
            raise UnwrittenRead(f"element {tuple(int(n) for n in missing[0][:-1])} of {array.shape} was never written")
        return array.copy()

    def written(self, array: NDArray[Any]) -> NDArray[np.bool_]:
        """Which elements have been written."""
        return (self._state(array) == WRITTEN).all(axis=-1)

    def free(self, array: NDArray[Any]) -> None:
        """Give memory back; a later access is out of bounds."""
        self.memory.free(self.offset(array))

    def offset(self, array: NDArray[Any]) -> int:
        address = array.__array_interface__["data"][0] - self.memory.data.__array_interface__["data"][0]
        if not 0 <= address < len(self.memory.data):
            raise LaunchError("an array argument does not live in this device's memory: make it with Device.array")
        return int(address)

    def pointer(self, array: NDArray[Any]) -> int:
        """The address that a kernel sees."""
        return GLOBAL_BASE + self.offset(array)

    def _state(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """The shadow bytes of an array or strided view: shape (*array.shape, itemsize)."""
        start = self.offset(array)
        shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
        return np.lib.stride_tricks.as_strided(self.memory.state[start:], shape, strides)

    # --- launches ---------------------------------------------------------------------------------------------

    def run(
        self,
        kernel: Kernel | str | Any,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        shared_bytes: int = 0,
        signature: Any = None,
    ) -> Counters:
        """Launch and wait. `kernel`: from compile_kernel, PTX text, or a Numba kernel together with `signature`.

        Arguments: for a Numba kernel as in a launch (arrays of this device, numbers, tuples of them); for PTX text one
        per parameter, arrays giving their address.
        """
        if isinstance(kernel, str):
            kernel = _texts.setdefault(kernel, Kernel(kernel))
        elif not isinstance(kernel, Kernel):
            kernel = compile_kernel(kernel, signature)
        decoded = kernel.decoded
        sizes = self._sizes(decoded, grid, block, shared_bytes)
        values = flat_arguments(self, kernel.argtypes, args)
        machine = Machine(
            decoded,
            self.memory,
            *sizes,
            shared_bytes,
            {**self._parameters(decoded, values), **self._globals(kernel)},
            self.lanes_at_once,
            self.max_steps,
            self.count,
            self.check_races,
        )
        started = time.perf_counter()
        machine.run()
        counters = Counters(
            kernel.label or decoded.program.name, machine.lines, time.perf_counter() - started, machine.num_blocks
        )
        if machine.meter:
            counters.touched_read = np.flatnonzero(machine.meter.read)
            counters.touched_written = np.flatnonzero(machine.meter.written)
        return counters

    def _sizes(
        self, decoded: Decoded, grid: int | Sequence[int], block: int | Sequence[int], shared_bytes: int
    ) -> tuple[Dim3, Dim3]:
        sizes = dim3(grid), dim3(block)
        threads = int(np.prod(sizes[1]))
        limit = decoded.program.max_threads or MAX_THREADS
        if min(*sizes[0], *sizes[1]) < 1 or threads > limit:
            raise LaunchError(
                f"grid {sizes[0]}, block {sizes[1]}: a block has 1 to {limit} threads here, a grid 1 block or more"
            )
        static = sum(size for _, size in decoded.program.shared.values())
        if static > 48 * 1024 or static + shared_bytes > MAX_SHARED_BYTES:
            raise LaunchError(
                f"{static} static and {shared_bytes} dynamic bytes of shared memory; "
                f"the most is 49152 static, {MAX_SHARED_BYTES} in all"
            )
        return sizes

    def _parameters(self, decoded: Decoded, values: Sequence[Any]) -> dict[str, Array]:
        program = decoded.program
        if len(values) != len(program.params):
            raise LaunchError(f"{program.name} has {len(program.params)} parameters, {len(values)} were given")
        buffer = bytearray(program.param_bytes + 16)
        for param, offset, value in zip(program.params, program.param_offsets, values, strict=True):
            raw = parameter_bytes(self, param, value)
            buffer[offset : offset + len(raw)] = raw
        return {
            cell.register: np.frombuffer(buffer, dtype_of(cell.type), 1, cell.offset).copy()
            for cell in program.param_cells.values()
        }

    def _globals(self, kernel: Kernel) -> dict[str, Array]:
        """Addresses of the module's variables, which live as long as the device."""
        result = {}
        for name, variable in kernel.decoded.program.globals.items():
            key = (kernel.ptx, name)
            if key not in self.globals:
                start = self.memory.allocate(max(variable.size, 1), variable.name, written=True)
                content = variable.initial or bytes(variable.size)
                self.memory.data[start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
                self.globals[key] = GLOBAL_BASE + start
            result["&" + name] = np.array([self.globals[key]], dtype=np.uint64)
        return result


def dim3(size: int | Sequence[int]) -> Dim3:
    x, y, z = (*((size,) if isinstance(size, int) else tuple(size)), 1, 1)[:3]
    return int(x), int(y), int(z)


def parameter_bytes(device: Device, param: Declaration, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray) and value.ndim:
        value = device.pointer(value)
    if param.is_array:
        raise LaunchError(f"parameter {param.name} is {param.size} bytes: give bytes")
    dtype = DTYPES[param.type]
    if isinstance(value, np.generic | np.ndarray) and value.dtype.itemsize == dtype.itemsize:
        return value.tobytes()
    if dtype.kind == "f":
        return np.array(value, dtype=dtype).tobytes()
    if isinstance(value, float | np.floating):
        raise LaunchError(f"parameter {param.name} is .{param.type}, {value!r} was given")
    return (int(value) & ((1 << (8 * dtype.itemsize)) - 1)).to_bytes(dtype.itemsize, "little")


def flat_arguments(device: Device, argtypes: Sequence[Any] | None, args: Sequence[Any]) -> list[Any]:
    """What a Numba kernel's parameters receive: an array is (meminfo, parent, size, itemsize, data, shape, strides)."""
    if argtypes is None:
        return list(args)
    if len(argtypes) != len(args):
        raise LaunchError(f"{len(argtypes)} arguments expected, {len(args)} given")
    flat: list[Any] = []
    for argtype, value in zip(argtypes, args, strict=True):
        flat.extend(_flat(device, argtype, value))
    return flat


def _flat(device: Device, argtype: Any, value: Any) -> list[Any]:
    from numba import types
    from numba.np import numpy_support

    if isinstance(argtype, types.Array):
        if not isinstance(value, np.ndarray) or value.ndim != argtype.ndim:
            raise LaunchError(f"{argtype} expected, got {getattr(value, 'shape', value)!r}")
        expected = numpy_support.as_dtype(argtype.dtype)
        if value.dtype.itemsize != expected.itemsize or (value.dtype != expected and value.dtype.kind != "V"):
            raise LaunchError(f"{argtype} expected, got an array of {value.dtype}")
        if argtype.layout == "C" and not value.flags.c_contiguous:
            raise LaunchError(f"{argtype} expected, got strides {value.strides}")
        return [0, 0, value.size, value.itemsize, device.pointer(value), *value.shape, *value.strides]
    if isinstance(argtype, types.BaseTuple):
        kinds: Any = argtype
        return [item for kind, part in zip(kinds, value, strict=True) for item in _flat(device, kind, part)]
    if isinstance(argtype, types.Boolean):
        return [int(value)]
    if isinstance(argtype, types.Integer):
        low, high = argtype.minval, argtype.maxval
        if int(value) != value or not low <= int(value) <= high:
            raise LaunchError(f"{value!r} is not a {argtype}")
        return [int(value)]
    if isinstance(argtype, types.Float):
        return [numpy_support.as_dtype(argtype).type(value)]
    if isinstance(argtype, types.CPointer):
        return [value]
    raise LaunchError(f"arguments of type {argtype} are not supported")
