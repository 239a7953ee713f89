"""The pool's bookkeeping: which block is whose, which is free, and which free block is taken next.

A block is a number. Everything known of it lies in flat arrays, so a pool of ten million blocks is a few arrays and no
objects, and taking or giving back a block touches a fixed number of entries whatever the size of the pool.

Blocks that nobody references stand in one of three doubly linked lists, threaded through two of the arrays:

    EMPTY    hold nothing worth keeping, and are taken first
    CACHED   still hold a prefix that somebody may ask for again, oldest first
    REUSED   the same, asked for several times already

Together they are the eviction order. An EMPTY block goes first; then the older of the two other heads, where a REUSED
block ages `REUSED_AGES_SLOWER` times more slowly. That is LRU with scan resistance: one-off prompts push each other
out, and a prefix that many requests share survives several turnovers of the pool, yet not for ever.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

EMPTY, CACHED, REUSED = 0, 1, 2
NUM_LISTS = 3

NULL_BLOCK = -1
"""Stands in a block table where a block has left the sliding window."""

NOBODY = -1
"""The uid of a block that nobody references."""

REUSED_AGES_SLOWER = 4
"""Chosen on the Mooncake conversation trace, where it beats plain LRU in most pools and loses to it in none."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, reference counted, each charged to one owner while referenced.

    A shared block is charged once: to the uid that has held it longest, and when that uid lets go of it, to the next
    one that still holds it. So the charges of all owners add up to the number of referenced blocks, always.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one token; set pool_bytes or block_size")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks  # unreferenced blocks, those that hold a prefix included
        self.num_cached = 0  # of those, blocks that hold a prefix
        self.ref_count = array("i", bytes(4 * num_blocks))  # tables (and pins) that hold the block
        self.kind = array("b", bytes(num_blocks))  # the list it stands in, or will stand in, when unreferenced
        self.released_at = array("q", bytes(8 * num_blocks))  # value of `tick` when it became unreferenced
        self.tick = 0  # blocks that became unreferenced so far: the pool's notion of time
        self.owners = array("q", [NOBODY]) * num_blocks  # the uid that each block is charged to
        self._co_holders: dict[int, dict[int, int]] = {}  # block -> {uid: references}, only where uids differ
        self._charged: dict[int, int] = {}
        self._evicted: Callable[[int], None] | None = None
        links = num_blocks + NUM_LISTS  # the sentinel of list k is entry num_blocks + k
        self._next = array("i", range(1, links + 1))
        self._previous = array("i", range(-1, links - 1))
        for sentinel in range(num_blocks, links):
            self._next[sentinel] = self._previous[sentinel] = sentinel
        self._link_all_as_empty()

    def _link_all_as_empty(self) -> None:
        sentinel = self.num_blocks + EMPTY
        self._next[sentinel], self._previous[sentinel] = 0, self.num_blocks - 1
        self._previous[0] = self._next[self.num_blocks - 1] = sentinel

    # Taking and giving back

    def allocate(self, uid: int, count: int = 1) -> list[int] | None:
        """`count` blocks, each with one reference, charged to `uid`; None, and nothing taken, if too few are free."""
        if count > self.num_free:
            return None
        blocks = self._take_empty(count)
        while len(blocks) < count:
            blocks.append(self._evict_one())
        for block in blocks:
            self.ref_count[block] = 1
            self.owners[block] = uid
        self.num_free -= count
        self._charge(uid, count)
        return blocks

    def _take_empty(self, count: int) -> list[int]:
        """Unlink up to `count` blocks from the head of the EMPTY list, all at once."""
        following, sentinel = self._next, self.num_blocks + EMPTY
        blocks: list[int] = []
        block = following[sentinel]
        while len(blocks) < count and block != sentinel:
            blocks.append(block)
            block = following[block]
        following[sentinel], self._previous[block] = block, sentinel
        return blocks

    def _evict_one(self) -> int:
        """Unlink the cached block that goes next, and say so."""
        block = self._next[self._list_to_evict_from()]
        self._unlink(block)
        self.kind[block] = EMPTY
        self.num_cached -= 1
        if self._evicted is not None:
            self._evicted(block)
        return block

    def _list_to_evict_from(self) -> int:
        """The sentinel of the list whose head is older, as the module's docstring counts age."""
        following = self._next
        cached, reused = self.num_blocks + CACHED, self.num_blocks + REUSED
        if following[cached] == cached:
            return reused
        if following[reused] == reused:
            return cached
        age = self.tick - self.released_at[following[cached]]
        reused_age = self.tick - self.released_at[following[reused]]
        return reused if reused_age > REUSED_AGES_SLOWER * age else cached

    def share(self, block: int, uid: int) -> None:
        """One more reference, by `uid`; a cached block that nobody held leaves its list and is charged to `uid`."""
        owner = self.owners[block]
        if owner == NOBODY:
            self._unlink(block)
            self.num_free -= 1
            self.num_cached -= self.kind[block] != EMPTY
            self.owners[block] = uid
            self._charge(uid, 1)
        elif owner != uid or block in self._co_holders:
            holders = self._co_holders.setdefault(block, {owner: self.ref_count[block]})
            holders[uid] = holders.get(uid, 0) + 1
        self.ref_count[block] += 1

    def release(self, block: int, uid: int) -> None:
        """Give back one reference that `uid` holds; the last one puts the block at the young end of its list."""
        if self.ref_count[block] < 1:
            raise RuntimeError(f"block {block} is released more often than it was taken")
        holders = self._co_holders.get(block)
        if holders is not None:
            self._let_go(block, uid, holders)
        elif self.owners[block] != uid:
            raise RuntimeError(f"uid {uid} releases block {block} of uid {self.owners[block]}")
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self._charge(uid, -1)
            self.owners[block] = NOBODY
            self.num_free += 1
            self.num_cached += self.kind[block] != EMPTY
            self.released_at[block] = self.tick
            self.tick += 1
            sentinel = self.num_blocks + self.kind[block]
            self._insert_after(self._previous[sentinel], block)

    def _let_go(self, block: int, uid: int, holders: dict[int, int]) -> None:
        """Account for one reference of several uids; the charge passes to whoever has held the block longest."""
        if uid not in holders:
            raise RuntimeError(f"uid {uid} releases block {block}, which it does not hold")
        holders[uid] -= 1
        if holders[uid] == 0:
            del holders[uid]
            if self.owners[block] == uid:
                heir = next(iter(holders))
                self._charge(uid, -1)
                self._charge(heir, 1)
                self.owners[block] = heir
            if len(holders) == 1:
                del self._co_holders[block]

    def release_all(self, blocks: Iterable[int], uid: int) -> None:
        """Give back a table's blocks, last first, so that a prefix outlives what follows it. NULL_BLOCK is skipped."""
        for block in reversed(list(blocks)):
            if block != NULL_BLOCK:
                self.release(block, uid)

    # What the prefix cache says of a block

    def on_evict(self, forget: Callable[[int], None]) -> None:
        """`forget(block)` is called when a CACHED or REUSED block is about to be given to somebody else."""
        self._evicted = forget

    def set_kind(self, block: int, kind: int) -> None:
        """What the block holds: EMPTY, CACHED or REUSED. An unreferenced block moves to that list's old end."""
        if self.ref_count[block] == 0 and self.kind[block] != kind:
            self._unlink(block)
            self.num_cached += (kind != EMPTY) - (self.kind[block] != EMPTY)
            self._insert_after(self.num_blocks + kind, block)
        self.kind[block] = kind

    def oldest(self, kind: int) -> int | None:
        """The unreferenced block of that kind which was released first."""
        block = self._next[self.num_blocks + kind]
        return block if block < self.num_blocks else None

    # Ledger

    def charged(self, uid: int) -> int:
        """Blocks charged to `uid`."""
        return self._charged.get(uid, 0)

    def charges(self) -> dict[int, int]:
        """Blocks charged, by uid; their sum is `num_used`."""
        return dict(self._charged)

    def owner(self, block: int) -> int:
        """The uid that the block is charged to; NOBODY where it is free."""
        return self.owners[block]

    def references(self, block: int, uid: int) -> int:
        """References that `uid` has to a block charged to it; 0 where it is charged to somebody else."""
        if self.owners[block] != uid:
            return 0
        holders = self._co_holders.get(block)
        return holders[uid] if holders else self.ref_count[block]

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - self.num_free

    def _charge(self, uid: int, count: int) -> None:
        charged = self._charged.get(uid, 0) + count
        if charged:
            self._charged[uid] = charged
        else:
            self._charged.pop(uid, None)

    # Linked lists

    def _insert_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._previous[block], self._next[block] = before, after
        self._next[before] = self._previous[after] = block

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before

    def _walk(self, kind: int) -> list[int]:
        sentinel = self.num_blocks + kind
        found: list[int] = []
        before, block = sentinel, self._next[sentinel]
        while block != sentinel:
            if not 0 <= block < self.num_blocks or self._previous[block] != before or len(found) > self.num_blocks:
                raise RuntimeError(f"the free list is broken at block {block}")
            found.append(block)
            before, block = block, self._next[block]
        if self._previous[sentinel] != before:
            raise RuntimeError("a free list does not close")
        return found

    def check_invariants(self) -> None:
        """Raise RuntimeError if free + referenced != total, a list is broken, or the ledger does not add up."""
        free = [(block, kind) for kind in range(NUM_LISTS) for block in self._walk(kind)]
        if sum(kind != EMPTY for _, kind in free) != self.num_cached:
            raise RuntimeError(f"{self.num_cached} free blocks are counted as cached, the lists hold another number")
        if len(free) != self.num_free or len({block for block, _ in free}) != len(free):
            raise RuntimeError(f"{len(free)} blocks stand in the free lists, {self.num_free} are counted as free")
        for block, kind in free:
            if self.ref_count[block] or self.owners[block] != NOBODY or self.kind[block] != kind:
                raise RuntimeError(f"free block {block} has a reference, an owner, or stands in the wrong list")
        charged: dict[int, int] = {}
        for block in range(self.num_blocks):
            if self.ref_count[block] < 0 or (self.ref_count[block] == 0) != (self.owners[block] == NOBODY):
                raise RuntimeError(f"block {block} has {self.ref_count[block]} references, owner {self.owners[block]}")
            if self.owners[block] != NOBODY:
                charged[self.owners[block]] = charged.get(self.owners[block], 0) + 1
        if charged != self._charged or sum(charged.values()) != self.num_used:
            raise RuntimeError(f"the ledger says {self._charged}, the blocks say {charged}")
        for block, holders in self._co_holders.items():
            if sum(holders.values()) != self.ref_count[block] or self.owners[block] not in holders or len(holders) < 2:
                raise RuntimeError(f"block {block} has {self.ref_count[block]} references, its holders are {holders}")
