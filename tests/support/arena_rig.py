"""A daemon's sessions and engine with the clients' cores, in one thread: real lifelines and arenas, no ZeroMQ.

Every order of events is a list of calls: `turn` is one turn of the daemon, `read` lets one client take in what waits
for it. A client that is not read does not exist for the daemon but through what it leaves unread.
"""

from __future__ import annotations

import gc
import os
import socket
from collections import deque
from pathlib import Path
from typing import Any

from kvpool.client.arena.arena import PAGE_BYTES, Layout
from kvpool.client.arena.descriptors import OutOfDescriptors
from kvpool.client.core import Core
from kvpool.client.lifeline import connect_lifeline
from kvpool.client.requests import Options, make_submit, new_id
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.stream_state import StreamState
from kvpool.client.wire.errors import ConnectionLost, KVPoolError
from kvpool.client.wire.messages import ServerLimits
from kvpool.daemon.serving.calls import Calls
from kvpool.daemon.serving.clients import Clients
from kvpool.daemon.serving.parcels import Sent
from kvpool.daemon.serving.sessions import Peer, Sessions
from kvpool.daemon.settings.config import Config
from kvpool.daemon.system.timers import Timers
from tests.support.engine_harness import Harness
from tests.support.scripted_backend import ScriptedBackend

SMALL = Layout(ring_records=128, upload_bytes=4 * PAGE_BYTES, bulk_bytes=8 * PAGE_BYTES, row_bytes=4 * 384, num_rows=16)
LIMITS = ServerLimits(1 << 20, 256, 384, 16, 256, 16)
SELF = Peer(os.getuid(), os.getgid(), os.getpid())


class RigClient:
    """One client: its core, and what waits for it."""

    def __init__(self, rig: Rig, *, arena: bool) -> None:
        self.rig = rig
        self.core = Core("rig", arena=arena)
        self.inbox: deque[bytes] = deque()
        self.full = False  # ZeroMQ takes nothing more for it
        self.error: KVPoolError | None = None
        self._connect()
        for _ in range(3):
            self.read()

    def _connect(self) -> None:
        self.name = new_id().encode()
        self.rig.peers[self.name] = self
        self.lifeline = connect_lifeline(self.rig.path, 1.0)
        self.rig.sessions.accept(self.rig.listener, due=1e9)
        self.core.connected()

    def read(self) -> None:
        """Say what the core has to say, and take in everything that came."""
        try:
            self._exchange()
            self._exchange()
        except OutOfDescriptors as error:
            self.core.lost(error, 0.0)
            self.lifeline.close()
            del self.rig.peers[self.name]
            self.rig.read_lifelines()
            self._connect()
        except KVPoolError as error:
            self.error = error
            self.core.lost(error, 0.0)

    def _exchange(self) -> None:
        while self.core.outbox:
            self.rig.clients.receive(self.name, SELF, self.core.outbox.popleft())
        if self.core.lifeline_outbox:
            self.lifeline.send(bytes(self.core.lifeline_outbox))
            self.core.lifeline_outbox.clear()
            self.rig.read_lifelines()
        while self.inbox:
            self.core.receive(self.inbox.popleft())
        self.core.shared.read_ring()
        try:
            data, fds, _, _ = socket.recv_fds(self.lifeline, 4096, 4, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionLost("the daemon hung up")
        self.core.receive_lifeline(data, fds)

    def submit(self, prompt: Any, *, window: int | None = None, **options: Any) -> StreamState:
        fields = {name: options.pop(name) for name in list(options) if name in Options.__dataclass_fields__}
        params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | options))
        assert self.core.welcome is not None
        message = make_submit(self.core.welcome, prompt, params, Options(window=window, **fields))
        stream = self.core.submit(message, params.n)
        self.read()
        return stream

    def leave(self) -> None:
        """As a killed process does."""
        if self.error is None:
            self.error = KVPoolError("left")
        self.core.lost(self.error, 0.0)
        self.lifeline.close()
        self.rig.read_lifelines()


class Rig:
    """`arena_layout`: None for a daemon without arenas."""

    def __init__(self, directory: Path, arena_layout: Layout | None = SMALL, **harness: Any) -> None:
        self.path = directory / "l"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(str(self.path))
        self.listener.listen(64)
        scripted = {"make_backend": lambda model, limits: ScriptedBackend(model.program, model.checkpoint, limits)}
        self.harness = Harness(**({"num_blocks": 256} | scripted | harness))
        self.lifelines: set[int] = set()
        self.sessions = Sessions(self.lifelines.add, self.lifelines.discard, arena_layout)
        self.timers = Timers()
        self.clients = Clients(
            Config(),
            self.harness.engine,
            self.harness.text,
            self.sessions,
            self.timers,
            send=self._send,
            calls=Calls(lambda: None, list),
            limits=LIMITS,
            model_name="tiny",
            version="0",
        )
        self.clients.now = self.harness.now
        self.peers: dict[bytes, RigClient] = {}

    def client(self, *, arena: bool = True) -> RigClient:
        return RigClient(self, arena=arena)

    def _send(self, routing_id: bytes, data: bytes) -> Sent:
        peer = self.peers[routing_id]
        if peer.error is not None:
            return Sent.GONE
        if peer.full:
            return Sent.FULL
        peer.inbox.append(data)
        return Sent.YES

    def read_lifelines(self) -> None:
        for fd in list(self.lifelines):
            ended = self.sessions.read(fd)
            if ended is not None:
                self.clients.settle(ended)

    def turn(self) -> None:
        engine = self.harness.engine
        engine.turn(self.clients.now, step_done=engine.in_flight)
        self.clients.deliver()
        self.clients.delivery.retry()

    def run(self, turns: int = 400) -> None:
        """Turn until there is nothing to do, everybody reading."""
        for _ in range(turns):
            self.turn()
            for client in list(self.peers.values()):
                if client.error is None:
                    client.read()
            if self.harness.engine.idle and not self.clients.delivery.has_slow:
                return

    def close(self) -> None:
        for client in self.peers.values():
            client.leave()
        self.run()
        self.harness.assert_clean()
        self.harness.close()
        self.sessions.hang_up_all()
        self.listener.close()


def mapped_arenas() -> int:
    """How many arenas this process has mapped, without those whose rows nobody can reach any more."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvpool-arena")
