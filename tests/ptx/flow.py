"""Basic blocks, and the order in which divergent threads are scheduled.

Threads that wait at the lowest position of the order run first. The order keeps every loop together and puts what
follows a loop behind it (a weak topological order: strongly connected components, recursively), so threads that left a
branch or a loop early wait for the others exactly where the paths meet again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from .errors import PtxSyntaxError
from .flatten import Program
from .parser import Branchtargets, Instruction, Label, Not, Reg

# Instructions at which the lanes of a warp (or the warps of a block) meet: each begins a basic block of its own.
MEETING = {"bar", "barrier", "shfl", "vote", "match", "redux", "mma", "ldmatrix", "stmatrix", "movmatrix", "elect"}
ENDING = {"bra", "brx", "ret", "exit", "trap"}


@dataclass(slots=True)
class Block:
    """Straight-line code. `end` is the branch or return that leaves it; None falls through."""

    index: int
    body: list[Instruction] = field(default_factory=list)
    end: Instruction | None = None
    targets: tuple[int, ...] = ()  # where `end` goes when taken; for brx, in order of the table
    following: int | None = None  # where it goes otherwise

    @property
    def successors(self) -> tuple[int, ...]:
        return self.targets if self.following is None else (*self.targets, self.following)

    @property
    def meeting(self) -> Instruction | None:
        """The warp- or block-wide instruction this block starts with."""
        return self.body[0] if self.body and self.body[0].opcode in MEETING else None


def blocks_of(program: Program) -> list[Block]:
    """Blocks in scheduling order; block 0 is the entry. `targets` and `following` are positions in that list."""
    blocks, labels, tables = _cut(program)
    for block in blocks:
        _link(block, labels, tables)
    order = scheduling_order(len(blocks), lambda index: blocks[index].successors)
    position = {old: new for new, old in enumerate(order)}
    return [
        replace(
            blocks[old],
            index=position[old],
            targets=tuple(position[target] for target in blocks[old].targets),
            following=None if blocks[old].following is None else position[blocks[old].following or 0],
        )
        for old in order
    ]


def _cut(program: Program) -> tuple[list[Block], dict[str, int], dict[str, tuple[str, ...]]]:
    blocks = [Block(0)]
    labels: dict[str, int] = {}
    tables: dict[str, tuple[str, ...]] = {}

    def start() -> Block:
        if blocks[-1].body or blocks[-1].end:
            blocks.append(Block(len(blocks)))
        return blocks[-1]

    for item in program.code:
        match item:
            case Label(name):
                labels[name] = start().index
            case Branchtargets(name, targets):
                tables[name] = targets
            case Instruction(opcode=opcode) if opcode in ENDING:
                blocks[-1].end = item
                start()
            case Instruction(opcode=opcode) if opcode in MEETING:
                if item.guard is None:
                    start().body.append(item)
                    continue
                # A guarded meeting is a branch around an unguarded one.
                around = f"around {len(labels)}"
                guard = Reg(item.guard.name) if isinstance(item.guard, Not) else Not(item.guard.name)
                blocks[-1].end = replace(
                    item, opcode="bra", modifiers=("implied",), operands=(Reg(around),), guard=guard
                )
                start().body.append(replace(item, guard=None))
                labels[around] = start().index
            case Instruction():
                blocks[-1].body.append(item)
    if blocks[-1].end is None:  # control that falls off the end returns
        last = Instruction("ret", ("implied",), (), 0, "end of kernel")
        blocks[-1].end = last
    return blocks, labels, tables


def _link(block: Block, labels: dict[str, int], tables: dict[str, tuple[str, ...]]) -> None:
    end = block.end
    falls_through = end is None or end.guard is not None
    if end is not None and end.opcode == "brx":
        table = end.operands[-1]
        assert isinstance(table, Reg)
        block.targets = tuple(labels[name] for name in tables[table.name])
    elif end is not None and end.operands and end.opcode in ("bra", "ret"):
        target = end.operands[0]
        if not isinstance(target, Reg) or target.name not in labels:
            raise PtxSyntaxError(f"line {end.line}: unknown label in {end.text}")
        block.targets = (labels[target.name],)
    if falls_through:
        block.following = block.index + 1


def scheduling_order(count: int, successors: Callable[[int], Iterable[int]]) -> list[int]:
    """A weak topological order of the nodes reachable from 0 (Bourdoncle 1993, by repeated Tarjan)."""
    order: list[int] = []

    def visit(nodes: set[int], roots: Iterable[int]) -> None:
        for component in _components(nodes, roots, successors):
            head, *rest = component
            order.append(head)
            if rest:
                inner = set(rest)
                visit(inner, [node for node in (*successors(head), *sorted(inner)) if node in inner])

    visit(set(range(count)), [0])
    return order


def _components(nodes: set[int], roots: Iterable[int], successors: Callable[[int], Iterable[int]]) -> list[list[int]]:
    """Strongly connected components in topological order, each beginning with the node reached first."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in roots:
        if root in index:
            continue
        work: list[tuple[int, Iterator[int]]] = []
        pending = [root]
        while pending or work:
            if pending:
                node = pending.pop()
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
                work.append((node, iter([s for s in successors(node) if s in nodes])))
            node, edges = work[-1]
            for target in edges:
                if target not in index:
                    pending.append(target)
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    found.append(stack[cut:])
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
    return found[::-1]
