# mypy: disable-error-code="no-any-return"
"""Loads, stores and atomics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .access import Address, merge
from .decode import Decoder, Registers, Step, handles
from .floats import decode, encode
from .instructions_float import by_halves
from .instructions_integer import bits_of
from .modifiers import Modifiers, unknown
from .parser import Instruction, Operand, Vec
from .scalars import Array, dtype_of, is_signed, size_of, spread

if TYPE_CHECKING:
    from .machine import Lanes

SPACE_NAMES = ("global", "shared", "shared::cta", "local", "const", "param")
CACHING = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
ORDERING = ("volatile", "relaxed", "acquire", "release", "acq_rel", "weak", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
HINTS = {f"L1::{policy}" for policy in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")}
HINTS |= {f"L2::{policy}" for policy in ("evict_normal", "evict_first", "evict_last", "64B", "128B", "256B")}


def access_modifiers(i: Instruction) -> tuple[Modifiers, str, str, int]:
    """What ld and st share: type, space and vector length; ordering and caching have no meaning here."""
    m = Modifiers(i)
    kind = m.type()
    space = m.one_of(SPACE_NAMES)
    for names in (ORDERING, SCOPES, CACHING, ("nc",)):
        m.one_of(names)
    while m.one_of(tuple(HINTS)):
        pass
    length = {"": 1, "v2": 2, "v4": 4}[m.one_of(("v2", "v4"))]
    m.done()
    if kind == "pred" or size_of(kind) * length > 16:
        raise unknown(i, "an access of this type")
    return m, kind, space, length


def items_of(operand: Operand | None, length: int, i: Instruction) -> list[Operand | None]:
    items: list[Operand | None] = [*operand.items] if isinstance(operand, Vec) else [operand]
    if len(items) != length:
        raise unknown(i, f"{len(items)} registers")
    return items


@handles("ld", "ldu")
def load(d: Decoder, i: Instruction) -> Step:
    _, kind, space, length = access_modifiers(i)
    if len(i.operands) != 2:
        raise unknown(i, f"{len(i.operands)} operands")
    if space == "param":
        return move_parameters(d, i, kind, length)
    word, at = size_of(kind), d.position
    address = Address(d, i, i.operands[1], space, word * length)
    mask = d.mask(i)
    seen_as = kind if is_signed(kind) else bits_of(kind)
    view = dtype_of(seen_as)
    results = [d.result(item, seen_as, i) for item in items_of(i.operands[0], length, i)]
    if i.guard is not None:
        d.reads.extend(slot for slot, _ in results)

    def step(lanes: Lanes, R: Registers) -> None:
        before = [R[slot] for slot, _ in results]
        for target in address.targets(lanes, R, mask(R)):
            flat = target.locate(word * length)
            words = target.memory.read(lanes, i, flat, word, length, target.who)
            target.observe(at, "load", flat, word * length)
            for n, ((slot, widen), value) in enumerate(zip(results, words, strict=True)):
                value = value.view(view)
                before[n] = merge(lanes, before[n], target, widen(value) if widen else value)
                R[slot] = before[n]

    return step


def move_parameters(d: Decoder, i: Instruction, kind: str, length: int) -> Step:
    """Parameters are registers by now (see flatten.py)."""
    moves = [
        (d.store(to, kind, i), d.value(source, kind, i))
        for to, source in zip(items_of(i.operands[0], length, i), items_of(i.operands[1], length, i), strict=True)
    ]

    def step(lanes: Lanes, R: Registers) -> None:
        for store, value in moves:
            store(R, value(R))

    return d.guarded(i, step)


@handles("st")
def store(d: Decoder, i: Instruction) -> Step:
    _, kind, space, length = access_modifiers(i)
    if len(i.operands) != 2:
        raise unknown(i, f"{len(i.operands)} operands")
    if space == "param":
        return move_parameters(d, i, kind, length)
    if space == "const":
        raise unknown(i, "a store to constant memory")
    word, at = size_of(kind), d.position
    address = Address(d, i, i.operands[0], space, word * length)
    mask = d.mask(i)
    values = [d.value(item, bits_of(kind), i) for item in items_of(i.operands[1], length, i)]

    def step(lanes: Lanes, R: Registers) -> None:
        for target in address.targets(lanes, R, mask(R)):
            flat = target.locate(word * length)
            words = [target.pick(value(R)) for value in values]
            if len(flat) == 1 and target.count > 1:  # all lanes store to one place: the last one wins
                words = [value[-1:] for value in words]
            target.memory.write(lanes, i, flat, word, words, target.who)
            target.observe(at, "store", flat, word * length)

    return step


# --- atomics ------------------------------------------------------------------------------------------------------

Update = Callable[..., Array]


def _increment(old: Array, limit: Array) -> Array:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


def _swap_if_equal(old: Array, expected: Array, new: Array) -> Array:
    return np.where(old == expected, new, old)


UPDATES: dict[str, Update] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
    "cas": _swap_if_equal,
    "inc": _increment,
    "dec": _decrement,
}
ATOMIC_KINDS = {
    "add": {"u32", "s32", "u64", "s64", "f32", "f64", "f16x2", "bf16x2", "f16", "bf16"},
    "min": {"u32", "s32", "u64", "s64"},
    "max": {"u32", "s32", "u64", "s64"},
    "inc": {"u32"},
    "dec": {"u32"},
    "cas": {"b16", "b32", "b64", "u32", "s32", "u64"},
}
BITWISE_KINDS = {"b32", "b64", "u32", "s32", "u64"}


def _narrow_add(kind: str) -> Update:
    form = kind.removesuffix("x2")

    def add(a: Array, b: Array) -> Array:
        return encode(decode(a, form) + decode(b, form), form)

    return (lambda a, b: by_halves(add, a, b)) if kind.endswith("x2") else add


@handles("atom", "red")
def atomic(d: Decoder, i: Instruction) -> Step:
    """Lanes that meet at one address take turns in lane order."""
    m = Modifiers(i)
    kind = m.type()
    space = m.one_of(SPACE_NAMES[:3])
    operation = m.one_of(tuple(UPDATES))
    for names in (ORDERING, SCOPES, ("noftz",)):
        m.one_of(names)
    m.done()
    if kind not in ATOMIC_KINDS.get(operation, BITWISE_KINDS):
        raise unknown(i, "this atomic")
    returns = i.opcode == "atom"
    operands = i.operands[1:] if returns else i.operands
    word, at = size_of(kind), d.position
    address = Address(d, i, operands[0], space, word)
    mask = d.mask(i)
    values = [d.value(operand, kind, i) for operand in operands[1:]]
    if len(values) != (2 if operation == "cas" else 1):
        raise unknown(i, f"{len(values)} values")
    narrow = kind in ("f16x2", "bf16x2", "f16", "bf16")
    update = _narrow_add(kind) if narrow else UPDATES[operation]
    result = d.result(i.operands[0], kind, i) if returns and d.is_used(i.operands[0]) else None
    if result is not None and i.guard is not None:
        d.reads.append(result[0])
    dtype = dtype_of(kind)

    def step(lanes: Lanes, R: Registers) -> None:
        before = R[result[0]] if result else None
        for target in address.targets(lanes, R, mask(R)):
            flat = target.locate(word)
            target.memory.check(lanes, i, flat, word, target.who, reading=True)
            target.observe(at, "atomic", flat, word)
            data = target.memory.data_words[word].view(dtype)
            index = spread(flat // word, target.count)
            arguments = [target.each(value(R)) for value in values]
            if result is None and isinstance(update, np.ufunc):
                update.at(data, index, arguments[0])
                continue
            old = _take_turns(data, index, update, arguments)
            if result is not None:
                slot, widen = result
                before = merge(lanes, before, target, widen(old) if widen else old)
                R[slot] = before

    return step


def _take_turns(data: Array, index: Array, update: Update, arguments: list[Array]) -> Array:
    """Apply updates in lane order, as many at once as have distinct addresses. Returns what each lane found."""
    found = np.empty(len(index), dtype=data.dtype)
    waiting = np.arange(len(index))
    while len(waiting):
        _, first = np.unique(index[waiting], return_index=True)
        turn = waiting[first]
        old = data[index[turn]]
        found[turn] = old
        data[index[turn]] = update(old, *[argument[turn] for argument in arguments])
        waiting = np.delete(waiting, first)
    return found
