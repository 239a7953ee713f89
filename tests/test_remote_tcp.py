"""Clients of other machines: tcp with keys, as real sockets on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvpool.client import (
    AsyncClient,
    Client,
    ConnectionLost,
    InvalidArgument,
    KVPoolError,
    NotFound,
    NotOwner,
    QuotaExceeded,
    Unsupported,
)
from kvpool.client.address import RemoteAddress, resolve_address
from kvpool.client.calls import watch_map
from kvpool.client.cli.__main__ import main as kvpool
from kvpool.client.curve import KeyPair, client_keys, parse_key, read_key_file, read_public_key, write_key_files
from kvpool.daemon.serving.endpoint import open_endpoint
from kvpool.daemon.serving.keyring import RemoteUser, read_authorised_keys
from kvpool.daemon.settings.config import Config
from kvpool.daemon.settings.options import ConfigError
from tests.support.daemon_process import DaemonProcess, at_rest, eventually

ALICE, BOB = 20_001, 20_002
TIMEOUT_S = 1.0
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [7] * 40


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class RemoteDaemon:
    """A daemon with a tcp port, keys of its own, and three keys that it knows."""

    def __init__(self, backend: str = "slow", config: str = "") -> None:
        self.process = DaemonProcess(backend, config=config)
        self.directory = self.process.directory
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.server_key = write_key_files(self.directory / "server").public.decode()
        self.keys = {name: write_key_files(self.directory / name) for name in ("alice", "bob", "operator", "stranger")}
        self.authorised = self.directory / "authorised_keys"
        self.authorise(f"alice {ALICE}", f"bob {BOB}", f"operator {ALICE} KEY admin")
        flags = {"tcp-address": self.address, "server-key-file": self.directory / "server"}
        flags |= {"authorised-keys": self.authorised, "remote-timeout-s": TIMEOUT_S}
        self.process.command += [f"--{name}={value}" for name, value in flags.items()]

    def authorise(self, *lines: str) -> None:
        text = ""
        for line in lines:
            name, user, *marks = line.split()
            text += " ".join([name, user, self.keys[name].public.decode(), *marks[1:]]) + "\n"
        self.authorised.write_text(text)

    def client(self, name: str, **options: object) -> Client:
        given = {"timeout_s": 10.0, "server_key": self.server_key, "key_file": str(self.directory / name)} | options
        return Client(self.address, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def remote() -> Iterator[RemoteDaemon]:
    daemon = RemoteDaemon(config=f"[users.{BOB}]\nmax_blocks = 4\n")
    with daemon.process:
        yield daemon


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test did to the shared daemon is over when the next one begins."""
    yield
    if "remote" in request.fixturenames:
        daemon: RemoteDaemon = request.getfixturevalue("remote")
        with daemon.process.client() as pool:
            assert eventually(lambda: at_rest(pool) and pool.stats()["clients"] == 1), pool.ps()


def test_the_same_tokens_as_over_the_local_socket(remote: RemoteDaemon) -> None:
    with remote.process.client() as local, remote.client("alice") as far:
        expected = local.generate("The sea is", max_tokens=40, seed=3, logprobs=2)
        found = far.generate("The sea is", max_tokens=40, seed=3, logprobs=2)
        assert (found.token_ids, found.logprobs, found.text) == (expected.token_ids, expected.logprobs, expected.text)
        assert far.connect().capabilities == ()
        chat = far.open(PROMPT)
        assert chat.fork(at=5).num_tokens == 5
        chat.close()


def test_asyncio_too(remote: RemoteDaemon) -> None:
    async def ask() -> list[int]:
        async with AsyncClient(
            remote.address, server_key=remote.server_key, key_file=str(remote.directory / "alice")
        ) as pool:
            stream = await pool.submit(PROMPT, max_tokens=10, **GREEDY)
            return (await stream.result()).token_ids

    with remote.process.client() as local:
        assert asyncio.run(ask()) == local.generate(PROMPT, max_tokens=10, **GREEDY).token_ids


def test_keys_from_the_environment(remote: RemoteDaemon, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setenv("KVPOOL_SERVER_KEY", str(remote.directory / "server.pub"))
    monkeypatch.setenv("KVPOOL_KEY_FILE", str(remote.directory / "alice"))
    monkeypatch.setenv("KVPOOL_ADDRESS", remote.address)
    assert kvpool(["ps"]) == 0
    assert kvpool(["reload"]) == 1


def messages(pool: Client) -> int:
    return int(pool.stats()["messages_total"])


@pytest.mark.parametrize(
    ("name", "server", "message"),
    [
        ("stranger", "server", "does not know this client's key"),
        ("alice", "stranger", "the daemon's is another than server_key"),
        ("", "", "set server_key and key_file"),
    ],
)
def test_who_has_not_the_right_keys_is_turned_away_at_once(
    remote: RemoteDaemon, name: str, server: str, message: str
) -> None:
    keys = {"key_file": str(remote.directory / name), "server_key": str(remote.directory / f"{server}.pub")}
    with remote.process.client() as local:
        assert eventually(lambda: messages(local) == messages(local) - 1)  # what the last test said has been read
        before = messages(local)
        begin = time.monotonic()
        with pytest.raises(ConnectionLost, match=message):
            Client(remote.address, timeout_s=10.0, **(keys if name else {})).connect()
        assert time.monotonic() - begin < 5
        assert messages(local) == before + 1  # that one is our own question
        assert local.stats()["clients"] == 1


def test_where_nobody_listens_the_error_comes_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(ConnectionLost, match="no daemon listens"):
        Client(f"tcp://127.0.0.1:{free_port()}", timeout_s=10.0).connect()
    assert time.monotonic() - begin < 5


def test_a_key_acts_in_its_users_name_and_under_its_limits(remote: RemoteDaemon) -> None:
    with remote.client("alice") as alice, remote.client("bob") as bob, remote.process.client() as local:
        with alice.submit("secret", request_id="hers", max_tokens=100, window=4, **GREEDY) as stream:
            next(iter(stream))
            assert [row["uid"] for row in alice.ps()] == [ALICE]
            assert [row["request_id"] for row in local.ps()] == ["hers"]
            assert bob.ps() == []
            with pytest.raises(NotFound):
                bob.cancel("hers")
            with pytest.raises(NotFound):
                bob.follow("hers").result()
        with pytest.raises(QuotaExceeded):
            bob.generate([7] * 100, max_tokens=2)


def test_administration_only_with_a_marked_key(remote: RemoteDaemon) -> None:
    """Whatever its user may do on this machine."""
    with remote.client("alice") as alice, remote.client("operator") as operator:
        for action in (alice.drain, alice.reload, alice.fsck):
            with pytest.raises(NotOwner):
                action()
        assert operator.fsck()["consistent"]
        assert not operator.reload()["changed"]
        with pytest.raises(Unsupported, match="memory of another machine"):
            operator._ask(watch_map())


def test_a_live_idle_client_is_never_taken_for_dead(remote: RemoteDaemon) -> None:
    with remote.client("alice") as pool:
        session = pool.connect().session_id
        time.sleep(4 * TIMEOUT_S)
        assert pool.stats()["clients"] >= 1
        assert pool.connect().session_id == session


FOREVER = """
import sys
from kvpool.client import Client
pool = Client(sys.argv[1], server_key=sys.argv[2], key_file=sys.argv[3])
stream = pool.submit([7] * 40, request_id="mine", max_tokens=200, window=2, temperature=0.0, ignore_eos=True)
next(stream)
print("streaming", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_client_is_settled(remote: RemoteDaemon, number: int) -> None:
    """Killed, its connection closes; stopped, as a machine without power is, it misses its heartbeats."""
    child = subprocess.Popen(
        [sys.executable, "-c", FOREVER, remote.address, remote.server_key, str(remote.directory / "alice")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"streaming\n"
        with remote.process.client() as local:
            assert local.stats()["clients"] == 2
            child.send_signal(number)
            assert eventually(lambda: local.stats()["clients"] == 1, 2.0 if number == signal.SIGKILL else 10.0)
            assert local.ps() == []
    finally:
        child.kill()
        child.communicate()


def test_a_revoked_key_ends_its_sessions_at_the_reload_and_nobody_elses(remote: RemoteDaemon) -> None:
    with remote.client("alice") as alice, remote.client("bob") as bob, remote.process.client() as local:
        alice.connect()
        session = bob.connect().session_id
        stream = alice.submit(PROMPT, max_tokens=150, **GREEDY)
        next(iter(stream))
        remote.authorise(f"bob {BOB}")
        try:
            local.reload()
            with pytest.raises(ConnectionLost, match="key_revoked"):
                stream.result()
            with pytest.raises(KVPoolError):
                alice.stats()
            assert bob.stats()["clients"] == 2
            assert bob.connect().session_id == session
        finally:
            remote.authorise(f"alice {ALICE}", f"bob {BOB}", f"operator {ALICE} KEY admin")
            local.reload()
        alice.stats()  # known again


def test_a_wrong_file_of_keys_changes_nothing(remote: RemoteDaemon) -> None:
    with remote.client("alice") as alice, remote.process.client() as local:
        session = alice.connect().session_id
        before = remote.authorised.read_text()
        remote.authorised.write_text("alice nonsense\n")
        try:
            with pytest.raises(InvalidArgument, match=r"authorised_keys:1: write NAME USER.*nothing was changed"):
                local.reload()
        finally:
            remote.authorised.write_text(before)
        assert alice.stats()["clients"] == 2
        assert alice.connect().session_id == session


def test_bytes_that_are_no_handshake_disturb_nobody(remote: RemoteDaemon) -> None:
    host, port = "127.0.0.1", int(remote.address.rsplit(":", 1)[1])
    with remote.client("alice") as alice, contextlib.ExitStack() as stack:
        alice.connect()
        for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, os.urandom(4096)):
            stream = stack.enter_context(socket.create_connection((host, port)))
            stream.sendall(garbage)
        assert len(alice.generate(PROMPT, max_tokens=20, **GREEDY).token_ids) == 20


def test_a_restart_is_bridged_as_on_one_machine() -> None:
    daemon = RemoteDaemon("paced")
    with daemon.process, daemon.client("alice", reconnect_s=30.0) as pool:
        expected = pool.generate(PROMPT, max_tokens=60, seed=1).token_ids
        stream = pool.submit(PROMPT, max_tokens=60, seed=1)
        events = [next(iter(stream)) for _ in range(5)]
        daemon.process.kill()
        daemon.process.start()
        events += list(stream)
        assert [event.token_id for event in events if event.token_id >= 0] == expected == stream.result().token_ids


def test_without_keys_on_loopback_everybody_is_nobody() -> None:
    daemon = DaemonProcess("numpy")
    address = f"tcp://127.0.0.1:{free_port()}"
    daemon.command += [f"--tcp-address={address}"]
    with daemon, Client(address, timeout_s=10.0) as pool, pool.submit(PROMPT, max_tokens=100, window=2) as stream:
        next(iter(stream))
        assert [row["uid"] for row in pool.ps()] == [65534]
        with pytest.raises(NotOwner):
            pool.reload()


# The border, without a daemon


def test_without_keys_only_loopback() -> None:
    for given in ({"tcp_address": "tcp://192.0.2.1:9"}, {"tcp_address": "tcp://0.0.0.0:9"}):
        with pytest.raises(ConfigError, match="set server_key_file and authorised_keys"):
            load(given)
    with pytest.raises(ConfigError, match="authorised_keys: is needed together"):
        load({"server_key_file": "/x"})
    with pytest.raises(ConfigError, match="tcp_address"):
        load({"address": "tcp://127.0.0.1:9"})
    with pytest.raises(InvalidArgument, match="KVPOOL_KEY_FILE"):
        resolve_address("tcp://192.0.2.1:9", {})
    with pytest.raises(InvalidArgument, match="key_file"):
        resolve_address("tcp://192.0.2.1:9", {"KVPOOL_SERVER_KEY": "x"})
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        resolve_address("tcp://nowhere", {})
    assert resolve_address("tcp://[::1]:9", {}) == RemoteAddress("::1", 9)
    assert str(resolve_address("tcp://[::1]:9", {})) == "tcp://[::1]:9"


def load(flags: dict[str, str]) -> Config:
    from kvpool.daemon.settings.config import load as load_config

    return load_config(flags, {}, None)


def test_key_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "desk"
    assert kvpool(["keygen", str(path)]) == 0
    pair = read_key_file(path)
    said = capsys.readouterr().out
    assert f"desk USER {pair.public.decode()}" in said
    assert pair.secret.decode() not in said
    assert pair.secret.decode() not in repr(pair)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_public_key(str(path) + ".pub") == read_public_key(pair.public.decode()) == pair.public
    assert kvpool(["keygen", str(path)]) == 1
    assert read_key_file(path) == pair  # nothing was overwritten
    assert client_keys(str(path) + ".pub", str(path), {}) is not None
    path.chmod(0o640)
    with pytest.raises(InvalidArgument, match="can be read by others; chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize("text", ["", "x", "a" * 40, "a" * 39, '"' * 40, "é" * 40, "\0" * 40])
def test_what_is_no_key(text: str, tmp_path: Path) -> None:
    assert parse_key(text) is None or text == "a" * 40
    path = tmp_path / "k"
    path.write_text(f"{text}\n{text}\n")
    path.chmod(0o600)
    with pytest.raises(InvalidArgument, match="kvpool keygen"):
        read_key_file(path)


KEYS = [KeyPair(*zmq.curve_keypair()) for _ in range(2)]
ONE, TWO = (pair.public.decode() for pair in KEYS)


def test_authorised_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# who\n\n desk  {ALICE}  {ONE}\nops root {TWO} admin\n")
    assert read_authorised_keys(path) == {
        KEYS[0].public: RemoteUser("desk", ALICE, ALICE, KEYS[0].public),
        KEYS[1].public: RemoteUser("ops", 0, 0, KEYS[1].public, admin=True),
    }
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by others"):
        read_authorised_keys(path)


@pytest.mark.parametrize(
    "text",
    [
        "desk",
        f"desk {ALICE}",
        f"desk {ALICE} short",
        f"desk {ALICE} {ONE} root",
        f"desk {ALICE} {ONE} admin more",
        f"desk no-such-user {ONE}",
        f"desk {2**40} {ONE}",
        f"desk {ALICE} {ONE}\ndesk {ALICE} {TWO}",
        f"desk {ALICE} {ONE}\nlap {ALICE} {ONE}",
    ],
    ids=range(9),  # keys are fresh in each process, names of tests must not be
)
def test_lines_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^authorised_keys: {re.escape(str(path))}:[12]: "):
        read_authorised_keys(path)


def test_nothing_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    port = free_port()
    for _ in range(2):
        endpoint = open_endpoint(Config(tcp_address=f"tcp://127.0.0.1:{port}"), tmp_path / "s")
        assert endpoint.remote is not None
        with pytest.raises(ConfigError, match="Address already in use; set a host and port"):
            open_endpoint(Config(tcp_address=f"tcp://127.0.0.1:{port}"), tmp_path / "t")
        endpoint.close()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
