"""The methods of Call: questions about the pool and its sequences, and what an administrator may do.

A caller sees the figures of the whole pool, and the sequences of its own user; an administrator (root, the daemon's own
user, members of admin_group) sees everybody's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...client.wire.errors import InvalidArgument, NotFound, NotOwner, Unsupported
from ...client.wire.protocol import MAX_PROMPT_BYTES, MAX_PROMPT_TOKENS, Call, pack_token_ids
from ...client.wire.schema import Mismatch, Name, Real, Spec, Text
from ...client.wire.token_ids import PackedTokenIds
from ..engine.request import Request, Sample
from ..memory.block_pool import NOBODY
from ..memory.sequence import Sequence
from ..persistence.snapshots import SnapshotStore, check_name
from .clients import Clients
from .health import health_of, why_it_waits
from .pool_map_segment import PoolMapSegment
from .prefix_calls import METHODS as PREFIX_METHODS
from .sequence_objects import SequenceObject
from .sessions import Peer, Session
from .users import is_admin, user_name

BLOCK_FREE, BLOCK_USED, BLOCK_CACHED = 0, 1, 2
HIDDEN = -2
"""Owner of a block of somebody else, in the map of a caller who may not see whose it is."""

SPANS_AT_ONCE = 2000  # of a trace: a few milliseconds of the loop's time
TRACE_KEPT_S = 60.0


class Calls:
    """Answers calls. `drain` and `reload` are the daemon's own functions; without `snapshots` there are none."""

    def __init__(
        self, drain: Callable[[], None], reload: Callable[[], list[str]], snapshots: SnapshotStore | None = None
    ) -> None:
        self._drain = drain
        self._reload = reload
        self._snapshots = snapshots
        self._segment: PoolMapSegment | None = None
        self._methods: dict[str, Callable[[Clients, Session, Mapping[str, Any]], Any]] = {
            "stats": self._answer_stats,
            "ps": self._answer_ps,
            "map": self._answer_map,
            "watch_map": self._answer_watch_map,
            "fsck": self._answer_fsck,
            "cancel": self._answer_cancel,
            "snapshots": self._answer_snapshots,
            "discard": self._answer_discard,
            "tokenize": self._answer_tokenize,
            "detokenize": self._answer_detokenize,
            "drain": self._answer_drain,
            "reload": self._answer_reload,
            "resize": self._answer_resize,
            "trace": self._answer_trace,
            "trace_spans": self._answer_trace_spans,
            **PREFIX_METHODS,
        }

    def __call__(self, clients: Clients, session: Session, call: Call) -> Any:
        """The value of the Reply. Raises KVPoolError."""
        method = self._methods.get(call.method)
        if method is None:
            raise Unsupported(
                f"there is no method {call.method!r}; there are {', '.join(self._methods)}", field="method"
            )
        return method(clients, session, call.arguments or {})

    def _answer_stats(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return stats(clients)

    def _answer_ps(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        return rows(clients, session.peer)

    def _answer_map(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return pool_map(clients, session.peer)

    def _answer_watch_map(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        _require_admin(clients, session)
        if session.peer.remote is not None:
            raise Unsupported("the map is memory of another machine; ask for it with map", field="method")
        if session.lifeline is None:
            raise InvalidArgument("is attached first: the map comes over it", field="lifeline")
        if self._segment is None:
            everything = Peer(os.geteuid(), os.getegid(), os.getpid())
            self._segment = PoolMapSegment(lambda: pool_map(clients, everything), clients.timers)
        try:
            return {"segment_bytes": self._segment.share_with(session, clients.now)}
        except OSError as error:
            raise Unsupported(f"no memory can be shared now: {error.strerror}") from None

    def _answer_fsck(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        _require_admin(clients, session)  # it takes as long as the pool is large, and names users
        try:
            clients.check_invariants()
        except RuntimeError as error:
            return {"consistent": False, "error": str(error)}
        return {"consistent": True}

    def _answer_cancel(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Requests of this name; if there are none, idle sequences of this name, which are closed. Whether somebody
        else has one is nobody's business."""
        name = _argument(arguments, "request_id", Name(max_bytes=128))
        requests = [request for request in clients.requests() if _is_called(request, name) and _goes_on(request)]
        idle = [found for found in clients.sequences if name in (found.name, str(found.sequence.sequence_id))]
        found: list[Request | SequenceObject] = [*requests] or [*idle]
        own = [item for item in found if item.uid == session.peer.uid]
        if not found or not (own or is_admin(session.peer, clients.config.admin_group)):
            raise NotFound(f"no request or sequence of yours is called {name!r}", field="request_id")
        for item in own or found:
            if isinstance(item, Request):
                clients.engine.cancel(item)
            else:
                clients.sequences.close(item)
        return {"cancelled": len(own or found)}

    def _answer_snapshots(
        self, clients: Clients, session: Session, arguments: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        return [stored._asdict() for stored in self._store().stored(session.peer.uid)]

    def _answer_discard(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = _argument(arguments, "name", Name(max_bytes=128))
        self._store().discard(session.peer.uid, check_name(name))
        return {"discarded": name}

    def _store(self) -> SnapshotStore:
        if self._snapshots is None:
            raise Unsupported("this daemon keeps no snapshots", field="method")
        return self._snapshots

    def _answer_tokenize(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        text = _argument(arguments, "text", Text(MAX_PROMPT_BYTES))
        return {"token_ids": pack_token_ids(clients.text.tokenize(text))}

    def _answer_detokenize(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        packed = _argument(arguments, "token_ids", PackedTokenIds(MAX_PROMPT_TOKENS))
        return {"text": clients.text.detokenize(packed)}

    def _answer_drain(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        _require_admin(clients, session)
        self._drain()
        return {"draining": True}

    def _answer_reload(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        _require_admin(clients, session)
        return {"changed": self._reload()}

    def _answer_resize(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        _require_admin(clients, session)
        raise Unsupported("the pool cannot change its size while the daemon runs; set pool_bytes and restart")

    def _answer_trace(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Record for a while; then `trace_spans` brings it, if somebody comes for it."""
        _require_admin(clients, session)
        seconds = float(_argument(arguments, "seconds", Real(0.01, 3600.0)))
        trace = clients.engine.trace
        number = trace.start()
        clients.timers.at(clients.now + seconds, lambda: trace.stop(number))
        clients.timers.at(clients.now + seconds + TRACE_KEPT_S, lambda: trace.stop(number, forget=True))
        return {"seconds": seconds}

    def _answer_trace_spans(self, clients: Clients, session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
        _require_admin(clients, session)
        trace = clients.engine.trace
        spans = [list(span) for span in trace.take(SPANS_AT_ONCE)]
        return {"spans": spans, "dropped": trace.dropped, "more": len(trace) > 0}


def stats(clients: Clients) -> dict[str, Any]:
    """The daemon's figures, by name."""
    engine = clients.engine
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    cached = pool.num_cached
    healthy, health_reason = health_of(engine, clients.config.health_limit_s, clients.now)
    return engine.metrics.snapshot(clients.now) | {
        **(engine.journal.stats() if engine.journal else {"journal": "off"}),
        "epoch": engine.epoch,
        "model": clients.model_name,
        "healthy": healthy,
        "health_reason": health_reason,
        "no_progress_s": engine.no_progress_s(clients.now),
        "draining": clients.draining,
        "in_flight_s": engine.in_flight_s(clients.now),
        "block_size": pool.block_size,
        "block_bytes": engine.runner.block_bytes,
        "blocks_total": pool.num_blocks,
        "blocks_free": pool.num_free - cached,
        "blocks_cached": cached,
        "blocks_used": pool.num_used,
        "sequences_running": len(scheduler.roster.running),
        "sequences_waiting": scheduler.roster.num_waiting,
        "sequences_paused": scheduler.roster.num_paused,
        "sequences_held": len(clients.sequences),
        "clients": len(clients.sessions),
        "preemptions_total": scheduler.preemptions_total,
        "tokens_computed_total": scheduler.tokens_computed_total,
        "cache_lookup_tokens": scheduler.cache.stats.lookup_tokens if scheduler.cache else 0,
        "cache_hit_tokens": scheduler.cache.stats.hit_tokens if scheduler.cache else 0,
    }


def rows(clients: Clients, peer: Peer) -> list[dict[str, Any]]:
    """One row per living sequence that the peer may see."""
    everybody = is_admin(peer, clients.config.admin_group)
    return [
        *(
            _row_of_sample(clients, request, sample)
            for request in clients.requests()
            if everybody or request.uid == peer.uid
            for sample in request.samples
            if sample.finished is None
        ),
        *(
            _row(clients, found.sequence, found.name, found.holder, found.created_at)
            for found in clients.sequences
            if (everybody or found.uid == peer.uid) and found.sequence.idle
        ),
    ]


def _row_of_sample(clients: Clients, request: Request, sample: Sample) -> dict[str, Any]:
    row = _row(clients, sample.sequence, request.request_id, request.session, request.arrival)
    first = request.first_token_at
    return row | {
        "sample": sample.index,
        "num_output_tokens": sample.num_sent,
        "ttft_s": None if first is None else first - request.arrival,
        "credit": None if sample.granted is None else max(0, sample.granted - sample.num_sent),
    }


def _row(clients: Clients, sequence: Sequence, name: str, session: object, since: float) -> dict[str, Any]:
    holder = session if isinstance(session, Session) else None
    health = health_of(clients.engine, clients.config.health_limit_s, clients.now)
    return {
        "sequence_id": sequence.sequence_id,
        "request_id": name,
        "sample": 0,
        "uid": sequence.uid,
        "user": user_name(sequence.uid),
        "pid": holder.peer.pid if holder else 0,
        "client_name": holder.client_name if holder else "",
        "state": "idle" if sequence.idle else sequence.state.value,
        "wait_reason": why_it_waits(sequence, clients.engine, health, clients.now),
        "num_tokens": sequence.num_tokens,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_computed_tokens": sequence.num_computed_tokens,
        "num_cached_tokens": sequence.num_cached_tokens,
        "num_output_tokens": sequence.num_output_tokens,
        "max_tokens": sequence.max_tokens,
        "num_blocks": sequence.num_blocks,
        "blocks": np.asarray(sequence.live_blocks(), dtype="<i4").tobytes(),
        "priority": sequence.priority,
        "preemptions": sequence.preemptions,
        "ttft_s": None,
        "credit": None,
        "age_s": clients.now - since,
    }


def pool_map(clients: Clients, peer: Peer) -> dict[str, Any]:
    """Every block as packed arrays, one entry per block: `states` uint8 (0 free, 1 used, 2 cached), `owners` int32 (the
    uid that is charged; -1: nobody, -2: not for the caller to know), `ref_counts` uint16; all little-endian."""
    pool = clients.engine.scheduler.pool
    ref_counts = np.asarray(pool.ref_count)
    kinds = np.asarray(pool.kind)
    states = np.where(ref_counts > 0, BLOCK_USED, np.where(kinds != 0, BLOCK_CACHED, BLOCK_FREE))
    owners = np.asarray(pool.owners).astype("<i4")
    if not is_admin(peer, clients.config.admin_group):
        owners[(owners != NOBODY) & (owners != peer.uid)] = HIDDEN
    return {
        "block_size": pool.block_size,
        "num_blocks": pool.num_blocks,
        "states": states.astype(np.uint8).tobytes(),
        "owners": owners.tobytes(),
        "ref_counts": np.minimum(ref_counts, 65535).astype("<u2").tobytes(),
        "sequences": rows(clients, peer),
        "counters": stats(clients),
    }


def _require_admin(clients: Clients, session: Session) -> None:
    if not is_admin(session.peer, clients.config.admin_group):
        raise NotOwner("only root, the daemon's user and members of admin_group may do this")


def _is_called(request: Request, name: str) -> bool:
    """By its own name, or by the id of one of its sequences, as `ps` shows them."""
    return request.request_id == name or any(name == str(sample.sequence.sequence_id) for sample in request.samples)


def _goes_on(request: Request) -> bool:
    """Something is left to cancel; what has ended may still have to be said."""
    return any(sample.finish_reason is None for sample in request.samples)


def _argument(arguments: Mapping[str, Any], name: str, spec: Spec) -> Any:
    """The only argument of a method. Raises InvalidArgument naming what is wrong."""
    unknown = next((key for key in arguments if key != name), None)
    if unknown is not None:
        raise InvalidArgument("is not an argument of this method", field=unknown[:64])
    try:
        return spec.check(arguments.get(name))
    except Mismatch as fault:
        raise InvalidArgument(fault.message, field=f"{name}{fault.path}") from None
