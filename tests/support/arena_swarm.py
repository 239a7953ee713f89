"""Client processes that check every token themselves, because they know what the scripted back end must answer.

Run as a script with an address and JSON: `count` clients, each with `requests` requests, one after another or with
`parallel` all at once, of `prompt` and `max_tokens` tokens. A child says `PID start` when its first token is there, and
at the end `PID ok`, or what is wrong.
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

    max_tokens = options["max_tokens"]
    fields = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    prompts = [
        [3 + (number * 31 + turn * 7 + position) % 300 for position in range(options["prompt"])]
        for turn in range(options.get("requests", 1))
    ]
    with Client(address, arena=options.get("arena", True), timeout_s=60.0) as pool:
        vocab_size = pool.connect().limits.vocab_size
        started = (pool.submit(prompt, window=options.get("window"), **fields) for prompt in prompts)
        streams = list(started) if options.get("parallel") else started
        for turn, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            said = check(stream, answer_to(prompt, max_tokens, vocab_size), first=turn == 0)
            if said != "ok":
                return said
    return "ok"


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
