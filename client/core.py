"""The client's half of the protocol as a state machine: bytes in, bytes out, and requests and calls that change.

    DISCONNECTED --connected()--> GREETING --Welcome--> TYING --lifeline ATTACHED--> READY
         ^                                                                             |
         +-------------------------- lost(), Closing, bad bytes -----------------------+

A daemon of another machine has no lifeline: there CONNECTING comes before GREETING, and Welcome makes it READY.

It knows no socket, no thread and no clock: a shell moves `outbox` and `lifeline_outbox` out and what arrives in, and
says when the connection is lost. A lost connection fails every call at once. Requests with a linger time wait for the
next session, and are attached to it; when it is the daemon that went away, the others do too, for `reconnect_s`. While
a daemon accepts connections and has not said welcome (it loads its model), all wait up to `patience_s` from the loss.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto

from .arena.arena import ARENA, supported
from .arena.descriptors import SharedMemory
from .lifeline import Frame, FrameKind, FrameReader, encode_frame
from .prompt_rows import array_of
from .results import TokenEvent
from .stream_state import StreamState
from .wire.codec import decode_daemon_message, encode, encode_checked
from .wire.errors import (
    ConnectionLost,
    InvalidArgument,
    KVPoolError,
    NotFound,
    ProtocolError,
    ShuttingDown,
    Unsupported,
    from_code,
)
from .wire.messages import (
    SUPPORTED_VERSIONS,
    Accepted,
    Cancel,
    ClientMessage,
    Closing,
    DaemonMessage,
    Failed,
    Finished,
    Generate,
    Goodbye,
    Hello,
    Notice,
    Reply,
    Rows,
    Submit,
    Tokens,
    Welcome,
)


class State(Enum):
    DISCONNECTED = auto()
    CONNECTING = auto()  # to another machine: that takes a while
    GREETING = auto()
    TYING = auto()
    READY = auto()


class DaemonGone(ConnectionLost):
    """The lifeline hung up: the daemon has ended, and another one may take up its requests."""


class EndOfStream(Exception):
    """Every token of a request has been read. Never leaves the client."""


class PendingCall:
    """A question to the daemon that has no answer yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self.error: KVPoolError | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._value: object = None

    def settle(self, value: object = None, error: KVPoolError | None = None) -> None:
        self._value, self.error, self.done = value, error, True
        self.on_change()

    def value(self) -> object:
        """The answer. Raises the daemon's error."""
        if self.error is not None:
            raise self.error
        return self._value


class Core:
    """One client's session with a daemon, and what it waits for."""

    def __init__(
        self, client_name: str = "", *, reconnect_s: float = 0.0, patience_s: float = 0.0, arena: bool = False
    ) -> None:
        self.state = State.DISCONNECTED
        self.welcome: Welcome | None = None
        self.last_error: KVPoolError | None = None  # why the last connection ended
        self.outbox: deque[bytes] = deque()
        self.lifeline_outbox = bytearray()
        self.on_change: Callable[[], None] = lambda: None  # the state is another one
        self._client_name = client_name
        self._reconnect_s = reconnect_s
        self._patience_s = patience_s
        self._lost_at = 0.0  # when the last session that was READY was lost
        self._frames = FrameReader()
        self._wants_arena = arena
        self.shared = SharedMemory()
        self._streams: dict[str, StreamState] = {}
        self._calls: dict[int, PendingCall] = {}
        self._next_call_id = 1

    # ---- the connection

    def connecting(self) -> None:
        """A connection to another machine has been begun; `connected` or `lost` will say what came of it."""
        self._enter(State.CONNECTING)

    def connected(self, now_s: float = 0.0) -> None:
        """Somebody listens at the other end: say hello."""
        for stream in self._streams.values():
            if stream.detached_until is not None:
                stream.detached_until = max(stream.detached_until, self._lost_at + self._patience_s)
        self._frames = FrameReader()
        asks = self._wants_arena and supported() and not self.shared.out_of_descriptors
        capabilities = (ARENA,) if asks else ()
        self.outbox.append(encode(Hello(SUPPORTED_VERSIONS, self._client_name, os.getpid(), capabilities)))
        self._enter(State.GREETING)

    def lost(self, error: KVPoolError, now_s: float) -> None:
        """The connection ended. Whoever waits is told, or (requests) goes on waiting for the next one."""
        self.outbox.clear()
        self.lifeline_outbox.clear()
        self.shared.close()
        self.welcome = None
        self.last_error = error
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.settle(error=error)
        if self.state is State.READY:
            self._lost_at, self.shared.out_of_descriptors = now_s, False
        if self.state is State.CONNECTING:  # nobody was there: who waited goes on waiting as long as before
            self._enter(State.DISCONNECTED)
            return
        for stream in list(self._streams.values()):
            may_resume = stream.detached_until is not None or isinstance(error, DaemonGone | ShuttingDown)
            wait_s = max(stream.linger_s, self._reconnect_s if may_resume else 0.0)
            if wait_s > 0 and not stream.abandoned and not isinstance(error, Unsupported):
                stream.detached_until = min(now_s + wait_s, self._lost_at + max(wait_s, self._patience_s))
            else:
                self._end(stream, error)
        self._enter(State.DISCONNECTED)

    def abandon_all(self, error: KVPoolError) -> None:
        """The connection ended on purpose: nothing waits for another."""
        for stream in list(self._streams.values()):
            self._end(stream, error)
        self.lost(error, 0.0)

    def expire(self, now_s: float) -> None:
        """Give up requests that have waited long enough for another connection."""
        for stream in list(self._streams.values()):
            if stream.detached_until is not None and now_s >= stream.detached_until:
                self._end(stream, self.last_error or ConnectionLost("the connection was lost"))

    @property
    def has_detached(self) -> bool:
        """Some request waits for a new connection."""
        return any(stream.detached_until is not None for stream in self._streams.values())

    @property
    def has_output(self) -> bool:
        """Something waits to be sent."""
        return bool(self.outbox or self.lifeline_outbox)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def _enter(self, state: State) -> None:
        self.state = state
        self.on_change()

    # ---- what the program asks

    def submit(self, message: Submit | Generate, num_samples: int, linger_s: float = 0.0) -> StreamState:
        """Start a request. Raises InvalidArgument for a request_id in use, and what encode_checked raises."""
        if message.request_id in self._streams:
            raise InvalidArgument(f"{message.request_id!r} is in use by a running request", field="request_id")
        self.shared.check_wanted(message)
        stream = StreamState(message.request_id, num_samples, message.credit, linger_s)
        stream.unaccepted = message
        if isinstance(message, Submit):
            wanted = {"logits": message.want_logits, "hidden": bool(message.hidden_layers)}
            stream.wants = frozenset(kind for kind, wants in wanted.items() if wants)
        self._begin(stream, message)
        self._streams[message.request_id] = stream
        return stream

    def attach(self, request_id: str, window: int | None) -> StreamState:
        """Follow a request that another process of this user started."""
        if request_id in self._streams:
            raise InvalidArgument(f"{request_id!r} is followed already", field="request_id")
        stream = StreamState(request_id, 1, window)  # Accepted tells of more samples
        self._send(stream.attach())
        self._streams[request_id] = stream
        return stream

    def call(self, make: Callable[[int], ClientMessage], name: str) -> PendingCall:
        """Send the message that `make` builds around a fresh call_id, and remember who waits for its answer."""
        call_id = self._next_call_id
        self._send(make(call_id))
        self._next_call_id += 1
        pending = self._calls[call_id] = PendingCall(name)
        return pending

    def forget(self, pending: PendingCall) -> None:
        """Nobody waits for this answer any more."""
        self._calls = {number: call for number, call in self._calls.items() if call is not pending}

    def cancel(self, stream: StreamState) -> None:
        """Ask for the end of a request; its Finished will still come. Nothing to do when it is over."""
        if stream.done or self._streams.get(stream.request_id) is not stream:
            return
        if self.state is State.READY and stream.detached_until is None:
            self._send(Cancel(stream.request_id))
        else:
            self._end(stream, self.last_error or ConnectionLost("the connection was lost"))

    def read(self, stream: StreamState) -> TokenEvent | None:
        """The next token of a request, None when none has come yet. Raises its error, or EndOfStream."""
        event = stream.take()
        if event is not None:
            if stream.owes_credit:
                self._grant(stream)
            if event.logits is not None:
                self.shared.settle_rows()  # the daemon writes where it wrote before: what is in the caches
            return event
        if stream.done:
            stream.raise_if_failed()
            raise EndOfStream
        return None

    def read_all(self, stream: StreamState) -> None:
        """Read what has come, for somebody who only waits for the result."""
        stream.take_all()
        self._grant(stream)

    def _grant(self, stream: StreamState) -> None:
        if self.state is State.READY and stream.detached_until is None:
            for credit in stream.credit_due():
                self.outbox.append(encode(credit))

    def goodbye(self) -> None:
        if self.state not in (State.DISCONNECTED, State.CONNECTING):
            self.outbox.append(encode(Goodbye()))

    def _begin(self, stream: StreamState, message: Submit | Generate) -> None:
        """Send what starts a request, through the arena as far as there is one."""
        arena = self.shared.arena
        if arena is None:
            return self._send(message)
        try:
            self._send(arena.prepare(message))
        except KVPoolError:
            arena.settle(message.request_id)
            raise
        arena.follow(stream)

    def _send(self, message: ClientMessage) -> None:
        if self.state is not State.READY or self.welcome is None:
            raise self.last_error or ConnectionLost("not connected")
        self.outbox.append(encode_checked(message, self.welcome.limits.max_message_bytes))

    # ---- what arrives

    def receive(self, data: bytes) -> None:
        """Take one message in. Raises a KVPoolError when the connection must end: bad bytes, refusal, Closing."""
        self.shared.read_ring()  # what was written there before the message was sent
        message = decode_daemon_message(data)
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif self.welcome is not None and message.epoch != self.welcome.epoch:
            # ZeroMQ connects again by itself, and what was said to one daemon may reach the next.
            raise DaemonGone("another daemon answers: the one of this session is gone")
        elif isinstance(message, Failed):
            self._failed(message)
        elif isinstance(message, Closing):
            if message.reason == "shutting_down":
                raise ShuttingDown("the daemon shuts down")
            raise ConnectionLost(f"the daemon closed the session: {message.reason}")
        elif self.welcome is None:
            raise ProtocolError(f"{type(message).__name__} came before a session")
        else:
            self._dispatch(message)

    def receive_lifeline(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Take bytes of the lifeline in, and the descriptors that came with them, which are the core's to close. Raises
        a KVPoolError when the daemon refuses it."""
        self.shared.take_fds(fds)
        for frame in self._frames.feed(data):
            self._lifeline_frame(frame)

    def _lifeline_frame(self, frame: Frame) -> None:
        if frame.kind is FrameKind.ATTACHED and self.state is State.TYING:
            self._ready()
        elif frame.kind is FrameKind.ARENA and self.state is State.TYING and self._wants_arena:
            self.shared.enter_arena()
        elif frame.kind is FrameKind.POOL_MAP and self.state is State.READY:
            self.shared.map_pool()
        elif frame.kind is FrameKind.REFUSED:
            raise ConnectionLost(f"the daemon refused the lifeline: {frame.payload.decode(errors='replace')}")
        else:
            raise ProtocolError(f"{frame.kind.name} came out of turn", field="lifeline")

    def _ready(self) -> None:
        for stream in self._streams.values():
            if stream.detached_until is not None:
                stream.detached_until = None
                stream.resuming = True
                self.outbox.append(encode(stream.attach()))
        self._enter(State.READY)

    def _welcomed(self, message: Welcome) -> None:
        if self.state is not State.GREETING:
            raise ProtocolError("Welcome came out of turn")
        if message.version not in SUPPORTED_VERSIONS:
            raise Unsupported(f"the daemon speaks protocol {message.version}, this client {SUPPORTED_VERSIONS}")
        self.welcome = message
        if message.lifeline_token:
            self.lifeline_outbox += encode_frame(FrameKind.TOKEN, message.lifeline_token)
            self._enter(State.TYING)
        else:
            self._ready()

    def _failed(self, message: Failed) -> None:
        error = from_code(message.code, message.message, field=message.field, retry_after_ms=message.retry_after_ms)
        if message.request_id is not None:
            self._settle_upload(message.request_id)
            stream = self._streams.get(message.request_id)
            if stream is not None:
                self._refused(stream, error)
        elif message.call_id is not None:
            pending = self._calls.pop(message.call_id, None)
            if pending is not None:
                pending.settle(error=error)
        elif self.state is State.GREETING:
            raise error
        else:
            raise ConnectionLost(f"the daemon has ended the session: {error}")

    def _refused(self, stream: StreamState, error: KVPoolError) -> None:
        if stream.resuming and isinstance(error, NotFound):
            if stream.unaccepted is not None:  # it was never taken: the last daemon had no time
                stream.resuming = False
                self._begin(stream, stream.unaccepted)
                return
            if not stream.linger_s:
                error = ConnectionLost(f"{self.last_error}; the daemon there now does not know the request")
        self._end(stream, error)

    def _dispatch(self, message: DaemonMessage) -> None:
        if isinstance(message, Tokens):
            for batch in message.events:
                stream = self._streams.get(batch.request_id)
                if stream is not None:
                    stream.push(batch)
        elif isinstance(message, Rows):
            self._rows(message)
        elif isinstance(message, Finished):
            self._finished(message)
        elif isinstance(message, Reply):
            value = self.shared.resolve(message.value)  # also where nobody waits any more: it takes up room
            pending = self._calls.pop(message.call_id, None)
            if pending is not None:
                pending.settle(value)
        elif isinstance(message, Notice):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.notice(message)
        elif isinstance(message, Accepted):
            self._settle_upload(message.request_id)
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.accept(message.num_samples)
        else:
            raise ProtocolError(f"{type(message).__name__} came out of turn")

    def _rows(self, message: Rows) -> None:
        data = self.shared.read_rows(message.data)  # also for a request that nobody waits for: they take up room
        stream = self._streams.get(message.request_id)
        if stream is not None and not stream.abandoned:
            stream.rows.push(message, array_of(message, data))

    def _finished(self, message: Finished) -> None:
        stream = self._streams.get(message.request_id)
        if stream is not None:
            stream.finish(message)
            if stream.done:
                self._drop(stream)

    def _settle_upload(self, request_id: str) -> None:
        if self.shared.arena is not None:
            self.shared.arena.settle(request_id)

    def _drop(self, stream: StreamState) -> None:
        del self._streams[stream.request_id]
        if self.shared.arena is not None:
            self.shared.arena.forget(stream)

    def _end(self, stream: StreamState, error: KVPoolError) -> None:
        self._drop(stream)
        stream.fail(error)
