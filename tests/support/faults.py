"""What clients do when they go wrong, one function each: it is done to a daemon for a while, and nobody cleans up.

Each is a generator function for `with`: inside the block the fault is there, at its end its processes and sockets are
gone, as a kernel leaves them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kvpool.client import Client
from kvpool.client.arena.arena import BULK_TAIL, RING_AT, RING_TAIL, ROWS_RETURNED
from kvpool.client.wire.errors import ProtocolError
from kvpool.client.wire.protocol import Submit, decode_client_message, encode
from tests.support.arena_raw import ArenaRaw
from tests.support.daemon_process import DaemonProcess
from tests.support.raw_client import RawClient

SWARM = Path(__file__).resolve().parent / "arena_swarm.py"
LONG = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
CLIENTS = 6

Fault = Callable[[DaemonProcess], AbstractContextManager[None]]


def holdings(daemon: DaemonProcess) -> tuple[int, int, int]:
    """(descriptors, arenas mapped, threads) of the daemon."""
    root = Path(f"/proc/{daemon.pid}")
    maps = (root / "maps").read_text().count("memfd:kvpool")
    return daemon.open_files(), maps, len(list((root / "task").iterdir()))


@contextmanager
def _streaming(daemon: DaemonProcess) -> Iterator[list[int]]:
    """Pids of clients that have had their first token, and read on and on."""
    options = {"count": CLIENTS, "requests": 500, "prompt": 20, "max_tokens": 200}
    command = [sys.executable, str(SWARM), daemon.address, json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        pids = []
        while len(pids) < CLIENTS:
            pid, said = process.stdout.readline().split(maxsplit=1)
            if said.strip() == "start":
                pids.append(int(pid))
        yield pids
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def killed(daemon: DaemonProcess) -> Iterator[None]:
    """SIGKILL while tokens stream to them."""
    with _streaming(daemon) as pids:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        yield


@contextmanager
def stopped(daemon: DaemonProcess) -> Iterator[None]:
    """SIGSTOP while tokens stream to them; they are killed without waking up again."""
    with _streaming(daemon) as pids:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield


@contextmanager
def lifeline_closed(daemon: DaemonProcess) -> Iterator[None]:
    """The lifeline hangs up, and messages go on coming from the same connection."""
    with contextlib.ExitStack() as stack:
        for number in range(CLIENTS):
            raw = stack.enter_context(ArenaRaw(daemon.path, receive_hwm=10))
            raw.enter().close()
            raw.send(Submit(f"r{number}", prompt="The", params=LONG, handle=1))
            assert raw.lifeline is not None
            raw.lifeline.close()
            for turn in range(100):
                raw.send(Submit(f"more{turn}", prompt="The", params=LONG))
        yield


@contextmanager
def ring_half_written(daemon: DaemonProcess) -> Iterator[None]:
    """It writes all over its arena while the daemon does, and cursors that are old, new, and impossible."""
    chance = random.Random(3)
    with contextlib.ExitStack() as stack:
        for number in range(CLIENTS):
            raw = stack.enter_context(ArenaRaw(daemon.path, receive_hwm=10))
            memory = raw.enter()
            words = memoryview(memory).cast("Q")
            for turn in range(4):
                raw.send(Submit(f"r{turn}", prompt="The", params=LONG, handle=1 + turn, want_logits=turn % 2 == 1))
            for _ in range(50):
                at = chance.randrange(RING_AT, len(memory) - 4096)
                memory[at : at + 4096] = chance.randbytes(4096)
                words[(RING_TAIL, BULK_TAIL, ROWS_RETURNED)[number % 3]] = chance.choice((0, 1, 40, 2**40, 2**64 - 1))
            words.release()
            memory.close()
        yield


@contextmanager
def descriptor_truncated(daemon: DaemonProcess) -> Iterator[None]:
    """It tries to take memory away from under the daemon, and refers to what would lie there."""
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENTS):
            raw = stack.enter_context(ArenaRaw(daemon.path, receive_hwm=10))
            memory = raw.enter()
            for attack in (
                lambda fd=raw.arena_fd: os.ftruncate(fd, 4096),
                lambda fd=raw.arena_fd: os.ftruncate(fd, 1 << 40),
                lambda fd=raw.arena_fd: os.posix_fallocate(fd, 1 << 30, 4096),
                lambda fd=raw.arena_fd: os.truncate(f"/proc/self/fd/{fd}", 0),
            ):
                try:
                    attack()
                except OSError:
                    continue
                raise AssertionError("the arena can be resized")
            for turn, upload in enumerate(((0, 1 << 24), (1 << 40, 4), (raw.layout.upload_bytes - 4, 2), (2, 1))):
                raw.send(Submit(f"r{turn}", upload=upload, params=LONG, handle=1))
            memory.madvise(mmap.MADV_REMOVE)  # allowed: what lies there reads as zeros
            memory.close()
        yield


@contextmanager
def _process(work: Callable[[], None]) -> Iterator[None]:
    """Somebody else's process, which does it again and again until it is killed."""
    child = os.fork()
    if child == 0:
        try:
            while True:
                work()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _garbage(chance: random.Random) -> Iterator[bytes]:
    """Bytes that are no message: what is damaged and still one would be served, as it should be."""
    valid = encode(Submit("r", prompt="The", params=LONG))
    while True:
        damaged = bytearray(valid)
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        data = bytes(damaged) if chance.random() < 0.5 else chance.randbytes(100)
        try:
            decode_client_message(data)
        except ProtocolError:
            yield data


@contextmanager
def garbage_flood(daemon: DaemonProcess) -> Iterator[None]:
    """Bytes without sense, and messages with damage, by the thousand, over messages and lifeline."""
    chance = random.Random(4)
    pieces = list(itertools.islice(_garbage(chance), 500))

    def flood() -> None:
        with RawClient(daemon.path, receive_hwm=10) as raw:
            raw.open()
            assert raw.lifeline is not None
            raw.lifeline.sendall(chance.randbytes(4000))
        with RawClient(daemon.path, receive_hwm=10) as raw:
            raw.open()
            for _ in range(1000):
                raw.send(chance.choice(pieces))
                time.sleep(0.001)

    with _process(flood):
        yield


@contextmanager
def slow_reader(daemon: DaemonProcess) -> Iterator[None]:
    """Asks for very much, and reads nothing of it."""
    with ArenaRaw(daemon.path, receive_hwm=10) as raw:
        memory = raw.enter()
        for turn in range(40):
            handle = turn + 1 if turn % 2 else None
            raw.send(Submit(f"r{turn}", prompt="The sea", params=LONG | {"n": 2}, handle=handle))
        yield
        memory.close()


@contextmanager
def reconnect_storm(daemon: DaemonProcess) -> Iterator[None]:
    """Connections that come and go, half of them without a goodbye and in the middle of an answer."""

    def come_and_go() -> None:
        for vanish in (True, False):
            client = Client(daemon.address, timeout_s=30.0, reconnect_s=0.0)
            stream = client.submit("The sea", **LONG)
            if vanish:
                next(stream)
                client._connection._transport.close()  # type: ignore[union-attr]  # as a kernel does
            client.close()

    with _process(come_and_go), _process(come_and_go):
        yield


FAULTS: dict[str, Fault] = {
    "killed": killed,
    "stopped": stopped,
    "lifeline closed": lifeline_closed,
    "ring half written": ring_half_written,
    "descriptor truncated": descriptor_truncated,
    "garbage flood": garbage_flood,
    "slow reader": slow_reader,
    "reconnect storm": reconnect_storm,
}
