"""What a caller passes, turned into messages, and refused here where the daemon's stated limits already say no."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sampling_params import SamplingParams
from .wire.errors import InvalidArgument, TooLong, Unsupported
from .wire.messages import HIDDEN_LAYERS_SINCE, ChatMessage, Generate, ServerLimits, Submit, Welcome
from .wire.schema import Mismatch
from .wire.token_ids import ITEM_BYTES, pack_token_ids, unpack_token_ids

Chat = Sequence[ChatMessage | Mapping[str, str]]
Prompt = str | Sequence[int] | NDArray[Any] | Chat
"""Text, token ids, or the turns of a conversation: `{"role": "user", "content": "..."}`."""

DEFAULT_WINDOW = 256
"""Tokens of each sample that the daemon may send ahead of the reader."""

LOGITS_WINDOW = 32
"""The same where each brings a row as wide as the vocabulary: as many as the smallest arena has places for."""

DEFAULT_RECONNECT_S = 1.5
"""How long open requests wait for a daemon to listen again: where none comes, they have failed within two seconds."""


EMBED_PARAMS = SamplingParams(max_tokens=0)
"""Of a request that only wants its prompt embedded."""


def new_id() -> str:
    """A name that nobody else has chosen."""
    return secrets.token_hex(8)


def split_prompt(prompt: Prompt) -> tuple[str | bytes | None, tuple[ChatMessage, ...] | None]:
    """(prompt, messages) as Submit takes them: one of the two. Raises InvalidArgument naming the part that is wrong."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, np.ndarray) and not isinstance(prompt, Sequence):
        raise InvalidArgument(f"must be text, token ids or chat messages, not {type(prompt).__name__}", field="prompt")
    if len(prompt) and isinstance(prompt[0], Mapping | ChatMessage):
        return None, tuple(_chat_message(turn, number) for number, turn in enumerate(prompt))
    try:
        return pack_token_ids(prompt), None  # type: ignore[arg-type]  # checked item by item in there
    except Mismatch as fault:
        raise InvalidArgument(fault.message, field=f"prompt{fault.path}") from None


def _chat_message(turn: object, number: int) -> ChatMessage:
    if isinstance(turn, ChatMessage):
        return turn
    if not isinstance(turn, Mapping) or set(turn) != {"role", "content"}:
        raise InvalidArgument("must have exactly the keys role and content", field=f"messages[{number}]")
    return ChatMessage(turn["role"], turn["content"])


def check_prompt(prompt: str | bytes | None, limits: ServerLimits) -> None:
    """Refuse token ids that this daemon could never take. Text is counted there."""
    if not isinstance(prompt, bytes):
        return
    num_tokens = len(prompt) // ITEM_BYTES
    if limits.max_model_len and num_tokens > limits.max_model_len:
        raise TooLong(
            f"has {num_tokens} tokens, and the daemon's max_model_len is {limits.max_model_len}", field="prompt"
        )
    outside = unpack_token_ids(prompt) >= limits.vocab_size
    if limits.vocab_size and outside.any():
        raise InvalidArgument(
            f"must be below the model's vocab_size {limits.vocab_size}", field=f"prompt[{int(outside.argmax())}]"
        )


def merge_params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    """`params` with single values replaced. Raises InvalidArgument for a name that SamplingParams does not have."""
    try:
        return replace(params, **overrides) if params is not None else SamplingParams(**overrides)
    except TypeError:
        known = SamplingParams.__dataclass_fields__
        wrong = next((name for name in overrides if name not in known), None)
        if wrong is None:
            raise
        raise InvalidArgument(f"is not a sampling parameter; there are {', '.join(known)}", field=wrong) from None


def beam_params(
    width: int, max_tokens: int, n: int | None, length_penalty: float, early_stopping: bool
) -> SamplingParams:
    """Those of a beam search; InvalidArgument names `beam_width` for a width out of range."""
    if width < 1:
        raise InvalidArgument("must be at least 1", field="width")
    return SamplingParams(
        max_tokens=max_tokens,
        beam_width=width,
        n=width if n is None else n,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        logprobs=0,
    )


def layer_numbers(layers: Iterable[int]) -> tuple[int, ...]:
    """`layers` as the wire takes them. Raises InvalidArgument."""
    try:
        return tuple(operator.index(layer) for layer in layers)
    except TypeError:
        raise InvalidArgument("must be layers' numbers, as in [0, -1]", field="hidden_layers") from None


@dataclass(frozen=True, slots=True)
class Options:
    """How a request runs, besides what is sampled."""

    priority: int = 0
    deadline_s: float | None = None
    request_id: str | None = None  # None: a fresh one
    keep: bool = False
    linger_s: float = 0.0
    want_text: bool = True
    window: int | None = DEFAULT_WINDOW  # None: everything may come at once
    want_logits: bool = False
    pooling: str | None = None
    hidden_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InvalidArgument("must be at least 1 token, or None for no limit", field="window")

    @property
    def credit(self) -> int | None:
        """Tokens that may come before the first is read."""
        if not self.want_logits:
            return self.window
        return LOGITS_WINDOW if self.window is None else min(self.window, LOGITS_WINDOW)


def make_submit(welcome: Welcome, prompt: Prompt, params: SamplingParams, options: Options) -> Submit:
    """The message that starts a request. Raises InvalidArgument, TooLong naming max_model_len, or Unsupported for what
    the daemon's version of the protocol has no word for."""
    if options.hidden_layers and welcome.version < HIDDEN_LAYERS_SINCE:
        raise Unsupported(f"the daemon speaks version {welcome.version} of the protocol", field="hidden_layers")
    text_or_ids, messages = split_prompt(prompt)
    check_prompt(text_or_ids, welcome.limits)
    return Submit(
        request_id=new_id() if options.request_id is None else options.request_id,
        prompt=text_or_ids,
        messages=messages,
        params=params.to_wire(),
        priority=options.priority,
        deadline_s=options.deadline_s,
        credit=options.credit,
        want_text=options.want_text,
        keep=options.keep,
        linger_s=options.linger_s,
        want_logits=options.want_logits,
        pooling=options.pooling,
        hidden_layers=options.hidden_layers,
    )


def make_generate(sequence_id: str, params: SamplingParams, options: Options) -> Generate:
    """The message that goes on from the end of a sequence."""
    return Generate(
        request_id=new_id() if options.request_id is None else options.request_id,
        sequence_id=sequence_id,
        params=params.to_wire(),
        priority=options.priority,
        deadline_s=options.deadline_s,
        credit=options.window,
        want_text=options.want_text,
    )
