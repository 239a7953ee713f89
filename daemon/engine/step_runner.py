"""Carries out StepPlans on a back end: memory moves, then the step; and measures what they cost."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from ...model.backend import Backend, BackendLimits
from ...model.batch import StepResult
from ..memory.host_pool import PreemptionCosts
from ..memory.sequence import Sequence
from ..scheduling.step_plan import StepPlan
from .request import Sample
from .step_builder import Report, StepBuilder

SMOOTHING = 0.1  # weight of the newest measurement


class StepRunner:
    """One step at a time: `start`, wait for `fileno`, `collect`."""

    def __init__(self, backend: Backend, limits: BackendLimits, *, costs: PreemptionCosts) -> None:
        self._backend = backend
        self._builder = StepBuilder(limits)
        self._costs = costs
        self._started_at = 0.0
        self._prompt_tokens = 0  # rows of the step that is under way, if it tells what a prompt costs
        self.last_step_s = 0.0

    def measure_swap(self) -> None:
        """Swap a block that holds nothing out and in, so that the first decision is a measured one too. There must be
        a host slot."""
        for _ in range(2):  # the first time something may have to be made ready
            self._backend.swap_out([0], [0])
            self._backend.read_host([0])
            num_blocks, seconds = self._backend.take_swap_times()
            self._backend.swap_in([0], [0])
            if num_blocks:
                self._costs.swap_s_per_block = seconds / num_blocks

    @property
    def block_bytes(self) -> int:
        return self._backend.block_bytes

    @property
    def kv_layout(self) -> str:
        return self._backend.kv_layout

    def read(self, sequence: Sequence, part: slice = slice(None)) -> NDArray[np.uint8]:
        """(num_blocks, block_bytes) uint8: a sequence's blocks, or part of them, from the device or the host. Not while
        a step runs."""
        if sequence.host_slots:
            return self._backend.read_host(sequence.host_slots[part])
        return self._backend.read_blocks(sequence.block_table[part])

    def keys_values(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        """What blocks contain: see `Backend.keys_values`."""
        return self._backend.keys_values(data)

    def write(self, blocks: list[int], data: NDArray[np.uint8]) -> None:
        """The inverse of `read`, into blocks that nobody else uses. Not while a step runs."""
        self._backend.write_blocks(blocks, data)

    def fileno(self) -> int:
        """Polls readable when the step that was started is done."""
        return self._backend.fileno()

    def start(self, plan: StepPlan) -> None:
        """Move the plan's blocks and launch its chunks. Raises RuntimeError if the device failed."""
        self.move(plan)
        batch = self._builder.build(plan)
        # A step of single tokens reads all weights for a few rows: computing a lost prompt again is cheaper by the row.
        self._prompt_tokens = plan.num_tokens if plan.num_tokens > 2 * len(plan.chunks) else 0
        self._started_at = time.perf_counter()
        self._backend.launch(batch)

    def move(self, plan: StepPlan) -> None:
        """Only the plan's memory moves, in its order: swap out, copy, swap in."""
        if plan.swap_out:
            self._backend.swap_out(*zip(*plan.swap_out, strict=True))
        if plan.copies:
            self._backend.copy_blocks(*zip(*plan.copies, strict=True))
        if plan.swap_in:
            self._backend.swap_in(*zip(*plan.swap_in, strict=True))

    def collect(self) -> tuple[StepResult, list[Report]]:
        """The step's result, its sampled rows first, and what else it says. Raises RuntimeError if the device
        failed."""
        result = self._backend.collect()
        self.last_step_s = time.perf_counter() - self._started_at
        if self._prompt_tokens:
            per_token, known = result.compute_s / self._prompt_tokens, self._costs.compute_s_per_token
            self._costs.compute_s_per_token = known + SMOOTHING * (per_token - known) if known else per_token
        num_blocks, seconds = self._backend.take_swap_times()
        if num_blocks:
            self._costs.swap_s_per_block += SMOOTHING * (seconds / num_blocks - self._costs.swap_s_per_block)
        return result, self._builder.reports(result)

    def release(self, sample: Sample) -> None:
        """The sample runs no more, or its blocks changed: forget what is kept of it between steps."""
        self._builder.release(sample)
