"""Small SentencePiece-style vocabularies as GGUF files, and the slow, obvious way to tokenise with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf

MARK = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def write_sentencepiece_gguf(
    path: Path,
    pieces: Sequence[tuple[str, float]],
    *,
    model: str = "llama",
    user_defined: Sequence[str] = (),
    **flags: Any,
) -> Path:
    """A GGUF file with a vocabulary and no tensors: specials, 256 bytes, `user_defined`, then `pieces` with scores."""
    tokens = [*SPECIAL, *BYTES, *user_defined, *(piece for piece, _ in pieces)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.USER_DEFINED] * len(user_defined)
    kinds += [gguf.TokenType.NORMAL] * len(pieces)
    # Unigram weighs bytes too: dearer than any piece.
    scores = [-100.0 if model == "t5" else 0.0] * (len(tokens) - len(pieces)) + [score for _, score in pieces]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def slow_bpe(text: str, pieces: Sequence[tuple[str, float]]) -> list[str]:
    """Join the best-scored neighbours until none are left; ties by the order of the halves, then by position."""
    scores = dict(pieces)
    order = {piece: index for index, (piece, _) in enumerate(pieces)}
    symbols = list(text)
    while True:
        joins = [
            (-scores[left + right], order[left + right], order[left], order[right], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores and left in scores and right in scores
        ]
        if not joins:
            break
        at = min(joins)[-1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [token for symbol in symbols for token in _with_bytes(symbol, scores)]


def best_unigram_score(text: str, scores: dict[str, float]) -> float:
    """The best sum of scores over all ways to cut `text` into pieces; -inf if there is none."""
    best = [0.0] + [-math.inf] * len(text)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if text[start:end] in scores:
                best[end] = max(best[end], best[start] + scores[text[start:end]])
    return best[-1]


def _with_bytes(symbol: str, scores: dict[str, float]) -> list[str]:
    return [symbol] if symbol in scores else [BYTES[byte] for byte in symbol.encode()]
