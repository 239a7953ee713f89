"""Sequences saved by one daemon and restored by the next, and what happens to files that are not what they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Client, InvalidArgument, KVPoolError, NotFound, QuotaExceeded, Unsupported
from tests.support.daemon_process import DaemonProcess, left_clean
from tests.support.other_user import as_user

PROMPT = "The sea is"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def shared(state: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(state_directory=state, max_snapshot_bytes="256KiB", socket_mode="0666")
    process.directory.chmod(0o755)
    with process:
        yield process


@pytest.fixture
def pool(shared: DaemonProcess, state: Path) -> Iterator[Client]:
    with left_clean(shared), shared.client() as client:
        yield client
        for stored in client.snapshots():
            client.discard(stored["name"])


def file_of(state: Path, name: str) -> Path:
    return state / "snapshots" / str(os.geteuid()) / f"{name}.safetensors"


def test_restored_beside_the_one_that_was_saved(pool: Client, state: Path) -> None:
    with pool.open(PROMPT) as chat:
        chat.generate(max_tokens=30, **GREEDY)
        chat.save("why")
        chat.save("why")
        (stored,) = pool.snapshots()
        assert (stored["name"], stored["size"]) == ("why", file_of(state, "why").stat().st_size)
        expected = chat.generate(max_tokens=10, **GREEDY)
        with pool.restore("why") as again:
            assert again.num_tokens == 34
            answer = again.generate(max_tokens=10, **GREEDY)
            assert answer.token_ids == expected.token_ids
            assert answer.usage.cached_tokens == 33
    pool.discard("why")
    with pytest.raises(NotFound):
        pool.restore("why")


def test_in_a_new_daemon_and_in_one_with_other_blocks(pool: Client, state: Path) -> None:
    with pool.open(PROMPT) as chat:
        chat.generate(max_tokens=40, seed=3)
        chat.save("moved")
        expected = chat.generate(max_tokens=12, seed=4).token_ids
    for settings, cached in (({}, 43), ({"block_size": 8}, 0)):
        with DaemonProcess(state_directory=state, **settings) as other, other.client() as client:
            again = client.restore("moved")
            answer = again.generate(max_tokens=12, seed=4)
            assert (answer.token_ids, answer.usage.cached_tokens) == (expected, cached)


def test_never_computed_is_restored_as_never_computed(pool: Client) -> None:
    with pool.open(PROMPT) as chat:
        chat.save("fresh")
        with pool.restore("fresh") as again:
            assert again.generate(max_tokens=5, **GREEDY).token_ids == chat.generate(max_tokens=5, **GREEDY).token_ids


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "model"])
def test_a_file_that_is_not_what_it_was_is_refused_and_the_next_request_is_right(
    pool: Client, state: Path, damage: str
) -> None:
    expected = pool.generate(PROMPT, max_tokens=6, **GREEDY).token_ids
    with pool.open(PROMPT) as chat:
        chat.generate(max_tokens=30, **GREEDY)
        chat.save("broken")
    file = file_of(state, "broken")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "model":
        data = data.replace(b'"model_hash":"', b'"model_hash":"0')
    file.write_bytes(data[: {"truncate": -1, "empty": 0}.get(damage, len(data))])
    used = pool.stats()["blocks_used"]
    with pytest.raises(InvalidArgument, match="damaged") as refusal:
        pool.restore("broken")
    assert refusal.value.field == "name"
    assert pool.stats()["blocks_used"] == used
    assert pool.ps() == []
    assert pool.generate(PROMPT, max_tokens=6, **GREEDY).token_ids == expected


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "x" * 101, "é"])
def test_hostile_names(pool: Client, name: str) -> None:
    with pool.open(PROMPT) as chat:
        for action in (lambda: chat.save(name), lambda: pool.restore(name), lambda: pool.discard(name)):
            with pytest.raises(InvalidArgument) as refusal:
                action()
            assert refusal.value.field == "name"


def test_quota(pool: Client) -> None:
    with pool.open([5] * 200) as chat:
        chat.generate(max_tokens=0)
        chat.save("first")
        fitting = (256 << 10) // pool.snapshots()[0]["size"]
        assert fitting >= 1
        for number in range(1, fitting):
            chat.save(f"s{number}")
        with pytest.raises(QuotaExceeded, match="max_snapshot_bytes"):
            chat.save("more")
        assert len(pool.snapshots()) == fitting


def test_names_in_use_and_sequences_that_are_not_there(pool: Client) -> None:
    with pool.open(PROMPT, sequence_id="here") as chat:
        chat.save("one")
        with pytest.raises(InvalidArgument, match="here"):
            pool.restore("one", sequence_id="here")
        with pytest.raises(NotFound):
            pool.restore("two")
    with pytest.raises(NotFound):
        chat.save("one")


def test_many_at_once(pool: Client) -> None:
    with pool.open([7] * 100) as chat:
        chat.generate(max_tokens=0)
        stream = pool.submit(PROMPT, max_tokens=60, **GREEDY)
        for number in range(8):
            chat.save("same")
            with pool.restore("same") as again:
                assert again.generate(max_tokens=1, **GREEDY).usage.cached_tokens == 99, number
        assert stream.result().finish_reason == "length"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
def test_snapshots_belong_to_a_user(pool: Client, shared: DaemonProcess, state: Path) -> None:
    with pool.open(PROMPT, sequence_id="mine") as chat:
        chat.save("mine")
        chat.share(uid=20_001)
        found = as_user(
            shared.address,
            20_001,
            20_001,
            [
                ["restore", "copy", {"name": "mine"}],
                ["save", "mine", {"name": "theirs"}],
                ["fork", "mine", {"sequence_id": "fork"}],
                ["save", "fork", {"name": "mine"}],
                ["restore", "copy", {"name": "mine"}],
            ],
        )
        assert found == ["not_found", "not_owner", 4, 0, 4]
    theirs = state / "snapshots" / "20001" / "mine.safetensors"
    file_of(state, "stolen").write_bytes(theirs.read_bytes())
    with pytest.raises(KVPoolError) as refusal:
        pool.restore("stolen")
    assert refusal.value.code == "not_owner"


def test_a_state_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with DaemonProcess(state_directory=blocked) as daemon, daemon.client() as pool, pool.open(PROMPT) as chat:
        for action in (lambda: chat.save("x"), lambda: pool.restore("x"), pool.snapshots):
            with pytest.raises(KVPoolError, match="state_directory"):
                action()
        assert chat.generate(max_tokens=1, ignore_eos=True).finish_reason == "length"
        with pytest.raises(Unsupported):
            pool.resize(1)
