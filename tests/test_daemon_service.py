"""What the service manager hears, against a stand-in for its sockets; and the memory ledger."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.daemon.settings.config import Config
from kvpool.daemon.settings.options import ConfigError
from kvpool.daemon.system.ledger import CPU_AUTO_SHARE, Ledger, plan_memory
from kvpool.daemon.system.service import Manager, inherited_fds
from tests.support.daemon_process import DaemonProcess


@pytest.mark.parametrize("abstract", [False, True])
def test_the_manager_hears_every_state(tmp_path: Path, abstract: bool) -> None:
    address = f"@kvpool-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        service = Manager.from_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000"})
        service.status("loading\nweights")
        service.ready("serving")
        service.watchdog()
        service.stopping("draining")
        heard = [manager.recv(4096).decode() for _ in range(4)]
    assert service.watchdog_s == 3.0
    assert heard == ["STATUS=loading weights", "READY=1\nSTATUS=serving", "WATCHDOG=1", "STOPPING=1\nSTATUS=draining"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/at/all"},
        {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "soon"},
    ],
)
def test_no_manager_is_no_error(environ: dict[str, str]) -> None:
    service = Manager.from_environment(environ)
    service.ready("serving")
    service.watchdog()
    assert service.watchdog_s is None


def test_inherited_sockets_are_for_this_process_only() -> None:
    assert inherited_fds({}) == []
    assert inherited_fds({"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "2"}) == []
    assert inherited_fds({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x"}) == []


def plan(
    config: Config, available_bytes: int = 1 << 30, auto_bytes: int | None = None, host_apart: bool = False
) -> Ledger:
    return plan_memory(
        config,
        weights_bytes=100 << 20,
        workspace_bytes=10 << 20,
        block_bytes=1 << 20,
        available_bytes=available_bytes,
        max_model_len=100,
        auto_share=CPU_AUTO_SHARE,
        auto_bytes=auto_bytes,
        host_apart=host_apart,
    )


def test_auto_takes_what_the_sequences_can_use() -> None:
    assert plan(Config(max_num_seqs=4)).num_blocks == 4 * 7


def test_auto_leaves_most_of_the_memory_to_others() -> None:
    assert plan(Config(max_num_seqs=512)).num_blocks == 256


def test_auto_stops_at_a_size_that_starts_quickly() -> None:
    assert plan(Config(max_num_seqs=512), auto_bytes=100 << 20).num_blocks == 100


def test_auto_never_takes_less_than_one_sequence() -> None:
    assert plan(Config(), 8 << 20).num_blocks == 7


def test_auto_says_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"needs 7MiB and only 5MiB are free, 2MiB too little; lower max_model_len"):
        plan(Config(), 5 << 20)


@pytest.mark.parametrize(("pool_bytes", "blocks"), [(1 << 20, 1), (10 << 20, 10), ((10 << 20) + 1, 10)])
def test_a_given_pool_is_obeyed(pool_bytes: int, blocks: int) -> None:
    assert plan(Config(pool_bytes=pool_bytes)).num_blocks == blocks


def test_a_pool_without_a_block_is_refused() -> None:
    for pool_bytes in (0, 1, (1 << 20) - 1):
        with pytest.raises(ConfigError, match="set pool_bytes to at least 1048576"):
            plan(Config(pool_bytes=pool_bytes))


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pool_bytes needs 2GiB and only 1GiB are free, 1GiB too little"):
        plan(Config(pool_bytes=2 << 30))


def test_the_ledger_adds_up() -> None:
    ledger = plan(Config(max_num_seqs=4))
    assert ledger.total_bytes == ledger.weights_bytes + ledger.workspace_bytes + 28 * (1 << 20)
    assert [line.split()[0] for line in ledger.lines()] == ["weights", "workspace", "pool", "total"]
    assert "28 blocks of 16 = 448 tokens" in ledger.lines()[2]
    assert replace(ledger, num_blocks=0).pool_bytes == 0


@pytest.mark.parametrize("host_apart", [True, False])
def test_the_host_pool_counts_where_the_device_is_the_host(host_apart: bool) -> None:
    ledger = plan(Config(max_num_seqs=4, host_pool_bytes=5 << 20), host_apart=host_apart)
    counted = 28 if host_apart else 28 + 5
    assert ledger.total_bytes == ledger.weights_bytes + ledger.workspace_bytes + counted * (1 << 20)
    names = [line.split("  ")[0] for line in ledger.lines()]
    assert names[3:] == (["total", "host pool"] if host_apart else ["host pool", "total"])


def test_a_host_pool_that_does_not_fit_is_refused() -> None:
    config = Config(pool_bytes=600 << 20, host_pool_bytes=500 << 20)
    with pytest.raises(ConfigError, match=r"1\.07 GiB and only 1GiB are free, 76MiB too little; lower host_pool_bytes"):
        plan(config)
    assert plan(config, host_apart=True).host_slots == 500
    with pytest.raises(ConfigError, match="set host_pool_bytes to 0, or to at least 1048576"):
        plan(Config(host_pool_bytes=1000))


# A real daemon under a stand-in for the manager


def test_the_watchdog_is_fed_while_all_is_well_and_starves_while_a_step_hangs() -> None:
    daemon = DaemonProcess("stuck", drain_timeout_s=0, health_limit_s=0.3)
    daemon.environ = {"WATCHDOG_USEC": "300000"}
    with daemon, daemon.client() as client:
        assert next(daemon.told(5.0)) == "WATCHDOG=1"
        stream = client.submit("The sea", max_tokens=4)
        assert client.stats()["in_flight_s"] >= 0.0
        told = list(daemon.told(0.6))  # health_limit_s after the step began, it is not fed any more
        assert any(line.startswith("STATUS=no step has finished for") for line in told)
        assert list(daemon.told(0.5)) == []
        assert client.stats()["in_flight_s"] > 0.5
        stream.cancel()


def test_the_manager_hears_how_it_goes() -> None:
    with DaemonProcess() as daemon:
        daemon.signal(signal.SIGTERM)
        assert "STOPPING=1\nSTATUS=draining" in list(daemon.told(5.0))
        assert daemon.wait() == 0


def test_socket_activation() -> None:
    """The manager's sockets take connections before, during and after the daemon."""
    daemon = DaemonProcess()
    daemon.path.parent.mkdir()
    listening = []
    for name in (daemon.path, daemon.path.with_name(daemon.path.name + ".life")):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(name))
        listener.listen()
        listening.append(listener)
    fds = tuple(os.dup(listener.fileno()) for listener in listening)
    activate = (
        f"import os, sys; os.dup2({fds[0]}, 3); os.dup2({fds[1]}, 4);"
        "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '2'}; os.execv(sys.argv[1], sys.argv[1:])"
    )
    daemon.command, daemon.pass_fds = [sys.executable, "-c", activate, *daemon.command], fds
    with daemon:
        for _ in range(2):
            with daemon.client() as client:
                assert client.generate("The sea", max_tokens=2, ignore_eos=True).finish_reason == "length"
            assert daemon.stop() == 0
            assert daemon.path.exists()
            daemon.start()
    for fd in fds:
        os.close(fd)
    for listener in listening:
        listener.close()
