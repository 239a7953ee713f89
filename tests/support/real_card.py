"""A card in the interpreter's place: with it, the kernel tests check a GPU. `bench/gpu_check.py` runs them so.

KVPOOL_TEST_CARD says where kernels run: unset, in the PTX interpreter; `cuda`, on the first card; `interpreter`, in an
interpreter behind the card's interface, so that this file itself can be tested. KVPOOL_TEST_SEED changes all inputs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.model.cuda.device import CudaDevice, CupyDevice, Work
from tests.ptx import Device
from tests.ptx.memory import UNWRITTEN, WRITTEN
from tests.support.cuda_card import Card
from tests.support.cuda_rooms import compiler

CAPACITY_BYTES = 1 << 28


def on_card() -> bool:
    """Kernels run on a card: what only the interpreter sees (counts, unwritten memory) cannot be asked for."""
    return bool(os.environ.get("KVPOOL_TEST_CARD"))


interpreter_only = pytest.mark.skipif(on_card(), reason="asks what only the interpreter knows")


def fresh(seed: int) -> np.random.Generator:
    """Random numbers for a test: the same in every run, unless KVPOOL_TEST_SEED says otherwise."""
    return np.random.default_rng([seed, int(os.environ.get("KVPOOL_TEST_SEED", "0"))])


def kernel_device(**options: Any) -> Device:
    """Memory and launches for a kernel test; `options` are the interpreter's."""
    return CardDevice() if on_card() else Device(**options)


def backend_card() -> Any:
    """A card for the whole back end that also lists its `launches`."""
    return RecordingCard() if os.environ.get("KVPOOL_TEST_CARD") == "cuda" else Card()


class RecordingCard(CupyDevice):
    """The real card, taking notes as `Card` does."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def launch(self, kernel: compiler.Kernel, grid: tuple[int, ...], arguments: Sequence[int | float]) -> None:
        self.launches.append(kernel.name)
        super().launch(kernel, grid, arguments)

    def multiply(self, element: str, x: int, weight: int, out: int, shape: tuple[int, int, int], add: bool) -> None:
        self.launches.append("vendor")
        super().multiply(element, x, weight, out, shape, add)

    def capture(self, work: Work) -> Work | None:
        replay = super().capture(work)
        assert replay is not None, "the driver refuses to capture a step"
        return replay


@functools.cache
def _card() -> tuple[CudaDevice, int]:
    """The card of this process, and its copy of a test's memory."""
    card = CupyDevice() if os.environ["KVPOOL_TEST_CARD"] == "cuda" else Card(2 * CAPACITY_BYTES)
    return card, card.allocate(CAPACITY_BYTES, "memory of a test", "free memory on the card")


class CardDevice(Device):
    """The interpreter's memory, copied to the card before each launch and back after it.

    What was poisoned and still is counts as unwritten, but nobody watches who reads it: poison is NaN.
    """

    def __init__(self) -> None:
        super().__init__(CAPACITY_BYTES, count=False)

    def launch(self, kernel: compiler.Kernel, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        card, base = _card()
        used = self.memory.end
        memory, state = self.memory.data[:used], self.memory.state[:used]
        before = memory.copy()
        addresses = [base + self.offset(each) if isinstance(each, np.ndarray) else each for each in arguments]
        card.upload(base, before)
        card.launch(kernel, grid, addresses)
        card.download(memory, base)
        card.synchronize()
        state[(memory != before) & (state == UNWRITTEN)] = WRITTEN

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()
