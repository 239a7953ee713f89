"""Hypothesis strategies for every message, made from the specs that its fields declare."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvpool.client.wire import schema, token_ids
from kvpool.client.wire.protocol import CLIENT_MESSAGES, DAEMON_MESSAGES
from kvpool.client.wire.schema import record_of

MAX_LENGTH = 4  # of arrays and texts, whatever the wire allows

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=MAX_LENGTH)


def values_of(spec: schema.Spec) -> st.SearchStrategy[Any]:
    """Values that the spec takes and keeps as they are."""
    match spec:
        case schema.Integer(low, high):
            return st.integers(low, high) | st.sampled_from([low, high])
        case schema.Real(low, high):
            return st.floats(low, high, allow_nan=False)
        case schema.Flag():
            return st.booleans()
        case schema.Text():
            return TEXT.filter(lambda text: spec.min_bytes <= len(text.encode()))
        case schema.Name():
            letters = st.characters(categories=("L", "N", "P"))
            return st.text(letters, min_size=spec.min_bytes, max_size=spec.min_bytes + MAX_LENGTH)
        case schema.Choice(values):
            return st.sampled_from(values)
        case schema.Binary():
            return st.binary(min_size=spec.min_bytes, max_size=min(spec.max_bytes, spec.min_bytes + MAX_LENGTH))
        case schema.Optional(inner):
            return st.none() | values_of(inner)
        case schema.ListOf(element, max_items, min_items):
            size = min(max_items, max(MAX_LENGTH, min_items))
            return st.lists(values_of(element), min_size=min_items, max_size=size).map(tuple)
        case schema.Blob(max_bytes):
            return st.binary(max_size=MAX_LENGTH) | st.tuples(st.integers(0, 2**63 - 1), st.integers(0, max_bytes))
        case schema.Pair(first, second):
            return st.tuples(values_of(first), values_of(second))
        case schema.Record():
            return records_of(spec)
        case schema.Plain() | schema.PlainMap():
            return plain_maps() if isinstance(spec, schema.PlainMap) else plain_values()
        case token_ids.PackedTokenIds():
            return st.lists(st.integers(0, 2**31 - 1), max_size=MAX_LENGTH).map(
                lambda ids: np.array(ids, dtype="<i4").tobytes()
            )
        case token_ids.Prompt(text, ids):
            return values_of(text) | values_of(ids)
    raise TypeError(f"no strategy for {spec}")


def records_of(record: schema.Record) -> st.SearchStrategy[Any]:
    return st.builds(record.make, **{field.name: values_of(field.spec) for field in record.fields})


def plain_values() -> st.SearchStrategy[Any]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXT
        | st.binary(max_size=MAX_LENGTH)
    )
    return leaves | st.lists(leaves, max_size=MAX_LENGTH).map(tuple) | plain_maps(leaves)


def plain_maps(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.text("abcdefgh_", min_size=1, max_size=8)
    return st.dictionaries(keys, st.booleans() if leaves is None else leaves, max_size=MAX_LENGTH)


client_messages = st.sampled_from(list(CLIENT_MESSAGES.values())).flatmap(lambda kind: records_of(record_of(kind)))
daemon_messages = st.sampled_from(list(DAEMON_MESSAGES.values())).flatmap(lambda kind: records_of(record_of(kind)))
