"""What a daemon makes of messages that are wrong and of clients that are hostile, and what its other clients notice.

    python -m bench.hostile [--messages 1000000] [--sessions 10000] [--seed 1]

A daemon without a model's arithmetic (the tests' scripted device) serves one well-behaved client that streams all the
time, alone for a while and then beside the attackers. First `messages` fuzzed messages come: random bytes, messages of
the protocol with bytes changed, cut, doubled, glued together, and MessagePack of the right shape with wrong contents.
Then `sessions` hostile sessions: they leave in the middle of everything, say hello twice, use wrong lifelines, submit
and never read, name what is others', flood. In the end: the daemon is the same process, nothing is left over, its
memory has not grown, and the neighbour had every token, and not much later than alone.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' helpers are no part of the package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    from tests.support.hostility import run_hostility

    begin = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {line}", file=sys.stderr, flush=True)

    outcome = run_hostility(options.messages, options.sessions, options.seed, report=report)
    print("python -m bench.hostile " + shlex.join(sys.argv[1:]))
    print(f"{outcome.messages:,} fuzzed messages in {outcome.messages_s:.0f} s, {outcome.refused:,} answers to them")
    print(f"{outcome.sessions:,} hostile sessions in {outcome.sessions_s:.0f} s")
    print("resident KiB: " + ", ".join(f"{when} {kib:,}" for when, kib in outcome.resident_kib.items()))
    for name, gaps in outcome.gaps_s.items():
        if len(gaps) < 2:
            continue
        cuts = statistics.quantiles(gaps, n=100)
        print(
            f"neighbour's time between tokens, {name:>12}: p50 {1e3 * cuts[49]:.2f} ms, "
            f"p99 {1e3 * cuts[98]:.2f} ms, max {1e3 * max(gaps):.0f} ms, {len(gaps):,} tokens"
        )
    print(f"wrong: {'; '.join(outcome.wrong) or 'nothing'}")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
