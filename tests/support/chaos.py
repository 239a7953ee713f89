"""Kill a daemon at random moments under the load of several client processes, and hold every answer against the
undisturbed one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.daemon_process import DaemonProcess, at_rest, eventually

CLIENT = Path(__file__).with_name("chaos_client.py")
FINISH_TIMEOUT_S = 120.0

CATALOGUE: list[dict[str, Any]] = [
    {"prompt": "The sea is", "max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    {"prompt": "Once upon a time", "max_tokens": 60, "seed": 7, "logprobs": 3},
    {"prompt": "A list:", "max_tokens": 30, "seed": 8, "n": 3, "logprobs": 0},
    {"prompt": list(range(3, 120)), "max_tokens": 25, "seed": 9, "ignore_eos": True},
    {"prompt": "Penalties", "max_tokens": 40, "seed": 10, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    {"prompt": "Stop", "max_tokens": 50, "seed": 11, "stop": ["e", "qu"], "min_tokens": 3},
    {"prompt": "Slow reader", "max_tokens": 40, "seed": 12, "window": 4, "logprobs": 1},
    {"prompt": "Lingers", "max_tokens": 30, "seed": 13, "linger_s": 30.0},
    {"prompt": "Only these", "max_tokens": 20, "seed": 14, "allowed_token_ids": list(range(5, 40)), "min_p": 0.01},
    {"prompt": "Only the prompt", "max_tokens": 0},
]


@dataclass
class Outcome:
    """What came of it. `wrong` has one line for everything that is not as in an undisturbed run."""

    kills: int = 0
    answers: int = 0
    resumed: int = 0  # answers that more than one daemon gave
    taken_up: int = 0  # as the daemons count
    wrong: list[str] = field(default_factory=list)


def run_chaos(rounds: int, clients: int, seed: int, *, report: Callable[[str], None] = lambda line: None) -> Outcome:
    """`rounds` times: start the daemon, let it work for a random while (or not even start), SIGKILL. Then let the
    clients finish with a last daemon."""
    dice = random.Random(seed)
    outcome = Outcome()
    with DaemonProcess("paced", max_num_seqs=8, max_num_batched_tokens=32) as daemon:
        expected = _undisturbed(daemon)
        catalogue = daemon.directory / "catalogue.json"
        catalogue.write_text(json.dumps(CATALOGUE))
        processes = [_start_client(daemon, catalogue, seed * 1000 + number) for number in range(clients)]
        for round_number in range(rounds):
            time.sleep(dice.uniform(0.0, 1.5))
            daemon.kill()
            outcome.kills += 1
            while dice.random() < 0.2:  # die while starting, too
                daemon.start(wait=False)
                time.sleep(dice.uniform(0.0, 2.0))
                daemon.kill()
                outcome.kills += 1
            daemon.start()
            report(f"round {round_number + 1}: {outcome.kills} kills")
            with daemon.client(timeout_s=30.0) as pool:
                outcome.taken_up += pool.stats()["requests_taken_up_total"]
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            _judge(process, expected, outcome)
        _look_for_leftovers(daemon, outcome)
    return outcome


def _start_client(daemon: DaemonProcess, catalogue: Path, seed: int) -> subprocess.Popen[str]:
    output = (daemon.directory / f"answers-{seed}").open("w+")
    return subprocess.Popen(
        [sys.executable, str(CLIENT), daemon.address, str(catalogue), str(seed)],
        stdin=subprocess.PIPE,
        stdout=output,
        text=True,
    )


def _undisturbed(daemon: DaemonProcess) -> list[list[Any]]:
    from tests.support.chaos_client import ask

    with daemon.client() as pool:
        return [json.loads(json.dumps(ask(pool, arguments)["outputs"])) for arguments in CATALOGUE]


def _judge(process: subprocess.Popen[str], expected: list[list[Any]], outcome: Outcome) -> None:
    status = process.wait(FINISH_TIMEOUT_S)
    if status != 0:
        outcome.wrong.append(f"a client ended with status {status}")
    seed = process.args[-1]  # type: ignore[index]
    answers = Path(str(process.args[3])).with_name(f"answers-{seed}").read_text().splitlines()  # type: ignore[index]
    for line in answers:
        answer = json.loads(line)
        outcome.answers += 1
        number = answer["number"]
        if "error" in answer:
            outcome.wrong.append(f"{CATALOGUE[number]}: {answer['error']}")
            continue
        outcome.resumed += answer["daemons"] > 1
        if answer["outputs"] != expected[number]:
            outcome.wrong.append(f"{CATALOGUE[number]}: {answer['outputs']} is not {expected[number]}")
        if not answer["in_order"]:
            outcome.wrong.append(f"{CATALOGUE[number]}: tokens out of order, lost or doubled")
        if answer["texts"] != [output[1] for output in answer["outputs"]]:
            outcome.wrong.append(f"{CATALOGUE[number]}: the streamed text is not the result's")


def _look_for_leftovers(daemon: DaemonProcess, outcome: Outcome) -> None:
    with daemon.client() as pool:
        if not eventually(lambda: at_rest(pool), 5.0):
            outcome.wrong.append(f"left over: {pool.ps()} {pool.stats()}")
    files = {path.name for path in daemon.path.parent.iterdir()}
    if not files <= {"kvpool.sock", "kvpool.sock.life", "kvpool.sock.lock", "kvpool.sock.journal"}:
        outcome.wrong.append(f"left over: {files}")
    daemon.signal(signal.SIGTERM)
    if daemon.wait() != 0 or list(daemon.path.parent.iterdir()):
        outcome.wrong.append(f"left over after the end: {list(daemon.path.parent.iterdir())}")
