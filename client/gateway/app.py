"""The OpenAI-compatible gateway: HTTP in front of one AsyncClient. Needs aiohttp (the extra `gateway`).

It is an ordinary client of the daemon: what it asks, it asks as the user whose process it is. A handler is cancelled
when its connection ends, and leaves its streams, which cancels them; a slow reader holds up only its own handler, which
then reads no tokens, so that the daemon pauses that sequence alone.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from ..aio import AsyncClient
from ..aio_stream import AsyncStream
from ..requests import EMBED_PARAMS, Options, new_id
from ..results import Result, stack_embeddings
from ..wire.errors import KVPoolError
from ..wire.messages import Welcome
from .answers import Form, embeddings, raise_if_cut_short, usage_of
from .errors import HTTPError, body_of, error_body, headers_of, status_of
from .requests import Completion, Embeddings, parse_chat, parse_completion, parse_embeddings, parse_json, renamed
from .tokens import TokenTexts

MAX_BODY_BYTES = 8 << 20
WINDOW = 64
"""Tokens of a streamed sample that the daemon may send ahead of the HTTP reader."""

SEND_BUFFER_BYTES = 32 << 10
"""Of a stream's socket: large buffers would take whole answers from the daemon for a reader who has stopped."""

EMBEDDED_AT_ONCE = 16
HEALTH_TIMEOUT_S = 5.0

STREAMING = "kvpool.streaming"  # of a web.Request: the beginning of its answer has been sent

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)


class Gateway:
    """The endpoints. `api_keys`: who may use them, none: everybody; `hosts`: names by which a browser's page may call
    the gateway, None: any."""

    def __init__(
        self, pool: AsyncClient, *, api_keys: Collection[str] = (), hosts: Collection[str] | None = None
    ) -> None:
        self._pool = pool
        self._api_keys = [key.encode() for key in api_keys]
        self._hosts = hosts
        self._started = int(time.time())
        self._texts: tuple[int, TokenTexts] | None = None  # and the epoch they belong to

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/embeddings", self._embeddings)
        return app

    # ---- every request

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who may come in, and answer every error in OpenAI's form."""
        try:
            self._check_host(request)
            if request.path != "/health":
                self._check_key(request)
            return await handler(request)
        except (KVPoolError, HTTPError) as error:
            return _json(body_of(error), status_of(error), headers_of(error))
        except web.HTTPException as error:
            return _json(error_body(error.status, _reason(error)), error.status, _kept_headers(error))
        except ConnectionError:  # the reader has gone, and nobody sees what is returned
            return web.Response(status=499)
        except Exception:
            if STREAMING in request:
                raise  # aiohttp logs it and hangs up: what was sent cannot be taken back
            log.exception("%s %s failed", request.method, request.path)
            return _json(error_body(500, "a bug in the gateway; its log has the details", code="internal"), 500)

    def _check_host(self, request: web.Request) -> None:
        """Without keys, a web page must not reach the gateway under a name of its own that resolves to this machine."""
        if self._hosts is not None and request.url.host not in self._hosts:
            raise HTTPError(403, "the Host header must be a loopback name, as no API keys are set", code="forbidden")

    def _check_key(self, request: web.Request) -> None:
        if not self._api_keys:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        offered = given.strip().encode(errors="replace")
        matches = [hmac.compare_digest(offered, key) for key in self._api_keys]  # always all of them
        if scheme.lower() != "bearer" or not any(matches):
            raise HTTPError(401, "needs a valid API key, as `Authorization: Bearer KEY`", code="invalid_api_key")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        """A form of some web page can be posted here without asking; JSON cannot."""
        if request.content_type != "application/json":
            raise HTTPError(415, "the Content-Type must be application/json")
        return parse_json(await request.read())

    # ---- what there is

    async def _health(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                figures = await self._pool.stats()
        except TimeoutError:
            return _json({"status": "unhealthy", "reason": "the daemon does not answer"}, 503)
        if figures.get("healthy") and not figures.get("draining"):
            return _json({"status": "ok"})
        reason = "draining" if figures.get("draining") else str(figures.get("health_reason", ""))
        return _json({"status": "unhealthy", "reason": reason}, 503)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._card(await self._pool.connect())]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        welcome = await self._pool.connect()
        _check_model(request.match_info["name"], welcome)
        return _json(self._card(welcome))

    def _card(self, welcome: Welcome) -> dict[str, Any]:
        return {
            "id": welcome.model,
            "object": "model",
            "created": self._started,
            "owned_by": "kvpool",
            "max_model_len": welcome.limits.max_model_len,
        }

    # ---- text

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion(await self._body(request)), is_chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat(await self._body(request)), is_chat=True)

    async def _answer(self, request: web.Request, asked: Completion, *, is_chat: bool) -> web.StreamResponse:
        welcome = await self._pool.connect()
        _check_model(asked.model, welcome)
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{new_id()}"
        form = Form(answer_id, welcome.model, int(time.time()), is_chat, asked.params.logprobs is not None)
        texts = self._texts_of(welcome)
        try:
            async with AsyncExitStack() as stack:
                streams = [
                    await stack.enter_async_context(await self._submit(asked, number, answer_id))
                    for number in range(len(asked.prompts))
                ]
                if asked.stream:
                    return await _Streamed(request, form, texts, asked).answer(streams)
                return _json(await _whole(streams, form, texts, asked.params.n))
        except KVPoolError as error:
            raise renamed(error, asked.names) from None

    async def _submit(self, asked: Completion, number: int, answer_id: str) -> AsyncStream:
        """The stream of one prompt, under a name that `kvpool ps` shows."""
        return await self._pool.submit(
            asked.prompts[number],
            asked.params,
            priority=asked.priority,
            deadline_s=asked.deadline_s,
            request_id=f"{answer_id}-{number}" if len(asked.prompts) > 1 else answer_id,
            window=WINDOW if asked.stream else None,
        )

    def _texts_of(self, welcome: Welcome) -> TokenTexts:
        """Another daemon may serve another model."""
        if self._texts is None or self._texts[0] != welcome.epoch:
            self._texts = (welcome.epoch, TokenTexts(self._pool))
        return self._texts[1]

    # ---- vectors

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        asked = parse_embeddings(await self._body(request))
        welcome = await self._pool.connect()
        _check_model(asked.model, welcome)
        results: list[Result] = []
        try:
            for start in range(0, len(asked.prompts), EMBEDDED_AT_ONCE):
                results += await self._embed(asked, start)
        except KVPoolError as error:
            raise renamed(error, {"prompt": "input"}) from None
        return _json(embeddings(stack_embeddings(results), results, welcome.model, asked.as_base64))

    async def _embed(self, asked: Embeddings, start: int) -> list[Result]:
        options = Options(asked.priority, asked.deadline_s, want_text=False, window=None, pooling=asked.pooling)
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(await self._pool._submit(prompt, EMBED_PARAMS, options))
                for prompt in asked.prompts[start : start + EMBEDDED_AT_ONCE]
            ]
            return [await _finished(stream) for stream in streams]


class _Streamed:
    """An answer as server-sent events. Its headers go out with the first token, so that a refusal has its status."""

    def __init__(self, request: web.Request, form: Form, texts: TokenTexts, asked: Completion) -> None:
        self._request = request
        self._form = form
        self._texts = texts
        self._asked = asked
        self._lock = asyncio.Lock()
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self._results: list[Result] = []

    async def answer(self, streams: list[AsyncStream]) -> web.StreamResponse:
        """Send all streams, each as it comes. An error after the first token is an event, and the last one."""
        senders = [
            asyncio.ensure_future(self._send_stream(stream, number * self._asked.params.n))
            for number, stream in enumerate(streams)
        ]
        try:
            await asyncio.gather(*senders)
            await self._send_usage()
            await self._write(b"[DONE]")
        except KVPoolError as error:
            if not self._response.prepared:
                raise
            for sender in senders:
                sender.cancel()
            await self._write(_dumps(body_of(renamed(error, self._asked.names))))
        finally:
            for sender in senders:
                sender.cancel()
        await self._response.write_eof()
        return self._response

    async def _send_stream(self, stream: AsyncStream, first_index: int) -> None:
        """`first_index`: of the answers to this prompt."""
        offsets: dict[int, int] = {}  # of each answer that has begun: characters of its tokens
        async for event in stream:
            await self._open(event.sample, first_index, offsets)
            tokens = await self._texts.of_event(event) if self._form.shows_logprobs else []
            if event.text or tokens:
                piece = self._form.piece(first_index + event.sample, event.text, tokens, offsets[event.sample])
                await self._send([piece])
            offsets[event.sample] += sum(len(token.text) for token in tokens)
        result = await _finished(stream)
        self._results.append(result)
        for output in result.outputs:
            await self._open(output.sample, first_index, offsets)
            await self._send([self._form.ending(first_index + output.sample, output.finish_reason)])

    async def _open(self, sample: int, first_index: int, offsets: dict[int, int]) -> None:
        if sample not in offsets:
            offsets[sample] = 0
            if self._form.is_chat:
                await self._send([self._form.opening(first_index + sample)])

    async def _send(self, choices: list[dict[str, Any]]) -> None:
        chunk = self._form.chunk(choices)
        await self._write(_dumps(chunk | {"usage": None} if self._asked.include_usage else chunk))

    async def _send_usage(self) -> None:
        if self._asked.include_usage:
            await self._write(_dumps(self._form.chunk([]) | {"usage": usage_of(self._results)}))

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self._response.prepared:
                self._request[STREAMING] = True
                await self._response.prepare(self._request)
                _keep_buffers_small(self._request.transport)
        await self._response.write(b"data: " + data + b"\n\n")


def _keep_buffers_small(transport: asyncio.Transport | None) -> None:
    if transport is not None:
        transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


async def _whole(streams: list[AsyncStream], form: Form, texts: TokenTexts, n: int) -> dict[str, Any]:
    results = [await _finished(stream) for stream in streams]
    choices = [
        form.choice(number * n + output.sample, output, await texts.of_output(output))
        for number, result in enumerate(results)
        for output in result.outputs
    ]
    return form.whole(choices, usage_of(results))


async def _finished(stream: AsyncStream) -> Result:
    result = await stream.result()
    raise_if_cut_short(result)
    return result


def _check_model(name: str | None, welcome: Welcome) -> None:
    if name is not None and name != welcome.model:
        message = f"there is no model {name[:64]!r} here; the daemon serves {welcome.model!r}"
        raise HTTPError(404, message, code="model_not_found", param="model")


def _reason(error: web.HTTPException) -> str:
    if error.status == 413:
        return f"the body has more than {MAX_BODY_BYTES} bytes"
    return {404: "there is no such endpoint", 405: "this endpoint has another method"}.get(error.status, error.reason)


def _kept_headers(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def _json(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = _dumps(value) + b"\n"  # for people with curl
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _dumps(value: dict[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")  # names that a caller chose may hold what UTF-8 does not have
