"""A device without arithmetic, for a whole daemon: the next token is a function of the last one and its position.

So whoever knows a prompt knows its answer, and a step costs next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.model.backend import BackendLimits
from kvpool.model.batch import StepBatch, StepResult
from kvpool.model.host_pool import PlainHostPool
from kvpool.model.program import Program

BLOCK_BYTES = 64


def next_token(token: int, position: int, vocab_size: int) -> int:
    """What follows `token` at `position`."""
    return (token * 7 + position * 13 + 5) % vocab_size


def logprob_of(token: int) -> float:
    """Exact in float32."""
    return -(token % 64) / 8


def answer_to(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1, vocab_size))
    return tokens[len(prompt) :]


class ScriptedBackend(PlainHostPool):
    """Fulfils `Backend`. Logits, where wanted, are a ramp that begins at the token; what a layer makes of a position is
    the position and the layer, in turn."""

    def __init__(self, program: Program, checkpoint: object, limits: BackendLimits) -> None:
        self._vocab_size = program.config.vocab_size
        self._hidden_size = program.config.hidden_size
        self._pool: NDArray[np.uint8] = np.zeros((0, BLOCK_BYTES), np.uint8)
        self._batch: StepBatch | None = None
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    description = "scripted, for tests"
    kv_layout = "scripted"
    weights_bytes = workspace_bytes = 0
    block_bytes = BLOCK_BYTES

    def available_bytes(self) -> int:
        return 1 << 30

    def allocate_pool(self, num_blocks: int) -> None:
        self._pool = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)

    def launch(self, batch: StepBatch) -> None:
        self._batch = batch
        os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def collect(self) -> StepResult:
        if self._batch is None:
            raise RuntimeError("no step is in flight")
        os.eventfd_read(self._event)
        batch, self._batch = self._batch, None
        rows, sampling = batch.logit_rows, batch.sampling
        drawn = (batch.tokens[rows].astype(np.int64) * 7 + batch.positions[rows] * 13 + 5) % self._vocab_size
        tokens = np.where(sampling.targets >= 0, sampling.targets, drawn).astype(np.int32)
        width = max(0, int(sampling.num_logprobs.max(initial=0)))
        ramp = np.arange(self._vocab_size, dtype=np.float32)
        return StepResult(
            tokens=tokens,
            logprobs=(-(tokens % 64) / 8).astype(np.float32),
            top_tokens=np.tile(np.arange(width, dtype=np.int32), (len(rows), 1)),
            top_logprobs=np.tile(-np.arange(width, dtype=np.float32), (len(rows), 1)),
            numeric_errors=np.zeros(len(rows), np.bool_),
            compute_s=1e-6,
            logits=ramp + tokens[:, np.newaxis].astype(np.float32) if batch.want_logits else None,
            hidden=np.repeat(tokens[:, np.newaxis], self._hidden_size, 1).astype(np.float32)
            if batch.want_hidden
            else None,
            layer_outputs=np.stack([self._output(layer, batch) for layer in batch.layers]) if batch.layers else None,
        )

    def _output(self, layer: int, batch: StepBatch) -> NDArray[np.float32]:
        rows = np.full((len(batch.layer_rows), self._hidden_size), layer, np.float32)
        rows[:, ::2] = batch.positions[batch.layer_rows, np.newaxis]
        return rows

    def copy_blocks(self, source: Sequence[int], destination: Sequence[int]) -> None:
        self._pool[list(destination)] = self._pool[list(source)]

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self._pool[list(blocks)]

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        self._pool[list(blocks)] = data

    def close(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
