"""`bench/gpu_check.py` without a GPU: every section runs, by the interpreter; a failed one does not stop the others."""

import json
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install numba-cuda[cu13])")

from bench import gpu_check


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    path = tmp_path / "result.json"
    status = gpu_check.main(["--dry", "--json", str(path), *arguments])
    return status, json.loads(path.read_text()), capsys.readouterr().out


def test_goes_on_after_a_section_that_fails_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_check.BUDGETS, "nothing", 20)
    status, result, out = check(tmp_path, capsys, "--sections", "nothing,launches")
    assert status == 1
    assert list(result["failed"]) == ["nothing"]  # type: ignore[call-overload]
    assert [row["case"] for row in result["rows"]] == ["one by one", "in a graph"]  # type: ignore[attr-defined]
    assert "FAILED       nothing" in out
    assert "nothing was measured" in out


def test_a_section_that_takes_too_long_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_check.BUDGETS, "launches", 0.6)
    monkeypatch.setattr(gpu_check, "GRACE_S", -5.9)
    status, result, _ = check(tmp_path, capsys, "--sections", "launches")
    assert status == 1
    assert result["failed"] == {"launches": "ended after 6 s"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_section_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, out = check(tmp_path, capsys)
    assert status == 0, out
    assert {row["section"] for row in result["rows"]} == set(gpu_check.BUDGETS)  # type: ignore[attr-defined]
    measured = ("ceilings", "decode", "prefill", "launches", "steps", "swap")
    assert all(row["value"] is None for row in result["rows"] if row["section"] in measured)  # type: ignore[attr-defined]
