"""Tokens of a step for those who read rings, packed all at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from ...client.arena.ring import pack_tokens
from ..engine.request import Request
from ..engine.ring_tokens import RingTokens
from .parcels import RingRecords
from .sessions import Session

Picker = Callable[[list[bytes]], Iterable[bytes]]
"""Gives what a list has at certain places."""


class RingPacker:
    """A step has mostly tokens of the same requests as the one before: whose rows are whose is found out once.

    That stays true: a request that another session takes over has no handle from then on, and one without a session
    had one that is closed, to which nothing is given."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # of the last step, for each of its tokens
        self._handles: list[int] = []
        self._rows: dict[Session, tuple[list[int], Picker]] = {}

    def pack(self, tokens: RingTokens) -> Iterator[tuple[Session, RingRecords]]:
        """A parcel for each session. Nothing of a step is kept once the next, be it empty, was packed."""
        if tokens.requests != self._requests:
            self._look_at(tokens.requests)
        records = pack_tokens(
            self._handles,
            tokens.samples,
            tokens.indexes,
            tokens.token_ids,
            tokens.texts,
            tokens.logprobs,
            tokens.with_logprob,
            tokens.logits,
        )
        for session, (rows, pick) in self._rows.items():
            logits = [tokens.logits[row] for row in rows if row in tokens.logits] if tokens.logits else ()
            yield session, RingRecords(b"".join(pick(records)), logits)

    def _look_at(self, requests: list[Request]) -> None:
        rows: defaultdict[Session, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            if isinstance(request.session, Session):
                rows[request.session].append(row)
        self._requests = requests
        self._rows = {session: (own, _picker(own)) for session, own in rows.items()}
        self._handles = [request.handle or 0 for request in requests]


def _picker(rows: list[int]) -> Picker:
    """For one place `itemgetter` would give what is there, and no list of it."""
    return itemgetter(*rows) if len(rows) > 1 else itemgetter(slice(rows[0], rows[0] + 1))
