"""Loops in hand-written LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from .memory import INT64

BYTE = ir.IntType(8)
Values = list[Any]  # LLVM values
Body = Callable[[Any, Sequence[Any]], Values]


def loop(builder: Any, count: Any, carried: Sequence[Any], body: Body) -> Values:
    """Repeat `body` `count` times (perhaps never); it maps the index and the carried values to their next ones."""
    before = builder.block
    inside = builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", count, INT64(0)), inside, after)
    builder.position_at_end(inside)
    index = builder.phi(INT64)
    current = [builder.phi(value.type) for value in carried]
    following = body(index, current)
    following_index = builder.add(index, INT64(1))
    latch = builder.block
    builder.cbranch(builder.icmp_signed("<", following_index, count), inside, after)
    for phi, first, value in zip([index, *current], [INT64(0), *carried], [following_index, *following], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, latch)
    builder.position_at_end(after)
    results = [builder.phi(value.type) for value in carried]
    for phi, first, value in zip(results, carried, following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, latch)
    return results
