"""Kept sequences over a restart: there again, with the same bits, however the last daemon ended."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client import Busy, Client, NotFound
from kvpool.daemon.persistence.journal_records import Hold
from tests.support.daemon_process import DaemonProcess, at_rest, eventually
from tests.support.journals import open_journal, recovered

PATIENCE_S = 30.0
SAMPLED: dict[str, Any] = {"seed": 5, "ignore_eos": True}
PROMPT = list(range(3, 60))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("paced", resume_grace_s=2.0) as process:
        yield process


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client(reconnect_s=PATIENCE_S, timeout_s=PATIENCE_S) as client:
        yield client
        client.close()
    with daemon.client() as last:
        assert eventually(lambda: at_rest(last), 10.0), last.ps()


def restart(daemon: DaemonProcess, number: int) -> None:
    daemon.signal(number)
    daemon.wait()
    daemon.start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kept_sequence_goes_on_bit_for_bit(daemon: DaemonProcess, pool: Client, number: int) -> None:
    """What was appended, generated and truncated before; forks, and what it is shared with."""

    def before() -> Any:
        chat = pool.open(PROMPT, keep=True, sequence_id="chat")
        chat.generate(max_tokens=20, **SAMPLED)
        chat.append([9, 8, 7])
        chat.truncate(chat.num_tokens - 5)
        chat.append([4] * 6)
        fork = chat.fork(at=30, sequence_id="fork")
        chat.share(uid=12345)
        return chat, fork

    def after() -> list[Any]:
        answers = [pool.attach(name).generate(max_tokens=20, logprobs=2, **SAMPLED) for name in ("chat", "fork")]
        return [
            (answer.token_ids, answer.logprobs, answer.top_logprobs, answer.usage.prompt_tokens) for answer in answers
        ]

    chat, fork = before()
    expected = after()
    chat.close()
    fork.close()
    chat, fork = before()
    lengths = {"chat": chat.num_tokens, "fork": fork.num_tokens}
    restart(daemon, number)
    rows = {row["request_id"]: row for row in pool.ps()}
    assert {name: row["num_tokens"] for name, row in rows.items()} == lengths
    assert all(row["state"] == "idle" and row["num_computed_tokens"] == 0 for row in rows.values())
    assert after() == expected
    for name in lengths:
        pool.attach(name).close()
    pool.open(PROMPT, sequence_id="held by its session")
    if number == signal.SIGKILL:
        restart(daemon, number)
        assert pool.ps() == []  # neither what was closed nor what was not kept


def test_an_answer_in_the_middle_goes_on_and_becomes_part_of_its_sequence(daemon: DaemonProcess, pool: Client) -> None:
    def answers(kill: bool) -> list[Any]:
        chat = pool.open(PROMPT, keep=True, sequence_id="middle")
        stream = chat.submit(max_tokens=60, **SAMPLED)
        events = [next(iter(stream)) for _ in range(3)]
        if kill:
            restart(daemon, signal.SIGKILL)
        events += list(stream)
        chat = pool.attach("middle")
        found = [[event.token_id for event in events if event.token_id >= 0], chat.num_tokens]
        if kill:
            restart(daemon, signal.SIGKILL)  # and now it is idle
        found.append(pool.attach("middle").generate(max_tokens=10, **SAMPLED).token_ids)
        pool.attach("middle").close()
        return found

    expected = answers(kill=False)
    assert expected[1] == len(PROMPT) + 60
    assert answers(kill=True) == expected


def test_the_sequence_of_a_kept_request(daemon: DaemonProcess, pool: Client) -> None:
    for killed_in_the_middle in (False, True):
        stream = pool.submit(PROMPT, request_id="once", keep=True, max_tokens=30, **SAMPLED)
        events = [next(iter(stream)) for _ in range(3)]
        if killed_in_the_middle:
            restart(daemon, signal.SIGKILL)
        events += list(stream)
        restart(daemon, signal.SIGKILL)
        kept = pool.attach("once")
        assert kept.num_tokens == len(PROMPT) + 30
        kept.close()
        with pytest.raises(NotFound):
            pool.attach("once")


# The journal alone


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "j"


def hold(key: int, token_ids: list[int], name: str = "s") -> Hold:
    return Hold(key, 1000, name, (), (7,), 0, tuple(token_ids))


@given(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 2**31 - 1), max_size=40)), max_size=20))
@settings(max_examples=20, deadline=None)
def test_any_history_is_there_again_and_stays_short(changes: list[tuple[int, list[int]]]) -> None:
    """Each change keeps some of the first tokens and adds others; the journal is told of both, as sequences do."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "j"
        journal, _ = recovered(path)
        token_ids: list[int] = [1, 2, 3]
        key = journal.hold(hold(0, token_ids))
        for kept, added in changes:
            token_ids = token_ids[:kept]
            assert journal.hold(hold(key, token_ids)) == key
            token_ids = token_ids + added
            journal.hold(hold(key, token_ids))
        journal.commit(0.0)
        longest = 5 * 80 + 64
        assert journal.stats()["journal_live_bytes"] <= 2 * longest + 1024 + longest  # type: ignore[operator]
        journal._file.close()
        journal, found = recovered(path)
        assert found.held == {key: hold(key, token_ids)}
        journal.let_go(key)
        journal.commit(0.0)
        journal.close()
        assert not path.exists()


def test_without_room_nothing_has_changed(path: Path) -> None:
    journal = open_journal(path, max_bytes=2 * 1000)
    journal.recover(0.0, 0.0)
    key = journal.hold(hold(0, [1] * 100))
    with pytest.raises(Busy, match="journal_max_bytes"):
        journal.hold(hold(key, [1] * 1000))
    with pytest.raises(Busy):
        journal.hold(hold(0, [1] * 1000, "other"))
    journal.hold(hold(key, [1] * 101))
    journal.commit(0.0)
    journal.close()
    assert path.exists()  # it is still there, so the next daemon needs it
    assert recovered(path)[1].held == {key: hold(key, [1] * 101)}


def test_a_torn_journal_has_a_sequence_as_it_was(path: Path) -> None:
    journal, _ = recovered(path)
    key = journal.hold(hold(0, list(range(50))))
    journal.commit(0.0)
    whole = os.path.getsize(path)
    journal.hold(hold(key, list(range(80))))
    journal.commit(0.0)
    os.truncate(path, os.path.getsize(path) - 1)
    assert os.path.getsize(path) > whole
    assert recovered(path)[1].held == {key: hold(key, list(range(50)))}
