"""The client for ordinary programs: every method waits, with a limit, and threads may share it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import calls
from .address import Whereabouts
from .arena.pool_map import PoolMap
from .calls import Question
from .connection import Connection
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
from .stream import Stream
from .trace import Recording
from .wire.messages import Welcome

T = TypeVar("T")


class Client:
    """A session with the daemon at `address` (None: `$KVPOOL_ADDRESS`, else where a daemon is found). It connects at
    the first use, and again by itself at the first use after a loss.

    `timeout_s` limits connecting and every call; `stream_timeout_s` limits the wait for each next token. Every method
    raises a KVPoolError: ConnectionLost, Timeout, or what the daemon answers.

    When the daemon is killed or restarted, open requests go on with the next one, no token lost or doubled, if that
    listens within `reconnect_s` (it may then take up to `timeout_s` to be ready). 0: they fail at once.

    `arena=False`: everything goes through messages, as with a daemon of another machine; the results are the same.

    `address` may be `tcp://HOST:PORT` of another machine: then `key_file` is this client's (`kvpool keygen` makes it),
    and `server_key` the daemon's public key or a file with it; None: `$KVPOOL_KEY_FILE` and `$KVPOOL_SERVER_KEY`.
    """

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
        self._connection = Connection(where, timeout_s, client_name, reconnect_s, arena=arena)
        self._stream_timeout_s = stream_timeout_s

    # ---- the connection

    def connect(self) -> Welcome:
        """Connect now, and say to whom: epoch, model, limits."""
        return self._connection.connect()

    def close(self) -> None:
        """Hang up; unfinished requests are cancelled. Idempotent."""
        self._connection.close()

    def __enter__(self) -> Client:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- requests

    def submit(
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
    ) -> Stream:
        """Start a request on text, token ids or chat messages, and return at once. `sampling` replaces single values of
        `params`.

        Higher `priority` goes first; `deadline_s` from now it ends with finish_reason `deadline`; with `linger_s` it
        survives a lost connection for that long; `window` is how many tokens may be sent ahead of the reader. With
        `want_logits` each event has the raw logits its token was drawn from, which only an arena can carry. With
        `hidden_layers` ([0, 12, -1]: the first, the thirteenth, the last) each event has the outputs of these layers
        that its token was drawn from, and the result has the prompt's, too, which is all computed for that.
        """
        layers = layer_numbers(hidden_layers)
        options = Options(
            priority, deadline_s, request_id, keep, linger_s, want_text, window, want_logits, hidden_layers=layers
        )
        return self._submit(prompt, merge_params(params, sampling), options)

    def _submit(self, prompt: Prompt, params: SamplingParams, options: Options) -> Stream:
        message = make_submit(self._connection.connect(), prompt, params, options)
        with self._connection.using() as core:
            state = core.submit(message, params.n, options.linger_s)
        return Stream(self._connection, state, self._stream_timeout_s)

    def generate(
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
        """Submit and wait for the result, at most `timeout_s` in all; leaving early cancels the request."""
        layers = layer_numbers(hidden_layers)
        options = Options(priority, deadline_s, request_id, keep, linger_s, window=None, hidden_layers=layers)
        with self._submit(prompt, merge_params(params, sampling), options) as stream:
            return stream.result(timeout_s)

    def embed(
        self,
        prompts: Items[Prompt],
        *,
        pooling: str = "mean",
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """One vector for each prompt, (len(prompts), hidden_size): the mean of its tokens' hidden states after the
        model's last norm, or (pooling="last") the last token's. Not scaled to length 1."""
        options = Options(priority, deadline_s, want_text=False, window=None, pooling=pooling)
        streams = [self._submit(prompt, EMBED_PARAMS, options) for prompt in prompts]
        try:
            return stack_embeddings([stream.result(timeout_s) for stream in streams])
        finally:
            for stream in streams:
                stream.close()

    def beam_search(
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
        """The `n` likeliest answers (None: `width`) that a search with `width` beams finds, best first, with the
        logprob of every token. `options` are those of `generate`."""
        params = beam_params(width, max_tokens, n, length_penalty, early_stopping)
        return self.generate(prompt, params, timeout_s=timeout_s, **options)

    def chat(self, messages: Prompt, params: SamplingParams | None = None, **options: Any) -> Result:
        """`generate` for the turns of a conversation, `{"role": ..., "content": ...}` each."""
        return self.generate(messages, params, **options)

    def follow(self, request_id: str, *, window: int | None = DEFAULT_WINDOW) -> Stream:
        """Go on with a request that another process of this user (or an earlier connection) started, from its first
        token. Raises NotFound through the stream when there is no such request."""
        self._connection.connect()
        with self._connection.using() as core:
            state = core.attach(request_id, window)
        return Stream(self._connection, state, self._stream_timeout_s)

    # ---- calls

    def _ask(self, question: Question[T]) -> T:
        self._connection.connect()
        with self._connection.using() as core:
            pending = core.call(question.make, question.name)
        try:
            self._connection.wait(
                lambda: True if pending.done else None, self._connection.timeout_s, "timeout_s", question.name
            )
        except BaseException:
            with self._connection.using() as core:
                core.forget(pending)
            raise
        return question.read(pending.value())

    def stats(self) -> dict[str, Any]:
        """Figures of the daemon, by name."""
        return self._ask(calls.stats())

    def ps(self) -> list[dict[str, Any]]:
        """One row per sequence, with its owner, state and the reason it waits."""
        return self._ask(calls.ps())

    def pool_map(self) -> PoolMap:
        """State, owner and reference count of every block, with the rows of `ps` and the figures of `stats`."""
        return self._ask(calls.pool_map())

    def fsck(self) -> dict[str, Any]:
        """Audit the pool: `consistent`, and what is not."""
        return self._ask(calls.fsck())

    def trace(self, seconds: float) -> dict[str, Any]:
        """What the daemon does in the next `seconds`, as a trace that Perfetto and Chrome open once it is JSON. For
        administrators."""
        recording = Recording()
        self._ask(calls.trace(seconds))
        time.sleep(seconds)
        while recording.more:
            recording.add(self._ask(calls.trace_spans()))
        return recording.chrome()

    def cancel(self, request_id: str) -> dict[str, Any]:
        """Cancel a request of this user (or, for an administrator, of anyone)."""
        return self._ask(calls.cancel(request_id))

    def drain(self) -> dict[str, Any]:
        """Take no new work, finish what runs, then stop. For administrators."""
        return self._ask(calls.drain())

    def reload(self) -> dict[str, Any]:
        """Read the configuration again. For administrators."""
        return self._ask(calls.reload())

    def resize(self, pool_bytes: int) -> dict[str, Any]:
        """Give the pool another size. For administrators."""
        return self._ask(calls.resize(pool_bytes))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, as the model's tokenizer makes them of a prompt."""
        return self._ask(calls.tokenize(text))

    def detokenize(self, token_ids: list[int] | NDArray[np.int32]) -> str:
        """The text of token ids."""
        return self._ask(calls.detokenize(token_ids))

    # ---- sequences

    def open(
        self, prompt: Prompt = "", *, keep: bool = False, linger_s: float = 0.0, sequence_id: str | None = None
    ) -> Sequence:
        """Make a sequence that can be appended to, forked and generated from. With `keep` it outlives this client."""
        name = new_id() if sequence_id is None else sequence_id
        return Sequence(self, name, self._ask(calls.open_sequence(name, prompt, keep, linger_s)), keep)

    def attach(self, sequence_id: str) -> Sequence:
        """Use a sequence that another process made, and leave it when done."""
        return Sequence(self, sequence_id, self._ask(calls.attach_sequence(sequence_id)), keep=True)

    def restore(self, name: str, *, sequence_id: str | None = None) -> Sequence:
        """Make a sequence from what `save(name)` stored."""
        new_name = new_id() if sequence_id is None else sequence_id
        return Sequence(self, new_name, self._ask(calls.restore(new_name, name)), keep=False)

    def snapshots(self) -> list[dict[str, Any]]:
        """What this user has saved: `name`, `size` in bytes, `saved_at` in seconds since 1970."""
        return self._ask(calls.snapshots())

    def discard(self, name: str) -> None:
        """Remove what `save(name)` stored."""
        self._ask(calls.discard(name))

    def pins(self) -> list[dict[str, Any]]:
        """What this user has pinned: `pin_id`, `num_blocks`, `expires_in_s` (None: never)."""
        return self._ask(calls.pins())

    def unpin(self, pin_id: int) -> None:
        """Let go of what `Sequence.pin` keeps."""
        self._ask(calls.unpin(pin_id))


class Sequence:
    """A sequence in the daemon: tokens, their blocks, and a name. A context manager that closes it unless kept."""

    def __init__(self, client: Client, sequence_id: str, num_tokens: int, keep: bool) -> None:
        self._client = client
        self._keep = keep
        self.sequence_id = sequence_id
        self.num_tokens = num_tokens  # when last told; generating adds to it

    def append(self, prompt: Prompt) -> None:
        """Add text, token ids or chat messages at the end."""
        self.num_tokens = self._client._ask(calls.append(self.sequence_id, prompt))

    def submit(
        self,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        request_id: str | None = None,
        want_text: bool = True,
        window: int | None = DEFAULT_WINDOW,
        **sampling: Any,
    ) -> Stream:
        """Generate from the end, as a stream. What is generated becomes part of the sequence."""
        options = Options(priority, deadline_s, request_id, want_text=want_text, window=window)
        connection = self._client._connection
        connection.connect()
        merged = merge_params(params, sampling)
        message = make_generate(self.sequence_id, merged, options)
        with connection.using() as core:
            state = core.submit(message, merged.n)
        return Stream(connection, state, self._client._stream_timeout_s)

    def generate(
        self, params: SamplingParams | None = None, *, timeout_s: float | None = None, **options: Any
    ) -> Result:
        """Generate from the end and wait for the result."""
        with self.submit(params, window=None, **options) as stream:
            result = stream.result(timeout_s)
        self.num_tokens += len(result.token_ids)
        return result

    def fork(self, at: int | None = None, *, sequence_id: str | None = None) -> Sequence:
        """Another sequence with the same first `at` tokens (None: all). Blocks are shared, nothing is copied."""
        name = new_id() if sequence_id is None else sequence_id
        return Sequence(self._client, name, self._client._ask(calls.fork(self.sequence_id, name, at)), self._keep)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens."""
        self.num_tokens = self._client._ask(calls.truncate(self.sequence_id, num_tokens))

    def save(self, name: str) -> None:
        """Store the sequence with its computed blocks, under a name of this user."""
        self._client._ask(calls.save(self.sequence_id, name))

    def kv(self) -> SequenceKV:
        """A copy of its keys and values, of all layers, as attention reads them; of a sequence of this user. Of the
        tokens that are computed: an answer's last one is not, nor is anything before the first answer. Busy where its
        blocks change meanwhile."""
        pieces = KVPieces()
        while pieces.missing:
            pieces.add(self._client._ask(calls.read_kv(self.sequence_id, pieces.position)))
        return pieces.whole()

    def share(self, *, uid: int | None = None, gid: int | None = None) -> None:
        """Let another user, or a group, attach to it and fork it."""
        self._client._ask(calls.share(self.sequence_id, uid, gid))

    def pin(self, num_tokens: int | None = None, *, ttl_s: float | None = None) -> int:
        """Keep its computed full blocks in the pool, or those of its first `num_tokens`, also after it is closed, until
        `Client.unpin` or for `ttl_s`. The pin's id. A prompt that begins alike finds them."""
        return self._client._ask(calls.pin(self.sequence_id, num_tokens, ttl_s))

    def publish(self, num_tokens: int | None = None) -> int:
        """Let prompts of all users find its computed full blocks, or those of its first `num_tokens`: how many blocks.
        Who sends the same tokens can tell, by the time that it takes, that somebody published them."""
        return self._client._ask(calls.publish(self.sequence_id, num_tokens))

    def close(self) -> None:
        """Give it up, kept or not; blocks that nothing else shares become free."""
        self._client._ask(calls.close(self.sequence_id))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._keep:
            self.close()
