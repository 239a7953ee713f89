"""kvpoold as a command: what it says when it cannot start, and what a signal does before it is ready."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Timeout
from kvpool.client.cli import tools as cli_tools
from kvpool.daemon import command
from kvpool.daemon.__main__ import main
from kvpool.daemon.settings.config import Config
from kvpool.daemon.system.logs import start_logging
from kvpool.model.backend import Backend, BackendLimits, Progress
from kvpool.model.loading import LoadedModel
from tests.support.daemon_process import DaemonProcess, eventually
from tests.support.numpy_backend import NumpyBackend
from tests.support.tiny_model import write_tiny_llama


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a model in it, and nothing of ours in the environment."""
    for name in list(os.environ):
        if name.startswith("KVPOOL_"):
            monkeypatch.delenv(name)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with tempfile.TemporaryDirectory(prefix="kvp") as path:
        write_tiny_llama(Path(path) / "model")
        yield Path(path)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.getLogger("kvpool").handlers.clear()


def numpy_backend(config: Config, model: LoadedModel, limits: BackendLimits, progress: Progress) -> Backend:
    return NumpyBackend(model.program, model.checkpoint, limits)


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        ([], 2, "model: nothing to serve; set model to"),
        (["--model", "nothing/here"], 1, "nothing/here: no such file or directory"),
        (
            ["--model", "MODEL", "--max-model-len", "513"],
            2,
            "max_model_len 513 is more than the 512 that model was trained",
        ),
        (["--model", "MODEL", "--pool-bytes", "1"], 2, "set pool_bytes to at least 8192"),
        (["--model", "MODEL", "--pool-bytes", "8000GiB"], 2, "lower pool_bytes"),
        (["--model", "MODEL", "--address", "relative"], 2, "address: 'relative' cannot be used"),
        (["--model", "MODEL", "--address", "/no/such/directory/kvpool.sock"], 2, "No such file or directory"),
        (["--threads", "0"], 2, "--threads: '0' cannot be used; set it to a whole number, 1 to 1024 or auto"),
        (["--config", "/no/such/file"], 2, "/no/such/file: No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_left(
    directory: Path, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, says: str
) -> None:
    flags = [str(directory / "model") if flag == "MODEL" else flag for flag in flags]
    if "--address" not in flags:
        flags += ["--address", str(directory / "run" / "kvpool.sock")]
    assert main(flags, make_backend=numpy_backend) == status
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert line.startswith("kvpoold: ")
    assert says in line
    assert not (directory / "run").exists() or list((directory / "run").iterdir()) == []


def test_settings_can_be_checked_and_printed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = directory / "kvpool.toml"
    file.write_text("max_num_seqs = 3\n")
    assert main(["--config", str(file), "--check-config"]) == 0
    assert main(["--config", str(file), "--print-config", "--threads", "2"]) == 0
    printed = capsys.readouterr().out
    assert "\nmax_num_seqs = 3\n" in printed
    assert "\nthreads = 2\n" in printed
    file.write_text(printed)
    assert main(["--config", str(file), "--check-config"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["--config", str(file), "--check-config", "--prefix-cache=off", "--prefix-ttl-s=9"]) == 0
    assert capsys.readouterr().err == "kvpoold: prefix_ttl_s = 9.0 has no effect: prefix_cache is off\n"
    file.write_text("max_num_seqs = none\n")
    assert main(["--config", str(file), "--check-config"]) == 2


def test_logs_are_json_lines_unless_a_person_looks(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("kvpool.test")
    start_logging("info", "auto")
    log.debug("not this")
    log.warning("a %s", "line\nof two")
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"], first["logger"]) == ("warning", "a line\nof two", "kvpool.test")
    assert "ValueError: bad" in second["traceback"]
    start_logging("debug", "plain")
    log.debug("this")
    log.info("and this")
    assert [line[9:] for line in capsys.readouterr().err.splitlines()] == ["debug: this", "and this"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_is_ready_leaves_nothing(number: signal.Signals) -> None:
    daemon = DaemonProcess("loading")
    try:
        daemon.start(wait=False)
        assert eventually(lambda: "loading for ever" in daemon.log, 30.0)
        with pytest.raises(Timeout):  # the socket takes connections, and queues what they say
            daemon.client(timeout_s=0.2).connect()
        daemon.signal(number)
        assert daemon.wait() == 128 + number
        assert list(daemon.path.parent.iterdir()) == []
    finally:
        daemon.__exit__()


def test_a_client_that_came_while_the_model_was_loading_is_served() -> None:
    daemon = DaemonProcess()
    try:
        daemon.start(wait=False)
        assert eventually(daemon.path.exists, 30.0)
        with daemon.client(timeout_s=30.0) as client:
            assert client.generate("The sea", max_tokens=2, ignore_eos=True).finish_reason == "length"
    finally:
        daemon.__exit__()


def test_without_the_daemons_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_tools, "REQUIRED", ("numpy", "no_such_package"))
    assert command.main() == 1
    assert capsys.readouterr().err == "kvpoold: needs no_such_package; install them with pip install 'kvpool[daemon]'\n"
