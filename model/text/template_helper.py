"""The process in which a chat template runs: one JSON line in, one JSON line out. Started by `chat_template`.

Run as a script, in isolation from kvpool: it imports Jinja and the standard library only.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 512 * 1024 * 1024


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration is a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: object) -> None:
    """How a template refuses messages it cannot render."""
    raise jinja2.exceptions.TemplateError(str(message))


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Without Jinja's HTML escapes, as chat templates expect. Options are those of json.dumps that are plain values."""
    allowed = {name: options[name] for name in ("separators", "sort_keys") if name in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def compile_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def render(template: jinja2.Template, values: dict[str, Any], max_output_bytes: int) -> str:
    """Piece by piece, so that a template that writes without end is stopped at the limit."""
    pieces: list[str] = []
    size = 0
    for piece in template.generate(**values):
        size += len(piece.encode("utf-8", "replace"))
        if size > max_output_bytes:
            raise jinja2.exceptions.TemplateError(f"the chat template wrote more than {max_output_bytes} bytes")
        pieces.append(piece)
    return "".join(pieces)


def answer(produce: Callable[[], str]) -> None:
    """Write what `produce` returns, or its error, as one line."""
    try:
        line = json.dumps({"text": produce()})
    except MemoryError:
        line = json.dumps({"error": "the chat template needed too much memory"})
    except Exception as error:  # whatever a template can raise is its caller's answer
        line = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answer(lambda: "ready")  # what comes before is Python's time, what follows the template's
    hello = json.loads(sys.stdin.readline())
    compiled: list[jinja2.Template] = []

    def start() -> str:
        compiled.append(compile_template(hello["template"]))
        return ""

    answer(start)
    for line in sys.stdin:
        answer(lambda line=line: render(compiled[0], json.loads(line), hello["max_output_bytes"]))  # type: ignore[misc]


if __name__ == "__main__":
    main()
