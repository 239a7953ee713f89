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
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpool.client import Client
from kvpool.client.stream import Stream
from kvpool.client.wire.protocol import (
    TokenBatch,
)
from kvpool.daemon.engine.engine import Output
from kvpool.daemon.engine.request import Fresh, Request
from kvpool.daemon.engine.ring_tokens import RingTokens

from .ipc_rig import VOCAB_SIZE, Bench, Board, Given, clients, other_threads_s
from .ipc_rows import show_logits

AHEAD = 3  # steps that may be under way
TEXTS = (" the", " sea", ",", " is", " deep", ".", " Although", "\n")
PROMPT_IDS = 100_000


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
