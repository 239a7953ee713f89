"""cp.async: copies from global to shared memory that are invisible until the issuing thread has waited for them.

The source is read when the copy is issued; the destination is marked as pending, so that any access before the wait is
an error, and receives the bytes at the wait. Other threads need a barrier after it, as for any store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .access import Address, Target
from .decode import Decoder, Registers, Step, handles
from .instructions_memory import HINTS
from .memory import PENDING, WRITTEN
from .modifiers import Modifiers, unknown
from .parser import Instruction
from .races import WRITE
from .scalars import Array, spread

if TYPE_CHECKING:
    from .machine import Lanes, Machine


@dataclass(slots=True)
class Copy:
    """One cp.async of some lanes, in flight."""

    at: int
    lane: Array  # (n,)
    group: Array  # (n,) number of the lane's commit group
    flat: Array  # (n,) destination
    data: Array  # (n, bytes)


@handles("cp")
def copy_async(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    if not m.flag("async"):
        raise unknown(i, "this copy")
    if m.flag("commit_group"):
        m.done()
        mask = d.mask(i)
        return lambda lanes, R: commit(lanes, mask(R))
    if m.flag("wait_all"):
        m.done()
        return waiting(d, i, 0, uncommitted=True)
    if m.flag("wait_group"):
        m.done()
        pending = d.literal(i.operands[0])
        if pending is None:
            raise unknown(i, "a group count that is not constant")
        return waiting(d, i, pending, uncommitted=False)
    policy = m.one_of(("ca", "cg"))
    shared, source_space = m.one_of(("shared", "shared::cta")), m.flag("global")
    while m.one_of(tuple(HINTS)):
        pass
    m.done()
    width = d.literal(i.operands[2])
    if not policy or not shared or not source_space or width is None or len(i.operands) > 4:
        raise unknown(i, "this form")
    if width not in ((16,) if policy == "cg" else (4, 8, 16)):
        raise unknown(i, f"{width} bytes")
    return issue(d, i, width)


def issue(d: Decoder, i: Instruction, width: int) -> Step:
    at = d.position
    destination = Address(d, i, i.operands[0], "shared", width)
    source = Address(d, i, i.operands[1], "global", width)
    mask = d.mask(i)
    size: Callable[[Registers], Array] | None = d.value(i.operands[3], "u32", i) if len(i.operands) == 4 else None

    def step(lanes: Lanes, R: Registers) -> None:
        machine = lanes.machine
        taking = mask(R)
        for to in destination.targets(lanes, R, taking):
            flat = spread(to.locate(width), to.count)
            to.memory.check(lanes, i, flat, width, to.who, reading=False)
            data = np.zeros((to.count, width), dtype=np.uint8)
            (origin,) = source.targets(lanes, R, taking)
            sizes = None if size is None else to.each(size(R))
            for amount in (width,) if sizes is None else np.unique(sizes):
                chosen = np.arange(to.count) if sizes is None else np.flatnonzero(sizes == amount)
                fetch(origin, chosen, min(int(amount), width), width, data, at)
            to.observe(at, "store", flat, width)
            to.memory.mark(flat, width, PENDING)
            lane = to.pick(lanes.lanes)
            machine.copies.append(Copy(at, lane, machine.committed[lane], flat, data))

    return step


def fetch(origin: Target, chosen: Array, amount: int, width: int, data: Array, at: int) -> None:
    """Read `amount` of the copy's bytes for the chosen lanes; the rest stays zero."""
    if not amount:
        return
    lanes = origin.lanes
    who = chosen if origin.who is None else origin.who[chosen]
    part = Target(lanes, origin.instruction, "global", spread(origin.offset, origin.count)[chosen], who)
    whole = amount == width
    flat = part.locate(width if whole else 1)
    word = min(width, 8) if whole else 1
    for first in range(0, amount, word):
        (value,) = part.memory.read(lanes, origin.instruction, flat + first, word, 1, who)
        data[chosen, first : first + word] = value.view(np.uint8).reshape(-1, word)
    part.observe(at, "load", flat, amount)


def commit(lanes: Lanes, mask: Array | None) -> None:
    lanes.machine.committed[lanes.lanes] += 1 if mask is None else mask


def waiting(d: Decoder, i: Instruction, pending: int, uncommitted: bool) -> Step:
    """cp.async.wait_group N: all but the lane's N latest groups are done; wait_all: also copies not yet in a group."""
    if i.guard is not None:
        raise unknown(i, "a guard here")

    def step(lanes: Lanes, R: Registers) -> None:
        machine = lanes.machine
        here = np.zeros(machine.num_lanes, dtype=np.bool_)
        here[lanes.lanes] = True
        machine.copies = [
            rest for copy in machine.copies if (rest := complete(machine, copy, here, pending, uncommitted))
        ]

    return step


def complete(machine: Machine, copy: Copy, here: Array, pending: int, uncommitted: bool) -> Copy | None:
    """Make the finished part of a copy visible; what is left of it, if anything."""
    done = here[copy.lane]
    if not uncommitted:
        done &= copy.group < machine.committed[copy.lane] - pending
    if not done.any():
        return copy
    flat, data, lane = copy.flat[done], copy.data[done], copy.lane[done]
    width = data.shape[1]
    word = min(width, 8)
    words = np.ascontiguousarray(data).view(f"u{word}")
    for n in range(width // word):
        machine.shared.data_words[word][flat // word + n] = words[:, n]
    machine.shared.mark(flat, width, WRITTEN)
    if machine.races:
        machine.races.add(copy.at, WRITE, lane, machine.sync_epoch[lane >> 5], flat, width)
    if done.all():
        return None
    return Copy(copy.at, copy.lane[~done], copy.group[~done], copy.flat[~done], copy.data[~done])
