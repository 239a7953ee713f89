"""How long the CPU takes from one row of logits to one token, beside what NumPy takes to find its maximum or sort it.

    python -m bench.sampling [--seconds 1.0]

Rows are normal with standard deviation 3, whose nucleus is wider than a language model's usual one: top-k and top-p do
more work than they will on average. Every figure is the median of one row on one thread; cases take turns within a run.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.cpu_kernels.sampling import SampledArrays, SamplingArrays, sample_rows, scratch_floats

VOCAB_SIZES = (49_152, 151_936)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, 20 logprobs": {"num_logprobs": 20},
    "temperature": {"temperature": 0.8},
    "temperature, top_k 50": {"temperature": 0.8, "top_k": 50},
    "temperature, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature, min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def one_row(
    temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, num_logprobs: int = -1
) -> SamplingArrays:
    """The sampling arrays of a single row without lists."""
    start, no_int32 = np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    no_float32 = np.zeros(0, dtype=np.float32)
    return SamplingArrays(
        temperature=np.array([temperature], dtype=np.float32),
        top_k=np.array([top_k], dtype=np.int32),
        top_p=np.array([top_p], dtype=np.float32),
        min_p=np.array([min_p], dtype=np.float32),
        seeds=np.array([7], dtype=np.uint64),
        counters=np.array([0], dtype=np.int64),
        num_logprobs=np.array([num_logprobs], dtype=np.int32),
        targets=np.array([-1], dtype=np.int32),
        repetition_penalty=np.ones(1, dtype=np.float32),
        presence_penalty=np.zeros(1, dtype=np.float32),
        frequency_penalty=np.zeros(1, dtype=np.float32),
        penalty_start=start,
        penalty_tokens=no_int32,
        penalty_counts=no_int32,
        bias_start=start,
        bias_tokens=no_int32,
        bias_values=no_float32,
        allowed_start=start,
        allowed_tokens=no_int32,
    )


def kernel_case(logits: Any, options: dict[str, Any]) -> Callable[[], object]:
    """A call that samples the row once; compiled before it is returned."""
    params, width = one_row(**options), max(0, options.get("num_logprobs", 0))
    sampled = SampledArrays(
        np.zeros(1, dtype=np.int32),
        np.zeros(1, dtype=np.float32),
        np.zeros((1, width), dtype=np.int32),
        np.zeros((1, width), dtype=np.float32),
        np.zeros(1, dtype=np.bool_),
    )
    scratch = np.zeros(scratch_floats(logits.shape[1]), dtype=np.float32)

    def run() -> None:
        sample_rows(logits, params, sampled, scratch)

    run()
    return run


def medians_us(cases: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median microseconds of each case; they take turns until `seconds` have passed."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in cases.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of sampling one row of logits on one CPU thread.")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each vocabulary size")
    seconds = parser.parse_args().seconds
    print("$ python -m bench.sampling", shlex.join(sys.argv[1:]))
    print(f"{'':34}{'median us':>10}{'/ argmax':>10}{'/ sort':>10}")
    for vocab_size in VOCAB_SIZES:
        logits = (np.random.default_rng(0).standard_normal((1, vocab_size)) * 3).astype(np.float32)
        row = logits[0]
        cases: dict[str, Callable[[], object]] = {"np.argmax": lambda row=row: np.argmax(row)}  # type: ignore[misc]
        cases["np.sort"] = lambda row=row: np.sort(row)  # type: ignore[misc]
        cases |= {name: kernel_case(logits, options) for name, options in CASES.items()}
        medians = medians_us(cases, seconds)
        for name, median in medians.items():
            beside_argmax, beside_sort = median / medians["np.argmax"], median / medians["np.sort"]
            print(f"{vocab_size:>8}  {name:24}{median:>10.1f}{beside_argmax:>10.2f}{beside_sort:>10.3f}")


if __name__ == "__main__":
    main()
