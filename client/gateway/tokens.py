"""The texts of single tokens, which OpenAI's logprobs name instead of ids: asked of the daemon once each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ..aio import AsyncClient
from ..results import TAIL_TOKEN_ID, Output, TokenEvent
from .answers import Token

ASKED_AT_ONCE = 64


class TokenTexts:
    """The vocabulary of one daemon, as far as it was needed."""

    def __init__(self, pool: AsyncClient) -> None:
        self._pool = pool
        self._texts: dict[int, str] = {}

    async def of_event(self, event: TokenEvent) -> list[Token]:
        """The token of an event; none for a tail that only brings text."""
        if event.token_id == TAIL_TOKEN_ID or event.logprob is None:
            return []
        return await self._tokens([event.token_id], [event.logprob], [event.top_logprobs or {}])

    async def of_output(self, output: Output) -> list[Token]:
        if output.logprobs is None:
            return []
        tops = output.top_logprobs or [{} for _ in output.token_ids]
        return await self._tokens(output.token_ids, output.logprobs, tops)

    async def _tokens(
        self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[dict[int, float]]
    ) -> list[Token]:
        await self._learn({*ids, *(candidate for top in tops for candidate in top)})
        texts = self._texts
        return [
            Token(texts[token_id], logprob, tuple((texts[candidate], value) for candidate, value in top.items()))
            for token_id, logprob, top in zip(ids, logprobs, tops, strict=True)
        ]

    async def _learn(self, ids: Iterable[int]) -> None:
        missing = [token_id for token_id in ids if token_id not in self._texts]
        for start in range(0, len(missing), ASKED_AT_ONCE):
            part = missing[start : start + ASKED_AT_ONCE]
            self._texts.update(zip(part, await asyncio.gather(*map(self._ask, part)), strict=True))

    async def _ask(self, token_id: int) -> str:
        """Some tokenizers drop the space that a text begins with, so the token is asked for behind itself."""
        twice = await self._pool.detokenize([token_id, token_id])
        return twice[len(twice) // 2 :]
