"""Delivery through the arena, event by event: the same as through messages, and nobody else is hurt."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.client.arena.arena import ARENA, BULK_TAIL, PAGE_BYTES, RING_HEAD, RING_TAIL, ROWS_RETURNED, Arena, Layout
from kvpool.client.core import DaemonGone, State
from kvpool.client.lifeline import connect_lifeline
from kvpool.client.stream_state import StreamState
from kvpool.client.wire.errors import ConnectionLost, InvalidArgument, KVPoolError, ProtocolError, Unsupported
from kvpool.client.wire.messages import Submit
from kvpool.daemon.serving.delivery import SLOW_READER
from kvpool.daemon.serving.ring_parcels import RingRecords
from tests.support.arena_rig import LIMITS, SELF, Rig, RigClient, mapped_arenas
from tests.support.engine_harness import prompts
from tests.support.scripted_backend import answer_to, logprob_of

(PROMPT,) = prompts(1, 20)
(LONG,) = prompts(1, 1200 // 8)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()
    assert mapped_arenas() == 0


def arena_of(client: RigClient) -> Any:
    """The client's mapping, to write into what it should not."""
    assert client.core.shared.arena is not None
    return client.core.shared.arena._arena


def expected(prompt: list[int], count: int) -> list[int]:
    return answer_to(prompt, count, LIMITS.vocab_size)


def test_tokens_come_through_the_ring_and_not_in_messages(rig: Rig) -> None:
    client = rig.client()
    assert client.core.welcome is not None
    assert client.core.welcome.capabilities == (ARENA,)
    stream = client.submit(PROMPT, max_tokens=30, logprobs=0)
    rig.run()
    result = stream.result()
    assert result.token_ids == expected(PROMPT, 30)
    assert result.logprobs == [logprob_of(token) for token in result.token_ids]
    assert arena_of(client).words[RING_HEAD] >= 30


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 0},
        {"logprobs": 3},  # candidates have no place in the ring
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 5},
        {"beam_width": 2, "n": 2},
        {"stop": ["zz", " of the"], "logprobs": 0},
        {"want_text": False},
        {"max_tokens": 0},
        {"max_tokens": 100, "window": 3},
        {"prompt_logprobs": 2},
    ],
)
def test_the_same_as_through_messages(tmp_path: Path, options: dict[str, Any]) -> None:
    rig = Rig(tmp_path, prefix_cache=False)
    found = []
    for arena in (True, False):
        client, events = rig.client(arena=arena), []
        stream = client.submit(LONG, **({"max_tokens": 60} | options))
        while not stream.done:
            rig.turn()
            client.read()
            while (event := stream.take()) is not None:
                events.append(event)
            client.core.read_all(stream)
        found.append((events, stream.result().outputs, stream.result().prompt_logprobs))
    assert found[0] == found[1]
    assert found[0][1][0].finish_reason in ("length", "stop")
    rig.close()


def test_a_long_prompt_goes_up_through_the_arena(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.client.session_arena.MIN_UPLOAD_BYTES", 64)
    client = rig.client()
    sent: list[Submit] = []
    receive = rig.clients.handlers[Submit]
    monkeypatch.setitem(
        rig.clients.handlers, Submit, lambda session, message: (sent.append(message), receive(session, message))
    )
    streams = [client.submit(prompt, max_tokens=2) for prompt in prompts(60, 150, seed=3)]
    rig.run()
    assert all(message.prompt is None and message.upload is not None for message in sent)
    for stream, prompt in zip(streams, prompts(60, 150, seed=3), strict=True):
        assert stream.result().token_ids == expected(prompt, 2)


def test_a_region_that_is_full_of_unanswered_prompts_is_gone_around(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.client.session_arena.MIN_UPLOAD_BYTES", 64)
    client = rig.client()
    client.full = True  # no answer arrives
    streams = [client.submit(prompt, max_tokens=2) for prompt in prompts(40, 240, seed=3)]
    client.full = False
    rig.run()
    assert all(stream.result().finish_reason == "length" for stream in streams)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"upload": (0, 2**24)}, "upload"),
        ({"upload": (4 * PAGE_BYTES, 1)}, "upload"),
        ({"upload": (2, 1)}, "upload"),
        ({"upload": (0, 0)}, "prompt"),
        ({"upload": (0, 4), "prompt": "both"}, "upload"),
        ({"upload": (4000, 4)}, "prompt[0]"),  # 384 and more stand there
        ({"upload": (8000, 4)}, "prompt[0]"),  # and there negative ones
    ],
)
def test_a_false_reference_is_refused_and_nothing_else(rig: Rig, fields: dict[str, Any], field: str) -> None:
    client = rig.client()
    arena = arena_of(client)
    arena.upload[4000:4016] = np.full(4, 384, "<i4").tobytes()
    arena.upload[8000:8016] = np.full(4, -5, "<i4").tobytes()
    stream = client.core.submit(Submit("r", **fields), 1)
    client.read()
    with pytest.raises(InvalidArgument) as caught:
        stream.result()
    assert caught.value.field == field
    good = client.submit(PROMPT, max_tokens=4)
    rig.run()
    assert good.result().token_ids == expected(PROMPT, 4)


def test_without_an_arena_a_reference_is_refused(rig: Rig) -> None:
    client = rig.client(arena=False)
    stream = client.core.submit(Submit("r", upload=(0, 4)), 1)
    client.read()
    with pytest.raises(InvalidArgument, match="no arena"):
        stream.result()


def test_a_daemon_without_arenas(tmp_path: Path) -> None:
    rig = Rig(tmp_path, None)
    client = rig.client()
    assert client.core.welcome is not None
    assert client.core.welcome.capabilities == ()
    assert client.core.shared.arena is None
    stream = client.submit(PROMPT, max_tokens=5)
    rig.run()
    assert stream.result().token_ids == expected(PROMPT, 5)
    rig.close()


def test_a_full_ring_holds_its_own_session_and_no_other(rig: Rig) -> None:
    stopped, other = rig.client(), rig.client()
    mine = [stopped.submit(prompt, max_tokens=90) for prompt in prompts(4, 20)]  # 360 tokens, 128 records
    theirs = other.submit(PROMPT, max_tokens=150)
    for _ in range(200):
        rig.turn()
        other.read()
    assert theirs.result().token_ids == expected(PROMPT, 150)
    session = rig.sessions.get(stopped.name)
    assert session is not None
    rows = [sample.sequence.wait_reason for request in session.requests.values() for sample in request.samples]
    assert rows == [SLOW_READER] * 4
    assert len(session.outbox) <= 6  # what was under way, and the notices
    rig.run()  # now it reads
    for stream, prompt in zip(mine, prompts(4, 20), strict=True):
        assert stream.result().token_ids == expected(prompt, 90)
    assert mine[0].paused is None


def test_whoever_says_something_is_looked_at_at_once(rig: Rig) -> None:
    client = rig.client()
    streams = [client.submit(prompt, max_tokens=60) for prompt in prompts(4, 20)]
    for _ in range(100):
        rig.turn()
    session = rig.sessions.get(client.name)
    assert session is not None
    assert session.outbox
    client.read()  # empties the ring, and says nothing
    assert session.outbox
    client.core.cancel(streams[0])
    client.read()
    assert not session.outbox


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_token_once_and_in_order_whoever_reads_when(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    source = random.Random(seed)
    rig = Rig(tmp_path_factory.mktemp("rig"))
    clients = [rig.client(arena=source.random() < 0.7) for _ in range(4)]
    waiting: list[tuple[RigClient, StreamState, list[int], int]] = []
    for number in range(10):
        client, prompt = source.choice(clients), prompts(1, source.randint(1, 60), seed=number)[0]
        count, window = source.randint(1, 120), source.choice([None, 1, 7, 64])
        waiting.append((client, client.submit(prompt, max_tokens=count, window=window), prompt, count))
        for _ in range(source.randint(0, 30)):
            rig.turn()
            reader = source.choice(clients)
            reader.full = source.random() < 0.2
            if source.random() < 0.5:
                reader.read()
    for client in clients:
        client.full = False
    for _ in range(2000):
        rig.turn()
        for client, stream, _, _ in waiting:
            if not stream.done:
                client.core.read_all(stream)
            client.read()
        if all(stream.done for _, stream, _, _ in waiting):
            break
    for _, stream, prompt, count in waiting:
        assert stream.result().token_ids == expected(prompt, count)
    rig.close()


@pytest.mark.parametrize("word", [RING_TAIL, BULK_TAIL, ROWS_RETURNED])
@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 100_000])
def test_a_damaged_arena_ends_its_own_session_with_a_reason(rig: Rig, word: int, value: int) -> None:
    hostile, other = rig.client(), rig.client()
    theirs = other.submit(PROMPT, max_tokens=60)
    logits = hostile.submit(PROMPT, max_tokens=40, want_logits=True)
    mine = hostile.submit(PROMPT, max_tokens=40)
    for _ in range(3):
        rig.turn()
        hostile.read()
    told = hostile.submit(prompts(1, 200)[0], max_tokens=1, prompt_logprobs=5)
    for place in range(16 if word == ROWS_RETURNED else 1):
        arena_of(hostile).words[word + place] = value
    for _ in range(20):
        rig.turn()
    hostile.read()
    assert isinstance(hostile.error, ConnectionLost)
    assert "arena." in str(hostile.error)
    for stream in (mine, logits, told):
        with pytest.raises(KVPoolError):
            stream.result()
    logits.take_all()  # rows that nobody has read keep the arena mapped
    rig.run()
    assert theirs.result().token_ids == expected(PROMPT, 60)
    assert len(rig.sessions) == 1


def test_garbage_everywhere_in_an_arena_hurts_nobody_else(rig: Rig) -> None:
    """The daemon reads the upload region only where it is told to, and everything else not at all."""
    source = random.Random(0)
    hostile, other = rig.client(), rig.client()
    theirs = other.submit(PROMPT, max_tokens=150)
    hostile.submit(PROMPT, max_tokens=150)
    arena = arena_of(hostile)
    for _ in range(80):
        rig.turn()
        other.read()
        at = source.randrange(0, len(arena._bytes) - 64)
        arena._bytes[at : at + 64] = source.randbytes(64)
        arena._bytes[:4096] = source.randbytes(4096)
        arena._bytes[RING_HEAD * 8 : RING_HEAD * 8 + 8] = source.randbytes(8)
    hostile.leave()
    rig.run()
    assert theirs.result().token_ids == expected(PROMPT, 150)


def test_a_client_that_goes_takes_its_arena_with_it(rig: Rig) -> None:
    clients = [rig.client() for _ in range(5)]
    assert mapped_arenas() == 10  # both sides are in this process
    for client in clients:
        client.submit(LONG, max_tokens=60)
    rig.turn()
    for client in clients[:4]:
        client.leave()
    assert mapped_arenas() == 2
    rig.run()
    assert mapped_arenas() == 2


def test_one_that_takes_a_request_over_gets_it_in_messages(rig: Rig) -> None:
    first, second = rig.client(), rig.client()
    stream = first.submit(PROMPT, max_tokens=80, request_id="shared", linger_s=60.0)
    for _ in range(10):
        rig.turn()
        first.read()
    assert 0 < len(stream._samples[0].token_ids) < 80
    followed = second.core.attach("shared", None)
    rig.run()
    assert followed.result().token_ids == expected(PROMPT, 80)
    assert arena_of(second).words[RING_HEAD] == 0


def test_one_that_takes_over_from_who_does_not_read_is_not_held(rig: Rig) -> None:
    stopped, second = rig.client(), rig.client()
    stream = stopped.submit(PROMPT, max_tokens=200, linger_s=60.0)
    for _ in range(150):
        rig.turn()
    assert [request.held for request in rig.clients.requests()] == [SLOW_READER]
    followed = second.core.attach(stream.request_id, None)
    for _ in range(300):
        rig.turn()
        second.read()
    assert followed.result().token_ids == expected(PROMPT, 200)


def test_one_that_does_not_read_and_takes_over_holds_it(rig: Rig) -> None:
    first, stopped = rig.client(), rig.client()
    stream = first.submit(PROMPT, max_tokens=200, linger_s=60.0)
    own = stopped.submit(PROMPT, max_tokens=200)
    for _ in range(140):
        rig.turn()
        first.read()
    followed = stopped.core.attach(stream.request_id, None)
    rig.clients.receive(stopped.name, SELF, stopped.core.outbox.popleft())
    for _ in range(100):
        rig.turn()
    assert [request.held for request in rig.clients.requests()] == [SLOW_READER] * 2
    rig.run()
    assert followed.result().token_ids == own.result().token_ids == expected(PROMPT, 200)


def test_what_is_held_of_logits_is_no_part_of_a_whole_step(tmp_path: Path) -> None:
    """Rows of a step lie in one array: whoever keeps one of them must not keep them all."""
    rig = Rig(tmp_path, Layout(128, PAGE_BYTES, PAGE_BYTES, 4 * 384, 1))
    client = rig.client()
    for prompt in prompts(3, 20):
        client.submit(prompt, max_tokens=12, want_logits=True)
    for _ in range(20):
        rig.turn()
    (session,) = rig.clients.delivery._slow
    rows = [row for parcel, _ in session.outbox if isinstance(parcel, RingRecords) for _, row in parcel._logits]
    assert rows
    assert all(row.base is None for row in rows)
    rig.run()
    rig.close()


def test_logits_wait_for_room_and_are_those_of_their_tokens(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Layout(128, PAGE_BYTES, PAGE_BYTES, 4 * 384, 4))
    client = rig.client()
    streams = [client.submit(prompt, max_tokens=12, want_logits=True) for prompt in prompts(3, 20)]
    for _ in range(50):
        rig.turn()
    session = rig.sessions.get(client.name)
    assert session is not None
    assert session.outbox
    events = []
    for _ in range(200):
        rig.turn()
        client.read()
        for stream in streams:
            while (event := stream.take()) is not None:
                if event.token_id < 0:
                    continue  # the rest of the text
                events.append(event)
                assert event.logits is not None
                assert event.logits.shape == (384,)
                assert event.logits[0] == event.token_id
                assert not event.logits.flags.writeable
                assert stream.last_row("logits") is event.logits
    assert len(events) == 36
    assert all(stream.done for stream in streams)
    rig.close()


def test_logits_and_rows_that_messages_tell_of_do_not_overtake_each_other(rig: Rig) -> None:
    client = rig.client()
    logits = [client.submit(prompt, max_tokens=15, want_logits=True) for prompt in prompts(2, 20)]
    for number in range(6):
        told = client.submit(prompts(6, 100)[number], max_tokens=1, prompt_logprobs=5)
        for _ in range(4):
            rig.turn()
        client.read()
        told.take_all()
    rig.run()
    assert client.error is None
    assert told.result().prompt_top_logprobs is not None
    for stream in logits:
        events = [event for event in iter(stream.take, None) if event.token_id >= 0]
        assert len(events) == 15
        assert all(event.logits is not None and event.logits[0] == event.token_id for event in events)


def test_logits_of_tokens_that_come_again_after_a_reconnect_are_gone_and_said_to_be(rig: Rig) -> None:
    client = rig.client()
    stream = client.submit(PROMPT, max_tokens=30, want_logits=True, linger_s=60.0)
    stream.linger_s = 60.0
    assert stream.last_row("logits") is None
    for _ in range(4):
        rig.turn()
        client.read()
    seen = list(iter(stream.take, None))
    for _ in range(4):
        rig.turn()  # given out, and never read
    client.core.lost(DaemonGone("gone"), 0.0)
    client.lifeline.close()
    rig.read_lifelines()
    client.lifeline = connect_lifeline(rig.path, 1.0)
    rig.sessions.accept(rig.listener, due=1e9)
    client.core.connected()
    client.read()
    lost = []
    while not stream.done or stream._events:
        rig.turn()
        client.read()
        while (event := stream.take()) is not None:
            if event.token_id < 0:
                continue
            seen.append(event)
            client.core._grant(stream)
            if event.logits is not None:
                assert stream.last_row("logits") is event.logits
                assert event.logits[0] == event.token_id
            else:
                lost.append(event.index)
                with pytest.raises(ConnectionLost, match=f"logits rows of token {event.index} "):
                    _ = stream.last_row("logits")
    assert [event.token_id for event in seen] == expected(PROMPT, 30)
    assert 0 < len(lost) < 10
    assert lost == list(range(lost[0], lost[0] + len(lost)))


def test_logits_without_an_arena_are_refused(rig: Rig) -> None:
    stream = rig.client(arena=False).submit(PROMPT, want_logits=True)
    with pytest.raises(Unsupported) as caught:
        stream.result()
    assert caught.value.field == "want_logits"


@pytest.mark.parametrize("arena", [True, False])
def test_embeddings_and_prompt_logprobs_come_either_way(rig: Rig, arena: bool) -> None:
    client = rig.client(arena=arena)
    mean = client.submit(PROMPT, max_tokens=0, pooling="mean")
    told = client.submit(LONG, max_tokens=2, prompt_logprobs=2)
    rig.run()
    embedding = mean.result().embedding
    assert embedding is not None
    assert embedding.shape == (64,)
    assert embedding[0] == np.float32(np.mean([*PROMPT[1:], 0]))  # hidden rows are targets in this back end
    logprobs, tops = told.result().prompt_logprobs, told.result().prompt_top_logprobs
    assert logprobs == [None, *map(logprob_of, LONG[1:])]
    assert tops == [None, *[{0: 0.0, 1: -1.0}] * (len(LONG) - 1)]


def test_a_client_without_descriptors_does_without(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame comes, and its descriptor does not: the process has too many open."""
    take = socket_recv_without_fds(monkeypatch)
    client = rig.client()
    assert take
    assert client.core.state is State.READY
    assert client.core.shared.arena is None
    check_without_arena(rig, client)


def check_without_arena(rig: Rig, client: RigClient) -> None:
    stream = client.submit(PROMPT, max_tokens=5)
    rig.run()
    assert stream.result().token_ids == expected(PROMPT, 5)
    with pytest.raises(Unsupported, match="ulimit -n"):
        client.submit(PROMPT, max_tokens=5, want_logits=True)
    embedding = client.submit(PROMPT, max_tokens=0, pooling="mean")
    told = client.submit(LONG, max_tokens=2, prompt_logprobs=2)  # a KiB and more: rows that arenas are for
    rig.run()
    assert embedding.result().embedding is not None
    assert told.result().prompt_logprobs == [None, *map(logprob_of, LONG[1:])]


def test_a_client_that_has_none_left_to_map_it_does_without(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(fd: int) -> Arena:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Arena, "open", no_descriptor)
    client = rig.client()
    assert client.core.state is State.READY
    assert client.core.shared.arena is None
    check_without_arena(rig, client)


def socket_recv_without_fds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    import os
    import socket

    taken: list[int] = []
    receive = socket.recv_fds

    def without(*arguments: Any) -> Any:
        data, fds, flags, address = receive(*arguments)
        taken.extend(fds)
        for fd in fds:
            os.close(fd)
        return data, [], flags, address

    monkeypatch.setattr("tests.support.arena_rig.socket.recv_fds", without)
    return taken


def test_a_daemon_that_can_make_no_arena_says_so_and_does_without(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("kvpool.client.arena.arena.os.memfd_create", fail)
    client = rig.client()
    assert client.core.state is State.READY
    assert client.core.shared.arena is None
    stream = client.submit(PROMPT, max_tokens=5)
    rig.run()
    assert stream.result().token_ids == expected(PROMPT, 5)


def test_a_ring_that_cannot_be_ends_the_connection(rig: Rig) -> None:
    client = rig.client()
    client.submit(PROMPT, max_tokens=50)
    for _ in range(4):
        rig.turn()
    arena_of(client).words[RING_HEAD] = 2**60
    client.read()
    assert isinstance(client.error, ProtocolError)
    client.leave()
