"""What a request gives back: one `TokenEvent` per token while it runs, one `Result` when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .wire.errors import ConnectionLost, KVPoolError
from .wire.messages import Usage

TAIL_TOKEN_ID = -1
"""`token_id` of an event that brings only text: what was held back when a sequence was cut short."""


@dataclass(slots=True)  # not frozen, as there is one for every token: that would take five times as long to make
class TokenEvent:
    """One generated token. `text` is what it added: the texts of a sample's events, joined, are its whole text."""

    token_id: int
    text: str
    logprob: float | None  # natural log; None unless logprobs were asked for
    index: int  # counts the sample's tokens from 0
    sample: int  # which of the n sequences
    top_logprobs: dict[int, float] | None = None  # token_id -> logprob, best first
    logits: NDArray[np.float32] | None = None  # (vocab_size,), raw, read-only; with want_logits (see Stream.logits)
    hidden: NDArray[np.float32] | None = None  # (layers, hidden_size), read-only, with hidden_layers: see Stream.hidden


@dataclass(frozen=True, slots=True)
class Output:
    """One of the n sequences of a request, complete. `error` is set when finish_reason is `error`."""

    sample: int
    token_ids: list[int]
    text: str
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None
    finish_reason: str  # stop | length | cancelled | deadline | error
    usage: Usage
    error: KVPoolError | None = None
    hidden: NDArray[np.float32] | None = None  # (tokens, layers, hidden_size), as of each TokenEvent; None: see Result

    @property
    def sum_logprobs(self) -> float | None:
        """Of all its tokens; None unless logprobs were asked for."""
        return None if self.logprobs is None else sum(self.logprobs)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. The properties are those of its first sequence, which is the only one unless n > 1."""

    request_id: str
    outputs: tuple[Output, ...]
    prompt_logprobs: list[float | None] | None = (
        None  # one for each token of the prompt; nothing comes before the first
    )
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    embedding: NDArray[np.float32] | None = None  # (hidden_size,), read-only
    prompt_hidden: NDArray[np.float32] | None = None
    """(prompt tokens, layers, hidden_size): the outputs of `hidden_layers` for each token of the prompt. None, as
    `hidden`, where none were asked for or some went down with a connection."""

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def logprobs(self) -> list[float] | None:
        return self.outputs[0].logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        return self.outputs[0].top_logprobs

    @property
    def hidden(self) -> NDArray[np.float32] | None:
        return self.outputs[0].hidden

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.outputs[0].usage


def stack_embeddings(results: Sequence[Result]) -> NDArray[np.float32]:
    """(len(results), hidden_size). Raises ConnectionLost for one whose vector went down with a connection."""
    rows = [result.embedding for result in results]
    found = [row for row in rows if row is not None]
    if len(found) < len(rows):
        raise ConnectionLost("an embedding was lost with the connection that brought it; ask again")
    return np.stack(found) if found else np.zeros((0, 0), dtype=np.float32)
