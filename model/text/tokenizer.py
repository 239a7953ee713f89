"""Text to token ids and back, on the `tokenizers` library, the same for every file format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import ModelError

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's vocabulary. Not thread-safe: one thread encodes at a time."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._inner = inner
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        added = inner.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {}  # by token id: what was asked for once
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        kinds = list(_decoder_steps(inner))
        self._byte_level = any(step["type"] == "ByteLevel" for step in kinds)
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in kinds)
        self.strips_first_space = any(_strips_space(step) for step in kinds)
        self._beginning = (inner.normalizer, inner.pre_tokenizer)
        self._continuing = _without_prefix(inner)

    @classmethod
    def from_file(
        cls, path: Path, *, bos_token_id: int | None = None, eos_token_ids: tuple[int, ...] = ()
    ) -> Tokenizer:
        """From a tokenizer.json. Raises ModelError if it is missing or damaged."""
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(
                f"{path}: cannot be used ({error}); a model directory needs a whole tokenizer.json"
            ) from error
        inner.no_truncation()
        inner.no_padding()
        vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return cls(inner, vocab_size=vocab_size, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json."""
        self._inner.save(str(path))

    def encode(self, text: str, *, special: bool, add_bos: bool | None = None, continuing: bool = False) -> list[int]:
        """Token ids of `text`.

        `special`: the texts of special tokens ("<|im_end|>") become those tokens. Only for text that a chat template
        wrote; a person's text must not be able to end a turn, so there they are ordinary characters.
        `add_bos`: let the tokenizer add what it puts around a text (usually a beginning-of-sequence token, often
        nothing). None: exactly when not `special`, since templates write their own.
        `continuing`: the text follows other text, so nothing is put before its first word (some put a space).
        """
        self._inner.encode_special_tokens = not special
        if self._continuing is not None:
            self._inner.normalizer, self._inner.pre_tokenizer = self._continuing if continuing else self._beginning
        add = (not special) if add_bos is None else add_bos
        ids: list[int] = self._inner.encode(text, add_special_tokens=add).ids
        return ids

    def token_to_id(self, text: str) -> int | None:
        """The id whose token reads `text` exactly, if there is one."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def is_special(self, token_id: int) -> bool:
        """True for tokens that mark structure and have no text in an answer."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for, as bytes: perhaps part of a character. Empty for ids that have no token."""
        known = self._known.get(token_id)
        if known is None:
            token = self._inner.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return b""
            known = self._known[token_id] = self._bytes_of(token_id, token)
        return known

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        if self._byte_level:
            return b"".join(CHAR_BYTES.get(char) or char.encode() for char in token)
        if self._byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    def text_bytes(self, token_id: int) -> bytes:
        """`token_bytes` of what a reader sees: nothing for special tokens."""
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def decode(self, ids: Iterable[int], *, continuing: bool = False) -> str:
        """The text of `ids` without special tokens; bytes that are not UTF-8 become U+FFFD.

        `continuing`: the ids follow others, so a first token's space is a space; otherwise it is dropped where the
        tokenizer had put it there.
        """
        data = b"".join(map(self.text_bytes, ids))
        if self.strips_first_space and not continuing and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)
    }


CHAR_BYTES = _byte_alphabet()


def _decoder_steps(inner: tokenizers.Tokenizer) -> Iterable[dict[str, Any]]:
    if inner.decoder is None:
        return []
    state: dict[str, Any] = json.loads(inner.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    for step in steps:
        if step["type"] not in ("ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"):
            raise ModelError(f"tokenizer.json: decoder {step['type']} is not supported; use a byte-level or BPE model")
    return steps


def _without_prefix(inner: tokenizers.Tokenizer) -> tuple[Any, Any] | None:
    """Normalizer and pre-tokenizer that put nothing before the first word; None where the tokenizer's own do not."""
    own = [
        None if part is None else json.loads(part.__getstate__()) for part in (inner.normalizer, inner.pre_tokenizer)
    ]
    other = [_drop_prefix(step) for step in own]
    if other == own:
        return None
    skeleton: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": other[0],
        "pre_tokenizer": other[1],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    made = tokenizers.Tokenizer.from_str(json.dumps(skeleton))
    return made.normalizer, made.pre_tokenizer


def _drop_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A step of a tokenizer.json, and the steps inside it, without what they put before a text."""
    if step is None or step["type"] == "Prepend":
        return None
    changed = dict(step)
    for name in ("normalizers", "pretokenizers"):
        if name in changed:
            changed[name] = [kept for inner in changed[name] if (kept := _drop_prefix(inner)) is not None]
    if changed["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    if "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    return changed


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("content") == " " and step.get("start", 0) >= 1)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
