"""Beam search and best-of over the wire: results, lost connections, restarts, and what everybody sees meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvpool.client import AsyncClient, Client, InvalidArgument, SamplingParams
from kvpool.client.wire.protocol import Accepted, Submit
from tests.support.daemon_process import DaemonProcess, at_rest, eventually, left_clean
from tests.support.raw_client import RawClient

PROMPT = "The sea is"


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess("slow") as process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def test_the_best_answers_come_best_first(pool: Client, daemon: DaemonProcess) -> None:
    result = pool.beam_search(PROMPT, width=3, max_tokens=6)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    totals = [output.sum_logprobs or 0.0 for output in result.outputs]
    ranks = [total / len(output.token_ids) for total, output in zip(totals, result.outputs, strict=True)]
    assert ranks == sorted(ranks, reverse=True)
    greedy = pool.generate(PROMPT, max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
    assert totals[0] >= sum(greedy.logprobs or ()) - 1e-5
    assert [output.text for output in result.outputs] == [
        pool.detokenize(pool.tokenize(PROMPT) + output.token_ids).removeprefix(PROMPT) for output in result.outputs
    ]
    assert len(pool.beam_search(PROMPT, width=3, n=1, max_tokens=6, length_penalty=0.0).outputs) == 1

    async def search() -> list[int]:
        async with AsyncClient(daemon.address) as client:
            return (await client.beam_search(PROMPT, width=3, max_tokens=6)).token_ids

    assert asyncio.run(search()) == result.token_ids


@pytest.mark.parametrize("arguments", [{"width": 0}, {"width": 11}, {"width": 2, "n": 3}, {"width": 2, "top_k": 5}])
def test_what_cannot_be_searched(pool: Client, arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        pool.beam_search(PROMPT, max_tokens=6, **arguments)


def test_beams_are_seen_and_can_be_cancelled(pool: Client) -> None:
    with pool.submit(PROMPT, beam_width=4, n=2, max_tokens=200, request_id="search", window=1) as stream:
        assert eventually(lambda: len(pool.ps()) == 4)
        assert {row["request_id"] for row in pool.ps()} == {"search"}
        assert pool.fsck()["consistent"]
        pool.cancel("search")
        result = stream.result()
    assert [output.finish_reason for output in result.outputs] == ["cancelled"] * 2


ASKED = ({"beam_width": 3, "n": 2}, {"best_of": 4, "n": 2, "seed": 3})


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("early", [True, False])
def test_answers_for_who_comes_back(daemon: DaemonProcess, pool: Client, asked: dict[str, int], early: bool) -> None:
    params = SamplingParams(max_tokens=8, **asked)  # type: ignore[arg-type]
    expected = [output.token_ids for output in pool.generate(PROMPT, params).outputs]
    with RawClient(daemon.path) as raw:
        raw.open()
        raw.send(Submit("left", prompt=PROMPT, params=params.to_wire(), credit=1, linger_s=30.0))
        assert raw.expect(Accepted).num_samples == 2
    if not early:
        assert eventually(lambda: not pool.ps())
    found = pool.follow("left").result()
    assert [output.token_ids for output in found.outputs] == expected


def test_answers_after_a_restart() -> None:
    with DaemonProcess("slow") as daemon, daemon.client(reconnect_s=60.0) as pool:
        every = [SamplingParams(max_tokens=25, ignore_eos=True, **asked) for asked in ASKED]  # type: ignore[arg-type]
        expected = [pool.generate(PROMPT, params).outputs for params in every]
        streams = [pool.submit(PROMPT, params) for params in every]
        assert eventually(lambda: len(pool.ps()) == 3 + 4 and all(row["num_tokens"] > 8 for row in pool.ps()))
        daemon.kill()
        daemon.start()
        for stream, outputs in zip(streams, expected, strict=True):
            found = stream.result(60.0).outputs
            assert [output.token_ids for output in found] == [output.token_ids for output in outputs]
            assert [output.text for output in found] == [output.text for output in outputs]
        assert eventually(lambda: at_rest(pool))
