"""Full blocks that may serve again: found by a keyed hash of everything before them, never trusted without a compare.

A block is known by the hash of its tokens and of the hash of the block before it, so one look-up proves a whole prefix.
The first link hashes what must be equal besides the tokens: model, dtype, block size, and the tenant, which is the uid
that the kernel reports for the peer. The key is a secret of this boot, so nobody can prepare two prompts that collide,
and the tokens and the parent are compared on every hit all the same.

Prefixes of one tenant are invisible to the others. `publish` moves blocks to a chain that all tenants look up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from .block_pool import CACHED, EMPTY, REUSED, BlockPool
from .sequence import Sequence

HITS_TO_BE_REUSED = 4
"""Hits after which a block counts as reused (see block_pool); chosen on the same trace as its age factor."""

PARTIAL_TAIL_CANDIDATES = 16
"""Blocks compared for the longest common beginning where a prompt leaves the known chain inside a block."""

_DIGEST_BYTES = 16


@dataclass(slots=True)
class _Entry:
    """What the cache knows of one block."""

    key: bytes
    parent: bytes  # key of the block before it
    tokens: bytes  # block_size int32
    hits: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known beginning of a sequence: its first `num_tokens` tokens lie in `blocks`."""

    blocks: list[int]
    num_tokens: int
    num_full_blocks: int  # of the sequence's own chain; one more block may be used in part


class _Note(NamedTuple):
    """Blocks released before the pool's `tick` were released by `until`; the note was begun at `since`."""

    since: float
    until: float
    tick: int


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, in tokens."""

    lookup_tokens: int = 0
    hit_tokens: int = 0


class PrefixCache:
    """The index over a pool's CACHED and REUSED blocks.

    `secret` keys the hashes. `identity` is what a block's content depends on besides its tokens (model, dtype ...), as
    (name, value) pairs. Blocks unused for `ttl_s` are forgotten; 0 keeps them until their memory is needed.
    """

    def __init__(
        self, pool: BlockPool, *, secret: bytes, identity: Iterable[tuple[str, str]] = (), ttl_s: float = 0.0
    ) -> None:
        self.pool = pool
        self.ttl_s = ttl_s
        self.stats = CacheStats()
        self._secret = secret
        self._identity = [*identity, ("block_size", str(pool.block_size))]
        self._entries: dict[int, _Entry] = {}  # by block
        self._blocks: dict[bytes, int] = {}  # by key
        self._children: dict[bytes, dict[int, None]] = {}  # parent key -> blocks, in the order of insertion
        self._roots: dict[int | None, bytes] = {}  # by tenant; None is everybody
        self._published = False  # whether the public chain was ever used
        self._pending: dict[bytes, Sequence] = {}  # keys that a running sequence is about to compute
        self._notes: deque[_Note] = deque()
        pool.on_evict(self._evicted)

    def __len__(self) -> int:
        return len(self._blocks)

    # Hash chain

    def _root(self, tenant: int | None) -> bytes:
        """The first link: every part is typed and length-prefixed, so that no two lists of parts read the same."""
        if tenant not in self._roots:
            state = blake2b(key=self._secret, digest_size=_DIGEST_BYTES)
            kind = "public" if tenant is None else "uid"
            for name, value in [*self._identity, (kind, "" if tenant is None else str(tenant))]:
                for part in (name.encode(), value.encode()):
                    state.update(len(part).to_bytes(8, "little") + part)
            self._roots[tenant] = state.digest()
        return self._roots[tenant]

    def _pack(self, sequence: Sequence, first: int, end: int) -> list[bytes]:
        """The tokens of the sequence's blocks `first` to `end` - 1, block_size int32 each."""
        size = self.pool.block_size
        packed = array("i", sequence.token_ids[first * size : end * size]).tobytes()
        return [packed[start : start + 4 * size] for start in range(0, len(packed), 4 * size)]

    def _extend(self, chain: list[bytes], tenant: int | None, sequence: Sequence, count: int) -> None:
        """Hash blocks until the chain knows the sequence's first `count` ones."""
        parent = chain[-1] if chain else self._root(tenant)
        for tokens in self._pack(sequence, len(chain), count):
            parent = blake2b(parent + tokens, key=self._secret, digest_size=_DIGEST_BYTES).digest()
            chain.append(parent)

    def _hash(self, sequence: Sequence, count: int) -> None:
        if len(sequence.block_hashes) < count:
            self._extend(sequence.block_hashes, sequence.uid, sequence, count)
        if self._published and len(sequence.public_hashes) < count:
            self._extend(sequence.public_hashes, None, sequence, count)

    # Looking up

    def lookup(self, sequence: Sequence) -> Hit:
        """The longest beginning of the sequence that the cache holds, at most all its tokens but one."""
        size, limit = self.pool.block_size, sequence.num_tokens - 1
        full = sequence.num_tokens // size
        self._hash(sequence, full)
        blocks: list[int] = []
        for index, tokens in enumerate(self._pack(sequence, 0, full)):
            block = self._find(sequence, index, tokens)
            if block is None:
                break
            blocks.append(block)
        num_full, num_tokens = len(blocks), len(blocks) * size
        if num_tokens > limit:  # wholly cached: its last token is computed again, in a copy of its last block
            return Hit(blocks[: -(-limit // size)], limit, num_full)
        tail, common = self._partial_tail(sequence, num_full, limit)
        if tail is not None:
            blocks.append(tail)
            num_tokens += common
        return Hit(blocks, num_tokens, num_full)

    def _find(self, sequence: Sequence, index: int, tokens: bytes) -> int | None:
        """The block that holds the sequence's block `index`, in its owner's chain or in the public one."""
        for chain, tenant in ((sequence.block_hashes, sequence.uid), (sequence.public_hashes, None)):
            block = self._blocks.get(chain[index]) if index < len(chain) else None
            if block is not None:
                entry = self._entries[block]
                if entry.tokens == tokens and entry.parent == (chain[index - 1] if index else self._root(tenant)):
                    return block
        return None

    def _partial_tail(self, sequence: Sequence, index: int, limit: int) -> tuple[int | None, int]:
        """A block that begins like the sequence's block `index`, and for how many tokens (B / 4 at least)."""
        size = self.pool.block_size
        wanted = sequence.token_ids[index * size : min((index + 1) * size, limit)]
        best, best_common = None, max(1, size // 4) - 1
        for chain, tenant in ((sequence.block_hashes, sequence.uid), (sequence.public_hashes, None)):
            if index > len(chain) or (tenant is None and not self._published):
                continue
            children = self._children.get(chain[index - 1] if index else self._root(tenant), {})
            for block, _ in zip(reversed(children), range(PARTIAL_TAIL_CANDIDATES), strict=False):
                common = _common_prefix(wanted, array("i", self._entries[block].tokens))
                if common > best_common:
                    best, best_common = block, common
        return best, best_common if best is not None else 0

    def count_hit(self, hit: Hit, sequence: Sequence) -> None:
        """The hit is being used: its full blocks were reused once more."""
        self.stats.lookup_tokens += sequence.num_tokens
        self.stats.hit_tokens += hit.num_tokens
        for block in hit.blocks[: hit.num_full_blocks]:
            entry = self._entries[block]
            entry.hits += 1
            if entry.hits == HITS_TO_BE_REUSED:
                self.pool.set_kind(block, REUSED)

    # Filling

    def insert(self, sequence: Sequence, first: int, end: int) -> None:
        """Blocks `first` to `end` - 1 of the sequence's table are full and computed: others may use them."""
        self._hash(sequence, end)
        for index, tokens in enumerate(self._pack(sequence, first, end), first):
            key, block = sequence.block_hashes[index], sequence.block_table[index]
            if self._pending.get(key) is sequence:
                del self._pending[key]
            if self.pool.kind[block] == EMPTY and key not in self._blocks:
                parent = sequence.block_hashes[index - 1] if index else self._root(sequence.uid)
                self._add(block, _Entry(key, parent, tokens))
                self.pool.set_kind(block, CACHED)

    def num_held(self, sequence: Sequence, num_tokens: int) -> int:
        """How many full, computed blocks of its first `num_tokens` tokens the sequence has in the pool: none while
        it is swapped out."""
        return min(num_tokens, sequence.num_computed_tokens if sequence.block_table else 0) // self.pool.block_size

    def findable(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Where lookups find the `num_held` blocks of the sequence's first tokens: mostly in its own table.

        Those that came from a snapshot were in no cache before.
        """
        count = self.num_held(sequence, num_tokens)
        self.insert(sequence, 0, count)
        found = (self._find(sequence, index, tokens) for index, tokens in enumerate(self._pack(sequence, 0, count)))
        return [own if block is None else block for own, block in zip(sequence.block_table, found, strict=False)]

    def publish(self, sequence: Sequence, num_tokens: int) -> int:
        """Let every tenant find the `num_held` blocks of the first `num_tokens` tokens; how many blocks that is.

        The caller has checked that the sequence's owner may do so.
        """
        end = self.num_held(sequence, num_tokens)
        self._published = True
        self.insert(sequence, 0, end)
        count = 0
        for index in range(end):
            key = sequence.public_hashes[index]
            block = self._blocks.get(sequence.block_hashes[index])
            if key not in self._blocks and block is not None:
                known = self._entries[block]
                self._remove(block)
                parent = sequence.public_hashes[index - 1] if index else self._root(None)
                self._add(block, _Entry(key, parent, known.tokens, known.hits))
            count += key in self._blocks
        return count

    def _add(self, block: int, entry: _Entry) -> None:
        self._entries[block] = entry
        self._blocks[entry.key] = block
        self._children.setdefault(entry.parent, {})[block] = None

    def _remove(self, block: int) -> None:
        entry = self._entries.pop(block)
        del self._blocks[entry.key]
        siblings = self._children[entry.parent]
        del siblings[block]
        if not siblings:
            del self._children[entry.parent]

    # Forgetting

    def _evicted(self, block: int) -> None:
        self._remove(block)

    def forget(self, block: int) -> None:
        """The block's content is about to change, or too old."""
        self._remove(block)
        self.pool.set_kind(block, EMPTY)

    def clear(self) -> None:
        """Forget everything, also what is in use."""
        for block in list(self._entries):
            self.forget(block)

    def note_time(self, now: float) -> None:
        """Remember that what was released so far was released by now; a few notes in a lifetime are enough."""
        if not self.ttl_s:
            return
        if self._notes and now - self._notes[-1].since < self.ttl_s / 64:
            self._notes[-1] = _Note(self._notes[-1].since, now, self.pool.tick)
        else:
            self._notes.append(_Note(now, now, self.pool.tick))

    def expire(self, now: float) -> None:
        """Forget blocks that nobody has used for `ttl_s`. Amortised O(1) per block."""
        self.note_time(now)
        tick = 0
        while self._notes and self._notes[0].until <= now - self.ttl_s:
            tick = self._notes.popleft().tick
        for kind in (CACHED, REUSED):
            while tick and (block := self.pool.oldest(kind)) is not None and self.pool.released_at[block] < tick:
                self.forget(block)

    # Prefixes that are being computed right now

    def announce(self, sequence: Sequence) -> None:
        """The sequence runs, and will compute the full blocks of its prompt that are not cached yet."""
        self._hash(sequence, sequence.num_tokens // self.pool.block_size)
        for index in range(sequence.num_computed_tokens // self.pool.block_size, len(sequence.block_hashes)):
            self._pending.setdefault(sequence.block_hashes[index], sequence)

    def abandon(self, sequence: Sequence) -> None:
        """The sequence runs no more: nobody is to wait for its blocks."""
        for key in sequence.block_hashes[sequence.num_computed_tokens // self.pool.block_size :]:
            if self._pending.get(key) is sequence:
                del self._pending[key]

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether the block that it awaits is still being computed."""
        return sequence.awaited_hash is not None and sequence.awaited_hash in self._pending

    def await_missing(self, sequence: Sequence, hit: Hit) -> bool:
        """Let the sequence await the first full block that `hit` lacks, if another one is about to compute it."""
        index = hit.num_full_blocks
        sequence.awaited_hash = sequence.block_hashes[index] if index < len(sequence.block_hashes) else None
        return self.must_wait(sequence)

    def check_invariants(self) -> None:
        """Raise RuntimeError if the index and the pool disagree about which blocks are cached."""
        marked = {block for block in range(self.pool.num_blocks) if self.pool.kind[block] != EMPTY}
        if marked != self._entries.keys() or len(self._blocks) != len(self._entries):
            raise RuntimeError(f"pool and cache disagree about blocks {sorted(marked ^ self._entries.keys())}")
        for block, entry in self._entries.items():
            if self._blocks.get(entry.key) != block or block not in self._children.get(entry.parent, ()):
                raise RuntimeError(f"block {block} is not found under its key or its parent")
        if sum(map(len, self._children.values())) != len(self._entries):
            raise RuntimeError("a parent has children that are not cached")
        for key, sequence in self._pending.items():
            if key not in sequence.block_hashes or sequence.state.value != "running":
                raise RuntimeError(f"a block is awaited from {sequence!r}, which does not compute it")


def _common_prefix(left: list[int], right: array[int]) -> int:
    """How many leading elements are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
