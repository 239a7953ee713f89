"""Files of sequences: every byte counts, nothing in them is believed, and no name leads anywhere else."""

from __future__ import annotations

import io
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from kvpool.client.wire.errors import (
    InvalidArgument,
    KVPoolError,
    NotFound,
    NotOwner,
    QuotaExceeded,
    TooLong,
    Unsupported,
)
from kvpool.daemon.persistence import snapshot_file
from kvpool.daemon.persistence.snapshot_file import Image, Suitability, pieces, read
from kvpool.daemon.persistence.snapshots import UNFINISHED_S, SnapshotStore, check_name, state_directory

HERE = Suitability("hash", "layout", block_size=4, block_bytes=24, vocab_size=100, max_model_len=50)
OWNER = 1000
LARGE = 1 << 30


def image(num_tokens: int = 10, num_computed: int = 9, seed: int = 0) -> Image:
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (HERE.num_blocks(num_computed), HERE.block_bytes), dtype=np.uint8)
    return Image(random.integers(0, 100, num_tokens).astype(np.int32), num_computed, blocks)


def written(stored: Image, owner: int = OWNER, here: Suitability = HERE) -> bytes:
    return b"".join(pieces(stored, owner, here))


def reading(data: bytes, owner: int = OWNER, here: Suitability = HERE) -> Image:
    return read(io.BytesIO(data), len(data), owner, here)


def same(one: Image, other: Image) -> bool:
    return (
        one.token_ids.tolist() == other.token_ids.tolist()
        and one.num_computed_tokens == other.num_computed_tokens
        and np.array_equal(one.blocks, other.blocks)
    )


@given(num_tokens=st.integers(1, 50), data=st.data())
def test_what_is_written_is_read(num_tokens: int, data: st.DataObject) -> None:
    stored = image(num_tokens, data.draw(st.integers(0, num_tokens)), seed=num_tokens)
    assert same(reading(written(stored)), stored)


def test_it_is_a_safetensors_file() -> None:
    tensors = load(written(image()))
    assert tensors["tokens"].tolist() == image().token_ids.tolist()
    assert np.array_equal(tensors["blocks"], image().blocks)


# Damage


def test_a_flip_of_any_byte_is_noticed() -> None:
    whole = written(image())
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(InvalidArgument, match="damaged"):
            reading(bytes(damaged))


def test_a_file_that_ends_anywhere_is_noticed() -> None:
    whole = written(image())
    for length in range(len(whole)):
        with pytest.raises(InvalidArgument, match="damaged"):
            reading(whole[:length])
    with pytest.raises(InvalidArgument, match="damaged"):
        reading(whole + b"\0")


@settings(max_examples=300)
@given(data=st.data())
def test_bytes_that_are_replaced_are_noticed(data: st.DataObject) -> None:
    whole = written(image())
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    other = data.draw(st.binary(max_size=40))
    damaged = whole[:start] + other + whole[end:]
    if damaged != whole:
        with pytest.raises(InvalidArgument, match="damaged"):
            reading(damaged)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"__metadata__":[]}',
        b'{"__metadata__":{},"tokens":{"shape":[9]},"blocks":{"shape":[1]}}',
        b'{"__metadata__":{},"tokens":{"shape":[true]},"blocks":{"shape":[1,1]}}',
        b'{"__metadata__":{},"tokens":{"shape":[-1]},"blocks":{"shape":[1,1]}}',
        b'{"__metadata__":{},"tokens":{"shape":[1e3]},"blocks":{"shape":[1,1]}}',
        b'{"__metadata__":{},"tokens":{"shape":[%d]},"blocks":{"shape":[1,1]}}' % 2**62,
        b'{"__metadata__":{},"tokens":{"shape":["x"]},"blocks":{"shape":[1,1]}}',
        b"[" * 50_000,
        b"9" * 50_000,
        b"\xff\xfe",
    ],
)
def test_hostile_headers(header: bytes) -> None:
    for length in (len(header), 2**63, 2**64 - 1, 0):
        with pytest.raises(InvalidArgument, match="damaged"):
            reading(length.to_bytes(8, "little") + header + b"\0" * 64)


# Well-formed, and of no use here


def test_of_another_user() -> None:
    with pytest.raises(NotOwner):
        reading(written(image(), owner=1001))


def test_of_another_model() -> None:
    with pytest.raises(Unsupported, match="another model"):
        reading(written(image()), here=replace(HERE, model_hash="other"))


def test_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_file, "VERSION", "2")
    newer = written(image())
    monkeypatch.undo()
    with pytest.raises(Unsupported, match="version 2"):
        reading(newer)


def test_longer_than_this_daemon_takes() -> None:
    with pytest.raises(TooLong, match="max_model_len is 9"):
        reading(written(image()), here=replace(HERE, max_model_len=9))


@pytest.mark.parametrize("change", [{"kv_layout": "other"}, {"block_size": 8}])
def test_of_another_layout_only_the_tokens_are_used(change: dict[str, object]) -> None:
    found = reading(written(image()), here=replace(HERE, **change))  # type: ignore[arg-type]
    assert found.token_ids.tolist() == image().token_ids.tolist()
    assert (found.num_computed_tokens, len(found.blocks)) == (0, 0)
    damaged = bytearray(written(image()))
    damaged[-1] ^= 1
    with pytest.raises(InvalidArgument, match="block 2"):  # all of it is verified even so
        reading(bytes(damaged), here=replace(HERE, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "lie",
    [
        replace(image(), num_computed_tokens=11),
        replace(image(), num_computed_tokens=4),
        replace(image(), num_computed_tokens=0),
        replace(image(), blocks=image().blocks[:, :8]),
        replace(image(), token_ids=np.array([1, 2, 100] * 4, dtype=np.int32)),
        replace(image(), token_ids=np.array([-1] * 12, dtype=np.int32)),
        replace(image(0, 0), token_ids=np.zeros(0, dtype=np.int32)),
    ],
)
def test_lies_with_a_right_checksum(lie: Image) -> None:
    with pytest.raises(InvalidArgument, match="damaged"):
        reading(written(lie))


# The store


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "state", HERE)


def test_saving_again_replaces_and_users_have_names_of_their_own(store: SnapshotStore, tmp_path: Path) -> None:
    for uid, seed in ((1, 1), (2, 2), (1, 3)):
        store.save(uid, "chat", image(seed=seed), LARGE)
    assert same(store.restore(1, "chat"), image(seed=3))
    assert same(store.restore(2, "chat"), image(seed=2))
    assert [stored.name for stored in store.stored(1)] == ["chat"]
    for path in (tmp_path / "state").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    store.discard(1, "chat")
    for action in (lambda: store.discard(1, "chat"), lambda: store.restore(1, "chat"), lambda: store.restore(7, "x")):
        with pytest.raises(NotFound):
            action()
    assert store.stored(1) == store.stored(7) == []


@pytest.mark.parametrize("name", ["a", "A-b_c.1", "9" * 100])
def test_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "a/b", "../a", "/etc/passwd", "a\0b", "a b", "a\n", "é", "a\\b", "9" * 101, "~"]
)
def test_hostile_names(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_name(name)


def test_quota(store: SnapshotStore) -> None:
    store.save(1, "a", image(), 8192)
    store.save(1, "b", image(), 8192)
    store.save(1, "b", image(seed=1), 8192)  # in the place of the older one
    with pytest.raises(QuotaExceeded, match="max_snapshot_bytes"):
        store.save(1, "c", image(), 8192)
    store.save(2, "c", image(), 8192)
    store.discard(1, "a")
    store.save(1, "c", image(), 8192)
    with pytest.raises(QuotaExceeded):
        store.save(1, "large", image(50, 50), 100)


def test_a_file_that_cannot_be_finished_leaves_the_older_one(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, "a", image(), LARGE)

    def fails(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvpool.daemon.persistence.snapshots.os.fsync", fails)
    with pytest.raises(KVPoolError, match="No space left on device"):
        store.save(1, "a", image(seed=1), LARGE)
    monkeypatch.undo()
    assert same(store.restore(1, "a"), image())
    assert [path.name for path in (tmp_path / "state" / "snapshots" / "1").iterdir()] == ["a.safetensors"]


def test_what_a_killed_daemon_began_is_removed_in_time(store: SnapshotStore, tmp_path: Path) -> None:
    store.save(1, "a", image(), LARGE)
    folder = tmp_path / "state" / "snapshots" / "1"
    for name in (".old", ".new"):
        (folder / name).write_bytes(b"x")
    long_ago = time.time() - UNFINISHED_S - 1
    os.utime(folder / ".old", (long_ago, long_ago))
    store.save(1, "b", image(), LARGE)
    assert {path.name for path in folder.iterdir()} == {"a.safetensors", "b.safetensors", ".new"}


def test_only_files_are_read(store: SnapshotStore, tmp_path: Path) -> None:
    store.save(1, "a", image(), LARGE)
    folder = tmp_path / "state" / "snapshots" / "1"
    (folder / "link.safetensors").symlink_to(folder / "a.safetensors")
    (folder / "dir.safetensors").mkdir()
    os.mkfifo(folder / "fifo.safetensors")
    for name in ("link", "dir", "fifo"):
        with pytest.raises(KVPoolError):
            store.restore(1, name)


def test_where_it_is(tmp_path: Path) -> None:
    assert state_directory("/x", {"STATE_DIRECTORY": "/y"}) == Path("/x")
    assert state_directory("auto", {"STATE_DIRECTORY": "/y:/z", "XDG_STATE_HOME": "/w"}) == Path("/y")
    assert state_directory("auto", {"XDG_STATE_HOME": "/w"}) == Path("/w/kvpool")
    assert state_directory("auto", {"XDG_STATE_HOME": "relative"}) == Path.home() / ".local/state/kvpool"
