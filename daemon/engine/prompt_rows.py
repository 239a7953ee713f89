"""What a request wants to know of the tokens of its prompt: their logprobs, or an embedding of the whole.

A collector says which positions it still needs rows of, and takes them chunk by chunk, in order, each once: a prompt
that is computed again after its blocks were taken is not reported again. What it makes of them does not depend on the
chunks: rows are added up one by one, in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...model.batch import Float32, Int32


@dataclass(frozen=True, slots=True)
class Rows:
    """Numbers for a request's reader; PROTOCOL.md lists the kinds. `index`: of the first row's token.

    `transient`: there is no end of them, so they wait for room in the arena, and are not kept for a reader who returns.
    """

    kind: str
    index: int
    values: NDArray[np.float32] | NDArray[np.int32]  # (count,), (count, width) or (count, layers, width)
    sample: int = 0
    transient: bool = False


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What the device found out about the tokens at `positions`, N of them."""

    positions: range
    logprobs: Float32  # (N,) of each position's next token
    top_tokens: Int32  # (N, K)
    top_logprobs: Float32  # (N, K)
    hidden: Float32 | None  # (N, hidden_size)
    numeric_error: bool  # some row held NaN or infinity


class Collector(Protocol):
    num_logprobs: int  # candidates to report for each position; -1: none
    wants_hidden: bool

    def missing(self, start: int, end: int) -> range:
        """Positions of a chunk from `start` to `end` that rows are needed of."""

    def take(self, part: PromptPart) -> list[Rows]:
        """Take the rows of all `missing` positions of a chunk; what can be told now."""


class PromptLogprobs:
    """Logprobs of every token but the first: position p says how likely the token at p + 1 was."""

    wants_hidden = False

    def __init__(self, num_prompt_tokens: int, num_logprobs: int) -> None:
        self.num_logprobs = num_logprobs
        self._next, self._end = 0, num_prompt_tokens - 1

    def missing(self, start: int, end: int) -> range:
        return range(max(start, self._next), min(end, self._end))

    def take(self, part: PromptPart) -> list[Rows]:
        self._next, index = part.positions.stop, part.positions.start + 1
        rows = [Rows("prompt_logprobs", index, part.logprobs)]
        if self.num_logprobs > 0:
            rows.append(Rows("prompt_top_token_ids", index, part.top_tokens[:, : self.num_logprobs]))
            rows.append(Rows("prompt_top_logprobs", index, part.top_logprobs[:, : self.num_logprobs]))
        return rows


class Pooling:
    """One vector for the whole prompt: the mean of its tokens' hidden states, or the last one's."""

    num_logprobs = -1
    wants_hidden = True

    def __init__(self, num_prompt_tokens: int, mode: str) -> None:
        self._next = num_prompt_tokens - 1 if mode == "last" else 0
        self._end = num_prompt_tokens
        self._count = self._end - self._next
        self._sum: NDArray[np.float64] | float = 0.0

    def missing(self, start: int, end: int) -> range:
        return range(max(start, self._next), min(end, self._end))

    def take(self, part: PromptPart) -> list[Rows]:
        if part.hidden is None:
            raise RuntimeError("the back end returned no hidden rows")
        self._next = part.positions.stop
        for row in part.hidden:
            self._sum = self._sum + row.astype(np.float64)
        if self._next < self._end:
            return []
        vector = np.asarray(self._sum / self._count, dtype=np.float32)
        return [Rows("embedding", 0, vector[np.newaxis])]


def collector_of(prompt_ids: Items[int], prompt_logprobs: int | None, pooling: str | None) -> Collector | None:
    """What the request needs, if it needs anything of its prompt."""
    if pooling is not None:
        return Pooling(len(prompt_ids), pooling)
    return None if prompt_logprobs is None else PromptLogprobs(len(prompt_ids), prompt_logprobs)
