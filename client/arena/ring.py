"""Tokens from the daemon to one client: a ring of fixed records, one writer and one reader, in the session's arena.

A record is 32 bytes, little-endian: half a cache line, with room for the text of nearly every token.

    uint32 handle     which request, as its client named it in Submit
    uint32 index      counts the generated tokens of the sample from 0
    int32  token_id
    float  logprob    natural logarithm; only with HAS_LOGPROB
    uint16 sample
    uint8  flags      HAS_LOGPROB, TEXT_GOES_ON, LOGITS
    uint8  text_bytes
    char   text[12]   UTF-8

Text of more than 12 bytes goes on in the records that follow, each with the same numbers; all but the last have
TEXT_GOES_ON. A record with LOGITS comes before a token's own, and says in place of text at which place for rows its
logits lie: uint32.

The writer stores records and then its cursor, the reader copies records and then stores its own, so neither ever waits
for the other: a full ring is said to the writer's caller, an empty one to the reader's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..results import TokenEvent
from ..wire.errors import ProtocolError
from .arena import READER_AWAKE, RECORD_BYTES, RING_HEAD, RING_TAIL, Arena, Fence, check_cursor
from .rows import RowReader

RECORD = struct.Struct("<IIifHBB12s")
TEXT_BYTES = 12
HAS_LOGPROB, TEXT_GOES_ON, LOGITS = 1, 2, 4
KNOWN_FLAGS = HAS_LOGPROB | TEXT_GOES_ON | LOGITS
PLACE = struct.Struct("<I")  # in the text of a record with LOGITS
FLAGS_AT, TEXT_AT = 18, 20  # bytes from a record's beginning
MAX_HANDLE = 2**32 - 1

Float32 = NDArray[np.float32]
Record = tuple[int, int, int, float, int, int, int, bytes]


class RingReader:
    """The client's end."""

    def __init__(self, arena: Arena, rows: RowReader) -> None:
        self._words, self._ring, self._rows = arena.words, arena.ring, rows
        self._capacity = arena.layout.ring_records
        self._tail = 0
        self._logits: Float32 | None = None  # of a token whose own record has not come
        self._text = b""  # of a token whose last record has not come
        self._fence = Fence()

    def may_sleep(self) -> bool:
        """The reader is about to sleep: from now on it must be woken. False where something is there already."""
        self._words[READER_AWAKE] = 0
        self._fence.pass_()
        return bool(self._words[RING_HEAD] == self._tail)

    def stay_awake(self) -> None:
        """The reader calls `may_sleep` before it sleeps again: nobody has to wake it."""
        self._words[READER_AWAKE] = 1

    def read(self) -> list[tuple[int, TokenEvent]]:
        """Every token that came since the last call, with its request's handle. Raises ProtocolError for a cursor or a
        record that cannot be."""
        head, tail = self._words[RING_HEAD], self._tail
        if head == tail:
            return []
        check_cursor("ring_head", head, tail, tail + self._capacity)
        tokens: list[tuple[int, TokenEvent]] = []
        logits, begun = self._logits, self._text
        try:
            for handle, index, token_id, logprob, sample, flags, text_bytes, text in self._records(tail, head):
                if text_bytes > TEXT_BYTES or token_id < 0 or flags & ~KNOWN_FLAGS:
                    raise ProtocolError("a record cannot be read", field="arena.ring")
                if flags & LOGITS:
                    logits = self._rows.take(*PLACE.unpack_from(text))
                elif flags & TEXT_GOES_ON:
                    begun += text[:text_bytes]
                else:
                    whole, known = (begun + text[:text_bytes]).decode(), logprob if flags else None
                    tokens.append((handle, TokenEvent(token_id, whole, known, index, sample, None, logits)))
                    logits, begun = None, b""
        except UnicodeDecodeError:
            raise ProtocolError("a record's text is not UTF-8", field="arena.ring") from None
        self._logits, self._text = logits, begun
        self._words[RING_TAIL] = self._tail = head
        return tokens

    def _records(self, tail: int, head: int) -> Iterator[Record]:
        begin, end = (cursor % self._capacity * RECORD_BYTES for cursor in (tail, head))
        if begin < end:
            return RECORD.iter_unpack(bytes(self._ring[begin:end]))
        return RECORD.iter_unpack(bytes(self._ring[begin:]) + bytes(self._ring[:end]))
