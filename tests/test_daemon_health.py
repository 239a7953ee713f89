"""Health is progress: when the daemon says that it does not get on, and which requests it names."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvpool.client.cli import __main__ as cli
from kvpool.daemon.scheduling.limits import OwnerLimits
from kvpool.daemon.serving.health import health_of
from tests.support.daemon_process import DaemonProcess, eventually
from tests.support.engine_harness import Harness, prompts

LIMIT_S = 10.0
LONG_S = 1000.0


@pytest.fixture
def engine() -> Iterator[Harness]:
    harness = Harness(defaults=OwnerLimits(), owners={2: OwnerLimits(tokens_per_s=0.1)})
    yield harness
    harness.close()


def is_healthy(harness: Harness) -> bool:
    return health_of(harness.engine, LIMIT_S, harness.now).healthy


def test_without_work_the_daemon_is_healthy_for_ever(engine: Harness) -> None:
    engine.generate("The sea", max_tokens=3)
    engine.now += LONG_S
    assert is_healthy(engine)


def test_slow_steps_are_progress_and_a_step_that_hangs_is_none(engine: Harness) -> None:
    engine.submit("The sea", max_tokens=20)
    engine.turn()
    for _ in range(10):
        engine.now += 0.9 * LIMIT_S
        assert is_healthy(engine)
        engine.turn()
    engine.now += LIMIT_S
    health = health_of(engine.engine, LIMIT_S, engine.now)
    assert health.reason == (
        "no step has finished for 10.0 s (health_limit_s 10), the device has one since 10.0 s; sequences waiting: 1"
    )
    engine.turn()
    assert is_healthy(engine)


def test_a_reader_that_grants_nothing_is_no_fault_of_the_daemon(engine: Harness) -> None:
    engine.submit("The sea", max_tokens=20, credit=1)
    for _ in range(5):
        engine.turn()
    engine.now += LONG_S
    assert is_healthy(engine)


def test_nor_is_a_rate_limit(engine: Harness) -> None:
    engine.submit(prompts(1, 8)[0], uid=2, max_tokens=4)
    while not engine.engine.in_flight:
        engine.turn()
    for _ in range(5):
        engine.turn()
    assert engine.scheduler.has_work
    engine.now += LIMIT_S  # the next token is allowed now, and the loop was not woken yet
    assert is_healthy(engine)


def test_status_names_what_is_stuck_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess("stuck", drain_timeout_s=0, health_limit_s=0.2, max_num_seqs=1) as daemon,
        daemon.client() as pool,
    ):

        def status(*flags: str) -> tuple[int, str]:
            code = cli.main(["--address", daemon.address, "status", *flags])
            return code, capsys.readouterr().out

        assert status() == (0, "healthy: 0 running, 0 waiting, 0 paused\n")
        streams = [pool.submit("The sea", request_id="first", max_tokens=4)]
        assert eventually(lambda: pool.stats()["sequences_running"] == 1)
        streams.append(pool.submit("The sea", request_id="second", max_tokens=4))
        assert eventually(lambda: not pool.stats()["healthy"])
        code, shown = status()
        assert code == 1
        lines = shown.splitlines()
        assert lines[0] == "unhealthy: 1 running, 1 waiting, 0 paused"
        assert lines[1].startswith("no step has finished for ")
        first, second = lines[3:]
        assert "first" in first
        assert "the device has its step since" in first
        assert "second" in second
        assert "behind a step that does not end" in second
        code, shown = status("--json")
        report = json.loads(shown)
        assert (code, report["healthy"], len(report["stuck"])) == (1, False, 2)
        for stream in streams:
            stream.cancel()


def test_the_limit_can_be_reloaded() -> None:
    with DaemonProcess("stuck", drain_timeout_s=0, config="health_limit_s = 0.1\n") as daemon, daemon.client() as pool:
        stream = pool.submit("The sea", max_tokens=4)
        assert eventually(lambda: not pool.stats()["healthy"])
        daemon.config_path.write_text("health_limit_s = 3600\n")
        assert pool.reload()["changed"] == ("health_limit_s",)
        assert pool.stats()["healthy"]
        stream.cancel()


def test_no_daemon_is_not_healthy(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--address", f"{tmp_path}/kvpool.sock", "status"]) == 1
    assert capsys.readouterr().err.startswith("kvpool: ")
