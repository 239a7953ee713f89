"""What comes over HTTP, turned into what the client library takes. All that is wrong is an InvalidArgument, or
Unsupported, whose `field` is the name that the caller used.

Fields that cannot change an answer (`user`, `metadata`, ...) are ignored, fields that could and are not supported are
refused unless they ask for nothing, and unknown ones are refused, so that a slip of the pen is noticed. null is absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..requests import Prompt
from ..sampling_params import MAX_LOGPROBS, SamplingParams
from ..wire.errors import InvalidArgument, KVPoolError, Unsupported
from ..wire.messages import MAX_CHAT_MESSAGES, MAX_DEADLINE_S, MAX_PRIORITY, POOLINGS, ChatMessage
from ..wire.schema import Choice, Flag, Integer, Mismatch, Real, Spec, Text

MAX_PROMPTS = 128
MAX_EMBEDDINGS = 2048
MAX_NAME_BYTES = 256

SAMPLING = frozenset(field.name for field in fields(SamplingParams)) - {"logprobs", "prompt_logprobs"}
IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
ASKS_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
}


@dataclass(frozen=True, slots=True)
class Completion:
    """A request for text: of one conversation, or of one or more prompts, each answered `params.n` times."""

    model: str | None
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    priority: int
    deadline_s: float | None
    names: Mapping[str, str]  # what the caller called a field that the client library calls otherwise


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A request for one vector of each prompt."""

    model: str | None
    prompts: tuple[Prompt, ...]
    pooling: str
    as_base64: bool
    priority: int
    deadline_s: float | None


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidArgument."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise InvalidArgument("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("the body must be a JSON object")
    return value


def parse_chat(body: Mapping[str, Any]) -> Completion:
    """The body of /v1/chat/completions."""
    fields = _Fields(body)
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_CHAT_MESSAGES:
        raise InvalidArgument(f"must be an array of 1 to {MAX_CHAT_MESSAGES} messages", field="messages")
    turns = tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))
    names = {}
    if "max_completion_tokens" in fields:
        if "max_tokens" in fields:
            raise InvalidArgument("give either this or max_tokens", field="max_completion_tokens")
        names["max_tokens"] = "max_completion_tokens"
    wants_logprobs = fields.take("logprobs", Flag(), False)
    count = fields.take("top_logprobs", Integer(0, MAX_LOGPROBS), None)
    if count is not None and not wants_logprobs:
        raise InvalidArgument("needs logprobs to be true", field="top_logprobs")
    return _completion(fields, (turns,), names, (count or 0) if wants_logprobs else None)


def parse_completion(body: Mapping[str, Any]) -> Completion:
    """The body of /v1/completions."""
    fields = _Fields(body)
    prompts = _prompts(fields.raw("prompt"), "prompt", MAX_PROMPTS)
    return _completion(fields, prompts, {}, fields.take("logprobs", Integer(0, MAX_LOGPROBS), None))


def parse_embeddings(body: Mapping[str, Any]) -> Embeddings:
    """The body of /v1/embeddings."""
    fields = _Fields(body)
    if "dimensions" in fields:
        raise Unsupported("vectors have the model's own size", field="dimensions")
    asked = Embeddings(
        model=fields.take("model", Text(MAX_NAME_BYTES), None),
        prompts=_prompts(fields.raw("input"), "input", MAX_EMBEDDINGS),
        pooling=fields.take("pooling", Choice(POOLINGS), "mean"),
        as_base64=fields.take("encoding_format", Choice(("float", "base64")), "float") == "base64",
        priority=fields.take("priority", Integer(-MAX_PRIORITY, MAX_PRIORITY), 0),
        deadline_s=fields.take("deadline_s", Real(0.0, MAX_DEADLINE_S), None),
    )
    fields.refuse_others()
    return asked


def renamed(error: KVPoolError, names: Mapping[str, str]) -> KVPoolError:
    """The same error, its field called as the caller called it."""
    if error.field is not None:
        name, bracket, rest = error.field.partition("[")
        error.field = names.get(name, name) + bracket + rest
    return error


def _completion(
    fields: _Fields, prompts: tuple[Prompt, ...], names: dict[str, str], logprobs: int | None
) -> Completion:
    sampling = {name: fields.raw(names.get(name, name)) for name in SAMPLING if names.get(name, name) in fields}
    if isinstance(bias := sampling.get("logit_bias"), dict):
        sampling["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
    try:
        params = SamplingParams(**sampling, logprobs=logprobs)
    except InvalidArgument as error:
        raise renamed(error, names) from None
    stream = fields.take("stream", Flag(), False)
    asked = Completion(
        model=fields.take("model", Text(MAX_NAME_BYTES), None),
        prompts=prompts,
        params=params,
        stream=stream,
        include_usage=_include_usage(fields.raw("stream_options"), stream),
        priority=fields.take("priority", Integer(-MAX_PRIORITY, MAX_PRIORITY), 0),
        deadline_s=fields.take("deadline_s", Real(0.0, MAX_DEADLINE_S), None),
        names=names,
    )
    fields.refuse_others()
    return asked


class _Fields:
    """An object's fields, each taken once; what is left at the end was not understood."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def raw(self, name: str) -> Any:
        return self._left.pop(name, None)

    def take(self, name: str, spec: Spec, default: Any) -> Any:
        """The checked value, or `default` where there is none."""
        if name not in self._left:
            return default
        try:
            return spec.check(self._left.pop(name))
        except Mismatch as fault:
            inside = fault.inside(name)
            raise InvalidArgument(inside.message, field=inside.path) from None

    def refuse_others(self) -> None:
        for name, value in self._left.items():
            if name in ASKS_FOR_NOTHING and value not in ASKS_FOR_NOTHING[name]:
                raise Unsupported("is not supported here", field=name)
            if name not in ASKS_FOR_NOTHING and name not in IGNORED:
                raise InvalidArgument("is not a parameter of this request", field=name[:64])


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise InvalidArgument("needs stream to be true", field="stream_options")
    if not isinstance(options, dict) or not options.keys() <= {"include_usage", "include_obfuscation"}:
        raise InvalidArgument("must be an object with include_usage", field="stream_options")
    wanted = options.get("include_usage", False)
    if not isinstance(wanted, bool):
        raise InvalidArgument("must be true or false", field="stream_options.include_usage")
    return wanted


def _prompts(value: Any, field: str, most: int) -> tuple[Prompt, ...]:
    """Text, token ids, or an array of either."""
    if isinstance(value, str) or _is_ids(value):
        return (value,)
    if isinstance(value, list) and value and all(isinstance(item, str) or _is_ids(item) for item in value):
        if len(value) > most:
            raise InvalidArgument(f"must have at most {most} items, not {len(value)}", field=field)
        return tuple(value)
    raise InvalidArgument("must be text, an array of token ids, or an array of either", field=field)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _message(message: Any, field: str) -> ChatMessage:
    """A turn. `name` and `tool_call_id` are not shown to the model, as templates rarely have a place for them; others,
    such as the `refusal` of an answer that is sent back, must be null or empty."""
    if not isinstance(message, dict):
        raise InvalidArgument("must be an object with role and content", field=field)
    for name, value in message.items():
        if name not in ("role", "content", "name", "tool_call_id") and value not in (None, [], ""):
            raise Unsupported("is not supported here", field=f"{field}.{name[:64]}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidArgument("must be text", field=f"{field}.role")
    return ChatMessage(role, _content(content, f"{field}.content"))


def _content(content: Any, field: str) -> str:
    """Text, also where it comes in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument("must be text, or an array of parts", field=field)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise Unsupported("must be of type text", field=f"{field}[{number}]")
        if not isinstance(part.get("text"), str):
            raise InvalidArgument("must be text", field=f"{field}[{number}].text")
        texts.append(part["text"])
    return "".join(texts)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found
