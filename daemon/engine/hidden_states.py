"""Outputs of layers that a request wants to know, one row for each of its tokens, each told once.

What a layer makes of position p is the state that the token at p + 1 is drawn from. So the states of the prompt are
told by position, and with each generated token come, as its logits would, those it was drawn from; the prompt's last
position is in both.
"""

from __future__ import annotations

from ...client.wire.errors import InvalidArgument
from ...model.batch import Float32
from .prompt_rows import Rows

MAX_STEP_BYTES = 16 * 2**20
"""Of one sequence's states in one step: its prompt is computed in chunks of no more than that."""


class HiddenStates:
    """Of one sample: `layers` (counted from 0, in the order asked for) at each of its positions.

    The first sample tells of the prompt. Others, which have it in common with the first, begin where their own rows do:
    at its last position.
    """

    def __init__(self, layers: tuple[int, ...], num_prompt_tokens: int, sample: int, max_tokens: int) -> None:
        self.layers = layers
        self._sample = sample
        self._drawn_from = num_prompt_tokens - 1  # the position that the first generated token is drawn from
        self._next = 0 if sample == 0 else self._drawn_from
        self._first_token, self._end_token = 0, max_tokens

    def skip_tokens(self, count: int) -> None:
        """So many tokens were given out by an earlier daemon: their states are not told again."""
        self._first_token = count

    def missing(self, start: int, end: int) -> range:
        """Positions of a chunk from `start` to `end` that are not told yet."""
        return range(max(start, self._next), end)

    def take(self, positions: range, values: Float32) -> list[Rows]:
        """What is to be told of the `missing` positions of a chunk; `values`: (positions, layers, hidden_size)."""
        self._next, begin = positions.stop, positions.start
        told = []
        if self._sample == 0 and begin <= self._drawn_from:
            told.append(Rows("prompt_hidden", begin, values[: self._drawn_from + 1 - begin], transient=True))
        first = max(begin, self._drawn_from + self._first_token)
        last = min(positions.stop, self._drawn_from + self._end_token)
        if first < last:
            found = values[first - begin : last - begin]
            told.append(Rows("hidden", first - self._drawn_from, found, self._sample, transient=True))
        return told


def chunk_tokens(num_layers: int, hidden_size: int) -> int:
    """How many tokens of a sequence a step may compute that tells of so many layers."""
    return max(1, MAX_STEP_BYTES // (num_layers * hidden_size * 4))


def resolve_layers(asked: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Layers counted from 0; -1 is the last. Raises InvalidArgument naming the entry that there is not."""
    for number, layer in enumerate(asked):
        if not -num_layers <= layer < num_layers:
            raise InvalidArgument(
                f"must be from {-num_layers} to {num_layers - 1}: the model has {num_layers} layers",
                field=f"hidden_layers[{number}]",
            )
    return tuple(layer % num_layers for layer in asked)
