"""The arena: one piece of memory that a session's client and the daemon both map, and who may write where in it.

The daemon makes it (a `memfd`: it has no name, and is gone with its last holder), seals its size and passes it over the
lifeline. Pages, in this order:

    header        written once, by the daemon: magic, version, the sizes of the regions
    daemon words  the daemon's cursor, 64-bit
    client words  the client's cursors, 64-bit
    ring          tokens on their way down, see `ring`
    upload        prompts on their way up, see `regions`
    bulk          what messages tell of on its way down, see `regions`
    rows          logits on their way down, see `rows`

Either side keeps its own cursors to itself and only publishes them here; of the other's words it believes nothing
beyond what `check_cursor` lets through. What the daemon takes from the upload region it copies before it looks at it.

Both sides rely on stores becoming visible in their order, as on x86-64; elsewhere there is no arena. Where a side
stores one word and then decides by another one that the other side stores, a `Fence` stands between.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import struct
import threading
from dataclasses import dataclass

from ..wire.errors import ProtocolError

VERSION = 2
ARENA = f"arena-{VERSION}"
"""Name of the capability in Hello and Welcome: who knows another version only does without."""

MAGIC = b"KVPA"
PAGE_BYTES = 4096
RECORD_BYTES = 32
HEADER = struct.Struct("<4sIQQQQQQ")  # magic, version, ring records, record bytes, upload, bulk, row bytes, rows

RING_HEAD = PAGE_BYTES // 8  # daemon: records written so far
RING_TAIL = 2 * PAGE_BYTES // 8  # client: records read so far
BULK_TAIL = RING_TAIL + 8  # client: bytes of the bulk region read so far
"""Places of the cursors, in 64-bit words from the beginning; each counts up for ever."""

READER_AWAKE = RING_TAIL + 16
"""Place of the word in which the client says that it looks at the ring again before it sleeps: nobody has to ring."""

ROWS_RETURNED = RING_TAIL + 24
"""Place of the first of the words in which the client counts how often it gave back each place for a row."""

RING_AT = 3 * PAGE_BYTES
MAX_RING_RECORDS = 2**20
MAX_ROWS = RING_AT // 8 - ROWS_RETURNED
MAX_REGION_BYTES = 2**30

F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python's fcntl does not name it
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""With these nobody can change the size any more, so that no access of the other side can fault."""


def supported() -> bool:
    """Whether this machine keeps the order of stores that the arena relies on."""
    return platform.machine() in ("x86_64", "AMD64")


class Fence:
    """Every store before `pass_` is visible before any load after it. Taking and giving back a lock that nobody else
    uses is one, on x86-64: it is done by a locked instruction."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def pass_(self) -> None:
        with self._lock:
            pass


def check_cursor(field: str, cursor: int, least: int, most: int) -> int:
    """The other side's cursor, if it can be true. Raises ProtocolError naming it."""
    if not least <= cursor <= most:
        raise ProtocolError(f"is {cursor}, and can only be from {least} to {most}", field=f"arena.{field}")
    return cursor


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the regions. Raises ValueError for sizes that no arena has."""

    ring_records: int  # a power of two
    upload_bytes: int  # whole pages
    bulk_bytes: int  # whole pages
    row_bytes: int  # whole float32
    num_rows: int  # each begins a page

    def __post_init__(self) -> None:
        if not 1 <= self.ring_records <= MAX_RING_RECORDS or self.ring_records & (self.ring_records - 1):
            raise ValueError(f"ring_records must be a power of two up to {MAX_RING_RECORDS}")
        if self.row_bytes < 4 or self.row_bytes % 4 or not 1 <= self.num_rows <= MAX_ROWS:
            raise ValueError(f"there must be 1 to {MAX_ROWS} rows of whole float32")
        for size in (self.ring_records * RECORD_BYTES, self.upload_bytes, self.bulk_bytes, self.rows_bytes):
            if not PAGE_BYTES <= size <= MAX_REGION_BYTES or size % PAGE_BYTES:
                raise ValueError(f"a region must be whole pages of {PAGE_BYTES} bytes, up to {MAX_REGION_BYTES}")

    @property
    def upload_at(self) -> int:
        return RING_AT + self.ring_records * RECORD_BYTES

    @property
    def bulk_at(self) -> int:
        return self.upload_at + self.upload_bytes

    @property
    def rows_at(self) -> int:
        return self.bulk_at + self.bulk_bytes

    @property
    def row_stride(self) -> int:
        return whole_pages(self.row_bytes)

    @property
    def rows_bytes(self) -> int:
        return self.num_rows * self.row_stride

    @property
    def total_bytes(self) -> int:
        return self.rows_at + self.rows_bytes

    def header(self) -> bytes:
        sizes = self.ring_records, RECORD_BYTES, self.upload_bytes, self.bulk_bytes, self.row_bytes, self.num_rows
        return HEADER.pack(MAGIC, VERSION, *sizes)

    @classmethod
    def of_header(cls, data: bytes) -> Layout:
        """Raises ProtocolError for anything but the header of this version's arena."""
        try:
            magic, version, ring_records, record_bytes, *sizes = HEADER.unpack(data)
            if (magic, version, record_bytes) != (MAGIC, VERSION, RECORD_BYTES):
                raise ValueError(f"it is no arena of version {VERSION}")
            return cls(ring_records, *sizes)
        except (struct.error, ValueError) as fault:
            raise ProtocolError(f"the descriptor cannot be used: {fault}", field="arena") from None


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class Arena:
    """A mapped arena. `close` unmaps it, or leaves that to the last row that a program still has; nothing else of it
    may be used afterwards."""

    def __init__(self, memory: mmap.mmap, layout: Layout) -> None:
        self.layout = layout
        self._memory = memory
        self._bytes = memoryview(memory)
        self.words = self._bytes.cast("Q")
        self.ring = self._bytes[RING_AT : layout.upload_at]
        self.upload = self._bytes[layout.upload_at : layout.bulk_at]
        self.bulk = self._bytes[layout.bulk_at : layout.rows_at]
        begins = range(layout.rows_at, layout.total_bytes, layout.row_stride)
        self.rows = [self._bytes[begin : begin + layout.row_bytes] for begin in begins]

    @classmethod
    def create(cls, layout: Layout) -> tuple[Arena, int]:
        """The daemon's side: a new arena, and the sealed descriptor to pass on, which is the caller's to close.
        Raises OSError where there is no memory or no descriptor left."""
        fd = os.memfd_create("kvpool-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
            memory = mmap.mmap(fd, layout.total_bytes)
        except BaseException:
            os.close(fd)
            raise
        memory[: HEADER.size] = layout.header()
        return cls(memory, layout), fd

    @classmethod
    def open(cls, fd: int) -> Arena:
        """The client's side; `fd` stays the caller's. Raises ProtocolError for a descriptor that is no sealed arena,
        OSError where no memory or no descriptor is left."""
        size = check_sealed(fd, SIZE_SEALS)
        if size < HEADER.size:
            raise ProtocolError(f"the descriptor cannot be used: it has {size} bytes", field="arena")
        layout = Layout.of_header(os.pread(fd, HEADER.size, 0))
        if size != layout.total_bytes:
            raise ProtocolError(f"has {size} bytes, where its header says {layout.total_bytes}", field="arena")
        return cls(mmap.mmap(fd, size), layout)

    def close(self) -> None:
        """Idempotent."""
        for view in (self.words, self.ring, self.upload, self.bulk, *self.rows, self._bytes):
            view.release()
        with contextlib.suppress(BufferError):  # rows are in use
            self._memory.close()


def check_sealed(fd: int, seals: int) -> int:
    """Bytes of a memory file that has at least these seals. Raises ProtocolError for any other descriptor."""
    try:
        held = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"the descriptor is no memory file: {error.strerror}", field="arena") from None
    if held & seals != seals:
        raise ProtocolError("the descriptor is not sealed: its memory could vanish", field="arena")
    return size
