"""The pool's memory on the card, and whole blocks in and out of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cuda_kernels import block_copy
from ...cuda_kernels.kv_formats import KV_FORMATS
from ...cuda_kernels.layout import AttentionShape
from .device import REACHED, Bytes, CudaDevice, Lane, Mark
from .program import PoolView

ROOM_BYTES = 64 << 20  # on the card, to collect blocks for the host; at least one block
PURPOSE, REMEDY = "room to move blocks", "lower block_size"


class _Ids:
    """The block ids of one move at a time, page-locked and on the card."""

    def __init__(self, device: CudaDevice, capacity: int) -> None:
        self.size = 8 * capacity
        self._host = device.staging(self.size, PURPOSE, REMEDY)
        self._address = device.allocate(self.size, PURPOSE, REMEDY)
        self._sent = REACHED

    def send(self, lane: Lane, source: Sequence[int], destination: Sequence[int]) -> tuple[int, int]:
        """Where both lists will be on the card, for what is launched next on the lane."""
        self._sent()
        size = 4 * len(source)
        for start, blocks in ((0, source), (size, destination)):
            self._host[start : start + size].view(np.int32)[:] = blocks
        lane.upload(self._address, self._host[: 2 * size])
        self._sent = lane.mark()
        return self._address, self._address + size


class Room:
    """Memory on the card for some blocks, one after the other, as they lie on the host."""

    def __init__(self, device: CudaDevice, num_blocks: int, block_bytes: int) -> None:
        size = num_blocks * block_bytes
        self.address = device.allocate(size, PURPOSE, REMEDY)
        self.host = device.staging(size, PURPOSE, REMEDY)  # its like, for blocks that do not go to the host pool
        self.ids = _Ids(device, num_blocks)
        self.size = size + self.ids.size
        self.free: Mark = REACHED  # set by whoever had it last


class CudaPool:
    """Blocks in layers (layout.py). Outside the pool a block is one piece: its layers, then its layers' scales."""

    def __init__(self, device: CudaDevice, shape: AttentionShape, num_layers: int) -> None:
        kv = KV_FORMATS[shape.kv]
        self._device, self._num_layers = device, num_layers
        self._pieces = [2 * shape.num_kv_heads * shape.plane * kv.itemsize]  # bytes of one layer of one block
        if kv.scaled:
            self._pieces.append(2 * shape.num_kv_heads * shape.block_size * 4)
        self.block_bytes = num_layers * sum(self._pieces)
        self.room_blocks = max(1, ROOM_BYTES // self.block_bytes)
        self._rooms = [Room(device, self.room_blocks, self.block_bytes) for _ in range(2)]  # one fills, one empties
        self._copy_ids = _Ids(device, self.room_blocks)
        self.transfer_bytes = sum(room.size for room in self._rooms) + self._copy_ids.size
        self._parts: list[int] = []
        self._num_blocks = 0

    def allocate(self, num_blocks: int) -> PoolView:
        self._num_blocks = num_blocks
        self._parts = [
            self._device.allocate(num_blocks * self._num_layers * piece, "the pool", "lower pool_bytes")
            for piece in self._pieces
        ]
        self._device.synchronize()
        scales = self._parts[1] if len(self._parts) > 1 else 0
        return PoolView(
            self._parts[0], scales, num_blocks * self._pieces[0], num_blocks * self._pieces[-1] if scales else 0
        )

    def copy(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Blocks within the pool; what is launched later finds them there."""
        for start in range(0, len(source), self.room_blocks):
            chunk = slice(start, start + self.room_blocks)
            self._move(self._device, self._copy_ids, source[chunk], destination[chunk])

    def read(self, blocks: Sequence[int]) -> Bytes:
        """(len(blocks), block_bytes); the next blocks travel while these are taken from the staging memory."""
        out = np.empty((len(blocks), self.block_bytes), np.uint8)
        arriving: list[tuple[Bytes, Bytes, Mark]] = []
        for start in range(0, len(blocks), self.room_blocks):
            some = blocks[start : start + self.room_blocks]
            room = self.turn(self._device)
            self.gather(self._device, room, some)
            host = room.host[: len(some) * self.block_bytes]
            self._device.download(host, room.address)
            room.free = self._device.mark()
            arriving.append((out[start : start + len(some)], host, room.free))
            if len(arriving) > 1:
                _take(*arriving.pop(0))
        for each in arriving:
            _take(*each)
        return out

    def write(self, blocks: Sequence[int], data: Bytes) -> None:
        """The inverse of `read`; returns when the last blocks are on their way, and later launches find them there."""
        rows = np.ascontiguousarray(data, np.uint8).reshape(len(blocks), self.block_bytes)
        for start in range(0, len(blocks), self.room_blocks):
            some = blocks[start : start + self.room_blocks]
            room = self.turn(self._device)
            room.free()
            host = room.host[: len(some) * self.block_bytes]
            host[:] = rows[start : start + len(some)].reshape(-1)
            self._device.upload(room.address, host)
            self.scatter(self._device, room, some)
            room.free = self._device.mark()

    def turn(self, lane: Lane) -> Room:
        """The room that was used longest ago; what is asked of the lane from here on finds it free."""
        self._rooms.reverse()
        lane.after(self._rooms[0].free)
        return self._rooms[0]

    def gather(self, lane: Lane, room: Room, blocks: Sequence[int]) -> None:
        """Copy blocks of the pool into a room."""
        self._move(lane, room.ids, blocks, range(len(blocks)), into=room)

    def scatter(self, lane: Lane, room: Room, blocks: Sequence[int]) -> None:
        """Copy what is in a room to blocks of the pool."""
        self._move(lane, room.ids, range(len(blocks)), blocks, out_of=room)

    def _move(
        self,
        lane: Lane,
        ids: _Ids,
        source: Sequence[int],
        destination: Sequence[int],
        *,
        into: Room | None = None,
        out_of: Room | None = None,
    ) -> None:
        """Within the pool, or from and to a room, whose blocks are numbered from 0."""
        addresses = ids.send(lane, source, destination)
        offset = 0
        for part, piece in zip(self._parts, self._pieces, strict=True):
            words = piece // 16
            begin, end = (
                (part, words, self._num_blocks * words)
                if room is None
                else (room.address + offset, self.block_bytes // 16, words)
                for room in (out_of, into)
            )
            grid = -(-words // block_copy.WORDS_PER_BLOCK), len(source), self._num_layers
            lane.launch(block_copy.copy_blocks(), grid, (begin[0], end[0], *addresses, *begin[1:], *end[1:], words))
            offset += self._num_layers * piece


def _take(out: Bytes, host: Bytes, mark: Mark) -> None:
    mark()
    out[:] = host.reshape(out.shape)
