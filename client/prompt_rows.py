"""Rows of numbers about a request, put together as they arrive: logits, hidden states, prompt logprobs, embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .wire.errors import ProtocolError
from .wire.messages import LAYER_KINDS, ROW_KINDS, Rows

Array = NDArray[Any]

TOKEN_KINDS = ("logits", "hidden")
"""Rows that belong to one generated token each, and come before it."""


def array_of(message: Rows, data: bytes) -> Array:
    """(count, width) of the kind's type, or (count, layers, width), a read-only view of `data`. Raises ProtocolError
    where its size is no such."""
    dtype = np.dtype(ROW_KINDS[message.kind])
    shape = (message.count, message.layers) if message.kind in LAYER_KINDS else (message.count,)
    if not data or len(data) % (math.prod(shape) * dtype.itemsize):
        raise ProtocolError(f"{len(data)} bytes are no {shape} rows of {dtype.name}", field="data")
    return np.frombuffer(data, dtype=dtype).reshape(*shape, -1)


class RequestRows:
    """What has arrived for one request. Rows that come again, after a lost connection, replace themselves."""

    def __init__(self) -> None:
        self._of_tokens: dict[tuple[str, int, int], Array] = {}  # by kind, sample and index, until their tokens come
        self._prompt: dict[str, dict[int, Array]] = {}  # by kind and index of the first row
        self._shapes: dict[str, tuple[int, ...]] = {}  # of a row, by kind

    def push(self, message: Rows, values: Array) -> None:
        """Raises ProtocolError for rows of another shape than those of the same kind before."""
        shape = self._shapes.setdefault(message.kind, values.shape[1:])
        if shape != values.shape[1:]:
            raise ProtocolError(f"has rows of {values.shape[1:]} numbers after rows of {shape}", field="data")
        if message.kind in TOKEN_KINDS:
            for i, row in enumerate(values):
                self._of_tokens[message.kind, message.sample, message.index + i] = row
        else:
            self._prompt.setdefault(message.kind, {})[message.index] = values

    def take(self, kind: str, sample: int, index: int) -> Array | None:
        """What came of a kind for one token."""
        return self._of_tokens.pop((kind, sample, index), None)

    @property
    def embedding(self) -> Array | None:
        rows = self._prompt.get("embedding")
        return None if rows is None else rows[0][0]

    def prompt_hidden(self, num_tokens: int) -> Array | None:
        """(num_tokens, layers, hidden_size); None where none were asked for, or some went down with a connection."""
        parts = sorted(self._prompt.get("prompt_hidden", {}).items())
        begins = np.cumsum([0, *(len(values) for _, values in parts)]).tolist()
        if not parts or [*(index for index, _ in parts), num_tokens] != begins:
            return None
        return np.concatenate([values for _, values in parts])

    def prompt_logprobs(self) -> list[float | None] | None:
        """One for each token of the prompt; None where there are none."""
        return (
            None if "prompt_logprobs" not in self._prompt else [None, *self._joined("prompt_logprobs")[:, 0].tolist()]
        )

    def prompt_top_logprobs(self) -> list[dict[int, float] | None] | None:
        """For each token of the prompt the candidates in its place, best first."""
        if "prompt_top_logprobs" not in self._prompt:
            return None
        ids, logprobs = self._joined("prompt_top_token_ids"), self._joined("prompt_top_logprobs")
        return [None, *(dict(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True))]

    def _joined(self, kind: str) -> Array:
        """Every row of a kind in order. Raises ProtocolError where some are missing."""
        parts = sorted(self._prompt.get(kind, {}).items())
        expected = 1
        for index, values in parts:
            if index != expected:
                raise ProtocolError(f"rows from {expected} on are missing", field=kind)
            expected += len(values)
        return np.concatenate([values for _, values in parts])
