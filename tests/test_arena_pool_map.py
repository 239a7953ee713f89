"""The pool map in shared memory: what readers see, what they cannot do, and a writer that stops in the middle."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client, KVPoolError
from kvpool.client.arena.map_segment import ALIGNMENT, ARRAYS_AT, HEADER, SEQUENCE, MapLayout, MapReader, MapWriter
from kvpool.client.arena.pool_map import USED
from kvpool.client.cli.live_map import LiveMap
from kvpool.client.wire.errors import ConnectionLost, ProtocolError, Timeout
from kvpool.client.wire.protocol import Call, ClientMessage, Failed, Reply
from tests.support.daemon_process import DaemonProcess, at_rest, eventually
from tests.support.fake_daemon import FakeDaemon, Peer
from tests.support.raw_client import RawClient

LAYOUT = MapLayout(num_blocks=100, block_size=16, details_capacity=4096)


def answer(mark: int, *, rows: int = 0) -> dict[str, Any]:
    """Of `map`, with one number everywhere."""
    return {
        "states": bytes([mark % 3]) * 100,
        "owners": np.full(100, mark, "<i4").tobytes(),
        "ref_counts": np.full(100, mark % 1000, "<u2").tobytes(),
        "sequences": [{"sequence_id": mark, "request_id": "r" * 50} for _ in range(rows)],
        "counters": {"mark": mark},
    }


@pytest.fixture
def writer() -> Iterator[MapWriter]:
    made = MapWriter(LAYOUT)
    yield made
    made.close()
    made.close()


def test_what_is_written_is_read(writer: MapWriter) -> None:
    writer.write(answer(7, rows=2))
    reader = MapReader(writer.fd)
    seen = reader.read()
    assert (seen.num_blocks, seen.block_size, seen.counters) == (100, 16, {"mark": 7})
    assert {*seen.states} == {1}
    assert {*seen.owners} == {7}
    assert {*seen.ref_counts} == {7}
    assert [row["sequence_id"] for row in seen.sequences] == [7, 7]
    assert 0 <= reader.age_s < 5
    reader.close()
    reader.close()


def test_rows_beyond_its_room_are_left_out(writer: MapWriter) -> None:
    writer.write(answer(7, rows=1000))
    reader = MapReader(writer.fd)
    assert 0 < len(reader.read().sequences) < 1000
    reader.close()


def test_a_reader_can_neither_write_nor_resize(writer: MapWriter) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(writer.fd, LAYOUT.total_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(writer.fd, b"x", 0)
    for size in (0, LAYOUT.total_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(writer.fd, size)
    writer.write(answer(1))  # the daemon goes on


def test_places_are_those_of_the_page() -> None:
    assert (ARRAYS_AT, LAYOUT.owners_at, LAYOUT.ref_counts_at, LAYOUT.details_at) == (128, 256, 704, 960)
    assert LAYOUT.total_bytes == 960 + 4096
    assert ARRAYS_AT % ALIGNMENT == 0


@pytest.mark.parametrize("header", [b"", b"KVPX" + LAYOUT.header()[4:], HEADER.pack(b"KVPM", 1, 2**60, 16, 4096)])
def test_a_descriptor_that_is_no_map_is_refused(header: bytes) -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, header)
    with pytest.raises(ProtocolError):
        MapReader(fd)  # not sealed
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x1F & ~fcntl.F_SEAL_WRITE)
    with pytest.raises(ProtocolError, match="pool_map"):
        MapReader(fd)
    os.close(fd)


def test_a_reader_never_sees_half_of_a_change(writer: MapWriter) -> None:
    writer.write(answer(0))
    child = os.fork()
    if child == 0:
        for mark in range(1, 1_000_000):
            writer.write(answer(mark, rows=3))
            time.sleep(0.0002)
    reader = MapReader(writer.fd)
    marks, reads = set(), 0
    give_up = time.monotonic() + 30.0
    try:
        while (reads < 300 or len(marks) <= 5) and time.monotonic() < give_up:
            reads += 1
            seen = reader.read()
            mark = seen.counters["mark"]
            assert {*seen.owners} == {mark}
            assert {*seen.ref_counts} == {mark % 1000}
            assert {*seen.states} == {mark % 3}
            marks.add(mark)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reader.close()
    assert len(marks) > 5


def test_a_writer_that_stopped_in_the_middle_is_noticed(writer: MapWriter) -> None:
    writer.write(answer(3))
    reader = MapReader(writer.fd)
    writer._words[SEQUENCE] += 1  # begun, and never ended
    begin = time.monotonic()
    with pytest.raises(Timeout):
        reader.read()
    assert time.monotonic() - begin < 5.0
    writer._words[SEQUENCE] += 1
    assert reader.read().counters == {"mark": 3}
    reader.close()


# With a daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("slow") as running:
        yield running


def memory_files(pid: int) -> list[str]:
    """What the process has open or mapped of ours."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [name for name in [*links, *maps] if "memfd:kvpool" in name]


def test_it_follows_the_pool_and_goes_with_its_last_watcher(daemon: DaemonProcess) -> None:
    with daemon.client() as watcher, daemon.client() as other:
        live = LiveMap(watcher)
        assert live.shared
        with other.submit("The sea is", max_tokens=200, ignore_eos=True, request_id="watched") as stream:
            for _ in range(3):
                next(stream)
            assert eventually(lambda: any(row["request_id"] == "watched" for row in live.read().sequences))
            seen = live.read()
            row = next(row for row in seen.sequences if row["request_id"] == "watched")
            assert seen.count(USED) == row["num_blocks"] > 0
            assert all(seen.states[block] == USED for block in row["blocks"])
            assert all(seen.owners[block] == os.getuid() for block in row["blocks"])
        assert eventually(lambda: live.read().count(USED) == 0)
        asked = watcher.pool_map()
        assert (live.read().states == asked.states).all()
        assert live.read().counters.keys() == asked.counters.keys()
        again = LiveMap(watcher)  # a second one takes the place of the first
        assert again.read().num_blocks == asked.num_blocks
        assert any("kvpool-map" in name for name in memory_files(daemon.pid))
    assert eventually(lambda: not memory_files(daemon.pid))


def test_watching_costs_no_messages(daemon: DaemonProcess) -> None:
    with daemon.client() as watcher, daemon.client() as other:
        live = LiveMap(watcher)
        before = other.stats()["messages_total"]
        for _ in range(50):
            live.read()
        assert other.stats()["messages_total"] == before + 1


def test_others_ask_instead(tmp_path: Path) -> None:
    def script(peer: Peer, message: ClientMessage) -> None:
        if isinstance(message, Call) and message.method == "watch_map":
            peer.send(Failed(peer.epoch, "not_owner", "only for administrators", call_id=message.call_id))
        elif isinstance(message, Call):
            assert message.method == "map"
            peer.send(Reply(peer.epoch, message.call_id, answer(5) | {"num_blocks": 100, "block_size": 16}))

    with FakeDaemon(tmp_path / "s", script), Client(str(tmp_path / "s")) as pool:
        live = LiveMap(pool)
        assert not live.shared
        assert live.read().counters == live.read().counters == {"mark": 5}


def test_who_has_no_lifeline_gets_no_map(daemon: DaemonProcess) -> None:
    with RawClient(daemon.path) as raw:
        raw.hello()
        assert raw.refused(Call(1, "watch_map")).field == "lifeline"


def test_a_daemon_that_dies_or_hangs_is_noticed() -> None:
    with DaemonProcess("slow") as mortal, mortal.client(timeout_s=2.0) as watcher:
        live = LiveMap(watcher)
        live.read()
        mortal.signal(signal.SIGSTOP)
        assert live.read().num_blocks > 0  # what is known is known
        mortal.signal(signal.SIGCONT)
        mortal.kill()
        with pytest.raises(ConnectionLost):
            live.read()
        with pytest.raises(KVPoolError):
            live.read()
        gc.collect()  # rows of earlier tests, which nobody can reach any more
        assert not memory_files(os.getpid())
        mortal.start()
        with mortal.client() as client:
            assert eventually(lambda: at_rest(client))
