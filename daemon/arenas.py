"""The daemon's side of a session's shared memory: how large it is, and the ends of its ring and regions."""

from __future__ import annotations

import os

from ..client.arena import PAGE_BYTES, Arena, Layout
from ..client.regions import BulkWriter, UploadReader
from ..client.ring import RingWriter
from ..client.token_ids import ITEM_BYTES

RING_RECORDS = 8192
"""256 KiB; the windows of 32 samples that nobody reads. The longest text of one token (64 KiB) fits too."""

MIN_UPLOAD_BYTES, MAX_UPLOAD_BYTES = 64 * 2**10, 4 * 2**20
BULK_ROWS = 32
MIN_BULK_BYTES, MAX_BULK_BYTES = 2**20, 64 * 2**20


def layout_for(*, vocab_size: int, max_model_len: int) -> Layout:
    """Room for two of the longest prompts and for BULK_ROWS rows of logits, within bounds. What is never used of it
    costs no memory."""
    upload = min(max(2 * max_model_len * ITEM_BYTES, MIN_UPLOAD_BYTES), MAX_UPLOAD_BYTES)
    bulk = min(max(BULK_ROWS * vocab_size * 4, MIN_BULK_BYTES), MAX_BULK_BYTES)
    return Layout(RING_RECORDS, _whole_pages(upload), _whole_pages(bulk))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class SessionArena:
    """One session's arena. `fd` is to be passed on and then given up with `forget_fd`; `close` unmaps everything."""

    def __init__(self, layout: Layout) -> None:
        self._arena, self.fd = Arena.create(layout)
        self.upload = UploadReader(self._arena)
        self.bulk = BulkWriter(self._arena)
        self.ring = RingWriter(self._arena, self.bulk)

    def forget_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        self.forget_fd()
        self._arena.close()
