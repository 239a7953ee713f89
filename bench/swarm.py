"""Very many clients and sequences at once: does every client receive what was generated for it, in order, once?

    python -m bench.swarm [--clients 256] [--sequences 10000] [--max-tokens 64]

A real kvpoold in a process of its own, with a device whose next token is a function of the last one and its position:
so each client knows what it must receive, and compares every token, index and logprob as it comes. Clients are
processes; all of a client's sequences are asked for at once, of 1 to max-tokens tokens, streamed with a window of 64;
half of the clients work through the arena, half through plain messages. In the end the tokens that the daemon counted
must be those that were asked for, every block free, and descriptors, mappings and threads as before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests' helpers are no part of the package

from tests.support.arena_swarm import length_of  # noqa: E402
from tests.support.daemon_process import DaemonProcess, at_rest, eventually  # noqa: E402
from tests.support.faults import holdings  # noqa: E402

SETTINGS = {
    "max_model_len": 256,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 512,
    "pool_bytes": "4MiB",
    "max_clients": 1000,
    "max_queued_requests": 20_000,
    "journal": "off",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    each = -(-options.sequences // options.clients)
    work = {"count": options.clients, "requests": each, "prompt": 24, "max_tokens": options.max_tokens}
    work |= {"vary": True, "parallel": True, "window": 64, "timeout_s": 300.0}
    tokens = sum(length_of(number, turn, work) for number in range(options.clients) for turn in range(each))
    print(f"python -m bench.swarm --clients {options.clients} --sequences {options.sequences}", flush=True)
    with DaemonProcess("scripted", **SETTINGS) as daemon:
        with daemon.client() as pool:
            pool.stats()
        eventually(lambda: holdings(daemon)[1] == 0)  # that client is settled
        before, ticks, begin = holdings(daemon), daemon.cpu_ticks(), time.monotonic()
        command = [sys.executable, str(ROOT / "tests" / "support" / "arena_swarm.py"), daemon.address, json.dumps(work)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        wall_s, cpu_s = time.monotonic() - begin, (daemon.cpu_ticks() - ticks) / 100
        said = Counter(line.split(maxsplit=1)[1] for line in ran.stdout.splitlines())
        with daemon.client() as pool:
            rest = eventually(lambda: at_rest(pool), 10.0)
            stats = pool.stats()
        eventually(lambda: holdings(daemon) == before, 10.0)
        after = holdings(daemon)
    wrong = {what: count for what, count in said.items() if what not in ("ok", "start")}
    generated = stats["tokens_generated_total"]
    print(f"{options.clients} client processes, {each * options.clients:,} sequences, {tokens:,} tokens asked for")
    print(f"{said['ok']} clients received exactly what was generated for them; wrong: {wrong or 'none'}")
    print(f"{generated:,} tokens generated; {stats['preemptions_total']} preemptions")
    print(f"pool {'' if rest else 'NOT '}at rest; descriptors, arenas, threads: {before} before, {after} after")
    print(f"{wall_s:.1f} s, {tokens / wall_s:,.0f} tokens/s, {1e6 * cpu_s / tokens:.0f} us of the daemon's CPU each")
    return 0 if said["ok"] == options.clients and generated == tokens and rest and after == before else 1


if __name__ == "__main__":
    sys.exit(main())
