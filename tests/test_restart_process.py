"""Real daemons that are killed, stopped and replaced, and what their clients see of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import AsyncClient, ConnectionLost, NotFound, ShuttingDown, Unsupported
from kvpool.client.cli.doctor import examine
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.protocol import Accepted, Attach, Finished, Submit, Tokens
from kvpool.model.backend import BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from tests.support.chaos import run_chaos
from tests.support.daemon_process import DaemonProcess, at_rest, eventually
from tests.support.engine_harness import tiny_model
from tests.support.raw_client import RawClient

PROMPT = "The sea is"
PATIENCE_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels() -> None:
    """Kernels that are compiled for the first time take longer than a daemon is waited for."""
    model = tiny_model()
    limits = BackendLimits(16, 4, 32, 64)
    backend = CpuBackend(model.program, model.checkpoint, limits, dtype="float32", threads=1)
    backend.allocate_pool(1)
    backend.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """Shared, as a start takes long: every test leaves it running, and none cares for what it did before."""
    with DaemonProcess("paced", resume_grace_s=2.0) as process:
        yield process


def journal_of(daemon: DaemonProcess) -> Path:
    return daemon.path.with_name(daemon.path.name + ".journal")


def test_random_deaths_under_load_change_no_token() -> None:
    """The short form of bench/chaos.py."""
    outcome = run_chaos(rounds=1, clients=2, seed=5)
    assert outcome.wrong == []
    assert outcome.kills >= 1
    assert outcome.answers > 0


def test_a_stream_goes_on_with_the_next_daemon(daemon: DaemonProcess) -> None:
    with daemon.client(reconnect_s=PATIENCE_S) as pool:
        params = SamplingParams(max_tokens=60, seed=4, ignore_eos=True, logprobs=2)
        expected = pool.generate(PROMPT, params)
        stream = pool.submit(PROMPT, params)
        events = [next(stream) for _ in range(10)]
        daemon.kill()
        daemon.start()
        events += list(stream)
        result = stream.result()
        assert [event.index for event in events if event.token_id >= 0] == list(range(60))
        assert "".join(event.text for event in events) == result.text == expected.text
        assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)
        stats = pool.stats()
        assert stats["journal"] == "on"
        assert stats["requests_taken_up_total"] in (1, 2)  # the finished one, too, if that was not long ago
        assert eventually(lambda: at_rest(pool), 1.0)


def test_asyncio_streams_go_on_too(daemon: DaemonProcess) -> None:
    async def run() -> None:
        async with AsyncClient(daemon.address, reconnect_s=PATIENCE_S) as pool:
            params = SamplingParams(max_tokens=60, seed=4, ignore_eos=True)
            expected = await pool.generate(PROMPT, params)
            streams = [await pool.submit(PROMPT, params) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            await asyncio.to_thread(daemon.kill)
            await asyncio.to_thread(daemon.start)
            for stream in streams:
                assert (await stream.result()).token_ids == expected.token_ids

    asyncio.run(run())


def test_a_drain_that_is_too_short_leaves_the_rest_to_the_next_daemon() -> None:
    with DaemonProcess("paced", drain_timeout_s=0.1) as daemon, daemon.client(reconnect_s=PATIENCE_S) as pool:
        params = SamplingParams(max_tokens=100, seed=4, ignore_eos=True)
        expected = pool.generate(PROMPT, params)
        stream = pool.submit(PROMPT, params)
        next(stream)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert [path.name for path in daemon.path.parent.iterdir()] == [journal_of(daemon).name]
        daemon.start()
        assert stream.result().token_ids == expected.token_ids
        assert daemon.stop() == 0
        assert not journal_of(daemon).exists(), "nothing is left to do"


def test_without_a_next_daemon_a_drain_that_is_too_short_is_an_error() -> None:
    with DaemonProcess("paced", drain_timeout_s=0.1) as daemon, daemon.client() as pool:
        stream = pool.submit(PROMPT, max_tokens=200, ignore_eos=True)
        next(stream)
        daemon.signal(signal.SIGTERM)
        begin = time.monotonic()
        with pytest.raises((ShuttingDown, ConnectionLost)):  # on a busy machine the hang-up may overtake the word
            stream.result()
        assert time.monotonic() - begin < 2.5


def test_a_journal_that_is_off_is_lost_and_said() -> None:
    with DaemonProcess("paced", journal="off") as daemon, daemon.client(reconnect_s=PATIENCE_S) as pool:
        assert pool.stats()["journal"] == "off"
        stream = pool.submit(PROMPT, max_tokens=100, ignore_eos=True)
        next(stream)
        daemon.kill()
        assert not journal_of(daemon).exists()
        daemon.start()
        with pytest.raises(ConnectionLost, match="does not know the request"):
            stream.result()


def test_who_does_not_come_back_is_cancelled(daemon: DaemonProcess) -> None:
    with RawClient(daemon.path) as raw:
        raw.open()
        raw.send(
            Submit("orphan", prompt=PROMPT, params=SamplingParams(max_tokens=200, ignore_eos=True).to_wire(), credit=3)
        )
        raw.expect(Tokens)
        daemon.kill()
    daemon.start()
    with daemon.client() as pool:
        assert [row["request_id"] for row in pool.ps()] == ["orphan"]
        assert eventually(lambda: at_rest(pool), 4.0)
        with pytest.raises(NotFound):
            pool.follow("orphan").result()


def test_what_finished_unseen_is_kept_and_what_was_cancelled_is_not_begun_again(daemon: DaemonProcess) -> None:
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True).to_wire()
    with RawClient(daemon.path) as raw:
        raw.open()
        raw.send(Submit("done", prompt=PROMPT, params=params))
        raw.expect(Finished)
        daemon.kill()  # who knows whether it had arrived?
    daemon.start()
    with RawClient(daemon.path) as raw:
        raw.open()
        raw.send(Attach("done", have=(2,)))
        raw.expect(Accepted)
        assert [batch.index for batch in raw.expect(Tokens).events][-1] == 4
        assert raw.expect(Finished).finish_reason == "length"
    with daemon.client() as pool:
        assert pool.stats()["tokens_generated_total"] == 0


def test_two_of_one_name_do_not_get_tokens_of_each_other(daemon: DaemonProcess) -> None:
    """Sessions of one user may use the same name, and only the name says what they come back for."""
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    with daemon.client(reconnect_s=PATIENCE_S) as one, daemon.client(reconnect_s=PATIENCE_S) as two:
        streams = [one.submit(PROMPT, params, request_id="twice"), two.submit("Another", params, request_id="twice")]
        alone = one.submit(PROMPT, params, request_id="once")
        for stream in [*streams, alone]:
            next(stream)
        two.generate("Another", params, max_tokens=2, request_id="once")  # over, and accepted later
        daemon.kill()
        daemon.start()
        for stream in streams:
            with pytest.raises(Unsupported, match="same request_id"):
                stream.result()
        assert alone.result().token_ids == one.generate(PROMPT, params).token_ids
        assert two.generate(PROMPT, params, request_id="twice").token_ids == alone.result().token_ids
        assert eventually(lambda: at_rest(one), 1.0)


def test_another_model_says_so_and_keeps_the_old_journal() -> None:
    with DaemonProcess("paced") as daemon, daemon.client(reconnect_s=PATIENCE_S) as pool:
        stream = pool.submit(PROMPT, max_tokens=200, ignore_eos=True)
        next(stream)
        daemon.kill()
        config = json.loads((daemon.model_path / "config.json").read_text())
        (daemon.model_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
        daemon.start()
        with pytest.raises(Unsupported, match="model was"):
            stream.result()
        assert journal_of(daemon).with_name(journal_of(daemon).name + ".set-aside").stat().st_size > 100
        assert len(pool.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids) == 4


def test_a_torn_journal_does_not_prevent_the_start(daemon: DaemonProcess) -> None:
    with daemon.client(reconnect_s=PATIENCE_S) as pool:
        params = SamplingParams(max_tokens=60, seed=4, ignore_eos=True)
        expected = pool.generate(PROMPT, params)
        stream = pool.submit(PROMPT, params)
        got = [next(stream) for _ in range(20)]
        daemon.kill()
        size = journal_of(daemon).stat().st_size
        os.truncate(journal_of(daemon), size - 100)  # several steps
        daemon.start()
        assert [e.token_id for e in [*got, *stream]] == expected.token_ids
        assert "torn or damaged" in daemon.log


def test_a_directory_that_cannot_be_written_suspends_the_journal_only(daemon: DaemonProcess) -> None:
    journal_of(daemon).unlink()
    journal_of(daemon).mkdir()
    (journal_of(daemon) / "in the way").touch()
    daemon.kill()
    daemon.start()
    with daemon.client() as pool:
        stats = pool.stats()
        assert stats["journal"] == "suspended"
        assert str(journal_of(daemon)) in stats["journal_reason"]
        found = {finding.name: finding for finding in examine(daemon.address, {})}["journal"]
        assert found.ok is False
        assert str(journal_of(daemon)) in found.detail
        assert len(pool.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids) == 4
    assert "a restart would lose what runs" in daemon.log
