"""Sequences that processes hold by name, between answers and beyond them: who may do what with which.

A name belongs to a user: the uid that the kernel reports. Every process of that user may use the sequence; whoever it
is shared with may attach to it and fork it, and a fork belongs to who made it. To everybody else it does not exist.

Between two answers a sequence is idle. It keeps its blocks while nobody needs them and is the first to lose them; then
they are computed again (or swapped in) at its next answer, and nobody sees a difference but in time. While an answer is
being generated the sequence is busy: it can be attached to, forked, shared and closed, and nothing else.

One with `keep` is there again after a restart: the journal has its tokens, and they are computed again when they are
used. Its answer, if the daemon ended in the middle of one, goes on by itself.

What a sequence contains after an answer is its prompt and every token of the answer that was given out: also the token
that completed a stop string, and an end token. An answer that was cut short leaves what it had given out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...client.wire.errors import Busy, InvalidArgument, KVPoolError, NotFound, NotOwner, QuotaExceeded
from ..engine.engine import Engine
from ..engine.request import Request
from ..memory.sequence import Sequence
from ..persistence.journal_records import Hold
from ..persistence.snapshot_file import Image
from ..system.timers import Timers
from .sessions import Peer, Session
from .users import is_member

log = logging.getLogger(__name__)

MAX_SEQUENCES = 4096
"""Sequences that one user may hold by name where max_sequences is auto: each costs memory, idle or not."""

MAX_TOKENS = 4_000_000
"""Tokens of all sequences that one user holds by name: some 40 bytes each, also where no block has them."""

MAX_SHARED_WITH = 1000
"""Users, and groups, that one sequence may be shared with."""

BUSY_RETRY_MS = 100


@dataclass(slots=True, eq=False)
class SequenceObject:
    """A sequence under a name."""

    name: str
    uid: int
    sequence: Sequence
    keep: bool = True  # it outlives the session that holds it
    linger_s: float = 0.0  # how long it waits for its user to come back if it is not kept
    holder: Session | None = None  # whose end is its end
    expires_at: float | None = None  # monotonic seconds; while it waits for its user
    created_at: float = 0.0
    request: Request | None = None  # of its answer, the last one or that which is being generated
    being_saved: bool = False
    counted_tokens: int = 0  # of those that its user holds
    journal_key: int = 0  # 0: no journal has it
    truncations: int = 0  # with another number, a token that was computed may be another one
    shared_uids: set[int] = field(default_factory=set)
    shared_gids: set[int] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        return self.being_saved or (self.request is not None and not self.request.done)

    def is_shared_with(self, peer: Peer) -> bool:
        return peer.uid in self.shared_uids or any(is_member(peer, gid) for gid in self.shared_gids)

    def require_idle(self) -> None:
        """Raises Busy."""
        if self.busy:
            raise Busy(
                f"{self.name!r} is at work on an answer or a snapshot; wait for its end",
                field="sequence_id",
                retry_after_ms=BUSY_RETRY_MS,
            )


class SequenceObjects:
    """All sequences that have names. Methods raise KVPoolError and then have changed nothing."""

    def __init__(self, engine: Engine, timers: Timers) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._timers = timers
        self._objects: dict[tuple[int, str], SequenceObject] = {}  # by uid and name
        self._counts: Counter[int] = Counter()  # by uid
        self._tokens: Counter[int] = Counter()  # by uid, those of answers as of the next change
        engine.on_kept = self._answered

    def __iter__(self) -> Iterator[SequenceObject]:
        return iter(list(self._objects.values()))

    def __len__(self) -> int:
        return len(self._objects)

    # Finding

    def own(self, session: Session, name: str) -> SequenceObject:
        """A sequence of the session's user; one that waits for its user is held by this session from now on."""
        peer = session.peer
        found = self._objects.get((peer.uid, name))
        if found is None:
            if any(other.name == name and other.is_shared_with(peer) for other in self):
                raise NotOwner(
                    f"{name!r} belongs to another user, and is shared for attach and fork", field="sequence_id"
                )
            raise NotFound(f"no sequence of this user is called {name!r}", field="sequence_id")
        if found.expires_at is not None:
            found.holder, found.expires_at = session, None
        return found

    def readable(self, session: Session, name: str) -> SequenceObject:
        """A sequence of the session's user, or one that is shared with it."""
        if (session.peer.uid, name) in self._objects:
            return self.own(session, name)
        found = [other for other in self if other.name == name and other.is_shared_with(session.peer)]
        if len(found) > 1:
            raise InvalidArgument(
                f"{len(found)} users share a sequence called {name!r} with this one; they must take other names",
                field="sequence_id",
            )
        return found[0] if found else self.own(session, name)

    # Beginning

    def check_name(self, uid: int, name: str, field: str = "sequence_id") -> None:
        """Raises InvalidArgument if the user has such a sequence, QuotaExceeded if it has too many."""
        if (uid, name) in self._objects:
            raise InvalidArgument(f"{name!r} is the name of a sequence of this user; close it first", field=field)
        if self._counts[uid] >= MAX_SEQUENCES:
            raise QuotaExceeded(f"uid {uid} holds {MAX_SEQUENCES} sequences; close some", field=field)

    def adopt(self, made: SequenceObject) -> SequenceObject:
        """Give a sequence that is alive its name, which `check_name` has passed."""
        self._objects[made.uid, made.name] = made
        self._counts[made.uid] += 1
        self._count_tokens(made, made.sequence.num_tokens)
        return made

    def _check_tokens(self, uid: int, more: int) -> None:
        """Raises QuotaExceeded if the user would hold too many."""
        if self._tokens[uid] + more > MAX_TOKENS:
            raise QuotaExceeded(f"uid {uid} would hold more than {MAX_TOKENS} tokens; close sequences", field="prompt")

    def _count_tokens(self, found: SequenceObject, num_tokens: int) -> None:
        self._tokens[found.uid] += num_tokens - found.counted_tokens
        found.counted_tokens = num_tokens

    def open(self, name: str, session: Session, token_ids: list[int], *, keep: bool, linger_s: float) -> SequenceObject:
        """A new sequence. Its tokens are computed when it is first used."""
        uid = session.peer.uid
        self.check_name(uid, name)
        self._check_tokens(uid, len(token_ids))
        self._scheduler.check_admission(uid, len(token_ids), 0)
        sequence = Sequence(uid=uid, token_ids=token_ids, max_tokens=0, keep=True)
        self._scheduler.add(sequence, idle=True)
        return self._adopt_noted(SequenceObject(name, uid, sequence, keep, linger_s, None if keep else session))

    def restore(self, name: str, session: Session, image: Image) -> tuple[SequenceObject, list[int]]:
        """A sequence as it was stored, and the blocks to write; none where there is no room for them now."""
        uid = session.peer.uid
        self.check_name(uid, name)
        token_ids: list[int] = image.token_ids.tolist()
        self._check_tokens(uid, len(token_ids))
        self._scheduler.check_admission(uid, len(token_ids), 0)
        sequence = Sequence(uid=uid, token_ids=token_ids, max_tokens=0, keep=True)
        blocks = self._scheduler.add_restored(sequence, image.num_computed_tokens)
        return self.adopt(SequenceObject(name, uid, sequence, keep=False, holder=session)), blocks or []

    def fork(self, parent: SequenceObject, name: str, session: Session, at: int | None) -> SequenceObject:
        """Another sequence of the parent's first `at` tokens. It lives as its parent does, or if that belongs to
        somebody else, as long as the session."""
        uid = session.peer.uid
        self.check_name(uid, name, "new_sequence_id")
        length = self._length(parent, at, "at")
        self._check_tokens(uid, length)
        self._scheduler.check_admission(uid, length, 0)
        sequence = self._scheduler.fork(parent.sequence, length, uid=uid)
        sequence.keep, sequence.max_tokens, sequence.priority = True, 0, 0
        keep = parent.keep and parent.uid == uid
        return self._adopt_noted(SequenceObject(name, uid, sequence, keep, parent.linger_s, None if keep else session))

    # Changing

    def append(self, found: SequenceObject, token_ids: list[int]) -> None:
        found.require_idle()
        self._scheduler.check_possible(found.uid, found.sequence.num_tokens + len(token_ids), 0)
        self._check_tokens(found.uid, len(token_ids))
        self._note(found, (*found.sequence.token_ids, *token_ids))
        self._scheduler.append(found.sequence, token_ids)
        self._count_tokens(found, found.sequence.num_tokens)

    def truncate(self, found: SequenceObject, num_tokens: int) -> None:
        found.require_idle()
        length = self._length(found, num_tokens, "num_tokens")
        self._note(found, found.sequence.token_ids[:length])
        self._scheduler.truncate(found.sequence, length)
        found.truncations += 1
        self._count_tokens(found, length)

    def generate(self, found: SequenceObject, request: Request) -> None:
        """Let it go on with the answer that the request asks for."""
        found.require_idle()
        if request.params.num_sequences > 1:
            raise InvalidArgument("a sequence goes on in one way; fork it for others", field="n")
        request.kept_as = found.name if found.keep else ""
        self._engine.submit(request, found.sequence)
        found.request = request

    def share(self, found: SequenceObject, uid: int | None, gid: int | None) -> None:
        if (uid is None) == (gid is None):
            raise InvalidArgument("give exactly one of uid and gid", field="uid")
        if len(found.shared_uids) + len(found.shared_gids) >= MAX_SHARED_WITH:
            raise QuotaExceeded(f"is shared with {MAX_SHARED_WITH} users and groups; share with a group", field="uid")
        before = found.shared_uids, found.shared_gids
        if uid is not None:
            found.shared_uids = found.shared_uids | {uid}
        if gid is not None:
            found.shared_gids = found.shared_gids | {gid}
        try:
            self._note(found)
        except KVPoolError:
            found.shared_uids, found.shared_gids = before
            raise

    def _length(self, found: SequenceObject, asked: int | None, field: str) -> int:
        length = found.sequence.num_tokens if asked is None else asked
        if not 1 <= length <= found.sequence.num_tokens:
            raise InvalidArgument(f"must be from 1 to {found.sequence.num_tokens}, the sequence's tokens", field=field)
        return length

    # Ending

    def close(self, found: SequenceObject) -> None:
        """Give it up: an answer in progress is cancelled, and blocks that nobody else holds are free. Idempotent."""
        if self._objects.get((found.uid, found.name)) is not found:
            return
        del self._objects[found.uid, found.name]
        self._counts[found.uid] -= 1
        self._count_tokens(found, 0)
        self._end(found)

    def _end(self, found: SequenceObject) -> None:
        journal, request = self._engine.journal, found.request
        if journal is not None:
            journal.let_go(found.journal_key)
        if request is not None:
            if journal is not None and request.journal_key is not None:
                journal.drop(request.journal_key)  # or it would make the sequence again after a restart
            self._engine.cancel(request)
        self._scheduler.finish(found.sequence, "cancelled")

    def settle(self, session: Session, now: float) -> None:
        """The session is over: what it holds ends, or waits for its user to come back."""
        for found in self:
            if found.holder is session:
                found.holder = None
                if found.linger_s > 0:
                    self._let_linger(found, now + found.linger_s)
                else:
                    self.close(found)

    def _let_linger(self, found: SequenceObject, until: float) -> None:
        key = found.uid, found.name  # the timer holds no tokens: it may outlive them by long

        def expire() -> None:
            current = self._objects.get(key)
            if current is not None and current.expires_at == until:  # nobody came back, and left again
                self.close(current)

        found.expires_at = until
        self._timers.at(until, expire)

    # Over a restart

    def _adopt_noted(self, made: SequenceObject) -> SequenceObject:
        """Raises Busy, and ends the sequence, if it is to be kept and the journal has no room for it."""
        try:
            self._note(made)
        except KVPoolError:
            self._end(made)
            raise
        return self.adopt(made)

    def _note(self, found: SequenceObject, token_ids: Iterable[int] | None = None) -> None:
        """Let the journal know of a kept sequence's tokens, or of those that it is to have. Raises Busy."""
        if self._engine.journal is not None and found.keep:
            found.journal_key = self._engine.journal.hold(_held(found, token_ids))

    def note_answer(self, found: SequenceObject) -> None:
        """Let the journal know of a kept sequence's new tokens: they are there already, so it may not refuse."""
        journal = self._engine.journal
        if journal is None or not found.keep:
            return
        try:
            found.journal_key = journal.hold(_held(found))
        except Busy as error:
            log.warning("a restart would lose sequence %r of uid %d: %s", found.name, found.uid, error)
            journal.let_go(found.journal_key)
            found.journal_key = 0

    def _answered(self, request: Request) -> None:
        found = self._objects.get((request.uid, request.kept_as))
        if found is not None and found.request is request:
            self.note_answer(found)

    def take_up(self, held: Hold, request: Request | None, now: float) -> None:
        """Go on with a sequence that an earlier daemon kept; with the `request` that was at work on it, if one was.
        Raises KVPoolError if its tokens are too many now."""
        if request is None:
            self._scheduler.check_possible(held.uid, len(held.token_ids), 0)
            sequence = Sequence(uid=held.uid, token_ids=list(held.token_ids), max_tokens=0, keep=True)
            self._scheduler.add(sequence, idle=True)
        else:
            sequence = request.samples[0].sequence
        made = SequenceObject(held.name, held.uid, sequence, created_at=now, request=request, journal_key=held.key)
        made.shared_uids, made.shared_gids = set(held.shared_uids), set(held.shared_gids)
        self.adopt(made)

    def check_invariants(self) -> None:
        """Raise RuntimeError if a sequence of the pool belongs to no name and no request, or a name to no sequence."""
        held: Counter[int] = Counter()
        for found in self:
            held[found.uid] += found.counted_tokens
        if held != self._tokens:
            raise RuntimeError(f"the named sequences have {held} tokens by uid, counted are {self._tokens}")
        named = {found.sequence.sequence_id for found in self}
        alive = self._scheduler.roster.sequences.keys()
        if not named <= alive:
            raise RuntimeError(f"sequences {sorted(named - alive)} have names and are over")
        if lost := alive - named - self._engine.works_on():
            raise RuntimeError(f"sequences {sorted(lost)} hold blocks for nobody")


def _held(found: SequenceObject, token_ids: Iterable[int] | None = None) -> Hold:
    tokens = tuple(found.sequence.token_ids if token_ids is None else token_ids)
    shares = (tuple(sorted(found.shared_uids)), tuple(sorted(found.shared_gids)))
    return Hold(found.journal_key, found.uid, found.name, *shares, 0, tokens)
