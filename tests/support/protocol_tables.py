"""The tables of fields in PROTOCOL.md, made from the code; a test compares them with the page.

After a change of a message, put the new tables into the page with

    python -m tests.support.protocol_tables
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvpool.client.wire import schema
from kvpool.client.wire.protocol import (
    CLIENT_MESSAGES,
    DAEMON_MESSAGES,
    ChatMessage,
    ErrorInfo,
    ServerLimits,
    TokenBatch,
    Usage,
)
from kvpool.client.wire.schema import record_of

PAGE = Path(__file__).resolve().parents[2] / "PROTOCOL.md"
PARTS = {kind.__name__: kind for kind in (ChatMessage, ServerLimits, TokenBatch, Usage, ErrorInfo)}


def type_of(spec: schema.Spec) -> str:
    """A field's type and range in a few words; parts of messages by their names."""
    match spec:
        case schema.Record(make):
            return str(make.__name__)
        case schema.Optional(inner):
            return f"{type_of(inner)}, or nil"
        case schema.ListOf(element, max_items, min_items):
            return f"array of {min_items} to {max_items}: {type_of(element)}"
        case schema.Pair(first, second):
            return f"[{type_of(first)}, {type_of(second)}]"
    return spec.describe().removeprefix("an ").removeprefix("a ")


def table_of(kind: type[Any]) -> str:
    """The table of one message, between its markers."""
    rows = [
        f"| `{field.name}` | {type_of(field.spec)} | {'required' if field.required else default(field.default)} |"
        for field in record_of(kind).fields
    ]
    head = ["| field | type and range | default |", "| --- | --- | --- |"] if rows else ["No fields."]
    return "\n".join([f"<!-- table {kind.__name__} -->", *head, *rows, "<!-- end -->"])


def default(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    return "[]" if value == () else f"`{value!r}`"


def all_tables() -> dict[str, str]:
    kinds = [*CLIENT_MESSAGES.values(), *DAEMON_MESSAGES.values(), *PARTS.values()]
    return {kind.__name__: table_of(kind) for kind in kinds}


def main() -> None:
    text = PAGE.read_text()
    for name, table in all_tables().items():
        text = re.sub(rf"<!-- table {name} -->.*?<!-- end -->", lambda _, new=table: new, text, flags=re.DOTALL)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
