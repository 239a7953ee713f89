"""The daemon's side of a session's shared memory: how large it is, and the ends of its ring and regions."""

from __future__ import annotations

import os

from ...client.arena.arena import Arena, Layout, whole_pages
from ...client.arena.bell import Bell
from ...client.arena.regions import BulkWriter, UploadReader
from ...client.arena.rows import RowWriter
from ...client.wire.token_ids import ITEM_BYTES
from .rings import Rings

RING_RECORDS = 8192
"""256 KiB; the windows of 32 samples that nobody reads. The longest text of one token (64 KiB) fits too."""

MIN_UPLOAD_BYTES, MAX_UPLOAD_BYTES = 64 * 2**10, 4 * 2**20
BULK_ROWS = 32
MIN_BULK_BYTES, MAX_BULK_BYTES = 2**20, 64 * 2**20
MIN_PLACES, MAX_PLACES, PLACES_BYTES = 32, 128, 64 * 2**20
"""Places for rows: as many as a program may keep uncopied, and as many again that are on their way."""


def layout_for(*, vocab_size: int, max_model_len: int) -> Layout:
    """Room for two of the longest prompts, for BULK_ROWS rows of logits that messages tell of, and for more that the
    ring does, within bounds. What is never used of it costs no memory."""
    upload = min(max(2 * max_model_len * ITEM_BYTES, MIN_UPLOAD_BYTES), MAX_UPLOAD_BYTES)
    row = vocab_size * 4
    bulk = min(max(BULK_ROWS * row, MIN_BULK_BYTES), MAX_BULK_BYTES)
    num_rows = min(max(PLACES_BYTES // whole_pages(row), MIN_PLACES), MAX_PLACES)
    return Layout(RING_RECORDS, whole_pages(upload), whole_pages(bulk), row, num_rows)


class SessionArena:
    """One session's arena and bell. `fds` are to be passed on, and then given up with `forget_fds`."""

    def __init__(self, layout: Layout, rings: Rings) -> None:
        """Raises OSError where there is no memory or no descriptor left."""
        self._bell = Bell()
        try:
            self._arena, self._fd = Arena.create(layout)
        except BaseException:
            self._bell.close()
            raise
        self.upload = UploadReader(self._arena)
        self.bulk = BulkWriter(self._arena)
        self.rows = RowWriter(self._arena)
        self.ring = rings.open(self._arena, self._bell.fd)

    @property
    def fds(self) -> tuple[int, int]:
        """Of the arena, and of the bell's other end."""
        return self._fd, self._bell.reader_fd

    def forget_fds(self) -> None:
        """Idempotent."""
        self._bell.forget_reader()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Unmap and close everything."""
        self.ring.close()
        self.forget_fds()
        self._bell.close()
        self._arena.close()
