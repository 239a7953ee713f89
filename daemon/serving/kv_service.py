"""Showing a sequence's keys and values to its user: copied out of the pool between two steps, piece by piece.

A piece is as many tokens as fit in PIECE_BYTES, and a session waits for one at a time: so a step is delayed by a copy
of that size for each session that asks, whatever it asks for. Only computed tokens are shown, never the rest of a
block, which may be somebody else's past.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...client.wire.errors import Busy, InvalidArgument, NotFound, Unsupported
from ...client.wire.protocol import DaemonMessage, ReadKV, Reply
from ..memory.sequence import Sequence
from ..scheduling.residency import NO_SLOT
from .parcels import Blob, BulkParcel
from .sequence_objects import SequenceObject
from .sessions import Session

if TYPE_CHECKING:
    from .clients import Clients

PIECE_BYTES = 1 << 20
RETRY_MS = 100


class KVService:
    """Handler by kind of message, for `Clients`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._engine = clients.engine
        self._objects = clients.sequences
        self._asking: set[Session] = set()  # wait for the end of a step
        self.handlers: dict[type[Any], Callable[[Session, Any], None]] = {ReadKV: self._read_kv}

    def _read_kv(self, session: Session, message: ReadKV) -> None:
        found = self._objects.own(session, message.sequence_id)
        if session.arena is None:
            raise Unsupported("keys and values need shared memory: a daemon of this machine, and arena=True")
        if session.outbox or session in self._asking:
            raise Busy("read what was sent before, and then ask for more", retry_after_ms=RETRY_MS)
        self._asking.add(session)

        def answer() -> None:
            self._asking.discard(session)
            if not session.closed:
                self._answer(session, message, found)

        self._engine.between_steps(lambda: self._clients.attempt(session, message.call_id, answer))

    def _answer(self, session: Session, message: ReadKV, found: SequenceObject) -> None:
        sequence = found.sequence
        if sequence.finished:
            raise NotFound(f"{found.name!r} was closed meanwhile", field="sequence_id")
        if message.begin > sequence.num_tokens:
            raise InvalidArgument(f"must be at most {sequence.num_tokens}, the sequence's tokens", field="begin")
        if message.begin > sequence.num_computed_tokens:
            raise Busy(
                f"{sequence.num_computed_tokens} tokens are computed now", field="begin", retry_after_ms=RETRY_MS
            )
        begin = max(message.begin, self._first_token(sequence))
        values = self._piece(session, sequence, begin)
        value = {
            "begin": begin,
            "num_computed_tokens": sequence.num_computed_tokens,
            "state": (sequence.sequence_id, found.truncations),
            "shape": values.shape,
        }

        def tell(data: Blob) -> DaemonMessage:
            return Reply(self._engine.epoch, message.call_id, value | {"in_arena": data})

        self._clients.delivery.give(session, BulkParcel(values, tell, waits=True))

    def _first_token(self, sequence: Sequence) -> int:
        """The first whose block has not left the sliding window."""
        holes = sequence.host_slots.count(NO_SLOT) or sequence.num_null_blocks
        return holes * self._engine.scheduler.pool.block_size

    def _piece(self, session: Session, sequence: Sequence, begin: int) -> NDArray[np.float32]:
        """(num_layers, 2, tokens, num_kv_heads, head_dim): computed tokens from `begin` on, as many as fit."""
        size, runner = self._engine.scheduler.pool.block_size, self._engine.runner
        room = min(PIECE_BYTES, session.arena.bulk.max_piece_bytes if session.arena else 0)
        nothing = runner.keys_values(np.empty((0, runner.block_bytes), np.uint8))
        token_bytes = nothing.itemsize * math.prod((*nothing.shape[1:3], *nothing.shape[4:]))
        if token_bytes > room:
            raise Unsupported(f"a token's keys and values have {token_bytes} bytes, and a piece at most {room}")
        end = min(begin + room // token_bytes, sequence.num_computed_tokens)
        if begin + size <= end:
            end -= end % size if end < sequence.num_computed_tokens else 0  # no block is read twice
        first, last = begin // size, -(-max(begin, end) // size)
        blocks = runner.keys_values(runner.read(sequence, slice(first, last)))
        tokens = blocks.transpose(1, 2, 0, 3, 4, 5).reshape(*blocks.shape[1:3], -1, *blocks.shape[4:])
        offset = begin - first * size
        return np.ascontiguousarray(tokens[:, :, offset : offset + end - begin])
