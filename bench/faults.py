"""Do others notice a client that goes wrong? The time between two tokens of an undisturbed stream, fault by fault.

    python -m bench.faults [--tokens 300]

A real kvpoold in a process of its own, on a device whose steps take 10 ms whatever is in them; one client streams, and
meanwhile the clients of `tests/support/faults.py` are killed, stopped, hang up, write into their arenas, flood and do
not read. Each line: the times between tokens, whether the tokens are what they must be, and what is left of the others
afterwards. `alone` is the same stream without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests' helpers are no part of the package

from tests.support.daemon_process import DaemonProcess, eventually  # noqa: E402
from tests.support.faults import FAULTS, holdings  # noqa: E402
from tests.support.scripted_backend import answer_to  # noqa: E402

VOCAB_SIZE = 384
PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SETTINGS = {
    "max_model_len": 512,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "prefix_cache": "off",
    "journal": "off",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300)
    options = parser.parse_args()
    expected, wrong = answer_to(PROMPT, options.tokens, VOCAB_SIZE), 0
    print(f"python -m bench.faults --tokens {options.tokens}")
    print(f"{'milliseconds between tokens':>32} {'median':>7} {'p99':>7} {'most':>7}   tokens, and what is left")
    with DaemonProcess("steady", **SETTINGS) as daemon, daemon.client(timeout_s=60.0) as pool:
        pool.generate(PROMPT, max_tokens=4, temperature=0.0)
        before = holdings(daemon)
        for name in ("alone", *FAULTS, "alone"):
            fault = contextlib.nullcontext() if name == "alone" else FAULTS[name](daemon)
            times, tokens = [], []
            with fault:
                stream = pool.submit(
                    PROMPT, max_tokens=options.tokens, temperature=0.0, ignore_eos=True, want_text=False
                )
                for event in stream:
                    times.append(time.perf_counter())
                    tokens.append(event.token_id)
            gaps = 1e3 * np.diff(times)
            clean = eventually(lambda: holdings(daemon) == before, 10.0)
            said = f"{'right' if tokens == expected else 'WRONG'}, {'nothing' if clean else 'SOMETHING'} is left"
            wrong += tokens != expected or not clean
            middle, late = np.percentile(gaps, (50, 99))
            print(f"{name:>32} {middle:7.1f} {late:7.1f} {gaps.max():7.1f}   {said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
