"""The journal: what was committed is there again, whatever happens to the file."""

from __future__ import annotations

import os
import resource
import shutil
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.client.wire.errors import Busy
from kvpool.daemon.persistence import journal as journal_module
from kvpool.daemon.persistence.journal_file import MAGIC, frame
from tests.support.journals import GRACE_S, IDENTITY, History, State, after_restart, open_journal, recovered

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvpool.sock.journal"


def started(path: Path, max_bytes: int = 1 << 20) -> History:
    journal = open_journal(path, max_bytes=max_bytes)
    assert not journal.recover(0.0, 0.0).requests
    return History(journal)


def some_history(path: Path) -> list[tuple[int, State]]:
    """A file with a bit of everything; its sizes after each commit, and what is known by then."""
    history = started(path)
    points: list[tuple[int, State]] = [(path.stat().st_size, {})]

    def commit() -> None:
        history.commit()
        points.append((path.stat().st_size, history.written))

    def accept(prompt: list[int], n: int, uid: int) -> int:
        key = history.accept(prompt, n, uid)
        points.append((path.stat().st_size, history.written))
        return key

    first, second = accept([1, 2, 3], 1, 1000), accept([5], 2, 0)
    history.tokens(first, 0, [9])
    history.tokens(second, 1, [8, 7], logprobs=True)
    commit()
    history.end(second, 1)
    third = accept([4] * 20, 1, 1000)
    history.tokens(first, 0, [10])
    commit()
    history.end(first, 0, "cancelled")
    history.tokens(second, 0, [2**31 - 1], logprobs=True)
    commit()
    history.now += GRACE_S
    history.tokens(third, 0, [6])
    commit()
    history.journal._file.close()
    return points


def test_a_prefix_of_the_file_is_a_prefix_of_the_history(path: Path) -> None:
    points = some_history(path)
    data = path.read_bytes()
    assert [size for size, _ in points] == sorted({size for size, _ in points})
    assert points[-1][0] == len(data)
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        journal, found = recovered(path)
        expected = next((state for size, state in reversed(points) if size <= cut), {})
        assert found.requests == after_restart(expected, 0.0), f"cut at {cut}"
        journal._file.close()


def test_a_flipped_byte_never_gives_wrong_tokens(path: Path) -> None:
    points = some_history(path)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ (1 << position % 8)]) + data[position + 1 :])
        journal, found = recovered(path)
        intact = [state for size, state in points if size <= position]
        assert found.requests == after_restart(intact[-1] if intact else {}, 0.0), f"flipped at {position}"
        journal._file.close()


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_bytes_at_all_let_the_daemon_start(garbage: bytes, framed: bool) -> None:
    directory = Path(mkdtemp())
    path = directory / "journal"
    path.write_bytes(MAGIC + (frame(garbage) if framed and garbage else garbage))
    journal, found = recovered(path)
    assert not found.requests
    history = History(journal)
    history.accept([1])
    history.commit()
    journal._file.close()
    assert len(recovered(path)[1].requests) == 1
    shutil.rmtree(directory)


class JournalMachine(RuleBasedStateMachine):
    """Any sequence of operations: the file says what the dictionary says, and stays small."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(mkdtemp())
        self.path = self.directory / "journal"
        self.small_bytes, journal_module.SMALL_BYTES = journal_module.SMALL_BYTES, 256
        self.history = started(self.path)

    def teardown(self) -> None:
        self.history.journal._file.close()
        journal_module.SMALL_BYTES = self.small_bytes
        shutil.rmtree(self.directory)

    def unfinished(self) -> list[tuple[int, int]]:
        requests = self.history.said.items()
        return [(key, i) for key, known in requests for i, s in enumerate(known.samples) if s.finished is None]

    @rule(prompt=TOKENS, n=st.integers(1, 3), uid=st.integers(0, 2**32 - 1))
    def accept(self, prompt: list[int], n: int, uid: int) -> None:
        self.history.accept(prompt, n, uid)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), token_ids=TOKENS, logprobs=st.booleans())
    def tokens(self, data: st.DataObject, token_ids: list[int], logprobs: bool) -> None:
        self.history.tokens(*data.draw(st.sampled_from(self.unfinished())), token_ids, logprobs=logprobs)

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), reason=st.sampled_from(["stop", "length", "cancelled", "deadline", "error"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        self.history.end(*data.draw(st.sampled_from(self.unfinished())), reason)

    @rule(seconds=st.sampled_from([0.0, 1.0, GRACE_S]))
    def commit(self, seconds: float) -> None:
        self.history.now += seconds
        self.history.commit()

    @rule()
    def restart(self) -> None:
        written = after_restart(self.history.written, self.history.now)
        self.history.restart(self.path)
        assert self.history.said == written

    @rule()
    def a_copy_of_the_file_says_what_was_committed(self) -> None:
        copied = self.directory / "copy"
        shutil.copy(self.path, copied)
        journal, found = recovered(copied, now=self.history.now)
        assert found.requests == after_restart(self.history.written, self.history.now)
        compact = copied.stat().st_size
        journal._file.close()
        assert self.path.stat().st_size <= max(256, 2 * compact) + 256

    @invariant()
    def accounts_are_right(self) -> None:
        journal = self.history.journal
        assert journal._live_bytes == sum(len(entry.events) for entry in journal._entries.values())
        assert set(journal._entries) >= set(self.history.said)


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_compaction_keeps_exactly_what_is_alive(path: Path) -> None:
    history = started(path)
    kept = history.accept([1, 2, 3])
    sizes = []
    for number in range(2000):
        key = history.accept([number] * 8)
        history.tokens(key, 0, [number, number + 1])
        if number % 100 == 0:
            history.tokens(kept, 0, [number])
        history.end(key, 0)
        history.now += 1.0
        history.commit()
        sizes.append(path.stat().st_size)
    assert max(sizes) <= journal_module.SMALL_BYTES
    assert any(after < before for before, after in pairwise(sizes)), "was never rewritten"
    assert [name.name for name in path.parent.iterdir()] == [path.name]
    history.journal._file.close()
    found = recovered(path, history.now)[1].requests
    assert found == after_restart(history.written, history.now)
    assert found[kept].samples[0].token_ids == list(range(0, 2000, 100))


def test_a_commit_is_one_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = started(path)
    keys = [history.accept([1]) for _ in range(8)]
    calls: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append(len(data)) or write(fd, data))
    for key in keys:
        history.tokens(key, 0, [5])
    history.commit()
    history.commit()
    assert len(calls) == 1


# ---- bounds


def test_where_there_is_no_room_requests_are_refused_and_tokens_left_out(path: Path) -> None:
    history = started(path, max_bytes=4096)
    keys: list[int] = []
    with pytest.raises(Busy, match="journal_max_bytes") as refusal:
        keys.extend(history.accept([1, 2, 3]) for _ in range(1000))
    assert refusal.value.retry_after_ms
    history.commit()
    for index in range(200):
        history.tokens(keys[index % 3], 0, [index])
        history.commit()
        assert path.stat().st_size <= max(4096, journal_module.SMALL_BYTES)
    history.end(keys[0], 0)
    history.journal._file.close()
    found = recovered(path)[1].requests
    assert set(found) == set(keys)
    for key in keys[:3]:
        known, complete = found[key].samples[0].token_ids, history.said[key].samples[0].token_ids
        assert known == complete[: len(known)]
        assert len(known) < len(complete)
        assert found[key].samples[0].finished is None, "its tokens are not all there: it has to be computed again"


def test_finished_requests_make_room_oldest_first(path: Path) -> None:
    history = started(path, max_bytes=4096)
    keys = []
    for _ in range(200):
        keys.append(history.accept([1, 2, 3]))
        history.end(keys[-1], 0)
        history.commit()
    found = list(recovered(path)[1].requests)
    assert found == keys[-len(found) :]
    assert len(found) > 5


# ---- a file that cannot be used


def test_disk_full_suspends_the_journal_and_ends(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = started(path)
    first = history.accept([1, 2, 3])
    history.commit()
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))  # a write in part, then an error
        history.tokens(first, 0, list(range(100)))
        history.commit()
        assert history.journal.stats()["journal"] == "suspended"
        assert path.stat().st_size == size, "half a frame stayed behind"
        second = history.accept([4])  # goes on all the same
        history.tokens(second, 0, [3])
        history.commit()
        history.now += journal_module.RETRY_S
        history.commit()
        assert history.journal.stats()["journal"] == "suspended"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "a restart would lose" in caplog.text
    history.now += journal_module.RETRY_S
    history.commit()
    assert history.journal.stats()["journal"] == "on"
    history.journal._file.close()
    assert recovered(path)[1].requests == history.said


def test_a_directory_that_is_missing_or_not_ours_is_said(tmp_path: Path) -> None:
    history = started(tmp_path / "missing" / "journal")
    history.accept([1])
    history.commit()
    stats = history.journal.stats()
    assert stats["journal"] == "suspended"
    assert "No such file" in str(stats["journal_reason"])


def test_what_is_no_file_of_ours_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "journal").symlink_to(secret)
    history = started(tmp_path / "journal")
    assert "cannot be read" in caplog.text
    history.commit()
    assert secret.read_text() == "secret"
    assert not (tmp_path / "journal").is_symlink()
    os.mkfifo(tmp_path / "fifo")
    assert started(tmp_path / "fifo").journal.stats()["journal"] == "on"


def test_ages_go_on_over_restarts_and_the_time_between_does_not_count(path: Path) -> None:
    history = started(path)
    for _ in range(2):
        history.end(history.accept([1]), 0)
        history.commit()
        history.now += GRACE_S / 2
    history.now += 1e6
    history.restart(path)
    assert [known.finished_at for known in history.said.values()] == [history.now - GRACE_S / 2, history.now]
    history.now += GRACE_S / 2
    history.commit()
    assert len(recovered(path)[1].requests) == 1


def test_nobody_else_reads_it(path: Path) -> None:
    some_history(path)
    assert path.stat().st_mode & 0o777 == 0o600


# ---- another daemon


@pytest.mark.parametrize(("name", "other"), [("model", "other"), ("dtype", "bfloat16"), ("block_size", 32)])
def test_records_of_another_model_are_set_aside(
    path: Path, name: str, other: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    points = some_history(path)
    data = path.read_bytes()
    journal = open_journal(path, identity=IDENTITY | {name: other})
    found = journal.recover(0.0, 0.0)
    assert not found.requests
    names = {(r.accept.uid, r.accept.submit.request_id) for r in points[-1][1].values()}
    assert set(found.set_aside) == names
    assert all(reason == f"{name} was {IDENTITY[name]} and is {other} now" for reason in found.set_aside.values())
    assert path.with_name(path.name + ".set-aside").read_bytes() == data
    assert "set-aside" in caplog.text


def test_times_survive_another_boot(path: Path) -> None:
    history = started(path)
    history.now = 1000.0  # since the boot, and (here) since 1970
    key = history.accept([1])
    history.commit()
    journal = open_journal(path, boot_id="another")
    (known,) = journal.recover(now=5.0, wall=1030.0).requests.values()
    assert known.accept.arrival == 5.0 - 30.0
    journal._file.close()
    journal = open_journal(path, boot_id="another")
    assert journal.recover(now=7.0, wall=0.0).requests[key].accept.arrival == 5.0 - 30.0
