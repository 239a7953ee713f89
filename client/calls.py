"""The questions a client can ask besides requests: how each is put, and what its answer is made into.

Both clients use this table, one by waiting and one by awaiting; PROTOCOL.md describes arguments and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from .arena.pool_map import PoolMap, rows_of
from .keys_values import KVPiece
from .requests import Prompt, split_prompt
from .wire.errors import ProtocolError
from .wire.messages import (
    Append,
    AttachSequence,
    Call,
    ClientMessage,
    CloseSequence,
    Fork,
    OpenSequence,
    ReadKV,
    Restore,
    Save,
    Share,
    Truncate,
)
from .wire.token_ids import pack_token_ids, unpack_token_ids

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """`make` builds the message around a call_id; `read` turns the answer's value into what the caller gets."""

    name: str
    make: Callable[[int], ClientMessage]
    read: Callable[[Any], T]


def _as_map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError("the daemon's answer must be a map", field="value")
    return value


def _entry(value: Any, name: str, kind: type[T]) -> T:
    item = _as_map(value).get(name)
    if not isinstance(item, kind):
        raise ProtocolError(f"the daemon's answer must have a {kind.__name__}", field=f"value.{name}")
    return item


def _method(name: str, read: Callable[[Any], T], arguments: Mapping[str, Any] | None = None) -> Question[T]:
    return Question(name, lambda call_id: Call(call_id, name, arguments), read)


# ---- the daemon


def stats() -> Question[dict[str, Any]]:
    return _method("stats", _as_map)


def ps() -> Question[list[dict[str, Any]]]:
    return _method("ps", rows_of)


def pool_map() -> Question[PoolMap]:
    return _method("map", PoolMap.of)


def watch_map() -> Question[dict[str, Any]]:
    return _method("watch_map", _as_map)


def fsck() -> Question[dict[str, Any]]:
    return _method("fsck", _as_map)


def trace(seconds: float) -> Question[dict[str, Any]]:
    return _method("trace", _as_map, {"seconds": seconds})


def trace_spans() -> Question[dict[str, Any]]:
    return _method("trace_spans", _as_map)


def drain() -> Question[dict[str, Any]]:
    return _method("drain", _as_map)


def reload() -> Question[dict[str, Any]]:
    return _method("reload", _as_map)


def resize(pool_bytes: int) -> Question[dict[str, Any]]:
    return _method("resize", _as_map, {"pool_bytes": pool_bytes})


def cancel(request_id: str) -> Question[dict[str, Any]]:
    return _method("cancel", _as_map, {"request_id": request_id})


def tokenize(text: str) -> Question[list[int]]:
    def read(value: Any) -> list[int]:
        return [int(token_id) for token_id in unpack_token_ids(_entry(value, "token_ids", bytes))]

    return _method("tokenize", read, {"text": text})


def detokenize(token_ids: list[int] | NDArray[np.int32]) -> Question[str]:
    return _method("detokenize", lambda value: _entry(value, "text", str), {"token_ids": pack_token_ids(token_ids)})


# ---- prefixes that stay, or that everybody may find


def _prefix_of(sequence_id: str, num_tokens: int | None) -> dict[str, Any]:
    return {"sequence_id": sequence_id, "num_tokens": num_tokens}


def pin(sequence_id: str, num_tokens: int | None, ttl_s: float | None) -> Question[int]:
    arguments = _prefix_of(sequence_id, num_tokens) | {"ttl_s": ttl_s}
    return _method("pin", lambda value: _entry(value, "pin_id", int), arguments)


def unpin(pin_id: int) -> Question[dict[str, Any]]:
    return _method("unpin", _as_map, {"pin_id": pin_id})


def pins() -> Question[list[dict[str, Any]]]:
    return _method("pins", rows_of)


def publish(sequence_id: str, num_tokens: int | None) -> Question[int]:
    return _method("publish", lambda value: _entry(value, "num_blocks", int), _prefix_of(sequence_id, num_tokens))


# ---- sequences; every answer has the sequence's num_tokens


def _num_tokens(value: Any) -> int:
    return _entry(value, "num_tokens", int)


def open_sequence(sequence_id: str, prompt: Prompt, keep: bool, linger_s: float) -> Question[int]:
    text_or_ids, messages = split_prompt(prompt)
    return Question(
        "open",
        lambda call_id: OpenSequence(call_id, sequence_id, text_or_ids, messages, keep, linger_s),
        _num_tokens,
    )


def attach_sequence(sequence_id: str) -> Question[int]:
    return Question("attach", lambda call_id: AttachSequence(call_id, sequence_id), _num_tokens)


def append(sequence_id: str, prompt: Prompt) -> Question[int]:
    text_or_ids, messages = split_prompt(prompt)
    return Question("append", lambda call_id: Append(call_id, sequence_id, text_or_ids, messages), _num_tokens)


def fork(sequence_id: str, new_sequence_id: str, at: int | None) -> Question[int]:
    return Question("fork", lambda call_id: Fork(call_id, sequence_id, new_sequence_id, at), _num_tokens)


def truncate(sequence_id: str, num_tokens: int) -> Question[int]:
    return Question("truncate", lambda call_id: Truncate(call_id, sequence_id, num_tokens), _num_tokens)


def save(sequence_id: str, name: str) -> Question[dict[str, Any]]:
    return Question("save", lambda call_id: Save(call_id, sequence_id, name), _as_map)


def restore(sequence_id: str, name: str) -> Question[int]:
    return Question("restore", lambda call_id: Restore(call_id, sequence_id, name), _num_tokens)


def read_kv(sequence_id: str, begin: int) -> Question[KVPiece]:
    return Question("kv", lambda call_id: ReadKV(call_id, sequence_id, begin), KVPiece.of)


def snapshots() -> Question[list[dict[str, Any]]]:
    return _method("snapshots", rows_of)


def discard(name: str) -> Question[dict[str, Any]]:
    return _method("discard", _as_map, {"name": name})


def share(sequence_id: str, uid: int | None, gid: int | None) -> Question[dict[str, Any]]:
    return Question("share", lambda call_id: Share(call_id, sequence_id, uid, gid), _as_map)


def close(sequence_id: str) -> Question[dict[str, Any]]:
    return Question("close", lambda call_id: CloseSequence(call_id, sequence_id), _as_map)
