"""Best of several samples: those with the highest logprob per token are the answers, as if there had been no others."""

from __future__ import annotations

from dataclasses import replace

from ...client.wire.protocol import Finished, TokenBatch
from .request import Request, Sample


def choose(request: Request) -> list[TokenBatch | Finished]:
    """The messages of the best `params.n` samples, which become the request's only ones. All must have finished.

    Samples that failed or were cut short come last; among equals those of a lower index come first.
    """
    best = sorted(request.samples, key=_order)[: request.params.n]
    request.samples, request.chosen = best, True
    messages: list[TokenBatch | Finished] = []
    for number, sample in enumerate(best):
        sample.index = number
        sample.history = [_renumbered(batch, sample) for batch in sample.history]
        messages += sample.history
        if sample.finished is not None:
            sample.finished = replace(sample.finished, sample=number)
            messages.append(sample.finished)
    return messages


def _order(sample: Sample) -> tuple[bool, float, int]:
    whole = sample.finished is not None and sample.finished.finish_reason in ("stop", "length")
    return not whole, -sample.sum_logprobs / max(1, sample.num_sent), sample.index


def _renumbered(batch: TokenBatch, sample: Sample) -> TokenBatch:
    """As it is given out: with its new index, and without logprobs that nobody asked for."""
    asked = sample.request.params.logprobs is not None
    return replace(batch, sample=sample.index, logprobs=batch.logprobs if asked else ())
