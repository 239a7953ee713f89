"""`kvpool trace`: a recording that Perfetto opens, bounded, and for nothing while it is off."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import AsyncClient, Client
from kvpool.client.cli.__main__ import main as kvpool
from kvpool.client.trace import LANES, SEQUENCES
from kvpool.daemon.engine import trace as tracing
from kvpool.daemon.engine.trace import Trace
from tests.support.daemon_process import DaemonProcess, left_clean

GREEDY = {"temperature": 0.0, "ignore_eos": True}
STAGES = {"poll", "dispatch", "collect", "schedule", "launch", "flush", "deliver", "cron"}


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess("slow") as process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


def busy(pool: Client) -> threading.Thread:
    """Two sequences, in the background."""

    def work() -> None:
        streams = [pool.submit([7] * 100, max_tokens=20, **GREEDY), pool.submit([8] * 3, max_tokens=20, **GREEDY)]
        for stream in streams:
            stream.result()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def spans_of(recorded: dict[str, Any], thread_id: int) -> list[dict[str, Any]]:
    return [event for event in recorded["traceEvents"] if event["ph"] == "X" and event["tid"] == thread_id]


def test_what_perfetto_needs(daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace event format as its description has it: required keys by phase, times as numbers, names of lanes."""
    output = tmp_path / "t.json"
    with daemon.client() as pool:
        work = busy(pool)
        assert kvpool(["--address", daemon.address, "trace", "--seconds", "1.0", "--output", str(output)]) == 0
        work.join()
    assert str(output) in capsys.readouterr().out
    recorded = json.loads(output.read_text())
    assert set(recorded) == {"traceEvents", "displayTimeUnit", "otherData"}
    needed = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "M": {"args"}}
    for event in recorded["traceEvents"]:
        assert needed[event["ph"]] | {"name", "pid"} <= set(event)
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "dur", "tid") if key in event)
    assert {span["name"] for span in spans_of(recorded, LANES["loop"])} == STAGES
    counted = {event["name"] for event in recorded["traceEvents"] if event["ph"] == "C"}
    assert counted == {"blocks used", "blocks cached", "running", "waiting"}


def test_steps_are_there_with_their_sequences(daemon: DaemonProcess) -> None:
    with daemon.client() as pool:
        work = busy(pool)
        recorded = pool.trace(1.0)
        work.join()
    for lane in LANES.values():  # one thing after the other
        spans = spans_of(recorded, lane)
        assert spans
        assert all(one["ts"] + one["dur"] <= two["ts"] + 1 for one, two in pairwise(spans))
    steps = spans_of(recorded, LANES["device"])
    assert all(step["args"]["rows"] >= step["args"]["sequences"] >= step["args"]["decodes"] for step in steps)
    assert max(step["args"]["sequences"] for step in steps) == 2
    named = {event["tid"]: event["args"]["name"] for event in recorded["traceEvents"] if event["ph"] == "M"}
    sequences = [thread_id for thread_id in named if thread_id > SEQUENCES]
    assert len(sequences) == 2
    for thread_id in sequences:
        assert named[thread_id] == f"sequence {thread_id - SEQUENCES}"
        spans = spans_of(recorded, thread_id)
        assert spans[0]["name"].startswith("prompt ")
        assert [span["name"] for span in spans].count("decode") >= 15


def test_asyncio_and_an_idle_daemon(daemon: DaemonProcess) -> None:
    async def record() -> dict[str, Any]:
        async with AsyncClient(daemon.address) as pool:
            return await pool.trace(0.05)

    recorded = asyncio.run(record())
    assert {event["name"] for event in recorded["traceEvents"] if event["ph"] == "X"} <= STAGES


def test_a_recording_ends_by_itself_and_the_newest_one_counts() -> None:
    trace = Trace()
    first, second = trace.start(), trace.start()
    trace.stop(first)
    assert trace.on
    trace.stage("poll")
    trace.stop(second)
    trace.stage("poll")
    assert len(trace) == 1
    trace.stop(first, forget=True)
    assert len(trace) == 1
    trace.stop(second, forget=True)
    assert len(trace) == 0


def test_old_spans_make_room_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_SPANS", 10)
    trace = Trace()
    trace.start()
    for number in range(25):
        trace.stage(str(number))
    assert trace.dropped == 15
    assert [span.name for span in trace.take(4)] == ["15", "16", "17", "18"]
    assert len(trace) == 6


def test_off_it_costs_next_to_nothing() -> None:
    """Ten calls a turn: a microsecond or two."""
    trace = Trace()
    begin = time.process_time()
    for _ in range(20_000):
        trace.stage("poll")
    assert (time.process_time() - begin) / 20_000 < 2e-6
    assert len(trace) == 0
