"""What a turn gives to those who read rings, as columns: what is done to every token is done to a column at a time."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from ...model.batch import Float32

if TYPE_CHECKING:
    from .request import Fresh, Request


class RingTokens:
    """A row for each token; those of a sample follow each other in their order."""

    def __init__(self) -> None:
        self.requests: list[Request] = []  # each has a handle
        self.samples: list[int] = []
        self.indexes: list[int] = []
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[float] = []
        self.with_logprob: list[int] = []  # rows of tokens that have one; others have 0 in its place
        self.logits: dict[int, Float32] = {}  # by row, of those that have some: (vocab_size,)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, sample: int, fresh: Fresh, logits: Items[Float32]) -> None:
        """Tokens of one sample. `logits`: as many, or none."""
        index, token_ids, texts, logprobs, _ = fresh
        count, first = len(token_ids), len(self.requests)
        if logits:
            self.logits.update(enumerate(logits, start=first))
        if logprobs:
            self.with_logprob += range(first, first + count)
        self.requests += (request,) * count
        self.samples += (sample,) * count
        self.indexes += range(index, index + count)
        self.token_ids += token_ids
        self.texts += texts or ("",) * count
        self.logprobs += logprobs or (0.0,) * count
