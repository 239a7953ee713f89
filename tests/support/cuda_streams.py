"""A card whose lanes really go on beside each other: what forgets to wait for something is found out.

Nothing is done when it is asked for, but when the host waits for it, or when the card feels like it: `eager` lanes do
what they can at once, lazy ones as late as they can, so the worst order for every missing wait is among a few runs.
Uploads read page-locked memory when they are done, not when they are asked for, as a card does.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.model.cuda.device import Mark
from tests.support.cuda_card import Card, TwinCard, Work
from tests.support.cuda_rooms import compiler, layout


@dataclass(eq=False)
class Event:
    """Of one lane; reached when all that was asked of it before is done."""

    lane: StreamedLane
    reached_s: float = 0.0
    descriptors: list[int] = field(default_factory=list)

    def reach(self) -> None:
        self.reached_s = time.perf_counter()
        for descriptor in self.descriptors:
            os.eventfd_write(descriptor, 1)


@dataclass(frozen=True)
class Wait:
    """The lane stands still until an event of another one is reached."""

    event: Event


class StreamedLane:
    """A queue of what was asked for."""

    def __init__(self, card: StreamedCard) -> None:
        self._card = card
        self._asked: deque[Work | Event | Wait] = deque()

    def ask(self, work: Work | Event | Wait) -> None:
        self._asked.append(work)
        self._card.loiter()

    def upload(self, target: int, source: NDArray[np.uint8]) -> None:
        self.ask(lambda: Card.upload(self._card, target, source))

    def download(self, target: NDArray[np.uint8], source: int) -> None:
        self.ask(lambda: Card.download(self._card, target, source))

    def launch(self, kernel: compiler.Kernel, grid: tuple[int, ...], arguments: Sequence[int | float]) -> None:
        given = tuple(arguments)
        self.ask(lambda: self._card.run_kernel(kernel, grid, given))

    def mark(self) -> Mark:
        event = Event(self)
        self.ask(event)
        return Mark(lambda: self.run_until(event), event)

    def after(self, mark: Mark) -> None:
        if mark.event is not None:
            self.ask(Wait(mark.event))

    @property
    def ready(self) -> bool:
        """There is work that waits for no other lane."""
        if not self._asked:
            return False
        first = self._asked[0]
        return not isinstance(first, Wait) or first.event.reached_s > 0

    def step(self) -> None:
        """Do the next thing; what it waits for comes first."""
        match self._asked.popleft():
            case Event() as event:
                event.reach()
            case Wait() as wait:
                wait.event.lane.run_until(wait.event)
            case work:
                work()

    def run_until(self, event: Event) -> None:
        while not event.reached_s:
            self.step()

    def run(self) -> None:
        while self._asked:
            self.step()


class StreamedCard(TwinCard):
    """`main`, `side`: the share of what it is asked for that a lane does at once, 0 to 1, as chance (`seed`) has it.

    Products have the same bits in every batch, as the kernels' have.
    """

    def __init__(
        self, shape: layout.AttentionShape, element: str, *, main: float = 0.0, side: float = 0.0, seed: int = 0
    ) -> None:
        self._main = StreamedLane(self)
        self._lanes = [(self._main, main)]
        self._side, self._chance, self._busy = side, random.Random(seed), False
        super().__init__(shape, element)

    def lane(self) -> Any:
        self._lanes.append((StreamedLane(self), self._side))
        return self._lanes[-1][0]

    def loiter(self) -> None:
        """Something was asked for: do some of it, or something else."""
        if self._busy:
            return
        self._busy = True
        for lane, share in self._lanes:
            while lane.ready and self._chance.random() < share:
                lane.step()
        self._busy = False

    def run_kernel(self, kernel: compiler.Kernel, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        self._run(kernel, grid, arguments)

    def _do(self, work: Work) -> None:
        if self._recording is None:
            self._main.ask(work)
        else:
            self._recording.append(work)

    def upload(self, target: int, source: NDArray[np.uint8]) -> None:
        self._main.upload(target, source)

    def download(self, target: NDArray[np.uint8], source: int) -> None:
        self._main.download(target, source)

    def copy(self, target: int, source: int, size: int) -> None:
        self._main.ask(lambda: Card.copy(self, target, source, size))

    def mark(self) -> Mark:
        return self._main.mark()

    def after(self, mark: Mark) -> None:
        self._main.after(mark)

    def elapsed_s(self, begin: Mark, end: Mark) -> float | None:
        return end.event.reached_s - begin.event.reached_s if end.event.reached_s else None

    def notify(self, mark: Mark, descriptor: int) -> None:
        if mark.event.reached_s:
            os.eventfd_write(descriptor, 1)
        else:
            mark.event.descriptors.append(descriptor)

    def synchronize(self) -> None:
        self._main.run()

    def _float32_matmul(self, grid: tuple[int, ...], a: dict[str, Any], wide: set[str]) -> None:
        rows, outputs, width = a["num_rows"], a["num_outputs"], a["width"]
        x = self.view(a["x"], rows * width, np.float32).reshape(rows, width)
        out = np.einsum("rk,nk->rn", x, self.view(a["weight"], outputs * width, np.float32).reshape(outputs, width))
        if a["has_bias"]:
            out = out + self._read(a["bias"], (outputs,), True)
        if a["accumulate"]:
            out = out + self._read(a["out"], (rows, outputs), True)
        self._write(a["out"], out, True)
