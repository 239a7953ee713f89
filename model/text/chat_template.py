"""A model's own chat template: messages in, prompt text out.

Templates come with model files, so they are other people's programs. They run in Jinja's immutable sandbox inside a
helper process with a memory limit, and the helper is killed when a rendering takes longer than its wall-clock limit:
nothing inside one process can stop a template that is busy in a single long operation.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_TIME_LIMIT_S = 2.0
START_LIMIT_S = 30.0  # importing Jinja on a loaded machine; not the template's time
MAX_OUTPUT_BYTES = 4 * 1024 * 1024
MAX_INPUT_BYTES = 16 * 1024 * 1024


class TemplateError(ValueError):
    """The template is missing, refused the messages (`raise_exception`), is broken, or went over a limit."""


class ChatTemplate:
    """Renders one template. Methods may be called from any thread; renderings run one after the other."""

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", time_limit_s: float = DEFAULT_TIME_LIMIT_S
    ) -> None:
        """Nothing is compiled or started here: a broken template fails at `render`, not when the model loads."""
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for `messages` ({"role": ..., "content": ...}). Raises TemplateError."""
        request = {"messages": list(messages), "add_generation_prompt": add_generation_prompt, **self._tokens}
        line = json.dumps(request).encode() + b"\n"
        if len(line) > MAX_INPUT_BYTES:
            raise TemplateError(f"messages take {len(line)} bytes; the limit is {MAX_INPUT_BYTES}")
        with self._lock:
            return self._ask(self._running_helper(), line)

    def close(self) -> None:
        """End the helper process. Idempotent; a later `render` starts a new one."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        self._stop()

    def _running_helper(self) -> subprocess.Popen[bytes]:
        if self._helper is not None and self._helper.poll() is None:
            return self._helper
        self._stop()
        # -I: the helper sees neither the environment's PYTHON* variables nor the current directory.
        command = [sys.executable, "-I", os.path.join(os.path.dirname(__file__), "template_helper.py")]
        self._helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            _exchange(self._helper, b"", time.monotonic() + START_LIMIT_S)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self._stop()
            raise TemplateError("the chat template's process did not start; is jinja2 installed?") from error
        hello = {"template": self.source, "max_output_bytes": MAX_OUTPUT_BYTES}
        try:
            self._ask(self._helper, json.dumps(hello).encode() + b"\n")
        except TemplateError:
            self._stop()
            raise
        return self._helper

    def _ask(self, helper: subprocess.Popen[bytes], line: bytes) -> str:
        """Exchange lines within the time limit. A helper that fails to answer is ended. Raises TemplateError."""
        try:
            answer = json.loads(_exchange(helper, line, time.monotonic() + self._time_limit_s))
        except TimeoutError:
            self._stop()
            raise TemplateError(f"the chat template ran longer than {self._time_limit_s} s") from None
        except (OSError, EOFError, ValueError):
            self._stop()
            raise TemplateError("the chat template needed too much memory or ended its process") from None
        if "error" in answer:
            raise TemplateError(str(answer["error"]))
        return str(answer["text"])

    def _stop(self) -> None:
        helper, self._helper = getattr(self, "_helper", None), None
        if helper is None:
            return
        helper.kill()
        helper.wait()
        for pipe in (helper.stdin, helper.stdout):
            if pipe is not None:
                pipe.close()


def _exchange(helper: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes:
    """Send one line, return the line that answers it. Raises TimeoutError, EOFError, OSError."""
    stdin, stdout = helper.stdin, helper.stdout
    if stdin is None or stdout is None:
        raise EOFError("the helper has no pipes")
    os.set_blocking(stdin.fileno(), False)
    pipes = select.poll()
    pipes.register(stdout, select.POLLIN)
    if line:
        pipes.register(stdin, select.POLLOUT)
    pending, answer = memoryview(line), bytearray()
    while not answer.endswith(b"\n"):
        waiting_ms = math.ceil(1000 * (deadline - time.monotonic()))
        ready = dict(pipes.poll(waiting_ms)) if waiting_ms > 0 else {}
        if not ready:
            raise TimeoutError
        if stdin.fileno() in ready:
            pending = pending[os.write(stdin.fileno(), pending[:65536]) :]
            if not pending:
                pipes.unregister(stdin)
        if stdout.fileno() in ready:
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                raise EOFError("the helper ended")
            answer += chunk
            if len(answer) > 8 * MAX_OUTPUT_BYTES:
                raise ValueError("the answer is too long")
    return bytes(answer)
