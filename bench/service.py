"""A daemon under the load of several client processes: throughput, waiting times, refusals, and its memory over time.

    python -m bench.service --trace azure_2023_conv.csv [--scale 16] [--speed 0.25] [--seconds 60] [--clients 8]
    python -m bench.service [--concurrency 4] [--seconds 60] [--clients 8] [--model smollm2-135m]

With a trace its requests arrive at their times, at `speed` of its pace and with lengths divided by `scale`; without one
each client keeps `concurrency` requests of many kinds under way. (bench/load.py says more.) TTFT counts from the moment
at which a request was due, so a daemon that falls behind shows it. ITL is the time between two tokens as the client
reads them. Memory is the daemon's resident set, as the kernel counts it. In the end nothing may be left: no sequence,
no block, no descriptor; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.load import LoadClient, Served, fork_client, read_trace
from kvpool.client import Client
from kvpool.client.cli.figures import show_duration

PAUSE_S = 1.0  # between two looks at the daemon
START_LIMIT_S = 300.0
PATIENCE_S = 120.0  # a crowded machine may let the daemon wait
SHOWN_ROWS = 20
UNEXPECTED = ("internal", "numeric", "connection_lost", "error")


@dataclass
class Look:
    """The daemon at one moment."""

    at_s: float
    rss_kib: int
    open_files: int
    running: int
    waiting: int
    tokens: int


@dataclass
class Outcome:
    """What a run showed."""

    seconds: float = 0.0
    served: list[Served] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    failed_clients: int = 0

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(served.outcome for served in self.served)

    def growth_kib_per_minute(self) -> float:
        """Slope of the resident set over the second half of the run, when everything has been used once."""
        half = self.looks[len(self.looks) // 2 :]
        if len(half) < 3:
            return 0.0
        fit = statistics.linear_regression([look.at_s for look in half], [look.rss_kib for look in half])
        return 60 * fit.slope

    @property
    def healthy(self) -> bool:
        bad = any(outcome in UNEXPECTED for outcome in self.outcomes)
        return not (bad or self.left_over or self.failed_clients)


@contextmanager
def running_daemon(flags: list[str], directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A kvpoold of its own: the process and its address."""
    address = str(directory / "kvpool.sock")
    command = [sys.executable, "-m", "kvpool.daemon", "--address", address, *flags]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process, address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], address: str, directory: Path) -> None:
    """In a process of its own, because this one must not use ZeroMQ before it forks its clients."""
    ask = f"import sys; from kvpool.client import Client\nClient(sys.argv[1], timeout_s={START_LIMIT_S}).connect()"
    give_up = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < give_up:
        if Path(address).exists() and subprocess.run([sys.executable, "-c", ask, address]).returncode == 0:
            return
        time.sleep(0.05)
    raise SystemExit(f"the daemon did not start:\n{(directory / 'log').read_text()}")


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def run(options: argparse.Namespace) -> Outcome:
    """Start a daemon, load it, look at it, and take everything down again."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="kvb") as folder:
        directory = Path(folder)
        flags = ["--model", options.model, "--pool-bytes", options.pool_bytes, *options.daemon_flags]
        with running_daemon(flags, directory) as (process, address):
            wait_until_ready(process, address, directory)
            clients = start_clients(options, address)
            with Client(address, timeout_s=PATIENCE_S, client_name="bench") as pool:
                files_before = open_files(process.pid)
                watch(outcome, clients, pool, process.pid, options)
                outcome.failed_clients = sum(os.waitpid(pid, 0)[1] != 0 for pid, _ in clients)
                look_for_leftovers(outcome, pool, process.pid, files_before)
        if process.returncode != 0:
            outcome.left_over.append(f"the daemon ended with status {process.returncode}")
    return outcome


def start_clients(options: argparse.Namespace, address: str) -> list[tuple[int, int]]:
    """(pid, descriptor of its lines) of each client."""
    begin = time.monotonic() + 0.5
    clients = []
    trace = read_trace(options.trace, options.scale, options.speed, options.seconds) if options.trace else []
    for number in range(options.clients):

        async def work(client: LoadClient, number: int = number) -> None:
            if options.trace:
                await client.replay(trace[number :: options.clients], begin)
            else:
                await client.keep_busy(options.concurrency, begin + options.seconds)

        clients.append(fork_client(address, number, work))
    return clients


def watch(
    outcome: Outcome, clients: list[tuple[int, int]], pool: Client, pid: int, options: argparse.Namespace
) -> None:
    """Gather the clients' lines until all have ended, and look at the daemon each second."""
    begin, due = time.monotonic(), 0.0
    buffers = {reader: bytearray() for _, reader in clients}
    progress = Progress(options.seconds)
    with selectors.DefaultSelector() as selector:
        for reader in buffers:
            selector.register(reader, selectors.EVENT_READ)
        while buffers:
            for key, _ in selector.select(max(0.0, due - time.monotonic())):
                reader = int(key.fd)
                data = os.read(reader, 1 << 16)
                if not data:
                    selector.unregister(reader)
                    os.close(reader)
                    del buffers[reader]
                    continue
                *lines, rest = (buffers[reader] + data).split(b"\n")
                buffers[reader] = bytearray(rest)
                outcome.served += [Served(**json.loads(line)) for line in lines]
            if time.monotonic() >= due:
                outcome.looks.append(look_at(pool, pid, begin))
                progress.show(outcome)
                due = time.monotonic() + PAUSE_S
    outcome.seconds = time.monotonic() - begin
    progress.end()


def look_at(pool: Client, pid: int, begin: float) -> Look:
    stats = pool.stats()
    return Look(
        time.monotonic() - begin,
        resident_kib(pid),
        open_files(pid),
        stats["sequences_running"],
        stats["sequences_waiting"],
        stats["tokens_generated_total"],
    )


class Progress:
    """One line that is kept up to date on a terminal; elsewhere a line each half minute."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._live = sys.stderr.isatty()
        self._last = -1e9

    def show(self, outcome: Outcome) -> None:
        now = outcome.looks[-1]
        if not self._live and now.at_s - self._last < 30:
            return
        self._last = now.at_s
        before = outcome.looks[max(0, len(outcome.looks) - 6)]
        rate = (now.tokens - before.tokens) / max(1e-9, now.at_s - before.at_s)
        line = (
            f"{show_duration(now.at_s)} of {show_duration(self._seconds)}  {len(outcome.served)} answers  "
            f"{rate:.0f} tokens/s  running {now.running}  waiting {now.waiting}  {now.rss_kib / 1024:.1f} MiB"
        )
        print(f"\r\x1b[K{line}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._live:
            print(file=sys.stderr)


def look_for_leftovers(outcome: Outcome, pool: Client, pid: int, files_before: int) -> None:
    """After the clients have gone nothing may be left of them."""
    give_up = time.monotonic() + 10.0
    while left := _left(pool, pid, files_before):
        if time.monotonic() > give_up:
            outcome.left_over += left
            return
        time.sleep(0.05)


def _left(pool: Client, pid: int, files_before: int) -> list[str]:
    stats: dict[str, Any] = pool.stats()
    left = [
        f"{stats[name]} {name}" for name in ("sequences_running", "sequences_waiting", "blocks_used") if stats[name]
    ]
    if stats["clients"] != 1:
        left.append(f"{stats['clients'] - 1} clients")
    if (files := open_files(pid)) > files_before:
        left.append(f"{files - files_before} open files")
    if not pool.fsck()["consistent"]:
        left.append("books that do not agree")
    return left


def quantiles_ms(values: list[float]) -> str:
    if len(values) < 2:
        return "too few"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    shown = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
    return "  ".join(f"{name} {1000 * value:,.0f}" for name, value in shown.items())


def report(outcome: Outcome) -> str:
    served, seconds = outcome.served, outcome.seconds
    prompt, output = sum(s.prompt_tokens for s in served), sum(s.output_tokens for s in served)
    ends = ", ".join(f"{count} {name}" for name, count in outcome.outcomes.most_common())
    lines = [
        f"{len(served)} requests in {seconds:.0f} s: {ends}",
        f"tokens/s: prompt {prompt / seconds:.1f}, generated {output / seconds:.1f}",
        f"TTFT in ms: {quantiles_ms([s.ttft_s for s in served if s.ttft_s is not None])}",
        f"ITL in ms:  {quantiles_ms([gap for s in served for gap in s.itl_s])}",
        "",
        "   time   resident MiB   open files   running   waiting   generated tokens/s",
    ]
    step = max(1, len(outcome.looks) // SHOWN_ROWS)
    rows = outcome.looks[::step]
    for before, now in zip([rows[0], *rows], rows, strict=False):
        rate = (now.tokens - before.tokens) / max(1e-9, now.at_s - before.at_s)
        lines.append(
            f"{show_duration(now.at_s):>7}   {now.rss_kib / 1024:12.1f}   {now.open_files:10}   "
            f"{now.running:7}   {now.waiting:7}   {rate:18.1f}"
        )
    lines += [
        "",
        f"resident set in the second half of the run: {outcome.growth_kib_per_minute():+.1f} KiB a minute",
        f"left over: {'; '.join(outcome.left_over) or 'nothing'}",
        f"clients that failed: {outcome.failed_clients}",
    ]
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--scale", type=float, default=16.0, help="lengths of the trace are divided by this")
    parser.add_argument("--speed", type=float, default=0.25, help="of the trace's own pace")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--concurrency", type=int, default=4, help="requests of a client under way, without a trace")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pool-bytes", default="64MiB")
    parser.add_argument("daemon_flags", nargs="*", help="more flags of kvpoold, after --")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    print("python -m bench.service " + shlex.join(sys.argv[1:]))
    print(f"load average of the machine: {os.getloadavg()[0]:.1f} before", flush=True)
    outcome = run(options)
    print(f"load average of the machine: {os.getloadavg()[0]:.1f} after, of {os.cpu_count()} cores")
    print(report(outcome))
    return 0 if outcome.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
