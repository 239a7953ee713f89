"""The client's ends of its session's arena, and which request's tokens come through its ring."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace

from .arena.arena import Arena
from .arena.regions import BulkReader, UploadWriter
from .arena.ring import MAX_HANDLE, RingReader
from .arena.rows import RowReader
from .stream_state import StreamState
from .wire.messages import Generate, Submit

MIN_UPLOAD_BYTES = 4096
"""Shorter prompts travel inside their Submit: an answer to wait for would cost more than the copies it saves."""


class SessionArena:
    """Made of descriptors that came over the lifeline: `fd` stays the caller's, `bell_fd` is the arena's from now on.
    Raises as `Arena.open`."""

    def __init__(self, fd: int, bell_fd: int) -> None:
        self._arena = Arena.open(fd)
        self._upload = UploadWriter(self._arena)
        self.bulk = BulkReader(self._arena)
        self.rows = RowReader(self._arena)
        self.ring = RingReader(self._arena, self.rows)
        self.bell_fd = bell_fd
        self._close_bell = weakref.finalize(self, os.close, bell_fd)  # also of a client that is only dropped
        self._close_bell.atexit = False  # a daemon thread may still poll it
        self._streams: dict[int, StreamState] = {}  # by handle
        self._handles: dict[str, int] = {}  # by request id
        self._last_handle = 0

    def prepare(self, message: Submit | Generate) -> Submit | Generate:
        """The message with a handle for its tokens, and a long prompt moved to the upload region. `follow` its stream
        once it is sent, else `settle` it."""
        self._last_handle = self._last_handle % MAX_HANDLE + 1
        message = replace(message, handle=self._last_handle)
        if not isinstance(message, Submit) or not isinstance(message.prompt, bytes):
            return message
        if len(message.prompt) < MIN_UPLOAD_BYTES:
            return message
        upload = self._upload.put(message.request_id, message.prompt)
        return message if upload is None else replace(message, prompt=None, upload=upload)

    def settle(self, request_id: str) -> None:
        """The daemon has taken the request, or refused it: what was uploaded for it is not needed any more."""
        self._upload.settle(request_id)

    def follow(self, stream: StreamState) -> None:
        """The stream of the message that was prepared last."""
        self._streams[self._last_handle] = stream
        self._handles[stream.request_id] = self._last_handle

    def forget(self, stream: StreamState) -> None:
        """The request is over."""
        self._streams.pop(self._handles.pop(stream.request_id, -1), None)

    def read(self) -> bool:
        """Give every token in the ring to its stream; whether there were any. Raises ProtocolError for a ring that
        cannot be."""
        tokens = self.ring.read()
        for handle, event in tokens:
            stream = self._streams.get(handle)
            if stream is not None:
                stream.push_event(event)
        return bool(tokens)

    def close(self) -> None:
        self.rows.close()
        self._arena.close()
        self._close_bell()
