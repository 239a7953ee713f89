"""The pool as it is now, again and again: out of the daemon's shared map where that is allowed, else by asking."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import calls
from ..arena.pool_map import PoolMap
from ..core import State
from ..wire.errors import ConnectionLost, NotOwner, Unsupported

if TYPE_CHECKING:
    from ..client import Client


class LiveMap:
    """`read` it as often as you like: a map that is shared costs the daemon nothing to look at. Only administrators may
    share it; others get what `Client.pool_map` gives them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        try:
            client._ask(calls.watch_map())
            self.shared = True
        except (NotOwner, Unsupported):
            self.shared = False

    def read(self) -> PoolMap:
        """Raises KVPoolError: ConnectionLost when the daemon is gone, Timeout when it hangs."""
        if not self.shared:
            return self._client.pool_map()
        connection = self._client._connection
        with connection.using():
            pass  # what has arrived is taken in: also the end of the daemon
        read = connection.wait(self._reader, connection.timeout_s, "timeout_s", "the pool map")
        return read()

    def _reader(self) -> Callable[[], PoolMap] | None:
        core = self._client._connection.core
        if core.state is State.DISCONNECTED:
            raise core.last_error or ConnectionLost("not connected")
        return None if core.shared.pool_map is None else core.shared.pool_map.read
