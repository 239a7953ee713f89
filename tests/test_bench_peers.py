"""bench/peers.py: who is compared with whom, and with what work."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peer_engines import Served, Work
from bench.peers import Figures, Match, make_work, matches, split_bits

VOCAB_SIZE = 49152


@pytest.mark.parametrize(
    ("text", "bits", "rest"),
    [
        ("4:--activations int8", 4, "--activations int8"),
        ("16:", 16, ""),
        ("", None, ""),
        ("--dtype int8", None, "--dtype int8"),
        ("8:llama=server,a:b.gguf", 8, "llama=server,a:b.gguf"),
        ("llama=server,8:b.gguf", None, "llama=server,8:b.gguf"),
    ],
)
def test_a_line_may_begin_with_the_bits_of_its_weights(text: str, bits: int | None, rest: str) -> None:
    assert split_bits(text) == (bits, rest)


def test_the_best_lines_of_each_width_are_compared() -> None:
    scores = {"kvpool": 80.0, "kvpool --dtype int8": 50.0, "kvpool --dtype bfloat16": 40.0, "kvpool --slow": 10.0}
    scores |= {"llama q4": 40.0, "ov int4": 64.0, "ov int8": 100.0, "hf": 500.0}
    bits = {"kvpool": 4, "kvpool --dtype int8": 8, "kvpool --dtype bfloat16": 16, "kvpool --slow": 4}
    bits |= {"llama q4": 4, "ov int4": 4, "ov int8": 8, "hf": None}
    assert matches(scores, bits) == [
        Match(8, 0.5, "kvpool --dtype int8", "ov int8"),
        Match(4, 1.25, "kvpool", "ov int4"),
    ]


def test_figures_count_from_when_a_request_was_due() -> None:
    work = Work("W4", [[1], [2]], [0.0, 2.0], [3, 1])
    figures = Figures()
    figures.add([Served(1.0, 2.0, 3), Served(4.0, 4.0, 1)], work)
    assert figures.tokens_per_s == [1.0]  # four tokens until the last came
    assert figures.ttft_s == [1.5]
    assert figures.itl_s == [0.5]
    assert figures.latency_s == [2.0]
    assert (figures.score("W1"), figures.score("W4")) == (1.0, 0.5)


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4"])
def test_no_two_repetitions_share_a_beginning(name: str) -> None:
    first, again, second = (make_work(name, number, VOCAB_SIZE, None) for number in (0, 0, 1))
    assert first == again
    assert {tuple(prompt[:4]) for prompt in first.prompts}.isdisjoint(tuple(prompt[:4]) for prompt in second.prompts)


def test_a_trace_says_when_and_how_long(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:46.0000000,800,80", "2023-11-16 18:15:48.5000000,400,16"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "2023-11-16 18:17:48.0000000,8,8"]))
    work = make_work("W4", 0, VOCAB_SIZE, trace)
    assert [len(prompt) for prompt in work.prompts] == [50, 25]
    assert (work.arrivals, work.output_tokens) == ([0.0, 2.5], [5, 1])
