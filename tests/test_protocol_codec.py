"""Messages to bytes and back: every message survives, and nothing that is not one gets through."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.wire.errors import (
    ERRORS_BY_CODE,
    InternalError,
    InvalidArgument,
    KVPoolError,
    ProtocolError,
    from_code,
)
from kvpool.client.wire.errors import TooLong as TooLongError
from kvpool.client.wire.protocol import (
    CLIENT_MESSAGES,
    DAEMON_LIMITS,
    DAEMON_MESSAGES,
    PROTOCOL_VERSION,
    Call,
    Fork,
    Hello,
    Reply,
    Submit,
    TokenBatch,
    Tokens,
    decode_client_message,
    decode_daemon_message,
    encode,
    encode_checked,
    negotiate,
    pack_token_ids,
    unpack_token_ids,
)
from kvpool.client.wire.schema import Mismatch, record_of
from tests.support.message_strategies import client_messages, daemon_messages


def packed(**fields: Any) -> bytes:
    data: bytes = msgpack.packb(fields)
    return data


def refused(data: bytes, field: str | None) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode_client_message(data)
    assert caught.value.field == field
    assert caught.value.code == "invalid_argument"
    return caught.value


@given(client_messages)
def test_client_messages_survive(message: Any) -> None:
    assert decode_client_message(encode(message)) == message
    assert encode_checked(message) == encode(message)


@given(daemon_messages)
def test_daemon_messages_survive(message: Any) -> None:
    assert decode_daemon_message(encode(message)) == message


@pytest.mark.parametrize("kind", [*CLIENT_MESSAGES.values(), *DAEMON_MESSAGES.values()])
def test_every_message_is_frozen_and_slotted(kind: type[Any]) -> None:
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in vars(kind)
    assert record_of(kind).make is kind


def test_every_daemon_message_carries_the_epoch() -> None:
    for kind in DAEMON_MESSAGES.values():
        assert dataclasses.fields(kind)[0].name == "epoch"


def test_directions_do_not_mix() -> None:
    with pytest.raises(ProtocolError):
        decode_client_message(encode(Reply(1, 2)))
    with pytest.raises(ProtocolError):
        decode_daemon_message(encode(Call(1, "stats")))


def test_defaults_do_not_travel() -> None:
    assert msgpack.unpackb(encode(Submit("r", prompt="x"))) == {"type": "submit", "request_id": "r", "prompt": "x"}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"request_id": 5}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_id": "é" * 65}, "request_id"),
        ({"request_id": None}, "request_id"),
        ({"priority": True}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": 101}, "priority"),
        ({"priority": 2**63}, "priority"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"deadline_s": math.inf}, "deadline_s"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"deadline_s": "1"}, "deadline_s"),
        ({"want_text": 1}, "want_text"),
        ({"credit": -1}, "credit"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 2**31]}, "prompt[1]"),
        ({"prompt": b"123"}, "prompt"),
        ({"prompt": np.array([-1], dtype="<i4").tobytes()}, "prompt[0]"),
        ({"prompt": {}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, "messages[0].x"),
        ({"params": [1]}, "params"),
        ({"params": {"temperature": math.nan}}, "params.temperature"),
        ({"params": {"stop": ["a", math.inf]}}, "params.stop[1]"),
        ({"params": {"a": {"b": {"c": {"d": {}}}}}}, "params.a.b.c.d"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], where: str) -> None:
    error = refused(packed(type="submit", **{"request_id": "r", **fields}), where)
    assert error.request_id == ("r" if "request_id" not in fields else error.request_id)


def test_missing_field_is_named() -> None:
    assert refused(packed(type="fork", call_id=7, sequence_id="a"), "new_sequence_id").call_id == 7


def test_unknown_types_are_refused() -> None:
    refused(packed(type="nonsense", request_id="r"), "type")
    refused(packed(type="__class__"), "type")
    refused(packed(type=b"submit"), "type")
    refused(packed(request_id="r"), "type")
    refused(msgpack.packb(["submit"]), None)


def test_what_messagepack_lets_through_is_refused() -> None:
    twice = b"\x83\xa4type\xa6submit\xaarequest_id\xa1a\xaarequest_id\xa1b"
    assert "twice" in str(refused(twice, None))
    refused(packed(type="call", call_id=1, method="x", arguments={"when": msgpack.Timestamp(1, 0)}), None)
    refused(packed(type="submit", request_id=msgpack.ExtType(42, b"")), None)
    refused(msgpack.packb({"type": "cancel", 1: 2}), None)
    refused(msgpack.packb({"type": "cancel", b"request_id": "r"}), None)
    refused(packed(type="cancel", request_id="r") + b"\x00", None)
    refused(b"\x82\xa4type\xa6cancel\xaarequest_id\xa1\xff", None)
    refused(b"", None)


def test_limits_hold() -> None:
    limits = dataclasses.replace(DAEMON_LIMITS, max_message_bytes=100)
    with pytest.raises(ProtocolError, match="100 bytes"):
        decode_client_message(b"\x00" * 101, limits)
    refused(packed(type="submit", request_id="r", prompt=[1] * (DAEMON_LIMITS.max_array_items + 1)), None)
    refused(packed(type="call", call_id=1, method="x", arguments={str(i): 0 for i in range(2000)}), None)


def test_arrays_of_token_ids_arrive_packed() -> None:
    message = decode_client_message(packed(type="submit", request_id="r", prompt=[1, 2, 3]))
    assert message == Submit("r", prompt=pack_token_ids([1, 2, 3]))


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_token_ids_pack(ids: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(ids)).tolist() == ids
    assert pack_token_ids(np.array(ids, dtype=np.int64)) == pack_token_ids(ids)


@pytest.mark.parametrize(
    "ids",
    [[-1], [2**31], [1.0], [True], ["1"], [[1]], np.zeros((2, 2), dtype=int), np.array([0.5]), np.array([-1]), [None]],
)
def test_wrong_token_ids_are_refused(ids: Any) -> None:
    with pytest.raises(Mismatch):
        pack_token_ids(ids)


def test_a_caller_is_told_before_anything_is_sent() -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode_checked(Submit("r", prompt="x", priority=1000))
    assert caught.value.field == "priority"
    with pytest.raises(InvalidArgument) as caught:
        encode_checked(Submit("r", prompt="\ud800"))
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidArgument) as caught:
        encode_checked(Fork(1, "a", "b", at=-1))
    assert caught.value.field == "at"
    with pytest.raises(TooLongError, match="max_message_bytes") as too_long:
        encode_checked(Submit("r", prompt="x" * 200), max_message_bytes=100)
    assert too_long.value.field == "prompt"


def test_logprobs_may_be_minus_infinity_and_never_nan() -> None:
    batch = TokenBatch("r", 0, 0, (1,), logprobs=(-math.inf,))
    assert decode_daemon_message(encode(Tokens(1, (batch,)))) == Tokens(1, (batch,))
    for wrong in (math.nan, math.inf, 1.0):
        with pytest.raises(ProtocolError) as caught:
            decode_daemon_message(encode(Tokens(1, (TokenBatch("r", 0, 0, (1,), logprobs=(wrong,)),))))
        assert caught.value.field == "events[0].logprobs[0]"


def test_versions_are_negotiated() -> None:
    assert negotiate([99, PROTOCOL_VERSION]) == PROTOCOL_VERSION
    assert negotiate([99]) is None
    assert decode_client_message(encode(Hello((99, 1)))) == Hello((99, 1))


def test_one_exception_per_code() -> None:
    assert set(ERRORS_BY_CODE) == {
        "invalid_argument", "too_long", "never_fits", "quota", "busy", "not_found", "not_owner", "deadline",
        "cancelled", "shutting_down", "unsupported", "numeric", "internal",
    }  # fmt: skip
    for code, kind in ERRORS_BY_CODE.items():
        error = from_code(code, "why", field="x", retry_after_ms=3)
        assert type(error) is kind
        assert isinstance(error, KVPoolError)
        assert (error.code, error.message, error.field, error.retry_after_ms) == (code, "why", "x", 3)
        assert str(error) == "x: why"
    assert type(from_code("from_the_future", "why")) is InternalError
