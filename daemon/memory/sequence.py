"""A sequence: tokens that grow, the blocks that hold their keys and values, and how far those are computed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from .block_pool import NULL_BLOCK

IDLE = "idle"
"""`wait_reason` of a sequence that waits for its owner between two answers."""


class SequenceState(Enum):
    """Where a sequence stands. Only RUNNING ones take part in steps."""

    WAITING = "waiting"  # queued; may hold blocks that it shares or had before it was paused
    RUNNING = "running"
    PREEMPTED = "preempted"  # queued again after its blocks were taken
    PAUSED = "paused"  # by its reader, or idle between two answers; keeps its blocks while nobody needs them
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one sequence. The scheduler changes it; the engine reads it.

    The key and value of the token at position p lie in block `block_table[p // block_size]`, for every p below
    `num_computed_tokens`. All a scheduler does is to let `num_computed_tokens` catch up with `num_tokens`; when it
    does, the next token can be sampled.
    """

    uid: int
    token_ids: list[int]
    max_tokens: int  # of output; 0: only compute the prompt
    min_tokens: int = 0  # stop ids do not count before so many
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # larger is more urgent
    deadline: float | None = None  # monotonic seconds
    arrival: float = 0.0  # monotonic seconds
    whole_prompt: bool = False  # every token of it is computed for this sequence: nothing comes from the prefix cache
    chunk_tokens: int | None = None  # most tokens of it in one step; None: as many as there is room for
    keep: bool = False  # goes idle after its answer instead of finishing
    expected_output_tokens: int | None = None  # told to the pow2 and oracle reservation policies
    client_data: object = None  # the engine's own

    sequence_id: int = -1  # given by Scheduler.add and Scheduler.fork, never reused
    state: SequenceState = SequenceState.WAITING
    wait_reason: str = ""  # for people: why it is not running
    finish_reason: str | None = None  # stop | length | cancelled | deadline | error; of the last answer, if it is kept
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache at its first admission
    block_table: list[int] = field(default_factory=list)  # block ids; NULL_BLOCK where out of the sliding window
    num_null_blocks: int = 0  # leading NULL_BLOCK entries
    host_slots: list[int] = field(default_factory=list)  # while swapped out: where each table entry lies on the host
    in_flight: bool = False  # the device works on a chunk of it between schedule and update
    preemptions: int = 0

    # The scheduler's own marks
    admitted: bool = False  # ran at least once
    goal_tokens: int = 0  # what it was admitted for: blocks up to here are promised to it
    promised_blocks: int = 0  # of those, free blocks that it has not taken yet
    protected_until: int = -1  # not a victim again while num_computed_tokens <= this
    counted_until: int = 0  # tokens whose computation its owner has been charged for
    boost: int = 0  # classes won by waiting
    due: float = 0.0  # monotonic seconds: its owner's queued sequences stand in this order
    queued_since: float = 0.0
    block_hashes: list[bytes] = field(default_factory=list)  # the chain of its full blocks, as far as known
    public_hashes: list[bytes] = field(default_factory=list)
    awaited_hash: bytes | None = None  # of a block that another sequence computes, when it last looked
    followers: deque[Sequence] = field(default_factory=deque)  # of its group, waiting to fork from it
    leader: Sequence | None = None  # whose follower it is

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a sequence needs at least one token")
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_wanted_tokens(self) -> int:
        """Of those not computed yet, how many the next step may compute."""
        missing = self.num_tokens - self.num_computed_tokens
        return missing if self.chunk_tokens is None else min(missing, self.chunk_tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, shared ones included."""
        return len(self.block_table) - self.num_null_blocks

    @property
    def queued(self) -> bool:
        return self.state is SequenceState.WAITING or self.state is SequenceState.PREEMPTED

    @property
    def idle(self) -> bool:
        """Paused between two answers."""
        return self.state is SequenceState.PAUSED and self.wait_reason == IDLE

    @property
    def finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def urgency(self) -> int:
        """Its priority class, with what it won by waiting."""
        return self.priority + self.boost

    def live_blocks(self) -> list[int]:
        """Its blocks in order, without those that left the window."""
        return self.block_table[self.num_null_blocks :] if self.num_null_blocks else self.block_table

    def __repr__(self) -> str:
        held = sum(block != NULL_BLOCK for block in self.block_table)
        return (
            f"<Sequence {self.sequence_id} of {self.uid}: {self.state.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens in {held} blocks>"
        )
