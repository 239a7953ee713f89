"""Numba-CUDA as kernels use it: its names without static types, and decorators that keep ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba import cuda as _cuda
from numba import types as _types
from numba.cuda import dispatcher as _dispatcher
from numba.cuda.extending import intrinsic as _intrinsic

cuda: Any = _cuda
types: Any = _types
dispatcher: Any = _dispatcher


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels call; the compiler inlines it."""
    return cast(Callable[..., Any], cuda.jit(device=True)(function))


def instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Numba types that returns (signature, code generator): see `numba.cuda.extending.intrinsic`."""
    return cast(Callable[..., Any], _intrinsic(function))
