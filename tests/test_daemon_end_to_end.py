"""A real daemon, real sockets, the client library: what users do every day."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kvpool.client import Client, InvalidArgument, NotFound, Unsupported
from kvpool.client.arena.pool_map import USED
from tests.support.client_swarm import Swarm
from tests.support.daemon_process import DaemonProcess, eventually, left_clean
from tests.support.engine_harness import Harness

PROMPT = "The sea is"


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def test_a_stream_is_what_the_engine_computes(pool: Client) -> None:
    harness = Harness()
    expected = harness.generate(PROMPT, max_tokens=24, logprobs=2)
    with pool.submit(PROMPT, max_tokens=24, temperature=0.0, logprobs=2) as stream:
        events = list(stream)
        result = stream.result()
    assert [event.token_id for event in events] == expected.token_ids
    assert [event.index for event in events] == list(range(24))
    assert "".join(event.text for event in events) == expected.text == result.text
    assert result.logprobs == expected.logprobs
    assert (result.finish_reason, result.usage.prompt_tokens, result.usage.completion_tokens) == ("length", 4, 24)
    harness.close()


def test_text_ids_and_messages_as_prompts(pool: Client) -> None:
    ids = pool.tokenize(PROMPT)
    assert pool.detokenize(ids) == PROMPT
    by_text, by_ids = (pool.generate(prompt, max_tokens=8, temperature=0.0) for prompt in (PROMPT, ids))
    assert by_text.token_ids == by_ids.token_ids
    chat = pool.chat([{"role": "user", "content": "Where does the water go?"}], max_tokens=8, temperature=0.0)
    assert chat.usage.prompt_tokens > 8
    assert chat.finish_reason in ("length", "stop")


def test_three_client_processes_stream_at_the_same_time(daemon: DaemonProcess) -> None:
    with Swarm(daemon.address, 3, prompt=PROMPT, max_tokens=60, temperature=0.0, ignore_eos=True) as swarm:
        assert len(set(swarm.pids)) == 3
        assert swarm.finish() == ["length"] * 3


def test_many_requests_of_one_client_run_together(pool: Client) -> None:
    streams = [pool.submit(f"{number}: {PROMPT}", max_tokens=10, temperature=0.0) for number in range(40)]
    results = [stream.result() for stream in streams]
    for number in (0, 17, 39):
        alone = pool.generate(f"{number}: {PROMPT}", max_tokens=10, temperature=0.0)
        assert alone.token_ids == results[number].token_ids


def test_threads_share_a_client(pool: Client) -> None:
    expected = pool.generate(PROMPT, max_tokens=12, temperature=0.0).token_ids
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(pool.generate(PROMPT, max_tokens=12, temperature=0.0).token_ids))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [expected] * 4


def test_samples(pool: Client) -> None:
    result = pool.generate(PROMPT, n=3, seed=5, max_tokens=10)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    assert pool.generate(PROMPT, seed=5, max_tokens=10).token_ids == result.outputs[0].token_ids


def test_only_the_prompt(pool: Client) -> None:
    result = pool.generate(PROMPT, max_tokens=0)
    assert (result.token_ids, result.text, result.finish_reason) == ([], "", "length")


def test_leaving_a_stream_cancels_it(pool: Client) -> None:
    with pool.submit(PROMPT, max_tokens=200, temperature=0.0) as stream:
        next(iter(stream))
    assert eventually(lambda: pool.stats()["finished_total"].get("cancelled", 0) >= 1)


def test_figures(pool: Client) -> None:
    stats = pool.stats()
    wanted = (
        "epoch blocks_total blocks_free blocks_used blocks_cached sequences_running sequences_waiting sequences_paused "
        "clients tokens_generated_total preemptions_total kv_waste_ratio steps_total step_ms uptime_s "
        "swapped_out_blocks_total swapped_in_blocks_total"
    )
    assert set(wanted.split()) <= set(stats)
    assert stats["clients"] == 1
    assert pool.connect().epoch == stats["epoch"]


def test_rows_and_map_of_a_sequence_that_waits_for_its_reader(pool: Client) -> None:
    with pool.submit(PROMPT, max_tokens=100, temperature=0.0, window=3, request_id="held", ignore_eos=True):
        assert eventually(lambda: [row["state"] for row in pool.ps()] == ["paused"])
        (row,) = pool.ps()
        assert (row["request_id"], row["num_output_tokens"], row["num_prompt_tokens"]) == ("held", 3, 4)
        assert row["wait_reason"] == "its reader granted no more tokens"
        pool_map = pool.pool_map()
        (block,) = row["blocks"]
        assert pool_map.sequences[0]["request_id"] == "held"
        assert pool_map.num_blocks == pool_map.counters["blocks_total"]
        assert (pool_map.states[block], pool_map.ref_counts[block], pool_map.owners[block]) == (USED, 1, os.getuid())
        assert pool_map.count(USED) == row["num_blocks"] == 1


def test_cancel_by_name_from_another_connection(daemon: DaemonProcess, pool: Client) -> None:
    stream = pool.submit(PROMPT, max_tokens=200, temperature=0.0, window=2, request_id="to-cancel", ignore_eos=True)
    next(stream)  # it has arrived: nothing orders what two connections say
    with daemon.client() as other:
        assert other.cancel("to-cancel") == {"cancelled": 1}
        with pytest.raises(NotFound, match="to-cancel"):
            other.cancel("to-cancel")
    assert stream.result().finish_reason == "cancelled"


def test_what_the_daemon_does_not_do_is_said(pool: Client) -> None:
    with pytest.raises(Unsupported):
        pool.resize(1 << 30)
    with pytest.raises(InvalidArgument, match="logprobs"):
        pool.generate(PROMPT, logprobs=21)


def test_reload_applies_limits_without_dropping_a_token() -> None:
    with DaemonProcess(config="max_clients = 7\n") as daemon, daemon.client() as pool:
        expected = pool.generate(PROMPT, max_tokens=60, temperature=0.0).token_ids
        stream = pool.submit(PROMPT, max_tokens=60, temperature=0.0)
        daemon.config_path.write_text('log_level = "debug"\n[users.0]\nweight = 3\n')
        assert set(pool.reload()["changed"]) == {"max_clients", "log_level", "users"}
        daemon.config_path.write_text("max_clients = 0\n")
        with pytest.raises(InvalidArgument, match=r"kvpool.toml:1: max_clients: 0 cannot be used.*nothing was changed"):
            pool.reload()
        daemon.config_path.write_text("block_size = 32\n")
        with pytest.raises(InvalidArgument, match="block_size can only change with a restart"):
            pool.reload()
        assert stream.result().token_ids == expected
