"""Search for bytes that a decoder does not stand, led by coverage: the decoders of messages, ring, lifeline and files.

    python -m bench.fuzz [--minutes 10] [--target message ...] [--corpus DIRECTORY]

Needs `atheris` (pip install atheris). The time is divided among the targets of `tests/support/fuzz_targets.py`, each a
process of its own under libFuzzer. Half of the inputs of a target that reads MessagePack are made by changing what a
message says instead of its bytes. A find is an exception that the decoder does not promise; its input is kept in the
corpus, and shown. An input that takes more than 10 s or 2 GiB is a find, too.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = {"message": 6, "journal": 3, "ring": 3, "lifeline": 2}
"""Shares of the time; 1 where nothing is said."""


def search(target: str, corpus: Path, seconds: int) -> None:
    """In a process of its own, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["kvpool.client", "kvpool.daemon", "tests.support.fuzz_targets"]):
        from tests.support.fuzz_targets import PACKED, SEEDS, TARGETS, mutated

    for number, seed in enumerate(SEEDS[target]):
        (corpus / f"seed-{number}").write_bytes(seed)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        return mutated(data, chance, packed=True)[:max_size]

    logging.disable()  # a journal that is damaged is said to be so, each time
    options = [
        *(f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=16384", "-len_control=0"),
        *("-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={corpus}/find-"),
    ]
    mutator = {"custom_mutator": change} if target in PACKED else {}
    atheris.Setup([sys.argv[0], *options, str(corpus)], TARGETS[target], **mutator)
    atheris.Fuzz()


def report(target: str, output: str, seconds: float, corpus: Path) -> int:
    """One line of the table; how many finds."""
    executions = re.findall(r"number_of_executed_units:\s*(\d+)", output) or re.findall(r"^#(\d+)", output, re.M)
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", output) or [("0", "0")]
    finds = sorted(corpus.glob("find-*"))
    count, inputs = int(executions[-1]) if executions else 0, len(list(corpus.iterdir())) - len(finds)
    figures = "".join(f"{figure:>8}" for figure in (coverage[0][0], *coverage[-1], inputs, len(finds)))
    print(f"{target:>12} {seconds:7.0f} s {count:>12,} {count / seconds:>9,.0f}/s {figures}", flush=True)
    for find in finds:
        print(f"    {find.name}: {find.read_bytes()[:200]!r}")
    if finds:
        print("\n".join(f"    {line}" for line in output.splitlines() if "Error" in line or "Broken" in line))
    return len(finds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--target", action="append", help="only these; may be given again")
    parser.add_argument("--corpus", type=Path, help="keep inputs here, and begin with those that are here")
    parser.add_argument("--child", nargs=2, metavar=("TARGET", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # the tests' helpers are no part of the package
    if options.child:
        search(options.child[0], options.corpus, int(options.child[1]))
    from tests.support.fuzz_targets import TARGETS

    names = options.target or list(TARGETS)
    shares = {name: WEIGHTS.get(name, 1) for name in names}
    root = options.corpus or Path(tempfile.mkdtemp(prefix="kvpool-fuzz-"))
    print(f"python -m bench.fuzz --minutes {options.minutes:g}, inputs in {root}")
    heads = "".join(f"{head:>8}" for head in ("seeds", "edges", "paths", "inputs", "finds"))
    print(f"{'':>12} {'time':>9} {'executions':>12} {'':>11} {heads}")
    finds = 0
    for name in names:
        corpus = root / name
        corpus.mkdir(parents=True, exist_ok=True)
        seconds = max(1, round(60 * options.minutes * shares[name] / sum(shares.values())))
        command = [sys.executable, "-m", "bench.fuzz", "--corpus", str(corpus), "--child", name, str(seconds)]
        begin = time.monotonic()
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        output = ran.stdout + ran.stderr
        finds += report(name, output, time.monotonic() - begin, corpus)
        if ran.returncode and not list(corpus.glob("find-*")):
            print(output[-2000:], file=sys.stderr)
            return 2
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
