"""`kvpool generate`: one completion, streamed to stdout as it comes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from ..client import Client
from ..results import Output, Result
from ..stream import Stream
from ..wire.errors import InvalidArgument, KVPoolError
from ..wire.messages import MAX_PROMPT_BYTES
from . import sampling
from .figures import show_duration
from .terminal import DIM, Terminal, safe

CUT_SHORT = {
    "cancelled": "the request was cancelled",
    "deadline": "the deadline passed",
    "error": "an answer failed",
}


def add_commands(commands: Any) -> None:
    command: argparse.ArgumentParser = commands.add_parser("generate", help="stream a completion of a text")
    command.add_argument("text", nargs="?", help="the text to go on from; - or nothing reads stdin")
    command.add_argument("--chat", action="store_true", help="take the text as a user's message, not as a beginning")
    command.add_argument("--n", type=int, metavar="N", help="how many completions")
    command.add_argument("--logprobs", type=int, metavar="K", help="with --json: logprobs, and of the K likeliest")
    command.add_argument("--priority", type=int, default=0, metavar="P", help="-100 to 100; higher goes first")
    command.add_argument("--deadline-s", type=float, metavar="S", help="end after S seconds, whatever there is")
    command.add_argument("--json", action="store_true", help="print the whole result as one JSON object")
    sampling.add_flags(command)
    command.set_defaults(command=generate)


def generate(options: argparse.Namespace) -> int:
    text = _text(options.text)
    params = sampling.params_of(options)
    prompt = [{"role": "user", "content": text}] if options.chat else text
    with Client(options.address, client_name="kvpool generate") as pool:
        started = time.monotonic()
        with pool.submit(prompt, params, priority=options.priority, deadline_s=options.deadline_s) as stream:
            if options.json:
                print(json.dumps(as_json(stream.result())))
            elif params.n > 1:
                for output in stream.result().outputs:
                    print(f"--- {output.sample} ({output.finish_reason})\n{_shown(output.text)}")
            else:
                first_s = write_stream(stream, started)
                if sys.stderr.isatty():
                    line = summary(stream.result(), time.monotonic() - started, first_s)
                    print(Terminal.of(sys.stderr, os.environ).show([(line, DIM)]), file=sys.stderr)
            return _exit_code(stream.result(), options.json)


def _exit_code(result: Result, is_told: bool) -> int:
    """An answer that was cut short is no success for a script that does not look at its finish_reason."""
    reasons = {output.finish_reason for output in result.outputs} & CUT_SHORT.keys()
    if not reasons or is_told:
        return 0
    print(f"kvpool: {' and '.join(CUT_SHORT[reason] for reason in sorted(reasons))}", file=sys.stderr)
    return 1


def _text(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise InvalidArgument("is missing; type it after `kvpool generate`, or pipe it in", field="text")
    text = sys.stdin.read(MAX_PROMPT_BYTES + 1) if given in (None, "-") else given
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that the locale has no characters for
        raise InvalidArgument(f"is not {sys.getfilesystemencoding()} text", field="text") from None
    return text


def write_stream(stream: Stream, started: float) -> float | None:
    """Print the texts of a stream as they come; seconds until the first token."""
    first_s = None
    try:
        for event in stream:
            if first_s is None:
                first_s = time.monotonic() - started
            sys.stdout.write(_shown(event.text))
            sys.stdout.flush()
    except KVPoolError:
        if first_s is not None:
            print(flush=True)  # what is said of the error gets a line of its own
        raise
    sys.stdout.write("\n")
    return first_s


def _shown(text: str) -> str:
    """A model may write anything, and a terminal obeys anything; a file gets the text as it is."""
    return safe(text) if sys.stdout.isatty() else text


def summary(result: Result, total_s: float, first_s: float | None) -> str:
    """How it went, in one line."""
    usage = result.usage
    parts = [result.finish_reason, f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"]
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} cached")
    if first_s is not None:
        parts.append(f"first after {show_duration(first_s)}")
        if usage.completion_tokens > 1 and total_s > first_s:
            parts.append(f"{(usage.completion_tokens - 1) / (total_s - first_s):.0f} tokens/s")
    return ", ".join(parts)


def as_json(result: Result) -> dict[str, Any]:
    """A result as plain data: the first output's fields, and `outputs` with all where there are several."""
    outputs = [_output_as_json(output) for output in result.outputs]
    whole = {"request_id": result.request_id, **outputs[0]}
    return whole | ({"outputs": outputs} if len(outputs) > 1 else {})


def _output_as_json(output: Output) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": asdict(output.usage),
    }
    if output.logprobs is not None:
        plain["logprobs"] = output.logprobs
    if output.top_logprobs is not None:
        plain["top_logprobs"] = output.top_logprobs
    if output.error is not None:
        plain["error"] = {"code": output.error.code, "message": str(output.error)}
    return plain
