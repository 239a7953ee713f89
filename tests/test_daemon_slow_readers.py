"""Readers that stop, over real sockets: ZeroMQ's buffers fill, and still nobody loses anything or waits for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.client.wire.protocol import Accepted, Call, Finished, Reply, Submit, Tokens
from tests.support.daemon_process import DaemonProcess, left_clean
from tests.support.raw_client import RawClient

PROMPT = "The sea is"
GREEDY = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
ASKED = 1200


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


def test_answers_wait_for_a_client_that_does_not_read(daemon: DaemonProcess) -> None:
    """Far more than every buffer on the way holds."""
    with RawClient(daemon.path, receive_hwm=1) as slow, daemon.client() as pool:
        slow.open()
        for number in range(ASKED):
            slow.send(Call(number, "map"))
        expected = pool.generate(PROMPT, max_tokens=20, temperature=0.0).token_ids
        assert pool.stats()["messages_total"] >= ASKED
        slow.send(Submit("r", prompt=PROMPT, params=GREEDY))
        assert pool.generate(PROMPT, max_tokens=20, temperature=0.0).token_ids == expected
        numbers, tokens = [], []
        while not isinstance(message := slow.receive(), Finished):
            if isinstance(message, Reply):
                numbers.append(message.call_id)
            elif isinstance(message, Tokens):
                tokens += [token for batch in message.events for token in batch.token_ids]
        assert numbers == list(range(ASKED))
        assert len(tokens) == 200
        assert tokens[:20] == expected


def test_a_client_that_is_killed_while_it_does_not_read(daemon: DaemonProcess) -> None:
    with RawClient(daemon.path, receive_hwm=1) as slow:
        slow.open()
        for number in range(ASKED):
            slow.send(Call(number, "map"))
        slow.send(Submit("r", prompt=PROMPT, params=GREEDY))
        slow.expect(Reply)
    with daemon.client() as pool:
        assert pool.stats()["clients"] == 1


def test_credit_bounds_what_is_on_its_way(daemon: DaemonProcess) -> None:
    with RawClient(daemon.path) as slow, daemon.client() as pool:
        slow.open()
        slow.send(Submit("r", prompt=PROMPT, params=GREEDY, credit=5))
        slow.expect(Accepted)
        assert pool.generate(PROMPT, max_tokens=20, temperature=0.0).finish_reason == "length"
        (row,) = pool.ps()
        assert (row["state"], row["num_output_tokens"]) == ("paused", 5)


def test_who_keeps_every_row_of_many_samples_goes_on() -> None:
    """Each step has more rows than places are left: the rest goes when the daemon tries again, and nothing else wakes
    it for the step after that."""
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 256, "journal": "off"}
    params = {"n": 64, "max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
    with DaemonProcess(**settings) as daemon, daemon.client(stream_timeout_s=5.0) as pool:
        streams = [pool.submit(PROMPT, want_logits=True, **params) for _ in range(4)]
        rows = [event.logits for stream in streams for event in stream]
        assert len([row for row in rows if row is not None]) == 4 * 64 * 6
