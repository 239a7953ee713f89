"""What it costs to bring tokens, prompts and logits from one process to another: the arena against plain messages.

    python -m bench.ipc [--clients 1,8,64] [--tokens 1,64,1000] [--seconds 1.0]

The daemon's side is the real endpoint, sessions and delivery, without an engine: every step hands out a token for each
stream, as a step of a model does; they are made just before, as by an engine, which is not counted. The clients
are real processes that read their streams; all have the same number of them. The next step begins when everybody has
read the last but three, so nobody waits long and nobody runs away.

CPU time is what counts on a machine that has other things to do: of the daemon's own thread while it delivers, of
ZeroMQ's thread (both as the kernel counts them), and of the clients from their first token to their last. Much of it is
system calls and wake-ups, one for each client and step: so it falls with the tokens that a client gets at once.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import zmq
from numpy.typing import NDArray

from kvpool.client import Client
from kvpool.client.arena.arena import ARENA, Arena
from kvpool.client.arena.regions import BulkReader, BulkWriter, Teller
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.stream import Stream
from kvpool.client.wire.protocol import (
    Accepted,
    Finished,
    Goodbye,
    Hello,
    ServerLimits,
    Submit,
    TokenBatch,
    Usage,
    Welcome,
    decode_client_message,
    unpack_token_ids,
)
from kvpool.daemon.engine.engine import Engine, Output
from kvpool.daemon.engine.prompt_rows import Rows
from kvpool.daemon.engine.request import Fresh, Request
from kvpool.daemon.engine.ring_tokens import RingTokens
from kvpool.daemon.serving.arenas import layout_for
from kvpool.daemon.serving.delivery import Delivery
from kvpool.daemon.serving.endpoint import open_endpoint
from kvpool.daemon.serving.parcels import Sent
from kvpool.daemon.serving.sessions import Peer, Session, Sessions
from kvpool.daemon.settings.config import Config

VOCAB_SIZE = 49_152
LIMITS = ServerLimits(4 << 20, 131_072, VOCAB_SIZE, 16, 1024, 64)
AHEAD = 3  # steps that may be under way
TEXTS = (" the", " sea", ",", " is", " deep", ".", " Although", "\n")
PROMPT_IDS = 100_000
ROWS = 3200  # the arena several times over: its first pages cost more than the copies
ROWS_AHEAD = 8  # rows that the daemon may be ahead of the reader

Given = tuple[list[Output], RingTokens]
"""What an engine's turn gives out."""


class Bench:
    """A daemon with sessions and delivery, and nothing to compute."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = open_endpoint(Config(), directory / "s")
        self.endpoint.gate.open()
        self.sessions = Sessions(self._ignore, self._ignore, layout_for(vocab_size=VOCAB_SIZE, max_model_len=131_072))
        engine = cast(Engine, None)  # nobody is ever so slow that sequences would pause
        self.delivery = Delivery(engine, self._send, gone=self.sessions.close, damaged=self._damaged)
        self.requests: list[Request] = []
        self.submitted_s: list[float] = []  # CPU time for each prompt that came

    @staticmethod
    def _ignore(fd: int) -> None:
        pass

    @staticmethod
    def _damaged(session: Session, error: Exception) -> None:
        raise error

    def _send(self, routing_id: bytes, data: bytes) -> Sent:
        while True:
            try:
                self.endpoint.router.send_multipart([routing_id, data], zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.0005)
            except zmq.ZMQError:
                return Sent.GONE
            else:
                return Sent.YES

    def serve_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.sessions.accept(self.endpoint.lifelines, 1e12)
            for fd in list(self.sessions._lifelines):
                ended = self.sessions.read(fd)
                if ended is not None:
                    self.sessions.close(ended)
            if self.endpoint.router.poll(1):
                routing_id, data = self.endpoint.router.recv_multipart()
                self._receive(routing_id, data)

    def _receive(self, routing_id: bytes, data: bytes) -> None:
        begin = time.thread_time()
        message = decode_client_message(data)
        session = self.sessions.get(routing_id)
        if isinstance(message, Hello):
            peer = Peer(os.getuid(), os.getgid(), 0)
            session = self.sessions.open(routing_id, peer, "", message.capabilities)
            capabilities = tuple(session.capabilities)
            welcome = Welcome(1, 1, session.session_id, "bench", LIMITS, session.token, "", capabilities)
            self.delivery.send(session, welcome)
        elif isinstance(message, Submit) and session is not None:
            if message.upload is not None and session.arena is not None:
                packed = session.arena.upload.copy(*message.upload)
            else:
                packed = message.prompt if isinstance(message.prompt, bytes) else b""
            prompt_ids = unpack_token_ids(packed).tolist()
            request = Request(message.request_id, 0, prompt_ids, SamplingParams(), 0, frozenset(), None)
            request.session, request.handle, request.want_logits = session, message.handle, message.want_logits
            self.requests.append(request)
            self.delivery.send(session, Accepted(1, message.request_id))
            self.submitted_s.append(time.thread_time() - begin)
        elif isinstance(message, Goodbye) and session is not None:
            self.sessions.close(session)

    def give(self, given: Given) -> None:
        self.delivery.give_all(self.delivery.parcels_of(*given, 1))

    def finish(self) -> None:
        for request in self.requests:
            end = Finished(1, request.request_id, 0, "length", Usage(1, 1))
            self.delivery.send(cast(Session, request.session), end)
        self.requests = []

    def close(self) -> None:
        for session in self.sessions:
            self.sessions.close(session)
        self.sessions.hang_up_all()
        self.endpoint.close(0.1)


@dataclass
class Board:
    """What the clients tell: tokens that each has read, and the CPU time that it took."""

    count: int
    memory: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096 + 16 * self.count)
        self.read = np.frombuffer(self.memory, np.int64, self.count, 0)
        self.cpu_s = np.frombuffer(self.memory, np.float64, self.count, 8 * self.count)


@contextmanager
def clients(bench: Bench, count: int, arena: bool, work: Callable[[Client, int], None]) -> Iterator[None]:
    """`count` processes that each run `work(client, number)`."""
    address = str(bench.endpoint.path)
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            run_client(partial(work_with, address, arena, number, work))
        pids.append(pid)
    try:
        yield
    finally:
        ended: list[int] = []

        def all_ended() -> bool:
            ended.extend(pid for pid in pids if pid not in ended and os.waitpid(pid, os.WNOHANG)[0] == pid)
            return len(ended) == len(pids)

        bench.serve_until(all_ended)


def work_with(address: str, arena: bool, number: int, work: Callable[[Client, int], None]) -> None:
    with Client(address, arena=arena, timeout_s=120.0) as pool:
        if (ARENA in pool.connect().capabilities) is not arena:
            raise SystemExit("no arena on this machine")
        work(pool, number)


def run_client(work: Callable[[], None]) -> None:
    """In a forked child: it never returns into the parent's program."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def other_threads_s() -> float:
    """CPU seconds of this process's other threads: ZeroMQ's."""
    own = str(os.gettid()) if hasattr(os, "gettid") else str(os.getpid())
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != own]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@dataclass(frozen=True)
class Cost:
    tokens_per_s: float
    thread_us: float  # for each token, of the daemon's own thread
    zeromq_us: float
    client_us: float

    @property
    def daemon_us(self) -> float:
        return self.thread_us + self.zeromq_us


def stream_tokens(bench: Bench, num_clients: int, tokens_per_step: int, arena: bool, seconds: float) -> Cost:
    each = max(1, tokens_per_step // num_clients)  # streams of a client
    steps = max(12, min(400, 60_000 // (each * num_clients)))
    board = Board(num_clients)

    def work(pool: Client, number: int) -> None:
        streams = [pool.submit([1, 2, 3], max_tokens=10**5, window=None) for _ in range(each)]
        read, begin = 0, 0.0
        while read_each(streams):
            begin = begin or time.process_time()
            read += each
            board.read[number] = read
        board.cpu_s[number] = time.process_time() - begin

    with clients(bench, num_clients, arena, work):
        bench.serve_until(lambda: len(bench.requests) == num_clients * each)
        thread_s, zeromq_before, begin = 0.0, other_threads_s(), time.perf_counter()
        for step in range(steps):
            while board.read.min() < (step - AHEAD) * each:
                time.sleep(0.0002)
            given = step_of(bench.requests, step)  # just before, as an engine does it
            before = time.thread_time()
            bench.give(given)
            thread_s += time.thread_time() - before
            if step >= 12 and time.perf_counter() - begin > seconds:
                break
        while board.read.min() < (step + 1) * each:
            time.sleep(0.0002)
        wall_s, zeromq_s = time.perf_counter() - begin, other_threads_s() - zeromq_before
        bench.finish()
    total = (step + 1) * each * num_clients
    return Cost(total / wall_s, *(1e6 * cost / total for cost in (thread_s, zeromq_s, float(board.cpu_s.sum()))))


def read_each(streams: list[Stream]) -> bool:
    """The next token of every stream; False when they are over."""
    more = False
    for stream in streams:
        more = next(stream, None) is not None
    return more


def step_of(requests: list[Request], step: int) -> Given:
    text = TEXTS[step % len(TEXTS)]
    outputs, tokens = [], RingTokens()
    for request in requests:
        fresh: Fresh = (step, (step,), (text,), (-0.5,), ())
        if request.handle is None:
            outputs.append(Output(request, TokenBatch(request.request_id, 0, *fresh)))
        else:
            tokens.add(request, 0, fresh, ())
    return outputs, tokens


def show_streams(bench: Bench, counts: list[int], sizes: list[int], seconds: float) -> None:
    print("\nTokens: CPU time for each in microseconds, daemon = its own thread + ZeroMQ's\n")
    print(f"{'clients':>7} {'tokens/step':>11} {'':>8} {'tokens/s':>10} {'daemon':>24} {'client':>8} {'ratio':>7}")
    for num_clients in counts:
        for size in sorted({max(num_clients, size) for size in sizes}):
            costs = {arena: median_cost(bench, num_clients, size, arena, seconds) for arena in (False, True)}
            for arena, cost in costs.items():
                parts = f"{cost.daemon_us:8.2f} = {cost.thread_us:5.2f} + {cost.zeromq_us:5.2f}"
                ratio = f"{costs[False].daemon_us / cost.daemon_us:6.1f}x" if arena else ""
                name = "arena" if arena else "messages"
                print(
                    f"{num_clients:>7} {size:>11} {name:>8} {cost.tokens_per_s:>10,.0f} {parts:>24} "
                    f"{cost.client_us:>8.2f} {ratio:>7}",
                    flush=True,
                )


def median_cost(bench: Bench, num_clients: int, size: int, arena: bool, seconds: float) -> Cost:
    runs = [stream_tokens(bench, num_clients, size, arena, seconds) for _ in range(3)]
    return sorted(runs, key=lambda run: run.daemon_us)[1]


def show_prompts(bench: Bench) -> None:
    print(f"\nA prompt of {PROMPT_IDS:,} ids, NumPy array: milliseconds, medians of 15\n")
    for arena in (False, True):
        board = Board(3 * 15)
        bench.submitted_s = []

        def work(pool: Client, number: int, board: Board = board) -> None:
            prompt = np.arange(PROMPT_IDS, dtype=np.int32) % VOCAB_SIZE
            for turn in range(15):
                begin, cpu = time.perf_counter(), time.process_time()
                stream = pool.submit(prompt, max_tokens=1)
                board.cpu_s[3 * turn] = time.perf_counter() - begin
                board.cpu_s[3 * turn + 1] = time.process_time() - cpu
                state = stream._state
                pool._connection.wait(lambda state=state: state.unaccepted is None or None, 60.0, "", "accepted")
                board.cpu_s[3 * turn + 2] = time.perf_counter() - begin
                stream.close()

        with clients(bench, 1, arena, work):
            pass
        bench.requests = []
        values = [1e3 * statistics.median(board.cpu_s[part::3]) for part in range(3)]
        daemon_ms = 1e3 * statistics.median(bench.submitted_s)
        print(
            f"{'arena' if arena else 'messages':>9}: submit returns after {values[0]:.2f} (CPU {values[1]:.2f}), "
            f"accepted after {values[2]:.2f}; the daemon's thread {daemon_ms:.2f}"
        )


def copy_speeds(row: NDArray[np.float32]) -> tuple[float, float, float]:
    """GB/s of a row into memory of its own, into the bulk region, and out of it again, by one process."""
    layout = layout_for(vocab_size=VOCAB_SIZE, max_model_len=131_072)
    targets = np.zeros((layout.bulk_bytes // row.nbytes, VOCAB_SIZE), np.float32)
    arena, fd = Arena.create(layout)
    os.close(fd)
    writer, reader = BulkWriter(arena), BulkReader(arena)
    times: list[list[float]] = [[], [], []]
    for i in range(ROWS):
        marks = [time.perf_counter()]
        np.copyto(targets[i % len(targets)], row)
        marks.append(time.perf_counter())
        place = writer.put(row, Teller.MESSAGE) or (0, 0)
        marks.append(time.perf_counter())
        reader.take(*place)
        marks.append(time.perf_counter())
        for kind, (begin, end) in enumerate(pairwise(marks)):
            times[kind].append(end - begin)
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
        thread_s, zeromq_before, begin = 0.0, other_threads_s(), time.perf_counter()
        for index in range(steps):
            while board.read[0] < index - max(1, ROWS_AHEAD // together):
                time.sleep(0.00005)
            given = logits_of(bench.requests, index, row)
            before = time.thread_time()
            bench.give(given)
            thread_s += time.thread_time() - before
        while board.read[0] < steps:
            time.sleep(0.00005)
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
    plain, into, out = copy_speeds(row)
    print(f"\nLogits, {VOCAB_SIZE:,} float32 a row, {ROWS} rows\n")
    print(f"within one process: plain copy {plain:.1f} GB/s, into the arena {into:.1f}, out of it {out:.1f}")
    for arena in (False, True):
        for together in (1, 16):
            wall, daemon, client = stream_logits(bench, row, arena, together)
            print(
                f"{'arena' if arena else 'messages':>9}, {together:>2} a step: {wall:.2f} GB/s from end to end; "
                f"for each second of CPU: daemon {daemon:.2f} GB/s, client {client:.2f} GB/s"
            )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens, prompts and logits between processes.")
    parser.add_argument("--clients", type=_numbers, default=[1, 8, 64], metavar="N,N")
    parser.add_argument(
        "--tokens", type=_numbers, default=[1, 64, 1000], metavar="N,N", help="per step, of all clients"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="longest run of a line, of which the median of 3 is shown"
    )
    options = parser.parse_args()
    print("python -m bench.ipc " + shlex.join(sys.argv[1:]))
    with tempfile.TemporaryDirectory(prefix="kvb") as directory:
        bench = Bench(Path(directory))
        try:
            show_streams(bench, options.clients, options.tokens, options.seconds)
            show_prompts(bench)
            show_logits(bench)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
