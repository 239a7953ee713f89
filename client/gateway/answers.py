"""Results and tokens as the JSON of OpenAI's completions, chat completions and embeddings. Values in, values out."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..results import Output, Result
from ..wire.errors import Cancelled, DeadlineExceeded, KVPoolError

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's clients know it as such."""


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token with its logprobs; texts of special tokens are empty."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]  # the likeliest candidates, best first


@dataclass(frozen=True, slots=True)
class Form:
    """One answer's shape: of a chat, or of plain text."""

    answer_id: str
    model: str
    created: int  # seconds since 1970
    is_chat: bool
    shows_logprobs: bool

    def whole(self, choices: Sequence[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage}

    def choice(self, index: int, output: Output, tokens: Sequence[Token]) -> dict[str, Any]:
        """A complete answer."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        return {
            "index": index,
            **({"message": message} if self.is_chat else {"text": output.text}),
            "logprobs": self._logprobs(tokens, 0),
            "finish_reason": output.finish_reason,
        }

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An event of a stream."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices}

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks: what a chat begins with."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, text: str, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        """What a token added; `offset` characters of tokens came before it."""
        content = {"delta": {"content": text}} if self.is_chat else {"text": text}
        logprobs = self._logprobs(tokens, offset) if tokens else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": None}

    def ending(self, index: int, finish_reason: str) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if not self.shows_logprobs:
            return None
        return _chat_logprobs(tokens) if self.is_chat else _text_logprobs(tokens, offset)


def _chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    content = [_entry(t.text, t.logprob) | {"top_logprobs": [_entry(*top) for top in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """`bytes` is null where the token is no complete text, as its bytes are not known here."""
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": known}


def _text_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    offsets, tops = [], []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
        top: dict[str, float] = {}
        for text, logprob in (*token.top, (token.text, token.logprob)):  # the first of two with the same text stays
            top.setdefault(text, max(logprob, LOWEST_LOGPROB))
        tops.append(top if token.top else None)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [max(token.logprob, LOWEST_LOGPROB) for token in tokens],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def usage_of(results: Iterable[Result]) -> dict[str, Any]:
    """Tokens of all prompts and answers; each prompt counts once, however often it is answered."""
    prompt = completion = cached = 0
    for result in results:
        prompt += result.usage.prompt_tokens
        cached += result.usage.cached_tokens
        completion += sum(output.usage.completion_tokens for output in result.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def raise_if_cut_short(result: Result) -> None:
    """An answer that did not come to its end is an error: HTTP has no finish reason for it."""
    for output in result.outputs:
        if (error := _failure_of(output)) is not None:
            raise error


def _failure_of(output: Output) -> KVPoolError | None:
    count = output.usage.completion_tokens
    if output.finish_reason == "deadline":
        return DeadlineExceeded(f"passed after {count} tokens", field="deadline_s")
    if output.finish_reason == "cancelled":
        return Cancelled(f"the request was cancelled after {count} tokens")
    return output.error


def embeddings(vectors: NDArray[np.float32], results: Iterable[Result], model: str, as_base64: bool) -> dict[str, Any]:
    """`vectors` (num_prompts, hidden_size)."""
    usage = usage_of(results)
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector.tolist()}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]},
    }


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
