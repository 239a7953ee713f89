"""Numba-CUDA to PTX, on a machine without GPU or driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from .decode import Decoded, Decoder
from .flatten import flatten
from .parser import parse

ComputeCapability = tuple[int, int]


@dataclass(eq=False)
class Kernel:
    """PTX text and, once it is run, its decoded form. `argtypes`: Numba types, or None for raw parameters."""

    ptx: str
    entry: str | None = None
    argtypes: tuple[Any, ...] | None = None
    label: str = ""  # what reports call it; empty: the entry's name

    @cached_property
    def decoded(self) -> Decoded:
        return Decoder(flatten(parse(self.ptx), self.entry)).run()


_compiled: dict[Any, Kernel] = {}


def compile_kernel(
    function: Any,
    signature: Any,
    cc: ComputeCapability = (9, 0),
    **options: Any,
) -> Kernel:
    """PTX of a kernel: a plain Python function or what `@cuda.jit` made of it. `signature`: a tuple of Numba types, or
    the string form "void(float32[::1], int32)". Options go to `cuda.compile_ptx` (fastmath, lineinfo, ...). Cached."""
    from numba.core import sigutils

    cuda: Any = import_module("numba.cuda")
    normalize: Any = sigutils.normalize_signature
    function = getattr(function, "py_func", function)
    argtypes, _ = normalize(signature)
    key = (function, argtypes, cc, tuple(sorted(options.items())))
    if key not in _compiled:
        with device_functions_for(cc):
            ptx, _ = cuda.compile_ptx(function, argtypes, cc=cc, **options)
        _compiled[key] = Kernel(ptx, None, tuple(argtypes), function.__name__)
    return _compiled[key]


@contextlib.contextmanager
def device_functions_for(cc: ComputeCapability) -> Iterator[None]:
    """Numba asks the driver for the current device when it compiles a `@cuda.jit(device=True)` function that a kernel
    calls; without a driver that fails, so the question is answered here."""
    dispatcher: Any = import_module("numba.cuda.dispatcher")

    class NoDevice:
        compute_capability = cc

    asked: Callable[[], Any] = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: NoDevice
    try:
        yield
    finally:
        dispatcher.get_current_device = asked
