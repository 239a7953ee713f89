"""A running request, for programs with threads: iterate over its tokens, or wait for its result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from .connection import Connection
from .core import EndOfStream
from .results import Result, TokenEvent
from .stream_state import StreamState
from .wire.errors import Timeout


class Stream:
    """Iterable once; a context manager that cancels what is unfinished when it is left. Dropping the last reference to
    an unfinished stream cancels it too."""

    def __init__(self, connection: Connection, state: StreamState, timeout_s: float) -> None:
        self._connection = connection
        self._state = state
        self._timeout_s = timeout_s

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def paused(self) -> str | None:
        """Why the daemon has paused this request, or None."""
        return self._state.paused

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """(vocab_size,) raw logits of the token that was read last, read-only; with want_logits. It is a view of memory
        that the daemon wrote, and stays as it is as long as the program has it. Raises ConnectionLost for a token that
        had to be sent again after a reconnect (its event's logits are None)."""
        return self._state.last_row("logits")

    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """(layers, hidden_size): what the layers of `hidden_layers` made of the position that the token read last was
        drawn from, read-only. Raises ConnectionLost as `logits`."""
        return self._state.last_row("hidden")

    @property
    def done(self) -> bool:
        """Everything about this request has arrived."""
        return self._state.done

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        """The next token. Raises the request's error, or Timeout naming stream_timeout_s when none came for so long."""
        core, state = self._connection.core, self._state
        try:
            return self._connection.wait(
                lambda: core.read(state), self._timeout_s, "stream_timeout_s", "the next token"
            )
        except EndOfStream:
            raise StopIteration from None

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end. Raises the request's error when it was refused, was lost, or all its sequences failed;
        Timeout after `timeout_s` in all, or (None) when nothing came for stream_timeout_s."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._state.done:
            num_before = self._state.num_received
            if deadline is None:
                self._wait_past(num_before, self._timeout_s, "stream_timeout_s")
            else:
                try:
                    self._wait_past(num_before, max(0.0, deadline - time.monotonic()), "timeout_s")
                except Timeout:
                    raise Timeout(f"waited {timeout_s:g} s for the result", field="timeout_s") from None
        return self._state.result()

    def _wait_past(self, num_before: int, limit_s: float, field: str) -> None:
        def progress() -> bool | None:
            self._connection.core.read_all(self._state)
            return True if self._state.done or self._state.num_received > num_before else None

        self._connection.wait(progress, limit_s, field, "the next token")

    def cancel(self) -> None:
        """Ask the daemon to stop. What was generated so far still comes, with finish_reason `cancelled`."""
        with self._connection.using() as core:
            core.cancel(self._state)

    def close(self) -> None:
        """Cancel if unfinished, and read no more. Idempotent."""
        if not self._state.done and not self._state.abandoned:
            self._connection.drop(self._state)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
