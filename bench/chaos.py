"""How many answers are wrong when a daemon is killed again and again under the load of several client processes.

    python -m bench.chaos [--rounds 100] [--clients 4] [--seed 1]

Every round lets a daemon (tiny model, CPU back end, steps of at least 10 ms) work for a random while, kills it
with SIGKILL, now and then kills the next ones while they start, and starts another. The clients go through a catalogue
of requests: greedy and seeded, one answer and three, logprobs, penalties, stop strings, small windows. Every answer is
held against the same request's in an undisturbed daemon: token ids, text, logprobs, candidates, finish reason; and the
events as they were streamed must be complete, in order, and each there once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' helpers are no part of the package
    from tests.support.chaos import run_chaos

    begin = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {line}", file=sys.stderr, flush=True)

    outcome = run_chaos(options.rounds, options.clients, options.seed, report=report)
    print(f"python -m bench.chaos --rounds {options.rounds} --clients {options.clients} --seed {options.seed}")
    print(f"{outcome.kills} kills in {time.monotonic() - begin:.0f} s")
    print(f"{outcome.answers} answers, {outcome.resumed} of them by more than one daemon")
    print(f"{outcome.taken_up} times a daemon took a request up")
    print(f"{len(outcome.wrong)} wrong")
    for line in outcome.wrong:
        print(f"  {line}")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
