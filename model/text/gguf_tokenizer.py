"""Tokenizers rebuilt from GGUF metadata, so that ids equal those of the model's own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelError
from ..files.gguf_config import end_token_ids
from ..files.gguf_file import GgufFile
from .pre_tokenizers import IGNORES_MERGES, patterns
from .tokenizer import SPACE_MARK, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Raises ModelError if the metadata hold no vocabulary, or one of an unknown kind."""
    vocabulary = _vocabulary(file)
    build = {"gpt2": _byte_level, "llama": _sentencepiece_bpe, "t5": _unigram}.get(vocabulary.model)
    if build is None:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {vocabulary.model!r} is not supported; known: gpt2, llama, t5"
        )
    try:
        inner = build(vocabulary)
        _add_special_tokens(inner, vocabulary)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{file.path}: damaged tokenizer ({error}); fetch the model again") from error
    return Tokenizer(
        inner,
        vocab_size=len(vocabulary.tokens),
        bos_token_id=vocabulary.get("bos_token_id"),
        eos_token_ids=end_token_ids(file.metadata),
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    path: Path
    model: str
    tokens: list[str]
    kinds: list[int]  # one a token
    values: dict[str, Any]  # all of tokenizer.ggml.*, prefix removed

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def ids(self) -> dict[str, int]:
        return {text: token_id for token_id, text in enumerate(self.tokens)}

    def scores(self) -> list[float]:
        scores: list[float] = self.get("scores", [])
        if len(scores) != len(self.tokens):
            raise ModelError("tokenizer.ggml.scores does not fit the vocabulary; fetch the model again")
        return scores


def _vocabulary(file: GgufFile) -> _Vocabulary:
    prefix = "tokenizer.ggml."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    tokens = values.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{file.path}: it holds no vocabulary (tokenizer.ggml.tokens); use a file that has one")
    kinds = values.get("token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type does not fit the vocabulary; fetch the model again")
    return _Vocabulary(file.path, str(values.get("model")), tokens, kinds, values)


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """GPT-2's BPE over bytes. Merges are stored as "left right"."""
    kind = str(vocabulary.get("pre", "default"))
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.get("merges", []))]
    bpe = models.BPE(vocabulary.ids(), merges, ignore_merges=kind in IGNORES_MERGES)
    inner = tokenizers.Tokenizer(bpe)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns(kind)]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours that together are a token, join those with the best score first.

    Every way to split a token into two tokens is a merge, ranked by the token's score, then by the ids of its halves.
    (SentencePiece itself breaks that last tie by position, which no list of merges can say. It matters where two ways
    to make one token overlap in the text; Hugging Face's converted tokenizers rank them as here.)
    """
    ids, scores = vocabulary.ids(), vocabulary.scores()
    merges: list[tuple[str, str]] = []
    for token_id in sorted(range(len(vocabulary.tokens)), key=lambda token_id: -scores[token_id]):
        text = vocabulary.tokens[token_id]
        if vocabulary.kinds[token_id] not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in ids and text[cut:] in ids]
        if len(splits) > 1:
            splits.sort(key=lambda halves: (ids[halves[0]], ids[halves[1]]))
        merges += splits
    unknown = vocabulary.tokens[vocabulary.get("unknown_token_id", 0)]
    inner = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    _mark_spaces(inner, vocabulary)
    return inner


def _unigram(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's unigram model: the split with the best sum of scores."""
    pieces = list(zip(vocabulary.tokens, vocabulary.scores(), strict=True))
    has_bytes = BYTE in vocabulary.kinds
    inner = tokenizers.Tokenizer(models.Unigram(pieces, vocabulary.get("unknown_token_id", 0), byte_fallback=has_bytes))
    _mark_spaces(inner, vocabulary)
    return inner


def _mark_spaces(inner: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    steps: list[Any] = []
    if charsmap := vocabulary.get("precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(value & 0xFF for value in charsmap)))
    if vocabulary.get("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    add_space = vocabulary.get("add_space_prefix", True)
    if add_space:
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    inner.normalizer = normalizers.Sequence(steps)
    undo = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if add_space else undo)


def _add_special_tokens(inner: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens, user-defined tokens, and what goes around a text."""
    added = {
        kind: [AddedToken(text, special=kind != USER_DEFINED, normalized=False) for text in texts if text]
        for kind in (CONTROL, UNKNOWN, USER_DEFINED)
        if (texts := [text for text, its in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if its == kind])
    }
    for kind, tokens in added.items():
        if kind == USER_DEFINED:
            inner.add_tokens(tokens)
        else:
            inner.add_special_tokens(tokens)
    # SentencePiece vocabularies begin their texts with a marker unless the file says otherwise; byte-level ones do not.
    before = _around(vocabulary, "bos", default=vocabulary.model == "llama")
    after = _around(vocabulary, "eos", default=False)
    if before or after:
        inner.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(text, inner.token_to_id(text)) for text in before + after]
        )


def _around(vocabulary: _Vocabulary, which: str, *, default: bool) -> list[str]:
    token_id = vocabulary.get(f"{which}_token_id")
    if token_id is None or not vocabulary.get(f"add_{which}_token", default):
        return []
    return [vocabulary.tokens[token_id]]
