"""The client for asyncio: the methods of `Client`, awaited. It belongs to the event loop that first connects it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import calls
from .address import Whereabouts
from .aio_connection import AsyncConnection
from .aio_stream import AsyncStream
from .arena.pool_map import PoolMap
from .calls import Question
from .keys_values import KVPieces, SequenceKV
from .requests import (
    DEFAULT_RECONNECT_S,
    DEFAULT_WINDOW,
    EMBED_PARAMS,
    Options,
    Prompt,
    beam_params,
    layer_numbers,
    make_generate,
    make_submit,
    merge_params,
    new_id,
)
from .results import Result, stack_embeddings
from .sampling_params import SamplingParams
from .trace import Recording
from .wire.messages import Generate, Submit, Welcome

T = TypeVar("T")


class AsyncClient:
    """As `Client`, for asyncio: `async with AsyncClient() as pool: stream = await pool.submit(...)`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = 30.0,
        stream_timeout_s: float = 600.0,
        client_name: str = "",
        reconnect_s: float = DEFAULT_RECONNECT_S,
        arena: bool = True,
        server_key: str | None = None,
        key_file: str | None = None,
    ) -> None:
        where = Whereabouts(address, server_key, key_file)
        self._connection = AsyncConnection(where, timeout_s, client_name, reconnect_s, arena=arena)
        self._stream_timeout_s = stream_timeout_s

    async def connect(self) -> Welcome:
        """Connect now, and say to whom: epoch, model, limits."""
        return await self._connection.connect()

    async def close(self) -> None:
        """Hang up; unfinished requests are cancelled. Idempotent."""
        self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    # ---- requests

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        request_id: str | None = None,
        keep: bool = False,
        linger_s: float = 0.0,
        want_text: bool = True,
        want_logits: bool = False,
        hidden_layers: Items[int] = (),
        window: int | None = DEFAULT_WINDOW,
        **sampling: Any,
    ) -> AsyncStream:
        """As `Client.submit`."""
        layers = layer_numbers(hidden_layers)
        options = Options(
            priority, deadline_s, request_id, keep, linger_s, want_text, window, want_logits, hidden_layers=layers
        )
        return await self._submit(prompt, merge_params(params, sampling), options)

    async def _submit(self, prompt: Prompt, params: SamplingParams, options: Options) -> AsyncStream:
        welcome = await self._connection.connect()
        return self._start(make_submit(welcome, prompt, params, options), params.n, options.linger_s)

    def _start(self, message: Submit | Generate, num_samples: int, linger_s: float = 0.0) -> AsyncStream:
        state = self._connection.core.submit(message, num_samples, linger_s)
        self._connection.flush()
        return AsyncStream(self._connection, state, self._stream_timeout_s)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        request_id: str | None = None,
        keep: bool = False,
        linger_s: float = 0.0,
        hidden_layers: Items[int] = (),
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Result:
        """As `Client.generate`."""
        layers = layer_numbers(hidden_layers)
        options = Options(priority, deadline_s, request_id, keep, linger_s, window=None, hidden_layers=layers)
        async with await self._submit(prompt, merge_params(params, sampling), options) as stream:
            return await stream.result(timeout_s)

    async def embed(
        self,
        prompts: Items[Prompt],
        *,
        pooling: str = "mean",
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """As `Client.embed`."""
        options = Options(priority, deadline_s, want_text=False, window=None, pooling=pooling)
        streams = [await self._submit(prompt, EMBED_PARAMS, options) for prompt in prompts]
        try:
            return stack_embeddings([await stream.result(timeout_s) for stream in streams])
        finally:
            for stream in streams:
                stream.close()

    async def beam_search(
        self,
        prompt: Prompt,
        *,
        width: int,
        max_tokens: int,
        n: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Result:
        """As `Client.beam_search`."""
        params = beam_params(width, max_tokens, n, length_penalty, early_stopping)
        return await self.generate(prompt, params, timeout_s=timeout_s, **options)

    async def chat(self, messages: Prompt, params: SamplingParams | None = None, **options: Any) -> Result:
        """As `Client.chat`."""
        return await self.generate(messages, params, **options)

    async def follow(self, request_id: str, *, window: int | None = DEFAULT_WINDOW) -> AsyncStream:
        """As `Client.follow`."""
        await self._connection.connect()
        state = self._connection.core.attach(request_id, window)
        self._connection.flush()
        return AsyncStream(self._connection, state, self._stream_timeout_s)

    # ---- calls

    async def _ask(self, question: Question[T]) -> T:
        connection = self._connection
        await connection.connect()
        changed = asyncio.Event()
        pending = connection.core.call(question.make, question.name)
        pending.on_change = changed.set
        try:
            await connection.wait(
                changed, lambda: True if pending.done else None, connection.timeout_s, "timeout_s", question.name
            )
        except BaseException:
            connection.core.forget(pending)
            raise
        return question.read(pending.value())

    async def stats(self) -> dict[str, Any]:
        """As `Client.stats`."""
        return await self._ask(calls.stats())

    async def ps(self) -> list[dict[str, Any]]:
        """As `Client.ps`."""
        return await self._ask(calls.ps())

    async def pool_map(self) -> PoolMap:
        """As `Client.pool_map`."""
        return await self._ask(calls.pool_map())

    async def fsck(self) -> dict[str, Any]:
        """As `Client.fsck`."""
        return await self._ask(calls.fsck())

    async def trace(self, seconds: float) -> dict[str, Any]:
        """As `Client.trace`."""
        recording = Recording()
        await self._ask(calls.trace(seconds))
        await asyncio.sleep(seconds)
        while recording.more:
            recording.add(await self._ask(calls.trace_spans()))
        return recording.chrome()

    async def cancel(self, request_id: str) -> dict[str, Any]:
        """As `Client.cancel`."""
        return await self._ask(calls.cancel(request_id))

    async def drain(self) -> dict[str, Any]:
        """As `Client.drain`."""
        return await self._ask(calls.drain())

    async def reload(self) -> dict[str, Any]:
        """As `Client.reload`."""
        return await self._ask(calls.reload())

    async def resize(self, pool_bytes: int) -> dict[str, Any]:
        """As `Client.resize`."""
        return await self._ask(calls.resize(pool_bytes))

    async def tokenize(self, text: str) -> list[int]:
        """As `Client.tokenize`."""
        return await self._ask(calls.tokenize(text))

    async def detokenize(self, token_ids: list[int] | NDArray[np.int32]) -> str:
        """As `Client.detokenize`."""
        return await self._ask(calls.detokenize(token_ids))

    # ---- sequences

    async def open(
        self, prompt: Prompt = "", *, keep: bool = False, linger_s: float = 0.0, sequence_id: str | None = None
    ) -> AsyncSequence:
        """As `Client.open`."""
        name = new_id() if sequence_id is None else sequence_id
        return AsyncSequence(self, name, await self._ask(calls.open_sequence(name, prompt, keep, linger_s)), keep)

    async def attach(self, sequence_id: str) -> AsyncSequence:
        """As `Client.attach`."""
        return AsyncSequence(self, sequence_id, await self._ask(calls.attach_sequence(sequence_id)), keep=True)

    async def restore(self, name: str, *, sequence_id: str | None = None) -> AsyncSequence:
        """As `Client.restore`."""
        new_name = new_id() if sequence_id is None else sequence_id
        return AsyncSequence(self, new_name, await self._ask(calls.restore(new_name, name)), keep=False)

    async def snapshots(self) -> list[dict[str, Any]]:
        """As `Client.snapshots`."""
        return await self._ask(calls.snapshots())

    async def discard(self, name: str) -> None:
        """As `Client.discard`."""
        await self._ask(calls.discard(name))

    async def pins(self) -> list[dict[str, Any]]:
        """As `Client.pins`."""
        return await self._ask(calls.pins())

    async def unpin(self, pin_id: int) -> None:
        """As `Client.unpin`."""
        await self._ask(calls.unpin(pin_id))


class AsyncSequence:
    """As `Sequence`, for asyncio."""

    def __init__(self, client: AsyncClient, sequence_id: str, num_tokens: int, keep: bool) -> None:
        self._client = client
        self._keep = keep
        self.sequence_id = sequence_id
        self.num_tokens = num_tokens

    async def append(self, prompt: Prompt) -> None:
        """As `Sequence.append`."""
        self.num_tokens = await self._client._ask(calls.append(self.sequence_id, prompt))

    async def submit(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        request_id: str | None = None,
        want_text: bool = True,
        window: int | None = DEFAULT_WINDOW,
        **sampling: Any,
    ) -> AsyncStream:
        """As `Sequence.submit`."""
        options = Options(priority, deadline_s, request_id, want_text=want_text, window=window)
        await self._client.connect()
        merged = merge_params(params, sampling)
        return self._client._start(make_generate(self.sequence_id, merged, options), merged.n)

    async def generate(
        self, params: SamplingParams | None = None, *, timeout_s: float | None = None, **options: Any
    ) -> Result:
        """As `Sequence.generate`."""
        async with await self.submit(params, window=None, **options) as stream:
            result = await stream.result(timeout_s)
        self.num_tokens += len(result.token_ids)
        return result

    async def fork(self, at: int | None = None, *, sequence_id: str | None = None) -> AsyncSequence:
        """As `Sequence.fork`."""
        name = new_id() if sequence_id is None else sequence_id
        num_tokens = await self._client._ask(calls.fork(self.sequence_id, name, at))
        return AsyncSequence(self._client, name, num_tokens, self._keep)

    async def truncate(self, num_tokens: int) -> None:
        """As `Sequence.truncate`."""
        self.num_tokens = await self._client._ask(calls.truncate(self.sequence_id, num_tokens))

    async def save(self, name: str) -> None:
        """As `Sequence.save`."""
        await self._client._ask(calls.save(self.sequence_id, name))

    async def kv(self) -> SequenceKV:
        """As `Sequence.kv`."""
        pieces = KVPieces()
        while pieces.missing:
            pieces.add(await self._client._ask(calls.read_kv(self.sequence_id, pieces.position)))
        return pieces.whole()

    async def share(self, *, uid: int | None = None, gid: int | None = None) -> None:
        """As `Sequence.share`."""
        await self._client._ask(calls.share(self.sequence_id, uid, gid))

    async def pin(self, num_tokens: int | None = None, *, ttl_s: float | None = None) -> int:
        """As `Sequence.pin`."""
        return await self._client._ask(calls.pin(self.sequence_id, num_tokens, ttl_s))

    async def publish(self, num_tokens: int | None = None) -> int:
        """As `Sequence.publish`."""
        return await self._client._ask(calls.publish(self.sequence_id, num_tokens))

    async def close(self) -> None:
        """As `Sequence.close`."""
        await self._client._ask(calls.close(self.sequence_id))

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._keep:
            await self.close()
