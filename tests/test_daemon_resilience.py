"""What the machine may do to a running daemon: no descriptors, no place to write, a while without processor."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from kvpool.client import Client, KVPoolError
from tests.support.daemon_process import DaemonProcess, at_rest, eventually

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = "The sea is"
MAX_DESCRIPTORS = 4096  # a daemon takes up to 65,536; a quarter must outlast what comes in one turn of its loop


def with_few_descriptors(daemon: DaemonProcess) -> DaemonProcess:
    limit = (
        f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_DESCRIPTORS}, {MAX_DESCRIPTORS}));"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    daemon.command = [sys.executable, "-c", limit, *daemon.command]
    return daemon


@contextlib.contextmanager
def flood(daemon: DaemonProcess, pool: Client, suffix: str) -> Iterator[None]:
    """More and more connections that say nothing, until the daemon is short of descriptors. Not more in one turn of its
    loop than it keeps in reserve."""
    streams: list[socket.socket] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_DESCRIPTORS + 256)), hard))
    end = time.monotonic() + 30.0
    try:
        while "short of file descriptors" not in daemon.log:
            assert time.monotonic() < end
            pool.stats()  # the loop has taken a turn
            for _ in range(64):
                if len(streams) < MAX_DESCRIPTORS:
                    streams.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                    with contextlib.suppress(BlockingIOError):  # the backlog is full: this one did not get in
                        streams[-1].connect(f"{daemon.path}{suffix}")
                        continue
                    streams.pop().close()
        yield
    finally:
        for stream in streams:
            stream.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("suffix", ["", ".life"])
def test_out_of_descriptors_old_clients_are_served_and_new_ones_come_later(suffix: str) -> None:
    with with_few_descriptors(DaemonProcess("slow", lifeline_grace_s=60)) as daemon, daemon.client() as pool:
        expected = pool.generate(PROMPT, max_tokens=40, **GREEDY).token_ids
        stream = pool.submit(PROMPT, max_tokens=40, **GREEDY)
        with flood(daemon, pool, suffix):
            assert stream.result().token_ids == expected
            assert pool.generate(PROMPT, max_tokens=40, **GREEDY).token_ids == expected
            with pytest.raises(KVPoolError):
                daemon.client(timeout_s=0.5).connect()
            assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < MAX_DESCRIPTORS
            before = daemon.cpu_ticks()
            time.sleep(0.5)
            assert daemon.cpu_ticks() - before < 0.25 * os.sysconf("SC_CLK_TCK")  # it does not spin meanwhile
        assert eventually(lambda: "clients are let in again" in daemon.log, 10.0)
        with daemon.client() as late:
            assert late.generate(PROMPT, max_tokens=40, **GREEDY).token_ids == expected
        assert at_rest(pool)


def test_a_stopped_daemon_goes_on_where_it_was() -> None:
    with DaemonProcess("slow", health_limit_s=1) as daemon, daemon.client() as pool:
        expected = pool.generate(PROMPT, max_tokens=60, **GREEDY).token_ids
        stream = pool.submit(PROMPT, max_tokens=60, **GREEDY)
        events = iter(stream)
        next(events)
        daemon.signal(signal.SIGSTOP)
        time.sleep(2.0)
        daemon.signal(signal.SIGCONT)
        assert eventually(lambda: pool.stats()["healthy"])  # with the next step that finishes
        for _ in events:
            pass
        assert stream.result().token_ids == expected
        assert at_rest(pool)


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may write everywhere")
def test_a_full_disk_and_a_directory_without_write_permission_cost_the_journal_and_not_the_service() -> None:
    """The file may not grow any more, as on a full disk; then no new one can be made beside it; then all is well."""
    daemon = DaemonProcess("slow")
    if os.geteuid() == 0:
        daemon.command = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override", *daemon.command]
    with daemon, daemon.client() as pool:
        expected = pool.generate(PROMPT, max_tokens=20, **GREEDY).token_ids

        def journal() -> str:
            """Its state and why, after a request that is answered as ever."""
            assert pool.generate(PROMPT, max_tokens=20, **GREEDY).token_ids == expected
            stats = pool.stats()
            return f"{stats['journal']} {stats['journal_reason']}"

        assert journal() == "on "
        unlimited = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (int(pool.stats()["journal_bytes"]) + 10, unlimited[1]))
        assert "suspended" in journal()
        assert "File too large" in journal()
        daemon.path.parent.chmod(0o555)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
        assert eventually(lambda: "Permission denied" in journal(), 30.0)
        daemon.path.parent.chmod(0o755)
        assert eventually(lambda: journal() == "on ", 30.0)
        assert at_rest(pool)


def test_a_runtime_directory_that_vanished_costs_the_journal_and_not_the_service() -> None:
    with DaemonProcess("slow", journal_max_bytes="1MiB") as daemon, daemon.client() as pool:
        expected = pool.generate(PROMPT, max_tokens=20, **GREEDY).token_ids
        shutil.rmtree(daemon.path.parent)
        for _ in range(3):
            assert pool.generate(PROMPT, max_tokens=20, **GREEDY).token_ids == expected
        assert at_rest(pool)
        assert daemon.stop() == 0
