"""What readers cost the daemon: tokens read one by one against waiting for the result, and `kvpool top` beside it all.

    python -m bench.readers [--seconds 6] [--sequences 32]

A real kvpoold in a process of its own with a device that computes nothing: in `steps of 10 ms` a step takes so long, as
one of a model does; in `no steps` it takes no time at all, and everything that is measured is the daemon's and the
client's own work. CPU time is the daemon's, of all its threads, as the kernel counts it. What is compared is run in
turn, three times (beside top five times); medians are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests' helpers are no part of the package

from kvpool.client import Client  # noqa: E402
from tests.support.daemon_process import DaemonProcess  # noqa: E402

TOKENS = 200
LOOKS = 5  # at the daemon beside top, of each kind
FIELDS = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "window": None, "want_text": False}
SETTINGS = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, "prefix_cache": "off"}


def cpu_s(daemon: DaemonProcess) -> float:
    """CPU seconds of the daemon's threads that live."""
    total = 0
    for task in Path(f"/proc/{daemon.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def stream(pool: Client, count: int) -> None:
    """Read token by token."""
    streams = [pool.submit([5, 6, number], **FIELDS) for number in range(count)]
    for _ in zip(*streams, strict=True):
        pass


def wait(pool: Client, count: int) -> None:
    """Only the results."""
    for opened in [pool.submit([5, 6, number], **FIELDS) for number in range(count)]:
        opened.result()


def show_streaming(backend: str, name: str, counts: list[int]) -> None:
    for count in counts:
        with DaemonProcess(backend, **SETTINGS) as daemon, daemon.client() as pool:
            wait(pool, count)
            wall: dict[Callable[[Client, int], None], list[float]] = {wait: [], stream: []}
            cpu: dict[Callable[[Client, int], None], list[float]] = {wait: [], stream: []}
            for _ in range(3):
                for work in wall:
                    begin, before = time.perf_counter(), cpu_s(daemon)
                    work(pool, count)
                    wall[work].append(time.perf_counter() - begin)
                    cpu[work].append(cpu_s(daemon) - before)
        waited, streamed = (statistics.median(wall[work]) for work in (wait, stream))
        costs = [1e6 * statistics.median(cpu[work]) / (count * TOKENS) for work in (wait, stream)]
        print(
            f"{name:>15} {count:>9} {count * TOKENS / waited:>12,.0f} {count * TOKENS / streamed:>12,.0f} "
            f"{streamed / waited - 1:>+8.1%} {costs[0]:>11.1f} {costs[1]:>11.1f}",
            flush=True,
        )


def show_top(seconds: float, count: int) -> None:
    """The same load without `kvpool top`, beside one in a terminal that watches another daemon (another process at work
    takes caches and processors from this one, whatever it does), and beside one that watches this."""
    spent: dict[str, list[float]] = {"no top": [], "another's": [], "its own": []}
    other, watched = DaemonProcess("steady", **SETTINGS), DaemonProcess("steady", **SETTINGS)
    with other as idle, watched as daemon, daemon.client() as pool:
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                wait(pool, count)

        loading = threading.Thread(target=load)
        loading.start()
        time.sleep(1.0)
        for _ in range(LOOKS):
            spent["no top"].append(measure(daemon, seconds))
            spent["another's"].append(measure_beside_top(daemon, idle, seconds))
            spent["its own"].append(measure_beside_top(daemon, daemon, seconds))
        over.set()
        loading.join()
    without, beside, own = map(statistics.median, spent.values())
    print(f"\n{count} sequences on steps of 10 ms: CPU of the daemon for each token generated")
    print(f"without kvpool top {without:.1f} us, beside one of another daemon {beside:.1f}, beside its own {own:.1f}")
    each = zip(*spent.values(), strict=True)
    print("each look: " + ", ".join("/".join(f"{cost:.1f}" for cost in costs) for costs in each))


def measure(daemon: DaemonProcess, seconds: float) -> float:
    """Microseconds of CPU for each token."""
    with daemon.client() as pool:
        before, tokens = cpu_s(daemon), pool.stats()["tokens_generated_total"]
        time.sleep(seconds)
        return 1e6 * (cpu_s(daemon) - before) / (pool.stats()["tokens_generated_total"] - tokens)


def measure_beside_top(daemon: DaemonProcess, watched: DaemonProcess, seconds: float) -> float:
    main, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "kvpool.client.cli", "--address", watched.address, "top"]
    top = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    threading.Thread(target=drain, args=[main]).start()
    time.sleep(2.0)
    cost = measure(daemon, seconds)
    top.terminate()
    top.wait()
    return cost


def drain(fd: int) -> None:
    try:
        while os.read(fd, 65536):
            pass
    except OSError:
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each look at the daemon beside top")
    parser.add_argument("--sequences", type=int, default=32)
    options = parser.parse_args()
    print(f"python -m bench.readers --seconds {options.seconds:g} --sequences {options.sequences}\n")
    print(f"{'':>15} {'':>9} {'tokens/s':>25} {'streamed':>8} {'daemon us/token':>23}")
    print(f"{'':>15} {'sequences':>9} {'waited':>12} {'streamed':>12} {'takes':>8} {'waited':>11} {'streamed':>11}")
    for backend, name in (("steady", "steps of 10 ms"), ("scripted", "no steps")):
        show_streaming(backend, name, sorted({1, options.sequences}))
    show_top(options.seconds, options.sequences)


if __name__ == "__main__":
    main()
