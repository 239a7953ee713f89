"""The service manager's side: readiness, status, watchdog and inherited sockets, spoken directly, without a library."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_INHERITED_FD = 3  # sd_listen_fds(3)


@dataclass(slots=True)
class Manager:
    """Tells the manager that started us how we are. Without one (no NOTIFY_SOCKET) every call does nothing."""

    address: str = ""
    watchdog_s: float | None = None  # a message is due at least this often while work is queued

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Manager:
        address = environ.get("NOTIFY_SOCKET", "")
        usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(os.getpid()))
        watched = usec.isdecimal() and int(usec) > 0 and pid == str(os.getpid())
        return cls(address, int(usec) / 1e6 if watched else None)

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        self._send("RELOADING=1")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def watchdog(self) -> None:
        """Health is progress: only the step loop may call this."""
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), address)
        except OSError:
            pass  # a manager that does not listen must not stop the service


def inherited_fds(environ: Mapping[str, str]) -> list[int]:
    """Listening sockets that the manager opened for us, made close-on-exec; empty without socket activation."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = environ.get("LISTEN_FDS", "0")
    fds = list(range(FIRST_INHERITED_FD, FIRST_INHERITED_FD + (int(count) if count.isdecimal() else 0)))
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds


def _one_line(text: str) -> str:
    return " ".join(text.split())
