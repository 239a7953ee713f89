"""kvpool beside other engines on this machine: the same prompts and token counts, one engine after the other.

    python -m bench.peers [--model smollm2-135m] [--kvpool "--dtype int8"] [--peer KIND=EXECUTABLE,MODEL[,FLAG]...]
                          [--works W1,W2,W3,W4] [--repeats 3] [--rounds 1] [--trace azure_2023_conv.csv]

`--kvpool` and `--peer` may be given several times.

KIND is llama (EXECUTABLE: llama-server; MODEL: a .gguf file), vllm, openvino or transformers (EXECUTABLE: the Python
that has the package; MODEL: a directory). What is not installed is skipped with a line. Works:

    W1  32 requests at once, 128 prompt tokens and 128 generated
    W2  one request, 128 + 128
    W3  64 requests at once: a common beginning of 512 tokens, new in every repetition, 32 of their own, 64 generated
    W4  arrivals from a trace (lengths divided by 16, a quarter of its pace), or without one, random ones

Every engine runs alone: start, one small warm-up, all works; `--rounds` repeats the whole tour, so that a slow hour of
the machine meets everybody. Prompts are random token ids, other ones in each repetition. A request that does not bring
exactly its tokens makes the run fail. kvpool and the servers are asked over their sockets, libraries in process; the
engine's process tree is what peak memory is counted of. Peers run with their best known flags.
"""

from __future__ import annotations

import argparse
import random
import shlex
import signal
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from bench.load import read_trace
from bench.peer_engines import Engine, KVPool, Served, Work, find, peak_rss_mib
from kvpool.model.loading import load_model

FIRST_TOKEN = 1000  # below are special ones
TRACE_SCALE, TRACE_SPEED, TRACE_SECONDS = 16.0, 0.25, 30.0
RANDOM_ARRIVALS = (48, 1.5, 160, 24)  # requests, seconds between them, mean prompt and output tokens


@dataclass
class Figures:
    """What one engine did in one work, a value for each repetition; and its memory and start."""

    tokens_per_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def add(self, served: list[Served], work: Work) -> None:
        wall = max(one.last_s for one in served)
        self.tokens_per_s.append(sum(one.tokens for one in served) / wall)
        waits = [one.first_s - at_s for one, at_s in zip(served, work.arrivals, strict=True)]
        self.ttft_s.append(statistics.mean(waits))
        gaps = [(one.last_s - one.first_s) / (one.tokens - 1) for one in served if one.tokens > 1]
        self.itl_s.append(statistics.mean(gaps) if gaps else 0.0)


def random_prompt(dice: random.Random, length: int, vocab_size: int) -> list[int]:
    return [dice.randrange(FIRST_TOKEN, vocab_size) for _ in range(length)]


def make_work(name: str, repetition: int, vocab_size: int, trace: Path | None) -> Work:
    """The work `name`, with prompts that no other repetition has."""
    dice = random.Random(f"{name} {repetition}")
    if name == "W4":
        return make_arrivals(dice, vocab_size, trace)
    count, own, output = {"W1": (32, 128, 128), "W2": (1, 128, 128), "W3": (64, 32, 64)}[name]
    common = random_prompt(dice, 512, vocab_size) if name == "W3" else []
    prompts = [common + random_prompt(dice, own, vocab_size) for _ in range(count)]
    return Work(name, prompts, [0.0] * count, [output] * count)


def make_arrivals(dice: random.Random, vocab_size: int, trace: Path | None) -> Work:
    if trace is not None:
        found = read_trace(trace, TRACE_SCALE, TRACE_SPEED, TRACE_SECONDS)
        arrivals = [one.at_s for one in found]
        lengths, outputs = [one.prompt_tokens for one in found], [one.output_tokens for one in found]
    else:
        count, gap, prompt, output = RANDOM_ARRIVALS
        arrivals = sorted(dice.uniform(0.0, count * gap / 2) for _ in range(count))
        lengths = [min(1000, max(4, round(dice.expovariate(1 / prompt)))) for _ in range(count)]
        outputs = [min(200, max(2, round(dice.expovariate(1 / output)))) for _ in range(count)]
    prompts = [random_prompt(dice, length, vocab_size) for length in lengths]
    return Work("W4", prompts, arrivals, outputs)


@dataclass
class Contest:
    """All engines, all works, and what came out."""

    works: list[str]
    repeats: int
    vocab_size: int
    trace: Path | None
    figures: dict[str, dict[str, Figures]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Figures)))
    ready_s: dict[str, float] = field(default_factory=dict)
    rss_mib: dict[str, float] = field(default_factory=dict)
    short: list[str] = field(default_factory=list)

    def tour(self, engine: Engine, round_number: int) -> None:
        """Start an engine, let it do everything, stop it."""
        begin = time.perf_counter()
        try:
            engine.start()
            self.ready_s[engine.name] = time.perf_counter() - begin
            engine.run(make_work("W2", -1 - round_number, self.vocab_size, None))
            for name in self.works:
                self.repeat(engine, name, round_number)
            self.rss_mib[engine.name] = max(self.rss_mib.get(engine.name, 0.0), peak_rss_mib(engine.pid()))
        except (RuntimeError, OSError) as error:
            self.short.append(f"{engine.name}: {error}")
        finally:
            engine.stop()

    def repeat(self, engine: Engine, name: str, round_number: int) -> None:
        for number in range(self.repeats):
            work = make_work(name, round_number * self.repeats + number, self.vocab_size, self.trace)
            try:
                served = engine.run(work)
            except NotImplementedError as error:
                print(f"{engine.name:<40} {name} left out: {error}", flush=True)
                return
            wrong = sum(one.tokens != count for one, count in zip(served, work.output_tokens, strict=True))
            if wrong:
                self.short.append(f"{engine.name}: {wrong} requests of {name} did not bring their tokens")
                return
            figures = self.figures[name][engine.name]
            figures.add(served, work)
            print(f"{engine.name:<40} {name} {figures.tokens_per_s[-1]:8.1f} tokens/s", flush=True)

    def report(self) -> None:
        for name, rows in self.figures.items():
            peers = [statistics.median(f.tokens_per_s) for who, f in rows.items() if not who.startswith("kvpool")]
            best = max(peers, default=0.0)
            print(f"\n{name:<40} {'output tokens/s':>22} {'of best peer':>12} {'TTFT s':>8} {'ITL ms':>8}")
            for who, f in sorted(rows.items(), key=lambda row: -statistics.median(row[1].tokens_per_s)):
                middle = statistics.median(f.tokens_per_s)
                spread = f"{middle:.0f} [{min(f.tokens_per_s):.0f}-{max(f.tokens_per_s):.0f}]"
                ratio = f"{middle / best:.2f}x" if best else "-"
                ttft, itl = statistics.median(f.ttft_s), statistics.median(f.itl_s) * 1e3
                print(f"{who:<40} {spread:>22} {ratio:>12} {ttft:8.2f} {itl:8.1f}")
        print(f"\n{'':<40} {'time to ready s':>16} {'peak RSS MiB':>14}")
        for who, ready in self.ready_s.items():
            print(f"{who:<40} {ready:16.1f} {self.rss_mib.get(who, 0.0):14.0f}")


def engines(options: argparse.Namespace) -> list[Engine]:
    """kvpool in each of its forms, and the peers that are there."""
    found: list[Engine] = [KVPool(options.model, shlex.split(flags)) for flags in options.kvpool or [""]]
    for text in options.peer:
        kind, _, rest = text.partition("=")
        executable, model, *flags = rest.split(",")
        engine = find(kind, executable, model, flags)
        if isinstance(engine, str):
            print(f"{kind} is skipped: {engine}")
        else:
            found.append(engine)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="kvpool's")
    parser.add_argument("--kvpool", action="append", help="flags of kvpoold; may be given several times")
    parser.add_argument("--peer", action="append", default=[], metavar="KIND=EXECUTABLE,MODEL[,FLAG...]")
    parser.add_argument("--works", default="W1,W2,W3,W4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are stopped
    print("python -m bench.peers " + shlex.join(sys.argv[1:]))
    vocab_size = load_model(options.model).config.vocab_size
    contest = Contest(options.works.split(","), options.repeats, vocab_size, options.trace)
    for number in range(options.rounds):
        for engine in engines(options):
            contest.tour(engine, number)
    contest.report()
    for line in contest.short:
        print(f"\nFAILED {line}")
    return 1 if contest.short else 0


if __name__ == "__main__":
    sys.exit(main())
