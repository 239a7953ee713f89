"""The arena between real processes: who is killed, stopped or hostile leaves nothing behind and hurts nobody."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client import AsyncClient, Client, InvalidArgument, KVPoolError, Unsupported
from kvpool.client.arena.arena import RING_HEAD, RING_TAIL, Arena
from kvpool.client.arena.bell import CAPACITY_BYTES
from kvpool.client.cli.live_map import LiveMap
from kvpool.client.wire.protocol import Accepted, Closing, Failed, Finished, Submit, Tokens
from kvpool.daemon.serving.delivery import SLOW_READER
from tests.support.arena_raw import ArenaRaw
from tests.support.arena_rig import mapped_arenas
from tests.support.daemon_process import DaemonProcess, eventually, left_clean
from tests.support.faults import holdings
from tests.support.scripted_backend import answer_to

SWARM = Path(__file__).resolve().parent / "support" / "arena_swarm.py"
VOCAB_SIZE = 384
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "prefix_cache": "off",
    "journal": "off",
}


@pytest.fixture(scope="module")
def running() -> Iterator[DaemonProcess]:
    with DaemonProcess("scripted", **SETTINGS) as daemon:
        yield daemon


@pytest.fixture
def daemon(running: DaemonProcess, at_rest: tuple[int, int, int]) -> Iterator[DaemonProcess]:
    with left_clean(running):
        yield running


@contextmanager
def swarm(daemon: DaemonProcess, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(SWARM), daemon.address, json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


def started(process: subprocess.Popen[str], count: int) -> list[int]:
    """The pids of `count` clients that have their first token."""
    assert process.stdout is not None
    pids = []
    while len(pids) < count and (line := process.stdout.readline()):
        pid, said = line.split(maxsplit=1)
        if said.strip() == "start":
            pids.append(int(pid))
    return pids


def verdicts(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return [said for line in process.stdout if (said := line.split(maxsplit=1)[1].strip()) != "start"]


@pytest.fixture(scope="module")
def at_rest(running: DaemonProcess) -> tuple[int, int, int]:
    """What the daemon holds when its first client has come and gone: the same at twenty looks in a row."""
    with running.client() as pool:
        pool.stats()
    seen: list[tuple[int, int, int]] = []

    def steady() -> bool:
        seen.append(holdings(running))
        return len(seen) >= 20 and len({*seen[-20:]}) == 1

    assert eventually(steady)
    return seen[-1]


def settled(daemon: DaemonProcess, before: tuple[int, int, int]) -> bool:
    return eventually(lambda: holdings(daemon) == before)


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 0},
        {"logprobs": 2},
        {"n": 3, "temperature": 1.0, "seed": 3},
        {"stop": ["qu"], "logprobs": 0},
        {"prompt_logprobs": 1},
        {"max_tokens": 0},
    ],
)
def test_results_are_the_same_with_and_without(daemon: DaemonProcess, options: dict[str, Any]) -> None:
    found = []
    for arena in (True, False):
        with daemon.client(arena=arena) as pool:
            asked = GREEDY | {"max_tokens": 60} | options
            events = list(pool.submit("The sea is deep and 🌊 wide", **asked))
            result = pool.generate("The sea is deep and 🌊 wide", **asked)
            assert result.outputs[0].token_ids == [e.token_id for e in events if e.sample == 0 and e.token_id >= 0]
            found.append((events, result.outputs, result.prompt_logprobs, pool.embed(["The sea", [5, 6, 7]]).tolist()))
    assert found[0] == found[1]


def test_clients_each_get_exactly_what_was_generated_for_them(daemon: DaemonProcess) -> None:
    with swarm(daemon, count=64, requests=2, prompt=20, max_tokens=60, window=64) as process:
        assert verdicts(process) == ["ok"] * 64


@pytest.mark.parametrize("state", ["idle", "streaming", "stopped", "uploading"])
def test_killed_in_any_state_it_leaves_nothing(
    at_rest: tuple[int, int, int], daemon: DaemonProcess, state: str
) -> None:
    if state == "idle":
        code = f"pool = Client({daemon.address!r}); pool.connect(); print('there', flush=True); input()"
        command = [sys.executable, "-c", f"from kvpool.client import Client; {code}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == b"there"
            mapped = holdings(daemon)[1]
            process.kill()
        assert mapped == 1
    else:
        length = 490 if state == "uploading" else 20
        with swarm(daemon, count=8, requests=500, prompt=length, max_tokens=20) as process:
            pids = started(process, 8)
            assert len(pids) == 8
            for pid in pids:
                if state == "stopped":
                    os.kill(pid, signal.SIGSTOP)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    assert settled(daemon, at_rest), holdings(daemon)


def test_a_stopped_client_goes_on_where_it_was(daemon: DaemonProcess) -> None:
    """Stopped and continued again and again; every token is checked by the client itself."""
    source = random.Random(1)
    with swarm(daemon, count=4, requests=10, prompt=20, max_tokens=150) as process:
        pids = started(process, 4)
        for _ in range(12):
            pid = source.choice(pids)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.01)  # the daemon goes on meanwhile
            os.kill(pid, signal.SIGCONT)
        assert verdicts(process) == ["ok"] * 4


def test_a_stopped_client_pauses_alone(daemon: DaemonProcess) -> None:
    """More is generated for it than its ring holds; the others do not notice, and nothing of it is lost."""
    with (
        swarm(daemon, count=1, requests=25, parallel=True, prompt=4, max_tokens=450) as process,
        daemon.client() as pool,
    ):
        (pid,) = started(process, 1)
        os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: any(row["wait_reason"] == SLOW_READER for row in pool.ps()), 30.0)
        with swarm(daemon, count=2, requests=2, prompt=20, max_tokens=100) as others:
            assert verdicts(others) == ["ok"] * 2
        os.kill(pid, signal.SIGCONT)
        assert verdicts(process) == ["ok"]


def test_a_hostile_reader_ends_its_own_session(at_rest: tuple[int, int, int], daemon: DaemonProcess) -> None:
    with ArenaRaw(daemon.path) as raw, daemon.client() as other:
        memory = raw.enter()
        stream = other.submit([5, 6], max_tokens=300, **GREEDY)
        next(stream)
        words = memoryview(memory).cast("Q")
        words[RING_TAIL] = 2**63
        raw.send(Submit("r", prompt="The", params={"max_tokens": 300} | GREEDY, handle=1))
        raw.expect(Accepted)
        failed = raw.receive()
        assert isinstance(failed, Failed)
        assert (failed.code, failed.field) == ("invalid_argument", "arena.ring_tail")
        assert raw.expect(Closing).reason == "protocol_error"
        assert raw.hung_up()
        assert stream.result().token_ids == answer_to([5, 6], 300, VOCAB_SIZE)
        words.release()
        memory.close()
    assert settled(daemon, at_rest), holdings(daemon)


def test_whatever_a_client_does_with_its_bell_the_daemon_goes_on(
    at_rest: tuple[int, int, int], daemon: DaemonProcess
) -> None:
    """It closes it, or makes it one that blocks and never empties it."""
    for close in (True, False):
        with ArenaRaw(daemon.path) as raw, daemon.client() as other:
            memory = raw.enter()
            os.set_blocking(raw.bell_fd, True)
            if close:
                os.close(raw.bell_fd)
                raw.bell_fd = -1
            for number in range(1 if close else 14):  # 4,200 steps: more than fit in it
                fields = {"max_tokens": 300} | GREEDY
                raw.send(Submit(f"r{number}", upload=(0, 4), params=fields, handle=1, want_text=False))
                while not isinstance(raw.receive(), Finished):
                    pass
                words = memoryview(memory).cast("Q")
                words[RING_TAIL] = words[RING_HEAD]
                words.release()
            assert other.generate([5, 6], max_tokens=9, **GREEDY).token_ids == answer_to([5, 6], 9, VOCAB_SIZE)
            memory.close()
            if not close:
                assert len(os.read(raw.bell_fd, 10_000)) == CAPACITY_BYTES
    assert settled(daemon, at_rest), holdings(daemon)


def test_a_writer_that_changes_its_prompt_meanwhile_changes_nothing_else(daemon: DaemonProcess) -> None:
    """What is checked is what was copied: while prompts are sent, their memory changes all the time."""
    with ArenaRaw(daemon.path) as raw:
        memory = raw.enter()
        child = os.fork()
        if child == 0:
            good, bad = np.full(100, 7, "<i4").tobytes(), np.full(100, -1, "<i4").tobytes()
            while True:
                memory[raw.layout.upload_at : raw.layout.upload_at + 400] = good
                memory[raw.layout.upload_at : raw.layout.upload_at + 400] = bad
        try:
            for number in range(60):
                raw.send(Submit(f"r{number}", upload=(0, 100), params={"max_tokens": 1} | GREEDY))
            answers = 0
            while answers < 60:
                message = raw.receive()
                if isinstance(message, Failed):
                    assert message.code == "invalid_argument"
                    assert message.field is not None
                    assert message.field.startswith("prompt[")
                answers += isinstance(message, Failed | Finished)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            memory.close()


def test_nobody_can_shrink_the_arena_under_the_daemon(daemon: DaemonProcess) -> None:
    with ArenaRaw(daemon.path) as raw:
        memory = raw.enter()
        with pytest.raises((OSError, SystemError, ValueError)):
            memory.resize(4096)
        raw.send(Submit("r", prompt="The", params={"max_tokens": 3} | GREEDY, handle=1))
        assert raw.expect(Finished).finish_reason == "length"
        memory.close()


def test_tokens_of_a_client_that_does_not_want_the_ring_come_in_messages(daemon: DaemonProcess) -> None:
    with ArenaRaw(daemon.path) as raw:
        memory = raw.enter()
        raw.send(Submit("r", prompt="The", params={"max_tokens": 3} | GREEDY))
        assert raw.expect(Tokens).events[0].request_id == "r"
        raw.expect(Finished)
        memory.close()


def test_descriptors_that_a_client_sends_are_not_kept(daemon: DaemonProcess) -> None:
    with ArenaRaw(daemon.path) as raw:
        raw.enter().close()
        before = holdings(daemon)
        null = os.open("/dev/null", os.O_RDONLY)
        assert raw.lifeline is not None
        socket.send_fds(raw.lifeline, [b"KV"], [null] * 8)  # half a frame: nothing to answer yet
        os.close(null)
        raw.send(Submit("r", prompt="The", params={"max_tokens": 3} | GREEDY))
        raw.expect(Finished)
        assert holdings(daemon) == before


def test_a_session_that_ends_leaves_nothing_in_either_process(
    at_rest: tuple[int, int, int], daemon: DaemonProcess
) -> None:
    def own() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:kvpool")
        return len(list(Path("/proc/self/fd").iterdir())), maps

    mine = own()
    for _ in range(10):
        with daemon.client() as pool:
            pool.generate([5, 6, 7], max_tokens=5, **GREEDY)
            LiveMap(pool).read()
        client = Client(daemon.address)
        client.connect()
        del client  # left to the garbage collector
    assert own() == mine
    assert settled(daemon, at_rest), holdings(daemon)


def test_hidden_states_for_both_clients(daemon: DaemonProcess) -> None:
    """The scripted device: of position p all layers say p at even places, and their number at odd ones."""
    with daemon.client() as pool, pool.submit([5, 6, 7], max_tokens=4, hidden_layers=[0, -1], **GREEDY) as stream:
        assert stream.hidden is None
        for event in stream:
            if event.token_id >= 0:
                assert stream.hidden is event.hidden
                assert stream.hidden[:, :2].tolist() == [[2.0 + event.index, 0.0], [2.0 + event.index, 1.0]]
        result = stream.result()
        assert result.prompt_hidden is not None
        assert result.prompt_hidden[:, 1, 0].tolist() == [0.0, 1.0, 2.0]
        with pytest.raises(InvalidArgument, match="must be layers' numbers"):
            pool.submit([5], hidden_layers=["last"])

    async def read() -> tuple[Any, Any]:
        async with AsyncClient(daemon.address) as pool:
            stream = await pool.submit([5, 6, 7], max_tokens=4, hidden_layers=[0, -1], **GREEDY)
            async for _ in stream:
                last = stream.hidden
            whole = await pool.generate([5, 6, 7], max_tokens=4, hidden_layers=np.array([0, -1]), **GREEDY)
            assert (whole.hidden[-1] == last).all()
            return whole.prompt_hidden, whole.hidden

    for found, expected in zip(asyncio.run(read()), (result.prompt_hidden, result.hidden), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_forked_child_keeps_nothing_of_its_parents_arena(daemon: DaemonProcess) -> None:
    with daemon.client() as pool:
        stream = pool.submit([5, 6], max_tokens=300, **GREEDY)
        next(stream)
        child = os.fork()
        if child == 0:
            os._exit(mapped_arenas())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert stream.result().token_ids == answer_to([5, 6], 300, VOCAB_SIZE)


def test_switched_off_it_is_off() -> None:
    with DaemonProcess("scripted", arena="off") as daemon, daemon.client() as pool:
        assert pool.connect().capabilities == ()
        assert pool.generate([5, 6], max_tokens=40, **GREEDY).token_ids == answer_to([5, 6], 40, VOCAB_SIZE)
        assert holdings(daemon)[1] == 0
        with pytest.raises(KVPoolError, match="shared memory"):
            pool.submit([5, 6], want_logits=True).result()


def test_a_restarted_daemon_goes_on_with_requests_of_the_ring() -> None:
    """The ring went with the first daemon; the rest comes in messages of the second."""
    with DaemonProcess("scripted", **(SETTINGS | {"journal": "on"})) as daemon, daemon.client() as pool:
        stream = pool.submit([5, 6], max_tokens=400, window=8, **GREEDY)
        for _ in range(20):
            next(stream)
        daemon.kill()
        daemon.start()
        assert stream.result().token_ids == answer_to([5, 6], 400, VOCAB_SIZE)
        assert pool.generate([5, 6], max_tokens=40, **GREEDY).token_ids == answer_to([5, 6], 40, VOCAB_SIZE)
        assert holdings(daemon)[1] == 1


def test_clients_without_descriptors_for_an_arena_get_everything_in_messages(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(fd: int) -> Arena:
        raise OSError(errno.EMFILE, "Too many open files")

    prompt = list(range(3, 300))
    with daemon.client() as pool:
        expected = pool.generate(prompt, max_tokens=2, prompt_logprobs=2, **GREEDY)
    monkeypatch.setattr(Arena, "open", no_descriptor)
    before = mapped_arenas()
    with daemon.client() as pool:
        result = pool.generate(prompt, max_tokens=2, prompt_logprobs=2, **GREEDY)
        with pytest.raises(Unsupported, match="ulimit -n"):
            pool.submit(prompt, want_logits=True)

    async def ask() -> Any:
        async with AsyncClient(daemon.address) as asking:
            return await asking.generate(prompt, max_tokens=2, prompt_logprobs=2, **GREEDY)

    for got in (result, asyncio.run(ask())):
        assert (got.token_ids, got.prompt_logprobs) == (expected.token_ids, expected.prompt_logprobs)
    assert mapped_arenas() == before
