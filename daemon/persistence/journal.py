"""What a daemon must know to take up every accepted request after it was killed, in a file of bounded size.

The engine says what happens to its requests, and once per turn, before anybody is told of it, `commit` writes all of it
with one write(). Only requests that are alive are worth anything, and of each only its own events: so the journal keeps
those in memory, and rewrites the file from them when most of it is about requests that are over.

The rules where it cannot keep everything:

- Finished requests stay for `grace_s`, in case their last messages never arrived; the oldest go early to make room.
- A request for which there is no room even so is refused with `busy`, naming journal_max_bytes.
- Tokens for which there is no room are left out, and so are all later ones of their request: after a restart these are
  computed again, which gives the same tokens.
- A kept sequence for which there is no room is refused with `busy` when it is made or added to; one that outgrows the
  room by an answer is kept until the daemon ends, and the log says so.
- A file that cannot be written (disk full, read-only directory) suspends the journal, never the daemon: requests go on
  and are accepted, `stats` and the log say that a restart would lose them, and the journal tries again every RETRY_S.
  When it succeeds, it holds everything again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from ...client.wire.errors import Busy
from ...client.wire.protocol import Finished, Submit
from ..settings.options import show_size
from .journal_file import JournalFile, open_existing, read_frames
from .journal_records import (
    Accept,
    Attempt,
    End,
    Finish,
    Forget,
    Hold,
    JournalDamaged,
    KnownRequest,
    Replay,
    pack,
    pack_tokens,
    unpack,
)

log = logging.getLogger(__name__)

RETRY_S = 5.0
SMALL_BYTES = 64 << 10
"""A file below this is not worth a rewrite."""

SMALL_HISTORY_BYTES = 1 << 10
"""The history of a kept sequence may be longer than what has come of it by so much, before it is written anew."""

SET_ASIDE_SUFFIX = ".set-aside"

Identity = Mapping[str, str | int]
"""Everything that decides which tokens follow from a prompt: model, dtype and so on, by name."""


@dataclass(slots=True)
class _Entry:
    """A request that is alive, or finished not long ago."""

    events: bytearray  # everything about it, packed
    unfinished: set[int]  # samples
    incomplete: bool = False  # tokens were left out


@dataclass(slots=True)
class Found:
    """What an earlier daemon left."""

    requests: dict[int, KnownRequest] = field(default_factory=dict)  # by key, in order of acceptance
    held: dict[int, Hold] = field(default_factory=dict)  # kept sequences, whole, by key
    set_aside: dict[tuple[int, str], str] = field(default_factory=dict)  # (uid, request_id): why it cannot go on


class Journal:
    """Call `recover` first. No method but `accept` raises anything."""

    def __init__(
        self, path: Path, identity: Identity, *, max_bytes: int, grace_s: float, boot_id: str, sync: bool = False
    ) -> None:
        """`boot_id`: another one means that monotonic times have begun anew."""
        self.max_bytes, self.grace_s = max_bytes, grace_s  # may be changed at any time
        self._identity, self._boot_id = dict(identity), boot_id
        self._file = JournalFile(path, sync=sync)
        self._entries: dict[int, _Entry] = {}
        self._held: dict[int, int] = {}  # tokens that are written of each kept sequence, by key
        self._ended: list[int] = []  # finished since the last commit
        self._finished: dict[int, float] = {}  # key: when it was committed, oldest first
        self._pending = bytearray()  # events to write at the next commit
        self._live_bytes = 0  # of all entries
        self._next_key = 1
        self._suspended = ""  # why nothing is written
        self._retry_at = 0.0

    # ---- what happens to requests

    def accept(
        self, uid: int, submit: Submit, num_samples: int, seed: int, arrival: float, wall: float, sequence: str = ""
    ) -> int:
        """A request is taken, and written when this returns: the key to speak of it. Raises Busy if there is no room;
        then nothing is kept."""
        event = pack(Accept(self._next_key, uid, submit, num_samples, seed, arrival, wall, sequence))
        self._require_room(len(event))
        key, self._next_key = self._next_key, self._next_key + 1
        self._entries[key] = _Entry(bytearray(), set(range(num_samples)))
        self._note(key, event)
        self.commit(arrival)
        return key

    def attempt(self, key: int, position: int) -> None:
        """A request of an earlier daemon enters a step, which begins at this position of it."""
        event = pack(Attempt(key, position))
        if key in self._entries and self._make_room(len(event)):
            self._note(key, event)

    def tokens(
        self,
        key: int,
        sample: int,
        index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...],
        top_logprobs: tuple[tuple[tuple[int, float], ...], ...],
    ) -> None:
        """Tokens of a sample are given out, from `index` on."""
        entry = self._entries.get(key)
        if entry is None or entry.incomplete:
            return
        event = pack_tokens(key, sample, index, token_ids, logprobs, top_logprobs)
        if self._make_room(len(event)):
            self._note(key, event)
        else:
            entry.incomplete = True

    def end(self, key: int, finished: Finished) -> None:
        """A sample has its last message."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.unfinished.discard(finished.sample)
        if entry.incomplete and finished.finish_reason in ("stop", "length"):
            if not entry.unfinished:
                self._forget(key)  # it would be there without its tokens
            return
        self._note(key, pack(End(key, finished)))
        if not entry.unfinished:
            self._ended.append(key)

    def hold(self, held: Hold) -> int:
        """A kept sequence is as `held` says, with all its tokens; key 0: it is new. The key to speak of it. What is
        written are the tokens after those that were written of it, so a truncation must be told before what follows.
        Raises Busy if there is no room; then nothing has changed."""
        key = held.key or self._next_key
        whole = pack(replace(held, key=key, index=0))
        index = min(self._held.get(key, 0), len(held.token_ids))
        event = pack(replace(held, key=key, index=index, token_ids=held.token_ids[index:])) if index else whole
        entry = self._entries.get(key) or _Entry(bytearray(), set())
        too_long = len(entry.events) + len(event) > 2 * len(whole) + SMALL_HISTORY_BYTES
        if too_long:
            event = whole
        self._require_room(len(event) - (len(entry.events) if too_long else 0))
        if too_long:
            self._live_bytes -= len(entry.events)
            entry.events.clear()
        self._entries[key], self._held[key] = entry, len(held.token_ids)
        self._next_key = max(self._next_key, key + 1)
        self._note(key, event)
        return key

    def let_go(self, key: int) -> None:
        """A kept sequence is over. Nothing if it is not known."""
        if self._held.pop(key, None) is not None:
            self._forget(key)

    def drop(self, key: int) -> None:
        """An unfinished request is not to go on after a restart: what it works for is over. Nothing if unknown."""
        entry = self._entries.get(key)
        if entry is not None and entry.unfinished:
            self._forget(key)

    def commit(self, now: float) -> None:
        """Write what was said since the last time, and clean up. Call it before anybody is told of it."""
        for key in self._ended:
            self._finished[key] = now
            self._note(key, pack(Finish(key, now)))
        self._ended.clear()
        while self._finished:
            key, since = next(iter(self._finished.items()))
            if since + self.grace_s > now:
                break
            self._forget(key)
        if self._suspended:
            self._pending.clear()
            if now >= self._retry_at:
                self._rewrite(now)
        elif self._pending:
            self._append(now)

    @property
    def wake_at(self) -> float | None:
        """When `commit` is due although nothing happens (monotonic seconds): once for all that is finished."""
        last = next(reversed(self._finished.values()), None)
        return None if last is None else last + self.grace_s

    @property
    def works(self) -> bool:
        """What was committed is in the file."""
        return not self._suspended

    def stats(self) -> dict[str, object]:
        """For `stats`: plain values."""
        return {
            "journal": "suspended" if self._suspended else "on",
            "journal_reason": self._suspended,
            "journal_bytes": self._file.size,
            "journal_live_bytes": self._live_bytes,
            "journal_requests": len(self._entries) - len(self._held),
            "journal_sequences": len(self._held),
        }

    def close(self) -> None:
        """The daemon ends: the file stays if there is something for the next one to finish."""
        self._file.close()
        if not self._held and not any(entry.unfinished for entry in self._entries.values()):
            with contextlib.suppress(OSError):
                self._file.path.unlink()

    # ---- room

    def _require_room(self, size: int) -> None:
        """Raises Busy."""
        if not self._make_room(size):
            raise Busy(
                f"the journal holds {show_size(self._live_bytes)} about what is not finished; raise "
                "journal_max_bytes, or try again later",
                retry_after_ms=1000,
            )

    def _make_room(self, size: int) -> bool:
        """Whether `size` more bytes of events fit, if need be in place of finished requests. Half of the file may be
        about requests that are over before it is rewritten, so that events may fill the other half."""
        while self._live_bytes + size > self.max_bytes // 2:
            oldest = next(iter(self._finished), None)
            if oldest is None:
                return False
            self._forget(oldest)
        return True

    def _note(self, key: int, event: bytes) -> None:
        self._entries[key].events += event
        self._pending += event
        self._live_bytes += len(event)

    def _forget(self, key: int) -> None:
        self._live_bytes -= len(self._entries.pop(key).events)
        self._finished.pop(key, None)
        self._pending += pack(Forget(key))

    # ---- the file

    def _append(self, now: float) -> None:
        if self._file.size + len(self._pending) > max(SMALL_BYTES, 2 * self._live_bytes):
            self._rewrite(now)
            return
        try:
            self._file.append(self._pending)
        except OSError as error:
            self._suspend(error, now)
        self._pending.clear()

    def _rewrite(self, now: float) -> None:
        """One frame for each request that is alive, and nothing else."""
        self._pending.clear()
        header: bytes = msgpack.packb({"identity": self._identity, "boot_id": self._boot_id})
        try:
            self._file.rewrite([header, *(entry.events for entry in self._entries.values())])
        except OSError as error:
            self._suspend(error, now)
            return
        if self._suspended:
            log.warning("the journal is written again: a restart loses nothing")
        self._suspended = ""

    def _suspend(self, error: OSError, now: float) -> None:
        reason = f"{self._file.path}: {error.strerror or error}"
        if reason != self._suspended:
            log.error("the journal cannot be written, so a restart would lose what runs: %s", reason)
        self._suspended, self._retry_at = reason, now + RETRY_S

    # ---- what an earlier daemon left

    def recover(self, now: float, wall: float) -> Found:
        """Read the file, whatever is in it, and begin a new one with the requests that are alive."""
        found = Found()
        try:
            file = open_existing(self._file.path)
            if file is not None:
                with file:
                    found = self._read(file, now, wall)
        except OSError as error:
            log.error("the journal of the last daemon cannot be read, its requests are lost: %s", error)
        _keep_ages(found.requests.values(), now)
        for key, known in found.requests.items():
            known.note_death()
            unfinished = {number for number, sample in enumerate(known.samples) if sample.finished is None}
            self._entries[key] = _Entry(bytearray().join(map(pack, known.events())), unfinished)
            self._live_bytes += len(self._entries[key].events)
            if known.finished_at is not None:
                self._finished[key] = known.finished_at
        for key, held in found.held.items():
            self._entries[key] = _Entry(bytearray(pack(held)), set())
            self._live_bytes += len(self._entries[key].events)
            self._held[key] = len(held.token_ids)
        self._next_key = max(self._entries, default=0) + 1
        self._finished = dict(sorted(self._finished.items(), key=itemgetter(1)))
        self._rewrite(now)
        return found

    def _read(self, file: BinaryIO, now: float, wall: float) -> Found:
        frames = read_frames(file)
        header = _read_header(next(frames, b""))
        if header is None:
            if os.fstat(file.fileno()).st_size:
                self._set_aside("it is damaged at its beginning, or of another version of kvpool")
            return Found()
        replay = _replay(frames)
        requests = replay.requests
        differences = _differences(self._identity, header["identity"])
        if differences:
            self._set_aside(differences)
            return Found(set_aside={(r.accept.uid, r.accept.submit.request_id): differences for r in requests.values()})
        if header["boot_id"] != self._boot_id:
            for known in requests.values():
                age = max(0.0, wall - known.accept.wall)
                known.accept = replace(known.accept, arrival=now - age)
        return Found(requests, replay.held)

    def _set_aside(self, reason: str) -> None:
        path = self._file.path
        aside = path.with_name(path.name + SET_ASIDE_SUFFIX)
        log.warning("the journal of the last daemon cannot be used and is kept as %s: %s", aside, reason)
        try:
            os.replace(path, aside)
        except OSError as error:
            log.error("%s cannot be kept: %s", path, error)


def _keep_ages(requests: Iterable[KnownRequest], now: float) -> None:
    """What was finished last was finished just now, and the others as long before it as they were: the time without a
    daemon does not count, and a daemon that is restarted often does not keep them for ever."""
    done = [known for known in requests if known.finished_at is not None]
    last = max((known.finished_at or 0.0 for known in done), default=0.0)
    for known in done:
        known.finished_at = now - (last - (known.finished_at or 0.0))


def _replay(frames: Iterator[bytes]) -> Replay:
    """As much of the history as is there."""
    replay = Replay()
    try:
        for payload in frames:
            replay.apply(list(unpack(payload)))
    except JournalDamaged as damage:
        log.error("the journal is damaged, its end is lost: %s", damage)
    return replay


def _read_header(payload: bytes) -> dict[str, Any] | None:
    """The first frame's `identity` and `boot_id`; None if this is no header."""
    try:
        header = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException):
        return None
    if not isinstance(header, dict) or not isinstance(header.get("identity"), dict) or "boot_id" not in header:
        return None
    return header


def _differences(own: Identity, other: Identity) -> str:
    """What the other daemon had differently, for people; empty if nothing."""
    names = [name for name in {**other, **own} if own.get(name) != other.get(name)]
    return ", ".join(f"{name} was {other.get(name)} and is {own.get(name)} now" for name in names)
