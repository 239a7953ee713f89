"""Users against each other, from end to end: real processes under uids of their own, and a real daemon.

What is counted are tokens and places in the line, not seconds: a slow machine makes nobody unfair.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvpool.client import Client
from tests.support.daemon_process import DaemonProcess, eventually, left_clean
from tests.support.flood import Flood
from tests.support.other_user import as_user

FLOODER, LIGHT, HEAVY = 20_011, 20_012, 20_013
SHORT = {"prompt": [5, 9, 13], "max_tokens": 2, "ignore_eos": True}
PLACES = 8

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    settings = {"max_num_seqs": PLACES, "max_num_batched_tokens": 32, "socket_mode": "0666"}
    with DaemonProcess("slow", config=f"[users.{HEAVY}]\nweight = 3.0", **settings) as made:
        made.directory.chmod(0o755)
        yield made


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with left_clean(daemon), daemon.client() as client:
        yield client
        assert eventually(lambda: client.ps() == [])  # the flood died with its process


def test_short_requests_pass_the_flood_of_another_user(daemon: DaemonProcess, pool: Client) -> None:
    requests, between = 80, []
    with Flood(daemon.address, FLOODER, requests=requests, max_tokens=60):
        for _ in range(6):
            before = pool.stats()["tokens_generated_total"]
            with pool.submit(**SHORT) as stream:
                next(stream)
                between.append(pool.stats()["tokens_generated_total"] - before)
                stream.result()
        waiting = pool.stats()["sequences_waiting"]
    # First come, first served would have served all of the flood first: 80 x 60 tokens, and nobody would wait any more.
    assert waiting > requests / 2
    assert min(between) <= 4 * PLACES, between


def test_the_flooders_own_short_request_waits_for_its_turn(daemon: DaemonProcess, pool: Client) -> None:
    """Its tokens are its own to order: fairness holds between users, not between the requests of one."""
    with Flood(daemon.address, FLOODER, requests=24, max_tokens=10):
        (answer,) = as_user(daemon.address, FLOODER, FLOODER, [["submit", "own", SHORT]])
        assert len(answer["token_ids"]) == 2
        assert pool.stats()["sequences_waiting"] == 0


def test_service_follows_the_weights(daemon: DaemonProcess, pool: Client) -> None:
    """Of 8 places, two users with the weights 1 and 3 get 2 and 6, once both have more work than places."""

    def running(uid: int) -> int:
        return sum(row["uid"] == uid and row["state"] == "running" for row in pool.ps())

    with (
        Flood(daemon.address, LIGHT, requests=30, max_tokens=60),
        Flood(daemon.address, HEAVY, requests=30, max_tokens=60),
    ):
        assert eventually(lambda: (running(LIGHT), running(HEAVY)) == (2, 6))
