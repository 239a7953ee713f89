# mypy: disable-error-code="no-any-return"
"""Where threads meet: barriers, shuffles, votes, matches, warp reductions. When they may go on is decided here too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Decoder, Registers, Step, handles
from .errors import ParticipationError
from .memory import instruction_text
from .modifiers import Modifiers, unknown
from .parser import Instruction, Operand, Pair
from .scalars import Array, dtype_of

if TYPE_CHECKING:
    from .machine import Lanes


def fail(lanes: Lanes, i: Instruction, bad: Array, why: str) -> ParticipationError:
    first = int(np.flatnonzero(lanes.spread(bad))[0])
    return ParticipationError(f"{lanes.where(first)}: {instruction_text(i)}: {why}")


# --- barriers -----------------------------------------------------------------------------------------------------


@handles("bar", "barrier")
def barrier(d: Decoder, i: Instruction) -> Step:
    """bar.sync, bar.red, bar.warp.sync. All threads of the block take part; a thread count must say the same."""
    m = Modifiers(i)
    if m.flag("warp"):
        if not m.flag("sync"):
            raise unknown(i, "this form")
        m.done()
        return warp_barrier(d, i)
    m.flag("cta")
    m.flag("aligned")
    if m.flag("sync"):
        m.done()
        arguments, reduce = list(i.operands), None
    elif m.flag("red"):
        kind = m.type()
        operation = m.one_of(("popc", "and", "or"))
        m.done()
        arguments, reduce = list(i.operands[1:-1]), _block_reduction(d, i, operation, kind)
    else:
        raise unknown(i, "this form")
    counts = [d.literal(a) for a in arguments[1:]]
    if None in counts or len(arguments) > 2:
        raise unknown(i, "a thread count that is not constant")
    d.ready = _whole_blocks

    def step(lanes: Lanes, R: Registers) -> None:
        machine = lanes.machine
        if counts and counts[0] != machine.lanes_per_block:
            raise unknown(i, f"a barrier of {counts[0]} of the block's {machine.lanes_per_block} threads")
        machine.sync_epoch[lanes.warp] += 1
        if machine.races:
            machine.races.settle(None if lanes.n == machine.num_live else np.unique(lanes.block))
        if reduce is not None:
            reduce(lanes, R)

    return step


def _whole_blocks(lanes: Lanes) -> Array:
    """A block's threads go on when all of them that have not exited are here."""
    machine = lanes.machine
    if lanes.n == machine.num_lanes:
        return np.ones(1, dtype=np.bool_)
    here = np.bincount(lanes.block, minlength=machine.num_lanes // machine.lanes_per_block)
    return (here == machine.live_per_block)[lanes.block]


def _block_reduction(d: Decoder, i: Instruction, operation: str, kind: str) -> Callable[[Lanes, Registers], None]:
    if (operation, kind) not in (("popc", "u32"), ("and", "pred"), ("or", "pred")):
        raise unknown(i, "this reduction")
    predicate = d.value(i.operands[-1], "pred", i)
    store = d.store(i.operands[0], kind, i)

    def reduce(lanes: Lanes, R: Registers) -> None:
        holds = lanes.spread(predicate(R))
        count = np.bincount(lanes.block, weights=holds)[lanes.block].astype(np.uint32)
        if operation == "popc":
            store(R, count)
        elif operation == "or":
            store(R, count > 0)
        else:
            store(R, count == np.bincount(lanes.block)[lanes.block])

    return reduce


def whole_warps(lanes: Lanes) -> Array:
    """For instructions of all 32 lanes."""
    return lanes.active == 0xFFFFFFFF


def meet(d: Decoder, i: Instruction, mask: Operand | None) -> Callable[[Lanes, Registers], Array]:
    """Lanes may go on when all that `mask` (the member mask operand) names and that have not exited are here. Returns a
    function that checks that each lane names itself, and gives the lanes that take part, per lane."""
    slot, _ = d.source(mask, "b32", i)

    def ready(lanes: Lanes) -> Array:
        return (lanes.peek(slot) & lanes.machine.alive[lanes.warp] & ~lanes.active) == 0

    d.ready = ready

    def members(lanes: Lanes, R: Registers) -> Array:
        named = lanes.spread(R[slot])
        missing = (named >> lanes.lane_in_warp.astype(np.uint32)) & np.uint32(1) == 0
        if missing.any():
            raise fail(lanes, i, missing, "the member mask does not name the lane itself")
        return named & lanes.active

    return members


def warp_barrier(d: Decoder, i: Instruction) -> Step:
    """Orders the shared-memory accesses of a warp when all its running lanes take part."""
    members = meet(d, i, i.operands[0])

    def step(lanes: Lanes, R: Registers) -> None:
        machine = lanes.machine
        named = members(lanes, R)
        alive = machine.alive[lanes.warp]
        whole = np.unique(lanes.warp[named == alive])
        machine.sync_epoch[whole] += 1

    return step


# --- shuffles -----------------------------------------------------------------------------------------------------


@handles("shfl")
def shuffle(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = m.type()
    mode = m.one_of(("up", "down", "bfly", "idx"))
    if not m.flag("sync") or not mode or kind != "b32" or len(i.operands) != 5:
        raise unknown(i, "this shuffle")
    m.done()
    target = i.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    value, distance, clamp = (d.value(operand, "b32", i) for operand in i.operands[1:4])
    members = meet(d, i, i.operands[4])
    store = d.store(first, "b32", i)
    store_valid = d.store(second, "pred", i) if second is not None and d.is_used(second) else None

    def step(lanes: Lanes, R: Registers) -> None:
        named = members(lanes, R)
        source, valid = shuffle_source(
            mode, lanes.lane_in_warp, distance(R).astype(np.int64), clamp(R).astype(np.int64)
        )
        outside = (named >> source.astype(np.uint32)) & np.uint32(1) == 0
        if outside.any():
            raise fail(lanes, i, outside, "reads a lane that the member mask does not name, or that has exited")
        x = value(R)
        if len(x) > 1:
            everyone = x if lanes.full else _scattered(lanes, x)
            x = everyone[(lanes.lanes - lanes.lane_in_warp) + source]
        store(R, x)
        if store_valid is not None:
            store_valid(R, valid)

    return step


def shuffle_source(mode: str, lane: Array, distance: Array, clamp: Array) -> tuple[Array, Array]:
    """The lane each lane reads, and whether that lane is within its segment (else it reads itself)."""
    limit, segment = clamp & 31, (clamp >> 8) & 31
    lowest = lane & segment
    last = lowest | (limit & ~segment)
    distance = distance & 31
    if mode == "up":
        source = lane - distance
        valid = source >= last
    elif mode == "idx":
        source = lowest | (distance & ~segment)
        valid = source <= last
    else:
        source = lane + distance if mode == "down" else lane ^ distance
        valid = source <= last
    return np.where(valid, source, lane), valid


def _scattered(lanes: Lanes, x: Array) -> Array:
    everyone = np.zeros(lanes.machine.num_lanes, dtype=x.dtype)
    everyone[lanes.lanes] = x
    return everyone


# --- votes, matches, reductions -----------------------------------------------------------------------------------


def ballot(lanes: Lanes, holds: Array) -> Array:
    """Per lane: the bits of the lanes of its warp (of those running together) whose predicate holds."""
    flags = np.zeros(lanes.machine.num_lanes, dtype=np.uint8)
    flags[lanes.lanes] = holds
    return np.packbits(flags, bitorder="little").view(np.uint32)[lanes.warp]


@handles("vote")
def vote(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = m.type()
    mode = m.one_of(("all", "any", "uni", "ballot"))
    if not m.flag("sync") or kind != ("b32" if mode == "ballot" else "pred"):
        raise unknown(i, "this vote")
    m.done()
    predicate = d.value(i.operands[1], "pred", i)
    members = meet(d, i, i.operands[2])
    store = d.store(i.operands[0], kind, i)

    def step(lanes: Lanes, R: Registers) -> None:
        named = members(lanes, R)
        bits = ballot(lanes, predicate(R)) & named
        if mode == "ballot":
            store(R, bits)
        elif mode == "any":
            store(R, bits != 0)
        elif mode == "all":
            store(R, bits == named)
        else:
            store(R, (bits == named) | (bits == 0))

    return step


@handles("activemask")
def active_mask(d: Decoder, i: Instruction) -> Step:
    if i.modifiers != ("b32",):
        raise unknown(i, "this form")
    store = d.store(i.operands[0], "b32", i)
    return d.guarded(i, lambda lanes, R: store(R, lanes.active))


@handles("match")
def match(d: Decoder, i: Instruction) -> Step:
    m = Modifiers(i)
    kind = m.type()
    mode = m.one_of(("any", "all"))
    if not m.flag("sync") or not mode or kind not in ("b32", "b64"):
        raise unknown(i, "this match")
    m.done()
    target = i.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    value = d.value(i.operands[1], kind, i)
    members = meet(d, i, i.operands[2])
    store = d.store(first, "b32", i)
    store_all = d.store(second, "pred", i) if second is not None else None

    def step(lanes: Lanes, R: Registers) -> None:
        named = members(lanes, R)
        everyone = _scattered(lanes, lanes.spread(value(R))).reshape(-1, 32)
        mine = everyone[lanes.warp]
        equal = mine == mine[np.arange(lanes.n), lanes.lane_in_warp][:, None]
        bits = np.packbits(equal, axis=1, bitorder="little").view(np.uint32).reshape(-1) & named
        if mode == "any":
            store(R, bits)
        else:
            agree = bits == named
            store(R, np.where(agree, named, np.uint32(0)))
            if store_all is not None:
                store_all(R, agree)

    return step


@handles("redux")
def warp_reduction(d: Decoder, i: Instruction) -> Step:
    """redux.sync.op.type d, a, mask on 32-bit integers."""
    m = Modifiers(i)
    kind = m.type()
    operation = m.one_of(("add", "min", "max", "and", "or", "xor"))
    if not m.flag("sync") or not operation or kind not in ("u32", "s32", "b32"):
        raise unknown(i, "this reduction")
    m.done()
    ufunc: Any = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]
    value = d.value(i.operands[1], kind, i)
    members = meet(d, i, i.operands[2])
    store = d.store(i.operands[0], kind, i)
    limits = np.iinfo(dtype_of(kind))
    neutral = {"min": limits.max, "max": limits.min, "and": ~dtype_of(kind).type(0)}.get(operation, 0)

    def step(lanes: Lanes, R: Registers) -> None:
        named = members(lanes, R)
        everyone = _scattered(lanes, lanes.spread(value(R))).reshape(-1, 32)[lanes.warp]
        chosen = (named[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) != 0
        store(R, ufunc.reduce(np.where(chosen, everyone, dtype_of(kind).type(neutral)), axis=1, dtype=dtype_of(kind)))

    return step
