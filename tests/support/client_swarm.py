"""Many client processes for little: one process imports the client, then forks; each child is a client of its own.

Run as a script with an address, a number of children and a JSON map of submit's arguments. A child prints its pid once
its request is accepted (`wait: 0`) or has brought so many tokens (`wait: N`), and then reads on to the end, printing
`pid finish_reason` last.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Swarm:
    """`with Swarm(address, 3, prompt="...", max_tokens=8) as swarm:` waits until all say that they are there."""

    def __init__(self, address: str, count: int, *, wait: int = 0, **submit: Any) -> None:
        command = [sys.executable, __file__, address, str(count), json.dumps(submit | {"wait": wait})]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._count = count
        self.pids: list[int] = []
        self.reasons: dict[int, str] = {}

    def __enter__(self) -> Swarm:
        for line in self._lines():
            pid, *reason = line.split()
            if reason:
                self.reasons[int(pid)] = reason[0]
            else:
                self.pids.append(int(pid))
            if len(self.pids) == self._count:
                return self
        raise AssertionError(f"only {len(self.pids)} of {self._count} clients came up")

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            yield line

    def kill(self) -> None:
        """SIGKILL all of them at once."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def finish(self) -> list[str]:
        """Read to the end: how each request ended."""
        self.reasons |= {int(pid): reason for pid, reason in (line.split() for line in self._lines())}
        return list(self.reasons.values())

    def __exit__(self, *exception: object) -> None:
        for pid in self.pids:
            if pid not in self.reasons:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()


def say(*words: object) -> None:
    """One line in one write, so that lines of different processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def run_child(address: str, arguments: dict[str, Any]) -> None:
    from kvpool.client import Client, KVPoolError

    wait = arguments.pop("wait")
    try:
        with Client(address) as pool, pool.submit(**arguments) as stream:
            if not wait:
                pool.stats()  # answered after the submit: it was accepted
                say(os.getpid())
            for count, _ in enumerate(stream, start=1):
                if count == wait:
                    say(os.getpid())
            say(os.getpid(), stream.result().finish_reason)
    except KVPoolError as error:
        say(os.getpid(), error.code)


def main(address: str, count: int, arguments: dict[str, Any]) -> None:
    import kvpool.client  # noqa: F401  before the forks, so that it is done once

    children = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            run_child(address, arguments)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
