"""The pool's memory on the card, and whole blocks in and out of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cuda_kernels import block_copy
from ...cuda_kernels.kv_formats import KV_FORMATS
from ...cuda_kernels.layout import AttentionShape
from .device import Bytes, CudaDevice, Mark
from .program import PoolView
from .staging import Mirror

TRANSFER_BYTES = 64 << 20  # room on the card to collect blocks for the host, at least one block


class CudaPool:
    """Blocks in layers (layout.py). Outside the pool a block is one piece: its layers, then its layers' scales."""

    def __init__(self, device: CudaDevice, shape: AttentionShape, num_layers: int) -> None:
        kv = KV_FORMATS[shape.kv]
        self._device, self._num_layers = device, num_layers
        self._pieces = [2 * shape.num_kv_heads * shape.plane * kv.itemsize]  # bytes of one layer of one block
        if kv.scaled:
            self._pieces.append(2 * shape.num_kv_heads * shape.block_size * 4)
        self.block_bytes = num_layers * sum(self._pieces)
        self._batch = max(1, TRANSFER_BYTES // self.block_bytes)  # blocks moved at a time
        size = self._batch * self.block_bytes
        self._transfer = device.allocate(size, "room to move blocks", "lower block_size")
        self._host = [device.staging(size), device.staging(size)]  # one is filled or emptied while the other travels
        self._marks: list[Mark] = [_reached, _reached]  # when a copy may be used again
        self._ids = Mirror(device, dict.fromkeys(("from", "to"), (self._batch, np.int32)), "room to move blocks")
        self.transfer_bytes = size + self._ids.size
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
        for start in range(0, len(source), self._batch):
            chunk = slice(start, start + self._batch)
            self._turn()
            self._move(source[chunk], destination[chunk], from_pool=True, to_pool=True)
            self._marks[0] = self._device.mark()

    def read(self, blocks: Sequence[int]) -> Bytes:
        """(len(blocks), block_bytes); the next blocks travel while these are taken from the staging memory."""
        out = np.empty((len(blocks), self.block_bytes), np.uint8)
        arriving: list[tuple[Bytes, Bytes, Mark]] = []
        for start in range(0, len(blocks), self._batch):
            some = blocks[start : start + self._batch]
            host = self._turn()[: len(some) * self.block_bytes]
            self._move(some, range(len(some)), from_pool=True, to_pool=False)
            self._device.download(host, self._transfer)
            self._marks[0] = self._device.mark()
            arriving.append((out[start : start + len(some)], host, self._marks[0]))
            if len(arriving) > 1:
                _take(*arriving.pop(0))
        for each in arriving:
            _take(*each)
        return out

    def write(self, blocks: Sequence[int], data: Bytes) -> None:
        """The inverse of `read`; returns when the last blocks are on their way, and later launches find them there."""
        rows = np.ascontiguousarray(data, np.uint8).reshape(len(blocks), self.block_bytes)
        for start in range(0, len(blocks), self._batch):
            some = blocks[start : start + self._batch]
            host = self._turn()[: len(some) * self.block_bytes]
            host[:] = rows[start : start + len(some)].reshape(-1)
            self._device.upload(self._transfer, host)
            self._move(range(len(some)), some, from_pool=False, to_pool=True)
            self._marks[0] = self._device.mark()

    def _turn(self) -> Bytes:
        """The staging memory that was used longest ago, once it is free; with it goes that of the block ids."""
        self._host.reverse()
        self._marks.reverse()
        self._ids.turn()
        self._marks[0]()
        return self._host[0]

    def _move(self, source: Sequence[int], destination: Sequence[int], *, from_pool: bool, to_pool: bool) -> None:
        if not source:
            return
        self._ids.put("from", np.asarray(source, np.int32))
        self._ids.put("to", np.asarray(destination, np.int32))
        self._ids.upload()
        outside = self._transfer
        for i, piece in enumerate(self._pieces):
            words = piece // 16
            in_pool = (self._parts[i], words, self._num_blocks * words)
            packed = (outside, self.block_bytes // 16, words)
            outside += self._num_layers * piece
            begin, end = (in_pool if from_pool else packed), (in_pool if to_pool else packed)
            grid = -(-words // block_copy.WORDS_PER_BLOCK), len(source), self._num_layers
            ids = self._ids.address("from"), self._ids.address("to")
            arguments = begin[0], end[0], *ids, *begin[1:], *end[1:], words
            self._device.launch(block_copy.copy_blocks(), grid, arguments)


def _reached() -> None:
    """The mark of staging memory that was never used."""


def _take(out: Bytes, host: Bytes, mark: Mark) -> None:
    mark()
    out[:] = host.reshape(out.shape)
