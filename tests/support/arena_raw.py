"""A client spoken by hand that has an arena, and may write anything into it."""

from __future__ import annotations

import mmap
import os
import socket

from kvpool.client.arena.arena import ARENA, HEADER, Layout
from kvpool.client.lifeline import FrameKind, FrameReader, encode_frame
from kvpool.client.wire.protocol import Hello, Welcome
from tests.support.raw_client import RawClient


class ArenaRaw(RawClient):
    """`enter` first: then there are `layout`, `arena_fd` and `bell_fd` (-1: the caller has closed it)."""

    arena_fd = bell_fd = -1

    def enter(self) -> mmap.mmap:
        self.send(Hello((1,), "raw", 0, (ARENA,)))
        token = self.expect(Welcome).lifeline_token
        self.lifeline = self.connect_lifeline()
        self.lifeline.sendall(encode_frame(FrameKind.TOKEN, token))
        reader, kinds, fds = FrameReader(), [], []
        while FrameKind.ATTACHED not in kinds:
            data, came, _, _ = socket.recv_fds(self.lifeline, 4096, 4)
            fds += came
            kinds += [frame.kind for frame in reader.feed(data)]
        assert kinds == [FrameKind.ARENA, FrameKind.ATTACHED]
        self.arena_fd, self.bell_fd = fds
        size = os.fstat(self.arena_fd).st_size
        self.layout = Layout.of_header(os.pread(self.arena_fd, HEADER.size, 0))
        assert self.layout.total_bytes == size
        return mmap.mmap(self.arena_fd, size)

    def __enter__(self) -> ArenaRaw:
        return self

    def close(self) -> None:
        super().close()
        for fd in (self.arena_fd, self.bell_fd):
            if fd >= 0:
                os.close(fd)
