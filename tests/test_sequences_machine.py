"""Sequences of two users in three sessions, in any order of events, on the real CPU back end in a small pool.

A plain dictionary says what every sequence must contain and who may do what. After each event the books are audited.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.client.wire.protocol import (
    Append,
    AttachSequence,
    Cancel,
    ClientMessage,
    CloseSequence,
    DaemonMessage,
    Failed,
    Finished,
    Fork,
    Generate,
    Goodbye,
    Hello,
    OpenSequence,
    Reply,
    Restore,
    Save,
    ServerLimits,
    Share,
    Submit,
    Tokens,
    Truncate,
    decode_daemon_message,
    encode,
    pack_token_ids,
)
from kvpool.daemon.persistence.snapshot_file import Suitability
from kvpool.daemon.persistence.snapshots import SnapshotStore
from kvpool.daemon.serving.calls import Calls
from kvpool.daemon.serving.clients import Clients
from kvpool.daemon.serving.parcels import Sent
from kvpool.daemon.serving.sessions import Peer, Sessions
from kvpool.daemon.serving.snapshot_service import SnapshotService
from kvpool.daemon.settings.config import Config
from kvpool.daemon.system.background import Background
from kvpool.daemon.system.timers import Timers
from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.loading import LoadedModel
from tests.support.engine_harness import MAX_MODEL_LEN, Harness, prompts

NUM_BLOCKS, BLOCK_SIZE = 20, 4
ALICE, BOB = Peer(1, 1, 0), Peer(2, 2, 0)
SESSIONS = {b"alice": ALICE, b"alice too": ALICE, b"bob": BOB}
LONGEST_ANSWER = 6
GREEDY = {"temperature": 0.0, "ignore_eos": True}

session = st.sampled_from(sorted(SESSIONS))
name = st.sampled_from("xyz")
some = st.integers(0, 9)
"""Picks a sequence: mostly one that there is."""


def cpu(model: LoadedModel, limits: BackendLimits) -> Backend:
    return CpuBackend(model.program, model.checkpoint, limits, dtype="float32", threads=1)


@cache
def alone() -> Harness:
    return Harness(prefix_cache=False, make_backend=cpu, num_blocks=256)


@cache
def expected(tokens: tuple[int, ...]) -> list[int]:
    """What follows these tokens, in an engine that shares nothing."""
    return alone().generate(list(tokens), max_tokens=LONGEST_ANSWER, **GREEDY).token_ids


class Known:
    """What a sequence must be."""

    def __init__(self, tokens: list[int], holder: bytes | None) -> None:
        self.tokens = tokens
        self.holder = holder  # the session whose end is its end
        self.shared = False  # with the other user


class SequencesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=16, host_blocks=6,
            make_backend=cpu,
        )  # fmt: skip
        self.harness.scheduler.costs.compute_s_per_token = 1.0
        self.received: dict[bytes, list[DaemonMessage]] = defaultdict(list)
        engine = self.harness.engine
        self.clients = Clients(
            Config(), engine, self.harness.text, Sessions(lambda fd: None, lambda fd: None), Timers(),
            send=self._send, calls=Calls(lambda: None, list), model_name="tiny", version="0",
            limits=ServerLimits(1 << 20, MAX_MODEL_LEN, 384, BLOCK_SIZE, NUM_BLOCKS, 4),
        )  # fmt: skip
        self.clients.now = self.harness.now
        self.directory = Path(mkdtemp(prefix="kvpool-machine-"))
        runner = engine.runner
        here = Suitability("tiny", runner.kv_layout, BLOCK_SIZE, runner.block_bytes, 384, MAX_MODEL_LEN)
        self.background = Background()
        service = SnapshotService(self.clients, SnapshotStore(self.directory, here), self.background)
        self.clients.handlers.update(service.handlers)
        self.known: dict[tuple[int, str], Known] = {}
        self.saved: dict[tuple[int, str], list[int]] = {}
        for who in SESSIONS:
            self._say(who, Hello((1,)))

    def _send(self, routing_id: bytes, data: bytes) -> Sent:
        self.received[routing_id].append(decode_daemon_message(data))
        return Sent.YES

    def _say(self, who: bytes, message: ClientMessage) -> list[DaemonMessage]:
        self.clients.receive(who, SESSIONS[who], encode(message))
        return self.received.pop(who, [])

    def _ask(self, who: bytes, message: ClientMessage) -> str | dict[str, Any]:
        """The value of the reply, or the code of the error."""
        answers = self._say(who, message)
        give_up = time.monotonic() + 20.0
        while not answers and time.monotonic() < give_up:  # for what the background does
            self.background.collect()
            answers = self.received.pop(who, [])
        (answer,) = answers
        if isinstance(answer, Failed):
            return answer.code
        assert isinstance(answer, Reply)
        return answer.value  # type: ignore[no-any-return]

    def _turn(self, *, device_done: bool = True) -> None:
        engine = self.harness.engine
        engine.turn(self.clients.now, step_done=engine.in_flight and device_done)
        self.clients.deliver()

    def _own(self, who: bytes, name: str) -> tuple[Known | None, str]:
        """The session's own sequence of this name; else the error that it must get."""
        uid = SESSIONS[who].uid
        found = self.known.get((uid, name))
        other = self.known.get((3 - uid, name))
        return found, "not_owner" if other and other.shared else "not_found"

    def _readable(self, who: bytes, name: str) -> Known | None:
        found, error = self._own(who, name)
        return found or (self.known[3 - SESSIONS[who].uid, name] if error == "not_owner" else None)

    def _pick(self, some: int) -> tuple[bytes, str]:
        """A session and a name: of a sequence that it may use, or (sometimes) perhaps not."""
        keys = sorted(self.known)
        if some > 7 or not keys:
            return sorted(SESSIONS)[some % 3], "xyz"[some % 2]
        uid, name = keys[some % len(keys)]
        return (b"bob" if uid == BOB.uid else (b"alice", b"alice too")[some // len(keys) % 2]), name

    @staticmethod
    def _too_much(num_tokens: int) -> bool:
        return num_tokens > NUM_BLOCKS * BLOCK_SIZE

    # Events

    @initialize()
    def begin(self) -> None:
        self.open(b"alice", "x", 20, 0, True)
        self.open(b"bob", "y", 13, 1, False)

    @rule(who=session, name=name, length=st.integers(1, 20), seed=st.integers(0, 3), keep=st.booleans())
    def open(self, who: bytes, name: str, length: int, seed: int, keep: bool) -> None:
        key = (SESSIONS[who].uid, name)
        tokens = prompts(1, 20, seed=seed)[0][:length]  # with beginnings in common
        answer = self._ask(who, OpenSequence(1, name, prompt=pack_token_ids(tokens), keep=keep))
        if key in self.known:
            assert answer == "invalid_argument"
        else:
            assert answer == {"num_tokens": length}
            self.known[key] = Known(tokens, None if keep else who)
            self._generate(who, name, length % 4)

    @rule(some=some, tokens=st.lists(st.integers(3, 383), min_size=1, max_size=6))
    def append(self, some: int, tokens: list[int]) -> None:
        who, name = self._pick(some)
        found, error = self._own(who, name)
        answer = self._ask(who, Append(1, name, prompt=pack_token_ids(tokens)))
        if found is None:
            assert answer == error
        elif self._too_much(len(found.tokens) + len(tokens)):
            assert answer == "never_fits"
        else:
            found.tokens += tokens
            assert answer == {"num_tokens": len(found.tokens)}
            self._generate(who, name, len(tokens) % 3)

    @rule(some=some, at=st.integers(1, 40))
    def truncate(self, some: int, at: int) -> None:
        who, name = self._pick(some)
        found, error = self._own(who, name)
        answer = self._ask(who, Truncate(1, name, at))
        if found is None:
            assert answer == error
        elif at > len(found.tokens):
            assert answer == "invalid_argument"
        else:
            del found.tokens[at:]
            assert answer == {"num_tokens": at}
            self._generate(who, name, at % 5)

    @rule(some=some, new=name, at=st.none() | st.integers(1, 40))
    def fork(self, some: int, new: str, at: int | None) -> None:
        who, name = self._pick(some)
        found, key = self._readable(who, name), (SESSIONS[who].uid, new)
        answer = self._ask(who, Fork(1, name, new, at))
        if found is None:
            assert answer == "not_found"
        elif key in self.known or (at or 1) > len(found.tokens):
            assert answer == "invalid_argument"
        else:
            own = found is self._own(who, name)[0]
            self.known[key] = Known(found.tokens[:at], None if own and found.holder is None else who)
            assert answer == {"num_tokens": len(self.known[key].tokens)}
            self._generate(who, new, (at or 1) % 4)

    @rule(some=some)
    def share(self, some: int) -> None:
        who, name = self._pick(some)
        found, error = self._own(who, name)
        answer = self._ask(who, Share(1, name, uid=3 - SESSIONS[who].uid))
        assert answer == (error if found is None else {"num_tokens": len(found.tokens)})
        if found is not None:
            found.shared = True

    @rule(some=some)
    def attach(self, some: int) -> None:
        who, name = self._pick(some)
        found = self._readable(who, name)
        answer = self._ask(who, AttachSequence(1, name))
        assert answer == ("not_found" if found is None else {"num_tokens": len(found.tokens)})

    @rule(some=some)
    def close(self, some: int) -> None:
        who, name = self._pick(some)
        found, error = self._own(who, name)
        answer = self._ask(who, CloseSequence(1, name))
        if found is None:
            assert answer == error
        else:
            del self.known[SESSIONS[who].uid, name]

    @rule(some=some, max_tokens=st.integers(0, LONGEST_ANSWER), cancel_after=st.none() | st.integers(0, 8))
    def generate(self, some: int, max_tokens: int, cancel_after: int | None) -> None:
        self._generate(*self._pick(some), max_tokens, cancel_after)

    def _generate(self, who: bytes, name: str, max_tokens: int, cancel_after: int | None = None) -> None:
        found, error = self._own(who, name)
        first, *_ = answers = self._say(who, Generate("g", name, params=GREEDY | {"max_tokens": max_tokens}))
        if found is None or self._too_much(len(found.tokens) + max(0, max_tokens - 1)):
            assert isinstance(first, Failed)
            assert first.code == (error if found is None else "never_fits")
            return
        turns = 0
        while not isinstance(answers[-1], Finished):
            for busy in (Append(1, name, prompt=b""), Truncate(1, name, 1), Save(1, name, "x")):
                if turns == 1:
                    assert self._ask_among(who, busy, answers) == "busy"
            if turns == cancel_after:
                answers += self._say(who, Cancel("g"))
            self._turn(device_done=turns != cancel_after)
            answers += self.received.pop(who, [])
            turns += 1
            assert turns < 200
        got = [token for m in answers if isinstance(m, Tokens) for batch in m.events for token in batch.token_ids]
        if answers[-1].finish_reason == "length":
            assert len(got) == max_tokens
        else:
            assert answers[-1].finish_reason == "cancelled"
        assert got == expected(tuple(found.tokens))[: len(got)]
        found.tokens += got

    def _ask_among(self, who: bytes, message: ClientMessage, answers: list[DaemonMessage]) -> str:
        """The code of a refusal while other messages may come."""
        *others, refusal = self._say(who, message)
        answers += others
        assert isinstance(refusal, Failed)
        return refusal.code

    @rule(who=session, length=st.integers(20, 60), seed=st.integers(0, 9))
    def other_traffic(self, who: bytes, length: int, seed: int) -> None:
        """Takes blocks from what is idle."""
        prompt = pack_token_ids(prompts(1, length, seed=seed)[0])
        self._say(who, Submit("other", prompt=prompt, params=GREEDY | {"max_tokens": 2}))
        while self.harness.scheduler.has_work or self.harness.engine.in_flight:
            self._turn()
        messages = self.received.pop(who, [])
        assert isinstance(messages[-1], Finished)

    @rule(some=some)
    def save(self, some: int) -> None:
        who, name = self._pick(some)
        found, error = self._own(who, name)
        answer = self._ask(who, Save(1, name, "saved"))
        if found is None:
            assert answer == error
        else:
            assert isinstance(answer, dict)
            self.saved[SESSIONS[who].uid, "saved"] = list(found.tokens)

    @rule(who=session, name=name)
    def restore(self, who: bytes, name: str) -> None:
        uid = SESSIONS[who].uid
        stored = self.saved.get((uid, "saved"))
        answer = self._ask(who, Restore(1, name, "saved"))
        if (uid, name) in self.known:
            assert answer == "invalid_argument"
        elif stored is None:
            assert answer == "not_found"
        else:
            assert isinstance(answer, dict)
            assert answer["num_tokens"] == len(stored)
            self.known[uid, name] = Known(list(stored), who)
            self._generate(who, name, 2)

    @rule(who=session)
    def leave_and_come_back(self, who: bytes) -> None:
        self._say(who, Goodbye())
        self.known = {key: known for key, known in self.known.items() if known.holder != who}
        self._say(who, Hello((1,)))

    @rule(some=some, turns=st.integers(0, 5), in_flight=st.booleans())
    def crash(self, some: int, turns: int, in_flight: bool) -> None:
        """The process dies while it generates, and the device may be at work for it; another one takes its place."""
        who, name = self._pick(some)
        found, _ = self._own(who, name)
        self._say(who, Generate("g", name, params=GREEDY | {"max_tokens": LONGEST_ANSWER}))
        for _ in range(turns):
            self._turn()
        if in_flight:
            self._turn(device_done=False)
        session = self.clients.sessions.get(who)
        assert session is not None
        self.clients.settle(session)
        self.known = {key: known for key, known in self.known.items() if known.holder != who}
        self.clients.check_invariants()
        self._turn()
        while self.harness.scheduler.has_work or self.harness.engine.in_flight:
            self._turn()
        self.received.pop(who, None)
        self._say(who, Hello((1,)))
        if found is not None and (SESSIONS[who].uid, name) in self.known:
            (kept,) = (s for s in self.clients.sequences if (s.uid, s.name) == (SESSIONS[who].uid, name))
            got = kept.sequence.token_ids[len(found.tokens) :]
            assert got == expected(tuple(found.tokens))[: len(got)]
            found.tokens += got

    # What must always hold

    @invariant()
    def every_sequence_is_what_it_must_be(self) -> None:
        self.clients.check_invariants()
        held = {(found.uid, found.name): found.sequence.token_ids for found in self.clients.sequences}
        assert held == {key: known.tokens for key, known in self.known.items()}

    @precondition(lambda self: not self.known)
    @invariant()
    def nothing_is_left(self) -> None:
        assert not self.harness.scheduler.roster.sequences
        assert self.harness.pool.num_used == 0

    def teardown(self) -> None:
        for uid, name in list(self.known):
            self._ask(b"alice" if uid == ALICE.uid else b"bob", CloseSequence(1, name))
        self.known.clear()
        self.nothing_is_left()
        self.background.close()
        self.harness.close()
        shutil.rmtree(self.directory)


SequencesMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSequences = SequencesMachine.TestCase
