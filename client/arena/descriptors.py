"""What a session shares with its daemon: descriptors as they come over the lifeline, and what they are mapped to."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from ..session_arena import SessionArena
from ..wire.errors import ConnectionLost, ProtocolError, Unsupported
from ..wire.messages import MAX_ROWS_BYTES, Generate, Submit
from ..wire.schema import Blob, Mismatch
from .map_segment import MapReader

SHORT = "no descriptor was left for shared memory: raise the limit (ulimit -n) and connect again"


class OutOfDescriptors(ConnectionLost):
    """An arena came, and this process cannot have it. The daemon does not know, so this session ends; the next one says
    hello without asking for an arena."""


class SharedMemory:
    """Empty until the daemon passes something. `close` gives everything back; it may be filled again afterwards."""

    def __init__(self) -> None:
        self.out_of_descriptors = False  # when the arena came
        self.arena: SessionArena | None = None
        self.pool_map: MapReader | None = None
        self._fds: deque[int] = deque()  # came already, their frames not yet

    def take_fds(self, fds: Sequence[int]) -> None:
        """Descriptors that came, in the order of their frames; they are ours to close."""
        self._fds.extend(fds)

    def enter_arena(self) -> None:
        """The frame of the arena came. Raises ProtocolError for a descriptor that is none, and OutOfDescriptors."""
        if len(self._fds) < 2:  # the kernel had none for what came
            self._go_without()
        with self._next_fd() as fd:
            bell_fd = self._fds.popleft()
            try:
                self.arena = SessionArena(fd, bell_fd)
            except OSError:  # mapping takes a descriptor, too
                os.close(bell_fd)
                self._go_without()
            except BaseException:
                os.close(bell_fd)
                raise

    def _go_without(self) -> NoReturn:
        self.out_of_descriptors = True
        raise OutOfDescriptors(SHORT)

    def check_wanted(self, message: Submit | Generate) -> None:
        """Raises Unsupported for logits where the daemon shares memory, and this process could not map it."""
        if self.out_of_descriptors and isinstance(message, Submit) and message.want_logits:
            raise Unsupported(SHORT, field="want_logits")

    def map_pool(self) -> None:
        """The frame of the pool map came. Raises ProtocolError for one that is none, ConnectionLost without one."""
        none_left = ConnectionLost("this process has no descriptor left for the pool map (ulimit -n)")
        if not self._fds:
            raise none_left
        with self._next_fd() as fd:
            try:
                before, self.pool_map = self.pool_map, MapReader(fd)
            except OSError:  # mapping takes a descriptor, too
                raise none_left from None
        if before is not None:
            before.close()

    @contextmanager
    def _next_fd(self) -> Iterator[int]:
        fd = self._fds.popleft()
        try:
            yield fd
        finally:
            os.close(fd)

    def read_ring(self) -> bool:
        """Give tokens that came to their streams; whether any came. Raises ProtocolError for a ring that cannot be."""
        return self.arena is not None and self.arena.read()

    def settle_rows(self) -> None:
        """Give back the places of rows that the program has no more."""
        if self.arena is not None:
            self.arena.rows.settle_ended()

    @property
    def bell_fd(self) -> int:
        """Polls readable when tokens came to the ring after `may_sleep`; -1 where there is no ring."""
        return -1 if self.arena is None else self.arena.bell_fd

    def may_sleep(self) -> bool:
        """To be asked before waiting for `bell_fd`: False where there are tokens already."""
        return self.arena is None or self.arena.ring.may_sleep()

    def stay_awake(self) -> None:
        """`may_sleep` will be asked before waiting again."""
        if self.arena is not None:
            self.arena.ring.stay_awake()

    def read_rows(self, data: bytes | tuple[int, int]) -> bytes:
        """Rows that came inside their message, or lie in the arena, where their place is given back."""
        if isinstance(data, bytes):
            return data
        if self.arena is None:
            raise ProtocolError("this session has no arena", field="data")
        return self.arena.bulk.take(*data)

    def resolve(self, value: Any) -> Any:
        """An answer's value, with `data` in place of `in_arena`, which says where in the arena that lies."""
        if not isinstance(value, dict) or "in_arena" not in value:
            return value
        try:
            place = Blob(MAX_ROWS_BYTES).check(value["in_arena"])
        except Mismatch as fault:
            raise ProtocolError(fault.message, field="value.in_arena") from None
        rest = {name: item for name, item in value.items() if name != "in_arena"}
        return rest | {"data": self.read_rows(place)}

    def _drop_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())

    def close(self) -> None:
        self._drop_fds()
        if self.arena is not None:
            self.arena.close()
        if self.pool_map is not None:
            self.pool_map.close()
        self.arena = self.pool_map = None
