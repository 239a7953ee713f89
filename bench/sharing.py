"""How much KV memory is saved because the answers to one prompt share blocks: parallel sampling and beam search.

    python -m bench.sharing [--model smollm2-135m] [--requests 16] [--lengths alpaca] [--widths 2,4,6]

The real engine answers requests with n samples, or with beams, and after each step two things are counted: the blocks
that are in use, and those that the same sequences would use if each had its own (the references to all blocks). The
saving is their difference over all steps, as a share of the latter: the measure of arXiv 2309.06180, section 6.3, which
saw 6 to 30 % for parallel sampling and 37 to 66 % for beam search with the lengths of Alpaca and ShareGPT.

Prompts are pieces of this project's own pages, so that beams part where a language model's beams do. Their lengths, and
those of the answers, are log-normal with the means of the data set that they are named after.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvpool.client.sampling_params import SamplingParams
from kvpool.model.backend import BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.loading import LoadedModel, load_model

from .rig import Rig, cpu_backend, make_request

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "ARCHITECTURE.md", "PROTOCOL.md")
LENGTHS = {  # log-normal (mu, sigma) of prompt and answer
    "alpaca": ((2.8, 0.55), (3.9, 0.6)),  # means 19 and 59
    "sharegpt": ((4.4, 1.15), (5.45, 0.85)),  # means 158 and 334
}
LONGEST = 1024  # of prompt and answer together
BATCHED_TOKENS = 256

Prompt = tuple[list[int], int]  # token ids, tokens of the answer


def make_prompts(model: LoadedModel, count: int, lengths: str, dice: random.Random) -> list[Prompt]:
    """Pieces of text of the lengths asked for, and how long the answers are to be."""
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    text = model.tokenizer.encode(pages, special=False)
    prompts = []
    for _ in range(count):
        prompt, answer = (1 + int(dice.lognormvariate(mu, sigma)) for mu, sigma in LENGTHS[lengths])
        prompt, answer = min(prompt, LONGEST // 2), min(answer, LONGEST // 2)
        start = dice.randrange(len(text) - prompt)
        prompts.append((text[start : start + prompt], answer))
    return prompts


def saving(backend: CpuBackend, limits: BackendLimits, num_blocks: int, requests: list[Prompt], **ways: int) -> float:
    """The share of all blocks that sharing saves, summed over the steps; `ways` are sampling parameters."""
    rig = Rig.of(backend, limits, num_blocks)
    for number, (prompt, answer) in enumerate(requests):
        params = SamplingParams(max_tokens=answer, ignore_eos=True, **({"temperature": 1.0, "seed": number} | ways))
        rig.engine.submit(make_request(f"r{number}", prompt, params))
    used = referenced = 0
    for _ in rig.turns():
        used += rig.scheduler.pool.num_used
        referenced += sum(sequence.num_blocks for sequence in rig.scheduler.roster.sequences.values())
    return 1 - used / referenced


def table(options: argparse.Namespace) -> Iterator[str]:
    model = load_model(options.model)
    requests = make_prompts(model, options.requests, options.lengths, random.Random(options.seed))
    prompts, answers = (sum(map(len, [p for p, _ in requests])), sum(a for _, a in requests))
    yield (
        f"{len(requests)} requests with lengths as of {options.lengths}: {prompts / len(requests):.0f} prompt and "
        f"{answers / len(requests):.0f} answer tokens on average; blocks of {options.block_size} tokens"
    )
    limits = BackendLimits(options.block_size, options.max_num_seqs, BATCHED_TOKENS, LONGEST)
    num_blocks = options.max_num_seqs * LONGEST // options.block_size // 2
    with cpu_backend(model, limits, num_blocks) as backend:
        yield f"{'':>12}{'parallel sampling':>20}{'beam search':>14}{'seconds':>10}"
        for width in options.widths:
            began = time.perf_counter()
            sampled = saving(backend, limits, num_blocks, requests, n=width)
            beams = saving(backend, limits, num_blocks, requests, beam_width=width, temperature=0)
            yield f"{width:>6} ways {sampled:20.1%}{beams:14.1%}{time.perf_counter() - began:10.0f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m", help="a pulled model, a directory or a .gguf file")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--lengths", choices=LENGTHS, default="alpaca")
    parser.add_argument("--widths", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4, 6])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    print("python -m bench.sharing", shlex.join(sys.argv[1:] if arguments is None else arguments))
    for line in table(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
