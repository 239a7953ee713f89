"""An arena's two regions of bytes: prompts going up, what messages tell of coming down. Both are used as rings.

A piece lies in one stretch: where it does not fit before the end of the region it begins at the beginning, and it has
at most half the region's bytes, so that it always fits once everything before it was given back. Pieces are given back
in the order in which they were taken: a prompt when the daemon has answered its request, what comes down
when the client has copied it out.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ..wire.errors import InvalidArgument, ProtocolError
from ..wire.schema import Mismatch
from ..wire.token_ids import ITEM_BYTES, PackedTokenIds
from .arena import BULK_TAIL, Arena, check_cursor

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


class BulkWriter:
    """The daemon's end of the bulk region."""

    def __init__(self, arena: Arena) -> None:
        self._words, self._region = arena.words, arena.bulk
        self._cursors = _Cursors(arena.layout.bulk_bytes)

    @property
    def max_piece_bytes(self) -> int:
        return self._cursors.capacity // 2

    def put(self, values: NDArray[np.generic]) -> tuple[int, int] | None:
        """Copy an array in: (cursor, bytes) for the message that tells of it, or None where there is no room now.
        Raises ProtocolError if the reader's cursor is impossible."""
        cursors = self._cursors
        cursors.tail = check_cursor("bulk_tail", self._words[BULK_TAIL], cursors.tail, cursors.head)
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

    def take(self, begin: int, num_bytes: int) -> bytes:
        """Copy a piece out and give its place back. Raises ProtocolError for a place that cannot be."""
        offset = begin % len(self._region)
        if begin < self._tail or offset + num_bytes > len(self._region):
            raise ProtocolError(f"no piece of {num_bytes} bytes can lie at {begin}", field="arena.bulk")
        piece = bytes(self._region[offset : offset + num_bytes])
        self._words[BULK_TAIL] = self._tail = begin + num_bytes
        return piece
