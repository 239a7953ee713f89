"""AsyncClient against a scripted daemon: the same as Client, awaited."""

from __future__ import annotations

import asyncio
import gc
import inspect
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import (
    AsyncClient,
    AsyncSequence,
    AsyncStream,
    Client,
    ConnectionLost,
    InvalidArgument,
    Sequence,
    ShuttingDown,
    Stream,
    Timeout,
    TokenEvent,
    TooLong,
)
from kvpool.client.wire.errors import ERRORS_BY_CODE
from kvpool.client.wire.protocol import Attach, Cancel, Closing, Credit, Fork, Goodbye, OpenSequence, Submit
from tests.support.fake_daemon import FakeDaemon, Peer, count_up, refuse, silent, start_process, trickle


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "kvpool.sock"


@pytest.fixture
def doomed(path: Path) -> Iterator[ForkProcess]:
    process = start_process(path, trickle)
    yield process
    process.kill()
    process.join()


async def arrived(daemon: FakeDaemon, kind: type[Any]) -> Any:
    """A message of this type, while the loop goes on."""
    return await asyncio.to_thread(daemon.wait_for_type, kind)


@pytest.mark.parametrize(
    ("plain", "awaited"), [(Client, AsyncClient), (Stream, AsyncStream), (Sequence, AsyncSequence)]
)
def test_both_clients_have_the_same_methods(plain: type[Any], awaited: type[Any]) -> None:
    def public(kind: type[Any]) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}

    assert public(plain) == public(awaited)
    assert list(inspect.signature(plain).parameters) == list(inspect.signature(awaited).parameters)


def test_tokens_stream(path: Path) -> None:
    async def run() -> None:
        async with AsyncClient(str(path)) as pool, await pool.submit("x", max_tokens=5) as stream:
            assert [event async for event in stream] == [TokenEvent(i, f" t{i}", None, i, 0) for i in range(5)]
            assert (await stream.result()).text == " t0 t1 t2 t3 t4"
            assert (await pool.stats())["method"] == "stats"
            assert (await pool.chat([{"role": "user", "content": "Why?"}], max_tokens=1)).token_ids == [0]

    with FakeDaemon(path, count_up):
        asyncio.run(run())


def test_many_at_once(path: Path) -> None:
    async def one(pool: AsyncClient, number: int) -> None:
        result = await pool.generate("x", max_tokens=number)
        assert result.token_ids == list(range(number))

    async def run() -> None:
        async with AsyncClient(str(path)) as pool:
            await asyncio.gather(*(one(pool, number % 7) for number in range(100)))

    with FakeDaemon(path, count_up) as daemon:
        asyncio.run(run())
        assert len(daemon.peers) == 1


def test_sequences(path: Path) -> None:
    async def run(daemon: FakeDaemon) -> None:
        async with AsyncClient(str(path)) as pool:
            async with await pool.open("You are terse.") as chat:
                branch = await chat.fork(at=5)
                await branch.append(" Why?")
                await branch.truncate(1)
                await branch.save("why")
                await branch.share(uid=1)
            opened, fork = await arrived(daemon, OpenSequence), await arrived(daemon, Fork)
            assert fork.sequence_id == opened.sequence_id == chat.sequence_id

    with FakeDaemon(path, count_up) as daemon:
        asyncio.run(run(daemon))


@pytest.mark.parametrize("code", ["invalid_argument", "busy", "not_owner", "internal"])
def test_codes_are_exceptions(path: Path, code: str) -> None:
    async def run() -> None:
        async with AsyncClient(str(path)) as pool:
            for answer in (pool.stats(), pool.generate("x")):
                with pytest.raises(ERRORS_BY_CODE[code]):
                    await answer

    with FakeDaemon(path, refuse(code)):
        asyncio.run(run())


def test_refusals_at_home(path: Path) -> None:
    async def run() -> None:
        async with AsyncClient(str(path)) as pool:
            with pytest.raises(TooLong, match="max_model_len"):
                await pool.submit(range(4097))
            first = await pool.submit("x", request_id="same")
            with pytest.raises(InvalidArgument) as caught:
                await pool.submit("x", request_id="same")
            assert caught.value.field == "request_id"
            assert (await anext(first)).token_id == 7

    with FakeDaemon(path, trickle):
        asyncio.run(run())


def test_leaving_and_dropping_cancel(path: Path) -> None:
    async def run(daemon: FakeDaemon) -> None:
        async with AsyncClient(str(path)) as pool:
            async with await pool.submit("x", request_id="left") as stream:
                await anext(stream)
            assert await arrived(daemon, Cancel) == Cancel("left")
            daemon.received.clear()
            dropped = await pool.submit("x", request_id="dropped")
            await anext(dropped)
            del dropped
            gc.collect()
            assert await arrived(daemon, Cancel) == Cancel("dropped")

    with FakeDaemon(path, trickle) as daemon:
        asyncio.run(run(daemon))


def test_a_cancelled_task_cancels_its_request(path: Path) -> None:
    async def run(daemon: FakeDaemon) -> None:
        async with AsyncClient(str(path)) as pool:
            task = asyncio.create_task(pool.generate("x", request_id="task"))
            await arrived(daemon, Submit)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await arrived(daemon, Cancel) == Cancel("task")

    with FakeDaemon(path, trickle) as daemon:
        asyncio.run(run(daemon))


def test_reading_grants_credit(path: Path) -> None:
    def eight(peer: Peer, message: Any) -> None:
        if isinstance(message, Submit):
            peer.tokens(message.request_id, 0, list(range(8)))

    async def run(daemon: FakeDaemon) -> None:
        async with AsyncClient(str(path)) as pool:
            stream = await pool.submit("x", window=8, request_id="r")
            for _ in range(4):
                await anext(stream)
            assert await arrived(daemon, Credit) == Credit("r", 4, 0)

    with FakeDaemon(path, eight) as daemon:
        asyncio.run(run(daemon))


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda pool, stream: pool.stats(), "timeout_s"),
        (lambda pool, stream: stream.result(0.05), "timeout_s"),
        (lambda pool, stream: anext(stream), "stream_timeout_s"),
        (lambda pool, stream: stream.result(), "stream_timeout_s"),
    ],
)
def test_waits_end_and_say_which(path: Path, ask: Callable[..., Awaitable[Any]], field: str) -> None:
    async def run() -> None:
        async with AsyncClient(str(path), stream_timeout_s=5.0 if field == "timeout_s" else 0.05) as pool:
            stream = await pool.submit("x")
            pool._connection.timeout_s = 0.05
            with pytest.raises(Timeout) as caught:
                await ask(pool, stream)
            assert caught.value.field == field

    with FakeDaemon(path, silent):
        asyncio.run(run())


def test_no_daemon_is_said_at_once(path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ConnectionLost, match="does not exist"):
            await AsyncClient(str(path)).stats()

    asyncio.run(run())


@pytest.mark.parametrize(
    "blocked",
    [
        lambda pool, stream: stream.result(),
        lambda pool, stream: anext(stream),
        lambda pool, stream: pool.stats(),
        lambda pool, stream: pool.generate("y"),
    ],
)
def test_a_killed_daemon_is_noticed(path: Path, doomed: ForkProcess, blocked: Callable[..., Awaitable[Any]]) -> None:
    async def run() -> None:
        async with AsyncClient(str(path)) as pool:
            stream = await pool.submit("x")
            await anext(stream)
            asyncio.get_running_loop().call_later(0.1, doomed.kill)
            started = time.monotonic()
            with pytest.raises(ConnectionLost):
                await blocked(pool, stream)
            assert time.monotonic() - started < 2

    asyncio.run(run())


def test_a_lingering_stream_goes_on_with_the_next_daemon(path: Path, doomed: ForkProcess) -> None:
    def resume(peer: Peer, message: Any) -> None:
        if isinstance(message, Attach):
            peer.tokens(message.request_id, 0, [7, 8])
            peer.finish(message.request_id, "stop")

    async def run() -> None:
        async with AsyncClient(str(path)) as pool:
            stream = await pool.submit("x", linger_s=30.0)
            await anext(stream)
            doomed.kill()
            await asyncio.to_thread(doomed.join)
            with FakeDaemon(path, resume, epoch=2):
                assert [event.token_id async for event in stream] == [8]
                assert (await pool.connect()).epoch == 2

    asyncio.run(run())


def test_lingering_ends_in_an_error(path: Path, doomed: ForkProcess) -> None:
    async def run() -> None:
        async with AsyncClient(str(path)) as pool:
            stream = await pool.submit("x", linger_s=0.2)
            doomed.kill()
            with pytest.raises(ConnectionLost):
                await stream.result()

    asyncio.run(run())


def test_a_daemon_that_stops_says_so(path: Path) -> None:
    async def run(daemon: FakeDaemon) -> None:
        async with AsyncClient(str(path), reconnect_s=0) as pool:
            stream = await pool.submit("x")
            await anext(stream)
            daemon.do(lambda peer: peer.send(Closing(peer.epoch, "shutting_down")))
            with pytest.raises(ShuttingDown):
                await stream.result()

    with FakeDaemon(path, trickle) as daemon:
        asyncio.run(run(daemon))


def test_a_daemon_that_talks_nonsense_is_left(path: Path) -> None:
    async def run(daemon: FakeDaemon) -> None:
        async with AsyncClient(str(path)) as pool:
            stream = await pool.submit("x")
            await anext(stream)
            daemon.do(lambda peer: peer.send_bytes(b"\xc1"))
            with pytest.raises(ConnectionLost, match="no valid message"):
                await stream.result()

    with FakeDaemon(path, trickle) as daemon:
        asyncio.run(run(daemon))


def test_closing_says_goodbye_and_frees_who_waits(path: Path) -> None:
    async def run(daemon: FakeDaemon) -> None:
        pool = AsyncClient(str(path))
        stream = await pool.submit("x")
        waiting = asyncio.create_task(stream.result())
        await arrived(daemon, Submit)
        await pool.close()
        await pool.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await waiting
        await arrived(daemon, Goodbye)
        with pytest.raises(ConnectionLost, match="closed"):
            await pool.stats()

    with FakeDaemon(path, trickle) as daemon:
        asyncio.run(run(daemon))
        daemon.wait_for_hang_up()
