"""The dotted words of an instruction, and the refusal of those that are not known."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import UnknownInstruction
from .parser import Instruction
from .scalars import DTYPES


class Modifiers:
    """Takes an instruction's modifiers one by one; `done` refuses any that nobody took."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.left = list(instruction.modifiers)

    def flag(self, name: str) -> bool:
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def one_of(self, names: Sequence[str], default: str = "") -> str:
        for name in self.left:
            if name in names:
                self.left.remove(name)
                return name
        return default

    def type(self) -> str:
        """The last modifier, which must be a type."""
        if not self.left or self.left[-1] not in DTYPES:
            raise unknown(self.instruction, "no type")
        return self.left.pop()

    def done(self) -> None:
        if self.left:
            raise unknown(self.instruction, f"modifier .{self.left[0]}")


def unknown(instruction: Instruction, why: str) -> UnknownInstruction:
    return UnknownInstruction(f"line {instruction.line}: {instruction.text}: {why} is not implemented")
