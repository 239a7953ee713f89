"""The pool map as shared memory: one writer, the daemon, and any number of readers, which cost it nothing.

Little-endian, in this order:

    header      magic, version, number of blocks, block size, capacity of the details in bytes
    words       64-bit: sequence number, CLOCK_MONOTONIC of the last change in nanoseconds, bytes of the details
    states      uint8, one for each block; each array begins at a multiple of 64 bytes
    owners      int32
    ref_counts  uint16
    details     a MessagePack map: `sequences`, `counters`, as in the answer of `map`

A sequence lock keeps readers consistent: the number is odd while the daemon writes, and another one afterwards. So a
reader takes a copy that began and ended at the same even number. The memory is sealed: its size is fixed, and nobody
but the daemon, which mapped it before, can write to it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from ..wire.errors import ProtocolError, Timeout
from .arena import F_SEAL_FUTURE_WRITE, SIZE_SEALS, check_sealed
from .pool_map import PoolMap

MAGIC = b"KVPM"
VERSION = 1
HEADER = struct.Struct("<4sIQQQ")  # magic, version, num_blocks, block_size, details capacity in bytes
ALIGNMENT = 64
SEQUENCE, CHANGED_NS, DETAILS_BYTES = 8, 9, 10
"""Places of the words, in 64-bit words from the beginning."""

ARRAYS_AT = 128
MAX_BLOCKS = 2**32
SEALS = SIZE_SEALS | F_SEAL_FUTURE_WRITE
RETRIES = 200
PAUSE_S = 0.0005


@dataclass(frozen=True, slots=True)
class MapLayout:
    """Where everything lies."""

    num_blocks: int
    block_size: int
    details_capacity: int

    @property
    def owners_at(self) -> int:
        return ARRAYS_AT + _aligned(self.num_blocks)

    @property
    def ref_counts_at(self) -> int:
        return self.owners_at + _aligned(4 * self.num_blocks)

    @property
    def details_at(self) -> int:
        return self.ref_counts_at + _aligned(2 * self.num_blocks)

    @property
    def total_bytes(self) -> int:
        return self.details_at + self.details_capacity

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.num_blocks, self.block_size, self.details_capacity)

    @classmethod
    def of_header(cls, data: bytes, total_bytes: int) -> MapLayout:
        """Raises ProtocolError for anything but the header of this version's map of so many bytes."""
        if len(data) == HEADER.size:
            magic, version, *sizes = HEADER.unpack(data)
            layout = cls(*sizes)
            if (magic, version) == (MAGIC, VERSION) and max(sizes) <= MAX_BLOCKS and layout.total_bytes == total_bytes:
                return layout
        raise ProtocolError(f"the descriptor is no pool map of version {VERSION}", field="pool_map")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class MapReader:
    """A mapped pool map. `fd` stays the caller's. Raises ProtocolError for a descriptor that is no sealed pool map."""

    def __init__(self, fd: int) -> None:
        size = check_sealed(fd, SEALS)
        self.layout = MapLayout.of_header(os.pread(fd, HEADER.size, 0), size)
        self._memory = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes[:ARRAYS_AT].cast("Q")

    @property
    def age_s(self) -> float:
        """Seconds since the daemon last wrote."""
        return (time.monotonic_ns() - self._words[CHANGED_NS]) / 1e9

    def read(self) -> PoolMap:
        """The map as it was at one moment. Raises Timeout if the daemon was stopped in the middle of writing it."""
        for _ in range(RETRIES):
            before = self._words[SEQUENCE]
            if before % 2 == 0 and before > 0:
                value = self._copy()
                if self._words[SEQUENCE] == before:
                    return PoolMap.of(value | _unpacked(value["details"]))
            time.sleep(PAUSE_S)
        raise Timeout("the pool map is not being written any more: the daemon hangs", field="pool_map")

    def _copy(self) -> dict[str, Any]:
        layout = self.layout
        details_end = layout.details_at + min(self._words[DETAILS_BYTES], layout.details_capacity)
        return {
            "num_blocks": layout.num_blocks,
            "block_size": layout.block_size,
            "states": bytes(self._bytes[ARRAYS_AT : ARRAYS_AT + layout.num_blocks]),
            "owners": bytes(self._bytes[layout.owners_at : layout.owners_at + 4 * layout.num_blocks]),
            "ref_counts": bytes(self._bytes[layout.ref_counts_at : layout.ref_counts_at + 2 * layout.num_blocks]),
            "details": bytes(self._bytes[layout.details_at : details_end]),
        }

    def close(self) -> None:
        """Idempotent."""
        self._words.release()
        self._bytes.release()
        self._memory.close()


def _unpacked(details: bytes) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(details, use_list=False)
    except Exception as fault:  # msgpack raises a dozen kinds
        raise ProtocolError(f"the pool map's details cannot be read: {fault}", field="pool_map") from None
    return value if isinstance(value, dict) else {}


class MapWriter:
    """The daemon's end. Raises OSError where there is no memory or no descriptor left."""

    def __init__(self, layout: MapLayout) -> None:
        self.layout = layout
        self.fd = os.memfd_create("kvpool-map", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, layout.total_bytes)
            self._memory = mmap.mmap(self.fd, layout.total_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)  # after mapping: from now on nobody maps it writable
        except BaseException:
            os.close(self.fd)
            raise
        self._memory[: HEADER.size] = layout.header()
        self._bytes = memoryview(self._memory)
        self._words = self._bytes[:ARRAYS_AT].cast("Q")

    def write(self, value: Mapping[str, Any]) -> None:
        """Replace everything by an answer of `map`, as far as its rows have room."""
        layout, words = self.layout, self._words
        sequences, counters = value["sequences"], value["counters"]
        details: bytes = msgpack.packb({"sequences": sequences, "counters": counters})
        while len(details) > layout.details_capacity:
            sequences = sequences[: len(sequences) // 2]
            details = msgpack.packb({"sequences": sequences, "counters": counters})
        words[SEQUENCE] += 1
        places = (ARRAYS_AT, layout.owners_at, layout.ref_counts_at, layout.details_at)
        parts = (value["states"], value["owners"], value["ref_counts"], details)
        for at, part in zip(places, parts, strict=True):
            self._bytes[at : at + len(part)] = part
        words[DETAILS_BYTES], words[CHANGED_NS] = len(details), time.monotonic_ns()
        words[SEQUENCE] += 1

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            self._words.release()
            self._bytes.release()
            self._memory.close()
            os.close(self.fd)
            self.fd = -1
