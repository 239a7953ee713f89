"""The methods of Call about prefixes that are to stay, or that everybody may find: pin, unpin, pins, publish.

A pin holds the full blocks at the beginning of a sequence, also after the sequence and the session are gone, until it
is taken away or its time is over; `max_pinned_blocks` says how much one user may hold like that. A published prefix is
found by all users. What one publishes one gives away: who sends the same tokens can tell, by the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from ...client.wire.errors import InvalidArgument, NotFound, Unsupported
from ...client.wire.schema import Integer, Mismatch, Name, Real, record_of
from ..memory.sequence import Sequence
from .sessions import Session

if TYPE_CHECKING:
    from .clients import Clients

T = TypeVar("T")

MAX_TTL_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class _Pin:
    sequence_id: Annotated[str, Name()]
    num_tokens: Annotated[int, Integer(1)] | None = None  # None: all that are computed
    ttl_s: Annotated[float, Real(0.001, MAX_TTL_S)] | None = None


@dataclass(frozen=True, slots=True)
class _Publish:
    sequence_id: Annotated[str, Name()]
    num_tokens: Annotated[int, Integer(1)] | None = None


@dataclass(frozen=True, slots=True)
class _Unpin:
    pin_id: Annotated[int, Integer(1)]


def answer_pin(clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    asked = _read(_Pin, arguments)
    scheduler = clients.engine.scheduler
    sequence, num_tokens = _prefix(clients, session, asked)
    expires_at = None if asked.ttl_s is None else clients.now + asked.ttl_s
    pin_id = scheduler.pin(sequence, num_tokens, expires_at=expires_at)
    return {"pin_id": pin_id, "num_blocks": num_tokens // scheduler.pool.block_size}


def answer_unpin(clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    pin_id, pins = _read(_Unpin, arguments).pin_id, clients.engine.scheduler.pins
    if pins.owner(pin_id) != session.peer.uid:
        raise NotFound(f"this user has no pin {pin_id}", field="pin_id")
    return {"unpinned": pins.remove(pin_id)}


def answer_pins(clients: Clients, session: Session, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"pin_id": pin_id, "num_blocks": num_blocks, "expires_in_s": None if at is None else max(0.0, at - clients.now)}
        for pin_id, num_blocks, at in clients.engine.scheduler.pins.of(session.peer.uid)
    ]


def answer_publish(clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    sequence, num_tokens = _prefix(clients, session, _read(_Publish, arguments))
    return {"num_blocks": clients.engine.scheduler.publish(sequence, num_tokens)}


METHODS: dict[str, Callable[[Clients, Session, Mapping[str, Any]], Any]] = {
    "pin": answer_pin,
    "unpin": answer_unpin,
    "pins": answer_pins,
    "publish": answer_publish,
}


def _prefix(clients: Clients, session: Session, asked: _Pin | _Publish) -> tuple[Sequence, int]:
    """The session's own sequence, and how many of its first tokens are meant: those in full, computed blocks. Raises
    Unsupported in a daemon that keeps no prefixes, InvalidArgument for a sequence without such blocks."""
    cache = clients.engine.scheduler.cache
    if cache is None:
        raise Unsupported("this daemon keeps no prefixes: prefix_cache is off, or the model's window is sliding")
    sequence = clients.sequences.own(session, asked.sequence_id).sequence
    size, most = cache.pool.block_size, sequence.num_tokens if asked.num_tokens is None else asked.num_tokens
    blocks = cache.num_held(sequence, most)
    if not blocks:
        raise InvalidArgument(
            f"no block of {size} tokens is full and computed there; generate with max_tokens 0 first",
            field="num_tokens",
        )
    return sequence, blocks * size


def _read(kind: type[T], arguments: Mapping[str, Any]) -> T:
    """The arguments as a value. Raises InvalidArgument naming what is wrong."""
    try:
        read: T = record_of(kind).check(dict(arguments))
    except Mismatch as fault:
        raise InvalidArgument(fault.message, field=fault.path.lstrip(".")) from None
    return read
