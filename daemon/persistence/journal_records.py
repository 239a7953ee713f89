"""What a journal says: eight kinds of events, their bytes, and the requests that a history of them leaves alive.

An event is one MessagePack array, kind first. Tokens are kept without their text, which the tokenizer makes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import msgpack

from ...client.wire.codec import decode_client_message, decode_daemon_message, encode
from ...client.wire.errors import KVPoolError
from ...client.wire.protocol import Finished, Submit, pack_token_ids, unpack_token_ids


class JournalDamaged(Exception):
    """Bytes that no journal of this version holds."""


@dataclass(frozen=True, slots=True)
class Accept:
    """A request was taken. `submit` has its prompt as token ids, whatever the caller sent."""

    key: int  # names the request in the other events
    uid: int
    submit: Submit
    num_samples: int
    seed: int  # the drawn one, where the caller gave none
    arrival: float  # monotonic seconds
    wall: float  # the same moment by the wall clock, for a journal that outlives a boot
    sequence: str = ""  # the kept sequence that goes on with its answer


@dataclass(frozen=True, slots=True)
class Generate:
    """Tokens were given out; `logprobs` and `top_logprobs` are empty or as long as `token_ids`."""

    key: int
    sample: int
    index: int  # of token_ids[0]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """A sample has had its last message."""

    key: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class Finish:
    """All samples have had their last message."""

    key: int
    at: float  # monotonic seconds


@dataclass(frozen=True, slots=True)
class Hold:
    """A kept sequence has its first `index` tokens as before, and after them these."""

    key: int  # names the sequence in the other events; requests have other ones
    uid: int
    name: str
    shared_uids: tuple[int, ...]
    shared_gids: tuple[int, ...]
    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A daemon that took the request up, and has no new token of it yet, begins a step with it."""

    key: int
    position: int  # of the first token that the step computes


@dataclass(frozen=True, slots=True)
class Death:
    """So many daemons in a row died in a step of the request that began at `position`."""

    key: int
    position: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody can ask for the request, or use the sequence, any more."""

    key: int


Event = Accept | Generate | End | Finish | Forget | Hold | Attempt | Death

ACCEPT, GENERATE, END, FINISH, FORGET, HOLD, ATTEMPT, DEATH = range(8)


def pack(event: Event) -> bytes:
    """The bytes of one event."""
    packed: bytes = msgpack.packb(_plain(event))
    return packed


_packer = msgpack.Packer()  # of the one thread that writes; to make another for each event takes longer than to pack it


def pack_tokens(key: int, sample: int, index: int, *tokens: tuple[object, ...]) -> bytes:
    """The bytes of a Generate, without making one: there is an event for every token."""
    packed: bytes = _packer.pack((GENERATE, key, sample, index, *tokens))
    return packed


def _plain(event: Event) -> tuple[object, ...]:
    if isinstance(event, Generate):
        return (GENERATE, event.key, event.sample, event.index, event.token_ids, event.logprobs, event.top_logprobs)
    if isinstance(event, Accept):
        submit = encode(event.submit)
        times = (event.arrival, event.wall)
        return (ACCEPT, event.key, event.uid, submit, event.num_samples, event.seed, *times, event.sequence)
    if isinstance(event, Hold):
        shares = (event.shared_uids, event.shared_gids)
        return (HOLD, event.key, event.uid, event.name, *shares, event.index, pack_token_ids(event.token_ids))
    if isinstance(event, End):
        return (END, event.key, encode(event.finished))
    if isinstance(event, Finish):
        return (FINISH, event.key, event.at)
    if isinstance(event, Attempt):
        return (ATTEMPT, event.key, event.position)
    if isinstance(event, Death):
        return (DEATH, event.key, event.position, event.deaths)
    return (FORGET, event.key)


def unpack(payload: bytes) -> Iterator[Event]:
    """The events of a frame. Raises JournalDamaged."""
    unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=len(payload))
    unpacker.feed(payload)
    try:
        for plain in unpacker:
            yield _event(plain)
        complete = unpacker.tell() == len(payload)
    except (ValueError, TypeError, IndexError, KVPoolError, msgpack.UnpackException) as fault:
        raise JournalDamaged(f"an event cannot be read: {fault or type(fault).__name__}") from None
    if not complete:
        raise JournalDamaged("a frame ends within an event")


def _event(plain: tuple[object, ...]) -> Event:
    kind, *values = plain
    if kind == GENERATE:
        return Generate(*values)  # type: ignore[arg-type]  # its checksum says that we wrote it
    if kind == ACCEPT:
        key, uid, submit, *rest = values
        message = decode_client_message(submit)  # type: ignore[arg-type]
        if not isinstance(message, Submit):
            raise JournalDamaged("an accepted request is no Submit")
        return Accept(key, uid, message, *rest)  # type: ignore[arg-type]
    if kind == END:
        key, finished = values
        message = decode_daemon_message(finished)  # type: ignore[assignment,arg-type]
        if not isinstance(message, Finished):
            raise JournalDamaged("the end of a sample is no Finished")
        return End(key, message)  # type: ignore[arg-type]
    if kind == FINISH:
        return Finish(*values)  # type: ignore[arg-type]
    if kind == HOLD:
        *about, packed = values
        return Hold(*about, tuple(unpack_token_ids(packed).tolist()))  # type: ignore[call-arg,arg-type]
    if kind == ATTEMPT:
        return Attempt(*values)  # type: ignore[arg-type]
    if kind == DEATH:
        return Death(*values)  # type: ignore[arg-type]
    if kind == FORGET:
        return Forget(*values)  # type: ignore[arg-type]
    raise JournalDamaged(f"events of kind {kind!r} are unknown")


@dataclass(slots=True)
class KnownSample:
    """What is known of one sequence of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finished: Finished | None = None


@dataclass(slots=True)
class KnownRequest:
    """An accepted request as far as the journal knows it."""

    accept: Accept
    samples: list[KnownSample]
    finished_at: float | None = None  # monotonic seconds
    tried_at: int | None = None  # where the last step with it began, since it was taken up, if no token came of it
    died_at: int | None = None  # the same of the daemon before
    deaths: int = 0  # in a row, at that position

    @property
    def done(self) -> bool:
        return self.finished_at is not None

    def note_death(self) -> None:
        """The daemon that wrote this is gone."""
        if self.tried_at is not None:
            self.deaths = self.deaths + 1 if self.tried_at == self.died_at else 1
            self.tried_at, self.died_at = None, self.tried_at

    def forget_deaths(self) -> None:
        """It gets on."""
        self.tried_at, self.died_at, self.deaths = None, None, 0

    def events(self) -> Iterator[Event]:
        """The shortest history that leads here."""
        key = self.accept.key
        yield self.accept
        for number, sample in enumerate(self.samples):
            if sample.token_ids:
                columns = (sample.token_ids, sample.logprobs, sample.top_logprobs)
                yield Generate(key, number, 0, *map(tuple, columns))  # type: ignore[arg-type]
            if sample.finished is not None:
                yield End(key, sample.finished)
        if self.died_at is not None:
            yield Death(key, self.died_at, self.deaths)
        if self.finished_at is not None:
            yield Finish(key, self.finished_at)


class Replay:
    """Takes events in order; `requests` are those that are alive, in order of acceptance, and `held` the sequences that
    are kept, by key."""

    def __init__(self) -> None:
        self.requests: dict[int, KnownRequest] = {}
        self.held: dict[int, Hold] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Raises JournalDamaged for an event that does not follow from those before."""
        for event in events:
            if isinstance(event, Generate):
                self._generate(event)
            elif isinstance(event, Accept):
                self._accept(event)
            elif isinstance(event, End):
                self._end(event)
            elif isinstance(event, Finish):
                self._finish(event)
            elif isinstance(event, Hold):
                self._hold(event)
            elif isinstance(event, Attempt):
                self._request(event.key).tried_at = event.position
            elif isinstance(event, Death):
                request = self._request(event.key)
                request.died_at, request.deaths = event.position, event.deaths
            elif self.requests.pop(event.key, None) is None and self.held.pop(event.key, None) is None:
                raise JournalDamaged(f"request {event.key} is forgotten and was never accepted")

    def _accept(self, event: Accept) -> None:
        if event.key in self.requests:
            raise JournalDamaged(f"request {event.key} is accepted twice")
        self.requests[event.key] = KnownRequest(event, [KnownSample() for _ in range(event.num_samples)])

    def _generate(self, event: Generate) -> None:
        sample = self._sample(event.key, event.sample)
        if event.index != len(sample.token_ids) or sample.finished is not None:
            raise JournalDamaged(f"token {event.index} of request {event.key} is out of place")
        self.requests[event.key].forget_deaths()
        sample.token_ids += event.token_ids
        sample.logprobs += event.logprobs
        sample.top_logprobs += event.top_logprobs

    def _end(self, event: End) -> None:
        sample = self._sample(event.key, event.finished.sample)
        if sample.finished is not None:
            raise JournalDamaged(f"a sample of request {event.key} ends twice")
        sample.finished = event.finished

    def _finish(self, event: Finish) -> None:
        request = self.requests.get(event.key)
        if request is None or any(sample.finished is None for sample in request.samples):
            raise JournalDamaged(f"request {event.key} is finished before its samples are")
        request.finished_at = event.at

    def _request(self, key: int) -> KnownRequest:
        if key not in self.requests:
            raise JournalDamaged(f"request {key} was never accepted")
        return self.requests[key]

    def _hold(self, event: Hold) -> None:
        before = self.held[event.key].token_ids if event.key in self.held else ()
        if event.index > len(before) or event.key in self.requests:
            raise JournalDamaged(f"token {event.index} of sequence {event.key} is out of place")
        self.held[event.key] = replace(event, index=0, token_ids=before[: event.index] + event.token_ids)

    def _sample(self, key: int, number: int) -> KnownSample:
        request = self.requests.get(key)
        if request is None or not 0 <= number < len(request.samples):
            raise JournalDamaged(f"sample {number} of request {key} was never accepted")
        return request.samples[number]
