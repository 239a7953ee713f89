"""Inputs that broke other engines, said over the wire by hand: each gets its answer, and the next request is right."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from kvpool.client.wire.protocol import (
    Accepted,
    Append,
    Call,
    Cancel,
    Credit,
    Failed,
    Finished,
    Hello,
    OpenSequence,
    Reply,
    Submit,
    Tokens,
    encode,
    pack_token_ids,
)
from tests.support.daemon_process import DaemonProcess, left_clean
from tests.support.engine_harness import prompts
from tests.support.raw_client import RawClient

PROMPT = "The sea is"
GREEDY = {"temperature": 0.0, "max_tokens": 6}


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess(max_queued_requests=10) as process:
        yield process


@pytest.fixture(scope="module")
def expected(shared: DaemonProcess) -> list[int]:
    with shared.client() as pool:
        return pool.generate(PROMPT, **GREEDY).token_ids


@pytest.fixture
def daemon(shared: DaemonProcess, expected: list[int]) -> Iterator[DaemonProcess]:
    """After every test the pool is clean, and an honest client gets what it always gets."""
    with left_clean(shared):
        yield shared
        with shared.client() as pool:
            assert pool.generate(PROMPT, **GREEDY).token_ids == expected


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.path) as client:
        client.open()
        yield client


def submit(**params: Any) -> bytes:
    """A Submit with parameters that the client library would not let through."""
    packed: bytes = msgpack.packb({"type": "submit", "request_id": "r", "prompt": PROMPT, "params": GREEDY | params})
    return packed


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "params.temperature"),
        ({"temperature": float("inf")}, "params.temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": -(2**63)}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"min_tokens": 7}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 385}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": [[384, 1.0]]}, "logit_bias"),
        ({"logit_bias": [[-1, 1.0]]}, "logit_bias"),
        ({"logit_bias": [[2**31, 1.0]]}, "logit_bias"),
        ({"logit_bias": [[2**64 - 1, 1.0]]}, "logit_bias"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [384]}, "allowed_token_ids"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": "x"}, "stop"),
        ({"stop": ["x" * 257]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(raw: RawClient, params: dict[str, Any], field: str) -> None:
    failed = raw.refused(submit(**params))
    assert (failed.code, failed.field, failed.request_id) in [
        ("invalid_argument", field, "r"),
        ("unsupported", field, "r"),
    ]
    assert failed.message


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 383},
        {"top_k": 384},
        {"top_k": 385},
        {"top_k": 9_999_999},
        {"top_k": -1},
        {"top_k": 0},
        {"seed": 2**63},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": [[5, -100.0]], "allowed_token_ids": [5]},
        {"min_tokens": 6},
        {"max_tokens": 0},
    ],
)
def test_parameters_at_the_edge_are_served(raw: RawClient, params: dict[str, Any]) -> None:
    raw.send(submit(**params))
    finished = raw.expect(Finished)
    assert finished.finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        (Submit("r", prompt=b""), "invalid_argument", "prompt"),
        (Submit("r", prompt=""), "invalid_argument", "prompt"),
        (Submit("r"), "invalid_argument", "prompt"),
        (Submit("r", prompt=pack_token_ids([384])), "invalid_argument", "prompt[0]"),
        (Submit("r", prompt=struct.pack("<i", -1)), "invalid_argument", "prompt[0]"),
        (Submit("r", prompt=b"abc"), "invalid_argument", "prompt"),
        (Submit("r", prompt=pack_token_ids([5] * 257)), "too_long", "prompt"),
        (Submit("r", prompt=pack_token_ids([5] * 200)), "too_long", "max_tokens"),
        (Submit("r", prompt="x" * 100_000), "too_long", "prompt"),
        (Submit("r" * 129, prompt=PROMPT), "invalid_argument", "request_id"),
        (Submit("r\n", prompt=PROMPT), "invalid_argument", "request_id"),
        (Submit("r", prompt=PROMPT, priority=101), "invalid_argument", "priority"),
        (Submit("r", prompt=PROMPT, deadline_s=-1.0), "invalid_argument", "deadline_s"),
        (Submit("r", prompt=PROMPT, params={"n": 2}, keep=True), "invalid_argument", "keep"),
        (Hello((1,), "again"), "invalid_argument", "type"),
        (OpenSequence(1, "s", prompt=pack_token_ids([])), "invalid_argument", "prompt"),
        (Append(1, "s", prompt=PROMPT), "not_found", "sequence_id"),
        (Call(1, "no_such_method"), "unsupported", "method"),
        (Call(1, "cancel"), "invalid_argument", "request_id"),
        (Call(1, "cancel", {"request_id": "never"}), "not_found", "request_id"),
        (Call(1, "cancel", {"request_id": "r", "why": 1}), "invalid_argument", "why"),
        (Call(1, "tokenize", {"text": 5}), "invalid_argument", "text"),
        (Call(1, "detokenize", {"token_ids": pack_token_ids([384])}), "invalid_argument", "prompt[0]"),
        (Call(1, "resize", {"pool_bytes": 1}), "unsupported", None),
    ],
)
def test_messages_that_cannot_be_served_get_a_typed_error(raw: RawClient, message: Any, code: str, field: str) -> None:
    failed = raw.refused(message)
    assert (failed.code, failed.field) == (code, field)
    assert failed.call_id == getattr(message, "call_id", None)


def test_a_request_that_never_fits_does_not_block_the_queue() -> None:
    with DaemonProcess(pool_bytes=4 * 8192, max_model_len=256) as daemon, RawClient(daemon.path) as raw:
        raw.open()
        never = raw.refused(Submit("big", prompt=pack_token_ids(prompts(1, 100)[0]), params=GREEDY))
        assert (never.code, never.request_id) == ("never_fits", "big")
        assert "set pool_bytes to hold" in never.message
        raw.send(Submit("small", prompt=PROMPT, params=GREEDY))
        assert raw.expect(Finished).finish_reason == "length"


def test_the_second_of_two_equal_names_is_refused_and_the_first_is_intact(raw: RawClient, expected: list[int]) -> None:
    raw.send(Submit("same", prompt=PROMPT, params=GREEDY, credit=1))
    raw.expect(Tokens)
    failed = raw.refused(Submit("same", prompt="something else", params=GREEDY))
    assert (failed.code, failed.field, failed.request_id) == ("invalid_argument", "request_id", "same")
    raw.send(Credit("same", 100))
    tokens = expected[:1]
    while not isinstance(message := raw.receive(), Finished):
        if isinstance(message, Tokens):
            tokens += [token for batch in message.events for token in batch.token_ids]
    assert tokens == expected
    raw.send(Submit("same", prompt=PROMPT, params=GREEDY))  # the name is free again
    raw.expect(Finished)


def test_names_of_different_sessions_do_not_meet(daemon: DaemonProcess, raw: RawClient, expected: list[int]) -> None:
    raw.send(Submit("same", prompt=PROMPT, params=GREEDY, credit=1))
    raw.expect(Tokens)
    with RawClient(daemon.path) as other:
        other.open()
        other.send(Cancel("same"))
        other.send(Submit("same", prompt=PROMPT, params=GREEDY))
        assert other.expect(Finished).usage.completion_tokens == 6
    raw.send(Credit("same", 5))
    assert raw.expect(Finished).usage.completion_tokens == 6


def test_what_is_not_there_can_be_cancelled_and_granted(raw: RawClient) -> None:
    for message in (Cancel("never"), Credit("never", 1), Credit("never", 1, 9)):
        raw.send(message)
    assert isinstance(raw.ask(Call(1, "stats")), Reply)


def test_a_flood_of_submits_meets_the_queue_limit(raw: RawClient) -> None:
    for number in range(200):
        raw.send(Submit(f"r{number}", prompt=PROMPT, params={"max_tokens": 200, "ignore_eos": True}, credit=1))
    answers = [raw.receive() for _ in range(200)]
    busy = [answer for answer in answers if isinstance(answer, Failed)]
    assert busy
    assert {(failed.code, bool(failed.retry_after_ms)) for failed in busy} == {("busy", True)}


def test_a_deadline_in_the_queue(raw: RawClient) -> None:
    raw.send(Submit("late", prompt=PROMPT, params=GREEDY, deadline_s=0.0))
    finished = raw.expect(Finished)
    assert (finished.finish_reason, finished.usage.completion_tokens, finished.error) == ("deadline", 0, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xc1",
        b"{}",
        b"\xff" * 100,
        msgpack.packb([1, 2, 3]),
        msgpack.packb({"type": "nothing"}),
        msgpack.packb({"type": 5}),
        msgpack.packb({"no": "type"}),
        msgpack.packb({"type": "welcome", "epoch": 1}),
        msgpack.packb({"type": "submit"}),
        msgpack.packb({"type": "submit", "request_id": 5}),
        msgpack.packb({"type": "submit", "request_id": "r", "unknown": 1}),
        msgpack.packb({"type": "cancel", "request_id": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"type": "credit", "request_id": "r", "amount": 0}),
        b"\x82\xa4type\xa6cancel\xa4type\xa6cancel",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        [b"two", b"frames"],
        [b""] * 50,
        encode(Cancel("r")) + b"\x00",
    ],
)
def test_garbage_is_answered_and_counted(raw: RawClient, data: bytes | list[bytes]) -> None:
    before = raw.ask(Call(1, "stats"))
    failed = raw.refused(data)
    assert failed.code == "invalid_argument"
    after = raw.ask(Call(2, "stats"))
    assert isinstance(before, Reply)
    assert isinstance(after, Reply)
    assert after.value["garbage_total"] == before.value["garbage_total"] + 1


def test_strangers_are_told_to_say_hello(daemon: DaemonProcess) -> None:
    with RawClient(daemon.path) as stranger:
        assert stranger.refused(Submit("r", prompt=PROMPT)).field == "session"
        assert stranger.refused(b"garbage").code == "invalid_argument"
        failed = stranger.refused(Hello((99,), "from the future"))
        assert (failed.code, failed.field) == ("unsupported", "versions")


def test_too_large_a_message_ends_only_its_sender(daemon: DaemonProcess, raw: RawClient) -> None:
    with RawClient(daemon.path) as large:
        welcome = large.open()
        large.send(b"x" * (welcome.limits.max_message_bytes + 1))
        assert isinstance(raw.ask(Call(1, "stats")), Reply)


def test_a_flood_of_garbage_delays_nobody_for_long(daemon: DaemonProcess, expected: list[int]) -> None:
    source = random.Random(0)
    valid = encode(Submit("r", prompt=PROMPT, params=GREEDY))
    with RawClient(daemon.path, receive_hwm=10) as hostile, daemon.client() as pool:
        hostile.open()
        for number in range(3000):
            damaged = bytearray(valid)
            for _ in range(3):
                damaged[source.randrange(len(damaged))] = source.randrange(256)
            hostile.send(bytes(damaged) if number % 2 else source.randbytes(source.randrange(200)))
        assert pool.generate(PROMPT, timeout_s=10.0, **GREEDY).token_ids == expected


def test_equal_prompts_cold_and_warm(daemon: DaemonProcess) -> None:
    prompt = prompts(1, 32, seed=5)[0]  # a whole number of blocks
    with daemon.client() as pool:
        streams = [pool.submit(prompt, **GREEDY) for _ in range(4)]
        cold = [stream.result().token_ids for stream in streams]
        warm = pool.generate(prompt, **GREEDY)
    assert cold == [warm.token_ids] * 4
    assert warm.usage.cached_tokens == 31


def test_text_comes_in_whole_characters(daemon: DaemonProcess) -> None:
    with daemon.client() as pool:
        for seed in range(8):
            stream = pool.submit(PROMPT, max_tokens=40, seed=seed, ignore_eos=True, temperature=2.0)
            parts = [event.text for event in stream]
            assert "".join(parts) == stream.result().text == pool.detokenize(stream.result().token_ids)


def refused_clients(daemon: DaemonProcess, count: int) -> Iterator[Failed]:
    for _ in range(count):
        with RawClient(daemon.path) as raw:
            answer = raw.ask(Hello((1,), "one too many"))
            assert isinstance(answer, Failed)
            yield answer


def test_clients_have_a_limit() -> None:
    with DaemonProcess(max_clients=2) as daemon, daemon.client() as pool, RawClient(daemon.path) as raw:
        raw.open()
        assert {failed.code for failed in refused_clients(daemon, 3)} == {"busy"}
        assert pool.generate(PROMPT, max_tokens=1, ignore_eos=True).finish_reason == "length"


def test_accepted_comes_first(raw: RawClient) -> None:
    accepted = raw.ask(Submit("r", prompt=PROMPT, params=GREEDY))
    assert isinstance(accepted, Accepted)
    raw.expect(Finished)
