"""What it costs to bring rows of logits from one process to another, for `bench.ipc`."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvpool.client import Client
from kvpool.client.arena.arena import Arena
from kvpool.client.arena.rows import RowReader, RowWriter
from kvpool.client.wire.protocol import TokenBatch
from kvpool.daemon.engine.engine import Output
from kvpool.daemon.engine.prompt_rows import Rows
from kvpool.daemon.engine.request import Fresh, Request
from kvpool.daemon.engine.ring_tokens import RingTokens
from kvpool.daemon.serving.arenas import layout_for

from .ipc_rig import VOCAB_SIZE, Bench, Board, Given, clients, other_threads_s

ROWS = 3200  # the arena several times over: its first pages cost more than the copies
ROWS_AHEAD = 8  # rows that the daemon may be ahead of the reader


def copy_speeds() -> tuple[float, float, float]:
    """GB/s of a row into memory of its own, into the arena, and to an array of the client's, by one process."""
    layout = layout_for(vocab_size=VOCAB_SIZE, max_model_len=131_072)
    count = layout.num_rows
    pages = mmap.mmap(-1, (1 + count) * 4 * VOCAB_SIZE)  # where they begin in a page decides how fast a copy is
    row, *targets = np.frombuffer(pages, np.float32).reshape(-1, VOCAB_SIZE)
    row[:] = np.arange(VOCAB_SIZE)
    arena, fd = Arena.create(layout)
    os.close(fd)
    writer, reader = RowWriter(arena), RowReader(arena)
    times: list[list[float]] = [[], [], []]
    for i in range(ROWS):
        marks = [time.perf_counter()]
        np.copyto(targets[i % count], row)
        marks.append(time.perf_counter())
        place = writer.put(row) or 0
        marks.append(time.perf_counter())
        reader.take(place)
        marks.append(time.perf_counter())
        for kind, (begin, end) in enumerate(pairwise(marks)):
            times[kind].append(end - begin)
    reader.close()
    arena.close()
    plain, into, out = (row.nbytes / statistics.median(kind) / 1e9 for kind in times)
    return plain, into, out


def stream_logits(bench: Bench, row: NDArray[np.float32], arena: bool, together: int) -> tuple[float, float, float]:
    """GB/s from end to end, and for each second of CPU of the daemon and of the client, with `together` rows a step."""
    board, steps = Board(1), ROWS // together

    def work(pool: Client, number: int) -> None:
        before = time.process_time()
        streams = [iter(pool.submit([1], max_tokens=10**5, want_logits=True)) for _ in range(together)]
        for count in range(1, steps + 1):
            if any(next(stream).logits is None for stream in streams):
                raise SystemExit("logits are missing")
            board.read[number] = count
        board.cpu_s[number] = time.process_time() - before
        for stream in streams:
            for _ in stream:
                raise SystemExit("a token too many")

    with clients(bench, 1, arena, work):
        bench.serve_until(lambda: len(bench.requests) == together)
        given = [logits_of(bench.requests, index, row) for index in range(steps)]
        thread_s, zeromq_before, begin = 0.0, other_threads_s(), time.perf_counter()
        for index in range(steps):
            while board.read[0] < index - max(1, ROWS_AHEAD // together):
                os.sched_yield()  # the shortest sleep is longer than a row takes
            before = time.thread_time()
            bench.give(given[index])
            thread_s += time.thread_time() - before
        while board.read[0] < steps:
            os.sched_yield()
        wall_s, zeromq_s = time.perf_counter() - begin, other_threads_s() - zeromq_before
        bench.finish()
    total = steps * together * row.nbytes / 1e9
    return total / wall_s, total / (thread_s + zeromq_s), total / float(board.cpu_s[0])


def logits_of(requests: list[Request], index: int, row: NDArray[np.float32]) -> Given:
    fresh: Fresh = (index, (1,), (), (), ())
    outputs, tokens = [], RingTokens()
    for request in requests:
        if request.handle is None:
            outputs.append(Output(request, Rows("logits", index, row[np.newaxis])))
            outputs.append(Output(request, TokenBatch(request.request_id, 0, *fresh)))
        else:
            tokens.add(request, 0, fresh, [row])
    return outputs, tokens


def show_logits(bench: Bench) -> None:
    row = np.random.default_rng(0).standard_normal(VOCAB_SIZE).astype(np.float32)
    plain, into, out = copy_speeds()
    print(f"\nLogits, {VOCAB_SIZE:,} float32 a row, {ROWS} rows\n")
    print(f"within one process: plain copy {plain:.1f} GB/s, into the arena {into:.1f}, out of it {out:.1f}")
    for arena in (False, True):
        for together in (1, 16):
            wall, daemon, client = stream_logits(bench, row, arena, together)
            print(
                f"{'arena' if arena else 'messages':>9}, {together:>2} a step: {wall:.2f} GB/s from end to end; "
                f"for each second of CPU: daemon {daemon:.2f} GB/s, client {client:.2f} GB/s"
            )
