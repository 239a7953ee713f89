"""Records of a ring as PROTOCOL.md describes them, token by token: what the daemon's packing is held against."""

from __future__ import annotations

from kvpool.client.arena.ring import HAS_LOGPROB, LOGITS, RECORD, TEXT_BYTES, TEXT_GOES_ON

Item = tuple[int, str, float | None]
"""token_id, text, logprob."""


def record_of(item: Item, handle: int = 1, index: int = 0, sample: int = 0, *, logits: bool = False) -> bytes:
    """All records of one token."""
    token_id, text, logprob = item
    numbers = handle, index, token_id, 0.0 if logprob is None else logprob, sample
    encoded = text.encode()
    parts = [encoded[at : at + TEXT_BYTES] for at in range(0, len(encoded), TEXT_BYTES)] or [b""]
    records = [RECORD.pack(*numbers, LOGITS, 4, b"")] if logits else []
    for number, part in enumerate(parts, start=1):
        flags = (0 if logprob is None else HAS_LOGPROB) | (TEXT_GOES_ON if number < len(parts) else 0)
        records.append(RECORD.pack(*numbers, flags, len(part), part))
    return b"".join(records)


def records_of(items: list[Item], handle: int = 1, index: int = 0, sample: int = 0) -> list[bytes]:
    """Those of each token of a sample."""
    return [record_of(item, handle, index + number, sample) for number, item in enumerate(items)]
