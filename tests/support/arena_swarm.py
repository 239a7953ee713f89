"""Client processes that check every token themselves, because they know what the scripted back end must answer.

Run as a script with an address and JSON: `count` clients, each with `requests` requests, one after another or with
`parallel` all at once, of `prompt` and `max_tokens` tokens (with `vary`: from 1 to so many, and every other client does
without an arena). A child says `PID start` when its first token is there, and at the end `PID ok`, or what is wrong.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.scripted_backend import answer_to, logprob_of  # noqa: E402  a script finds it only now


def say(*words: object) -> None:
    """One line in one write, so that lines of different processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def run_child(address: str, number: int, options: dict[str, Any]) -> str:
    from kvpool.client import Client

    fields = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0, "window": options.get("window")}
    turns = range(options.get("requests", 1))
    prompts = [
        [3 + (number * 31 + turn * 7 + position) % 300 for position in range(options["prompt"])] for turn in turns
    ]
    lengths = [length_of(number, turn, options) for turn in turns]
    arena = options.get("arena", True) and not (options.get("vary") and number % 2)
    with Client(address, arena=arena, timeout_s=options.get("timeout_s", 60.0)) as pool:
        vocab_size = pool.connect().limits.vocab_size
        started = (pool.submit(p, max_tokens=n, **fields) for p, n in zip(prompts, lengths, strict=True))
        streams = list(started) if options.get("parallel") else started
        for turn, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            said = check(stream, answer_to(prompt, lengths[turn], vocab_size), first=turn == 0)
            if said != "ok":
                return said
    return "ok"


def length_of(number: int, turn: int, options: dict[str, Any]) -> int:
    """Tokens that a client's request asks for."""
    most: int = options["max_tokens"]
    return 1 + (number * 13 + turn * 29) % most if options.get("vary") else most


def check(stream: Any, expected: list[int], *, first: bool) -> str:
    with stream:
        for index, event in enumerate(stream):
            if first and index == 0:
                say(os.getpid(), "start")
            if event.token_id >= 0 and (event.index, event.token_id) != (index, expected[index]):
                return f"token {index} is {event.token_id} ({event.index}), not {expected[index]}"
        result = stream.result()
    if result.token_ids != expected:
        return f"{len(result.token_ids)} tokens of {len(expected)}"
    return "ok" if result.logprobs == [logprob_of(token) for token in expected] else "other logprobs"


def main(address: str, options: dict[str, Any]) -> None:
    import kvpool.client  # noqa: F401  before the forks, so that it is done once

    children = []
    for number in range(options["count"]):
        pid = os.fork()
        if pid == 0:
            try:
                said = run_child(address, number, options)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            say(os.getpid(), said)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
