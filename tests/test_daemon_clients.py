"""Sessions and delivery without sockets: readers that stop, peers that vanish, bugs in handlers, other users."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.wire.protocol import (
    Accepted,
    Append,
    Attach,
    Call,
    Cancel,
    ClientMessage,
    CloseSequence,
    DaemonMessage,
    Failed,
    Finished,
    Fork,
    Generate,
    Hello,
    Notice,
    OpenSequence,
    Reply,
    Rows,
    ServerLimits,
    Share,
    Submit,
    Tokens,
    Truncate,
    Welcome,
    decode_daemon_message,
    encode,
    pack_token_ids,
)
from kvpool.daemon.persistence.journal import Found, Journal
from kvpool.daemon.serving import calls, delivery
from kvpool.daemon.serving.calls import Calls
from kvpool.daemon.serving.clients import Clients
from kvpool.daemon.serving.delivery import MAX_OUTBOX
from kvpool.daemon.serving.parcels import Sent
from kvpool.daemon.serving.sessions import Peer, Sessions
from kvpool.daemon.serving.users import is_admin
from kvpool.daemon.settings.config import Config
from kvpool.daemon.system.timers import Timers
from tests.support.engine_harness import Harness
from tests.support.journals import open_journal, recovered

PROMPT = "The sea is"
GREEDY = {"temperature": 0.0, "max_tokens": 8}
ALICE, BOB, ROOT = Peer(1001, 1001, 5001), Peer(1002, 1002, 5002), Peer(0, 0, 5000)


class Desk:
    """Clients over an engine, with a wire whose peers can be told to stop reading or to vanish."""

    def __init__(self, journal: Journal | None = None, **config: Any) -> None:
        self.harness = Harness(journal=journal)
        self.timers = Timers()
        self.received: dict[bytes, list[DaemonMessage]] = defaultdict(list)
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.reloads = 0
        self.when_sent: Callable[[], None] = lambda: None
        self.clients = Clients(
            Config(**config),
            self.harness.engine,
            self.harness.text,
            Sessions(lambda fd: None, lambda fd: None),
            self.timers,
            send=self._send,
            calls=Calls(lambda: None, lambda: ["log_level"]),
            limits=ServerLimits(1 << 20, 256, 384, 16, 64, 16),
            model_name="tiny",
            version="0",
        )
        self.clients.now = self.harness.now

    def _send(self, routing_id: bytes, data: bytes) -> Sent:
        if routing_id in self.gone:
            return Sent.GONE
        if routing_id in self.full:
            return Sent.FULL
        self.received[routing_id].append(decode_daemon_message(data))
        self.when_sent()
        return Sent.YES

    def say(self, name: bytes, message: ClientMessage, peer: Peer = ALICE) -> list[DaemonMessage]:
        """One message in; what that peer has got since it was last asked."""
        self.clients.receive(name, peer, encode(message))
        return self.take(name)

    def take(self, name: bytes) -> list[DaemonMessage]:
        return self.received.pop(name, [])

    def hello(self, name: bytes, peer: Peer = ALICE) -> None:
        (welcome,) = self.say(name, Hello((1,)), peer)
        assert isinstance(welcome, Welcome)

    def advance(self, seconds: float) -> None:
        self.harness.now += seconds
        self.clients.now = self.harness.now
        self.timers.run(self.clients.now)

    def run(self, turns: int = 60) -> None:
        engine = self.harness.engine
        for _ in range(turns):
            engine.turn(self.clients.now, step_done=engine.in_flight)
            self.clients.deliver()
            self.clients.delivery.retry()

    def session(self, name: bytes) -> Any:
        return self.clients.sessions.get(name)


def tokens_of(messages: list[DaemonMessage]) -> list[int]:
    batches = [batch for message in messages if isinstance(message, Tokens) for batch in message.events]
    return [token for batch in batches for token in batch.token_ids]


def kinds(messages: list[DaemonMessage]) -> list[str]:
    return [type(message).__name__ for message in messages]


def test_one_message_per_client_and_step() -> None:
    desk = Desk()
    for name in (b"a", b"b"):
        desk.hello(name)
        for number in range(3):
            desk.say(name, Submit(f"r{number}", prompt=f"{PROMPT} {number}", params=GREEDY))
    desk.run()
    for name in (b"a", b"b"):
        messages = desk.take(name)
        tokens = [message for message in messages if isinstance(message, Tokens)]
        assert len(tokens) < 3 * 8
        assert max(len(message.events) for message in tokens) == 3
        assert kinds(messages).count("Finished") == 3


def test_a_reader_that_stops_is_paused_alone_and_loses_nothing() -> None:
    desk = Desk()
    desk.hello(b"slow")
    desk.hello(b"fast")
    desk.say(b"slow", Submit("r", prompt=PROMPT, params=GREEDY))
    desk.run(3)
    got = desk.take(b"slow")
    desk.full.add(b"slow")
    desk.run()
    assert desk.harness.scheduler.roster.num_paused == 1
    assert len(desk.session(b"slow").outbox) <= 4
    desk.say(b"slow", Submit("another", prompt=PROMPT, params=GREEDY))
    desk.run()
    assert desk.harness.scheduler.roster.num_paused == 2
    desk.say(b"fast", Submit("r", prompt=PROMPT, params=GREEDY))
    desk.run()
    expected = tokens_of(desk.take(b"fast"))
    desk.full.clear()
    desk.run()
    got += desk.take(b"slow")
    mine = [batch for message in got if isinstance(message, Tokens) for batch in message.events]
    assert [token for batch in mine if batch.request_id == "r" for token in batch.token_ids] == expected
    assert [message.kind for message in got if isinstance(message, Notice)][:1] == ["paused"]
    assert kinds(got).count("Finished") == 2


def test_a_peer_that_vanished_is_settled_when_it_is_written_to() -> None:
    desk = Desk()
    desk.hello(b"a")
    desk.say(b"a", Submit("r", prompt=PROMPT, params=GREEDY))
    desk.gone.add(b"a")
    desk.run()
    assert desk.session(b"a") is None
    desk.harness.assert_clean()


def test_who_asks_and_does_not_read_is_hung_up_in_the_end() -> None:
    desk = Desk()
    desk.hello(b"a")
    desk.full.add(b"a")
    for number in range(MAX_OUTBOX + 2):
        desk.say(b"a", Call(number, "detokenize", {"token_ids": b""}))
    assert desk.session(b"a") is None


def test_of_many_bytes_that_nobody_reads_the_greediest_users_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob holds more than Alice, in two sessions; the larger one goes, and Alice has all of hers in the end."""
    monkeypatch.setattr(delivery, "MAX_HELD_BYTES", 60_000)
    desk = Desk()
    for name, peer, length in ((b"a", ALICE, 40), (b"b", BOB, 20), (b"c", BOB, 40), (b"d", BOB, 30)):
        desk.hello(name, peer)
        prompt = pack_token_ids(range(5, 5 + length))
        desk.say(name, Submit("r", prompt=prompt, params=GREEDY, hidden_layers=(0, 1)), peer)
        desk.full.add(name)
        desk.run(5)
    assert desk.session(b"c") is None
    assert [desk.session(name) is not None for name in (b"a", b"b", b"d")] == [True] * 3
    desk.full.clear()
    desk.run()
    rows = [message for message in desk.take(b"a") if isinstance(message, Rows) and message.kind == "prompt_hidden"]
    assert sum(len(message.data) for message in rows) == 40 * 2 * 64 * 4
    assert desk.session(b"a").held_bytes == 0


def test_a_bug_in_a_handler_is_one_clients_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.hello(b"a")

    def broken(clients: Clients) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(calls, "stats", broken)
    (failed,) = desk.say(b"a", Call(5, "stats"))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.call_id) == ("internal", 5)
    (accepted,) = desk.say(b"a", Submit("r", prompt=PROMPT, params=GREEDY))
    assert isinstance(accepted, Accepted)


def test_without_a_lifeline_a_session_ends() -> None:
    desk = Desk(lifeline_grace_s=2.0)
    desk.hello(b"a")
    desk.say(b"a", Submit("r", prompt=PROMPT, params=GREEDY, credit=1))
    desk.run()
    desk.take(b"a")
    desk.advance(1.9)
    assert desk.session(b"a") is not None
    desk.advance(0.2)
    assert kinds(desk.take(b"a")) == ["Closing"]
    desk.run()
    desk.harness.assert_clean()


# Other users


def value(messages: list[DaemonMessage]) -> Any:
    (reply,) = messages
    assert isinstance(reply, Reply), reply
    return reply.value


def test_users_see_and_cancel_their_own_and_administrators_all() -> None:
    desk = Desk()
    for name, peer in ((b"a", ALICE), (b"b", BOB), (b"r", ROOT)):
        desk.hello(name, peer)
    desk.say(b"a", Submit("mine", prompt=PROMPT, params=GREEDY, credit=1), ALICE)
    desk.run()
    assert [row["request_id"] for row in value(desk.say(b"r", Call(1, "ps"), ROOT))] == ["mine"]
    assert value(desk.say(b"b", Call(1, "ps"), BOB)) == ()
    owners = {name: value(desk.say(name, Call(2, "map"), peer))["owners"] for name, peer in ((b"b", BOB), (b"r", ROOT))}
    assert (1001).to_bytes(4, "little") not in owners[b"b"]
    assert (1001).to_bytes(4, "little") in owners[b"r"]
    for method in ("drain", "reload", "resize", "fsck"):
        (refused,) = desk.say(b"b", Call(3, method), BOB)
        assert isinstance(refused, Failed)
        assert refused.code == "not_owner"
    (refused,) = desk.say(b"b", Call(4, "cancel", {"request_id": "mine"}), BOB)
    assert isinstance(refused, Failed)
    assert refused.code == "not_found"
    assert value(desk.say(b"r", Call(5, "reload"), ROOT)) == {"changed": ("log_level",)}
    assert value(desk.say(b"r", Call(6, "cancel", {"request_id": "mine"}), ROOT)) == {"cancelled": 1}
    desk.run()
    desk.harness.assert_clean()


def test_a_request_is_found_by_its_users_only() -> None:
    desk = Desk()
    desk.hello(b"a", ALICE)
    desk.hello(b"b", BOB)
    desk.say(b"a", Submit("r", prompt=PROMPT, params=GREEDY, credit=0), ALICE)
    (failed,) = desk.say(b"b", Attach("r"), BOB)
    assert isinstance(failed, Failed)
    assert failed.code == "not_found"
    desk.hello(b"a2", ALICE)
    messages = desk.say(b"a2", Attach("r"), ALICE)
    assert kinds(messages)[0] == "Accepted"
    desk.run()
    assert [message.code for message in desk.take(b"a") if isinstance(message, Failed)] == ["not_found"]
    assert kinds(desk.take(b"a2"))[-1] == "Finished"


def test_what_is_finished_can_be_asked_for_during_its_linger_time() -> None:
    desk = Desk()
    desk.hello(b"a")
    desk.say(b"a", Submit("r", prompt=PROMPT, params=GREEDY, linger_s=10.0))
    desk.run()
    first = desk.take(b"a")
    desk.clients.settle(desk.session(b"a"))
    desk.advance(5.0)
    desk.hello(b"again")
    second = desk.say(b"again", Attach("r"))
    assert tokens_of(second) == tokens_of(first)
    assert [message.text for message in second if isinstance(message, Finished)] == [
        message.text for message in first if isinstance(message, Finished)
    ]
    desk.advance(100.0)
    desk.hello(b"late")
    (failed,) = desk.say(b"late", Attach("r"))
    assert isinstance(failed, Failed)
    assert failed.code == "not_found"


def test_of_two_requests_with_one_name_the_one_that_runs_is_found() -> None:
    """The first is over and kept for its linger time; its user has used the name again."""
    desk = Desk()
    desk.hello(b"a")
    desk.say(b"a", Submit("r", prompt=PROMPT, params=GREEDY, linger_s=10.0))
    desk.run()
    desk.take(b"a")
    desk.say(b"a", Submit("r", prompt="Another", params=GREEDY | {"max_tokens": 5}, credit=0, linger_s=10.0))
    desk.hello(b"b")
    found = desk.say(b"b", Attach("r"))
    desk.run()
    found += desk.take(b"b")
    assert [message.usage.completion_tokens for message in found if isinstance(message, Finished)] == [5]


def test_administrators() -> None:
    assert is_admin(ROOT, "")
    assert is_admin(Peer(os.geteuid(), 1, 1), "")
    assert not is_admin(Peer(4_000_000, 1, 1), "")
    assert not is_admin(Peer(4_000_000, 1, 1), "no-such-group")


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:5", "localhost:1:2:x", "localhost:1:2", "a:b:c:d"])
def test_peers_without_credentials_are_nobody(address: str) -> None:
    assert Peer.from_address(address) is None


def test_the_shared_map_is_for_administrators() -> None:
    desk = Desk()
    desk.hello(b"a")
    (refused,) = desk.say(b"a", Call(1, "watch_map"))
    assert isinstance(refused, Failed)
    assert refused.code == "not_owner"


def test_what_a_client_is_told_is_in_the_journal(tmp_path: Path) -> None:
    """Once a message has left, the daemon may be killed, and its client counts on what it was told. No answer waits
    for the end of the turn: many messages are answered in one."""
    journal = open_journal(tmp_path / "j")
    journal.recover(0.0, 0.0)
    desk = Desk(journal)
    desk.hello(b"a")
    found: list[Found] = []

    desk.when_sent = lambda: found.append(journal_of(tmp_path))
    for message, held in [
        (OpenSequence(1, "s", prompt=pack_token_ids([5] * 9), keep=True), {"s": 9}),
        (Append(2, "s", prompt=pack_token_ids([6] * 4)), {"s": 13}),
        (Truncate(3, "s", 11), {"s": 11}),
        (Fork(4, "s", "fork", 7), {"s": 11, "fork": 7}),
        (Share(5, "s", uid=1002), {"s": 11, "fork": 7}),
        (CloseSequence(6, "s"), {"fork": 7}),
        (Call(7, "cancel", {"request_id": "fork"}), {}),
        (OpenSequence(8, "s", prompt=pack_token_ids([5] * 9)), {}),
    ]:
        (reply,) = desk.say(b"a", message)
        assert isinstance(reply, Reply)
        assert {one.name: len(one.token_ids) for one in found[-1].held.values()} == held
        if isinstance(message, Share):
            assert {one.name: one.shared_uids for one in found[-1].held.values()} == {"s": (1002,), "fork": ()}
    desk.say(b"a", OpenSequence(10, "busy", prompt=pack_token_ids([5] * 9), keep=True))
    desk.say(b"a", Generate("answer", "busy", params=GREEDY))
    desk.run(3)
    assert [known.accept.sequence for known in found[-1].requests.values()] == ["busy"]
    desk.say(b"a", CloseSequence(11, "busy"))
    assert not found[-1].held
    assert not found[-1].requests  # it would make the sequence again
    desk.run()
    assert kinds(desk.take(b"a"))[-1] == "Finished"
    for number, ends in enumerate(({"length"}, {"cancelled"})):
        desk.say(b"a", Submit(f"r{number}", prompt=PROMPT, params=GREEDY))
        assert [known.done for known in found[-1].requests.values()][number:] == [False]
        if number:
            desk.say(b"a", Cancel(f"r{number}"))
        desk.run()
        assert kinds(desk.take(b"a"))[-1] == "Finished"
        *_, (sample,) = [known.samples for known in found[-1].requests.values()]
        assert sample.finished is not None
        assert {sample.finished.finish_reason} == ends


@pytest.mark.parametrize(
    "message", [Append(9, "s", prompt=pack_token_ids([6] * 4)), Truncate(9, "s", 50), Share(9, "s", 7)]
)
def test_what_a_full_journal_refuses_has_not_happened(tmp_path: Path, message: ClientMessage) -> None:
    journal = open_journal(tmp_path / "j", max_bytes=1 << 16)
    journal.recover(0.0, 0.0)
    desk = Desk(journal)
    desk.hello(b"a")
    desk.say(b"a", OpenSequence(1, "s", prompt=pack_token_ids([5] * 100), keep=True))
    size, number = 200, 0
    while size:
        number += 1
        (told,) = desk.say(b"a", OpenSequence(1 + number, f"{number}", prompt=pack_token_ids([9] * size), keep=True))
        size = size // 2 if isinstance(told, Failed) else size
    found = next(iter(desk.clients.sequences))
    before = (list(found.sequence.token_ids), set(found.shared_uids), found.truncations)
    (told,) = desk.say(b"a", message)
    assert isinstance(told, Failed)
    assert "journal_max_bytes" in told.message
    assert (found.sequence.token_ids, found.shared_uids, found.truncations) == before
    (held, *_) = journal_of(tmp_path).held.values()
    assert (list(held.token_ids), set(held.shared_uids)) == before[:2]


def journal_of(directory: Path) -> Found:
    """As the next daemon finds it."""
    shutil.copy(directory / "j", directory / "copy")
    return recovered(directory / "copy")[1]
