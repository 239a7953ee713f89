"""What a request may ask about sampling, under the names that users of vLLM and OpenAI know.

A `SamplingParams` that exists is valid as far as that can be known without the model: types and ranges are checked when
it is made, and `validate` checks the rest against a vocabulary and a context length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from .wire.errors import InvalidArgument
from .wire.schema import Flag, Integer, ListOf, Mismatch, Optional, Real, Spec, Text, record_of, refuse
from .wire.token_ids import PackedTokenIds, pack_token_ids, unpack_token_ids

DEFAULT_MAX_TOKENS = 128
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_N = 128
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # each beam has twice as many candidates
MAX_BEAM_TOKENS = 4096  # they come in one message
MAX_LENGTH_PENALTY = 10.0
MAX_STOPS = 32
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 65536


@dataclass(frozen=True, slots=True)
class Distinct:
    """An array in which nothing occurs twice."""

    items: ListOf

    def check(self, value: Any) -> tuple[Any, ...]:
        checked = self.items.check(value)
        if len(set(checked)) != len(checked):
            raise Mismatch("must not name anything twice")
        return checked

    def describe(self) -> str:
        return f"{self.items.describe()}, none twice"


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A map from token id to what is added to its logit."""

    token_id: Integer
    bias: Real
    max_items: int

    def check(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise refuse(self, value)
        if len(value) > self.max_items:
            raise Mismatch(f"must have at most {self.max_items} entries, not {len(value)}")
        kept: dict[int, float] = {}
        for key, bias in value.items():
            token_id = self.token_id.check(_plain(key))
            try:
                kept[token_id] = self.bias.check(_plain(bias))
            except Mismatch as fault:
                raise fault.inside(f"[{token_id}]") from None
        if len(kept) != len(value):
            raise Mismatch("must not name a token twice")
        return kept

    def describe(self) -> str:
        return f"a map from token id to {self.bias.describe()}"


_TOKEN_ID = Integer(0, MAX_TOKEN_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when they end.

    The defaults are those of vLLM and OpenAI (the model's own distribution: temperature 1, nothing cut off), but for
    `max_tokens`, where 16 is too short to read and no limit would hold blocks for an answer that nobody reads.

    Every wrong type or value raises InvalidArgument with `field` and the allowed range. Where a single string or a list
    is given for a tuple it is kept as a tuple; NumPy scalars and arrays are taken as Python's.

    max_tokens: most tokens to generate; 0 only computes the prompt.
    min_tokens: no end (by a stop token or the model's end of text) before this many tokens.
    temperature: 0 is greedy (the lowest token id among equals); otherwise logits are divided by it.
    top_k: draw from the k most likely; 0 or -1, or the whole vocabulary and more: off.
    top_p: draw from the fewest most likely tokens whose probabilities sum to it; 1: off, 0: the most likely token.
    min_p: leave out what is less likely than min_p times the most likely; 0: off.
    seed: the same seed gives the same tokens whatever else the daemon does; None: a fresh one.
    n: how many answers, each with its own randomness.
    best_of: generate so many, and give the n with the highest logprob per token, best first, once all are complete.
    beam_width: beam search with so many beams; the n best answers come, best first, once it is over. 0: off.
    length_penalty: of a beam search: answers are ranked by the sum of their logprobs over length ** length_penalty.
    early_stopping: a beam search is over when it has beam_width answers, also if a better one might still come.
    stop: strings that end the text; they are not part of it unless `include_stop_str_in_output`.
    stop_token_ids: token ids that end the text, besides the model's own.
    ignore_eos: the model's own end of text does not end it.
    logprobs: how many most likely candidates to report with each token; 0: only the token's own; None: nothing.
    prompt_logprobs: the same for each token of the prompt.
    presence_penalty, frequency_penalty: subtracted from the logit of a token generated before, once and per occurrence.
    repetition_penalty: logits of tokens in prompt or output are divided (if positive) or multiplied by it; 1: off.
    logit_bias: {token id: added to its logit}; -100 as good as bans the token.
    allowed_token_ids: only these may be generated; None: all.
    skip_special_tokens: special tokens do not show in the text.
    """

    max_tokens: Annotated[int, Integer(0, MAX_TOKENS)] = DEFAULT_MAX_TOKENS
    min_tokens: Annotated[int, Integer(0, MAX_TOKENS)] = 0
    temperature: Annotated[float, Real(0.0, MAX_TEMPERATURE)] = 1.0
    top_k: Annotated[int, Integer(-1, MAX_TOP_K)] = 0
    top_p: Annotated[float, Real(0.0, 1.0)] = 1.0
    min_p: Annotated[float, Real(0.0, 1.0)] = 0.0
    seed: Annotated[int | None, Optional(Integer(0, MAX_SEED))] = None
    n: Annotated[int, Integer(1, MAX_N)] = 1
    best_of: Annotated[int | None, Optional(Integer(1, MAX_N))] = None
    beam_width: Annotated[int, Integer(0, MAX_BEAM_WIDTH)] = 0
    length_penalty: Annotated[float, Real(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)] = 1.0
    early_stopping: Annotated[bool, Flag()] = False
    stop: Annotated[Sequence[str], Distinct(ListOf(Text(MAX_STOP_BYTES, min_bytes=1), MAX_STOPS))] = ()
    stop_token_ids: Annotated[Sequence[int], Distinct(ListOf(_TOKEN_ID, MAX_STOP_TOKEN_IDS))] = ()
    ignore_eos: Annotated[bool, Flag()] = False
    logprobs: Annotated[int | None, Optional(Integer(0, MAX_LOGPROBS))] = None
    prompt_logprobs: Annotated[int | None, Optional(Integer(0, MAX_LOGPROBS))] = None
    presence_penalty: Annotated[float, Real(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Real(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    repetition_penalty: Annotated[float, Real(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)] = 1.0
    logit_bias: Annotated[
        Mapping[int, float] | None, Optional(TokenBias(_TOKEN_ID, Real(-MAX_BIAS, MAX_BIAS), MAX_LOGIT_BIAS))
    ] = None
    allowed_token_ids: Annotated[
        Sequence[int] | None, Optional(Distinct(ListOf(_TOKEN_ID, MAX_ALLOWED_TOKEN_IDS, min_items=1)))
    ] = None
    include_stop_str_in_output: Annotated[bool, Flag()] = False
    skip_special_tokens: Annotated[bool, Flag()] = True

    def __post_init__(self) -> None:
        if type(self.stop) is str:
            object.__setattr__(self, "stop", (self.stop,))
        for name, spec in _SPECS.items():
            try:
                object.__setattr__(self, name, spec.check(_plain(getattr(self, name))))
            except Mismatch as fault:
                inside = fault.inside(name)
                raise InvalidArgument(inside.message, field=inside.path) from None
        if self.min_tokens > self.max_tokens:
            raise InvalidArgument(f"must be from 0 to max_tokens, {self.max_tokens}", field="min_tokens")
        if self.min_tokens and self.allowed_token_ids and set(self.allowed_token_ids) <= set(self.stop_token_ids):
            raise InvalidArgument(
                "must hold a token that is not in stop_token_ids, as min_tokens forbids those at first",
                field="allowed_token_ids",
            )

        if self.best_of is not None and self.best_of < self.n:
            raise InvalidArgument(f"must be at least n, {self.n}", field="best_of")
        if self.beam_width:
            self._check_beams()

    @property
    def num_samples(self) -> int:
        """Answers that are generated; `n` of them are given."""
        return self.best_of or self.n

    @property
    def num_sequences(self) -> int:
        """Sequences that work at once."""
        return max(self.num_samples, self.beam_width)

    def _check_beams(self) -> None:
        """A beam search follows the model's own likelihoods: what would change or cut them is refused, not ignored."""
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name]:
                raise InvalidArgument("cannot be used with beam_width; leave it at its default", field=name)
        if self.n > self.beam_width:
            raise InvalidArgument(f"must be at most beam_width, {self.beam_width}", field="n")
        if self.max_tokens > MAX_BEAM_TOKENS:
            raise InvalidArgument(f"must be at most {MAX_BEAM_TOKENS} with beam_width", field="max_tokens")

    def validate(self, *, vocab_size: int | None = None, max_model_len: int | None = None) -> None:
        """Check against a model what depends on it; None: not known here. Raises InvalidArgument naming the field."""
        if max_model_len is not None and self.max_tokens > max_model_len:
            raise InvalidArgument(f"must be at most max_model_len, {max_model_len}", field="max_tokens")
        if vocab_size is not None:
            _check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
            _check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
            _check_token_ids("logit_bias", self.logit_bias or (), vocab_size)

    def to_wire(self) -> dict[str, Any]:
        """What differs from the defaults, as plain data: `logit_bias` as pairs, as the wire's maps have text keys, and
        `allowed_token_ids` packed, as it may be longer than the wire's arrays."""
        wire = {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}
        if self.logit_bias is not None:
            wire["logit_bias"] = tuple(self.logit_bias.items())
        if self.allowed_token_ids is not None:
            wire["allowed_token_ids"] = pack_token_ids(self.allowed_token_ids)
        return wire

    @classmethod
    def from_wire(cls, wire: Any) -> SamplingParams:
        """The inverse of `to_wire`, for data from anybody. Raises InvalidArgument; an unknown name is an error."""
        if type(wire) is not dict:
            raise InvalidArgument("must be a map of sampling parameters", field="params")
        for name in wire:
            if name not in _SPECS:
                raise InvalidArgument(f"is not a sampling parameter; there are {', '.join(_SPECS)}", field=_shown(name))
        values = dict(wire)
        if type(values.get("stop")) is str:
            raise InvalidArgument("must be an array", field="stop")
        if values.get("logit_bias") is not None:
            values["logit_bias"] = _bias_of_pairs(values["logit_bias"])
        if type(values.get("allowed_token_ids")) is bytes:
            try:
                packed = PackedTokenIds(MAX_ALLOWED_TOKEN_IDS).check(values["allowed_token_ids"])
            except Mismatch as fault:
                raise InvalidArgument(fault.message, field=f"allowed_token_ids{fault.path}") from None
            values["allowed_token_ids"] = unpack_token_ids(packed)
        return cls(**values)


_FIELDS = record_of(SamplingParams).fields
_SPECS: dict[str, Spec] = {field.name: field.spec for field in _FIELDS}
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in _FIELDS}


_NOT_WITH_BEAMS = (
    "best_of",
    "top_k",
    "top_p",
    "min_p",
    "min_tokens",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "prompt_logprobs",
)


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's numbers and lists; all else as it is."""
    if isinstance(value, np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidArgument(
                f"names token {token_id}, and the model's token ids are 0 to {vocab_size - 1}", field=name
            )


def _bias_of_pairs(pairs: Any) -> dict[int, float]:
    """{token id: bias} of an array of pairs."""
    if type(pairs) not in (tuple, list) or len(pairs) > MAX_LOGIT_BIAS:
        raise InvalidArgument(f"must be an array of at most {MAX_LOGIT_BIAS} pairs", field="logit_bias")
    bias: dict[int, float] = {}
    for pair in pairs:
        if type(pair) not in (tuple, list) or len(pair) != 2 or type(pair[0]) is not int:
            raise InvalidArgument("must be an array of pairs: a token id, and a number", field="logit_bias")
        if pair[0] in bias:
            raise InvalidArgument("must not name a token twice", field="logit_bias")
        bias[pair[0]] = pair[1]
    return bias


def _shown(name: object) -> str:
    return name[:64] if isinstance(name, str) else type(name).__name__
