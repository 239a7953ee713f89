"""Tokens of a step for readers of rings: each session's records, whoever else's were packed with them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from kvpool.client.arena import ring
from kvpool.client.arena.arena import PAGE_BYTES, RING_HEAD, Layout
from kvpool.client.arena.bell import Bell
from kvpool.client.arena.ring import RECORD, pack_tokens
from kvpool.client.sampling_params import SamplingParams
from kvpool.daemon.engine.request import Request
from kvpool.daemon.engine.ring_tokens import RingTokens
from kvpool.daemon.serving.arenas import SessionArena
from kvpool.daemon.serving.delivery import Delivery
from kvpool.daemon.serving.parcels import Sent
from kvpool.daemon.serving.ring_parcels import RingPacker
from kvpool.daemon.serving.sessions import Peer, Session

TEXTS = ("", " word", "é", "twelve bytes", "thirteen byte", "a text for several records, \U0001f30a")


def session_of(name: str) -> Session:
    return Session(name.encode(), Peer(0, 0, 0), "", name, b"")


def request_of(session: Session | None, handle: int) -> Request:
    request = Request(f"r{handle}", 0, [1], SamplingParams(), 0, frozenset(), None)
    request.session, request.handle = session, handle
    return request


def packed(packer: RingPacker, tokens: RingTokens) -> dict[Session, bytes]:
    return {session: bytes(parcel._records) for session, parcel in packer.pack(tokens)}


def test_each_session_gets_its_own_in_order() -> None:
    packer, sessions = RingPacker(), [session_of(name) for name in "ab"]
    requests = [request_of(sessions[number % 2], number + 1) for number in range(5)]
    requests.append(request_of(None, 6))  # nobody has it now
    for step in range(4):
        if step == 2:
            del requests[1]
        tokens, expected = RingTokens(), dict.fromkeys(sessions, b"")
        for number, request in enumerate(requests):
            text = TEXTS[(step + number) % len(TEXTS)]
            logprobs = (-0.5, -1.5) if number % 3 else ()
            tokens.add(request, number, (step, (7, 8), (text, "x"), logprobs, ()), ())
            alone = pack_tokens(
                [request.handle] * 2,
                [number] * 2,
                [step, step + 1],
                [7, 8],
                [text, "x"],
                logprobs or [0.0, 0.0],
                (0, 1) if logprobs else (),
            )
            if isinstance(request.session, Session):
                expected[request.session] += b"".join(alone)
        assert packed(packer, tokens) == expected


def test_a_request_without_a_reader_is_left_out_from_the_next_step_on() -> None:
    packer, session = RingPacker(), session_of("a")
    requests = [request_of(session, 1), request_of(session, 2)]
    for kept in (2, 1, 0):
        tokens = RingTokens()
        for request in requests[:kept]:
            tokens.add(request, 0, (0, (5,), (), (), ()), ())
        handles = [record[0] for record in RECORD.iter_unpack(packed(packer, tokens).get(session, b""))]
        assert handles == [1, 2][:kept]
    assert not packer._requests
    assert not packer._rows


def test_logits_go_to_the_session_of_their_token() -> None:
    packer, sessions = RingPacker(), [session_of(name) for name in "ab"]
    tokens = RingTokens()
    for number, session in enumerate(sessions * 2):
        logits = [np.full(3, number, np.float32)] if number else []
        tokens.add(request_of(session, number + 1), 0, (0, (5,), (" t",), (-1.0,), ()), logits)
    told = {
        session: [(at, row.tolist()) for at, row in parcel._logits or ()] for session, parcel in packer.pack(tokens)
    }
    assert told == {sessions[0]: [(32 + 20, [2.0] * 3)], sessions[1]: [(20, [1.0] * 3), (64 + 20, [3.0] * 3)]}


def test_nobody_is_woken_before_everybody_has_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = cast(Any, None)  # is slow, gone or hostile
    delivery = Delivery(nobody, lambda peer, data: Sent.YES, gone=nobody, damaged=nobody)
    sessions = [session_of(name) for name in "abc"]
    woken: list[list[int]] = []

    def heads(bell: Bell) -> None:
        woken.append([session.arena._arena.words[RING_HEAD] for session in sessions if session.arena is not None])

    monkeypatch.setattr(Bell, "ring", heads)
    for session in sessions:
        session.arena = SessionArena(Layout(128, PAGE_BYTES, PAGE_BYTES, 400, 2))
    for step in (1, 2):
        tokens = RingTokens()
        for session in sessions:
            tokens.add(request_of(session, 1), 0, (0, (5,), (), (), ()), ())
        delivery.give_all(delivery.parcels_of([], tokens, 1))
        assert woken == [[step] * 3] * 3
        woken.clear()
    for session in sessions:
        if session.arena is not None:
            session.arena.close()


def test_what_is_kept_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tails = ring._Tails(ring.HAS_LOGPROB)
    monkeypatch.setattr(ring, "_tails_with_logprob", tails)
    monkeypatch.setattr(tails, "MAX_KEPT", 10)
    for number in range(50):
        (record,) = pack_tokens([1], [0], [0], [2], [f"t{number}"], [-1.0], [0])
        assert RECORD.unpack(record) == (1, 0, 2, -1.0, 0, 1, len(f"t{number}"), f"t{number}".encode().ljust(12, b"\0"))
        assert len(tails) <= 10
    pack_tokens([1], [0], [0], [2], ["x" * 1000], [-1.0], [0])
    assert "x" * 1000 not in tails
