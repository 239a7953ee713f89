"""How kernels are compiled: one decorator for functions, one for hand-written LLVM instructions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic as numba_intrinsic

# Sources changed after this moment are not what this process runs.
LOADED_NS = time.time_ns()

Function = TypeVar("Function", bound=Callable[..., Any])

# No Python object ever enters a kernel: without the wrappers a function compiles in half the time.
KERNEL_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def kernel(function: Function) -> Function:
    """A function that other kernels call. Compiled for each combination of argument types on first use."""
    return cast(Function, numba.njit(**KERNEL_OPTIONS)(function))


def inlined(function: Function) -> Function:
    """A kernel that becomes part of its callers, so that they need not ask whether it failed."""
    return cast(Function, numba.njit(inline="always", **KERNEL_OPTIONS)(function))


def entry_point(function: Function) -> Function:
    """A kernel that Python calls; runs without the GIL."""
    return cast(Function, numba.njit(nogil=True, error_model="numpy")(function))


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Numba types that returns (signature, code generator): see `numba.extending.intrinsic`."""
    return cast(Callable[..., Any], numba_intrinsic(function))
