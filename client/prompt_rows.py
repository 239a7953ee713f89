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
    """What has arrived for one request. Rows of a prompt may come again, after a lost connection, and then in other
    pieces: the next daemon may cut it elsewhere. They are the same bits, so of each row any will do."""

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
            pieces = self._prompt.setdefault(message.kind, {})
            if len(values) > len(pieces.get(message.index, ())):
                pieces[message.index] = values

    def take(self, kind: str, sample: int, index: int) -> Array | None:
        """What came of a kind for one token."""
        return self._of_tokens.pop((kind, sample, index), None)

    @property
    def embedding(self) -> Array | None:
        rows = self._prompt.get("embedding")
        return None if rows is None else rows[0][0]

    def prompt_hidden(self, num_tokens: int) -> Array | None:
        """(num_tokens, layers, hidden_size); None where none were asked for, or some went down with a connection."""
        found, missing = self._pieces("prompt_hidden", 0)
        return np.concatenate(found) if found and missing == num_tokens else None

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
        found, missing = self._pieces(kind, 1)
        if not found or missing < max(self._prompt[kind]):
            raise ProtocolError(f"rows from {missing} on are missing", field=kind)
        return np.concatenate(found)

    def _pieces(self, kind: str, first: int) -> tuple[list[Array], int]:
        """Rows of a kind from `first` on, each once and in order, and the index of the first that is missing."""
        found, end = [], first
        for index, values in sorted(self._prompt.get(kind, {}).items()):
            if index > end:
                break
            if index + len(values) > end:
                found.append(values[end - index :])
                end = index + len(values)
        return found, end
