"""What Prometheus is told: the figures, who may see whose, and scrapers that are slow or hostile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.client import Client, KVPoolError
from kvpool.daemon.engine.metrics import Distribution
from kvpool.daemon.serving.scrapes import FRESH_S, MAX_CONNECTIONS, open_listener
from kvpool.daemon.settings.config import Config
from kvpool.daemon.settings.options import ConfigError
from tests.support.daemon_process import ROOT, DaemonProcess, eventually
from tests.support.other_user import become

GREEDY = {"temperature": 0.0, "ignore_eos": True}
STRANGER = 20_001


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    process = DaemonProcess("slow", socket_mode="0666")
    process.command.append(f"--metrics-address={metrics_path(process)}")
    process.directory.chmod(0o755)
    with process:
        yield process


@pytest.fixture
def pool(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def metrics_path(daemon: DaemonProcess) -> Path:
    return daemon.directory / "metrics.sock"


def connect(path: Path) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(10.0)
    stream.connect(str(path))
    return stream


def ask(stream: socket.socket, request: bytes) -> tuple[int, str]:
    """Status and body of the answer; 0 where there is none."""
    with stream:
        stream.sendall(request)
        answer = b"".join(iter(lambda: stream.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body.decode()


def get(path: Path, page: str) -> tuple[int, str]:
    return ask(connect(path), f"GET {page} HTTP/1.1\r\nHost: kvpool\r\n\r\n".encode())


def scrape(daemon: DaemonProcess) -> dict[str, float]:
    """Value by name and labels, as written; long enough after the last one, so that it is a fresh one."""
    time.sleep(FRESH_S)
    status, text = get(metrics_path(daemon), "/metrics")
    assert status == 200
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_distribution_counts_what_is_at_most_its_bounds() -> None:
    seconds = Distribution((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 3.0):
        seconds.observe(value)
    assert list(seconds.cumulative()) == [(1.0, 2), (2.0, 4), (float("inf"), 5)]
    assert seconds.sum_s == 7.5
    assert seconds.percentile(0.5) == 1.5


def test_figures_are_those_of_what_was_done(daemon: DaemonProcess, pool: Client) -> None:
    before = scrape(daemon)
    with pytest.raises(KVPoolError, match="no such"):
        pool.cancel("no such")  # the daemon counts what it refuses
    for _ in range(2):
        pool.generate([9] * 40, max_tokens=5, **GREEDY)
    running = pool.submit([8] * 20, max_tokens=100, **GREEDY)
    next(iter(running))
    after = scrape(daemon)
    running.cancel()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("kvpool_requests_total") == 3
    assert grown("kvpool_samples_finished_total,outcome=length") == 2
    assert grown("kvpool_refused_total,code=not_found") == 1
    assert grown("kvpool_prompt_tokens_total") == 100
    assert grown("kvpool_prefix_hit_tokens_total") == 32
    assert grown("kvpool_queue_seconds_count") == grown("kvpool_time_to_first_token_seconds_count") == 3
    assert grown("kvpool_generated_tokens_total") > 10
    assert abs(grown("kvpool_generated_tokens_total") - 3 - grown("kvpool_inter_token_seconds_count")) <= 1
    assert 0.02 <= grown("kvpool_inter_token_seconds_sum") / grown("kvpool_inter_token_seconds_count") < 2.0
    assert grown("kvpool_step_seconds_count") >= 10
    assert after["kvpool_step_seconds_bucket,le=0.01"] == 0  # a step takes 20 ms here
    assert after["kvpool_sequences,state=running"] == 1
    assert after["kvpool_blocks,state=used"] == after["kvpool_user_blocks,user=root"] >= 2
    total = sum(after[f"kvpool_blocks,state={state}"] for state in ("free", "cached", "used"))
    assert total == pool.stats()["blocks_total"]
    assert 0 < after["kvpool_waste_ratio"] < 1
    assert (after["kvpool_healthy"], after["kvpool_draining"], after["kvpool_clients"]) == (1, 0, 1)
    assert after["kvpool_journal_bytes"] > 0


def exported(text: str) -> set[str]:
    """Names of all samples that the exposition can have, with or without a value by now."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    return {name + suffix for name, kind in kinds for suffix in suffixes.get(kind, ("",))}


@pytest.mark.parametrize("document", ["systemd/kvpool-dashboard.json", "docs/operations.md"])
def test_every_expression_names_what_is_exported(daemon: DaemonProcess, document: str) -> None:
    _, text = get(metrics_path(daemon), "/metrics")
    source = (ROOT / document).read_text()
    expressions = (
        [*panel_expressions(json.loads(source))] if document.endswith("json") else re.findall("`(.*?)`", source)
    )
    named = {name for expression in expressions for name in re.findall(r"\bkvpool_\w+", expression)}
    assert len(named) > 5
    assert named - exported(text) == set()


def panel_expressions(value: Any) -> Iterator[str]:
    """Every `expr` of a dashboard; each names a metric."""
    if isinstance(value, dict):
        if "expr" in value:
            assert "kvpool_" in value["expr"]
            yield value["expr"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from panel_expressions(item)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
def test_who_holds_blocks_is_for_administrators(daemon: DaemonProcess, pool: Client) -> None:
    with pool.submit([8] * 20, max_tokens=100, **GREEDY) as running:
        next(iter(running))
        assert "kvpool_user_blocks,user=root" in scrape(daemon)
        shown = as_stranger(metrics_path(daemon))
    assert "kvpool_blocks" in shown
    assert "user_blocks" not in shown
    assert "root" not in shown


def as_stranger(path: Path) -> str:
    """What another user reads."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(STRANGER, STRANGER)
            with os.fdopen(writer, "w") as out:
                out.write(get(path, "/metrics")[1])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 200),
        (b"GET /health?x=1 HTTP/1.0\n\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"\r\n\r\n", 400),
        (b"\xff\x00\xfe \xff\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /" + b"x" * 20_000, 0),
    ],
)
def test_requests(daemon: DaemonProcess, request_bytes: bytes, status: int) -> None:
    try:
        found, _ = ask(connect(metrics_path(daemon)), request_bytes)
    except (ConnectionResetError, BrokenPipeError):
        found = 0
    assert found == status


def test_scrapers_that_do_not_ask_or_read_hold_nobody_up(daemon: DaemonProcess, pool: Client) -> None:
    path = metrics_path(daemon)
    silent = [connect(path) for _ in range(3 * MAX_CONNECTIONS)]
    for stream in silent[::2]:
        with contextlib.suppress(BrokenPipeError):  # made room already
            stream.sendall(b"GET /metr")
    deaf = [connect(path) for _ in range(MAX_CONNECTIONS)]
    for stream in deaf:
        with contextlib.suppress(BrokenPipeError):
            stream.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 10)
    assert len(pool.generate("The sea", max_tokens=5, **GREEDY).token_ids) == 5
    assert get(path, "/health") == (200, "healthy\n")
    assert silent[0].recv(100) == b""  # made room
    for stream in (*silent, *deaf):
        stream.close()


def test_a_flood_of_scrapes_delays_no_stream(daemon: DaemonProcess, pool: Client) -> None:
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            get(metrics_path(daemon), "/metrics")

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        begin = time.monotonic()
        assert len(pool.generate("The sea", max_tokens=20, **GREEDY).token_ids) == 20
        assert time.monotonic() - begin < 10.0
    finally:
        stop.set()
        flooding.join()


def test_health_is_503_while_nothing_moves_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with DaemonProcess("stuck", drain_timeout_s=0, health_limit_s=0.2, metrics_address=path) as daemon:
        with daemon.client() as pool:
            assert get(path, "/health")[0] == 200
            stream = pool.submit("The sea", max_tokens=4)
            assert eventually(lambda: get(path, "/health")[0] == 503)
            assert get(path, "/health")[1].startswith("no step has finished for ")
            stream.cancel()
        daemon.signal(signal.SIGTERM)
        daemon.wait()
        assert not path.exists()


def test_a_loopback_port_shows_no_users() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with DaemonProcess("slow", metrics_address=f"127.0.0.1:{port}") as daemon, daemon.client() as pool:
        stream = pool.submit("The sea", max_tokens=100, **GREEDY)
        next(iter(stream))
        status, text = ask(socket.create_connection(("127.0.0.1", port)), b"GET /metrics HTTP/1.1\r\n\r\n")
        stream.cancel()
    assert status == 200
    assert 'kvpool_sequences{state="running"} 1.0' in text
    assert "user_blocks" not in text


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9464", "192.0.2.1:9464", "127.0.0.1:0", "127.0.0.1:65536", "metrics", ":1"]
)
def test_other_addresses_are_refused(address: str) -> None:
    row = Config.__dataclass_fields__["metrics_address"].metadata["kind"]
    with pytest.raises(ValueError, match=r'set it to the path of a Unix socket, to a loopback port such as "127'):
        row.parse(address)


def test_what_is_in_the_way_is_said(tmp_path: Path) -> None:
    first = open_listener(Config(metrics_address=str(tmp_path / "metrics")))
    with pytest.raises(ConfigError, match="is served by another process"):
        open_listener(Config(metrics_address=str(tmp_path / "metrics")))
    first.close()
    open_listener(Config(metrics_address=str(tmp_path / "metrics"))).close()  # what was left of the first is replaced
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        open_listener(Config(metrics_address=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"metrics_address: .*No such file or directory; set it to"):
        open_listener(Config(metrics_address=str(tmp_path / "no" / "metrics")))


def test_without_an_address_nothing_is_imported() -> None:
    """The library takes longer to import than the rest of a start."""
    program = "import sys, kvpool.daemon.__main__; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"
