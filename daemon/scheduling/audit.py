"""The whole memory manager held against itself: what `check_invariants` means for tables, references and owners.

Between two steps:
    free + referenced blocks = all blocks; the ledger of owners adds up to the referenced ones
    a block's reference count = tables and pins that hold it
    blocks of a sequence = those of its computed tokens, no more (on demand, without a window); where steps are begun
        before they are asked for, those of a running one's next token count too
    the prefix cache and the pool agree on which blocks hold a prefix
    host slots in use = those of swapped-out sequences
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..memory.block_pool import NULL_BLOCK
from ..memory.sequence import Sequence
from .residency import NO_SLOT

if TYPE_CHECKING:
    from .scheduler import Scheduler


def audit(scheduler: Scheduler, in_flight: list[Sequence]) -> None:
    """Raise RuntimeError naming what does not add up. `in_flight`: sequences of the step that the device works on."""
    scheduler.roster.check_invariants()
    scheduler.residency.check_invariants()
    if scheduler.cache is not None:
        scheduler.cache.check_invariants()
    leaving = [sequence for sequence in in_flight if sequence.finished]
    holders = [*scheduler.roster.sequences.values(), *leaving]
    _check_references(scheduler, holders)
    for sequence in holders:
        _check_table(scheduler, sequence)
    slots = [slot for sequence in holders for slot in sequence.host_slots if slot != NO_SLOT]
    reading = scheduler.residency.slots_in_use
    if len(set(slots)) != len(slots) or len(slots) + len(reading) != scheduler.host.num_slots - scheduler.host.num_free:
        raise RuntimeError("host slots in use are not those of the swapped-out sequences")


def _check_references(scheduler: Scheduler, holders: list[Sequence]) -> None:
    counts: Counter[int] = Counter(scheduler.pins.references())
    owners: dict[int, set[int]] = {}
    for sequence in holders:
        counts.update(sequence.live_blocks())
        for block in sequence.live_blocks():
            owners.setdefault(block, set()).add(sequence.uid)
    for block in range(scheduler.pool.num_blocks):
        if scheduler.pool.ref_count[block] != counts[block]:
            raise RuntimeError(
                f"block {block} has {scheduler.pool.ref_count[block]} references, {counts[block]} tables hold it"
            )
    pinned = scheduler.pins.references()
    for block, uids in owners.items():
        if block not in pinned and scheduler.pool.owner(block) not in uids:
            raise RuntimeError(f"block {block} is charged to {scheduler.pool.owner(block)}, and held by {uids}")


def _check_table(scheduler: Scheduler, sequence: Sequence) -> None:
    table, nulls = sequence.block_table, sequence.num_null_blocks
    if table[:nulls].count(NULL_BLOCK) != nulls or NULL_BLOCK in table[nulls:]:
        raise RuntimeError(f"{sequence!r} counts its NULL blocks wrong")
    if sequence.host_slots and table:
        raise RuntimeError(f"{sequence!r} is swapped out and holds blocks")
    held = len(sequence.host_slots or table)
    needed = scheduler.tables.blocks_for(sequence.num_computed_tokens)
    if held < needed:
        raise RuntimeError(f"{sequence!r} lacks blocks for computed tokens")
    most = scheduler.tables.blocks_for(scheduler.residency.entitled_tokens(sequence))
    if held > most and scheduler.reservation == "on-demand" and not sequence.in_flight:
        raise RuntimeError(f"{sequence!r} holds {held} blocks, its computed tokens need {needed}")
    if not 0 <= sequence.num_computed_tokens <= sequence.num_tokens:
        raise RuntimeError(f"{sequence!r} has computed tokens that it does not have")
