"""Everything between a client's bytes and the engine: sessions, the requests they own, and what is sent back.

Knows no socket: messages come in through `receive`, and leave through a `send` that it was given, which says whether
the peer took them. So every order of events is a list of calls in a test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...client.wire.errors import (
    Busy,
    InternalError,
    InvalidArgument,
    KVPoolError,
    NotFound,
    ProtocolError,
    ShuttingDown,
    Unsupported,
)
from ...client.wire.protocol import (
    Accepted,
    Attach,
    Call,
    Cancel,
    Closing,
    CodecLimits,
    Credit,
    DaemonMessage,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Reply,
    ServerLimits,
    Submit,
    Tokens,
    Welcome,
    decode_client_message,
    encode,
    negotiate,
)
from ..engine.engine import Engine
from ..engine.metrics import Metrics
from ..engine.request import Request
from ..engine.submission import make_request
from ..engine.text import Text
from ..settings.config import Config
from ..system.timers import Timers
from .delivery import SLOW_READER, Delivery
from .kv_service import KVService
from .lingering import Lingering
from .parcels import Send, rows_parcels
from .sequence_objects import SequenceObject, SequenceObjects
from .sequence_service import SequenceService
from .sessions import Peer, Session, Sessions

log = logging.getLogger(__name__)


class Clients:
    """Sessions and requests by their names. `calls` answers the methods of Call."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        text: Text,
        sessions: Sessions,
        timers: Timers,
        *,
        send: Send,
        calls: Callable[[Clients, Session, Call], Any],
        limits: ServerLimits,
        model_name: str,
        version: str,
    ) -> None:
        self.config = config
        self.engine = engine
        self.text = text
        self.sessions = sessions
        self.sequences = SequenceObjects(engine, timers)
        self.limits = limits
        self.draining = False
        self.now = 0.0  # monotonic seconds, of the turn
        self.timers = timers
        self._send_bytes = send
        self._calls = calls
        self.model_name = model_name
        self._version = version
        self._codec_limits = CodecLimits(limits.max_message_bytes, max_array_items=4096, max_map_items=1024)
        self._lingering = Lingering(engine, timers)
        self.delivery = Delivery(engine, send, sessions.rings, gone=self.settle, damaged=self._damaged)
        self.handlers: dict[type[Any], Callable[[Session, Any], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Credit: self._credit,
            Attach: self._attach,
            Goodbye: self._goodbye,
            Call: self._call,
            **SequenceService(self).handlers,
            **KVService(self).handlers,
        }

    @property
    def metrics(self) -> Metrics:
        return self.engine.metrics

    # Coming in

    def receive(self, routing_id: bytes, peer: Peer, data: bytes) -> None:
        """One message of a peer. Whatever it is, it is answered or obeyed, and nobody else notices."""
        self.metrics.messages_total += 1
        session = self.sessions.get(routing_id)
        message: Any = None
        try:
            message = decode_client_message(data, self._codec_limits)
            if isinstance(message, Hello):
                self._hello(session, routing_id, peer, message)
            elif session is None and isinstance(message, Goodbye):
                pass  # its lifeline hung up before its last word was read
            elif session is None:
                raise NotFound("there is no session: say hello first", field="session")
            elif handler := self.handlers.get(type(message)):
                handler(session, message)
            else:
                raise Unsupported(f"this daemon does not serve {type(message).__name__}", field="type")
        except Exception as error:
            self._fail(routing_id, session, error, *_ids(message))
        if session is not None and session.outbox:
            self.delivery.offer(session)  # who says something has probably read something

    def attempt(self, session: Session, call_id: int, action: Callable[[], None]) -> None:
        """Go on with a call whose message came earlier."""
        try:
            action()
        except Exception as error:
            self._fail(session.routing_id, session, error, None, call_id)

    def _fail(
        self,
        routing_id: bytes,
        session: Session | None,
        error: Exception,
        request_id: str | None,
        call_id: int | None,
    ) -> None:
        """Answer with what went wrong, even if it is a bug of ours."""
        if isinstance(error, ProtocolError):
            self.metrics.garbage_total += 1
            request_id, call_id = error.request_id or request_id, error.call_id if call_id is None else call_id
        if not isinstance(error, KVPoolError):
            log.error("a message could not be handled", exc_info=error)
            error = InternalError(f"a bug in the daemon ({type(error).__name__}); its log has the details")
        self._refuse(routing_id, session, error, request_id, call_id)

    def _refuse(
        self,
        routing_id: bytes,
        session: Session | None,
        error: KVPoolError,
        request_id: str | None,
        call_id: int | None,
    ) -> None:
        self.metrics.refused[error.code] += 1
        failed = Failed(
            self.engine.epoch,
            error.code,
            error.message[:1024],
            error.field and error.field[:64],
            error.retry_after_ms,
            request_id,
            call_id,
        )
        if session is not None:
            self.send(session, failed)
        else:
            self._send_bytes(routing_id, encode(failed))

    def _hello(self, session: Session | None, routing_id: bytes, peer: Peer, message: Hello) -> None:
        if session is not None:
            raise InvalidArgument("this connection has said hello already", field="type")
        if self.draining:
            raise ShuttingDown("the daemon shuts down")
        version = negotiate(message.versions)
        if version is None:
            raise Unsupported(f"the daemon speaks none of the protocol versions {message.versions}", field="versions")
        if len(self.sessions) >= self.config.max_clients:
            raise Busy(f"{len(self.sessions)} clients are connected (max_clients)", retry_after_ms=1000)
        session = self.sessions.open(routing_id, peer, message.client_name, message.capabilities)
        self.metrics.sessions_total += 1
        if peer.remote is None:
            self.timers.at(self.now + self.config.lifeline_grace_s, lambda: self._check_lifeline(session))
        self.send(
            session,
            Welcome(
                self.engine.epoch,
                version,
                session.session_id,
                self.model_name,
                self.limits,
                session.token,
                self._version,
                tuple(sorted(session.capabilities)),
            ),
        )

    def _check_lifeline(self, session: Session) -> None:
        if session.lifeline is None and not session.closed:
            log.info("session %s of uid %d has no lifeline", session.session_id, session.peer.uid)
            self.close(session, "lifeline_lost")

    def _submit(self, session: Session, message: Submit) -> None:
        if message.keep:
            self.sequences.check_name(session.peer.uid, message.request_id, "request_id")
        request = self.begin(session, message, self.engine.submit)
        if request.keep:
            self.keep_sequence(request)

    def begin(self, session: Session, message: Submit, submit: Callable[[Request], None]) -> Request:
        """Make a request of a message, `submit` it, and let the session have it."""
        if self.draining:
            raise ShuttingDown("the daemon shuts down and takes no new work")
        if message.request_id in session.requests:
            raise InvalidArgument(f"{message.request_id!r} is the name of a running request", field="request_id")
        if message.upload is not None:
            message = _with_upload(message, session)
        if message.want_logits and session.arena is None:
            raise Unsupported(
                "logits need shared memory: a daemon of this machine, and arena=True", field="want_logits"
            )
        request = make_request(message, self.text, session.peer.uid, self.now)
        request.session = session
        if session.arena is not None and request.fits_ring:
            request.handle = message.handle
        submit(request)
        self._let_have(session, request)
        return request

    def _let_have(self, session: Session, request: Request) -> None:
        """The request is the session's from now on."""
        session.requests[request.request_id] = request
        self.send(session, Accepted(self.engine.epoch, request.request_id, request.params.n))
        if session.outbox:
            self.engine.pace.hold(request, SLOW_READER)

    def keep_sequence(self, request: Request) -> None:
        """The request's sequence stays under the request's name."""
        sequence = request.samples[0].sequence
        made = SequenceObject(request.kept_as, request.uid, sequence, created_at=self.now, request=request)
        self.sequences.note_answer(self.sequences.adopt(made))

    def _cancel(self, session: Session, message: Cancel) -> None:
        request = session.requests.get(message.request_id)
        if request is not None:  # else it has just ended: its Finished is on the way
            self.engine.cancel(request)

    def _credit(self, session: Session, message: Credit) -> None:
        request = session.requests.get(message.request_id)
        if request is not None:
            self.engine.pace.grant(request, message.amount, message.sample)

    def _attach(self, session: Session, message: Attach) -> None:
        """Take a request of the same user over, and send again what the client does not have."""
        request = self._find_own(session, message.request_id)
        if request is None and (why := self._lingering.why_set_aside(session.peer.uid, message.request_id)):
            raise Unsupported(f"the daemon was restarted, and cannot go on with this: {why}", field="request_id")
        if request is None:
            raise NotFound("no request of this user has this id, or it is over", field="request_id")
        samples = [] if request.withheld else request.samples  # else there is nothing to send again
        have = [*message.have, *[0] * len(samples)][: len(samples)]
        for sample, index in zip(samples, have, strict=True):
            ahead = index > sample.num_sent and not request.taken_up  # else it comes again, and the client skips it
            if ahead or (index < sample.num_sent and not sample.history):
                raise NotFound(f"tokens from {index} on are not kept; submit with linger_s", field="have")
        self._take_from(request)
        request.session, request.handle = session, None
        request.want_logits = request.want_logits and session.arena is not None
        self._let_have(session, request)
        for sample, index in zip(samples, have, strict=True):
            again = [batch for batch in sample.history if batch.index + len(batch.token_ids) > index]
            if again:
                self.send(session, Tokens(self.engine.epoch, tuple(again)))
            for rows in sample.told:
                for parcel in rows_parcels(session, self.engine.epoch, request.request_id, rows):
                    self.delivery.give(session, parcel)
            if sample.finished is not None:
                self.send(session, sample.finished)
            self.engine.pace.set_granted(sample, None if message.credit is None else index + message.credit)
        if request.done:
            self._forget(request)

    def _find_own(self, session: Session, request_id: str) -> Request | None:
        """A request of the session's user by its name: its own, another session's, or one without a session. What
        runs comes first: the same name may have been used before."""
        uid = session.peer.uid
        others = (other.requests.get(request_id) for other in self.sessions if other.peer.uid == uid)
        held = session.requests.get(request_id) or next(filter(None, others), None)
        return held or self._lingering.get(uid, request_id)

    def _take_from(self, request: Request) -> None:
        """Nobody has the request now; who had it is told."""
        holder = request.session
        if isinstance(holder, Session):
            del holder.requests[request.request_id]
            error = NotFound("another connection has taken this request over", field="request_id")
            self.send(holder, Failed(self.engine.epoch, error.code, error.message, request_id=request.request_id))
        self._lingering.take(request)
        self.engine.pace.unhold(request)  # who held it up has it no more
        request.session = None

    def _goodbye(self, session: Session, message: Goodbye) -> None:
        self.settle(session)

    def _call(self, session: Session, message: Call) -> None:
        self.send(session, Reply(self.engine.epoch, message.call_id, self._calls(self, session, message)))

    # Going out

    def send(self, session: Session, message: DaemonMessage) -> None:
        """What has happened is written down first: this may tell of it."""
        self.engine.write_down(self.now)
        self.delivery.send(session, message)

    def deliver(self) -> None:
        """Give out what the engine's turn produced."""
        outputs = self.engine.take_outputs()
        turn = self.delivery.address(outputs, self.engine.take_ring_tokens(), self.engine.epoch)
        for request, message in outputs:
            if isinstance(message, Finished) and request.done:
                self._forget(request)
        self.delivery.give_turn(turn)

    def _damaged(self, session: Session, error: ProtocolError) -> None:
        """The client wrote into its arena what cannot be: its session ends, nobody else's."""
        log.warning("session %s of uid %d: %s", session.session_id, session.peer.uid, error)
        self.metrics.garbage_total += 1
        self._refuse(session.routing_id, session, error, None, None)
        self.close(session, "protocol_error")

    def _forget(self, request: Request) -> None:
        """The request is over; one that may be asked for again stays findable for its linger time."""
        if isinstance(request.session, Session):
            request.session.requests.pop(request.request_id, None)
        if request.linger_s > 0:
            request.session = None
            self._lingering.keep(request, self.now + request.linger_s)

    def expect_owner(self, request: Request) -> None:
        """Keep a request of an earlier daemon until its owner asks for it, or for a grace time."""
        self._lingering.keep(request, self.now + max(request.linger_s, self.config.resume_grace_s))

    def expect_owners_of_set_aside(self, requests: Mapping[tuple[int, str], str]) -> None:
        """Tell the owners of these, for a grace time, why their requests cannot go on: (uid, request_id): why."""
        self._lingering.set_aside(requests, self.now + self.config.resume_grace_s)

    # Ends

    def settle(self, session: Session) -> None:
        """The session is over: what it owns is cancelled, or waits for its owner to come back. Idempotent."""
        if session.closed:
            return
        self.sessions.close(session)
        self.delivery.forget(session)
        self.sequences.settle(session, self.now)
        requests, session.requests = session.requests, {}
        for request in requests.values():
            request.session = None
            if request.linger_s > 0:
                self.engine.pace.unhold(request)
                self._lingering.keep(request, self.now + request.linger_s)
            else:
                self.engine.cancel(request)

    def close(self, session: Session, reason: str) -> None:
        """Tell the client that its session ends, and settle it."""
        self.send(session, Closing(self.engine.epoch, reason))
        self.settle(session)

    def shut_down(self) -> None:
        """End what is still running: its readers are told why. Nothing if the next daemon goes on with it."""
        if self.engine.survives:
            return
        for request in list(self.requests()):
            self.engine.cancel(request, "error", ShuttingDown("the daemon shut down before this was finished"))

    def say_goodbye(self, reason: str) -> None:
        """The daemon ends: tell everybody. Lifelines hang up once this has left."""
        for session in self.sessions:
            self.send(session, Closing(self.engine.epoch, reason))

    def check_invariants(self) -> None:
        """Raise RuntimeError if the pool's books do not agree, or something in it belongs to nobody."""
        self.engine.scheduler.check_invariants()
        self.sequences.check_invariants()

    def requests(self) -> Iterator[Request]:
        """All requests that are alive or kept for somebody who may come back."""
        for session in self.sessions:
            yield from session.requests.values()
        yield from self._lingering


def _with_upload(message: Submit, session: Session) -> Submit:
    """The message with what it refers to, copied out of the arena: its client may change it at any time."""
    if message.prompt is not None or message.messages is not None:
        raise InvalidArgument("give exactly one of prompt, messages and upload", field="upload")
    if session.arena is None or message.upload is None:
        raise InvalidArgument("this session has no arena", field="upload")
    return replace(message, prompt=session.arena.upload.copy(*message.upload), upload=None)


def _ids(message: Any) -> tuple[str | None, int | None]:
    """(request_id, call_id) of a message, as far as it has them."""
    return getattr(message, "request_id", None), getattr(message, "call_id", None)
