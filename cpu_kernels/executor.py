"""The loop that every thread runs: wait for a step, work through its operations, say when the step is done.

An operation is divided into units that threads claim one by one; the next operation starts when all units are done.
Nobody waits for a thread, only for work: a thread that lost its processor between two units delays no one, and skips
what the others did meanwhile. Counters carry the step's number in their high half, so that such a latecomer can never
claim, or count, a unit of a later step.
"""

from __future__ import annotations

from collections.abc import Callable

from . import table as t
from .attention import attend, attend_shared
from .jit import kernel
from .linear import linear, linear_units
from .memory import (
    atomic_add,
    atomic_load,
    call_address,
    compare_exchange,
    flush_denormals,
    load_i64,
    pause,
    signal_event,
    store_i64,
    wait_event,
    yield_processor,
)
from .plan import plan_attention
from .rope import rope_kv_write
from .rowwise import embed, gated_activation, layer_output, rms_norm, select_rows
from .sample import sample
from .table import ROW_BYTES, rows_of, rows_per_unit, word

Operation = Callable[[int, int, int, int], None]

SPINS = 2000  # some 20 microseconds; then the processor is offered to whoever holds the unit we wait for


# What runs a unit of each operation: function(row, state, unit, thread). Called by address: compiled apart, each is
# optimised once.
OPERATIONS: dict[int, Operation] = {
    t.PLAN: plan_attention,
    t.EMBED: embed,
    t.RMS_NORM: rms_norm,
    t.LINEAR: linear,
    t.ROPE_KV_WRITE: rope_kv_write,
    t.SHARED_ATTENTION: attend_shared,
    t.ATTENTION: attend,
    t.ACTIVATION: gated_activation,
    t.LAYER_OUTPUT: layer_output,
    t.SELECT_ROWS: select_rows,
    t.SAMPLE: sample,
}


@kernel
def units_of(row: int, state: int) -> int:
    """Into how many units an operation is divided in this step."""
    opcode = word(row, t.OPCODE)
    if opcode == t.PLAN:
        return 1
    if opcode == t.LINEAR:
        return linear_units(row, state)
    if opcode == t.SHARED_ATTENTION:  # a window may begin behind what is shared
        return 0 if word(row, t.WINDOW) else word(state, t.NUM_SHARED_UNITS)
    if opcode == t.ATTENTION:
        return word(state, t.NUM_UNITS)
    rows = rows_of(row, state)
    if opcode == t.SAMPLE:
        return rows
    each = rows_per_unit(rows, state)
    return (rows + each - 1) // each


@kernel
def claim(counter: int, base: int, units: int) -> int:
    """The next unclaimed unit, or -1 when there is none (or the step is over)."""
    while True:
        ticket = atomic_load(counter)
        if ticket - base < 0 or ticket - base >= units:
            return -1
        if compare_exchange(counter, ticket, ticket + 1):
            return ticket - base


@kernel
def await_units(counter: int, goal: int, state: int) -> bool:
    """Wait until `goal` units are done; False if a thread failed."""
    spins = 0
    while atomic_load(counter) < goal:
        if atomic_load(state + 8 * t.FAILED):
            return False
        spins += 1
        if spins < SPINS:
            pause()
        else:
            yield_processor()
    return True


@kernel
def run_step(state: int, generation: int, thread: int) -> bool:
    """Take part in one step until all of it is done; False if a thread failed."""
    base = generation << t.GENERATION_SHIFT
    for op in range(word(state, t.NUM_OPS)):
        row = word(state, t.OPS) + op * ROW_BYTES
        counter = word(state, t.PROGRESS) + op * t.PROGRESS_BYTES
        function = word(state, t.FUNCTIONS) + 8 * word(row, t.OPCODE)
        units = units_of(row, state)
        unit = claim(counter, base, units)
        while unit >= 0:
            call_address(load_i64(function), (row, state, unit, thread))
            atomic_add(counter + 64, 1)
            unit = claim(counter, base, units)
        if not await_units(counter + 64, base + units, state):
            return False
    return True


def run_thread(state: int, thread: int, wake_event: int, mailbox: int) -> None:
    """Serve steps until told to stop. `mailbox`: 8 bytes of this thread's own, for reading and writing events."""
    flush_denormals()
    seen = 0
    while True:
        while atomic_load(state + 8 * t.GENERATION) == seen:
            if atomic_load(state + 8 * t.STOP):
                return
            wait_event(wake_event, mailbox)
        seen = atomic_load(state + 8 * t.GENERATION)
        if not run_step(state, seen, thread):
            return
        if compare_exchange(state + 8 * t.FINISHED, seen - 1, seen):
            store_i64(mailbox, 1)
            signal_event(word(state, t.DONE_EVENT), mailbox)
