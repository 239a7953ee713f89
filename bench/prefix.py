"""How much a prefix cache of a given size reuses, and what the pool's and the cache's operations cost.

    python -m bench.prefix [--trace mooncake_conversation.jsonl] [--sizes 1000,5000,...] [--no-operations]

Reuse: the block hashes of a trace (`hash_ids`, one JSON object per line) are replayed, in order, through the real pool
and PrefixCache. A block of the trace is one block of the pool, of one token, so the hashes decide as they did where the
trace was taken. Each request looks up its prefix, takes blocks for the rest, fills the cache, and gives them all back.
Without a trace, a synthetic conversation load is replayed. `plain LRU` is the same cache without its list of reused
blocks; `unbounded` has room for everything.

Operations: CPU time per block of 16 tokens as the pool grows. It should not grow with the pool.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.memory.block_tables import BlockTables
from kvpool.daemon.memory.prefix_cache import Hit, PrefixCache
from kvpool.daemon.memory.sequence import Sequence

UID = 1000
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
MOST_CACHED = 200_000  # entries of the index in the operations' table: its memory, not its speed, is the limit
BLOCK_SIZE = 16
TABLE_BLOCKS = 64  # a sequence of 1024 tokens


class PlainLru(PrefixCache):
    """Without scan resistance: no block ever counts as reused, and blocks age in the order of their prompt."""

    def count_hit(self, hit: Hit, sequence: Sequence) -> None:
        self.stats.hit_tokens += hit.num_tokens


def read_trace(path: Path) -> list[list[int]]:
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def synthetic(dice: random.Random, requests: int = 4000) -> list[list[int]]:
    """Conversations that grow turn by turn behind one of a few system prompts, mixed with one-off prompts."""
    systems = [[(s << 20) + i for i in range(8)] for s in range(4)]
    chats: list[list[int]] = []
    fresh = iter(range(1 << 24, 1 << 30))
    found = []
    for _ in range(requests):
        kind = dice.random()
        if kind < 0.35:
            found.append([next(fresh) for _ in range(dice.randint(4, 60))])
            continue
        if kind < 0.55 or not chats:
            chats.append(list(dice.choice(systems)))
        chat = dice.choice(chats[-200:])
        chat += [next(fresh) for _ in range(dice.randint(1, 12))]
        found.append(list(chat))
    return found


def replay(requests: list[list[int]], num_blocks: int, policy: type[PrefixCache]) -> float:
    """The share of all blocks that was found as a prefix."""
    pool = BlockPool(num_blocks, 1)
    cache = policy(pool, secret=b"bench")
    tables = BlockTables(pool, cache)
    reused = total = 0
    for blocks in requests:
        sequence = Sequence(uid=UID, token_ids=[*blocks, 0], max_tokens=1)  # the last token is never looked up
        hit = cache.lookup(sequence)
        cache.count_hit(hit, sequence)
        tables.adopt(sequence, hit.blocks, hit.num_tokens)
        tables.grow(sequence, len(blocks), spare=True)
        cache.insert(sequence, 0, len(blocks))
        if policy is PlainLru:
            sequence.block_table.reverse()  # release() gives the last block back first
        tables.release(sequence)
        reused += hit.num_tokens
        total += len(blocks)
    return reused / total


def reuse_table(requests: list[list[int]], sizes: list[int]) -> Iterator[str]:
    distinct = len({block for blocks in requests for block in blocks})
    yield f"{len(requests)} requests, {sum(map(len, requests))} blocks, {distinct} distinct"
    yield f"{'blocks':>10}{'plain LRU':>12}{'kvpool':>10}{'ratio':>9}"
    for size in [*(size for size in sizes if size >= max(map(len, requests))), distinct]:
        plain, ours = replay(requests, size, PlainLru), replay(requests, size, PrefixCache)
        name = "unbounded" if size == distinct else f"{size:,}"
        yield f"{name:>10}{plain:12.4f}{ours:10.4f}{ours / plain:8.3f}x"


def timed(rounds: int, work: Iterator[None]) -> float:
    """Microseconds of CPU time per round, the median of five parts; `work` does one round at each step."""
    parts = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(rounds // 5):
            next(work)
        parts.append((time.process_time() - began) / (rounds // 5) * 1e6)
    return statistics.median(parts)


def allocate_and_release(pool: BlockPool) -> Iterator[None]:
    """Sequences come and go, so that the free list is in nobody's order."""
    dice = random.Random(1)
    tables = [pool.allocate(UID, 8) or [] for _ in range(min(100, pool.num_blocks // 16))]
    while True:
        index = dice.randrange(len(tables))
        pool.release_all(tables[index], UID)
        tables[index] = pool.allocate(UID, 8) or []
        yield


def numbered_prompt(number: int) -> list[int]:
    return [number * TABLE_BLOCKS * BLOCK_SIZE + i & 0x7FFFFFFF for i in range(TABLE_BLOCKS * BLOCK_SIZE)]


def fill(tables: BlockTables, cache: PrefixCache, number: int) -> None:
    sequence = Sequence(uid=UID, token_ids=numbered_prompt(number), max_tokens=1)
    tables.grow(sequence, sequence.num_tokens, spare=False)
    cache.insert(sequence, 0, TABLE_BLOCKS)
    tables.release(sequence)


def lookups(tables: BlockTables, cache: PrefixCache, cached: int) -> Iterator[None]:
    """Prompts that are wholly cached: hash, find, compare, share, give back."""
    dice = random.Random(1)
    while True:
        sequence = Sequence(uid=UID, token_ids=numbered_prompt(dice.randrange(cached)), max_tokens=1)
        hit = cache.lookup(sequence)
        tables.adopt(sequence, hit.blocks, hit.num_tokens)
        tables.release(sequence)
        yield


def evictions(tables: BlockTables, cache: PrefixCache, first: int) -> Iterator[None]:
    """New prompts that push old ones out: take, forget, hash, insert, give back."""
    number = first
    while True:
        fill(tables, cache, number)
        number += 1
        yield


def operations_table() -> Iterator[str]:
    yield f"{'':>12}{'take and give back':>30}{'look up':>20}{'fill':>20}"
    yield f"{'pool blocks':>12}{'us/block':>15}{'ns/token':>15}" + f"{'us/block':>10}{'ns/token':>10}" * 2
    for size in POOL_SIZES:
        pool = BlockPool(size, BLOCK_SIZE)
        taking = timed(20_000, allocate_and_release(pool)) / 8
        del pool
        pool = BlockPool(size, BLOCK_SIZE)
        cache = PrefixCache(pool, secret=b"bench")
        tables = BlockTables(pool, cache)
        cached = min(size, MOST_CACHED) // TABLE_BLOCKS
        for number in range(cached):
            fill(tables, cache, number)
        looking = timed(300, lookups(tables, cache, cached)) / TABLE_BLOCKS
        filling = timed(300, evictions(tables, cache, cached)) / TABLE_BLOCKS
        columns = [(taking, 15), (looking, 10), (filling, 10)]
        yield f"{size:12,}" + "".join(f"{us:{w}.2f}{us * 1000 / BLOCK_SIZE:{w}.1f}" for us, w in columns)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids (the Mooncake format)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="cache sizes in blocks")
    parser.add_argument("--no-operations", action="store_true", help="only replay")
    options = parser.parse_args(arguments)
    print("python -m bench.prefix", shlex.join(sys.argv[1:] if arguments is None else arguments))
    requests = read_trace(options.trace) if options.trace else synthetic(random.Random(1))
    print(f"\nreuse: {options.trace.stem if options.trace else 'synthetic conversations'}", end=", ")
    for line in reuse_table(requests, [int(size) for size in options.sizes.split(",")]):
        print(line, flush=True)
    if not options.no_operations:
        print("\noperations")
        for line in operations_table():
            print(line, flush=True)


if __name__ == "__main__":
    main()
