"""Arrays that the host fills and the card reads each step (or the other way), side by side in one piece of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..host_memory import Layout
from .device import CudaDevice

_MERGED_GAP = 64 << 10  # bytes: copying so much in vain costs less than another copy


class Mirror:
    """Named arrays of fixed capacity, at the same offsets in page-locked memory and on the card.

    The host has them twice, the card once: `turn` goes to the other copy, so that one is filled (or read) while the
    card may still be at the other. `fields` maps a name to (capacity, dtype). Nothing is allocated after construction.
    """

    def __init__(self, device: CudaDevice, fields: Mapping[str, tuple[int, DTypeLike]], purpose: str) -> None:
        layout = Layout()
        self._device = device
        self._fields = {
            name: (layout.reserve(max(1, capacity) * np.dtype(dtype).itemsize), capacity, np.dtype(dtype))
            for name, (capacity, dtype) in fields.items()
        }
        self.size = layout.size
        remedy = "lower max_num_seqs or max_num_batched_tokens"
        self._copies = [device.staging(layout.size, purpose, remedy) for _ in range(2)]
        self._host = self._copies[0]
        self._base = device.allocate(layout.size, purpose, remedy)
        self._filled: list[tuple[int, int]] = []

    def turn(self) -> None:
        """Go to the other copy on the host. What was asked for when it was last in turn must be done."""
        self._copies.reverse()
        self._host = self._copies[0]

    def address(self, name: str, index: int = 0) -> int:
        """Where element `index` of an array is on the card."""
        offset, _, dtype = self._fields[name]
        return self._base + offset + index * dtype.itemsize

    def capacity(self, name: str) -> int:
        return self._fields[name][1]

    def host(self, name: str, count: int) -> NDArray[Any]:
        """The first `count` elements on the host, as a view."""
        offset, capacity, dtype = self._fields[name]
        if count > capacity:
            raise ValueError(f"{name}: {count} values do not fit {capacity}")
        return self._host[offset : offset + count * dtype.itemsize].view(dtype)

    def put(self, name: str, values: NDArray[Any], fill: float = 0, length: int = 0) -> None:
        """Set an array on the host, filled up to `length` with `fill`; `upload` sends it."""
        count = max(values.size, length)
        target = self.host(name, count)
        target[: values.size] = values.reshape(-1)
        target[values.size :] = fill
        offset = self._fields[name][0]
        self._filled.append((offset, offset + target.nbytes))

    def upload(self) -> None:
        """Send what was put since the last time, in few copies."""
        merged: list[list[int]] = []
        for start, end in sorted(span for span in self._filled if span[0] < span[1]):
            if merged and start - merged[-1][1] <= _MERGED_GAP:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        for start, end in merged:
            self._device.upload(self._base + start, self._host[start:end])
        self._filled.clear()

    def download(self) -> None:
        """Fetch everything; it is there once a mark made after this is reached."""
        self._device.download(self._host, self._base)
