"""Clients that go wrong in every way, beside one that must not notice; and nothing is left of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon_process import DaemonProcess, eventually, left_clean
from tests.support.faults import FAULTS, LONG, holdings
from tests.support.scripted_backend import answer_to

VOCAB_SIZE = 384
PROMPT = [5, 6, 7]
SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "prefix_cache": "off", "journal": "off"}


@pytest.fixture(scope="module")
def running() -> Iterator[DaemonProcess]:
    with DaemonProcess("scripted", **SETTINGS) as daemon:
        with daemon.client() as pool:
            pool.stats()
        yield daemon


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(running):
        yield running


@pytest.mark.parametrize("name", FAULTS)
def test_nobody_else_notices_and_nothing_is_left(daemon: DaemonProcess, name: str) -> None:
    expected = answer_to(PROMPT, 200, VOCAB_SIZE)
    with daemon.client(timeout_s=30.0) as pool:
        before = holdings(daemon)
        free = pool.stats()["blocks_free"]
        with FAULTS[name](daemon):
            for _ in range(5):
                indexes, tokens = zip(*((e.index, e.token_id) for e in pool.submit(PROMPT, **LONG)), strict=True)
                ended = expected if tokens[-1] >= 0 else [*expected, -1]  # the rest of the text
                assert list(tokens) == ended
                assert list(indexes) == list(range(len(ended)))
        assert eventually(lambda: holdings(daemon) == before), (holdings(daemon), before)
        assert eventually(lambda: pool.stats()["blocks_free"] == free)
