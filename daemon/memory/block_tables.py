"""What happens to a sequence's block table: growing, sharing, copy-on-write, sliding, cutting, giving back.

A block may be written by a sequence only if nobody else holds it and the prefix cache does not know it. Forks, prefix
hits that end inside a block, prompts that are wholly cached and truncation all come down to the same situation: the
sequence's next token falls into a block that it may not write. `grow` then copies that block, at the first write.
"""

from __future__ import annotations

from .block_pool import EMPTY, NULL_BLOCK, BlockPool
from .prefix_cache import Hit, PrefixCache
from .sequence import Sequence


class BlockTables:
    """Operations on block tables over one pool. `window` > 0: no layer looks back further than so many tokens."""

    def __init__(self, pool: BlockPool, cache: PrefixCache | None, window: int = 0) -> None:
        self.pool = pool
        self.cache = cache if not window else None  # a table with holes is no prefix
        self.window = window
        self.copies: list[tuple[int, int]] = []  # of the step being planned: (source, destination)
        self._sources: set[int] = set()
        self._deferred: list[tuple[int, int]] = []  # (block, uid): sources to give back once the step is planned

    # Sizes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.pool.block_size)

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of up to `num_tokens` computed tokens needs at any time."""
        blocks = self.blocks_for(num_tokens)
        if self.window:
            return min(blocks, (self.window - 2) // self.pool.block_size + 2)  # `window` tokens, wherever they begin
        return blocks

    def blocks_short(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks needed before the tokens up to `num_tokens` can be computed."""
        short = max(0, self.blocks_for(num_tokens) - len(sequence.block_table))
        tail = sequence.num_computed_tokens // self.pool.block_size
        if tail < len(sequence.block_table) and self.pool.ref_count[sequence.block_table[tail]] > 1:
            short += 1
        return short

    def blocks_to_start(self, hit: Hit, num_tokens: int) -> int:
        """Free blocks needed to begin with `hit` and reach `num_tokens`: blocks that nobody holds count as free."""
        counts = [self.pool.ref_count[block] for block in hit.blocks]
        copied = hit.num_tokens < len(counts) * self.pool.block_size and counts[-1] > 0
        return self.blocks_for(num_tokens) - len(counts) + counts.count(0) + copied

    def promise(self, sequence: Sequence) -> int:
        """Free blocks that the sequence needs at most, at any time, until it has computed `goal_tokens`."""
        short = self.blocks_short(sequence, sequence.goal_tokens)
        if self.window:
            return min(short, max(0, self.peak_blocks(sequence.goal_tokens) - sequence.num_blocks))
        return short

    # Growing

    def grow(self, sequence: Sequence, num_tokens: int, *, spare: bool) -> None:
        """Take blocks up to `num_tokens` and make the next token's block writable.

        The caller has made sure of `blocks_short` free blocks. A block that only the cache knows besides us is copied
        if a block is to `spare` for that, else the cache forgets it.
        """
        table, pool = sequence.block_table, self.pool
        tail = sequence.num_computed_tokens // pool.block_size
        if tail < len(table):
            block = table[tail]
            if pool.ref_count[block] > 1 or (pool.kind[block] != EMPTY and spare):
                table[tail] = self._take(sequence.uid, 1)[0]
                self.copies.append((block, table[tail]))
                self._sources.add(block)
                self._release(block, sequence.uid)
            elif pool.kind[block] != EMPTY and self.cache is not None:
                self.cache.forget(block)
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            table.extend(self._take(sequence.uid, missing))

    def _take(self, uid: int, count: int) -> list[int]:
        blocks = self.pool.allocate(uid, count)
        if blocks is None:
            raise RuntimeError(f"{count} blocks were planned for uid {uid}, {self.pool.num_free} are free")
        return blocks

    # Sharing

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let `child`, which has no blocks, begin with the first `num_tokens` computed tokens of `parent`.

        Nothing is shared where the parent's blocks before that point left the sliding window: the child recomputes.
        """
        first_needed = max(0, num_tokens - self.window + 1) if self.window else 0
        if parent.num_null_blocks * self.pool.block_size > first_needed:
            return
        self.adopt(child, parent.block_table[: self.blocks_for(num_tokens)], num_tokens)
        child.num_null_blocks = min(parent.num_null_blocks, len(child.block_table))

    def adopt(self, sequence: Sequence, blocks: list[int], num_tokens: int) -> None:
        """Give a sequence without blocks a reference to each of `blocks`, which hold its first `num_tokens` tokens."""
        for block in blocks:
            if block != NULL_BLOCK:
                self.pool.share(block, sequence.uid)
        sequence.block_table = list(blocks)
        sequence.num_computed_tokens = num_tokens

    # Giving back

    def release(self, sequence: Sequence) -> None:
        """Give back every block; the sequence keeps its tokens."""
        self._release_all(sequence.live_blocks(), sequence.uid)
        sequence.block_table = []
        sequence.num_null_blocks = 0
        sequence.num_computed_tokens = 0

    def cut(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back what lies beyond the first `num_tokens` tokens, which become all that is computed."""
        lost_history = self.window and sequence.num_null_blocks * self.pool.block_size > num_tokens - self.window + 1
        if lost_history and num_tokens < sequence.num_computed_tokens:
            self.release(sequence)
            return
        keep = self.blocks_for(num_tokens)
        self._release_all(sequence.block_table[keep:], sequence.uid)
        del sequence.block_table[keep:]
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens)

    def slide(self, sequence: Sequence) -> None:
        """Give back blocks that no later token looks at: the next one, at position p, sees p - window + 1 .. p."""
        dead = (sequence.num_computed_tokens - self.window + 1) // self.pool.block_size
        for index in range(sequence.num_null_blocks, dead):
            self._release(sequence.block_table[index], sequence.uid)
            sequence.block_table[index] = NULL_BLOCK
        sequence.num_null_blocks = max(sequence.num_null_blocks, dead)

    def _release_all(self, blocks: list[int], uid: int) -> None:
        for block in reversed(blocks):
            if block != NULL_BLOCK:
                self._release(block, uid)

    def _release(self, block: int, uid: int) -> None:
        """Give back one reference; a block that this step still copies from is not free before the step is planned."""
        if block in self._sources and self.pool.ref_count[block] == 1:
            self._deferred.append((block, uid))
        else:
            self.pool.release(block, uid)

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies of the step that is now planned; their sources are given back."""
        copies, self.copies = self.copies, []
        for block, uid in self._deferred:
            self.pool.release(block, uid)
        self._deferred.clear()
        self._sources.clear()
        return copies
