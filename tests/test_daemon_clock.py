"""The wall clock may step at any time, forward and back: nothing that waits, expires or is limited goes by it."""

from __future__ import annotations

import ast
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from kvpool.daemon.scheduling.limits import OwnerLimits
from tests.support.daemon_process import ROOT
from tests.support.engine_harness import Harness
from tests.support.journals import open_journal

WALL_CLOCK = {"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today"}
MAY_READ_IT = {
    "client/gateway/app.py",  # `created` of an answer
    "daemon/engine/engine.py",  # beside the monotonic time of an arrival, for a journal that outlives a boot
    "daemon/serving/recovery.py",  # where that journal is read
    "daemon/persistence/snapshots.py",  # ages of files
    "model/cpu/weight_cache.py",  # the same
    "model/text/template_helper.py",  # a chat template asks what day it is
}


def test_who_reads_the_wall_clock() -> None:
    found = set()
    for path in itertools.chain.from_iterable((ROOT / room).glob("**/*.py") for room in ("client", "daemon", "model")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WALL_CLOCK:
                owner = ast.unparse(node.func.value)
                if owner in ("time", "datetime", "datetime.datetime", "date", "datetime.date"):
                    found.add(str(path.relative_to(ROOT)))
    assert found <= MAY_READ_IT


def run(path: Path) -> dict[str, Any]:
    """Requests with a deadline, under a rate limit and with a journal; what came of each, and when (monotonic)."""
    journal = open_journal(path)
    journal.recover(0.0, time.time())
    harness = Harness(journal=journal, owners={2: OwnerLimits(tokens_per_s=10.0)})
    harness.submit("first", request_id="first", max_tokens=10, ignore_eos=True)
    harness.submit("late", request_id="late", max_tokens=200, ignore_eos=True, deadline_s=3.0)
    harness.submit("slow", request_id="slow", uid=2, max_tokens=20, ignore_eos=True)
    ends: dict[str, float] = {}
    for _ in range(400):
        harness.turn()
        harness.now += 0.05
        for (name, _), answer in harness.answers.items():
            if answer.finished is not None:
                ends.setdefault(name, round(harness.now, 3))
    kept = journal.stats()["journal_requests"]
    harness.now += 59.0
    harness.turn()
    before, harness.now = journal.stats()["journal_requests"], harness.now + 20.0
    harness.turn()
    answers = {name: (answer.token_ids, answer.reason) for (name, _), answer in harness.answers.items()}
    return {"ends": ends, "answers": answers, "kept": (kept, before, journal.stats()["journal_requests"])}


def test_steps_of_the_wall_clock_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(tmp_path / "a")
    assert {answer[1] for answer in expected["answers"].values()} == {"length", "deadline"}
    assert expected["kept"][0] == 3
    assert expected["kept"][2] == 0
    steps = itertools.cycle([0.0, 4e9, -1e8, 1.0, 2e9])
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(steps))
    assert run(tmp_path / "b") == expected
