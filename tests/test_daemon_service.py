"""What the service manager hears, against a stand-in for its sockets; and the memory ledger."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.daemon.config import Config
from kvpool.daemon.ledger import CPU_AUTO_SHARE, Ledger, plan_memory
from kvpool.daemon.options import ConfigError
from kvpool.daemon.service import Manager, inherited_fds


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


def plan(config: Config, available_bytes: int = 1 << 30, auto_bytes: int | None = None) -> Ledger:
    return plan_memory(
        config,
        weights_bytes=100 << 20,
        workspace_bytes=10 << 20,
        block_bytes=1 << 20,
        available_bytes=available_bytes,
        max_model_len=100,
        auto_share=CPU_AUTO_SHARE,
        auto_bytes=auto_bytes,
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
