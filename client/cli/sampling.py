"""The flags of `generate` and `chat` that choose how tokens are sampled."""

from __future__ import annotations

import argparse
from typing import Any

from ..sampling_params import DEFAULT_MAX_TOKENS, SamplingParams


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each parameter that is worth typing; SamplingParams checks the values."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"most tokens to generate (default: {DEFAULT_MAX_TOKENS})"
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end of text before this many")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
    group.add_argument("--top-p", type=float, metavar="P", help="the fewest tokens whose probabilities sum to P")
    group.add_argument("--top-k", type=int, metavar="K", help="the K most likely tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="tokens at least P times as likely as the likeliest")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on after the end of text")


NAMES = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "ignore_eos", "n", "logprobs",
)  # fmt: skip


def params_of(options: argparse.Namespace) -> SamplingParams:
    """The parameters that were given. Raises InvalidArgument naming the one that is wrong."""
    given: dict[str, Any] = {name: getattr(options, name, None) for name in NAMES}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})
