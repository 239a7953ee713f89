"""What narrow weights, keys and values cost in quality: logprobs and greedy tokens beside reference completions.

    python -m bench.quality [--model smollm2-135m] [--gold tests/gold/smollm2-135m.json] [--weights float32,bfloat16]
                            [--kv float32,bfloat16,float16,int8]

Every case's prompt and completion go through the model at once (by the guarantee of equal bits, that is what generating
gives), and each position of the completion is compared with what Transformers computed in float32: the logprobs of its
three best tokens, and whether the same token is the best. `nll`: the mean negative logprob of the reference's tokens.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bench.kernels import BLOCK_SIZE, step
from kvpool.model.backend import BackendLimits
from kvpool.model.batch import Float32, SamplingBatch, StepBatch
from kvpool.model.cpu_backend import CpuBackend
from kvpool.model.loading import LoadedModel, load_model

MAX_TOKENS = 1024


@dataclass(frozen=True)
class Quality:
    """One pair of formats over all cases."""

    block_bytes: int
    differences: Float32  # |logprob - reference|, of the three best tokens of each position
    agreed: int
    positions: int
    nll: float

    def row(self, weights: str, kv: str) -> str:
        d, kv_bytes = self.differences, self.block_bytes / BLOCK_SIZE
        differences = f"{d.mean():>12.5f}{np.quantile(d, 0.99):>10.4f}{d.max():>10.4f}"
        agreement = f"{self.agreed / self.positions:>10.2%}{self.nll:>10.5f}"
        return f"{weights:<10}{kv:<10}{kv_bytes:>10,.0f}{differences}{agreement}"


def completion_step(case: dict[str, Any]) -> StepBatch:
    """Prompt and completion as one chunk, with logits for the positions that predict the completion."""
    tokens = [*case["prompt_ids"], *case["completion_ids"][:-1]]
    batch, rows = step(1, len(tokens), len(tokens)), len(case["completion_ids"])
    batch.tokens = np.array(tokens, dtype=np.int32)
    batch.logit_rows = np.arange(len(tokens) - rows, len(tokens), dtype=np.int32)
    per_row = [field.name for field in fields(SamplingBatch) if field.default_factory is MISSING]
    batch.sampling = SamplingBatch(**{name: np.repeat(getattr(batch.sampling, name), rows) for name in per_row})
    batch.want_logits = True
    return batch


def logprobs(backend: CpuBackend, case: dict[str, Any]) -> Float32:
    """(completion tokens, vocab_size) natural logarithms."""
    backend.launch(completion_step(case))
    logits = backend.collect().logits
    if logits is None:
        raise RuntimeError("the back end returned no logits")
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: Float32 = shifted - np.log(np.exp(shifted, dtype=np.float64).sum(axis=1, keepdims=True)).astype(np.float32)
    return result


def measure(model: LoadedModel, cases: list[dict[str, Any]], weights: str, kv: str) -> Quality:
    limits = BackendLimits(BLOCK_SIZE, 64, MAX_TOKENS, MAX_TOKENS)
    backend = CpuBackend(model.program, model.checkpoint, limits, dtype=weights, kv_dtype=kv)
    backend.allocate_pool(MAX_TOKENS // BLOCK_SIZE)
    differences: list[float] = []
    chosen: list[float] = []
    agreed = 0
    for case in cases:
        rows = logprobs(backend, case)
        agreed += int((rows.argmax(axis=1) == case["completion_ids"]).sum())
        chosen += rows[np.arange(len(rows)), case["completion_ids"]].tolist()
        for row, best in zip(rows, case["top3_logprobs"], strict=True):
            differences += [abs(float(row[token]) - logprob) for token, logprob in best]
    backend.close()
    return Quality(backend.block_bytes, np.array(differences, np.float32), agreed, len(chosen), -float(np.mean(chosen)))


def pairs(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for weights in options.weights.split(","):
        for kv in options.kv.split(","):
            yield weights, kv


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gold", type=Path, default=Path("tests/gold/smollm2-135m.json"))
    parser.add_argument("--weights", default="float32,bfloat16")
    parser.add_argument("--kv", default="float32,bfloat16,float16,int8")
    options = parser.parse_args()
    print("python -m bench.quality " + shlex.join(sys.argv[1:]))
    model, cases = load_model(options.model), json.loads(options.gold.read_text())["cases"]
    print(f"{'':<20}{'KV bytes':>10}{'|difference of logprobs|':>32}{'greedy':>10}")
    print(f"{'weights':<10}{'KV':<10}{'a token':>10}{'mean':>12}{'p99':>10}{'most':>10}{'agrees':>10}{'nll':>10}")
    for weights, kv in pairs(options):
        print(measure(model, cases, weights, kv).row(weights, kv), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
