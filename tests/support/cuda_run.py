"""Launching kernels on the PTX interpreter."""

from __future__ import annotations

from typing import Any

from tests.ptx import Counters, Device
from tests.support.cuda_rooms import compiler


def launch(device: Device, kernel: compiler.Kernel, grid: tuple[int, ...], *arguments: Any) -> Counters:
    """Run `kernel` with its own block size; arguments in the order of `kernel.arguments`."""
    assert len(arguments) == len(kernel.arguments)
    return device.run(kernel.ptx, grid, kernel.threads, arguments, kernel.shared_bytes)
