"""Load for a daemon: what is asked when, and client processes that ask it and note how they were served.

Two kinds. A *replay* takes arrival times and lengths from a trace and asks at those times whether or not the answers
keep up, as users do; waiting counts from the time at which a request was due. A *synthetic* load keeps so many requests
of each client under way: prompts with a common beginning and without, seeded and greedy, several answers, logprobs,
small windows, and some that are given up in the middle.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import random
import signal
import time
from collections.abc import Coroutine, Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvpool.client import AsyncClient, KVPoolError

DEADLINE_S = 60.0
COMMON_TOKENS = 48  # of prompts that begin alike
GIVE_UP_SHARE = 0.03


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass
class Served:
    """How one request was served. Times are seconds; ITL has one value for each token but the first of a sample."""

    outcome: str  # finish reason, or code of the refusal
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)


def read_trace(path: Path, scale: float, speed: float, seconds: float) -> list[Arrival]:
    """Requests of a CSV file with TIMESTAMP, ContextTokens and GeneratedTokens that arrive within `seconds` when the
    trace runs at `speed`; lengths are divided by `scale`."""
    arrivals: list[Arrival] = []
    begin: datetime | None = None
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            begin = begin or at
            at_s = (at - begin).total_seconds() / speed
            if at_s > seconds:
                break
            lengths = (max(1, round(int(row[name]) / scale)) for name in ("ContextTokens", "GeneratedTokens"))
            arrivals.append(Arrival(at_s, *lengths))
    return arrivals


class LoadClient:
    """One client process's side: asks, reads, and writes a line of JSON for each request to `output`."""

    def __init__(self, pool: AsyncClient, vocab_size: int, seed: int, output: int) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._dice = random.Random(seed)
        self._common = [random.Random(0).randrange(3, vocab_size) for _ in range(COMMON_TOKENS)]
        self._output = output

    async def replay(self, arrivals: Iterable[Arrival], begin: float) -> None:
        """Ask for each when it is due, counted from `begin` (monotonic seconds)."""
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                due = begin + arrival.at_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                prompt = self._random_ids(arrival.prompt_tokens)
                group.create_task(self._ask(prompt, due, {"max_tokens": arrival.output_tokens, "temperature": 0.0}))

    async def keep_busy(self, concurrency: int, until: float) -> None:
        """Have `concurrency` requests under way until the time is over, then finish them."""

        async def one_after_the_other() -> None:
            while time.monotonic() < until:
                prompt, arguments = self._invent()
                give_up = self._dice.randrange(1, 12) if self._dice.random() < GIVE_UP_SHARE else None
                await self._ask(prompt, time.monotonic(), arguments, give_up)

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))

    def _random_ids(self, count: int) -> list[int]:
        return [self._dice.randrange(3, self._vocab_size) for _ in range(count)]

    def _invent(self) -> tuple[list[int], dict[str, Any]]:
        dice = self._dice
        prompt = self._random_ids(1 + int(dice.lognormvariate(3.2, 0.8)) % 160)
        if dice.random() < 0.5:
            prompt = self._common + prompt
        arguments: dict[str, Any] = {"max_tokens": 1 + int(dice.lognormvariate(2.5, 0.7)) % 80}
        if dice.random() < 0.5:
            arguments |= {"temperature": 0.0}
        else:
            arguments |= {"temperature": 0.8, "seed": dice.randrange(2**31), "top_p": 0.95}
        if dice.random() < 0.05:
            arguments |= {"n": 2, "seed": 1, "temperature": 1.0}
        if dice.random() < 0.1:
            arguments |= {"logprobs": 3}
        if dice.random() < 0.1:
            arguments |= {"window": 8}
        return prompt, arguments

    async def _ask(self, prompt: list[int], due: float, arguments: dict[str, Any], give_up: int | None = None) -> None:
        served = Served("", prompt_tokens=len(prompt))
        marks: dict[int, list[float]] = {}
        try:
            stream = await self._pool.submit(
                prompt, ignore_eos=True, deadline_s=DEADLINE_S, want_text=False, **arguments
            )
            async with stream:
                async for event in stream:
                    if event.token_id < 0:
                        continue
                    marks.setdefault(event.sample, []).append(time.monotonic())
                    served.output_tokens += 1
                    if served.output_tokens == give_up:
                        stream.cancel()
                served.outcome = (await stream.result()).finish_reason
        except KVPoolError as error:
            served.outcome = error.code
        if marks:
            served.ttft_s = min(times[0] for times in marks.values()) - due
            served.itl_s = [after - before for times in marks.values() for before, after in pairwise(times)]
        self._write(json.dumps(asdict(served)).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._output, line) :]


def fork_client(address: str, seed: int, work: Any) -> tuple[int, int]:
    """Start a process that runs the coroutine `work(client)`; its pid, and a descriptor on which its lines come. Call
    it before this process uses ZeroMQ."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        os.close(reader)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its parent says so
        asyncio.run(_run(address, seed, work, writer))
        status = 0
    finally:
        os._exit(status)


async def _run(address: str, seed: int, work: Any, output: int) -> None:
    async with AsyncClient(address, timeout_s=120.0, client_name=f"load {seed}") as pool:
        welcome = await pool.connect()
        running: Coroutine[Any, Any, None] = work(LoadClient(pool, welcome.limits.vocab_size, seed, output))
        await running
