"""A running request, for asyncio: `async for` over its tokens, or await its result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from .aio_connection import AsyncConnection
from .core import EndOfStream
from .results import Result, TokenEvent
from .stream_state import StreamState
from .wire.errors import KVPoolError, Timeout


class AsyncStream:
    """Iterable once; an async context manager that cancels what is unfinished when it is left. Dropping the last
    reference to an unfinished stream cancels it too."""

    def __init__(self, connection: AsyncConnection, state: StreamState, timeout_s: float) -> None:
        self._connection = connection
        self._state = state
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        state.on_change = self._changed.set

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def paused(self) -> str | None:
        """Why the daemon has paused this request, or None."""
        return self._state.paused

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """As `Stream.logits`."""
        return self._state.last_row("logits")

    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """As `Stream.hidden`."""
        return self._state.last_row("hidden")

    @property
    def done(self) -> bool:
        """Everything about this request has arrived."""
        return self._state.done

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next token. Raises the request's error, or Timeout naming stream_timeout_s."""
        try:
            event = self._read()
            self._connection.flush()
            if event is not None:
                return event
            return await self._connection.wait(
                self._changed, self._read, self._timeout_s, "stream_timeout_s", "the next token"
            )
        except EndOfStream:
            raise StopAsyncIteration from None

    def _read(self) -> TokenEvent | None:
        return self._connection.core.read(self._state)

    async def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end. Raises the request's error when it was refused, was lost, or all its sequences failed;
        Timeout after `timeout_s` in all, or (None) when nothing came for stream_timeout_s."""
        if timeout_s is None:
            while not self._state.done:
                await self._wait_past(self._state.num_received)
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    while not self._state.done:
                        await self._wait_past(self._state.num_received)
            except TimeoutError as error:
                if isinstance(error, KVPoolError):
                    raise
                raise Timeout(f"waited {timeout_s:g} s for the result", field="timeout_s") from None
        return self._state.result()

    async def _wait_past(self, num_before: int) -> None:
        def progress() -> bool | None:
            self._connection.core.read_all(self._state)
            return True if self._state.done or self._state.num_received > num_before else None

        await self._connection.wait(self._changed, progress, self._timeout_s, "stream_timeout_s", "the next token")

    def cancel(self) -> None:
        """Ask the daemon to stop. What was generated so far still comes, with finish_reason `cancelled`."""
        self._connection.core.cancel(self._state)
        self._connection.flush()

    def close(self) -> None:
        """Cancel if unfinished, and read no more. Idempotent."""
        if not self._state.done and not self._state.abandoned:
            self._state.abandon()
            self.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._state.done and not self._state.abandoned:
            self._connection.drop(self._state)
