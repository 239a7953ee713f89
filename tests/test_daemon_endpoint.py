"""The address: who may bind it, with which permissions, and what is left afterwards."""

from __future__ import annotations

import grp
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvpool.daemon.serving.endpoint import Lock, open_endpoint, socket_path
from kvpool.daemon.settings.config import Config
from kvpool.daemon.settings.options import ConfigError


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvp") as directory:  # short: a socket path has at most 107 bytes
        yield Path(directory) / "run" / "kvpool.sock"


def modes(path: Path) -> list[str]:
    return [oct(stat.S_IMODE(p.stat().st_mode)) for p in (path, path.with_name(path.name + ".life"))]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes_are_what_was_set_whatever_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for mode in (0o660, 0o600, 0o666):
            endpoint = open_endpoint(Config(socket_mode=mode), path)
            assert modes(path) == [oct(mode)] * 2
            endpoint.close()
        assert os.umask(umask) == umask
    finally:
        os.umask(before)


def test_group_of_the_sockets(path: Path) -> None:
    group = grp.getgrgid(os.getgid())
    endpoint = open_endpoint(Config(socket_group=group.gr_name), path)
    assert path.stat().st_gid == group.gr_gid
    endpoint.close()
    with pytest.raises(ConfigError, match="socket_group: there is no group 'no-such-group'"):
        open_endpoint(Config(socket_group="no-such-group"), path)
    assert list(path.parent.iterdir()) == []


def test_nothing_is_left(path: Path) -> None:
    fds = os.listdir("/proc/self/fd")
    endpoint = open_endpoint(Config(), path)
    assert {p.name for p in path.parent.iterdir()} == {"kvpool.sock", "kvpool.sock.life", "kvpool.sock.lock"}
    endpoint.close()
    endpoint.close()
    assert list(path.parent.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(fds)


def test_a_second_daemon_is_refused_and_the_first_keeps_its_sockets(path: Path) -> None:
    first = open_endpoint(Config(), path)
    inode = path.stat().st_ino
    with pytest.raises(ConfigError, match=rf"another kvpoold \(pid {os.getpid()}\) serves {path}; stop it"):
        open_endpoint(Config(), path)
    assert path.stat().st_ino == inode
    first.close()
    open_endpoint(Config(), path).close()


def test_sockets_of_a_killed_daemon_are_replaced(path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from kvpool.daemon.serving.endpoint import open_endpoint;"
        "from kvpool.daemon.settings.config import Config; e = open_endpoint(Config(), Path(sys.argv[1]));"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=20)
    assert path.exists()
    open_endpoint(Config(), path).close()
    assert list(path.parent.iterdir()) == []


def test_other_peoples_files_are_not_touched(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        open_endpoint(Config(), path)
    assert path.read_text() == "precious"


def test_the_lock_file_may_vanish_while_it_is_taken(path: Path) -> None:
    path.parent.mkdir()
    lock = Lock.take(path)
    lock.path.unlink()
    other = Lock.take(path)  # another file by now
    assert path.read_text() == f"{os.getpid()}\n"
    other.release()
    lock.release()


def test_a_path_that_cannot_be_used_says_so(path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 102 bytes; set a shorter one"):
        socket_path("/tmp/" + "x" * 100, {})
    with pytest.raises(ConfigError, match="absolute path"):
        socket_path("kvpool.sock", {})
    with pytest.raises(ConfigError, match="No such file or directory; set address to a path that can be written"):
        open_endpoint(Config(), path / "deeper" / "kvpool.sock")


def test_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_path("auto", {"RUNTIME_DIRECTORY": "/run/a:/run/b"}) == Path("/run/a/kvpool.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert socket_path("auto", {"XDG_RUNTIME_DIR": "/run/user/1000"}) == Path("/run/user/1000/kvpool/kvpool.sock")
    assert socket_path("auto", {}) == Path("/run/kvpool/kvpool.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert socket_path("auto", {"XDG_RUNTIME_DIR": "/run/user/0"}) == Path("/run/kvpool/kvpool.sock")
    assert socket_path("ipc:///x/y", {}) == Path("/x/y")


def test_the_managers_sockets_are_adopted_and_left_in_place(path: Path) -> None:
    path.parent.mkdir()
    names = [str(path) + ".life", str(path)]  # in any order
    listening = []
    for name in names:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen()
        listening.append(listener)
    endpoint = open_endpoint(Config(), path, [os.dup(listener.fileno()) for listener in listening])
    endpoint.gate.open()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{path}")
        dealer.send(b"hello")
        assert endpoint.router.poll(5000)
        frames = endpoint.router.recv_multipart(copy=False)
        assert frames[-1].bytes == b"hello"
        assert frames[-1].get("Peer-Address") == f"localhost:{os.getuid()}:{os.getgid()}:{os.getpid()}"
    endpoint.close()
    assert all(Path(name).exists() for name in names)
    with pytest.raises(ConfigError, match="the manager passed"):
        open_endpoint(Config(), path, [os.dup(listening[0].fileno())])
    for listener in listening:
        listener.close()
