"""How long a modest user waits for a first token while another floods the daemon, and whether service follows weights.

    sudo python -m bench.fairness [--model smollm2-135m] [--seconds 30] [--flood 500] [--weights 1,3]

A real daemon, and clients under uids of their own (which takes root). One sends a short request each second, first to
the empty daemon, then while another uid keeps `--flood` long requests under way. `same uid` is what it would be without
fairness among users: the short requests are then the flooder's own, so they stand in line behind its long ones. TTFT is
the time from submit to the first token as the client reads it; with a flood it is at least the rest of the step that is
under way, and a step of 64 rows, half of them prompts. `ahead` counts the tokens that everybody was given meanwhile: it
says how far the line was jumped whatever else the machine does.

Then one uid for each weight keeps 100 requests under way, and the tokens that each gets in the second half of the time
(prompts included) are held against the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.service import running_daemon, wait_until_ready
from kvpool.client import AsyncClient, Client, Timeout

ROOT = Path(__file__).resolve().parents[1]
FLOODER, MODEST = 30_001, 30_002
LONG_PROMPT, LONG_ANSWER = 100, 200
SHORT_PROMPT, SHORT_ANSWER = 12, 4
GIVE_UP_S = 30.0
EQUAL_LOAD = 100
STEP = ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "512", "--pool-bytes", "512MiB"]

Wait = tuple[float | None, int]

dice = random.Random()


def prompt(length: int) -> list[int]:
    """Tokens that nobody has sent before."""
    return [dice.randrange(100, 40_000) for _ in range(length)]


# What the clients do, each in a process of its own


async def keep_busy(address: str, under_way: int, seconds: float) -> int:
    """Keep so many long requests under way; the tokens that were served in the second half of the time."""
    served, begin = 0, time.monotonic()

    def is_counted() -> bool:
        return begin + seconds / 2 <= time.monotonic() < begin + seconds

    async def one_line(pool: AsyncClient) -> None:
        nonlocal served
        while True:
            stream = await pool.submit(prompt(LONG_PROMPT), max_tokens=LONG_ANSWER, ignore_eos=True, want_text=False)
            async for event in stream:
                served += (1 + (event.index == 0) * LONG_PROMPT) * is_counted()

    async with AsyncClient(address, stream_timeout_s=3600.0) as pool:
        await pool.connect()
        lines = [asyncio.create_task(one_line(pool)) for _ in range(under_way)]
        await asyncio.sleep(seconds)
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)
    return served


def ask_each_second(address: str, seconds: float) -> list[Wait]:
    """A short request each second: seconds to its first token (None where none came within GIVE_UP_S), tokens ahead."""
    waits: list[Wait] = []
    with Client(address, stream_timeout_s=GIVE_UP_S) as pool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before, begin = pool.stats()["tokens_generated_total"], time.monotonic()
            with pool.submit(prompt(SHORT_PROMPT), max_tokens=SHORT_ANSWER, ignore_eos=True) as stream:
                try:
                    next(stream)
                    waited: float | None = time.monotonic() - begin
                except Timeout:
                    waited = None
                waits.append((waited, pool.stats()["tokens_generated_total"] - before))
                if waited is not None:
                    stream.result()
            time.sleep(max(0.0, begin + 1.0 - time.monotonic()))
    return waits


def start_client(role: str, uid: int, address: str, seconds: float, under_way: int = 0) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "bench.fairness",
        "--client",
        role,
        str(uid),
        address,
        str(seconds),
        str(under_way),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def client(role: str, uid: str, address: str, seconds: str, under_way: str) -> None:
    """The work of one client process: its figures, as a line of JSON."""
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    if role == "busy":
        print(json.dumps(asyncio.run(keep_busy(address, int(under_way), float(seconds)))))
    else:
        print(json.dumps(ask_each_second(address, float(seconds))))


# The measurement


def waits_of(uid: int, address: str, seconds: float, flood: int) -> list[Wait]:
    """TTFTs of short requests by `uid`, while FLOODER keeps so many long ones under way."""
    busy = start_client("busy", FLOODER, address, seconds + GIVE_UP_S, flood) if flood else None
    if busy is not None:
        with Client(address) as pool:
            while pool.stats()["sequences_waiting"] < flood - 64:
                time.sleep(0.05)
    answer, _ = start_client("ask", uid, address, seconds).communicate()
    if busy is not None:
        busy.terminate()
        busy.communicate()
        with Client(address) as pool:
            while pool.ps():
                time.sleep(0.05)
    return [(waited, ahead) for waited, ahead in json.loads(answer)]


def show_waits(name: str, waits: list[Wait], empty_p99: float | None = None) -> float:
    """Print one line; the p99, infinite where requests were given up."""
    known = sorted(float("inf") if waited is None else waited for waited, _ in waits)
    p50, p99 = known[len(known) // 2], known[min(len(known) - 1, int(len(known) * 0.99))]
    shown = [f"{wait * 1e3:8.0f} ms" if wait < GIVE_UP_S else f"  > {GIVE_UP_S:.0f} s " for wait in (p50, p99)]
    factor = "" if empty_p99 is None else f"{p99 / empty_p99:9.1f}x" if p99 < GIVE_UP_S else "      none"
    ahead = statistics.median(tokens for _, tokens in waits)
    print(f"{name:34}{len(known):9}{ahead:8.0f}{shown[0]:>12}{shown[1]:>12}{factor}", flush=True)
    return p99


def measure(options: argparse.Namespace) -> None:
    weights = [float(part) for part in options.weights.split(",")]
    with tempfile.TemporaryDirectory(prefix="kvb") as folder:
        directory = Path(folder)
        directory.chmod(0o755)
        config = directory / "kvpool.toml"
        config.write_text("".join(f"[users.{40_000 + n}]\nweight = {weight}\n" for n, weight in enumerate(weights)))
        flags = ["--model", options.model, "--config", str(config), "--socket-mode", "0666", *STEP]
        with running_daemon(flags, directory) as (process, address):
            wait_until_ready(process, address, directory)
            print(f"{'TTFT of short requests':34}{'requests':>9}{'ahead':>8}{'p50':>12}{'p99':>12}{'of empty':>10}")
            ask_each_second(address, 2.0)  # not the first ones of all
            empty = show_waits("empty daemon", waits_of(MODEST, address, options.seconds, 0))
            waits = waits_of(MODEST, address, options.seconds, options.flood)
            show_waits(f"{options.flood} long requests of another uid", waits, empty)
            show_waits(
                f"{options.flood} long requests, same uid", waits_of(FLOODER, address, 1.0, options.flood), empty
            )
            print(f"\n{'weight':>8}{'tokens':>10}{'share':>9}{'of weights':>12}{'ratio':>8}")
            busy = [start_client("busy", 40_000 + n, address, options.seconds, EQUAL_LOAD) for n in range(len(weights))]
            served = [json.loads(process.communicate()[0]) for process in busy]
            for weight, tokens in zip(weights, served, strict=True):
                share, due = tokens / sum(served), weight / sum(weights)
                print(f"{weight:8g}{tokens:10,}{share:9.1%}{due:12.1%}{share / due:8.2f}")
            worst = statistics.fmean(
                abs(t / sum(served) - w / sum(weights)) for t, w in zip(served, weights, strict=True)
            )
            print(f"mean distance from the weights' shares: {worst:.1%}")


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        client(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model, a directory or a .gguf file")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the four parts but the third")
    parser.add_argument("--flood", type=int, default=500)
    parser.add_argument("--weights", default="1,3")
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, to run clients as other users")
    print("python -m bench.fairness", shlex.join(sys.argv[1:]))
    measure(options)


if __name__ == "__main__":
    main()
