"""The client's state machine alone: bytes in, bytes out, no sockets and no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.core import Core, DaemonGone, EndOfStream, State
from kvpool.client.lifeline import FrameKind, encode_frame
from kvpool.client.results import TAIL_TOKEN_ID, TokenEvent
from kvpool.client.stream_state import StreamState
from kvpool.client.wire.errors import (
    Busy,
    ConnectionLost,
    InvalidArgument,
    KVPoolError,
    NotFound,
    NumericError,
    ProtocolError,
    ShuttingDown,
    Unsupported,
)
from kvpool.client.wire.protocol import (
    Accepted,
    Attach,
    Call,
    Cancel,
    Closing,
    Credit,
    ErrorInfo,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Notice,
    Reply,
    ServerLimits,
    Submit,
    TokenBatch,
    Tokens,
    Usage,
    Welcome,
    decode_client_message,
    encode,
)

LIMITS = ServerLimits(1 << 20, 4096, 1000, 16, 64, 8)
GONE = ConnectionLost("gone")


def said(core: Core) -> list[Any]:
    """What the core wants sent, taken away."""
    messages = [decode_client_message(data) for data in core.outbox]
    core.outbox.clear()
    return messages


def arrive(core: Core, message: Any) -> None:
    core.receive(encode(message))


def welcome(core: Core, epoch: int = 1) -> None:
    core.connected()
    assert isinstance(said(core)[0], Hello)
    arrive(core, Welcome(epoch, 1, "s", "model", LIMITS, b"t" * 32))
    core.receive_lifeline(encode_frame(FrameKind.ATTACHED))
    core.lifeline_outbox.clear()


@pytest.fixture
def core() -> Core:
    core = Core("test")
    welcome(core)
    return core


def submit(core: Core, request_id: str = "r", n: int = 1, window: int | None = None, linger_s: float = 0.0) -> Any:
    stream = core.submit(Submit(request_id, prompt="x", credit=window, linger_s=linger_s), n, linger_s)
    assert said(core) == [Submit(request_id, prompt="x", credit=window, linger_s=linger_s)]
    return stream


def tokens(core: Core, index: int, count: int, request_id: str = "r", sample: int = 0, epoch: int = 1) -> None:
    ids = tuple(range(index, index + count))
    arrive(core, Tokens(epoch, (TokenBatch(request_id, sample, index, ids, tuple(f"<{i}>" for i in ids)),)))


def read(core: Core, stream: Any) -> list[int]:
    """Token ids that can be read now."""
    ids = []
    while (event := core.read(stream)) is not None:
        ids.append(event.token_id)
    return ids


# ---- greeting


def test_a_session_begins() -> None:
    core = Core("name")
    core.connected()
    assert core.state is State.GREETING
    hello = said(core)[0]
    assert (hello.client_name, hello.versions) == ("name", (2, 1))
    arrive(core, Welcome(1, 1, "s", "model", LIMITS, b"t" * 32))
    assert core.state is State.TYING
    assert bytes(core.lifeline_outbox) == encode_frame(FrameKind.TOKEN, b"t" * 32)
    core.receive_lifeline(encode_frame(FrameKind.ATTACHED))
    assert core.state is State.READY


def test_nothing_can_be_asked_before_the_session_is_ready() -> None:
    core = Core()
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            core.submit(Submit("r", prompt="x"), 1)
        core.connected()


def test_a_refused_hello_is_told() -> None:
    core = Core()
    core.connected()
    with pytest.raises(Unsupported):
        arrive(core, Failed(1, "unsupported", "this daemon speaks protocol 2"))


def test_another_version_is_refused() -> None:
    core = Core()
    core.connected()
    with pytest.raises(Unsupported, match="protocol 3"):
        arrive(core, Welcome(1, 3, "s", "model", LIMITS))


def test_a_refused_lifeline_is_told() -> None:
    core = Core()
    core.connected()
    arrive(core, Welcome(1, 1, "s", "model", LIMITS, b"t" * 32))
    with pytest.raises(ConnectionLost, match="another user"):
        core.receive_lifeline(encode_frame(FrameKind.REFUSED, b"another user"))


def test_a_welcome_out_of_turn_ends_the_connection(core: Core) -> None:
    with pytest.raises(ProtocolError):
        arrive(core, Welcome(1, 1, "s", "model", LIMITS, b"t" * 32))


@pytest.mark.parametrize(
    "message",
    [
        Accepted(2, "r"),
        Tokens(2, ()),
        Reply(2, 1),
        Finished(2, "r", 0, "stop", Usage()),
        Failed(2, "not_found", "there is no session: say hello first", "session", request_id="r"),
        Failed(2, "not_found", "there is no session: say hello first", "session", call_id=1),
        Closing(2, "protocol_error"),
    ],
)
def test_an_answer_of_another_epoch_tells_that_the_daemon_is_gone(core: Core, message: Any) -> None:
    stream, call = submit(core), core.call(lambda call_id: Call(call_id, "stats"), "stats")
    with pytest.raises(DaemonGone):
        arrive(core, message)
    assert not stream.done
    assert not call.done


def test_messages_before_welcome_end_the_connection() -> None:
    core = Core()
    core.connected()
    with pytest.raises(ProtocolError):
        arrive(core, Tokens(0, ()))


# ---- requests


def test_a_request_runs(core: Core) -> None:
    stream = submit(core)
    arrive(core, Accepted(1, "r"))
    assert core.read(stream) is None
    tokens(core, 0, 2)
    tokens(core, 2, 1)
    assert read(core, stream) == [0, 1, 2]
    assert not stream.done
    arrive(core, Finished(1, "r", 0, "stop", Usage(5, 3, 1)))
    with pytest.raises(EndOfStream):
        core.read(stream)
    result = stream.result()
    assert (result.token_ids, result.text, result.finish_reason) == ([0, 1, 2], "<0><1><2>", "stop")
    assert (result.logprobs, result.top_logprobs, result.usage) == (None, None, Usage(5, 3, 1))
    assert core.num_streams == 0


def test_logprobs_arrive_with_their_tokens(core: Core) -> None:
    stream = submit(core)
    batch = TokenBatch("r", 0, 0, (4, 5), ("a", "b"), (-0.5, -1.5), (((4, -0.5), (9, -2.0)), ((8, -1.0), (5, -1.5))))
    arrive(core, Tokens(1, (batch,)))
    first, second = core.read(stream), core.read(stream)
    assert (first.logprob, first.top_logprobs, first.index) == (-0.5, {4: -0.5, 9: -2.0}, 0)
    assert (second.logprob, list(second.top_logprobs), second.index) == (-1.5, [8, 5], 1)
    arrive(core, Finished(1, "r", 0, "length", Usage(1, 2, 0)))
    assert stream.result().logprobs == [-0.5, -1.5]


def test_one_message_serves_many_requests(core: Core) -> None:
    one, two = submit(core, "a"), submit(core, "b", n=2)
    batches = tuple(TokenBatch(name, sample, 0, (7,)) for name, sample in (("a", 0), ("b", 0), ("b", 1)))
    arrive(core, Tokens(1, batches))
    assert read(core, one) == [7]
    assert [(event.sample, event.index) for event in (core.read(two), core.read(two))] == [(0, 0), (1, 0)]


def test_samples_finish_apart(core: Core) -> None:
    stream = submit(core, n=2)
    tokens(core, 0, 1, sample=1)
    arrive(core, Finished(1, "r", 1, "stop", Usage(1, 1, 0)))
    assert not stream.done
    tokens(core, 0, 2, sample=0)
    arrive(core, Finished(1, "r", 0, "error", Usage(1, 2, 0), error=ErrorInfo("numeric", "NaN")))
    result = stream.result()
    assert [output.finish_reason for output in result.outputs] == ["error", "stop"]
    assert isinstance(result.outputs[0].error, NumericError)
    assert result.outputs[1].token_ids == [0]


def test_an_error_of_the_only_sample_is_raised(core: Core) -> None:
    stream = submit(core)
    tokens(core, 0, 1)
    arrive(core, Finished(1, "r", 0, "error", Usage(1, 1, 0), error=ErrorInfo("numeric", "NaN")))
    assert core.read(stream).token_id == 0
    with pytest.raises(NumericError):
        core.read(stream)
    with pytest.raises(NumericError):
        stream.result()


def test_a_refusal_ends_the_request(core: Core) -> None:
    stream = submit(core)
    arrive(core, Failed(1, "busy", "full", retry_after_ms=250, request_id="r"))
    with pytest.raises(Busy) as caught:
        stream.result()
    assert caught.value.retry_after_ms == 250
    submit(core)  # its name is free again


def test_text_held_back_at_the_end_is_read_too(core: Core) -> None:
    stream = submit(core)
    tokens(core, 0, 1)
    arrive(core, Finished(1, "r", 0, "deadline", Usage(1, 1, 0), text="\n\nHu"))
    texts = [core.read(stream), core.read(stream)]
    assert [(event.token_id, event.text) for event in texts] == [(0, "<0>"), (TAIL_TOKEN_ID, "\n\nHu")]
    assert stream.result().text == "<0>\n\nHu"
    assert stream.result().token_ids == [0]


def test_a_name_is_used_once_at_a_time(core: Core) -> None:
    first = submit(core)
    with pytest.raises(InvalidArgument) as caught:
        core.submit(Submit("r", prompt="y"), 1)
    assert caught.value.field == "request_id"
    assert said(core) == []
    tokens(core, 0, 1)
    assert read(core, first) == [0]


def test_a_wrong_value_is_refused_before_it_is_sent(core: Core) -> None:
    with pytest.raises(InvalidArgument) as caught:
        core.submit(Submit("r", prompt="x", deadline_s=-1.0), 1)
    assert caught.value.field == "deadline_s"
    assert said(core) == []
    assert core.num_streams == 0


def test_cancel_is_sent_while_it_can_matter(core: Core) -> None:
    stream = submit(core)
    core.cancel(stream)
    assert said(core) == [Cancel("r")]
    arrive(core, Finished(1, "r", 0, "cancelled", Usage(1, 0, 0)))
    core.cancel(stream)
    assert said(core) == []
    assert stream.result().finish_reason == "cancelled"


def test_an_abandoned_request_keeps_nothing(core: Core) -> None:
    stream = submit(core)
    stream.abandon()
    core.cancel(stream)
    tokens(core, 0, 3)
    assert core.read(stream) is None
    arrive(core, Finished(1, "r", 0, "cancelled", Usage(1, 3, 0), text="tail"))
    assert core.num_streams == 0


def test_messages_about_forgotten_requests_are_ignored(core: Core) -> None:
    tokens(core, 0, 1, "unknown")
    arrive(core, Finished(1, "unknown", 0, "stop", Usage()))
    arrive(core, Failed(1, "busy", "full", request_id="unknown"))
    arrive(core, Failed(1, "busy", "full", call_id=99))
    arrive(core, Reply(1, 99))
    arrive(core, Notice(1, "unknown", "paused"))


@pytest.mark.parametrize(
    "batch",
    [
        TokenBatch("r", 0, 1, (5,)),
        TokenBatch("r", 1, 0, (5,)),
        TokenBatch("r", 0, 0, (5, 6), ("a",)),
        TokenBatch("r", 0, 0, (5,), logprobs=(-1.0, -1.0)),
        TokenBatch("r", 0, 0, (5,), top_logprobs=((), ())),
    ],
)
def test_impossible_tokens_end_the_connection(core: Core, batch: TokenBatch) -> None:
    submit(core)
    with pytest.raises(ProtocolError):
        arrive(core, Tokens(1, (batch,)))


def test_two_endings_end_the_connection(core: Core) -> None:
    submit(core, n=2)
    arrive(core, Finished(1, "r", 0, "stop", Usage()))
    with pytest.raises(ProtocolError):
        arrive(core, Finished(1, "r", 0, "stop", Usage()))


def test_a_pause_is_told_and_ends(core: Core) -> None:
    stream = submit(core)
    arrive(core, Notice(1, "r", "paused", "no credit"))
    assert stream.paused == "no credit"
    arrive(core, Notice(1, "r", "resumed"))
    assert stream.paused is None


# ---- credit


def test_credit_is_granted_by_reading_alone(core: Core) -> None:
    stream = submit(core, window=8)
    tokens(core, 0, 8)
    assert said(core) == []
    for _ in range(3):
        core.read(stream)
    assert said(core) == []
    core.read(stream)
    assert said(core) == [Credit("r", 4, 0)]


def test_credit_is_kept_by_sample(core: Core) -> None:
    stream = submit(core, n=2, window=4)
    tokens(core, 0, 4, sample=1)
    tokens(core, 0, 1, sample=0)
    assert len(read(core, stream)) == 5
    assert said(core) == [Credit("r", 2, 1), Credit("r", 2, 1)]


def test_without_a_window_no_credit_is_sent(core: Core) -> None:
    stream = submit(core, window=None)
    tokens(core, 0, 1000)
    assert len(read(core, stream)) == 1000
    assert said(core) == []


@given(st.integers(1, 40), st.lists(st.integers(1, 12), max_size=40))
def test_the_daemon_never_runs_dry_while_the_reader_reads(window: int, reads: list[int]) -> None:
    """Against the plain sum: granted = window + read, less what is read and not yet worth a message."""
    core = Core()
    welcome(core)
    stream = submit(core, window=window)
    granted, sent, num_read = window, 0, 0
    for wanted in reads:
        if sent < granted:
            tokens(core, sent, granted - sent)
            sent = granted
        for _ in range(wanted):
            num_read += core.read(stream) is not None
        granted += sum(message.amount for message in said(core))
        assert num_read <= sent <= granted <= window + num_read
        assert granted > num_read  # so the daemon may always send one more once all is read


# ---- calls


def test_a_call_is_answered(core: Core) -> None:
    pending = core.call(lambda call_id: Call(call_id, "stats"), "stats")
    (message,) = said(core)
    arrive(core, Reply(1, message.call_id, {"epoch": 1}))
    assert pending.done
    assert pending.value() == {"epoch": 1}


def test_a_call_is_refused(core: Core) -> None:
    pending = core.call(lambda call_id: Call(call_id, "cancel"), "cancel")
    arrive(core, Failed(1, "not_found", "no such request", "request_id", call_id=said(core)[0].call_id))
    with pytest.raises(NotFound) as caught:
        pending.value()
    assert caught.value.field == "request_id"


def test_a_forgotten_call_may_be_answered(core: Core) -> None:
    pending = core.call(lambda call_id: Call(call_id, "stats"), "stats")
    core.forget(pending)
    arrive(core, Reply(1, said(core)[0].call_id))
    assert not pending.done


# ---- the end of a connection


def test_a_lost_connection_fails_everything(core: Core) -> None:
    stream = submit(core)
    pending = core.call(lambda call_id: Call(call_id, "stats"), "stats")
    tokens(core, 0, 1)
    core.lost(GONE, 0.0)
    assert core.read(stream).token_id == 0  # what came is not taken away
    with pytest.raises(ConnectionLost):
        core.read(stream)
    with pytest.raises(ConnectionLost):
        pending.value()
    assert core.state is State.DISCONNECTED
    assert (core.num_streams, core.has_detached, said(core)) == (0, False, [])
    with pytest.raises(ConnectionLost):
        core.submit(Submit("r", prompt="x"), 1)


@pytest.mark.parametrize(("reason", "error"), [("shutting_down", ShuttingDown), ("protocol_error", ConnectionLost)])
def test_closing_says_why(core: Core, reason: str, error: type[KVPoolError]) -> None:
    with pytest.raises(error):
        arrive(core, Closing(1, reason))


def test_a_failure_of_nothing_in_particular_ends_the_connection(core: Core) -> None:
    with pytest.raises(ConnectionLost, match="not MessagePack"):
        arrive(core, Failed(1, "invalid_argument", "not MessagePack"))


def test_who_follows_learns_how_many_samples_there_are(core: Core) -> None:
    stream = core.attach("r", window=8)
    assert said(core) == [Attach("r", (0,), 8)]
    arrive(core, Accepted(1, "r", 2))
    tokens(core, 0, 1, sample=1)
    assert core.read(stream).sample == 1
    for sample in range(2):
        arrive(core, Finished(1, "r", sample, "stop", Usage()))
    assert len(stream.result().outputs) == 2


def test_a_lingering_request_goes_on_in_the_next_session(core: Core) -> None:
    stream = submit(core, n=2, window=8, linger_s=5.0)
    tokens(core, 0, 3, sample=0)
    assert core.read(stream).token_id == 0
    core.lost(GONE, now_s=100.0)
    assert core.has_detached
    core.expire(104.9)
    welcome(core, epoch=2)
    assert said(core) == [Attach("r", (3, 0), 6)]
    assert not core.has_detached
    tokens(core, 2, 3, sample=0, epoch=2)  # one of them again
    assert read(core, stream) == [1, 2, 3, 4]
    for sample in range(2):
        arrive(core, Finished(2, "r", sample, "stop", Usage()))
    assert stream.result().token_ids == [0, 1, 2, 3, 4]


def test_a_lingering_request_that_is_forgotten_there_fails(core: Core) -> None:
    stream = submit(core, linger_s=5.0)
    arrive(core, Accepted(1, "r", 1))
    core.lost(GONE, now_s=100.0)
    welcome(core, epoch=2)
    arrive(core, Failed(2, "not_found", "no such request", request_id="r"))
    with pytest.raises(NotFound):
        stream.result()


def test_lingering_ends(core: Core) -> None:
    stream = submit(core, linger_s=5.0)
    core.lost(GONE, now_s=100.0)
    core.lost(ConnectionLost("again"), now_s=103.0)  # does not begin anew
    core.expire(105.0)
    with pytest.raises(ConnectionLost):
        stream.result()
    assert not core.has_detached


def test_cancelling_a_detached_request_ends_it(core: Core) -> None:
    stream = submit(core, linger_s=5.0)
    core.lost(GONE, now_s=100.0)
    core.cancel(stream)
    assert stream.done
    assert core.num_streams == 0


def test_leaving_on_purpose_lets_nothing_linger(core: Core) -> None:
    stream = submit(core, linger_s=5.0)
    core.goodbye()
    assert said(core) == [Goodbye()]
    core.abandon_all(GONE)
    assert stream.done
    assert not core.has_detached


# ---- the daemon is restarted


@pytest.fixture
def patient() -> Core:
    core = Core(reconnect_s=1.5, patience_s=30.0)
    welcome(core)
    return core


def test_requests_wait_for_the_next_daemon(patient: Core) -> None:
    stream = submit(patient)
    arrive(patient, Accepted(1, "r", 1))
    tokens(patient, 0, 3)
    patient.lost(DaemonGone("killed"), now_s=100.0)
    patient.expire(101.4)
    welcome(patient, epoch=2)
    assert said(patient) == [Attach("r", (3,), None)]
    arrive(patient, Accepted(2, "r", 1))
    tokens(patient, 2, 2, epoch=2)  # one of them again
    arrive(patient, Finished(2, "r", 0, "stop", Usage()))
    assert stream.result().token_ids == [0, 1, 2, 3]


def test_where_no_daemon_comes_requests_fail_soon(patient: Core) -> None:
    stream = submit(patient)
    patient.lost(DaemonGone("killed"), now_s=100.0)
    patient.expire(101.5)
    with pytest.raises(ConnectionLost, match="killed"):
        stream.result()


def test_a_daemon_that_loads_its_model_is_waited_for(patient: Core) -> None:
    stream = submit(patient)
    patient.lost(DaemonGone("killed"), now_s=100.0)
    patient.connected(now_s=101.0)
    patient.expire(129.9)
    assert patient.has_detached
    patient.lost(DaemonGone("it crashed while it started"), now_s=120.0)
    patient.expire(121.4)
    assert patient.has_detached
    patient.connected(now_s=121.4)
    patient.expire(130.0)
    with pytest.raises(ConnectionLost):
        stream.result()


@pytest.mark.parametrize("error", [GONE, Unsupported("the daemon speaks protocol 9")])
def test_a_connection_that_ends_for_another_reason_is_an_error_at_once(patient: Core, error: KVPoolError) -> None:
    stream = submit(patient)
    patient.lost(error, now_s=100.0)
    with pytest.raises(type(error)):
        stream.result()


def test_a_daemon_that_does_not_know_a_request_any_more(patient: Core) -> None:
    stream = submit(patient)
    arrive(patient, Accepted(1, "r", 1))
    patient.lost(DaemonGone("killed"), now_s=100.0)
    welcome(patient, epoch=2)
    arrive(patient, Failed(2, "not_found", "no such request", request_id="r"))
    with pytest.raises(ConnectionLost, match="killed; the daemon there now does not know the request"):
        stream.result()


def test_a_request_that_no_daemon_had_taken_is_sent_again_once(patient: Core) -> None:
    stream = submit(patient, window=4)
    patient.lost(DaemonGone("killed"), now_s=100.0)
    welcome(patient, epoch=2)
    assert said(patient) == [Attach("r", (0,), 4)]
    arrive(patient, Failed(2, "not_found", "no such request", request_id="r"))
    assert said(patient) == [Submit("r", prompt="x", credit=4)]
    arrive(patient, Failed(2, "not_found", "no such sequence", request_id="r"))
    with pytest.raises(NotFound):
        stream.result()


def test_an_end_that_comes_again_after_attaching_is_known(patient: Core) -> None:
    stream = submit(patient, n=2)
    arrive(patient, Accepted(1, "r", 2))
    arrive(patient, Finished(1, "r", 0, "stop", Usage(), "tail"))
    patient.lost(ShuttingDown("bye"), now_s=100.0)
    welcome(patient, epoch=2)
    arrive(patient, Accepted(2, "r", 2))
    for sample in range(2):
        arrive(patient, Finished(2, "r", sample, "stop", Usage(), "tail"))
    assert [output.text for output in stream.result().outputs] == ["tail", "tail"]


# ---- against a plain model


@given(st.data())
def test_every_token_once_and_in_order_whatever_the_connection_does(data: st.DataObject) -> None:
    core = Core()
    welcome(core)
    stream = submit(core, window=4, linger_s=60.0)
    total = data.draw(st.integers(0, 12))
    generated, epoch, seen = 0, 1, []
    while generated < total:
        action = data.draw(st.sampled_from(["tokens", "again", "lose", "read"]))
        if action == "tokens":
            tokens(core, generated, 1, epoch=epoch)
            generated += 1
        elif action == "again":
            tokens(core, max(0, generated - 2), min(generated, 2), epoch=epoch)
        elif action == "lose":
            epoch += 1
            core.lost(GONE, 0.0)
            welcome(core, epoch)
            assert Attach("r", (generated,), 4 - (generated - len(seen))) in said(core) or generated - len(seen) > 4
        else:
            seen += read(core, stream)
    arrive(core, Finished(epoch, "r", 0, "length", Usage(1, total, 0)))
    seen += [core.read(stream).token_id for _ in range(total - len(seen))]
    with pytest.raises(EndOfStream):
        core.read(stream)
    assert seen == list(range(total)) == stream.result().token_ids


def test_after_a_loss_every_sample_gets_on() -> None:
    """One has more unread than its window, of another all was read."""
    stream = StreamState("r", 2, window=4)
    for sample, count in ((0, 5), (1, 5)):
        for index in range(count):
            stream.push_event(TokenEvent(7, "", None, index, sample))
    for _ in range(5):
        stream.take()
    assert stream.attach().credit == 0
    stream.take()
    assert stream.owes_credit
    assert [(grant.sample, grant.amount) for grant in stream.credit_due()] == [(0, 4)]
