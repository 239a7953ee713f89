"""A real `kvpool gateway` in a process of its own, and HTTP in plain sight."""

from __future__ import annotations

import http.client
import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 30.0
TIMEOUT_S = 30.0


class GatewayProcess:
    """`with GatewayProcess(address) as gateway:` starts one and waits until it listens."""

    def __init__(self, address: str, *arguments: str) -> None:
        where = () if "--socket" in arguments else ("--port", "0")
        program = [sys.executable, "-m", "kvpool.client.cli", "--address", address, "gateway"]
        self._command = [*program, *where, *arguments]
        self._socket_path = arguments[arguments.index("--socket") + 1] if "--socket" in arguments else None

    def __enter__(self) -> GatewayProcess:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        self.greeting = self.process.stdout.readline().decode()
        if "listening at " not in self.greeting:
            self.process.kill()
            raise AssertionError(f"the gateway did not start: {self.process.communicate()}")
        self.url = self.greeting.split("listening at ")[1].split(";")[0]
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.stop() == (0, "")

    def stop(self) -> tuple[int, str]:
        """SIGTERM; its exit status, and what it wrote to stderr."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors.decode()

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].partition("/")[0])

    def connect(self, receive_buffer_bytes: int | None = None) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX if self._socket_path else socket.AF_INET)
        sock.settimeout(TIMEOUT_S)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.connect(self._socket_path or ("127.0.0.1", self.port))
        return sock

    def start(
        self,
        path: str,
        body: Any = None,
        *,
        sock: socket.socket | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> http.client.HTTPConnection:
        """A connection on which a request was sent: a POST of `body` as JSON (or as it is), or a GET."""
        connection = http.client.HTTPConnection("localhost")
        connection.sock = self.connect() if sock is None else sock
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {} if body is None else {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, given | dict(headers or {}))
        return connection

    def ask(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any, Mapping[str, str]]:
        """(status, body as JSON, headers)."""
        connection = self.start(path, body, **options)
        try:
            response = connection.getresponse()
            return response.status, json.loads(response.read()), dict(response.headers)
        finally:
            connection.close()

    def cpu_ticks(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    def context_switches(self) -> int:
        total = 0
        for status in Path(f"/proc/{self.process.pid}/task").glob("*/status"):
            lines = status.read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
        return total


def events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The events of a stream, up to [DONE] or its end."""
    while line := response.readline():
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
