"""`make demo`: a real model, the daemon, and three client processes that stream from it at once, side by side.

Everything lives in a temporary folder and ends with the demo: the daemon is told READY by the same message that systemd
would get, the clients are three runs of `kvpool generate`, and the block map is the one that `kvpool top` shows.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..client import Client, KVPoolError
from ..client.arena.pool_map import USED, PoolMap
from ..client.cli.terminal import BOLD, CYAN, DIM, GREEN, PLAIN, RED, Line, Terminal, pad, safe, width_of
from ..client.cli.top_view import PALETTE, History, block_map, legend

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 2048
POOL_BYTES = "96MiB"  # small, so that the map shows single blocks; three reserved sequences would not fit into it
PROMPTS = {
    "a notebook": "Explain in a few sentences why the sea is salty.",
    "a web back end": "Write a short welcome message for a small bakery's web page.",
    "a batch job": "List five questions that a good engineer asks before changing code.",
}
FRAME_S = 0.1
START_LIMIT_S = 600.0
MAP_LINES = 6


def main() -> int:
    """Run the demo. Returns the exit status: 0 only if every client got its answer and nothing is left behind."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.daemon.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="what the daemon serves")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="tokens for each client")
    parser.add_argument("--plain", action="store_true", help="print the results only, without the live picture")
    options = parser.parse_args()
    terminal = Terminal.of(sys.stdout, os.environ)
    live = sys.stdout.isatty() and terminal.height >= 20 and not options.plain
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as folder, ExitStack() as stack:
        address = str(Path(folder) / "kvpool.sock")
        _heading("1. The daemon", terminal)
        daemon = stack.enter_context(_daemon(options.model, address, Path(folder)))
        _heading("2. Three processes, one pool", terminal)
        pool = stack.enter_context(Client(address, client_name="kvpool demo"))
        writers = [
            stack.enter_context(_writer(name, prompt, address, options.max_tokens, seed, Path(folder)))
            for seed, (name, prompt) in enumerate(PROMPTS.items(), start=1)
        ]
        tally = Tally()
        _follow(writers, pool, tally, terminal, live)
        failed = [f"{w.name}: {w.complaints.read_text().strip()}" for w in writers if w.process.wait() != 0]
        _heading("3. What was served", terminal)
        for line in _summary(writers, pool, tally, terminal):
            print(terminal.show(line))
        _stop(daemon)
        left = sorted(path.name for path in Path(folder).iterdir() if path.suffix != ".log")
    for complaint in failed:
        print(complaint, file=sys.stderr)
    if left:
        print(f"left behind: {', '.join(left)}", file=sys.stderr)
    return 1 if failed or left else 0


def _heading(text: str, terminal: Terminal) -> None:
    rule = "─" if terminal.unicode else "-"
    line: Line = [(f"{text} ", f"{BOLD};{CYAN}"), (rule * max(0, terminal.width - len(text) - 1), DIM)]
    print("\n" + terminal.show(line), flush=True)


# ---- the daemon


@contextmanager
def _daemon(model: str, address: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start kvpoold, show its progress and its memory ledger, and come back when it is ready."""
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    notify.bind(str(folder / "notify"))
    log = folder / "daemon.log"
    command = [sys.executable, "-m", "kvpool.daemon", "--model", model, "--address", address]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--pool-bytes", POOL_BYTES, "--log-format", "plain"]
    environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify")}
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=stderr, env=environment, start_new_session=True)
    try:
        _wait_until_ready(process, notify, log)
        print(_ledger_of(log))
        notify.close()
        (folder / "notify").unlink()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], notify: socket.socket, log: Path) -> None:
    """Raises SystemExit, with the end of the daemon's log, if it ends before it is ready."""
    deadline = time.monotonic() + START_LIMIT_S
    notify.settimeout(0.2)
    on_terminal = sys.stdout.isatty()
    while time.monotonic() < deadline:
        try:
            message = notify.recv(4096).decode()
        except TimeoutError:
            if process.poll() is not None:
                raise SystemExit(f"the daemon ended:\n{log.read_text()[-2000:]}") from None
            continue
        if on_terminal and "STATUS=" in message:
            print(f"\r\x1b[K  {message.partition('STATUS=')[2].splitlines()[0]}", end="", flush=True)
        if "READY=1" in message:
            print("\r\x1b[K" if on_terminal else "", end="")
            return
    raise SystemExit(f"the daemon was not ready after {START_LIMIT_S:.0f} s")


def _ledger_of(log: Path) -> str:
    """The lines of the daemon's log from the memory ledger on, without their time stamps."""
    names = ("weights ", "workspace ", "pool ", "total ", "cpu", "cuda", "ready ")
    shown = []
    for line in log.read_text().splitlines():
        for name in names:
            position = line.find(name)
            if position >= 0 and "%" not in line:
                shown.append("  " + line[position:])
                break
    return "\n".join(shown)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=30)


# ---- the clients


@dataclass(slots=True, eq=False)
class Writer:
    """One client process and what it has printed so far."""

    name: str
    prompt: str
    process: subprocess.Popen[bytes]
    complaints: Path  # its stderr
    started: float
    data: bytes = b""
    first_s: float | None = None
    took_s: float | None = None

    @property
    def text(self) -> str:
        return self.data.decode(errors="ignore")

    def read(self) -> bool:
        """Take what there is; False at the end."""
        stdout = self.process.stdout
        piece = os.read(stdout.fileno(), 65536) if stdout is not None else b""
        now = time.monotonic() - self.started
        if piece and self.first_s is None:
            self.first_s = now
        if not piece:
            self.took_s = now
        self.data += piece
        return bool(piece)


@contextmanager
def _writer(name: str, prompt: str, address: str, max_tokens: int, seed: int, folder: Path) -> Iterator[Writer]:
    command = [sys.executable, "-m", "kvpool.client.cli", "--address", address, "generate", "--chat", prompt]
    command += ["--max-tokens", str(max_tokens), "--temperature", "0.4", "--seed", str(seed)]
    complaints = folder / f"client-{seed}.log"
    with complaints.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
    try:
        yield Writer(name, prompt, process, complaints, time.monotonic())
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@dataclass(slots=True)
class Tally:
    """What the looks at the pool add up to."""

    history: History = field(default_factory=History)
    peak_blocks: int = 0
    peak_sequences: int = 0
    slots: int = 0
    slots_with_tokens: int = 0

    def look(self, pool: PoolMap) -> None:
        used = pool.count(USED)
        self.peak_blocks = max(self.peak_blocks, used)
        self.peak_sequences = max(self.peak_sequences, len(pool.sequences))
        waste = float(pool.counters.get("kv_waste_ratio", 0.0))
        self.slots += used * pool.block_size
        self.slots_with_tokens += round(used * pool.block_size * (1 - waste))


def _follow(writers: list[Writer], pool: Client, tally: Tally, terminal: Terminal, live: bool) -> None:
    """Until every client is done: read what they print, look at the pool, and draw both."""
    height = 0
    with selectors.DefaultSelector() as selector:
        for writer in writers:
            if writer.process.stdout is not None:
                selector.register(writer.process.stdout, selectors.EVENT_READ, writer)
        next_frame = 0.0
        while selector.get_map():
            for key, _ in selector.select(FRAME_S):
                if not key.data.read():
                    selector.unregister(key.fileobj)
            if time.monotonic() >= next_frame or not selector.get_map():
                next_frame = time.monotonic() + FRAME_S
                snapshot = _snapshot(pool)
                if snapshot is not None:
                    tally.look(snapshot)
                    if live:
                        height = _draw(_frame(writers, snapshot, tally, terminal), terminal, height)
    if not live:
        for writer in writers:
            print(terminal.show([(f"{writer.name}: ", BOLD), (writer.prompt, DIM)]))
            print(textwrap.indent(textwrap.fill(safe(writer.text.strip()), terminal.width - 4), "    ") + "\n")


def _snapshot(pool: Client) -> PoolMap | None:
    try:
        return pool.pool_map()
    except KVPoolError:
        return None  # the next look will do


# ---- the picture


def _draw(lines: list[Line], terminal: Terminal, above: int) -> int:
    """Draw over the last picture, of `above` lines; returns how many this one has."""
    text = "".join(f"\x1b[K{terminal.show(line)}\n" for line in lines)
    sys.stdout.write((f"\x1b[{above}A" if above else "") + text)
    sys.stdout.flush()
    return len(lines)


def _frame(writers: list[Writer], snapshot: PoolMap, tally: Tally, terminal: Terminal) -> list[Line]:
    """Panels side by side, and the pool below them; always the same number of lines."""
    gap = 2
    width = (terminal.width - gap * (len(writers) - 1)) // len(writers)
    height = max(6, min(14, terminal.height - MAP_LINES - 8))
    panels = [_panel(writer, number, width, height) for number, writer in enumerate(writers)]
    lines: list[Line] = []
    for row in zip(*panels, strict=True):
        line: Line = []
        for cells in row:
            line += [*cells, (" " * gap, PLAIN)]
        lines.append(line[:-1])
    rows, speed = tally.history.rows(snapshot, time.monotonic())
    used = snapshot.count(USED)
    cells, stride = block_map(snapshot, rows, terminal, MAP_LINES)
    figures = f"{used} of {snapshot.num_blocks:,} blocks in use   {len(rows)} sequences   {speed:,.0f} tok/s"
    return [*lines, [], [("the pool  ", BOLD), (figures, PLAIN)], *cells, legend(stride, terminal)]


def _panel(writer: Writer, number: int, width: int, height: int) -> list[Line]:
    """A box of exactly `height` lines and `width` columns with the end of what the client printed."""
    colour = PALETTE[number + 1]
    inner = width - 4
    title = f" {writer.name} (pid {writer.process.pid}) "
    top = "╭─" + title + "─" * max(0, width - width_of(title) - 3) + "╮"
    asked = textwrap.wrap(writer.prompt, inner)[:2]
    answer = [piece for part in safe(writer.text).splitlines() for piece in (textwrap.wrap(part, inner) or [""])]
    room = height - len(asked) - 3
    state = "starting" if writer.first_s is None else f"first token after {writer.first_s:.1f} s"
    if writer.took_s is not None:
        state = f"done in {writer.took_s:.1f} s"
    bottom = "╰─" + f" {state} "[: width - 3].ljust(width - 3, "─") + "╯"
    body = [(line, DIM) for line in asked] + [("", PLAIN)] + [(line, PLAIN) for line in answer[-room:]]
    body += [("", PLAIN)] * (height - 2 - len(body))
    rows: list[Line] = [[("│ ", colour), pad(span, inner), (" │", colour)] for span in body]
    return [[(top, colour)], *rows, [(bottom, colour)]]


# ---- the end


def _summary(writers: list[Writer], pool: Client, tally: Tally, terminal: Terminal) -> list[Line]:
    stats: Mapping[str, object] = pool.stats()
    snapshot = pool.pool_map()
    tokens, took_s = int(str(stats["tokens_generated_total"])), max(writer.took_s or 0.0 for writer in writers)
    reserved = tally.peak_sequences * -(-MAX_MODEL_LEN // snapshot.block_size)
    share = tally.slots_with_tokens / max(1, tally.slots)
    block_mib = float(str(stats.get("block_bytes", 0))) / 2**20
    compared = f"{reserved / max(1, tally.peak_blocks):.0f} times as much"
    if reserved > snapshot.num_blocks:
        compared += f" (there are {snapshot.num_blocks})"
    in_use = snapshot.count(USED)
    rows = [
        ("tokens", f"{tokens} for {len(writers)} processes in {took_s:.1f} s ({tokens / max(took_s, 1e-9):.0f} tok/s)"),
        ("slots that held tokens", f"{100 * share:.1f} % of those allocated, mean over the run"),
        ("memory at the peak", f"{tally.peak_blocks} blocks, {tally.peak_blocks * block_mib:.1f} MiB"),
        (f"reserving {MAX_MODEL_LEN} each", f"{reserved} blocks, {reserved * block_mib:.0f} MiB: {compared}"),
    ]
    lines: list[Line] = [[(f"  {name:<24}", DIM), (value, PLAIN)] for name, value in rows]
    verdict = (f"{in_use} blocks are still held", RED) if in_use else ("no block is held, nothing is left", GREEN)
    return [*lines, [(f"  {'afterwards':<24}", DIM), verdict]]


if __name__ == "__main__":
    sys.exit(main())
