"""One script for a machine with a GPU, in under 8 minutes: is every kernel right there, and how near the card's limits?

    python -m bench.gpu_check [--json gpu_check.json] [--model smollm2-135m] [--sections environment,compile,...]
    python -m bench.gpu_check --dry       the same script by the PTX interpreter, tiny: it runs, and measures nothing

Needs kvpool[daemon,cuda13,dev] and the checkout. Each section is a process of its own with a budget of seconds: a card
that an illegal access has spoilt spoils that section alone, and one that takes too long is ended and keeps what it had
found. The script says which failed and goes on; its exit status is 1 then. A short table comes last; the JSON file has
all rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 470.0
BUDGETS = {  # seconds
    "environment": 20,
    "compile": 60,
    "kernels": 110,
    "ceilings": 25,
    "decode": 45,
    "prefill": 40,
    "launches": 20,
    "steps": 130,
    "swap": 25,
    "daemon": 100,
}
DRY_PATIENCE = 10  # times the budgets, for an interpreter on a machine with other work
GRACE_S = 5.0  # between the end of a section's budget, which it sees itself, and the end of its process


def run_section(options: argparse.Namespace) -> int:
    """In the section's own process: write a line of JSON for every row as soon as it is known."""
    begin = time.monotonic()
    with open(options.rows, "a", encoding="utf-8") as file:

        def tell(**fields: Any) -> None:
            print(json.dumps(fields), file=file, flush=True)

        try:
            from bench.gpu_sections import Ask

            ask = Ask(options.dry, options.model, json.loads(options.ceilings))
            for row in _section(options.run)(ask):
                tell(**row.fields())
                if time.monotonic() - begin > options.budget:
                    raise TimeoutError(f"{options.budget:.0f} s are over; what came after {row.case!r} is missing")
        except Exception as error:
            traceback.print_exc()
            tell(section=options.run, failed=f"{type(error).__name__}: {error}")
            return 1
    return 0


def _section(name: str) -> Callable[[Any], Iterator[Any]]:
    """The function of a section, imported here: the parent process never touches the card."""
    from bench import gpu_correctness, gpu_sections

    return {**gpu_sections.MEASURED, **gpu_correctness.CHECKED}[name]


class Check:
    """The parent: one section after the other, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begin = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}
        self.ceilings: dict[str, float] = {}

    def run(self, name: str) -> None:
        begin = time.monotonic()
        patience = DRY_PATIENCE if self._options.dry else 1
        budget = min(patience * BUDGETS[name], patience * TOTAL_S - (begin - self._begin))
        if budget < 5:
            self.failed[name] = "no time left"
        else:
            self._run(name, budget)
        state = f"FAILED: {self.failed[name]}" if name in self.failed else "ok"
        print(f"{name}: {state} ({time.monotonic() - begin:.1f} s)", flush=True)

    def _run(self, name: str, budget: float) -> None:
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", suffix=".jsonl") as file:
            command = [sys.executable, "-m", "bench.gpu_check", "--run", name, "--rows", file.name]
            command += ["--budget", str(budget), "--model", self._options.model]
            command += ["--ceilings", json.dumps(self.ceilings), *(["--dry"] if self._options.dry else [])]
            try:
                code = subprocess.run(command, cwd=ROOT, timeout=budget + GRACE_S, check=False).returncode
            except subprocess.TimeoutExpired:
                code, self.failed[name] = 0, f"ended after {budget:.0f} s"
            for line in file.read().splitlines():
                row = json.loads(line)
                if "failed" in row:
                    self.failed[name] = row["failed"]
                else:
                    self._take(row)
        if code and name not in self.failed:
            self.failed[name] = f"its process ended with status {code}"

    def _take(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if row["section"] == "ceilings" and row["value"] is not None:
            self.ceilings[row["case"]] = row["value"] * (1e9 if row["unit"] == "GB/s" else 1)

    def result(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._begin
        return {"dry": self._options.dry, "seconds": seconds, "failed": self.failed, "rows": self.rows}


def table(rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str], dry: bool) -> str:
    """The rows for people, the failures last."""
    lines = ["section      case                                            figure             share  of / note"]
    for row in rows:
        value = "" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        lines.append(
            f"{row['section']:<12} {row['case'][:46]:<46} {value:>18} {share:>6}  {row['of']} {row['note']}".rstrip()
        )
    lines += [f"FAILED       {name}: {why}" for name, why in failed.items()]
    lines.append("dry: kernels were interpreted, nothing was measured" if dry else f"{len(failed)} sections failed")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="gpu_check.json", help="where all rows go")
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model's name, or a path")
    parser.add_argument("--sections", default=",".join(BUDGETS))
    parser.add_argument("--dry", action="store_true", help="interpret kernels: no GPU is needed, no figure comes out")
    for internal in ("--run", "--rows", "--ceilings"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        return run_section(options)
    names = options.sections.split(",")
    if unknown := set(names) - set(BUDGETS):
        parser.error(f"no section is called {', '.join(sorted(unknown))}; there are {', '.join(BUDGETS)}")
    check = Check(options)
    for name in names:
        check.run(name)
    Path(options.json).write_text(json.dumps(check.result(), indent=1), encoding="utf-8")
    print(table(check.rows, check.failed, options.dry))
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
