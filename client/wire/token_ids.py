"""Token ids as the wire carries them: packed int32, little-endian; a long prompt costs a copy and no parsing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .schema import Mismatch, Text, refuse

WIRE_INT32 = np.dtype("<i4")
ITEM_BYTES = 4
TOKEN_ID_MAX = 2**31 - 1


def pack_token_ids(token_ids: Sequence[int] | NDArray[Any]) -> bytes:
    """Bytes of 4 * len(token_ids). Raises Mismatch naming the first entry that is no integer from 0 to 2**31 - 1."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise Mismatch(f"must be a one-dimensional array of integers, not {token_ids.ndim}-d {token_ids.dtype}")
        _check_range(token_ids)
        return token_ids.astype(WIRE_INT32, copy=False).tobytes()
    for position, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise Mismatch(f"must be an integer, not {type(token_id).__name__}", f"[{position}]")
        if not 0 <= token_id <= TOKEN_ID_MAX:
            raise Mismatch(f"must be from 0 to {TOKEN_ID_MAX}", f"[{position}]")
    return np.asarray(token_ids, dtype=WIRE_INT32).tobytes()


def unpack_token_ids(packed: bytes) -> NDArray[np.int32]:
    """(len(packed) / 4,) int32, a read-only view of `packed`."""
    return np.frombuffer(packed, dtype=WIRE_INT32)


def _check_range(token_ids: NDArray[Any]) -> None:
    outside = (token_ids < 0) | (token_ids > TOKEN_ID_MAX)
    if outside.any():
        raise Mismatch(f"must be from 0 to {TOKEN_ID_MAX}", f"[{int(outside.argmax())}]")


@dataclass(frozen=True, slots=True)
class PackedTokenIds:
    """Spec: packed ids, or (for clients without an array library) an array of integers, which is packed on arrival."""

    max_tokens: int

    def check(self, value: Any) -> bytes:
        if type(value) in (tuple, list):
            if len(value) > self.max_tokens:
                raise Mismatch(f"must have at most {self.max_tokens} token ids, not {len(value)}")
            return pack_token_ids(value)
        if type(value) is not bytes:
            raise refuse(self, value)
        if len(value) % ITEM_BYTES or len(value) > self.max_tokens * ITEM_BYTES:
            raise Mismatch(f"must be {ITEM_BYTES} bytes for each of at most {self.max_tokens} token ids")
        _check_range(unpack_token_ids(value))
        return value

    def describe(self) -> str:
        return f"at most {self.max_tokens} token ids, packed int32 little-endian or an array of integers"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Spec: text, or token ids in either form."""

    text: Text
    ids: PackedTokenIds

    def check(self, value: Any) -> str | bytes:
        return self.text.check(value) if type(value) is str else self.ids.check(value)

    def describe(self) -> str:
        return f"{self.text.describe()}, or {self.ids.describe()}"
