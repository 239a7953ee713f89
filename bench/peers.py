"""kvpool beside other engines on this machine: the same prompts and token counts, one engine after the other.

    python -m bench.peers [--model smollm2-135m] [--kvpool "8:--dtype int8"] [--peer 8:KIND=EXECUTABLE,MODEL[,FLAG]...]
                          [--works W1,W2,W3,W4] [--repeats 3] [--rounds 1] [--trace azure_2023_conv.csv]

`--kvpool` and `--peer` may be given several times. The number before the colon is how many bits each weight has in that
line's memory; it may be left out. Lines with the same number are compared with each other in a table of their own.

KIND is llama (EXECUTABLE: llama-server; MODEL: a .gguf file), vllm, openvino or transformers (EXECUTABLE: the Python
that has the package; MODEL: a directory). What is not installed is skipped with a line. Works:

    W1  32 requests at once, 128 prompt tokens and 128 generated
    W2  one request, 128 + 128
    W3  64 requests at once: a common beginning of 512 tokens, new in every repetition, 32 of their own, 64 generated
    W4  a minute of arrivals from a trace (lengths divided by 16), or without one, as many random ones. Its tokens per
        second are bounded by the arrivals, so latency is compared: from when a request was due to its last token

Every engine runs alone: start, one small warm-up, all works; `--rounds` repeats the whole tour, so that a slow hour of
the machine meets everybody. Prompts are random token ids, other ones in each repetition. A request that does not bring
exactly its tokens makes the run fail. kvpool and the servers are asked over their sockets, libraries in process; the
engine's process tree is what peak memory is counted of. Peers run with their best known flags.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.load import read_trace
from bench.peer_engines import Engine, KVPool, Served, Work, find, peak_rss_mib
from kvpool.model.loading import load_model

FIRST_TOKEN = 1000  # below are special ones
TRACE_SCALE, TRACE_SPEED, TRACE_SECONDS = 16.0, 1.0, 60.0
RANDOM_ARRIVALS, MEAN_PROMPT_TOKENS, MEAN_OUTPUT_TOKENS = 190, 56, 14
LONGEST_PROMPT, LONGEST_OUTPUT = 500, 100


@dataclass
class Figures:
    """What one engine did in one work, a value for each repetition; times are means over its requests."""

    tokens_per_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    def add(self, served: list[Served], work: Work) -> None:
        wall = max(one.last_s for one in served)
        self.tokens_per_s.append(sum(one.tokens for one in served) / wall)
        waits = [one.first_s - at_s for one, at_s in zip(served, work.arrivals, strict=True)]
        self.ttft_s.append(statistics.mean(waits))
        gaps = [(one.last_s - one.first_s) / (one.tokens - 1) for one in served if one.tokens > 1]
        self.itl_s.append(statistics.mean(gaps) if gaps else 0.0)
        whole = [one.last_s - at_s for one, at_s in zip(served, work.arrivals, strict=True)]
        self.latency_s.append(statistics.mean(whole))

    def score(self, name: str) -> float:
        """What lines are compared by, more being better: tokens per second, or where arrivals bound them, latency."""
        return 1.0 / statistics.median(self.latency_s) if name == "W4" else statistics.median(self.tokens_per_s)


@dataclass(frozen=True)
class Match:
    """kvpool's best line and the best peer among lines whose weights have the same number of bits."""

    bits: int
    ratio: float
    ours: str
    peer: str


def is_ours(line: str) -> bool:
    return line.startswith("kvpool")


def matches(scores: Mapping[str, float], bits: Mapping[str, int | None]) -> list[Match]:
    """One for each number of bits, most bits first, that both kvpool and a peer have a score with."""
    found = []
    for width in sorted({width for line in scores if (width := bits[line]) is not None}, reverse=True):
        lines = sorted((line for line in scores if bits[line] == width), key=lambda line: -scores[line])
        ours = next((line for line in lines if is_ours(line)), None)
        peer = next((line for line in lines if not is_ours(line)), None)
        if ours and peer:
            found.append(Match(width, scores[ours] / scores[peer], ours, peer))
    return found


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
        each = range(RANDOM_ARRIVALS)
        arrivals = sorted(dice.uniform(0.0, TRACE_SECONDS) for _ in each)
        lengths = [min(LONGEST_PROMPT, 4 + round(dice.expovariate(1 / MEAN_PROMPT_TOKENS))) for _ in each]
        outputs = [min(LONGEST_OUTPUT, 2 + round(dice.expovariate(1 / MEAN_OUTPUT_TOKENS))) for _ in each]
    prompts = [random_prompt(dice, length, vocab_size) for length in lengths]
    return Work("W4", prompts, arrivals, outputs)


@dataclass
class Contest:
    """All engines, all works, and what came out."""

    works: list[str]
    repeats: int
    vocab_size: int
    trace: Path | None
    bits: dict[str, int | None] = field(default_factory=dict)
    figures: dict[str, dict[str, Figures]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Figures)))
    ready_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rss_mib: dict[str, float] = field(default_factory=dict)
    short: list[str] = field(default_factory=list)

    def tour(self, engine: Engine, bits: int | None, round_number: int) -> None:
        """Start an engine, let it do everything, stop it."""
        self.bits[engine.name] = bits
        begin = time.perf_counter()
        try:
            engine.start()
            self.ready_s[engine.name].append(time.perf_counter() - begin)
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
                print(f"{engine.name:<56} {name} left out: {error}", flush=True)
                return
            wrong = sum(one.tokens != count for one, count in zip(served, work.output_tokens, strict=True))
            if wrong:
                self.short.append(f"{engine.name}: {wrong} requests of {name} did not bring their tokens")
                return
            figures = self.figures[name][engine.name]
            figures.add(served, work)
            print(f"{engine.name:<56} {name} {figures.tokens_per_s[-1]:8.1f} tokens/s", flush=True)

    def report(self) -> None:
        for name, rows in self.figures.items():
            self.report_work(name, rows)
        print(f"\n{'':<56} {'bits':>5} {'time to ready s':>18} {'peak RSS MiB':>13}")
        for line, ready in self.ready_s.items():
            spread = f"{statistics.median(ready):.1f} [{min(ready):.1f}-{max(ready):.1f}]"
            print(f"{line:<56} {self.bits[line] or '-':>5} {spread:>18} {self.rss_mib.get(line, 0.0):13.0f}")

    def report_work(self, name: str, rows: Mapping[str, Figures]) -> None:
        scores = {line: figures.score(name) for line, figures in rows.items()}
        best = max((score for line, score in scores.items() if not is_ours(line)), default=0.0)
        heads = f"{'output tokens/s':>18} {'of best peer':>13} {'TTFT s':>7} {'ITL ms':>7} {'latency s':>10}"
        print(f"\n{name:<56} {'bits':>5} {heads}")
        for line in sorted(scores, key=lambda line: -scores[line]):
            f = rows[line]
            spread = f"{statistics.median(f.tokens_per_s):.0f} [{min(f.tokens_per_s):.0f}-{max(f.tokens_per_s):.0f}]"
            ratio = f"{scores[line] / best:.2f}x" if best else "-"
            ttft, itl, latency = (statistics.median(times) for times in (f.ttft_s, f.itl_s, f.latency_s))
            times = f"{ttft:7.2f} {itl * 1e3:7.1f} {latency:10.2f}"
            print(f"{line:<56} {self.bits[line] or '-':>5} {spread:>18} {ratio:>13} {times}")
        for match in matches(scores, self.bits):
            print(f"{name} with {match.bits:>2} bits: {match.ratio:.2f}x  ({match.ours}, against {match.peer})")


def split_bits(text: str) -> tuple[int | None, str]:
    """`8:rest` is (8, "rest"); without a number, all is rest."""
    found = re.match(r"(\d+):", text)
    return (int(found[1]), text[found.end() :]) if found else (None, text)


def entrants(options: argparse.Namespace) -> list[tuple[int | None, Engine]]:
    """kvpool in each of its forms, and the peers that are there, each with the bits of its weights."""
    found: list[tuple[int | None, Engine]] = []
    for bits, flags in map(split_bits, [""] if options.kvpool is None else options.kvpool):
        found.append((bits, KVPool(options.model, shlex.split(flags))))
    for bits, text in map(split_bits, options.peer):
        kind, _, rest = text.partition("=")
        executable, model, *flags = rest.split(",")
        engine = find(kind, executable, model, flags)
        if isinstance(engine, str):
            print(f"{kind} is skipped: {engine}")
        else:
            found.append((bits, engine))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="kvpool's")
    parser.add_argument("--kvpool", action="append", metavar="[BITS:]FLAGS", help="of kvpoold; several times")
    parser.add_argument("--peer", action="append", default=[], metavar="[BITS:]KIND=EXECUTABLE,MODEL[,FLAG...]")
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
        for bits, engine in entrants(options):
            contest.tour(engine, bits, number)
    contest.report()
    for line in contest.short:
        print(f"\nFAILED {line}")
    return 1 if contest.short else 0


if __name__ == "__main__":
    sys.exit(main())
