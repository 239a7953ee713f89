"""Containers: client and daemon that cannot name each other's processes still know whose they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from kvpool.client.arena.arena import ARENA
from tests.support.daemon_process import DaemonProcess
from tests.support.scripted_backend import answer_to

NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 50}


def can_make_namespaces() -> bool:
    known = os.geteuid() == 0 and shutil.which("unshare") is not None
    return known and subprocess.run([*NEW_NAMESPACE, "true"], check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="no pid namespace can be made here")


def test_a_client_in_another_pid_namespace_is_served_with_its_arena() -> None:
    with DaemonProcess("scripted") as daemon:
        code = (
            "import os, sys; from kvpool.client import Client\n"
            "with Client(sys.argv[1]) as pool:\n"
            f"    result = pool.generate([5, 6, 7], **{GREEDY!r})\n"
            "    print(os.getpid(), *pool.connect().capabilities, *result.token_ids)\n"
        )
        command = [*NEW_NAMESPACE, sys.executable, "-c", code, daemon.address]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert said[:2] == ["1", ARENA]
    assert [int(word) for word in said[2:]] == answer_to([5, 6, 7], 50, 384)


def test_a_daemon_that_cannot_name_its_clients_processes_settles_their_deaths() -> None:
    daemon = DaemonProcess("scripted")
    daemon.command = [*NEW_NAMESPACE, *daemon.command]
    try:
        daemon.start()
        with daemon.client() as pool:
            with pool.submit([5, 6, 7], **GREEDY) as stream:
                assert [event.token_id for event in stream if event.token_id >= 0] == answer_to([5, 6, 7], 50, 384)
            waiting = pool.submit([5, 6, 7], window=1, **GREEDY)
            next(waiting)
            (row,) = pool.ps()
            assert (row["pid"], row["uid"]) == (0, os.getuid())
            code = (
                "import os, sys; from kvpool.client import Client\n"
                "pool = Client(sys.argv[1]); next(pool.submit([8], window=1, max_tokens=90)); os._exit(1)\n"
            )
            assert subprocess.run([sys.executable, "-c", code, daemon.address], check=False, timeout=60).returncode == 1
            assert [row["request_id"] for row in pool.ps()] == [waiting.request_id]
    finally:
        daemon.kill()
        daemon.__exit__()
