"""What the interpreter refuses. Every message names the instruction, its PTX line, the block and the thread."""

from __future__ import annotations


class PtxError(Exception):
    """Root of everything the interpreter raises about a kernel."""


class PtxSyntaxError(PtxError):
    """The text is not PTX as this interpreter understands it."""


class UnknownInstruction(PtxError):
    """An opcode, modifier or operand form that is not implemented. Nothing is ever guessed."""


class LaunchError(PtxError):
    """Grid, block or arguments do not fit the kernel."""


class OutOfBounds(PtxError):
    """An access touches bytes that no live allocation owns."""


class Misaligned(PtxError):
    """An address is not a multiple of the access's width."""


class UnwrittenRead(PtxError):
    """A read of bytes, or of a register, that nothing wrote."""


class PendingCopy(PtxError):
    """Shared memory was touched while a `cp.async` into it had not been waited for."""


class DataRace(PtxError):
    """Two threads touched the same shared byte, one of them writing, with nothing between that orders them."""


class BarrierError(PtxError):
    """A barrier that some thread of the block, not exited, never reaches."""


class ParticipationError(PtxError):
    """A warp-wide instruction names lanes that do not take part in it, or leaves out one that does."""


class Trap(PtxError):
    """The kernel executed `trap`, a failed assertion, or a call of a function that the module does not define."""


class Timeout(PtxError):
    """The launch executed more basic blocks than its budget: most likely threads that wait for one another."""
