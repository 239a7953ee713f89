"""Tokens of a step for those who read rings, put into records all at once."""

from __future__ import annotations

import struct
from array import array
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate, chain

from ...client.arena.arena import RECORD_BYTES
from ...client.arena.ring import HAS_LOGPROB, LOGITS, PLACE, TEXT_BYTES, TEXT_GOES_ON
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
TAIL_OF_LOGITS = struct.Struct(f"<BBI{TEXT_BYTES - PLACE.size}x")  # flags, bytes of the place, place


def tails_of(tokens: RingTokens, places: Mapping[int, int]) -> list[bytes]:
    """The tails of each token's records, one after the other. Its logits, if it has some, have one before its own, with
    their place; 0 where they have none yet."""
    if len(tokens.with_logprob) == len(tokens):
        tails = list(map(_tails_with_logprob.__getitem__, tokens.texts))
    else:
        tails = list(map(_tails.__getitem__, tokens.texts))
        for row in tokens.with_logprob:
            tails[row] = _tails_with_logprob[tokens.texts[row]]
    for row in tokens.logits:
        tails[row] = TAIL_OF_LOGITS.pack(LOGITS, PLACE.size, places.get(row, 0)) + tails[row]
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
        self.of_row = {row: session for session, own in rows.items() for row in own}
        self.batch = Batch(
            [session.arena.ring for session in rows if session.arena is not None],
            array("I", [request.handle or 0 for request in requests]),
            order=chain.from_iterable(rows.values()),
            begins=accumulate(map(len, rows.values()), initial=0),
        )

    def records_left(self, number: int) -> bytearray:
        """Those of a session that were packed and not written."""
        end, left = self.batch.ends[number], self.batch.left[1 + number]
        return self.batch.records[RECORD_BYTES * (end - left) : RECORD_BYTES * end]


class RingPacker:
    """A step has mostly tokens of the same requests as the one before: whose are whose is found out once.

    That stays true while no ring is opened: a request that another session takes over has no handle from then on, and
    one without a session had one whose ring is closed, into which nothing is written."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._num_opened = 0
        self._requests: list[Request] = []  # of the last step, for each of its tokens
        self._readers = Readers([])

    def readers_of(self, tokens: RingTokens) -> Readers:
        """Until the next step's are asked for. Nothing else of a step is kept."""
        if tokens.requests != self._requests or self._rings.num_opened != self._num_opened:
            self._requests, self._num_opened = tokens.requests, self._rings.num_opened
            self._readers = Readers(tokens.requests)
        return self._readers


def pack_tokens(tokens: RingTokens, places: Mapping[int, int], batch: Batch, kernels: Kernels) -> None:
    """Put the readers' records into the batch. `places`: of logits in their reader's arena, by the token's row."""
    count, tails = len(tokens), tails_of(tokens, places)
    numbers = struct.pack(
        f"<{count}I{count}i{count}f{count}H", *tokens.indexes, *tokens.token_ids, *tokens.logprobs, *tokens.samples
    )
    joined, first_tails = b"".join(tails), None
    num_records = len(joined) // TAIL.size
    if num_records > count:
        first_tails = Words(num_bytes // TAIL.size for num_bytes in accumulate(map(len, tails), initial=0))
    batch.make_room(num_records)
    kernels.pack_records(batch.address, numbers, joined, 0 if first_tails is None else first_tails.address, count)
