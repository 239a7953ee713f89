"""Text that appears token by token: never half a character, never part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .tokenizer import Tokenizer


class StreamDetokenizer:
    """Turns token ids into text as they come. The deltas and `flush` together equal `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, continuing: bool = False, show_special: bool = False) -> None:
        """`continuing`: the tokens follow a prompt, so a space that the first one begins with is text.
        `show_special`: special tokens appear as the text that stands for them."""
        self._bytes_of = tokenizer.token_bytes if show_special else tokenizer.text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no character has begun
        self._drop_space = tokenizer.strips_first_space and not continuing

    def push(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is incomplete. Special tokens have none."""
        data = self._bytes_of(token_id)
        if data and self._drop_space:
            data = data.removeprefix(b" ")
            self._drop_space = False
        if self._between:
            try:
                return data.decode()  # nearly always, and several times as fast as the decoder
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """The end of the text: bytes of a character that never became whole, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first stop string in text that comes in pieces, however the pieces are cut.

    The stop string that is complete first ends the text (the longest, where several end at once); neither it nor any
    part of it is ever given out. Only text that could be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: give the stop string itself out, at the end. Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("stop strings must not be empty")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to give out, whether a stop string is complete). After True, push no more."""
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            end, start = min(ends)
            return text[: end if self._include else start], True
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What is still held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        longest = min(len(text), len(stop) - 1)
        return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
