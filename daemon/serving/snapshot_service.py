"""Saving and restoring sequences: blocks are copied between two steps, files are written and read in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from ...client.wire.errors import NotFound, ShuttingDown
from ...client.wire.protocol import Reply, Restore, Save
from ..persistence.snapshot_file import Image
from ..persistence.snapshots import SnapshotStore, check_name
from ..system.background import Background
from .sequence_objects import SequenceObject
from .sessions import Session

if TYPE_CHECKING:
    from .clients import Clients


class SnapshotService:
    """Handlers by kind of message, for `Clients`."""

    def __init__(self, clients: Clients, store: SnapshotStore, background: Background) -> None:
        self._clients = clients
        self._engine = clients.engine
        self._objects = clients.sequences
        self._store = store
        self._background = background
        self.handlers: dict[type[Any], Callable[[Session, Any], None]] = {Save: self._save, Restore: self._restore}

    def _save(self, session: Session, message: Save) -> None:
        check_name(message.name)
        self._background.check_room()
        found = self._objects.own(session, message.sequence_id)
        found.require_idle()
        found.being_saved = True  # until its blocks are copied

        def copy() -> None:
            found.being_saved = False
            if found.sequence.finished:
                raise NotFound(f"{found.name!r} was closed meanwhile", field="sequence_id")
            image, uid, most = self._image(found), found.uid, self._clients.config.max_snapshot_bytes
            self._background.run(lambda: self._store.save(uid, message.name, image, most), answer)

        def answer(saved: Future[int]) -> None:
            def reply() -> None:
                value = {"num_tokens": found.sequence.num_tokens, "num_bytes": saved.result()}
                self._clients.send(session, Reply(self._engine.epoch, message.call_id, value))

            self._clients.attempt(session, message.call_id, reply)

        self._between_steps(session, message.call_id, copy)

    def _image(self, found: SequenceObject) -> Image:
        sequence, runner = found.sequence, self._engine.runner
        token_ids = np.array(sequence.token_ids, dtype=np.int32)
        if self._engine.scheduler.tables.window or not sequence.num_computed_tokens:
            return Image(token_ids, 0, np.empty((0, runner.block_bytes), dtype=np.uint8))
        return Image(token_ids, sequence.num_computed_tokens, runner.read(sequence))

    def _restore(self, session: Session, message: Restore) -> None:
        if self._clients.draining:
            raise ShuttingDown("the daemon shuts down and takes no new work")
        check_name(message.name)
        self._background.check_room()
        uid = session.peer.uid
        self._objects.check_name(uid, message.sequence_id)

        def place(stored: Future[Image]) -> None:
            self._between_steps(session, message.call_id, lambda: self._place(session, message, stored.result()))

        self._background.run(lambda: self._store.restore(uid, message.name), place)

    def _place(self, session: Session, message: Restore, image: Image) -> None:
        """A sequence as the image says, with its blocks if there is room for them."""
        if session.closed:
            return
        made, blocks = self._objects.restore(message.sequence_id, session, image)
        if blocks:
            self._engine.runner.write(blocks, image.blocks)
        made.created_at = self._clients.now
        value = {"num_tokens": made.sequence.num_tokens, "num_computed_tokens": made.sequence.num_computed_tokens}
        self._clients.send(session, Reply(self._engine.epoch, message.call_id, value))

    def _between_steps(self, session: Session, call_id: int, action: Callable[[], None]) -> None:
        self._engine.between_steps(lambda: self._clients.attempt(session, call_id, action))
