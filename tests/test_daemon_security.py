"""What users of one daemon can see of each other, and do to each other; and SECURITY.md, which says so."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Client
from tests.support.daemon_process import ROOT, DaemonProcess, left_clean
from tests.support.other_user import as_user, become

ALICE, BOB = 20_001, 20_002
ADMINS = 20_100
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [7] * 40

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    process = DaemonProcess("slow", socket_mode="0666", admin_group=str(ADMINS))
    process.directory.chmod(0o755)
    with process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


@needs_root
def test_another_user_sees_nothing_of_a_request(daemon: DaemonProcess, pool: Client) -> None:
    with pool.submit("a secret text", request_id="secret-name", max_tokens=100, window=4, **GREEDY) as stream:
        next(iter(stream))
        assert pool.ps()[0]["request_id"] == "secret-name"
        rows, pool_map, stats = as_user(
            daemon.address, ALICE, ALICE, [["ps", "", {}], ["map", "", {}], ["stats", "", {}]]
        )
    assert rows == pool_map["sequences"] == []
    assert pool_map["owners"] == [-2, -1]
    assert "secret" not in json.dumps(stats)
    assert "root" not in json.dumps(stats)


@needs_root
def test_another_user_can_neither_end_nor_take_a_request_nor_tell_that_it_exists(
    daemon: DaemonProcess, pool: Client
) -> None:
    expected = pool.generate(PROMPT, max_tokens=60, **GREEDY).token_ids
    stream = pool.submit(PROMPT, request_id="secret-name", max_tokens=60, **GREEDY)
    events = iter(stream)
    next(events)
    number = str(pool.ps()[0]["sequence_id"])
    operations = [
        [method, name, {}]
        for method, names in (
            ("cancel", ("secret-name", number, "no-such-name")),
            ("follow", ("secret-name", number, "no-such-name")),
            ("attach", ("secret-name", number, "no-such-name")),
        )
        for name in names
    ]
    assert as_user(daemon.address, ALICE, ALICE, operations) == ["not_found"] * len(operations)
    same_name = ["submit", "secret-name", {"prompt": [8] * 4, "max_tokens": 2, **GREEDY}]
    assert len(as_user(daemon.address, ALICE, ALICE, [same_name])[0]["token_ids"]) == 2
    assert stream.result().token_ids == expected


@needs_root
def test_only_administrators_command_the_daemon(daemon: DaemonProcess, pool: Client) -> None:
    commands = [["drain", "", {}], ["reload", "", {}], ["fsck", "", {}], ["resize", "", {"pool_bytes": 1}]]
    assert as_user(daemon.address, ALICE, ALICE, commands) == ["not_owner"] * 4
    assert pool.stats()["draining"] is False


@needs_root
def test_members_of_the_admin_group_are_administrators(daemon: DaemonProcess, pool: Client) -> None:
    with pool.submit("a text", request_id="theirs", max_tokens=100, window=4, **GREEDY) as stream:
        next(iter(stream))
        rows, reloaded, cancelled = as_user(
            daemon.address, ALICE, ADMINS, [["ps", "", {}], ["reload", "", {}], ["cancel", "theirs", {}]]
        )
        assert [row["request_id"] for row in rows] == ["theirs"]
        assert (reloaded, cancelled) == ({"changed": []}, {"cancelled": 1})
        assert stream.result().finish_reason == "cancelled"


@needs_root
def test_no_prefix_is_found_across_users(daemon: DaemonProcess) -> None:
    """Neither in the figures, nor in what is computed: the time to the first token tells nothing."""
    prompt = {"prompt": [5] * 70, "max_tokens": 2, **GREEDY}
    with daemon.client() as pool:

        def rows_computed(uid: int) -> tuple[int, int]:
            before = pool.stats()["tokens_computed_total"]
            (found,) = as_user(daemon.address, uid, uid, [["submit", "r", prompt]])
            return found["cached_tokens"], pool.stats()["tokens_computed_total"] - before

        assert rows_computed(ALICE) == (0, 71)
        assert rows_computed(ALICE) == (64, 7)
        assert rows_computed(BOB) == (0, 71)
        assert pool.generate(**prompt).usage.cached_tokens == 0


@needs_root
def test_sockets_are_closed_to_those_who_are_not_let_in() -> None:
    with DaemonProcess(socket_mode="0660", socket_group=str(ADMINS)) as daemon:
        daemon.directory.chmod(0o755)
        for path in (daemon.path, daemon.path.with_name("kvpool.sock.life")):
            assert may_connect(path, ALICE, ADMINS)
            assert not may_connect(path, ALICE, ALICE)


def may_connect(path: Path, uid: int, gid: int) -> bool:
    child = os.fork()
    if child == 0:
        code = 2
        try:
            become(uid, gid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                stream.connect(str(path))
            code = 0
        except PermissionError:
            code = 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0


# The page


def named_tests() -> list[tuple[str, str]]:
    return re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())


def test_the_page_names_tests_that_exist() -> None:
    named = named_tests()
    assert len(named) > 20
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(ROOT / "tests" / file)]
    assert not missing


def test_every_claim_of_the_page_names_a_test() -> None:
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    claims = [line for line in lines if line.startswith("| ") and not line.startswith("| claim")]
    assert len(claims) > 20
    assert not [line for line in claims if "::test_" not in line]


def functions_of(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
