"""Short forms of the benchmarks that put a whole daemon under load: bench/service.py and bench/hostile.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.load import read_trace
from bench.service import Look, Outcome, report
from tests.support.daemon_process import ROOT
from tests.support.hostility import run_hostility
from tests.support.tiny_model import write_tiny_llama

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,396,109
2023-11-16 18:15:48.6805900,879,55
2023-11-16 18:16:48.6805900,879,55
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run_bench(tmp_path: Path, *flags: str) -> str:
    model = write_tiny_llama(tmp_path / "model")
    command = [sys.executable, "-m", "bench.service", f"--model={model}", "--pool-bytes=2MiB", *flags]
    command += ["--", "--threads=1", "--max-num-seqs=8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_trace_is_read_with_scaled_lengths_and_times(trace: Path) -> None:
    arrivals = read_trace(trace, scale=10, speed=0.5, seconds=30)
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [(37, 4), (40, 11), (88, 6)]
    assert [a.at_s for a in arrivals] == pytest.approx([0.0, 1.0, 4.0], abs=1e-6)


def test_a_replay_serves_everything_and_leaves_nothing(tmp_path: Path, trace: Path) -> None:
    said = run_bench(tmp_path, f"--trace={trace}", "--scale=10", "--speed=1", "--seconds=3", "--clients=2")
    assert "3 requests in" in said
    assert "3 length" in said
    assert "left over: nothing" in said


def test_a_synthetic_load_serves_everything_and_leaves_nothing(tmp_path: Path) -> None:
    said = run_bench(tmp_path, "--seconds=3", "--clients=2", "--concurrency=2")
    assert "left over: nothing" in said
    assert "clients that failed: 0" in said


@pytest.mark.slow
def test_minutes_of_load_leave_memory_flat(tmp_path: Path) -> None:
    """The first minute fills what is kept within limits; the second half must begin after that."""
    said = run_bench(tmp_path, "--seconds=150", "--clients=4", "--concurrency=4")
    growth = float(said.split("second half of the run: ")[1].split(" KiB")[0])
    assert growth < 2048
    assert "left over: nothing" in said


def test_growth_is_the_slope_of_the_second_half() -> None:
    outcome = Outcome(seconds=60.0)
    outcome.looks = [Look(float(t), 1000 + 10 * max(t, 30), 5, 0, 0, 0) for t in range(61)]
    assert outcome.growth_kib_per_minute() == pytest.approx(600.0)
    assert "left over: nothing" in report(outcome)


def test_hostile_clients_disturb_nobody() -> None:
    """The short form of bench/hostile.py."""
    outcome = run_hostility(messages=3000, sessions=33, seed=7)
    assert outcome.wrong == []
    assert outcome.refused > 0
    assert all(outcome.gaps_s[phase] for phase in ("alone", "fuzzed", "hostile"))
