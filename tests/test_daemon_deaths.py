"""Who dies and when: clients in every state, many at once, the daemon itself; and what the others notice of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kvpool.client import Client, ConnectionLost, InternalError, ShuttingDown, Stream
from kvpool.client.lifeline import FrameKind
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.protocol import Accepted, Attach, Closing, Credit, Finished, Goodbye, Submit, Tokens
from tests.support.client_swarm import Swarm
from tests.support.daemon_process import DaemonProcess, at_rest, eventually, left_clean
from tests.support.engine_harness import prompts
from tests.support.raw_client import RawClient

PROMPT = "The sea is"
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=60).to_wire()
LONG = prompts(1, 200)[0]


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    """Steps take 20 ms, as on a real device, so that there is a middle to die in."""
    with DaemonProcess("slow", max_num_seqs=8, max_num_batched_tokens=32) as process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def states(pool: Client) -> list[str]:
    return sorted(row["state"] for row in pool.ps())


# Clients that are killed


@pytest.mark.parametrize(
    ("state", "count", "submit"),
    [
        ("prefill", 1, {"prompt": LONG, "max_tokens": 20}),
        ("decode", 1, {"prompt": PROMPT, "max_tokens": 200, "wait": 2}),
        ("queued", 12, {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}),
        ("paused", 1, {"prompt": PROMPT, "max_tokens": 200, "window": 2, "ignore_eos": True}),
        ("fifty at once", 50, {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}),
    ],
)
def test_blocks_of_killed_clients_are_free_within_a_second(
    daemon: DaemonProcess, pool: Client, state: str, count: int, submit: dict[str, object]
) -> None:
    expected = pool.generate("undisturbed", max_tokens=30, temperature=0.0).token_ids
    neighbour = pool.submit("undisturbed", max_tokens=30, temperature=0.0)
    with Swarm(daemon.address, count, **submit) as swarm:
        assert pool.stats()["clients"] == count + 1
        swarm.kill()
        killed_at = time.monotonic()
        assert eventually(lambda: pool.stats()["clients"] == 1, 1.0)
    assert neighbour.result().token_ids == expected
    assert eventually(lambda: at_rest(pool), max(0.1, killed_at + 1.0 - time.monotonic()))


def test_a_live_idle_client_is_not_taken_for_dead(shared: DaemonProcess) -> None:
    with DaemonProcess(lifeline_grace_s=0.1) as daemon, daemon.client() as pool:
        epoch = pool.connect().epoch
        time.sleep(0.5)  # longer than every time limit of that daemon
        assert pool.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"
        assert pool.stats()["epoch"] == epoch
        assert pool.stats()["sessions_total"] == 1


# Sessions and lifelines


def test_a_session_without_a_lifeline_ends_after_its_grace_time() -> None:
    with DaemonProcess("slow", lifeline_grace_s=0.2) as daemon, RawClient(daemon.path) as raw, left_clean(daemon):
        raw.hello()
        raw.send(Submit("a", prompt=PROMPT, params=GREEDY))
        raw.expect(Accepted)
        assert raw.expect(Closing).reason == "lifeline_lost"


def test_a_lifeline_without_a_session_is_hung_up() -> None:
    with DaemonProcess(lifeline_grace_s=0.2) as daemon, RawClient(daemon.path) as raw:
        raw.lifeline = raw.connect_lifeline()
        assert raw.hung_up(2.0)


def test_lifelines_prove_the_session(daemon: DaemonProcess) -> None:
    with RawClient(daemon.path) as first, RawClient(daemon.path) as second:
        welcome = first.open()
        assert second.tie(welcome.lifeline_token) is FrameKind.REFUSED  # taken already
        assert second.hung_up()
        assert second.tie(b"x" * 32) is FrameKind.REFUSED
        second.lifeline = second.connect_lifeline()
        second.lifeline.sendall(b"GET / HTTP/1.1\r\n")
        assert second.hung_up() or True
        first.send(Submit("a", prompt=PROMPT, params=GREEDY))
        first.expect(Accepted)


def test_goodbye_settles_everything(daemon: DaemonProcess, pool: Client) -> None:
    with RawClient(daemon.path) as raw:
        raw.open()
        raw.send(Submit("a", prompt=PROMPT, params=GREEDY))
        raw.expect(Tokens)
        raw.send(Goodbye())
        assert raw.hung_up()
        assert eventually(lambda: at_rest(pool), 1.0)


# Requests that outlive their connection


def test_a_lingering_request_goes_on_for_who_comes_back(daemon: DaemonProcess, pool: Client) -> None:
    expected = pool.generate(PROMPT, SamplingParams.from_wire(GREEDY))
    with RawClient(daemon.path) as first:
        first.open()
        first.send(Submit("mine", prompt=PROMPT, params=GREEDY, linger_s=20.0))
        have = [batch for batch in first.expect(Tokens).events if batch.request_id == "mine"]
        assert first.lifeline is not None
    with RawClient(daemon.path) as second:
        second.open()
        got = [token for batch in have for token in batch.token_ids]
        second.send(Attach("mine", have=(len(got),)))
        second.expect(Accepted)
        while not isinstance(message := second.receive(), Finished):
            if isinstance(message, Tokens):
                for batch in message.events:
                    assert batch.index == len(got)
                    got += batch.token_ids
        assert got == expected.token_ids
        assert second.refused(Attach("nobody's")).code == "not_found"


def test_credit_holds_while_nobody_is_there(daemon: DaemonProcess, pool: Client) -> None:
    with RawClient(daemon.path) as first:
        first.open()
        first.send(Submit("careful", prompt=PROMPT, params=GREEDY, linger_s=20.0, credit=3))
        first.expect(Tokens)
    assert eventually(lambda: states(pool) == ["paused"])
    with RawClient(daemon.path) as second:
        second.open()
        second.send(Attach("careful", have=(0,), credit=4))
        second.expect(Accepted)
        tokens = []
        while len(tokens) < 4:
            tokens += [token for batch in second.expect(Tokens).events for token in batch.token_ids]
        second.send(Credit("careful", 100))
        assert second.expect(Finished).finish_reason == "length"


def test_linger_ends(daemon: DaemonProcess, pool: Client) -> None:
    with RawClient(daemon.path) as raw:
        raw.open()
        raw.send(Submit("brief", prompt=PROMPT, params=GREEDY, linger_s=0.1, credit=1))
        raw.expect(Tokens)
    assert eventually(lambda: at_rest(pool), 1.0)


# The daemon dies


def test_every_client_of_a_killed_daemon_has_an_error_within_two_seconds() -> None:
    with DaemonProcess("slow", journal="off") as daemon:
        clients = [daemon.client() for _ in range(3)]
        streams = [client.submit(PROMPT, max_tokens=200, temperature=0.0, ignore_eos=True) for client in clients]
        for stream in streams:
            next(iter(stream))
        ended_at: list[float] = []

        def read_on(stream: Stream) -> None:
            try:
                for _ in stream:
                    pass
            except ConnectionLost:
                ended_at.append(time.monotonic())

        readers = [threading.Thread(target=read_on, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        daemon.kill()
        killed_at = time.monotonic()
        for reader in readers:
            reader.join(20)
        assert len(ended_at) == 3
        assert max(ended_at) - killed_at < 2.0
        with pytest.raises(ConnectionLost):
            clients[0].stats()
        daemon.start()
        for client in clients:  # they register again by themselves
            assert client.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"
            client.close()


def test_a_second_daemon_is_refused_and_the_first_serves_on(daemon: DaemonProcess, pool: Client) -> None:
    second = DaemonProcess()
    second.command = [
        part if not part.startswith("--address=") else f"--address={daemon.address}" for part in second.command
    ]
    second.start(wait=False)
    assert second.wait() == 2
    assert f"another kvpoold (pid {daemon.pid}) serves {daemon.address}" in second.log
    second.__exit__()
    assert pool.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_sigterm_drains_and_leaves_nothing() -> None:
    with DaemonProcess("slow") as daemon:
        client = daemon.client()
        expected = client.generate(PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True).token_ids
        stream = client.submit(PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True)
        events = iter(stream)
        got = [next(events).token_id]
        daemon.signal(signal.SIGTERM)
        assert eventually(lambda: bool(client.stats()["draining"]))
        with pytest.raises(ShuttingDown):
            client.generate(PROMPT, max_tokens=2)
        got += [event.token_id for event in events]
        assert got == expected
        assert daemon.wait() == 0
        assert list(daemon.path.parent.iterdir()) == []
        client.close()


def test_a_second_sigterm_hurries() -> None:
    with DaemonProcess("stuck", drain_timeout_s=1000, journal="off") as daemon, RawClient(daemon.path) as raw:
        raw.open()
        raw.send(Submit("a", prompt=PROMPT, params=GREEDY))
        raw.expect(Accepted)
        daemon.signal(signal.SIGTERM)
        assert eventually(lambda: "draining" in daemon.log)
        assert raw.refused(Submit("b", prompt=PROMPT)).code == "shutting_down"
        daemon.signal(signal.SIGTERM)
        finished = raw.expect(Finished)
        assert (finished.finish_reason, finished.error and finished.error.code) == ("error", "shutting_down")
        assert raw.expect(Closing).reason == "shutting_down"
        assert daemon.wait() == 0


def test_the_drain_has_a_limit() -> None:
    with DaemonProcess("stuck", drain_timeout_s=0.2) as daemon, daemon.client() as client:
        stream = client.submit(PROMPT)
        client.stats()
        daemon.signal(signal.SIGTERM)
        with pytest.raises((ShuttingDown, ConnectionLost)):
            stream.result()
        assert daemon.wait() == 0


def test_a_broken_device_ends_the_daemon_with_an_error() -> None:
    with DaemonProcess("broken") as daemon, daemon.client() as client:
        for _ in range(3):
            with pytest.raises(InternalError, match="the device failed"):
                client.generate(PROMPT)
        assert daemon.wait() == 1
        assert "3 steps in a row failed; the last: broken for the test" in daemon.log
        assert list(daemon.path.parent.iterdir()) == []


# Nothing to do


def test_an_idle_daemon_does_not_wake_up() -> None:
    with DaemonProcess() as daemon, daemon.client() as client:
        client.generate(PROMPT, max_tokens=4)
        held = client.submit(PROMPT, max_tokens=4, window=1)
        assert eventually(lambda: states(client) == ["paused"])
        held.cancel()
        time.sleep(1.5)  # the audit, once
        ticks, switches = daemon.cpu_ticks(), daemon.context_switches()
        time.sleep(1.0)
        assert daemon.cpu_ticks() - ticks <= 1
        assert daemon.context_switches() - switches <= 2


def test_descriptors_and_memory_are_flat(daemon: DaemonProcess, pool: Client) -> None:
    def visit() -> None:
        for _ in range(20):
            with daemon.client() as visitor:
                visitor.generate(PROMPT, max_tokens=1)

    visit()
    assert eventually(lambda: pool.stats()["clients"] == 1)
    files, memory = daemon.open_files(), daemon.resident_kib()
    visit()
    assert eventually(lambda: pool.stats()["clients"] == 1)
    assert eventually(lambda: daemon.open_files() <= files)
    assert daemon.resident_kib() - memory < 4096
