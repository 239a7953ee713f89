"""Sequences that clients hold: every operation against a real daemon, from two processes and from two users."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvpool.client import Busy, Client, InvalidArgument, KVPoolError, NotFound, ShuttingDown, TooLong
from kvpool.client.client import Sequence
from tests.support.daemon_process import DaemonProcess, at_rest, eventually, left_clean
from tests.support.other_user import as_user

PROMPT = "The sea is"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
ALICE, BOB, CAROL = 20_001, 20_002, 20_003
GROUP = 20_100

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    process = DaemonProcess(socket_mode="0666", config=f"[users.{CAROL}]\nmax_sequences = 2\nmax_blocks = 3\n")
    process.directory.chmod(0o755)
    with process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def state_of(pool: Client, name: str) -> str | None:
    return next((row["state"] for row in pool.ps() if row["request_id"] == name), None)


def test_a_conversation_in_pieces_is_the_same_as_in_one(pool: Client) -> None:
    with pool.open(PROMPT) as chat:
        assert chat.num_tokens == 4
        ids = pool.tokenize(PROMPT)
        for text, seed in ((" deep", 3), (" and", 4), ("", 5)):
            if text:
                chat.append(text)
                ids += [*pool.tokenize(text)]
            answer = chat.generate(max_tokens=7, seed=seed, logprobs=2)
            whole = pool.generate(ids, max_tokens=7, seed=seed)
            assert answer.token_ids == whole.token_ids
            assert len(answer.logprobs or ()) == 7
            assert answer.text == whole.text
            assert answer.usage.prompt_tokens == len(ids)
            ids += answer.token_ids
            assert chat.num_tokens == len(ids)


def test_what_was_computed_is_not_computed_again(pool: Client) -> None:
    with pool.open([7] * 40) as chat:
        assert chat.generate(max_tokens=5, **GREEDY).usage.cached_tokens == 0
        before = pool.stats()["tokens_computed_total"]
        assert chat.generate(max_tokens=5, **GREEDY).usage.cached_tokens == 44
        assert pool.stats()["tokens_computed_total"] - before == 5


def test_messages_are_appended_as_turns(pool: Client) -> None:
    with pool.open([{"role": "user", "content": "Hello"}]) as chat:
        chat.generate(max_tokens=4, **GREEDY)
        before = chat.num_tokens
        chat.append([{"role": "user", "content": "And then?"}])
        assert chat.num_tokens > before + 5
        assert chat.generate(max_tokens=4, **GREEDY).finish_reason == "length"


def test_forks_at_every_position_of_a_block(pool: Client) -> None:
    with pool.open([5, 9, 13] * 7) as parent:
        tokens = [5, 9, 13] * 7 + parent.generate(max_tokens=13, **GREEDY).token_ids
        used = pool.stats()["blocks_used"]
        children = [(at, parent.fork(at)) for at in range(1, len(tokens) + 1)]
        assert pool.stats()["blocks_used"] == used  # no byte was copied
        for at, child in children:
            child.append([at])
        streams = [child.submit(max_tokens=4, **GREEDY) for _, child in children]  # all write at once
        streams.append(parent.submit(max_tokens=4, **GREEDY))
        for at, stream in zip([at for at, _ in children], streams, strict=False):
            expected = pool.generate([*tokens[:at], at], max_tokens=4, **GREEDY)
            assert stream.result().token_ids == expected.token_ids
        assert streams[-1].result().token_ids == pool.generate(tokens, max_tokens=4, **GREEDY).token_ids
        for _, child in children:
            child.close()


def test_truncate_and_generate_again(pool: Client) -> None:
    with pool.open(PROMPT) as chat:
        first = chat.generate(max_tokens=30, **GREEDY).token_ids
        for length in (33, 20, 17, 16, 15, 5, 4):
            chat.truncate(length)
            assert chat.num_tokens == length
            again = chat.generate(max_tokens=34 - length, **GREEDY).token_ids
            assert again == first[length - 4 :]
        chat.truncate(1)
        whole = pool.generate(pool.tokenize(PROMPT)[:1], max_tokens=5, **GREEDY)
        assert chat.generate(max_tokens=5, **GREEDY).token_ids == whole.token_ids


def test_a_stop_string_leaves_the_tokens_up_to_the_one_that_completed_it(pool: Client) -> None:
    plain = pool.generate(PROMPT, max_tokens=20, **GREEDY)
    stop = plain.text[6:9]
    with pool.open(PROMPT) as chat:
        answer = chat.generate(max_tokens=20, stop=[stop], **GREEDY)
        assert answer.finish_reason == "stop"
        assert stop not in answer.text
        assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
        assert stop in pool.detokenize(pool.tokenize(PROMPT) + answer.token_ids)
        assert pool.attach(chat.sequence_id).num_tokens == 4 + len(answer.token_ids)
        rest = chat.generate(max_tokens=20 - len(answer.token_ids), **GREEDY)
        assert answer.token_ids + rest.token_ids == plain.token_ids


def test_one_thing_at_a_time(pool: Client) -> None:
    with pool.open(PROMPT) as chat, chat.submit(max_tokens=100, window=2, **GREEDY) as stream:
        assert eventually(lambda: state_of(pool, stream.request_id) == "paused")
        for action in (
            lambda: chat.append("x"),
            lambda: chat.truncate(2),
            lambda: chat.generate(max_tokens=1),
        ):
            with pytest.raises(Busy) as refusal:
                action()
            assert refusal.value.retry_after_ms
        assert pool.attach(chat.sequence_id).num_tokens == 6
        with chat.fork(5) as child:
            whole = pool.generate(PROMPT, max_tokens=6, **GREEDY)
            assert child.generate(max_tokens=5, **GREEDY).token_ids == whole.token_ids[1:]


def test_an_answer_that_is_cut_short_leaves_what_was_given_out(pool: Client) -> None:
    with pool.open(PROMPT) as chat:
        with chat.submit(max_tokens=200, window=3, **GREEDY) as stream:
            got = [next(stream).token_id for _ in range(2)]
        assert eventually(lambda: state_of(pool, chat.sequence_id) == "idle")
        kept = pool.attach(chat.sequence_id).num_tokens - 4
        assert kept >= 2
        plain = pool.generate(PROMPT, max_tokens=kept + 3, **GREEDY).token_ids
        assert plain[:2] == got
        assert chat.generate(max_tokens=3, **GREEDY).token_ids == plain[kept:]
        late = chat.generate(max_tokens=200, deadline_s=0.0, **GREEDY)
        assert late.finish_reason == "deadline"
        assert chat.generate(max_tokens=1, ignore_eos=True).finish_reason == "length"


def test_closing_cancels_what_it_generates(pool: Client) -> None:
    chat = pool.open(PROMPT)
    stream = chat.submit(max_tokens=200, window=3, **GREEDY)
    next(stream)
    chat.close()
    assert stream.result().finish_reason == "cancelled"
    with pytest.raises(NotFound):
        chat.append("x")


def test_lifetimes(daemon: DaemonProcess, pool: Client) -> None:
    with daemon.client() as other:
        other.open(PROMPT, sequence_id="brief")
        kept = other.open(PROMPT, sequence_id="kept", keep=True)
        first = kept.generate(max_tokens=4, **GREEDY).token_ids
        other.open(PROMPT, sequence_id="lingering", linger_s=60.0)
        other.open(PROMPT, sequence_id="passing", linger_s=0.05)
        assert len(pool.ps()) == 4
    assert eventually(lambda: {row["request_id"] for row in pool.ps()} == {"kept", "lingering"})
    with pytest.raises(NotFound):
        pool.attach("brief")
    with daemon.client() as third:
        # Its user came back: from here on it lives as long as this client.
        assert (
            Sequence(third, "lingering", 0, keep=True).generate(max_tokens=2, ignore_eos=True).finish_reason == "length"
        )
        again = third.attach("kept")
        plain = pool.generate(PROMPT, max_tokens=8, **GREEDY).token_ids
        assert again.generate(max_tokens=4, **GREEDY).token_ids == plain[4:]
        assert first == plain[:4]
        again.close()
        assert state_of(pool, "lingering") == "idle"
    assert state_of(pool, "lingering") == "idle"
    pool.attach("lingering").close()


def test_submit_leaves_its_sequence(daemon: DaemonProcess, pool: Client) -> None:
    with daemon.client() as other:
        with other.submit(PROMPT, keep=True, request_id="told", max_tokens=5, **GREEDY) as stream:
            first = stream.result().token_ids
        with pytest.raises(InvalidArgument, match="told"):
            other.generate(PROMPT, keep=True, request_id="told", max_tokens=5)
        with pytest.raises(InvalidArgument, match="told"):
            other.open(PROMPT, sequence_id="told")
    told = pool.attach("told")
    plain = pool.generate(PROMPT, max_tokens=9, **GREEDY).token_ids
    assert first + told.generate(max_tokens=4, **GREEDY).token_ids == plain
    told.close()


def test_rows_and_blocks_of_an_idle_sequence(pool: Client) -> None:
    with pool.open([3] * 33) as chat:
        chat.generate(max_tokens=1)
        (row,) = pool.ps()
        assert (row["request_id"], row["state"], row["num_tokens"], row["num_blocks"]) == (
            chat.sequence_id, "idle", 34, 3,
        )  # fmt: skip
        pool_map = pool.pool_map()
        assert all(pool_map.states[block] == 1 for block in row["blocks"])
        assert pool_map.counters["sequences_held"] == 1
        assert pool.cancel(chat.sequence_id) == {"cancelled": 1}
        with pytest.raises(NotFound):
            chat.close()
        chat = pool.open("x", sequence_id=chat.sequence_id)


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (lambda chat: chat.truncate(0), "num_tokens"),
        (lambda chat: chat.truncate(5), "num_tokens"),
        (lambda chat: chat.fork(0), "at"),
        (lambda chat: chat.fork(5), "at"),
        (lambda chat: chat.fork(sequence_id=chat.sequence_id), "new_sequence_id"),
        (lambda chat: chat.generate(n=2), "n"),
        (lambda chat: chat.append([384]), "prompt[0]"),
        (lambda chat: chat.share(), "uid"),
        (lambda chat: chat.share(uid=1, gid=1), "uid"),
    ],
)
def test_what_cannot_be_is_refused_by_name(pool: Client, action: object, field: str) -> None:
    assert callable(action)
    with pool.open(PROMPT) as chat:
        with pytest.raises(InvalidArgument) as refusal:
            action(chat)
        assert refusal.value.field == field
        assert chat.generate(max_tokens=1, ignore_eos=True).finish_reason == "length"


def test_too_long(pool: Client) -> None:
    with pool.open([4] * 250) as chat:
        for action in (lambda: chat.append([4] * 7), lambda: chat.generate(max_tokens=7)):
            with pytest.raises(TooLong):
                action()
        assert chat.num_tokens == pool.attach(chat.sequence_id).num_tokens == 250
        chat.append([4] * 6)
        assert chat.generate(max_tokens=0).finish_reason == "length"


def test_another_process_of_the_same_user(daemon: DaemonProcess, pool: Client) -> None:
    with pool.open(PROMPT, sequence_id="ours") as chat:
        first = chat.generate(max_tokens=3, **GREEDY).token_ids
        attached, second, forked, own, closed = as_user(
            daemon.address,
            os.geteuid(),
            os.getegid(),
            [
                ["attach", "ours", {}],
                ["generate", "ours", {"max_tokens": 3, **GREEDY}],
                ["fork", "ours", {"at": 5, "sequence_id": "theirs"}],
                ["generate", "theirs", {"max_tokens": 2, **GREEDY}],
                ["close", "theirs", {}],
            ],
        )
        assert attached == 7
        assert (forked, closed) == (5, 0)
        plain = pool.generate(PROMPT, max_tokens=8, **GREEDY).token_ids
        assert [*first, *second] == plain[:6]
        assert own == plain[1:3]
        assert pool.attach("ours").generate(max_tokens=2, **GREEDY).token_ids == plain[6:]


@needs_root
def test_strangers_cannot_tell_that_it_exists(daemon: DaemonProcess, pool: Client) -> None:
    with pool.open(PROMPT, sequence_id="secret"):
        found = as_user(
            daemon.address,
            ALICE,
            ALICE,
            [
                ["attach", "secret", {}],
                ["append", "secret", {"prompt": "x"}],
                ["generate", "secret", {"max_tokens": 1}],
                ["fork", "secret", {}],
                ["truncate", "secret", {"num_tokens": 1}],
                ["share", "secret", {"uid": ALICE}],
                ["close", "secret", {}],
                ["ps", "", {}],
                ["open", "secret", {"prompt": "mine"}],
                ["generate", "secret", {"max_tokens": 1}],
            ],
        )
        assert found[:7] == ["not_found"] * 7
        assert found[7] == []
        assert isinstance(found[8], int)
        assert len(found[9]) == 1
        assert pool.attach("secret").num_tokens == 4


@needs_root
@pytest.mark.parametrize("by", ["uid", "gid"])
def test_what_is_shared_can_be_attached_to_and_forked(daemon: DaemonProcess, pool: Client, by: str) -> None:
    with pool.open(PROMPT, sequence_id="public") as chat:
        first = chat.generate(max_tokens=4, **GREEDY).token_ids
        if by == "uid":
            chat.share(uid=ALICE)
        else:
            chat.share(gid=GROUP)
        forbidden = [
            ["append", "public", {"prompt": "x"}],
            ["generate", "public", {"max_tokens": 1}],
            ["truncate", "public", {"num_tokens": 1}],
            ["share", "public", {"uid": BOB}],
            ["close", "public", {}],
        ]
        found = as_user(
            daemon.address,
            ALICE,
            GROUP,
            [
                ["attach", "public", {}],
                ["fork", "public", {"at": 6, "sequence_id": "mine"}],
                ["generate", "mine", {"max_tokens": 2, **GREEDY}],
                *forbidden,
                ["attach", "mine", {}],
            ],
        )
        assert found[:2] == [8, 6]
        assert found[2] == first[2:]
        assert found[3:] == ["not_owner"] * len(forbidden) + [8]
        assert as_user(daemon.address, BOB, BOB, [["attach", "public", {}]]) == ["not_found"]
        assert eventually(lambda: len(pool.ps()) == 1)  # the fork died with its session
        assert (
            chat.generate(max_tokens=2, **GREEDY).token_ids
            == (pool.generate(PROMPT, max_tokens=6, **GREEDY).token_ids[4:])
        )


@needs_root
def test_limits_of_a_user_hold_for_idle_sequences(daemon: DaemonProcess) -> None:
    found = as_user(
        daemon.address,
        CAROL,
        CAROL,
        [
            ["open", "a", {"prompt": [5] * 20}],
            ["generate", "a", {"max_tokens": 1, **GREEDY}],
            ["open", "b", {"prompt": [6] * 20}],
            ["open", "c", {"prompt": [6]}],
            ["fork", "a", {}],
            ["open", "b", {"prompt": [6]}],
            ["generate", "b", {"max_tokens": 1, **GREEDY}],  # takes the blocks of a, which is idle
            ["generate", "a", {"max_tokens": 1, **GREEDY}],
            ["append", "a", {"prompt": [6] * 30}],
        ],
    )
    assert [found[0], found[2]] == [20, 20]
    assert [found[3], found[4], found[5], found[8]] == ["quota"] * 2 + ["invalid_argument", "quota"]
    assert [len(found[n]) for n in (1, 6, 7)] == [1, 1, 1]


def test_a_daemon_that_drains_takes_no_new_sequences() -> None:
    with DaemonProcess("slow") as daemon, daemon.client() as pool:
        chat = pool.open(PROMPT, keep=True)
        with chat.submit(max_tokens=100, window=None, **GREEDY) as stream:
            next(stream)
            pool.drain()
            refusals = []
            for action in (lambda: pool.open("x"), chat.fork, lambda: chat.generate(max_tokens=1)):
                with pytest.raises(KVPoolError) as refusal:
                    action()
                refusals.append(type(refusal.value))
            assert refusals == [ShuttingDown] * 3
            assert stream.result().finish_reason == "length"
        assert daemon.wait() == 0


def test_a_kept_request_is_taken_up_with_its_sequence() -> None:
    with DaemonProcess("slow") as daemon, daemon.client(reconnect_s=60.0) as pool:
        expected = pool.generate(PROMPT, max_tokens=34, **GREEDY).token_ids
        stream = pool.submit(PROMPT, max_tokens=30, keep=True, request_id="kept", **GREEDY)
        next(stream)
        daemon.kill()
        daemon.start()
        assert stream.result(60.0).token_ids == expected[:30]
        kept = pool.attach("kept")
        assert kept.num_tokens == 34
        assert kept.generate(max_tokens=4, **GREEDY).token_ids == expected[30:]
        kept.close()
        assert eventually(lambda: at_rest(pool))
