"""Messages to bytes and back. No input and no output: bytes in, values out, or a `ProtocolError` that names the field.

One message is one MessagePack map: `type` says which, the rest are its fields. What MessagePack itself lets through
(duplicate keys, unknown extension types, NaN, booleans for integers, any key) is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack

from .errors import InvalidArgument, ProtocolError, TooLong
from .messages import CLIENT_MESSAGES, DAEMON_MESSAGES, ClientMessage, DaemonMessage, Message
from .schema import Integer, ListOf, Mismatch, Name, Optional, Record, Spec, record_of, shown


@dataclass(frozen=True, slots=True)
class CodecLimits:
    """Bounds on what a decoder will build. Arrays are bounded apart from the message, because nested array headers cost
    the sender 5 bytes each and the receiver 8 bytes an item: at worst max_array_items * 8 KiB for a moment."""

    max_message_bytes: int
    max_array_items: int
    max_map_items: int


DAEMON_LIMITS = CodecLimits(max_message_bytes=4 * 2**20, max_array_items=4096, max_map_items=1024)
"""What the daemon reads from anybody. Prompts of more than 4096 tokens therefore come packed."""

CLIENT_LIMITS = CodecLimits(max_message_bytes=2**30, max_array_items=2**20, max_map_items=2**16)
"""What a client reads from the daemon it chose to trust."""

_TYPE = "type"
_RECORDS: dict[type[Any], tuple[str, Record]] = {
    message: (name, record_of(message)) for name, message in (CLIENT_MESSAGES | DAEMON_MESSAGES).items()
}


def encode(message: Message) -> bytes:
    """The bytes of a message whose values are trusted (the daemon's own). Fields at their default are left out."""
    name, record = _RECORDS[type(message)]
    packed: bytes = msgpack.packb({_TYPE: name, **_to_map(message, record)})
    return packed


def encode_checked(message: Message, max_message_bytes: int = DAEMON_LIMITS.max_message_bytes) -> bytes:
    """The bytes of a message built from a caller's values. Raises InvalidArgument naming the field that is wrong,
    or TooLong naming the limit."""
    name, record = _RECORDS[type(message)]
    wire = _to_map(message, record)
    try:
        record.check(wire)
    except Mismatch as fault:
        raise InvalidArgument(fault.message, field=fault.path) from None
    packed: bytes = msgpack.packb({_TYPE: name, **wire})
    if len(packed) > max_message_bytes:
        raise TooLong(
            f"the message has {len(packed)} bytes and the daemon takes {max_message_bytes} (max_message_bytes)",
            field="prompt" if name in ("submit", "open", "append") else name,
        )
    return packed


def decode_client_message(data: bytes, limits: CodecLimits = DAEMON_LIMITS) -> ClientMessage:
    """What a client sent. Raises ProtocolError and nothing else."""
    message: ClientMessage = _decode(data, limits, CLIENT_MESSAGES)
    return message


def decode_daemon_message(data: bytes, limits: CodecLimits = CLIENT_LIMITS) -> DaemonMessage:
    """What the daemon sent. Raises ProtocolError and nothing else."""
    message: DaemonMessage = _decode(data, limits, DAEMON_MESSAGES)
    return message


def _decode(data: bytes, limits: CodecLimits, messages: Mapping[str, type[Any]]) -> Any:
    wire = _unpack(data, limits)
    if type(wire) is not dict:
        raise ProtocolError(f"a message must be a map, not {shown(wire)}")
    name = wire.pop(_TYPE, None)
    message = messages.get(name) if type(name) is str else None
    if message is None:
        _fail(wire, f"must be one of {', '.join(messages)}, not {shown(name)}", _TYPE)
    try:
        return _RECORDS[message][1].check(wire)
    except Mismatch as fault:
        _fail(wire, fault.message, fault.path)


def _unpack(data: bytes, limits: CodecLimits) -> Any:
    if len(data) > limits.max_message_bytes:
        raise ProtocolError(f"a message must have at most {limits.max_message_bytes} bytes, not {len(data)}")
    try:
        return msgpack.unpackb(
            data,
            use_list=False,
            object_pairs_hook=_map_of,
            ext_hook=_refuse_extension,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=limits.max_array_items,
            max_map_len=limits.max_map_items,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except Exception as fault:  # msgpack raises a dozen kinds, some of them bare ValueErrors; every one is the sender's
        raise ProtocolError(f"not MessagePack within the limits: {fault or type(fault).__name__}") from None


def _map_of(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ProtocolError("a map has the same key twice")
    for key in result:
        if type(key) is not str:
            raise ProtocolError(f"a map's keys must be text, not {shown(key)}")
    return result


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise ProtocolError(f"extension type {code} is not part of the protocol")


def _fail(wire: Mapping[str, Any], message: str, field: str) -> NoReturn:
    """Raise with the ids that the damaged message does carry, so that the answer finds who waits for it."""
    request_id, call_id = _if_valid(Name(max_bytes=128), wire, "request_id"), _if_valid(Integer(0), wire, "call_id")
    raise ProtocolError(message, field=field, request_id=request_id, call_id=call_id)


def _if_valid(spec: Spec, wire: Mapping[str, Any], name: str) -> Any:
    try:
        return spec.check(wire.get(name))
    except Mismatch:
        return None


def _to_map(value: Any, record: Record) -> dict[str, Any]:
    wire: dict[str, Any] = {}
    for field in record.fields:
        item = getattr(value, field.name)
        if field.required or item != field.default:
            wire[field.name] = _to_plain(item, field.spec)
    return wire


def _to_plain(item: Any, spec: Spec) -> Any:
    """Records become maps; everything else already is what MessagePack packs."""
    if isinstance(spec, Optional):
        return None if item is None else _to_plain(item, spec.spec)
    if isinstance(spec, Record) and isinstance(item, spec.make):
        return _to_map(item, spec)
    if isinstance(spec, ListOf) and isinstance(spec.element, Record):
        return tuple(_to_plain(part, spec.element) for part in item)
    return item
