"""Tokens of a step for readers of rings: each session's records, whoever else's were packed with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.arena.arena import PAGE_BYTES, RECORD_BYTES, RING_HEAD, Layout
from kvpool.client.arena.ring import RECORD, RingReader
from kvpool.client.arena.rows import RowReader
from kvpool.client.sampling_params import SamplingParams
from kvpool.daemon.engine.request import Request
from kvpool.daemon.engine.ring_tokens import RingTokens
from kvpool.daemon.serving import ring_packer
from kvpool.daemon.serving.arenas import SessionArena
from kvpool.daemon.serving.delivery import Delivery
from kvpool.daemon.serving.parcels import Sent
from kvpool.daemon.serving.ring_packer import RingPacker, pack_tokens, tails_of
from kvpool.daemon.serving.rings import Rings
from kvpool.daemon.serving.sessions import Peer, Session
from tests.support.ring_records import record_of

TEXTS = ("", " word", "é", "twelve bytes", "thirteen byte", "a text for several records, \U0001f30a")


def session_of(name: str, rings: Rings) -> Session:
    session = Session(name.encode(), Peer(0, 0, 0), "", name, b"")
    session.arena = SessionArena(Layout(128, PAGE_BYTES, PAGE_BYTES, 400, 2), rings)
    return session


def request_of(session: Session | None, handle: int) -> Request:
    request = Request(f"r{handle}", 0, [1], SamplingParams(), 0, frozenset(), None)
    request.session, request.handle = session, handle
    return request


def packed(packer: RingPacker, tokens: RingTokens) -> dict[Session, bytes]:
    readers, begin, found = packer.readers_of(tokens), 0, {}
    pack_tokens(tokens, {}, readers.batch, packer._rings.load())
    for session, end in zip(readers.sessions, readers.batch.ends, strict=True):
        found[session] = bytes(readers.batch.records[begin * RECORD_BYTES : end * RECORD_BYTES])
        begin = end
    return found


@pytest.fixture
def rings() -> Rings:
    return Rings()


@contextmanager
def sessions_with(rings: Rings) -> Iterator[list[Session]]:
    """Three, and one whose ring was closed."""
    made = [session_of(name, rings) for name in "abcd"]
    close(made[3])
    try:
        yield made
    finally:
        for session in made[:3]:
            close(session)


@pytest.fixture
def sessions(rings: Rings) -> Iterator[list[Session]]:
    with sessions_with(rings) as made:
        yield made


def close(session: Session) -> None:
    if session.arena is not None:
        session.arena.close()
    session.arena, session.closed = None, True


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_each_session_gets_its_own_in_order(data: st.DataObject) -> None:
    """Steps in which requests come and go, one or several tokens each, against the protocol's page."""
    rings = Rings()
    with sessions_with(rings) as made:
        packer = RingPacker(rings)
        requests = [request_of((*made, None)[number % 5], number + 1) for number in range(12)]
        several = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.sampled_from(TEXTS)), min_size=1, max_size=3)
        for step in range(data.draw(st.integers(1, 4))):
            tokens, expected = RingTokens(), dict.fromkeys(made, b"")
            for number in data.draw(st.sampled_from([list(range(12)), [], [3], [4, 9], list(range(0, 12, 3))])):
                request, items = requests[number], data.draw(several)
                ids, texts = zip(*items, strict=True)
                logprobs = tuple(-0.5 * place for place in range(len(items))) if data.draw(st.booleans()) else ()
                logits = [np.zeros(3, np.float32)] * len(items) if data.draw(st.booleans()) else []
                tokens.add(request, number, (step, ids, texts, logprobs, ()), logits)
                for place, (token_id, text) in enumerate(items):
                    item = token_id, text, logprobs[place] if logprobs else None
                    if isinstance(request.session, Session) and request.session.arena is not None:
                        record = record_of(item, request.handle or 0, step + place, number, logits=bool(logits))
                        expected[request.session] += record
            assert packed(packer, tokens) == {session: records for session, records in expected.items() if records}


def test_a_request_without_a_reader_is_left_out_from_the_next_step_on(rings: Rings, sessions: list[Session]) -> None:
    packer, session = RingPacker(rings), sessions[0]
    requests = [request_of(session, 1), request_of(session, 2)]
    for kept in (2, 1, 0):
        tokens = RingTokens()
        for request in requests[:kept]:
            tokens.add(request, 0, (0, (5,), (), (), ()), ())
        handles = [record[0] for record in RECORD.iter_unpack(packed(packer, tokens).get(session, b""))]
        assert handles == [1, 2][:kept]
    assert not packer._requests
    assert not packer._readers.sessions


def step_for(sessions: list[Session], logits: tuple[int, ...] = (), text: str = "") -> RingTokens:
    """A token for each session; logits, of which the first number is the session's, for some."""
    tokens = RingTokens()
    for number, session in enumerate(sessions):
        rows = [np.full(100, number, np.float32)] if number in logits else []
        tokens.add(request_of(session, 1), 0, (0, (5,), (text,), (), ()), rows)
    return tokens


def reader_of(session: Session) -> RingReader:
    assert session.arena is not None
    arena = session.arena._arena
    return RingReader(arena, RowReader(arena))


def delivery_to(rings: Rings) -> Delivery:
    nobody = cast(Any, None)  # is slow, gone or hostile
    return Delivery(nobody, lambda peer, data: Sent.YES, rings, gone=nobody, damaged=nobody)


def give(delivery: Delivery, tokens: RingTokens) -> None:
    delivery.give_turn(delivery.address([], tokens, 1))


def test_logits_go_to_the_session_of_their_token(rings: Rings, sessions: list[Session]) -> None:
    delivery, readers = delivery_to(rings), [reader_of(session) for session in sessions[:3]]
    for logits in ((1, 2), (), (0,)):
        give(delivery, step_for(sessions[:3], logits))
        for number, reader in enumerate(readers):
            ((_, event),) = reader.read()
            assert (event.logits is not None) is (number in logits)
            if event.logits is not None:
                assert event.logits.tolist() == [number] * 100
            del event


def test_tokens_of_a_step_for_a_ring_that_was_closed_meanwhile_go_nowhere(
    rings: Rings, sessions: list[Session]
) -> None:
    """Not even where another session has its place in the table."""
    delivery = delivery_to(rings)
    tokens = step_for(sessions[:3])
    give(delivery, tokens)
    close(sessions[1])
    sessions[1] = session_of("new", rings)  # in the same row
    same = RingTokens()
    for request in tokens.requests:
        same.add(request, 0, (1, (6,), (), (), ()), ())
    give(delivery, same)
    counts = [len(reader_of(session).read()) for session in sessions[:3]]
    assert counts == [2, 0, 2]


def test_nobody_is_woken_before_everybody_has_their_tokens(
    rings: Rings, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery, woken = delivery_to(rings), []

    def heads() -> None:
        woken.append([session.arena._arena.words[RING_HEAD] for session in sessions if session.arena is not None])

    monkeypatch.setattr(rings, "wake", heads)
    for step in (1, 2):
        give(delivery, step_for(sessions[:3], logits=(step,)))
        assert woken == [[step + (step > number - 1 and number > 0) for number in range(3)]]
        woken.clear()


def test_what_is_kept_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tails = ring_packer._Tails(0)
    monkeypatch.setattr(ring_packer, "_tails", tails)
    monkeypatch.setattr(tails, "MAX_KEPT", 10)
    session = session_of("a", Rings())
    for number in range(50):
        (tail,) = tails_of(step_for([session], text=f"t{number}"), {})
        assert tail == bytes([0, len(f"t{number}")]) + f"t{number}".encode().ljust(12, b"\0")
        assert len(tails) <= 10
    tails_of(step_for([session], text="x" * 1000), {})
    assert "x" * 1000 not in tails
    close(session)
