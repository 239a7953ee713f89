"""Beam search: the `width` likeliest continuations of a prompt, followed side by side.

Only the decisions are made here: from the candidates of each beam, which beams go on, and with which tokens.
`beam_runs` lets sequences follow.

A beam's score is the sum of its tokens' logprobs; an answer is ranked by its score over (number of its tokens) **
`length_penalty`. Of equals the one with the better beam comes first, then that with the likelier token. Every step
takes the 2 * width best continuations of all beams. Those that end (by a stop token) become answers if they are among
the first `width`; of the others the first `width` go on. The search is over

    early_stopping:  when there are `width` answers
    otherwise:       when the best beam, ranked at its present length, is no better than the worst of `width` answers
    at max_tokens:   in any case; the beams become answers then
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from .request import Request, Token

Candidates = Items[tuple[int, float]]
"""(token_id, logprob) of one beam's likeliest next tokens, best first."""


class Beam(NamedTuple):
    tokens: tuple[Token, ...]  # generated
    score: float


class Answer(NamedTuple):
    tokens: tuple[Token, ...]
    rank: float
    finish_reason: str


class Branch(NamedTuple):
    """A beam of the next step: the beam number `parent` of this one, and a token."""

    parent: int
    token_id: int


class BeamSearch:
    """`beams` are those that go on, best first; `answers` the best that have ended, best first."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        num_logprobs: int = 0,
    ) -> None:
        self.width = width
        self.beams = [Beam((), 0.0)]
        self.answers: list[Answer] = []
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_logprobs = num_logprobs  # candidates to keep with each token

    @classmethod
    def of(cls, request: Request) -> BeamSearch:
        params = request.params
        return cls(
            params.beam_width,
            params.max_tokens,
            request.stop_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            num_logprobs=params.logprobs or 0,
        )

    @property
    def num_candidates(self) -> int:
        """How many candidates `advance` needs of each beam."""
        return max(2 * self.width, self._num_logprobs)

    def advance(self, candidates: Items[Candidates]) -> list[Branch]:
        """Go one token further, with the candidates of each beam. No branches: the search is over."""
        found = sorted(
            (-(beam.score + logprob), number, rank)
            for number, beam in enumerate(self.beams)
            for rank, (_, logprob) in enumerate(candidates[number][: 2 * self.width])
        )
        branches: list[Branch] = []
        following: list[Beam] = []
        for place, (minus_score, number, rank) in enumerate(found[: 2 * self.width]):
            token_id, logprob = candidates[number][rank]
            token: Token = (token_id, logprob, tuple(candidates[number][: self._num_logprobs]), None)
            beam = Beam((*self.beams[number].tokens, token), -minus_score)
            if token_id not in self._stop_token_ids:
                branches.append(Branch(number, token_id))
                following.append(beam)
            elif place < self.width:
                self._add(beam, "stop")
        self.beams, branches = following[: self.width], branches[: self.width]
        if self._is_over():
            return []
        if len(self.beams[0].tokens) == self._max_tokens:
            for beam in self.beams:
                self._add(beam, "length")
            return []
        return branches

    def _is_over(self) -> bool:
        if not self.beams:
            return True
        if len(self.answers) < self.width:
            return False
        return self._early_stopping or self._rank(self.beams[0]) <= self.answers[-1].rank

    def _rank(self, beam: Beam) -> float:
        return float(beam.score / len(beam.tokens) ** self._length_penalty)

    def _add(self, beam: Beam, finish_reason: str) -> None:
        """A new answer, behind those that are as good."""
        self.answers.append(Answer(beam.tokens, self._rank(beam), finish_reason))
        self.answers.sort(key=lambda answer: -answer.rank)
        del self.answers[self.width :]
