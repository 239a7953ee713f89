"""One step on its way, and which step is likely to come next: what launching ahead of the host needs."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..batch import StepBatch, StepResult
from ..program import Logits
from .device import REACHED
from .program import TOP_WIDTH

Arrays = Mapping[str, NDArray[Any]]


class Flight:
    """One step on its way: what was asked for, and what has arrived in the staging memory `arriving`."""

    def __init__(self, batch: StepBatch, last: Logits, dtype: DTypeLike, arriving: Arrays) -> None:
        rows = len(batch.logit_rows)
        width = max(0, int(batch.sampling.num_logprobs.max(initial=0)))
        self.batch = batch
        self.started_s = time.perf_counter()
        self.reached = REACHED  # waits until the card has done all that was asked for
        self.pending = (0, 0)  # the stretch of logit rows that is still on the card
        self.tokens = np.empty(rows, np.int32)
        self.logprobs = np.empty(rows, np.float32)
        self.top_tokens = np.empty((rows, width), np.int32)
        self.top_logprobs = np.empty((rows, width), np.float32)
        self.errors = np.empty(rows, np.bool_)
        self.logits = np.empty((rows, last.out.width), np.float32) if batch.want_logits else None
        self.hidden = np.empty((rows, last.x.width), dtype) if batch.want_hidden else None  # as products read it
        shape = len(batch.tokens), last.x.width
        self.layers = {layer: np.empty(shape, np.float32) for layer in batch.layers}  # outputs of all the step's rows
        self._arriving = arriving

    def take(self) -> None:
        """Wait, and copy the pending rows' results. Raises RuntimeError if the card failed."""
        self.reached()
        start, stop = self.pending
        rows, width = stop - start, self.top_tokens.shape[1]
        for name in ("tokens", "logprobs", "errors"):
            getattr(self, name)[start:stop] = self._arriving[name][:rows]
        for name in ("top_tokens", "top_logprobs"):
            getattr(self, name)[start:stop] = self._arriving[name].reshape(-1, TOP_WIDTH)[:rows, :width]

    def finish(self) -> StepResult:
        outputs = [output[self.batch.layer_rows] for output in self.layers.values()]
        return StepResult(
            self.tokens,
            self.logprobs,
            self.top_tokens,
            self.top_logprobs,
            self.errors,
            compute_s=time.perf_counter() - self.started_s,
            logits=self.logits,
            hidden=None if self.hidden is None else self.hidden.astype(np.float32),
            layer_outputs=np.stack(outputs) if outputs else None,
        )


def following(batch: StepBatch, block_size: int) -> StepBatch | None:
    """The step after a plain decode step, if every sequence just goes on; a copy.

    Its tokens are those that `batch` will sample: unknown to the host, zeros here. None where the host must be asked:
    a sequence is at its end or needs a block that it does not have yet, or its penalties count the token that is not
    known yet.
    """
    slots = batch.next_slots
    if not len(slots) or (slots < 0).any() or len(batch.sampling.penalty_tokens):
        return None
    after = copy.deepcopy(batch)
    after.tokens[:] = 0
    after.positions += 1
    after.slot_mapping = slots.copy()
    after.seq_lens += 1
    after.sampling.counters += 1
    last = after.positions // block_size  # (S,) the table entry of each token
    missing = max(0, int(last.max()) + 1 - after.block_tables.shape[1])
    after.block_tables = np.pad(after.block_tables, ((0, 0), (0, missing)))
    after.block_tables[np.arange(len(last)), last] = slots // block_size
    after.next_slots = np.where(after.seq_lens % block_size, slots + 1, -1)
    return after


def is_same_step(expected: StepBatch, asked: StepBatch, block_size: int) -> bool:
    """`asked` is the step `expected`, whatever its tokens are."""
    for name in ("positions", "slot_mapping", "query_start", "seq_lens", "logit_rows"):
        if not np.array_equal(getattr(expected, name), getattr(asked, name)):
            return False
    if not asked.only_tokens:
        return False
    for field in fields(asked.sampling):
        if not np.array_equal(getattr(expected.sampling, field.name), getattr(asked.sampling, field.name)):
            return False
    width = min(expected.block_tables.shape[1], asked.block_tables.shape[1])
    used = np.arange(width) * block_size < asked.seq_lens[:, None]  # (S, width): the others are undefined
    return bool((expected.block_tables[:, :width] == asked.block_tables[:, :width])[used].all())
