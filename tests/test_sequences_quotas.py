"""What one user may hold by name: sequences cost the daemon's memory although no block has their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvpool.client.wire.errors import QuotaExceeded
from kvpool.daemon.persistence.snapshot_file import Image
from kvpool.daemon.serving import sequence_objects
from kvpool.daemon.serving.sequence_objects import SequenceObject, SequenceObjects
from kvpool.daemon.serving.sessions import Peer, Session
from kvpool.daemon.system.timers import Timers
from tests.support.engine_harness import Harness

ALICE, BOB = (cast(Session, SimpleNamespace(peer=Peer(uid, uid, 0))) for uid in (1, 2))


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[SequenceObjects]:
    monkeypatch.setattr(sequence_objects, "MAX_TOKENS", 100)
    monkeypatch.setattr(sequence_objects, "MAX_SHARED_WITH", 3)
    harness = Harness()
    made = SequenceObjects(harness.engine, Timers())
    yield made
    made.check_invariants()
    harness.close()


def opened(objects: SequenceObjects, name: str, length: int, session: Session = ALICE) -> SequenceObject:
    return objects.open(name, session, [5] * length, keep=False, linger_s=0.0)


def test_tokens_of_a_user_are_counted_wherever_they_come_from(objects: SequenceObjects) -> None:
    first = opened(objects, "first", 60)
    image = Image(np.full(41, 5, dtype=np.int32), 0, np.empty((0, 1), dtype=np.uint8))
    for action in (
        lambda: opened(objects, "x", 41),
        lambda: objects.append(first, [5] * 41),
        lambda: objects.fork(first, "x", ALICE, 41),
        lambda: objects.restore("x", ALICE, image),
    ):
        with pytest.raises(QuotaExceeded, match="100 tokens"):
            action()
        objects.check_invariants()
    opened(objects, "others", 100, BOB)
    fork = objects.fork(first, "fork", ALICE, 40)
    with pytest.raises(QuotaExceeded):
        objects.append(fork, [5])
    objects.truncate(fork, 30)
    objects.append(fork, [5] * 10)
    objects.close(first)
    objects.append(fork, [5] * 60)
    assert fork.sequence.num_tokens == 100


def test_a_sequence_is_shared_with_so_many(objects: SequenceObjects) -> None:
    first = opened(objects, "first", 5)
    objects.share(first, 7, None)
    objects.share(first, None, 8)
    objects.share(first, 9, None)
    with pytest.raises(QuotaExceeded, match="group"):
        objects.share(first, 10, None)
