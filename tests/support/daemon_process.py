"""A real kvpoold in a process of its own, on a socket of its own, with the tiny model."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvpool.client import Client
from kvpool.model.loading import LoadedModel, load_model
from tests.support.tiny_model import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 200.0  # a cold kernel cache compiles first
STOP_TIMEOUT_S = 20.0


class DaemonProcess:
    """`with DaemonProcess(max_num_seqs=4) as daemon:` starts one and waits for READY, as a service manager does."""

    def __init__(self, backend: str = "numpy", *, config: str = "", **settings: Any) -> None:
        """`settings` are flags of kvpoold, `config` the text of its configuration file."""
        self.directory = Path(tempfile.mkdtemp(prefix="kvpd"))  # short: socket paths have at most 107 bytes
        self.model_path = write_tiny_llama(self.directory / "model")
        self.path = self.directory / "run" / "kvpool.sock"
        self.config_path = self.directory / "kvpool.toml"
        self.config_path.write_text(config)
        self.log_path = self.directory / "log"
        defaults = {"max_num_batched_tokens": 64, "max_model_len": 256, "max_num_seqs": 16, "pool_bytes": "2MiB"}
        flags = defaults | settings | {"model": self.model_path, "address": self.path, "config": self.config_path}
        self.command = [sys.executable, str(ROOT / "tests" / "support" / "daemon_main.py"), backend]
        self.command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        self.process: subprocess.Popen[bytes] | None = None
        self.pass_fds: tuple[int, ...] = ()
        self.environ: dict[str, str] = {}  # more of it, for the next start
        self.manager: socket.socket | None = None  # hears what a service manager would

    @property
    def address(self) -> str:
        return str(self.path)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def model(self) -> LoadedModel:
        return load_model(self.model_path)

    def start(self, *, wait: bool = True) -> DaemonProcess:
        notify = self.directory / "notify"
        notify.unlink(missing_ok=True)
        if self.manager is not None:
            self.manager.close()
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(notify))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
        environ |= {"NOTIFY_SOCKET": str(notify), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=environ | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=self.pass_fds,
            )
        if wait and not any("READY=1" in told for told in self.told(START_TIMEOUT_S)):
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the daemon did not start:\n{self.log}")
        return self

    def told(self, timeout_s: float) -> Iterator[str]:
        """What the service manager hears, until the time is over or the daemon ends."""
        assert self.manager is not None
        assert self.process is not None
        self.manager.settimeout(0.05)
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                yield self.manager.recv(65536).decode()

    def client(self, **options: Any) -> Client:
        return Client(self.address, **({"timeout_s": 10.0, "stream_timeout_s": 30.0} | options))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit status."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM, twice if need be; the exit status."""
        if self.process is None:
            return 0
        for _ in range(2):
            if self.process.poll() is None:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.process.wait(STOP_TIMEOUT_S)
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            if self.manager is not None:
                self.manager.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    # Looking

    def cpu_ticks(self) -> int:
        """Clock ticks of CPU that the daemon has used, in user and kernel mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    def context_switches(self) -> int:
        """Times that any of its threads has gone to sleep: what wake-ups cost."""
        total = 0
        for status in Path(f"/proc/{self.pid}/task").glob("*/status"):
            lines = status.read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
        return total

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident_kib(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether the condition comes true in time, looked at often."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True


def at_rest(client: Client) -> bool:
    """No sequence is left, every block is free or only cached, and the books agree."""
    stats = client.stats()
    alive = stats["sequences_running"] + stats["sequences_waiting"] + stats["sequences_paused"]
    free = stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    return bool(alive == 0 and free and client.fsck()["consistent"])


@contextlib.contextmanager
def left_clean(daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """For fixtures: after the test the daemon must come to rest within a second, and still be the same process."""
    pid = daemon.pid
    yield daemon
    assert daemon.process is not None
    assert daemon.process.poll() is None, f"the daemon ended:\n{daemon.log}"
    assert daemon.pid == pid
    with daemon.client() as client:
        assert eventually(lambda: at_rest(client), 1.0), client.ps()
