"""Prefixes that are pinned, published, or forgotten in time, by real clients of several users."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.client import Client, InvalidArgument, NotFound, QuotaExceeded, Unsupported
from tests.support.daemon_process import DaemonProcess, eventually, left_clean
from tests.support.other_user import as_user

ALICE = 20_001
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PREFIX = [7, 11, 13] * 16  # three blocks
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    config = "[defaults]\nmax_pinned_blocks = 4"
    with DaemonProcess(config=config, pool_bytes="512KiB", max_model_len=128, socket_mode="0666") as process:
        process.directory.chmod(0o755)
        yield process


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with left_clean(daemon), daemon.client() as client:
        yield client
        for pin in client.pins():
            client.unpin(pin["pin_id"])


def cached(pool: Client, prompt: list[int]) -> int:
    return pool.generate(prompt, max_tokens=1, **GREEDY).usage.cached_tokens


def flood(pool: Client) -> None:
    """Other prompts, until nothing that is not held is left of what was cached."""
    for seed in range(pool.stats()["blocks_total"] // 6 + 1):
        pool.generate([3 + (seed * 7 + i) % 300 for i in range(100)], max_tokens=1)


def test_what_is_pinned_outlives_its_sequence_and_a_flood(pool: Client) -> None:
    with pool.open(PREFIX) as chat:
        expected = chat.generate(max_tokens=4, **GREEDY).token_ids
        pin_id = chat.pin(40)  # two blocks are full up to there
    assert pool.pins() == [{"pin_id": pin_id, "num_blocks": 2, "expires_in_s": None}]
    flood(pool)
    assert pool.stats()["blocks_used"] == 2
    result = pool.generate(PREFIX, max_tokens=4, **GREEDY)
    assert (result.token_ids, result.usage.cached_tokens) == (expected, 32)
    pool.unpin(pin_id)
    flood(pool)
    assert cached(pool, PREFIX) == 0
    with pytest.raises(NotFound):
        pool.unpin(pin_id)


def test_a_pin_ends_in_time_although_nobody_asks(pool: Client) -> None:
    with pool.open(PREFIX) as chat:
        chat.generate(max_tokens=0)
        chat.pin(ttl_s=0.2)
    (pin,) = pool.pins()
    assert 0 < pin["expires_in_s"] < 0.2001  # a difference of times since the machine started
    assert eventually(lambda: pool.stats()["blocks_used"] == 0)
    assert pool.pins() == []


def test_quota(pool: Client) -> None:
    with pool.open(PREFIX + [5] * 16) as chat:
        chat.generate(max_tokens=1)
        chat.pin(48)
        with pytest.raises(QuotaExceeded, match="max_pinned_blocks"):
            chat.pin(48)
        chat.pin(16)
        assert sum(pin["num_blocks"] for pin in pool.pins()) == 4


@pytest.mark.parametrize(
    "action",
    [
        lambda chat: chat.pin(0),
        lambda chat: chat.pin(15),
        lambda chat: chat.publish(15),
        lambda chat: chat.pin(ttl_s=-1.0),
        lambda chat: chat.pin(ttl_s=float("inf")),
    ],
)
def test_what_cannot_be_pinned(pool: Client, action: Callable[[Any], object]) -> None:
    with pool.open(PREFIX) as chat:
        with pytest.raises(InvalidArgument):
            chat.pin()  # nothing is computed yet
        chat.generate(max_tokens=1)
        with pytest.raises(InvalidArgument):
            action(chat)
        assert chat.pin() in [pin["pin_id"] for pin in pool.pins()]


@needs_root
def test_others_find_what_is_published_and_nothing_else(daemon: DaemonProcess, pool: Client) -> None:
    expected = pool.generate(PREFIX, max_tokens=3, **GREEDY).token_ids
    theirs = [["submit", "r", {"prompt": PREFIX, "max_tokens": 3, **GREEDY}]]
    (before,) = as_user(daemon.address, ALICE, ALICE, theirs)
    assert before == {"token_ids": expected, "cached_tokens": 0}
    with pool.open([3, *PREFIX]) as chat:
        chat.generate(max_tokens=1)
        assert chat.publish(32) == 2
        pin_id = chat.pin()
        prompt = [3, *PREFIX]
        expected = pool.generate(prompt, max_tokens=3, **GREEDY).token_ids
        commands = [
            ["submit", "r", {"prompt": prompt, "max_tokens": 3, **GREEDY}],
            ["unpin", "", {"pin_id": pin_id}],
            ["pins", "", {}],
            ["publish", chat.sequence_id, {}],
            ["pin", chat.sequence_id, {}],
        ]
        found = as_user(daemon.address, ALICE, ALICE, commands)
        assert found == [{"token_ids": expected, "cached_tokens": 32}, "not_found", [], "not_found", "not_found"]


def test_blocks_that_nobody_used_for_a_while_are_forgotten() -> None:
    with DaemonProcess(prefix_ttl_s=0.2) as daemon, daemon.client() as pool:
        assert cached(pool, PREFIX) == 0
        assert cached(pool, PREFIX) > 0
        assert eventually(lambda: cached(pool, [5]) == 0 and pool.stats()["blocks_cached"] == 0)
        assert cached(pool, PREFIX) == 0


def test_a_daemon_without_prefixes() -> None:
    with DaemonProcess(prefix_cache="off") as daemon, daemon.client() as pool, pool.open(PREFIX) as chat:
        chat.generate(max_tokens=1)
        for action in (chat.pin, chat.publish):
            with pytest.raises(Unsupported, match="prefix_cache is off"):
                action()
