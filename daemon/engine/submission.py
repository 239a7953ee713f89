"""A Submit as it came over the wire, checked against the model and turned into a Request; and back, for the journal."""

from __future__ import annotations

from ...client.sampling_params import SamplingParams
from ...client.wire.errors import InvalidArgument
from ...client.wire.protocol import Submit, pack_token_ids
from .hidden_states import chunk_tokens, resolve_layers
from .request import Request, draw_seed
from .text import Text


def make_request(message: Submit, text: Text, uid: int, now: float, *, seed: int | None = None) -> Request:
    """The request that a Submit asks for; `seed`: what was drawn for it before, if it names none.

    Raises KVPoolError naming the field that cannot be used.
    """
    if seed is None:
        seed = draw_seed()
    params = SamplingParams.from_wire(dict(message.params or {}))
    params.validate(vocab_size=text.vocab_size)
    if message.pooling is not None and (params.max_tokens, params.n, params.prompt_logprobs) != (0, 1, None):
        raise InvalidArgument("only embeds the prompt: set max_tokens to 0, and n to 1", field="pooling")
    if message.keep and params.num_sequences > 1:
        raise InvalidArgument("only one sequence can be kept; ask for one answer, and fork what is kept", field="keep")
    if params.beam_width or params.num_samples > params.n:
        for name in ("want_logits", "hidden_layers"):
            if getattr(message, name):
                raise InvalidArgument(
                    "cannot be told where answers are chosen in the end; set beam_width to 0 and best_of to n",
                    field=name,
                )
    stop_token_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else text.eos_token_ids)
    if params.min_tokens and params.allowed_token_ids and stop_token_ids.issuperset(params.allowed_token_ids):
        raise InvalidArgument(
            "allows only tokens that end the text, which min_tokens forbids; set min_tokens to 0",
            field="allowed_token_ids",
        )
    return Request(
        request_id=message.request_id,
        uid=uid,
        prompt_ids=text.prompt_ids(message.prompt, message.messages),
        params=params,
        seed=seed if params.seed is None else params.seed,
        stop_token_ids=stop_token_ids,
        text=text if message.want_text or params.stop else None,
        arrival=now,
        deadline=None if message.deadline_s is None else now + message.deadline_s,
        priority=message.priority,
        want_text=message.want_text,
        want_logits=message.want_logits,
        hidden_layers=resolve_layers(message.hidden_layers, text.num_layers),
        chunk_tokens=chunk_tokens(len(message.hidden_layers), text.hidden_size) if message.hidden_layers else None,
        pooling=message.pooling,
        keep=message.keep,
        kept_as=message.request_id if message.keep else "",
        linger_s=message.linger_s,
        credit=message.credit,
    )


def submit_of(request: Request) -> Submit:
    """The message that asks for the same again, with the prompt as token ids."""
    return Submit(
        request.request_id,
        prompt=pack_token_ids(request.prompt_ids),
        params=request.params.to_wire(),
        priority=request.priority,
        deadline_s=None if request.deadline is None else request.deadline - request.arrival,
        credit=request.credit,
        want_text=request.want_text,
        want_logits=request.want_logits,
        hidden_layers=request.hidden_layers,
        pooling=request.pooling,
        keep=request.keep,
        linger_s=request.linger_s,
    )
