"""The daemon's side without an engine, and client processes, for benchmarks of what passes between them."""

from __future__ import annotations

import mmap
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import zmq

from kvpool.client import Client
from kvpool.client.arena.arena import ARENA
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.protocol import (
    Accepted,
    Finished,
    Goodbye,
    Hello,
    ServerLimits,
    Submit,
    Usage,
    Welcome,
    decode_client_message,
    unpack_token_ids,
)
from kvpool.daemon.engine.engine import Engine, Output
from kvpool.daemon.engine.request import Request
from kvpool.daemon.engine.ring_tokens import RingTokens
from kvpool.daemon.serving.arenas import layout_for
from kvpool.daemon.serving.delivery import Delivery
from kvpool.daemon.serving.endpoint import open_endpoint
from kvpool.daemon.serving.parcels import Sent
from kvpool.daemon.serving.sessions import Peer, Session, Sessions
from kvpool.daemon.settings.config import Config

VOCAB_SIZE = 49_152
LIMITS = ServerLimits(4 << 20, 131_072, VOCAB_SIZE, 16, 1024, 64)

Given = tuple[list[Output], RingTokens]
"""What an engine's turn gives out."""


class Bench:
    """A daemon with sessions and delivery, and nothing to compute."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = open_endpoint(Config(), directory / "s")
        self.endpoint.gate.open()
        self.sessions = Sessions(self._ignore, self._ignore, layout_for(vocab_size=VOCAB_SIZE, max_model_len=131_072))
        self.sessions.rings.load()
        engine = cast(Engine, None)  # nobody is ever so slow that sequences would pause
        self.delivery = Delivery(
            engine, self._send, self.sessions.rings, gone=self.sessions.close, damaged=self._damaged
        )
        self.requests: list[Request] = []
        self.submitted_s: list[float] = []  # CPU time for each prompt that came

    @staticmethod
    def _ignore(fd: int) -> None:
        pass

    @staticmethod
    def _damaged(session: Session, error: Exception) -> None:
        raise error

    def _send(self, routing_id: bytes, data: bytes) -> Sent:
        while True:
            try:
                self.endpoint.router.send_multipart([routing_id, data], zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.0005)
            except zmq.ZMQError:
                return Sent.GONE
            else:
                return Sent.YES

    def serve_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.sessions.accept(self.endpoint.lifelines, 1e12)
            for fd in list(self.sessions._lifelines):
                ended = self.sessions.read(fd)
                if ended is not None:
                    self.sessions.close(ended)
            if self.endpoint.router.poll(1):
                routing_id, data = self.endpoint.router.recv_multipart()
                self._receive(routing_id, data)

    def _receive(self, routing_id: bytes, data: bytes) -> None:
        begin = time.thread_time()
        message = decode_client_message(data)
        session = self.sessions.get(routing_id)
        if isinstance(message, Hello):
            peer = Peer(os.getuid(), os.getgid(), 0)
            session = self.sessions.open(routing_id, peer, "", message.capabilities)
            capabilities = tuple(session.capabilities)
            welcome = Welcome(1, 1, session.session_id, "bench", LIMITS, session.token, "", capabilities)
            self.delivery.send(session, welcome)
        elif isinstance(message, Submit) and session is not None:
            if message.upload is not None and session.arena is not None:
                packed = session.arena.upload.copy(*message.upload)
            else:
                packed = message.prompt if isinstance(message.prompt, bytes) else b""
            prompt_ids = unpack_token_ids(packed).tolist()
            request = Request(message.request_id, 0, prompt_ids, SamplingParams(), 0, frozenset(), None)
            request.session, request.handle, request.want_logits = session, message.handle, message.want_logits
            self.requests.append(request)
            self.delivery.send(session, Accepted(1, message.request_id))
            self.submitted_s.append(time.thread_time() - begin)
        elif isinstance(message, Goodbye) and session is not None:
            self.sessions.close(session)

    def give(self, given: Given) -> None:
        self.delivery.give_turn(self.delivery.address(*given, 1))

    def finish(self) -> None:
        for request in self.requests:
            end = Finished(1, request.request_id, 0, "length", Usage(1, 1))
            self.delivery.send(cast(Session, request.session), end)
        self.requests = []

    def close(self) -> None:
        for session in self.sessions:
            self.sessions.close(session)
        self.sessions.hang_up_all()
        self.endpoint.close(0.1)


@dataclass
class Board:
    """What the clients tell: tokens that each has read, and the CPU time that it took."""

    count: int
    memory: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096 + 16 * self.count)
        self.read = np.frombuffer(self.memory, np.int64, self.count, 0)
        self.cpu_s = np.frombuffer(self.memory, np.float64, self.count, 8 * self.count)


@contextmanager
def clients(bench: Bench, count: int, arena: bool, work: Callable[[Client, int], None]) -> Iterator[None]:
    """`count` processes that each run `work(client, number)`."""
    address = str(bench.endpoint.path)
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            run_client(partial(work_with, address, arena, number, work))
        pids.append(pid)
    try:
        yield
    finally:
        ended: list[int] = []

        def all_ended() -> bool:
            ended.extend(pid for pid in pids if pid not in ended and os.waitpid(pid, os.WNOHANG)[0] == pid)
            return len(ended) == len(pids)

        bench.serve_until(all_ended)


def work_with(address: str, arena: bool, number: int, work: Callable[[Client, int], None]) -> None:
    with Client(address, arena=arena, timeout_s=120.0) as pool:
        if (ARENA in pool.connect().capabilities) is not arena:
            raise SystemExit("no arena on this machine")
        work(pool, number)


def run_client(work: Callable[[], None]) -> None:
    """In a forked child: it never returns into the parent's program."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def other_threads_s() -> float:
    """CPU seconds of this process's other threads: ZeroMQ's."""
    own = str(os.gettid()) if hasattr(os, "gettid") else str(os.getpid())
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
