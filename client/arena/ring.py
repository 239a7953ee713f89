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
TEXT_GOES_ON. A record with LOGITS comes before a token's own, and says in place of text where its logits lie in the
bulk region: uint64 cursor, uint32 bytes.

The writer stores records and then its cursor, the reader copies records and then stores its own, so neither ever waits
for the other: a full ring is said to the writer's caller, an empty one to the reader's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..results import TokenEvent
from ..wire.errors import ProtocolError
from ..wire.messages import TokenBatch
from .arena import READER_AWAKE, RECORD_BYTES, RING_HEAD, RING_TAIL, Arena, Fence, check_cursor
from .regions import BulkReader, BulkWriter, Teller

RECORD = struct.Struct("<IIifHBB12s")
TEXT_BYTES = 12
HAS_LOGPROB, TEXT_GOES_ON, LOGITS = 1, 2, 4
PLACE = struct.Struct("<QI")  # in the text of a record with LOGITS
MAX_HANDLE = 2**32 - 1

Float32 = NDArray[np.float32]
RingBatch = tuple[int, TokenBatch, Float32 | None]
"""Tokens of one sample with their request's handle, and their logits (tokens, vocab_size) where these are wanted."""

Record = tuple[int, int, int, float, int, int, int, bytes]


class RingWriter:
    """The daemon's end. `write` any number of tokens, then `publish` them together."""

    def __init__(self, arena: Arena, bulk: BulkWriter) -> None:
        self._words, self._ring, self._bulk = arena.words, arena.ring, bulk
        self._capacity = arena.layout.ring_records
        self._head = 0
        self._published = 0
        self._tail = 0
        self._fence = Fence()

    def write_step(self, step: Sequence[RingBatch], first: int = 0) -> tuple[int, int]:
        """Write the tokens of a step as far as there is room, its first batch from token `first` on.

        How many batches are written, and how many tokens of the next one. Raises ProtocolError as `write`.
        """
        pack, ring, mask = RECORD.pack_into, self._ring, self._capacity - 1
        head, room = self._head, self._room()
        for done, (handle, batch, logits) in enumerate(step):
            # Nearly always one token and a short text: in few words, because here the time of delivery goes.
            if len(batch.token_ids) == 1 and logits is None and room:
                text = batch.texts[0].encode() if batch.texts else b""
                if len(text) <= TEXT_BYTES:
                    logprob, flags = (batch.logprobs[0], HAS_LOGPROB) if batch.logprobs else (0.0, 0)
                    at, token_id = (head & mask) * RECORD_BYTES, batch.token_ids[0]
                    pack(ring, at, handle, batch.index, token_id, logprob, batch.sample, flags, len(text), text)
                    head, room = head + 1, room - 1
                    continue
            self._head = head
            first = self.write(handle, batch, first, logits)
            head, room = self._head, self._room()
            if first < len(batch.token_ids):
                return done, first
            first = 0
        self._head = head
        return len(step), 0

    def write(self, handle: int, batch: TokenBatch, first: int = 0, logits: Float32 | None = None) -> int:
        """Write the batch's tokens from `first` on, as far as there is room; how many of the batch are written now.

        `logits`: (tokens of the batch, vocab_size), for the bulk region. A token is written whole or not at all. Raises
        ProtocolError if a cursor of the reader is impossible.
        """
        pack, ring, mask = RECORD.pack_into, self._ring, self._capacity - 1
        texts, logprobs, index, sample = batch.texts, batch.logprobs, batch.index, batch.sample
        head, room = self._head, self._room()
        for i in range(first, len(batch.token_ids)):
            text = texts[i].encode() if texts else b""
            logprob, flags = (logprobs[i], HAS_LOGPROB) if logprobs else (0.0, 0)
            num_records = 1 if len(text) <= TEXT_BYTES else -(-len(text) // TEXT_BYTES)
            if logits is not None:
                num_records += 1
            if num_records > room:
                self._head = head
                return i
            numbers = (handle, index + i, batch.token_ids[i], logprob, sample)
            if logits is not None:
                place = self._bulk.put(logits[i], Teller.RING)
                if place is None:
                    self._head = head
                    return i
                pack(ring, (head & mask) * RECORD_BYTES, *numbers, flags | LOGITS, PLACE.size, PLACE.pack(*place))
                head += 1
            room -= num_records
            while len(text) > TEXT_BYTES:
                pack(ring, (head & mask) * RECORD_BYTES, *numbers, flags | TEXT_GOES_ON, TEXT_BYTES, text[:TEXT_BYTES])
                head, text = head + 1, text[TEXT_BYTES:]
            pack(ring, (head & mask) * RECORD_BYTES, *numbers, flags, len(text), text)
            head += 1
        self._head = head
        return len(batch.token_ids)

    def _room(self) -> int:
        self._tail = check_cursor("ring_tail", self._words[RING_TAIL], self._tail, self._published)
        return self._capacity - (self._head - self._tail)

    def publish(self) -> bool:
        """Let the reader see what was written; whether it sleeps, and has to be woken for that."""
        if self._head == self._published:
            return False
        self._words[RING_HEAD] = self._published = self._head
        self._fence.pass_()
        return not self._words[READER_AWAKE]


class RingReader:
    """The client's end."""

    def __init__(self, arena: Arena, bulk: BulkReader) -> None:
        self._words, self._ring, self._bulk = arena.words, arena.ring, bulk
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
        try:
            for record in self._records(tail, head):
                handle, index, token_id, logprob, sample, flags, text_bytes, text = record
                if flags & ~HAS_LOGPROB or self._text or self._logits is not None:
                    self._take_unusual(record, tokens)
                elif text_bytes > TEXT_BYTES or token_id < 0:
                    raise ProtocolError("a record cannot be read", field="arena.ring")
                else:
                    known = logprob if flags else None
                    tokens.append((handle, TokenEvent(token_id, text[:text_bytes].decode(), known, index, sample)))
        except UnicodeDecodeError:
            raise ProtocolError("a record's text is not UTF-8", field="arena.ring") from None
        self._words[RING_TAIL] = self._tail = head
        return tokens

    def _records(self, tail: int, head: int) -> Iterator[Record]:
        begin, end = (cursor % self._capacity * RECORD_BYTES for cursor in (tail, head))
        if begin < end:
            return RECORD.iter_unpack(bytes(self._ring[begin:end]))
        return RECORD.iter_unpack(bytes(self._ring[begin:]) + bytes(self._ring[:end]))

    def _take_unusual(self, record: Record, tokens: list[tuple[int, TokenEvent]]) -> None:
        """Of a token that more than one record tells of."""
        handle, index, token_id, logprob, sample, flags, text_bytes, text = record
        if text_bytes > TEXT_BYTES or token_id < 0 or flags & ~(HAS_LOGPROB | TEXT_GOES_ON | LOGITS):
            raise ProtocolError("a record cannot be read", field="arena.ring")
        if flags & LOGITS:
            cursor, num_bytes = PLACE.unpack(text)
            if not num_bytes or num_bytes % 4:
                raise ProtocolError(f"{num_bytes} bytes are no logits", field="arena.ring")
            self._logits = np.frombuffer(self._bulk.take(cursor, num_bytes), dtype="<f4")
        elif flags & TEXT_GOES_ON:
            self._text += text[:text_bytes]
        else:
            text, self._text = self._text + text[:text_bytes], b""
            logits, self._logits = self._logits, None
            known = logprob if flags & HAS_LOGPROB else None
            tokens.append((handle, TokenEvent(token_id, text.decode(), known, index, sample, None, logits)))
