"""Outputs of layers on their way to a client: through the arena or in messages, in pieces, over a lost connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.client.arena.arena import PAGE_BYTES, Layout
from kvpool.client.core import DaemonGone
from kvpool.client.lifeline import connect_lifeline
from kvpool.client.prompt_rows import RequestRows, array_of
from kvpool.client.wire.errors import ConnectionLost, InvalidArgument, ProtocolError, Unsupported
from kvpool.client.wire.messages import Rows
from tests.support.arena_rig import LIMITS, Rig
from tests.support.engine_harness import prompts
from tests.support.scripted_backend import answer_to

(PROMPT,) = prompts(1, 150)
HIDDEN_SIZE = 64


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def states(positions: range, layers: tuple[int, ...]) -> NDArray[np.float32]:
    """(positions, layers, HIDDEN_SIZE) of the scripted back end."""
    rows = np.zeros((len(positions), len(layers), HIDDEN_SIZE), np.float32)
    rows[:, :, 1::2] = np.array(layers)[:, np.newaxis]
    rows[:, :, ::2] = np.array(positions)[:, np.newaxis, np.newaxis]
    return rows


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("options", [{}, {"want_logits": True}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 2}])
def test_they_come_with_their_tokens_either_way(rig: Rig, arena: bool, options: dict[str, object]) -> None:
    if "want_logits" in options and not arena:
        pytest.skip("raw logits need an arena")
    stream = rig.client(arena=arena).submit(PROMPT, max_tokens=9, hidden_layers=(1, -2), **options)
    rig.run()
    result = stream.result()
    assert result.token_ids == answer_to(PROMPT, 9, LIMITS.vocab_size)
    np.testing.assert_array_equal(result.prompt_hidden, states(range(150), (1, 0)))
    for output in result.outputs:
        np.testing.assert_array_equal(output.hidden, states(range(149, 158), (1, 0)))
    assert result.hidden is result.outputs[0].hidden
    while (event := stream.take()) is not None:
        if event.token_id >= 0:
            assert event.hidden is not None
            assert not event.hidden.flags.writeable
            np.testing.assert_array_equal(event.hidden, states(range(149 + event.index, 150 + event.index), (1, 0))[0])
            assert stream.last_row("hidden") is event.hidden
            assert (stream.last_row("logits") is None) is ("want_logits" not in options)


def test_a_request_that_asks_for_none_has_none(rig: Rig) -> None:
    stream = rig.client().submit(PROMPT, max_tokens=2)
    rig.run()
    assert stream.result().hidden is None
    assert stream.result().prompt_hidden is None
    stream.take()
    assert stream.last_row("hidden") is None


def test_a_reader_who_does_not_read_holds_nobody_else_and_gets_all_in_the_end(rig: Rig) -> None:
    """The prompt's rows are more than the region holds: they wait for room, and the request waits with them."""
    client, other = rig.client(), rig.client()
    stream = client.submit(PROMPT, max_tokens=20, hidden_layers=(0, 1))
    quick = other.submit(PROMPT, max_tokens=20)
    for _ in range(60):
        rig.turn()
        other.read()
    session = rig.sessions.get(client.name)
    assert session is not None
    assert session.outbox
    assert quick.done
    rig.run()
    result = stream.result()
    assert not session.outbox
    np.testing.assert_array_equal(result.prompt_hidden, states(range(150), (0, 1)))
    np.testing.assert_array_equal(result.hidden, states(range(149, 169), (0, 1)))


def test_a_row_larger_than_the_region_takes_travels_in_its_message(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Layout(128, PAGE_BYTES, PAGE_BYTES, 4 * 384, 4))  # at most 2 KiB a piece
    stream = rig.client().submit(PROMPT[:5], max_tokens=3, hidden_layers=(0, 1) * 5)
    rig.run()
    np.testing.assert_array_equal(stream.result().prompt_hidden, states(range(5), (0, 1) * 5))
    rig.close()


def test_those_that_went_down_with_a_connection_are_said_to_be_gone(rig: Rig) -> None:
    client = rig.client()
    stream = client.submit(PROMPT[:20], max_tokens=30, hidden_layers=(1,), linger_s=60.0)
    stream.linger_s = 60.0
    for _ in range(4):
        rig.turn()
        client.read()
    for _ in range(4):
        rig.turn()  # given out, and never read
    client.core.lost(DaemonGone("gone"), 0.0)
    client.inbox.clear()  # it went with its socket
    client.lifeline.close()
    rig.read_lifelines()
    client.lifeline = connect_lifeline(rig.path, 1.0)
    rig.sessions.accept(rig.listener, due=1e9)
    client.core.connected()
    client.read()
    rig.run()
    lost = 0
    while (event := stream.take()) is not None:
        if event.token_id >= 0 and event.hidden is None:
            lost += 1
            with pytest.raises(ConnectionLost, match=f"hidden rows of token {event.index} "):
                stream.last_row("hidden")
        elif event.token_id >= 0:
            assert event.hidden is not None
            assert event.hidden[0, 0] == 19 + event.index
    assert 0 < lost < 10
    result = stream.result()
    assert result.token_ids == answer_to(PROMPT[:20], 30, LIMITS.vocab_size)
    assert result.hidden is None
    assert result.prompt_hidden is not None  # it had come before


def test_a_layer_that_the_model_does_not_have_is_named(rig: Rig) -> None:
    stream = rig.client().submit(PROMPT, hidden_layers=(0, 5))
    with pytest.raises(InvalidArgument, match="the model has 2 layers") as caught:
        stream.result()
    assert caught.value.field == "hidden_layers[1]"


def test_a_daemon_of_the_version_before_is_not_asked(rig: Rig) -> None:
    client = rig.client()
    assert client.core.welcome is not None
    client.core.welcome = replace(client.core.welcome, version=1)
    with pytest.raises(Unsupported, match="version 1") as caught:
        client.submit(PROMPT, hidden_layers=(0,))
    assert caught.value.field == "hidden_layers"
    client.submit(PROMPT)


def test_rows_of_another_shape_than_those_before_are_no_rows() -> None:
    rows = RequestRows()
    for count, kind in ((3, "prompt_hidden"), (1, "hidden")):
        message = Rows(1, "r", 0, kind, 0, count, bytes(count * 2 * 8), 2)
        rows.push(message, array_of(message, bytes(count * 2 * 8)))
        wider = Rows(1, "r", 0, kind, count, 1, bytes(24), 2)
        with pytest.raises(ProtocolError, match="after rows of"):
            rows.push(wider, array_of(wider, bytes(24)))
        with pytest.raises(ProtocolError, match="are no"):
            array_of(message, bytes(20))
    assert rows.prompt_hidden(3) is not None
    assert rows.prompt_hidden(4) is None


@pytest.mark.parametrize("first", [[(0, 4), (4, 6)], [(0, 4)], [(0, 10)], []])
@pytest.mark.parametrize("again", [[(0, 10)], [(0, 3), (3, 7)], [(0, 6), (6, 4)], [(0, 1), (1, 1), (2, 8)]])
def test_a_prompt_that_comes_again_in_other_pieces_is_whole(
    first: list[tuple[int, int]], again: list[tuple[int, int]]
) -> None:
    """The next daemon may cut it elsewhere than the one whose pieces are here."""
    rows = RequestRows()
    states = np.arange(10 * 2 * 3, dtype=np.float32).reshape(10, 2, 3)
    for index, count in [*first, *again]:
        rows.push(Rows(1, "r", 0, "prompt_hidden", index, count, b"", 2), states[index : index + count])
        logprobs = states[index : index + count, 0, :1]
        rows.push(Rows(1, "r", 0, "prompt_logprobs", index + 1, count, b""), logprobs)
    found = rows.prompt_hidden(10)
    assert found is not None
    np.testing.assert_array_equal(found, states)
    assert rows.prompt_hidden(11) is None
    assert rows.prompt_logprobs() == [None, *states[:, 0, 0].tolist()]


def test_a_gap_in_a_prompt_is_found() -> None:
    rows = RequestRows()
    for index, count in ((1, 4), (3, 3), (7, 2)):
        for kind in ("prompt_hidden", "prompt_logprobs"):
            rows.push(Rows(1, "r", 0, kind, index, count, b""), np.zeros((count, 1), dtype=np.float32))
    assert rows.prompt_hidden(9) is None
    with pytest.raises(ProtocolError, match="rows from 6 on are missing"):
        rows.prompt_logprobs()
