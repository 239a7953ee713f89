"""Client and its sockets against a scripted daemon: streams, refusals, death, threads, forks, signals."""

from __future__ import annotations

import contextlib
import dis
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import zmq

from kvpool.client import (
    Client,
    ConnectionLost,
    InvalidArgument,
    NotFound,
    SamplingParams,
    ShuttingDown,
    Timeout,
    TokenEvent,
    TooLong,
)
from kvpool.client.connection import _without
from kvpool.client.core import Core
from kvpool.client.transport import Transport
from kvpool.client.wire.errors import ERRORS_BY_CODE
from kvpool.client.wire.protocol import (
    Append,
    Attach,
    Call,
    Cancel,
    Closing,
    Credit,
    Failed,
    Fork,
    Generate,
    Goodbye,
    OpenSequence,
    Reply,
    Submit,
    pack_token_ids,
)
from tests.support.fake_daemon import FakeDaemon, Peer, count_up, refuse, silent, start_process, trickle


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "kvpool.sock"


@pytest.fixture
def doomed(path: Path) -> Iterator[ForkProcess]:
    """A daemon process that gives one token of each request and then nothing, to be killed."""
    process = start_process(path, trickle)
    yield process
    process.kill()
    process.join()


# ---- streams


def test_tokens_stream(path: Path) -> None:
    with FakeDaemon(path, count_up), Client(str(path)) as pool:
        with pool.submit("The sea", SamplingParams(max_tokens=5), temperature=0.5) as stream:
            events = list(stream)
        assert events == [TokenEvent(i, f" t{i}", None, i, 0) for i in range(5)]
        result = stream.result()
        assert (result.text, result.finish_reason, result.usage.cached_tokens) == (" t0 t1 t2 t3 t4", "length", 1)
        assert list(stream) == []


def test_what_is_sent_is_what_was_asked(path: Path) -> None:
    with FakeDaemon(path, count_up) as daemon, Client(str(path)) as pool:
        pool.generate(np.array([1, 15, 99]), max_tokens=8, priority=3, deadline_s=9.5, request_id="mine")
        message = daemon.wait_for_type(Submit)
        assert message == Submit(
            "mine", prompt=pack_token_ids([1, 15, 99]), params={"max_tokens": 8}, priority=3, deadline_s=9.5
        )
        pool.chat([{"role": "user", "content": "Why?"}], max_tokens=2)
        last = daemon.wait_for(
            lambda messages: len([m for m in messages if isinstance(m, Submit)]) == 2 and messages[-1]
        )
        assert last.messages[0].content == "Why?"


def test_calls_are_answered(path: Path) -> None:
    with FakeDaemon(path, count_up) as daemon, Client(str(path)) as pool:
        assert pool.stats()["method"] == "stats"
        assert pool.resize(1 << 30)["method"] == "resize"
        assert daemon.wait_for_type(Call).method == "stats"


def test_sequences_are_asked_for(path: Path) -> None:
    with FakeDaemon(path, count_up) as daemon, Client(str(path)) as pool:
        with pool.open("You are terse.") as chat:
            branch = chat.fork(at=5)
            branch.append(" Why?")
            branch.truncate(1)
            with pytest.raises(Timeout):  # the scripted daemon does not generate from sequences
                branch.generate(max_tokens=1, timeout_s=0.01)
        opened, fork, append, generate = map(daemon.wait_for_type, (OpenSequence, Fork, Append, Generate))
        assert fork.sequence_id == opened.sequence_id
        assert fork.new_sequence_id == append.sequence_id == generate.sequence_id != opened.sequence_id


@pytest.mark.parametrize("code", ERRORS_BY_CODE)
def test_every_code_is_an_exception(path: Path, code: str) -> None:
    with FakeDaemon(path, refuse(code, field="x", retry_after_ms=7)), Client(str(path)) as pool:
        for ask in (pool.stats, lambda: pool.generate("x"), lambda: list(pool.submit("x"))):
            with pytest.raises(ERRORS_BY_CODE[code]) as caught:
                ask()
            assert type(caught.value) is ERRORS_BY_CODE[code]
            assert (caught.value.field, caught.value.retry_after_ms) == ("x", 7)


def test_refusals_at_home_name_the_limit(path: Path) -> None:
    with FakeDaemon(path, count_up) as daemon, Client(str(path)) as pool:
        with pytest.raises(TooLong, match="max_model_len is 4096"):
            pool.submit(range(4097))
        with pytest.raises(TooLong, match=r"1048576 \(max_message_bytes\)"):
            pool.submit("x" * (1 << 20))
        for prompt, field in (([1, -1], "prompt[1]"), ([1, 1000], "prompt[1]"), ([1.5], "prompt[0]"), (5, "prompt")):
            with pytest.raises(InvalidArgument) as caught:
                pool.submit(prompt)
            assert caught.value.field == field
        for options in ({"window": 0}, {"temprature": 1}, {"temperature": -1}, {"priority": 1000}):
            with pytest.raises(InvalidArgument) as caught:
                pool.submit("x", **options)
            assert caught.value.field == next(iter(options))
        assert pool.generate("x", max_tokens=1).text == " t0"  # nothing of it did harm
        assert len([message for message in daemon.received if isinstance(message, Submit)]) == 1


def test_a_request_id_is_used_once_at_a_time(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon, Client(str(path)) as pool:
        first = pool.submit("x", request_id="same")
        with pytest.raises(InvalidArgument) as caught:
            pool.submit("y", request_id="same")
        assert caught.value.field == "request_id"
        assert next(first).token_id == 7
        daemon.do(lambda peer: peer.finish("same", "stop"))
        assert first.result().finish_reason == "stop"


def test_leaving_a_stream_cancels_it(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon, Client(str(path)) as pool:
        with pool.submit("x", request_id="left") as stream:
            next(stream)
        assert daemon.wait_for_type(Cancel) == Cancel("left")


def test_dropping_a_stream_cancels_it(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon, Client(str(path)) as pool:
        for _ in pool.submit("x", request_id="dropped"):
            break
        gc.collect()
        assert daemon.wait_for_type(Cancel) == Cancel("dropped")


def test_a_finished_stream_is_not_cancelled(path: Path) -> None:
    with FakeDaemon(path, count_up) as daemon, Client(str(path)) as pool:
        with pool.submit("x", max_tokens=2) as stream:
            stream.result()
        del stream
        gc.collect()
        pool.stats()
        assert not any(isinstance(message, Cancel) for message in daemon.received)


def test_reading_grants_credit(path: Path) -> None:
    def eight(peer: Peer, message: Any) -> None:
        if isinstance(message, Submit):
            peer.tokens(message.request_id, 0, list(range(8)))

    with FakeDaemon(path, eight) as daemon, Client(str(path)) as pool:
        stream = pool.submit("x", window=8, request_id="r")
        assert daemon.wait_for_type(Submit).credit == 8
        for _ in range(4):
            next(stream)
        assert daemon.wait_for_type(Credit) == Credit("r", 4, 0)


# ---- limits of waiting


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda pool: pool.stats(), "timeout_s"),
        (lambda pool: pool.generate("x", timeout_s=0.05), "timeout_s"),
        (lambda pool: next(pool.submit("x")), "stream_timeout_s"),
        (lambda pool: pool.submit("x").result(), "stream_timeout_s"),
    ],
)
def test_waits_end_and_say_which(path: Path, ask: Callable[[Client], Any], field: str) -> None:
    with FakeDaemon(path, silent), Client(str(path), timeout_s=5, stream_timeout_s=0.05) as pool:
        pool._connection.timeout_s = 0.05
        with pytest.raises(Timeout) as caught:
            ask(pool)
        assert caught.value.field == field


def test_a_daemon_that_never_welcomes(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.life")
        listener.listen()
        with pytest.raises(Timeout, match="welcome") as caught:
            Client(str(path), timeout_s=0.05).connect()
    assert caught.value.field == "timeout_s"


# ---- no daemon, or no more


def test_no_daemon_is_said_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionLost, match=r"does not exist; start kvpoold"):
        Client(str(path)).stats()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{path}.life")
    with pytest.raises(ConnectionLost, match="left behind"):
        Client(str(path)).stats()
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path.parent / "nowhere"))
    monkeypatch.setattr("kvpool.client.address.SYSTEM_SOCKET", path.parent / "nor here")
    with pytest.raises(ConnectionLost, match=r"no daemon found at .*nowhere.* and .*nor here"):
        Client().stats()


def test_no_descriptor_for_sockets_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr("kvpool.client.lifeline.socket.socket", Mock(side_effect=OSError(errno.EMFILE, "Too many")))
        with pytest.raises(ConnectionLost, match="can open no sockets: Too many"):
            Client(str(path)).connect()

    monkeypatch.setattr("kvpool.client.transport.zmq.Context.socket", none_left)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.life")
        listener.listen()
        with pytest.raises(ConnectionLost, match="can open no sockets: Too many open files"):
            Client(str(path)).connect()
        assert not listener.accept()[0].recv(1)  # its lifeline is closed


@pytest.mark.parametrize(
    "blocked",
    [
        lambda pool, stream: stream.result(),
        lambda pool, stream: list(stream),
        lambda pool, stream: pool.stats(),
        lambda pool, stream: pool.generate("y"),
    ],
)
def test_a_killed_daemon_is_noticed(path: Path, doomed: ForkProcess, blocked: Callable[[Client, Any], Any]) -> None:
    with Client(str(path)) as pool:
        stream = pool.submit("x")
        assert next(stream).token_id == 7
        killed_at = []

        def kill() -> None:
            killed_at.append(time.monotonic())
            doomed.kill()

        threading.Timer(0.1, kill).start()
        with pytest.raises(ConnectionLost):
            blocked(pool, stream)
        assert time.monotonic() - killed_at[0] < 2


def test_every_waiting_thread_hears_of_the_death(path: Path, doomed: ForkProcess) -> None:
    with Client(str(path)) as pool, ThreadPoolExecutor(8) as threads:
        streams = [pool.submit("x") for _ in range(8)]
        for stream in streams:
            next(stream)
        waiting = [threads.submit(stream.result) for stream in streams]
        doomed.kill()
        started = time.monotonic()
        for future in waiting:
            assert isinstance(future.exception(timeout=2), ConnectionLost)
        assert time.monotonic() - started < 2


def test_a_new_daemon_is_used_after_the_old_one_died(path: Path, doomed: ForkProcess) -> None:
    """By the next call: an idle client notices no restart."""
    with Client(str(path)) as pool:
        assert pool.connect().epoch == 1
        doomed.kill()
        doomed.join()
        with FakeDaemon(path, count_up, epoch=2):
            pool.stats()
            assert pool.connect().epoch == 2
            assert pool.generate("x", max_tokens=2).text == " t0 t1"


def test_a_lingering_stream_goes_on_with_the_next_daemon(path: Path, doomed: ForkProcess) -> None:
    def resume(peer: Peer, message: Any) -> None:
        if isinstance(message, Attach):
            peer.tokens(message.request_id, 0, [7, 8])
            peer.finish(message.request_id, "stop")

    with Client(str(path)) as pool:
        stream = pool.submit("x", linger_s=30.0)
        assert next(stream).token_id == 7
        doomed.kill()
        doomed.join()
        with FakeDaemon(path, resume, epoch=2) as daemon:
            assert [event.token_id for event in stream] == [8]
            assert daemon.wait_for_type(Attach).have == (1,)


def test_lingering_ends_in_an_error(path: Path, doomed: ForkProcess) -> None:
    with Client(str(path)) as pool:
        stream = pool.submit("x", linger_s=0.2)
        doomed.kill()
        with pytest.raises(ConnectionLost):
            stream.result()


def test_following_what_is_not_there(path: Path) -> None:
    with FakeDaemon(path, refuse("not_found")), Client(str(path)) as pool, pytest.raises(NotFound):
        pool.follow("nobody").result()


def test_a_daemon_that_stops_says_so(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon, Client(str(path), reconnect_s=0) as pool:
        stream = pool.submit("x")
        next(stream)
        daemon.do(lambda peer: peer.send(Closing(peer.epoch, "shutting_down")))
        with pytest.raises(ShuttingDown):
            stream.result()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa6tokens", bytes(range(0x80, 0xE4))])
def test_a_daemon_that_talks_nonsense_is_left(path: Path, garbage: bytes) -> None:
    with FakeDaemon(path, trickle) as daemon, Client(str(path)) as pool:
        stream = pool.submit("x")
        next(stream)
        daemon.do(lambda peer: peer.send_bytes(garbage))
        with pytest.raises(ConnectionLost, match="no valid message"):
            stream.result()


def test_what_was_sent_before_the_end_is_read(path: Path) -> None:
    def last_words(peer: Peer, message: Any) -> None:
        if isinstance(message, Submit):
            peer.tokens(message.request_id, 0, [1, 2])
            peer.finish(message.request_id)
            peer.hang_up()

    with FakeDaemon(path, last_words), Client(str(path)) as pool:
        assert pool.generate("x").token_ids == [1, 2]


def test_a_closed_client_says_goodbye(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon:
        pool = Client(str(path))
        stream = pool.submit("x")
        pool.close()
        pool.close()
        daemon.wait_for_type(Goodbye)
        with pytest.raises(ConnectionLost, match="closed"):
            stream.result()
        with pytest.raises(ConnectionLost, match="closed"):
            pool.stats()


def test_closing_frees_every_waiting_thread(path: Path) -> None:
    with FakeDaemon(path, trickle), ThreadPoolExecutor(4) as threads:
        pool = Client(str(path))
        waiting = [threads.submit(pool.submit("x").result) for _ in range(4)]
        time.sleep(0.05)
        pool.close()
        for future in waiting:
            assert isinstance(future.exception(timeout=5), ConnectionLost)


# ---- threads, forks, signals, descriptors


def test_threads_share_a_client(path: Path) -> None:
    with FakeDaemon(path, count_up), Client(str(path)) as pool, ThreadPoolExecutor(8) as threads:

        def work(number: int) -> None:
            if number % 3:
                assert [event.token_id for event in pool.submit("x", max_tokens=number)] == list(range(number))
            else:
                assert pool.stats()["method"] == "stats"

        list(threads.map(work, range(60)))


def test_a_slow_answer_does_not_keep_the_others_waiting(path: Path) -> None:
    with FakeDaemon(path, lambda peer, message: count_up(peer, message) if message != slow else None) as daemon:
        slow = Submit("slow", prompt="x", params={}, credit=256)
        with Client(str(path)) as pool, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(pool.submit("x", request_id="slow").result)
            for _ in range(20):
                assert pool.generate("x", max_tokens=3).usage.completion_tokens == 3
            daemon.do(lambda peer: peer.finish("slow"))
            assert waiting.result(timeout=5).token_ids == []


def test_a_forked_child_has_a_connection_of_its_own(path: Path) -> None:
    with FakeDaemon(path, count_up) as daemon, Client(str(path)) as pool:
        assert pool.generate("x", max_tokens=2).text == " t0 t1"
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if pool.generate("x", max_tokens=3).token_ids == [0, 1, 2] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.generate("x", max_tokens=2).text == " t0 t1"
        assert len(daemon.peers) == 2


def test_a_parents_death_is_seen_while_its_child_lives(path: Path) -> None:
    program = (
        "import os, sys, time; from kvpool.client import Client; pool = Client(sys.argv[1]); pool.connect();"
        "pid = os.fork(); print(pid, flush=True) if pid else time.sleep(60); os.kill(os.getpid(), 9)"
    )
    with FakeDaemon(path, count_up) as daemon:
        parent = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.wait(10)
            daemon.wait_for_hang_up()
        finally:
            os.kill(child, signal.SIGKILL)
            parent.stdout.close()


def test_ctrl_c_ends_a_wait_and_nothing_else(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon, Client(str(path)) as pool:
        stream = pool.submit("x")
        next(stream)
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        stream.cancel()
        daemon.wait_for_type(Cancel)
        daemon.do(lambda peer: peer.finish(stream.request_id, "cancelled"))
        assert stream.result().finish_reason == "cancelled"


def left_interrupted(lock: threading.Lock, at: int) -> bool:
    """Leave a lock for a moment as clients do, with an exception at the n-th place at which a signal's handler can run:
    whether there are so many. Where it waits for itself, that is found after ten seconds."""
    left, before = at, -1

    def handler(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal left, before
        if frame.f_code is not _without.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            done = "RESUME" if before < 0 else dis.opname[frame.f_code.co_code[before]]
            before = frame.f_lasti
            left -= done.startswith(("RESUME", "CALL", "PRECALL", "JUMP_BACKWARD"))
            if left == 0:
                left = -1
                raise KeyboardInterrupt
        return handler

    def leave() -> None:
        lock.acquire()
        sys.settrace(handler)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                _without(threading.Condition(lock), lambda: None)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), f"it waits for the lock that it holds, interrupted at place {at}"
    return left < 0


def test_a_handler_that_raises_while_the_lock_is_left_finds_it_held_afterwards() -> None:
    """Signals are noticed after every call: here after the first, then after the second, and so on."""
    for at in range(1, 100):
        lock = threading.Lock()
        interrupted = left_interrupted(lock, at)
        assert lock.locked(), f"interrupted at place {at}"
        if not interrupted:
            break
    assert 5 < at < 100


def test_a_program_that_just_ends_says_nothing(path: Path) -> None:
    """With a stream that is not over."""
    code = (
        "import sys\n"
        "from kvpool.client import Client\n"
        "pool = Client(sys.argv[1]); stream = pool.submit([1], max_tokens=1000); next(stream)\n"
    )
    with FakeDaemon(path, trickle):
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_descriptor_is_left(path: Path) -> None:
    def one_session() -> None:
        with Client(str(path)) as pool:
            pool.generate("x", max_tokens=2)
            pool.submit("x")
        with pytest.raises(ConnectionLost):
            Client(str(path.parent / "nothing")).stats()
        gc.collect()

    with FakeDaemon(path, count_up) as daemon:
        one_session()
        daemon.wait_for_hang_up()
        before = os.listdir("/proc/self/fd")
        for _ in range(5):
            one_session()
        daemon.wait_for_hang_up()
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_replies_may_come_in_any_order(path: Path) -> None:
    held: list[Call] = []

    def backwards(peer: Peer, message: Any) -> None:
        if isinstance(message, Call):
            held.append(message)
            if len(held) == 3:
                for call in reversed(held):
                    peer.send(Reply(peer.epoch, call.call_id, {"method": call.method}))

    with FakeDaemon(path, backwards), Client(str(path)) as pool, ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(ask) for ask in (pool.stats, pool.fsck, pool.drain)]
        assert [answer.result(5)["method"] for answer in answers] == ["stats", "fsck", "drain"]


def test_a_failure_without_an_address_ends_the_session(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon, Client(str(path)) as pool:
        stream = pool.submit("x")
        next(stream)
        daemon.do(lambda peer: peer.send(Failed(peer.epoch, "invalid_argument", "no such message")))
        with pytest.raises(ConnectionLost, match="no such message"):
            stream.result()


def test_a_client_that_is_just_dropped_is_closed(path: Path) -> None:
    with FakeDaemon(path, trickle) as daemon:
        pool = Client(str(path))
        stream = pool.submit("x")
        next(stream)
        del pool, stream
        gc.collect()
        daemon.wait_for_hang_up()


def test_messages_that_a_poll_found_silent_are_not_asked_for() -> None:
    asked: list[str] = []

    class Silent(Transport):
        def __init__(self) -> None:
            """No sockets."""

        def greet(self, core: Core) -> None: ...

        def _read_end(self, core: Core) -> bool:
            asked.append("end")
            return False

        def _flush(self, core: Core) -> None:
            core.outbox.clear()

        def _drain(self, core: Core) -> bool:
            asked.append("messages")
            return False

    transport, core = Silent(), Core()
    transport.pump(core, messages_ready=False, end_ready=False)
    assert asked == []
    transport.pump(core, messages_ready=False, end_ready=True)
    assert asked == ["end"]
    core.outbox.append(b"sending wakes ZeroMQ: what came meanwhile must be taken")
    transport.pump(core, messages_ready=False, end_ready=False)
    assert asked == ["end", "messages"]
    transport.pump(core)
    assert asked == ["end", "messages", "messages", "end"]
