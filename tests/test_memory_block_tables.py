"""Block tables by themselves: what a step copies stays untouched until the step is planned."""

from __future__ import annotations

from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.memory.block_tables import BlockTables
from kvpool.daemon.memory.prefix_cache import PrefixCache
from tests.support.scheduling import UID, prompt, sequence


def tables_with_a_cached_block(num_blocks: int) -> BlockTables:
    """A pool whose only cached block holds the first four tokens of `prompt`."""
    pool = BlockPool(num_blocks, 4)
    cache = PrefixCache(pool, secret=b"s")
    tables = BlockTables(pool, cache)
    first = sequence(prompt(4))
    tables.grow(first, 4, spare=True)
    first.num_computed_tokens = 4
    cache.insert(first, 0, 1)
    tables.release(first)
    return tables


def test_the_source_of_a_copy_is_not_free_before_the_step_is_planned() -> None:
    """Else the same step could copy something else into it, and copies could not be done all at once."""
    tables = tables_with_a_cached_block(2)
    reader = sequence(prompt(4))
    assert tables.cache is not None
    hit = tables.cache.lookup(reader)
    assert (hit.num_tokens, tables.blocks_to_start(hit, 4)) == (3, 1)
    tables.adopt(reader, hit.blocks, hit.num_tokens)
    tables.grow(reader, 4, spare=True)
    assert tables.pool.allocate(UID) is None
    assert tables.take_copies() == [(hit.blocks[0], reader.block_table[0])]
    assert tables.take_copies() == []
    assert tables.pool.num_free == tables.pool.num_cached == 1
    tables.pool.check_invariants()


def test_without_a_spare_block_the_cache_forgets_instead() -> None:
    tables = tables_with_a_cached_block(1)
    reader = sequence(prompt(4))
    assert tables.cache is not None
    hit = tables.cache.lookup(reader)
    tables.adopt(reader, hit.blocks, hit.num_tokens)
    assert tables.blocks_short(reader, 4) == 0
    tables.grow(reader, 4, spare=False)
    assert reader.block_table == hit.blocks
    assert len(tables.cache) == 0
    assert tables.take_copies() == []


def test_sizes_with_and_without_a_window() -> None:
    whole, sliding = BlockTables(BlockPool(8, 4), None), BlockTables(BlockPool(8, 4), None, window=6)
    assert [whole.peak_blocks(n) for n in (0, 1, 4, 5, 100)] == [0, 1, 1, 2, 25]
    assert [sliding.peak_blocks(n) for n in (0, 1, 4, 5, 100)] == [0, 1, 1, 2, 3]  # 6 tokens touch at most 3 blocks
