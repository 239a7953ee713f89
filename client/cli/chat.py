"""`kvpool chat`: a conversation at the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any

from ..client import Client
from ..sampling_params import SamplingParams
from ..wire.errors import KVPoolError
from ..wire.messages import MAX_PROMPT_BYTES
from . import sampling
from .generate import write_stream

HELP = "/new begins anew, /quit leaves, Ctrl-C stops an answer."


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("chat", help="a conversation")
    command.add_argument("--system", metavar="TEXT", help="how the model is to behave")
    sampling.add_flags(command)
    command.set_defaults(command=chat)


def chat(options: argparse.Namespace) -> int:
    params = sampling.params_of(options)
    opening = [{"role": "system", "content": options.system}] if options.system else []
    is_person = sys.stdin.isatty()
    if is_person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its line editing and history)
    with Client(options.address, client_name="kvpool chat") as pool:
        if is_person:
            print(f"Talking to {pool.connect().model}. {HELP}")
        messages = list(opening)
        while (line := _ask(is_person)) is not None:
            if line == "/quit":
                break
            if line == "/new":
                messages = list(opening)
            elif line:
                question = {"role": "user", "content": line}
                try:
                    answer = _answer(pool, [*messages, question], params)
                except KVPoolError as error:
                    if not is_person:
                        raise
                    print(f"kvpool: {error}", file=sys.stderr)  # the conversation stays, without this question
                else:
                    messages += [question, {"role": "assistant", "content": answer}]
    return 0


def _ask(is_person: bool) -> str | None:
    """A line that the user typed, or that comes through a pipe; None at the end of input."""
    if not is_person:
        line = sys.stdin.readline(MAX_PROMPT_BYTES + 1)
        return line.strip() if line else None
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


def _answer(pool: Client, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes, and return it; Ctrl-C keeps what there is of it."""
    stream = pool.submit(messages, params)
    try:
        write_stream(stream, time.monotonic())
    except KeyboardInterrupt:
        stream.cancel()
        print()
    return stream.result().text
