"""Launching kernels on the PTX interpreter, or on the card that `real_card.py` was told of."""

from __future__ import annotations

from typing import Any

from tests.ptx import Counters, Device
from tests.support.cuda_rooms import compiler
from tests.support.real_card import CardDevice


def launch(device: Device, kernel: compiler.Kernel, grid: tuple[int, ...], *arguments: Any) -> Counters:
    """Run `kernel` with its own block size; arguments in the order of `kernel.arguments`. A card counts nothing."""
    assert len(arguments) == len(kernel.arguments)
    if isinstance(device, CardDevice):
        device.launch(kernel, grid, arguments)
        return Counters(kernel.name, [])
    return device.run(kernel.ptx, grid, kernel.threads, arguments, kernel.shared_bytes)
