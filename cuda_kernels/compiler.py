"""From a Python function to PTX: what a kernel is, once it is compiled.

Kernels are compiled for compute capability 8.0 once; `ptxas` (or the driver) makes machine code of that for every
later card. Parameters are plain addresses and numbers, no array descriptors, so that any launcher can pass them and a
kernel reads nothing that its own argument list does not show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .jit import cuda, dispatcher, types

COMPUTE_CAPABILITY = (8, 0)
WARP = 32
REGISTERS_PER_MULTIPROCESSOR = 65536

INT32 = types.int32
INT64 = types.int64
UINT64 = types.uint64
FLOAT32 = types.float32


def pointer(element: Any) -> Any:
    """The type of a device address whose elements have Numba type `element`."""
    return types.CPointer(element)


@dataclass(frozen=True, slots=True)
class Kernel:
    """PTX with one entry, and what a launcher must know about it.

    `arguments` are (name, kind) in order; kind is int32 | int64 | uint64 | float32, or an element type and `*` for an
    address. `registers` is the budget per thread that `ptxas` must keep without spilling; `shared_bytes` is dynamic
    shared memory beyond the static.
    """

    name: str
    ptx: str
    arguments: tuple[tuple[str, str], ...]
    threads: int
    registers: int
    shared_bytes: int = 0


def build(
    function: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    name: str,
    threads: int,
    registers: int,
    shared_bytes: int = 0,
) -> Kernel:
    """Compile `function`; `arguments` maps its parameter names to Numba types, in order.

    `ptxas` is told how many blocks the register budget lets a multiprocessor hold, and uses what that leaves.
    """
    signature = types.void(*arguments.values())
    resident = max(1, REGISTERS_PER_MULTIPROCESSOR // (threads * registers))
    with _helpers_for_target():
        ptx, _ = cuda.compile_ptx(function, signature, cc=COMPUTE_CAPABILITY, launch_bounds=(threads, resident))
    kinds = tuple((argument, _kind(kind)) for argument, kind in arguments.items())
    return Kernel(name, _tidy(ptx, name), kinds, threads, registers, shared_bytes)


@contextmanager
def _helpers_for_target() -> Iterator[None]:
    """Numba asks the driver which card a `device=True` helper is for. Answer with the target: no driver is needed."""
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=COMPUTE_CAPABILITY)
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


def _kind(argument_type: Any) -> str:
    return f"{argument_type.dtype}*" if isinstance(argument_type, types.CPointer) else str(argument_type)


def _tidy(ptx: str, name: str) -> str:
    """Give the entry its short name, and drop Numba's environment variable, which no kernel reads."""
    ptx = re.sub(r"^\.common \.global .*NumbaEnv.*;\n", "", ptx, flags=re.MULTILINE)
    found = re.search(r"\.visible \.entry (\w+)\(", ptx)
    if found is None:
        raise RuntimeError(f"the compiler returned no entry for kernel {name}")
    return ptx.replace(found[1], name)
