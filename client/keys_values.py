"""A sequence's keys and values on their way to a caller: pieces of tokens as they come, put together into one array."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from .wire.errors import Busy, ProtocolError

MAX_SIZE = 2**31
MAX_NUMBER = 2**63
MAX_BYTES = 2**40
RETRY_MS = 100


@dataclass(frozen=True, slots=True)
class SequenceKV:
    """Keys and values of the tokens at positions `begin` to `begin + num_tokens - 1`, as attention reads them: keys are
    rotated, and what the pool keeps in fewer bits is widened. Read-only; `keys[layer]`, `values[layer]` are views."""

    begin: int  # 0, but where the first tokens have left the sliding window of every layer
    keys: NDArray[np.float32]  # (num_layers, num_tokens, num_kv_heads, head_dim)
    values: NDArray[np.float32]  # the same

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[1])


@dataclass(frozen=True, slots=True)
class KVPiece:
    """An answer of `read_kv`."""

    state: tuple[int, ...]  # another one where tokens may be others
    begin: int
    num_computed_tokens: int
    values: NDArray[np.float32]  # (num_layers, 2, tokens, num_kv_heads, head_dim)

    @classmethod
    def of(cls, value: Any) -> KVPiece:
        """Raises ProtocolError naming what does not fit."""
        if not isinstance(value, dict):
            raise ProtocolError("the daemon's answer must be a map", field="value")
        shape, state, data = value.get("shape"), value.get("state"), value.get("data")
        if not _are_integers(shape, 5, MAX_SIZE) or not _are_integers(state, 2, MAX_NUMBER):
            raise ProtocolError("the daemon's answer must have shape and state", field="value")
        if not isinstance(data, bytes) or len(data) != 4 * math.prod(shape) or shape[1] != 2:
            raise ProtocolError(f"must be float32 {shape}", field="value.data")
        begin, computed = value.get("begin"), value.get("num_computed_tokens")
        places = begin, computed
        if not _are_integers(places, 2, MAX_SIZE):
            raise ProtocolError("the daemon's answer must have begin and num_computed_tokens", field="value")
        if 4 * math.prod((*shape[:2], places[1], *shape[3:])) > MAX_BYTES:
            raise ProtocolError(f"nobody has {places[1]} tokens of {shape}", field="value.num_computed_tokens")
        return cls(state, places[0], places[1], np.frombuffer(data, dtype="<f4").reshape(shape))


def _are_integers(values: Any, count: int, most: int) -> TypeGuard[tuple[int, ...]]:
    """A tuple of so many integers from 0 to `most`."""
    return (
        isinstance(values, tuple)
        and len(values) == count
        and all(type(number) is int and 0 <= number <= most for number in values)
    )


class KVPieces:
    """Puts pieces together: while `missing`, ask for that from `position` on, and `add` it."""

    def __init__(self) -> None:
        self.position = 0
        self.missing = True
        self._first: KVPiece | None = None
        self._all: NDArray[np.float32] = np.zeros((0, 2, 0, 0, 0), dtype=np.float32)

    def add(self, piece: KVPiece) -> None:
        """Raises Busy if the sequence is not what it was before, ProtocolError for a piece of something else."""
        count = piece.values.shape[2]
        if self._first is None:
            self._first, self.position = piece, piece.begin
            num_layers, _, _, num_kv_heads, head_dim = piece.values.shape
            total = max(0, piece.num_computed_tokens - piece.begin)
            self._all = np.empty((num_layers, 2, total, num_kv_heads, head_dim), dtype=np.float32)
        elif piece.state != self._first.state or piece.begin != self.position or not count:
            raise Busy(
                "the sequence was changed, or lost its blocks, while it was read; ask again", retry_after_ms=RETRY_MS
            )
        offset = self.position - self._first.begin
        count = min(count, self._all.shape[2] - offset)  # it may go on meanwhile
        target = self._all[:, :, offset : offset + count]
        if target.shape != piece.values[:, :, :count].shape:
            raise ProtocolError("the pieces have different shapes", field="value.shape")
        target[...] = piece.values[:, :, :count]
        self.position += count
        self.missing = count > 0 and offset + count < self._all.shape[2]

    def whole(self) -> SequenceKV:
        self._all.flags.writeable = False
        return SequenceKV(0 if self._first is None else self._first.begin, self._all[:, 0], self._all[:, 1])
