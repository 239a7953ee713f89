"""The daemon's loop: one thread that owns everything, blocked in one poll whenever there is nothing to do.

A turn has its stages in this order:

    poll       sleep until a message, a lifeline, the device, a signal, or a time that somebody asked for
    dispatch   signals, lifelines, messages: each is handled at once and only changes the engine's state
    turn       the engine's own stages: collect, schedule, launch, flush
    deliver    what the turn produced, one message per client, while the device works
    cron       what is due, and an audit of the pool when everything is at rest

Lifelines come before messages, because the dead need nothing; messages before the engine's turn, so that what arrived
together can run together; and the number of messages a turn takes is bounded, so that a flood delays nobody's tokens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import zmq

from ...client.wire.protocol import Tokens
from ..engine.engine import Engine
from ..system.background import Background
from ..system.gate import Gate
from ..system.service import Manager
from ..system.timers import Timers
from .clients import Clients
from .endpoint import Endpoint
from .health import health_of
from .parcels import Sent
from .remote import Remote
from .scrapes import Scrapes
from .sessions import Peer, Sessions

log = logging.getLogger(__name__)

NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MESSAGES_PER_TURN = 64
SLOW_RETRY_S = 0.05
OUT_OF_DESCRIPTORS_PAUSE_S = 0.5
QUIET_BEFORE_AUDIT_S = 1.0
BETWEEN_AUDITS_S = 10.0
LOCAL, REMOTE = b"l", b"r"
"""Each router has its own routing ids; sessions have them with one of these before."""

CONFIRM_GONE_AFTER_S = (0.05, 1.0, 5.0)
"""How long ZeroMQ may need to take a connection apart that it says is closed."""


class Poller:
    """epoll over everything that can wake the daemon."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def watch(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    def wait(self, timeout_s: float | None) -> set[int]:
        """Descriptors that are readable or hung up; None: wait for ever."""
        return {fd for fd, _ in self._epoll.poll(-1 if timeout_s is None else timeout_s)}

    def close(self) -> None:
        self._epoll.close()


class Signals:
    """Signals as a descriptor and flags: a handler only notes that it came, the loop acts."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._came: list[int] = []
        self._before_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in NOTED:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self._came.append(number)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> Iterator[int]:
        """Signals that came since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        came, self._came = self._came, []
        yield from came

    def close(self) -> None:
        """From here on signals change nothing: the daemon is taking itself apart, and nothing may interrupt that."""
        for number in NOTED:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._reader)
        os.close(self._writer)


class Server:
    """Runs the loop until it is told to stop."""

    def __init__(
        self,
        endpoint: Endpoint,
        engine: Engine,
        clients: Clients,
        sessions: Sessions,
        timers: Timers,
        poller: Poller,
        signals: Signals,
        manager: Manager,
        background: Background,
        *,
        reload: Callable[[], object],
    ) -> None:
        self._endpoint = endpoint
        self._router = endpoint.router
        self._engine = engine
        self._clients = clients
        self._sessions = sessions
        self._timers = timers
        self._poller = poller
        self._signals = signals
        self._manager = manager
        self._background = background
        self._reload = reload
        self.scrapes: Scrapes | None = None
        self._router_fd = int(self._router.getsockopt(zmq.FD))
        self._stop_at: float | None = None  # draining: when to give up waiting
        self._audit_due: float | None = None
        self._last_audit = 0.0
        self._was_healthy = True
        self._slow_retry_s = SLOW_RETRY_S
        self._remote = endpoint.remote
        self._gates = [endpoint.gate] if self._remote is None else [endpoint.gate, self._remote.gate]
        self._known = {self._router_fd, signals.fileno(), engine.runner.fileno(), background.fileno()}
        if self._remote is not None:
            self._known |= {self._remote.router_fd, self._remote.zap_fd}
        for gate in self._gates:
            gate.open()
            self._known.add(gate.fileno())
        for fd in (*self._known, endpoint.lifelines.fileno()):
            poller.watch(fd)
        self._feed_watchdog()

    # The loop

    def run(self) -> None:
        """Serve until drained; in the end every request has had its own. Raises DeviceLost if the device is lost."""
        try:
            while not self._drained():
                self._turn()
        finally:
            self._clients.shut_down()
            self._engine.turn(time.monotonic(), step_done=False)
            self._clients.deliver()
            self._clients.say_goodbye("shutting_down")

    def _turn(self) -> None:
        clients, engine, trace = self._clients, self._engine, self._engine.trace
        ready = self._poller.wait(self._timeout())
        clients.now = time.monotonic()
        trace.stage("poll")
        self._dispatch(ready)
        trace.stage("dispatch")
        engine.turn(clients.now, step_done=engine.in_flight and engine.runner.fileno() in ready)
        clients.deliver()
        trace.stage("deliver")
        self._cron(clients.now)
        trace.stage("cron")

    def _timeout(self) -> float | None:
        """Seconds until something is due; 0: something is there already; None: only an event can change anything."""
        # The descriptor signals edges: whatever touched the socket since may have swallowed one.
        routers = [self._router] if self._remote is None else [self._router, self._remote.router]
        if any(int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN for router in routers):
            return 0.0
        dues = [self._timers.next_due, self._engine.wake_at, self._stop_at, self._engine.scheduler.pins.next_expiry]
        now = time.monotonic()
        if self._clients.delivery.has_slow:
            dues.append(now + self._slow_retry_s)
        if self._engine.idle:
            dues.append(self._audit_due)
        due = min((due for due in dues if due is not None), default=None)
        return None if due is None else max(0.0, due - now)

    def _dispatch(self, ready: set[int]) -> None:
        if self._signals.fileno() in ready:
            for number in self._signals.take():
                self._signal(number)
        if self._background.fileno() in ready:
            self._background.collect()
        for gate in self._gates:
            if gate.fileno() in ready:
                self._mind_descriptors(gate)
        if self._remote is not None:
            self._dispatch_remote(self._remote, ready)
        listener = self._endpoint.lifelines
        for fd in ready - self._known:
            if fd == listener.fileno():
                self._accept(listener)
            elif (shut := self._gate_at(fd)) is not None:
                shut.refuse()
            elif self.scrapes is not None and fd in self.scrapes:
                self.scrapes.handle(fd)
            elif (ended := self._sessions.read(fd)) is not None:
                self._clients.settle(ended)
        for _ in range(MESSAGES_PER_TURN):
            if not self._receive():
                break

    def _receive(self) -> bool:
        """Take one message; False if there is none."""
        try:
            routing, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        peer = Peer.from_address(_peer_address(frames[-1])) if frames else None
        if peer is not None:
            self._clients.receive(LOCAL + routing.bytes, peer, _joined(frames))
        return True

    def _dispatch_remote(self, remote: Remote, ready: set[int]) -> None:
        """What came from other machines: questions about keys, ends of connections, messages."""
        if remote.zap_fd in ready:
            remote.answer_questions()
        for routing_id in remote.perhaps_gone():
            for delay_s in CONFIRM_GONE_AFTER_S:
                self._timers.at(self._clients.now + delay_s, partial(self._confirm_gone, REMOTE + routing_id))
        for _ in range(MESSAGES_PER_TURN):
            try:
                routing, *frames = remote.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = remote.peer_of(routing.bytes, frames[-1]) if frames else None
            if peer is not None:
                self._clients.receive(REMOTE + routing.bytes, peer, _joined(frames))

    def _confirm_gone(self, routing_id: bytes) -> None:
        """Settle the session if nothing can be sent to it. If something can, its client makes nothing of it."""
        session = self._sessions.get(routing_id)
        if session is not None:
            self._clients.send(session, Tokens(self._engine.epoch, ()))

    def _accept(self, listener: socket.socket) -> None:
        due = self._clients.now + self._clients.config.lifeline_grace_s
        self._timers.at(due, lambda: self._sessions.hang_up_overdue(self._clients.now))
        self._mind_descriptors(self._endpoint.gate, out=not self._sessions.accept(listener, due))

    def _gate_at(self, listener_fd: int) -> Gate | None:
        return next((gate for gate in self._gates if gate.listener.fileno() == listener_fd), None)

    def _mind_descriptors(self, noticed: Gate, *, out: bool = False) -> None:
        """Let nobody in while descriptors are short: who is there is served."""
        if (noticed.is_short() or out) and noticed.is_open:
            log.warning("short of file descriptors: no client is let in until there are fewer than %d", noticed.ceiling)
            for gate in self._gates:
                gate.shut()
                self._poller.watch(gate.listener.fileno())
            self._poller.unwatch(self._endpoint.lifelines.fileno())
            self._timers.at(self._clients.now + OUT_OF_DESCRIPTORS_PAUSE_S, self._let_in_again)

    def _let_in_again(self) -> None:
        if not self._endpoint.gate.has_room_again():
            self._timers.at(self._clients.now + OUT_OF_DESCRIPTORS_PAUSE_S, self._let_in_again)
            return
        log.info("clients are let in again")
        for gate in self._gates:
            gate.open()
            self._poller.unwatch(gate.listener.fileno())
        self._poller.watch(self._endpoint.lifelines.fileno())

    def send(self, routing_id: bytes, data: bytes) -> Sent:
        """Hand a message to ZeroMQ for one peer."""
        remote = self._remote if routing_id[:1] == REMOTE else None
        router = self._router if remote is None else remote.router
        try:
            router.send_multipart([routing_id[1:], data], zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.YES

    def _cron(self, now: float) -> None:
        self._timers.run(now)
        self._engine.scheduler.pins.expire(now)
        if self._clients.delivery.has_slow:
            progressed = self._clients.delivery.retry()
            self._slow_retry_s = SLOW_RETRY_S if progressed else min(1.0, self._slow_retry_s * 1.5)
        self._audit(now)

    def _feed_watchdog(self) -> None:
        """Tell the manager that all is well, while it is: health is progress, and a step that hangs is none."""
        period_s = self._manager.watchdog_s
        if period_s is None:
            return
        now = time.monotonic()
        healthy, reason = health_of(self._engine, self._clients.config.health_limit_s, now)
        if healthy:
            self._manager.watchdog()
        if healthy != self._was_healthy:
            self._was_healthy = healthy
            log.log(logging.INFO if healthy else logging.ERROR, "%s", reason or "steps finish again")
            self._manager.status(reason or "serving")
        self._timers.at(now + period_s / 3, self._feed_watchdog)

    def _audit(self, now: float) -> None:
        """Hold the books against themselves once the daemon has been at rest for a moment, but not too often."""
        if not self._engine.idle:
            self._audit_due = max(now + QUIET_BEFORE_AUDIT_S, self._last_audit + BETWEEN_AUDITS_S)
        elif self._audit_due is not None and now >= self._audit_due:
            self._audit_due, self._last_audit = None, now
            try:
                self._clients.check_invariants()
            except RuntimeError:
                log.exception("the pool's books do not agree")

    # The end

    def _signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._reload()
        else:
            self.drain()

    def drain(self) -> None:
        """Take no new work and stop when the rest is done or the time is over; a second call hurries."""
        now = self._clients.now
        if self._clients.draining:
            self._stop_at = now
            return
        self._clients.draining = True
        self._stop_at = now + self._clients.config.drain_timeout_s
        log.info("draining, at most %g s", self._clients.config.drain_timeout_s)
        self._manager.stopping("draining")

    def _drained(self) -> bool:
        if not self._clients.draining:
            return False
        late = self._stop_at is not None and time.monotonic() >= self._stop_at
        return late or (self._engine.idle and self._background.idle)


def _joined(frames: list[zmq.Frame]) -> bytes:
    """More than one frame is no message of ours: joined, it cannot be read, and is answered like that."""
    return frames[0].bytes if len(frames) == 1 else b"".join(frame.bytes for frame in frames) + b"\xc1"


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""
