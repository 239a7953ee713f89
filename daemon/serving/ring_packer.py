"""Tokens of a step for those who read rings, put into records all at once."""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from itertools import accumulate, chain

from ...client.arena.arena import RECORD_BYTES
from ...client.arena.ring import HAS_LOGPROB, LOGITS, PLACE, TEXT_BYTES, TEXT_GOES_ON
from ...model.batch import Float32
from ..engine.request import Request
from ..engine.ring_tokens import RingTokens
from .rings import Batch, Kernels, Rings, Words
from .sessions import Session

TAIL = struct.Struct(f"<BB{TEXT_BYTES}s")  # of a record: flags, text_bytes, text


class _Tails(dict[str, bytes]):
    """By a token's text: the tails of its records, one after the other. Texts come again: short ones are kept."""

    MAX_KEPT = 2**14  # some megabytes

    def __init__(self, flags: int) -> None:
        """`flags`: of every record."""
        self._flags = flags

    def __missing__(self, text: str) -> bytes:
        encoded = text.encode()
        parts = [encoded[at : at + TEXT_BYTES] for at in range(0, len(encoded), TEXT_BYTES)] or [b""]
        flags = [self._flags | TEXT_GOES_ON] * (len(parts) - 1) + [self._flags]
        tails = b"".join(TAIL.pack(flag, len(part), part) for flag, part in zip(flags, parts, strict=True))
        if len(parts) == 1:
            if len(self) >= self.MAX_KEPT:
                self.clear()
            self[text] = tails
        return tails


_tails, _tails_with_logprob = _Tails(0), _Tails(HAS_LOGPROB)
_tail_of_logits = TAIL.pack(LOGITS, PLACE.size, b"")


def tails_of(tokens: RingTokens) -> list[bytes]:
    """The tails of each token's records, one after the other. Its logits, if it has some, have one before its own."""
    if len(tokens.with_logprob) == len(tokens):
        tails = list(map(_tails_with_logprob.__getitem__, tokens.texts))
    else:
        tails = list(map(_tails.__getitem__, tokens.texts))
        for row in tokens.with_logprob:
            tails[row] = _tails_with_logprob[tokens.texts[row]]
    for row in tokens.logits:
        tails[row] = _tail_of_logits + tails[row]
    return tails


class Readers:
    """The sessions that a step's tokens are for, and the places of their records in memory."""

    def __init__(self, requests: list[Request]) -> None:
        rows: defaultdict[Session, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            if isinstance(request.session, Session) and request.session.arena is not None:
                rows[request.session].append(row)
        self.sessions = list(rows)
        self.numbers = {session: number for number, session in enumerate(rows)}
        self.rows = list(rows.values())  # of each one's tokens
        self.batch = Batch([session.arena.ring for session in rows if session.arena is not None])
        self.handles = array("I", [request.handle or 0 for request in requests]).tobytes()
        self.order = Words(chain.from_iterable(rows.values()))
        self.begins = Words(accumulate(map(len, rows.values()), initial=0))

    def records_left(self, number: int) -> bytes:
        """Those of a session that were not written."""
        end, left = self.batch.ends.values[number], self.batch.left.values[1 + number]
        return bytes(self.batch.records[RECORD_BYTES * (end - left) : RECORD_BYTES * end])

    def logits(self, tokens: RingTokens) -> dict[int, list[Float32]]:
        """Of those tokens that have some, in order, by the session's number."""
        found = {}
        for number, rows in enumerate(self.rows if tokens.logits else ()):
            if own := [tokens.logits[row] for row in rows if row in tokens.logits]:
                found[number] = own
        return found


class RingPacker:
    """A step has mostly tokens of the same requests as the one before: whose are whose is found out once.

    That stays true while no ring is opened: a request that another session takes over has no handle from then on, and
    one without a session had one whose ring is closed, into which nothing is written."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._num_opened = 0
        self._requests: list[Request] = []  # of the last step, for each of its tokens
        self._readers = Readers([])

    def pack(self, tokens: RingTokens) -> Readers:
        """The records lie in their batch until the next step's do; nothing else of a step is kept."""
        if tokens.requests != self._requests or self._rings.num_opened != self._num_opened:
            self._requests, self._num_opened = tokens.requests, self._rings.num_opened
            self._readers = Readers(tokens.requests)
        if self._readers.sessions:
            _pack(tokens, self._readers, self._rings.load())
        return self._readers


def _pack(tokens: RingTokens, readers: Readers, kernels: Kernels) -> None:
    count = len(tokens)
    tails = tails_of(tokens)
    joined, first_tails = b"".join(tails), Words([])
    num_records = len(joined) // TAIL.size
    if num_records > count:
        first_tails = Words(num_bytes // TAIL.size for num_bytes in accumulate(map(len, tails), initial=0))
    batch = readers.batch
    if len(batch.records) < RECORD_BYTES * num_records:
        batch.make_room(num_records)
    kernels.pack_records(
        struct.pack(
            f"<{count}I{count}i{count}f{count}H", *tokens.indexes, *tokens.token_ids, *tokens.logprobs, *tokens.samples
        ),
        readers.handles,
        joined,
        first_tails.address if num_records > count else 0,
        count,
        readers.order.address,
        readers.begins.address,
        len(readers.sessions),
        batch.address,
        batch.ends.address,
    )
