"""The two byte regions of an arena: prompts going up, rows of numbers coming down. Both are used as rings of bytes.

A piece lies in one stretch: where it does not fit before the end of the region it begins at the beginning, and it has
at most half the region's bytes, so that it always fits once everything before it was given back. Pieces are given back
in the order in which they were taken: a prompt when the daemon has answered its request, rows when the client has
copied them out. Messages and the ring, which tell of rows, overtake each other; so those that one tells of are all
given back before the other tells of any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..wire.errors import InvalidArgument, ProtocolError
from ..wire.schema import Mismatch
from ..wire.token_ids import ITEM_BYTES, PackedTokenIds
from .arena import BULK_TAIL, Arena, check_cursor
from .buffers import RowBuffers

ALIGNMENT = 64


class _Cursors:
    """Where pieces begin and end in a ring of bytes, counted for ever.

    Where everything was given back, the next piece begins where the region does: as long as the other side keeps up,
    the same few pages are used, which are in the caches, and no memory is needed for the rest.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.head = 0
        self.tail = 0
        self._first = 0  # where the first piece began since everything was given back

    def take(self, num_bytes: int) -> int | None:
        """Where a piece begins, or None where there is no room now, or never."""
        if num_bytes > self.capacity // 2:
            return None
        if self.tail == self.head:
            begin = self._first = _round_up(self.head, self.capacity)
        else:
            begin = _round_up(self.head, ALIGNMENT)
            if begin % self.capacity + num_bytes > self.capacity:
                begin = _round_up(begin, self.capacity)
            if begin + num_bytes - max(self.tail, self._first) > self.capacity:
                return None
        self.head = begin + num_bytes
        return begin


def _round_up(cursor: int, step: int) -> int:
    return -(-cursor // step) * step


class UploadWriter:
    """The client's end of the upload region: where prompts of requests that wait for their answer lie."""

    def __init__(self, arena: Arena) -> None:
        self._region = arena.upload
        self._cursors = _Cursors(arena.layout.upload_bytes)
        self._pending: deque[tuple[str, int]] = deque()  # request id, end of its piece

    def put(self, request_id: str, packed: bytes) -> tuple[int, int] | None:
        """Place packed token ids: (byte offset, number of ids) for Submit, or None where there is no room now."""
        begin = self._cursors.take(len(packed))
        if begin is None:
            return None
        offset = begin % self._cursors.capacity
        self._region[offset : offset + len(packed)] = packed
        self._pending.append((request_id, self._cursors.head))
        return offset, len(packed) // ITEM_BYTES

    def settle(self, request_id: str) -> None:
        """The daemon has answered the request: it does not read its prompt again. It answers in order."""
        while self._pending and any(waiting == request_id for waiting, _ in self._pending):
            _, self._cursors.tail = self._pending.popleft()


class UploadReader:
    """The daemon's end of the upload region."""

    def __init__(self, arena: Arena) -> None:
        self._region = arena.upload

    def copy(self, offset: int, count: int) -> bytes:
        """`count` packed ids at a byte offset, as they are at this moment. Raises InvalidArgument for a place that is
        not in the region, and for ids that are negative."""
        end = offset + count * ITEM_BYTES
        if offset % ITEM_BYTES or offset < 0 or count < 0 or end > len(self._region):
            raise InvalidArgument(f"must be whole ids in a region of {len(self._region)} bytes", field="upload")
        try:
            return PackedTokenIds(count).check(bytes(self._region[offset:end]))
        except Mismatch as fault:
            raise InvalidArgument(fault.message, field=f"prompt{fault.path}") from None


class Teller(Enum):
    """What tells the client where a piece lies. Each keeps its own order, and they do not keep each other's."""

    MESSAGE = "message"
    RING = "ring"


class BulkWriter:
    """The daemon's end of the bulk region."""

    def __init__(self, arena: Arena) -> None:
        self._words, self._region = arena.words, arena.bulk
        self._cursors = _Cursors(arena.layout.bulk_bytes)
        self._teller = Teller.MESSAGE  # of the pieces that lie there

    @property
    def max_piece_bytes(self) -> int:
        return self._cursors.capacity // 2

    def put(self, values: NDArray[np.generic], teller: Teller) -> tuple[int, int] | None:
        """Copy an array in: (cursor, bytes) for what tells of it, or None where there is no room now, or only after
        everything that the other teller told of was given back. Raises ProtocolError if the reader's cursor is
        impossible."""
        cursors = self._cursors
        cursors.tail = check_cursor("bulk_tail", self._words[BULK_TAIL], cursors.tail, cursors.head)
        if teller is not self._teller:
            if cursors.tail != cursors.head:
                return None
            self._teller = teller
        begin = cursors.take(values.nbytes)
        if begin is None:
            return None
        place = np.frombuffer(self._region, values.dtype, values.size, begin % cursors.capacity)
        np.copyto(place, values.reshape(-1))
        return begin, values.nbytes


class BulkReader:
    """The client's end of the bulk region."""

    def __init__(self, arena: Arena) -> None:
        self._words, self._region = arena.words, arena.bulk
        self._tail = 0
        self._buffers = RowBuffers()

    def take(self, begin: int, num_bytes: int) -> bytes:
        """Copy a piece out and give its place back. Raises ProtocolError for a place that cannot be."""
        offset = self._offset(begin, num_bytes, self._tail)
        piece = bytes(self._region[offset : offset + num_bytes])
        self._give_back(begin + num_bytes)
        return piece

    def take_rows(self, places: Sequence[tuple[int, int]]) -> list[NDArray[np.float32]]:
        """The same for rows of float32, in the order in which they lie there: each read-only, in a buffer that earlier
        rows may have used."""
        offsets, end = [], self._tail
        for begin, num_bytes in places:
            offsets.append(self._offset(begin, num_bytes, end))
            end = begin + num_bytes
        pieces = [self._region[at : at + size] for at, (_, size) in zip(offsets, places, strict=True)]
        try:
            rows = self._buffers.copies(pieces)
        finally:
            for piece in pieces:  # an error that is being handled would keep them, and with them the arena open
                piece.release()
        self._give_back(end)
        return rows

    def _offset(self, begin: int, num_bytes: int, least: int) -> int:
        """Where in the region a piece lies."""
        offset = begin % len(self._region)
        if begin < least or offset + num_bytes > len(self._region):
            raise ProtocolError(f"no piece of {num_bytes} bytes can lie at {begin}", field="arena.bulk")
        return offset

    def _give_back(self, tail: int) -> None:
        self._words[BULK_TAIL] = self._tail = tail
