"""What each format of weights, and of keys and values, costs in quality, and what it gives in speed and memory.

    python -m bench.quality [--model smollm2-135m] [--gold tests/gold/smollm2-135m.json] [--text FILE] [--tokens 4096]
                            [--weights float32,bfloat16,auto,int8,int4] [--kv float32,bfloat16,float16,int8]
                            [--activations float32,int16,int8] [--repeats 15]

Against reference completions (`cases`, each with `prompt_ids`, `completion_ids`, `top3_logprobs`: for every token the
best three [id, natural log]): how often the reference's token is the best one here, given the reference's tokens before
it (by the guarantee of equal bits, one step over all tokens gives what generating gives); and how far the logprobs of
its best three are off. On a fixed text, cut into windows of 512 tokens: the perplexity
over all tokens but each window's first. The text is FILE, or the language reference that Python's own `help` shows.
Speed is that of whole decode steps of 1 and of 32 sequences at 192 tokens of context, the median of `repeats`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.model.backend import BackendLimits
from kvpool.model.batch import StepResult
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.host import usable_cpus
from kvpool.model.loading import LoadedModel, load_model

from .kernels import BLOCK_SIZE, greedy, step

WINDOW = 512
SEQUENCES, CONTEXT = 32, 192
LIMITS = BackendLimits(BLOCK_SIZE, SEQUENCES, 1024, 1024)


@dataclass(frozen=True, slots=True)
class Quality:
    """One format against the reference. Differences are of natural logarithms."""

    agreement: float
    differences: NDArray[np.float64]
    perplexity: float


def run(
    backend: CpuBackend, tokens: Sequence[int], rows: Sequence[int], targets: Sequence[int] | None = None
) -> StepResult:
    """All tokens of one sequence in one step: logits of some rows, or only the logprobs of `targets` there."""
    sampling = greedy(len(rows))
    if targets is not None:
        sampling = replace(sampling, targets=np.asarray(targets, np.int32))
    batch = replace(
        step(1, len(tokens), len(tokens)),
        tokens=np.asarray(tokens, np.int32),
        logit_rows=np.asarray(rows, np.int32),
        sampling=sampling,
        want_logits=targets is None,
    )
    backend.launch(batch)
    return backend.collect()


def against_reference(backend: CpuBackend, cases: Sequence[dict[str, Any]]) -> tuple[float, NDArray[np.float64]]:
    """Share of tokens that agree, and all differences of logprobs."""
    agree: list[bool] = []
    differences: list[float] = []
    for case in cases:
        prompt, completion = case["prompt_ids"], case["completion_ids"]
        rows = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
        logits = run(backend, [*prompt, *completion[:-1]], rows).logits
        if logits is None:
            raise RuntimeError("the back end returned no logits")
        wide = logits.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        logprobs -= wide.max(axis=1, keepdims=True)
        agree += (logits.argmax(axis=1) == completion).tolist()
        for row, best in zip(logprobs, case["top3_logprobs"], strict=True):
            differences += [abs(row[token] - logprob) for token, logprob in best]
    return float(np.mean(agree)), np.asarray(differences)


def perplexity(backend: CpuBackend, tokens: Sequence[int]) -> float:
    total, count = 0.0, 0
    for start in range(0, len(tokens), WINDOW):
        window = tokens[start : start + WINDOW]
        if len(window) < 2:
            break
        result = run(backend, window, range(len(window) - 1), window[1:])
        total, count = total + float(result.logprobs.astype(np.float64).sum()), count + len(window) - 1
    return float(np.exp(-total / count))


def tokens_per_second(backend: CpuBackend, sequences: int, repeats: int) -> float:
    batch, times = step(sequences, 1, CONTEXT), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        backend.launch(batch)
        backend.collect()
        times.append(time.perf_counter() - start)
    return sequences / statistics.median(times[1:])


def built_in_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def measure(backend: CpuBackend, cases: Sequence[dict[str, Any]], text: Sequence[int]) -> Quality:
    return Quality(*against_reference(backend, cases), perplexity(backend, text))


def report(
    model: LoadedModel,
    formats: dict[str, str],
    cases: Sequence[dict[str, Any]],
    text: Sequence[int],
    repeats: int,
) -> None:
    """One line of the table, or why there is none. `formats`: settings of the back end."""
    names = "".join(f"{name:<9} " for name in formats.values())
    try:
        backend = CpuBackend(model.program, model.checkpoint, LIMITS, **formats, model_hash=model.model_hash)
    except ValueError as error:
        print(f"{names} {error}")
        return
    backend.allocate_pool(SEQUENCES * CONTEXT // BLOCK_SIZE)
    found = measure(backend, cases, text)
    speeds = [tokens_per_second(backend, sequences, repeats) for sequences in (1, SEQUENCES)]
    differences = found.differences
    print(
        f"{names}{backend.weights_bytes / 2**20:7.1f} {backend.block_bytes / BLOCK_SIZE:9,.0f} "
        f"{found.agreement:8.2%} {differences.mean():9.5f} {np.quantile(differences, 0.99):8.4f} "
        f"{differences.max():8.4f} {found.perplexity:10.4f} "
        f"{speeds[0]:8.1f} {speeds[1]:8.1f}",
        flush=True,
    )
    backend.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gold", type=Path, default=Path("tests/gold/smollm2-135m.json"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="float32,bfloat16,auto,int8,int4")
    parser.add_argument("--kv", default="float32,bfloat16,float16,int8")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    model = load_model(options.model)
    text = options.text.read_text(encoding="utf-8") if options.text else built_in_text()
    tokens = model.tokenizer.encode(text[: 16 * options.tokens], special=False)[: options.tokens]
    cases = json.loads(options.gold.read_text())["cases"]
    print("python -m bench.quality " + shlex.join(sys.argv[1:]))
    print(
        f"{model.name}, {usable_cpus()} threads, {len(cases)} reference completions, perplexity of {len(tokens)} tokens"
    )
    print(
        f"{'':<30}{'weights':>7}{'KV bytes':>10}{'greedy':>9}{'|difference of logprobs|':>28}{'perplexity':>11}", end=""
    )
    print(f"{'tokens/s of':>16}")
    print(f"{'weights':<10}{'KV':<10}{'activ.':<10}{'MiB':>7}{'a token':>10}{'agrees':>9}", end="")
    print(f"{'mean':>10}{'p99':>9}{'most':>9}{'':>11}{'1':>8}{SEQUENCES:>8}")
    for formats in itertools.product(*(each.split(",") for each in (options.weights, options.kv, options.activations))):
        named = dict(zip(("dtype", "kv_dtype", "activations"), formats, strict=True))
        report(model, named, cases, tokens, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
