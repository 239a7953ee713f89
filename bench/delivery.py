"""What a generated token costs the daemon on its way out, stage by stage, and its reader: no sockets, nobody asleep.

    python -m bench.delivery [--sequences 64,960]

The engine, its scheduler and the delivery into arenas are the daemon's own, over a device that computes nothing; 64
sessions share the sequences. The reader is the client's own, over a ring that is full. CPU time of one thread, medians
over steps. bench/ipc.py has the same between processes, with the wake-ups.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests' helpers are no part of the package

from kvpool.client.arena.arena import READER_AWAKE, RING_HEAD, RING_TAIL  # noqa: E402
from kvpool.client.arena.ring import RingReader  # noqa: E402
from kvpool.client.arena.rows import RowReader  # noqa: E402
from kvpool.client.stream_state import StreamState  # noqa: E402
from kvpool.daemon.serving.arenas import SessionArena, layout_for  # noqa: E402
from kvpool.daemon.serving.delivery import Delivery  # noqa: E402
from kvpool.daemon.serving.parcels import Sent  # noqa: E402
from kvpool.daemon.serving.rings import Rings  # noqa: E402
from kvpool.daemon.serving.sessions import Peer, Session  # noqa: E402
from tests.support.engine_harness import Harness  # noqa: E402
from tests.support.scripted_backend import ScriptedBackend  # noqa: E402

SESSIONS = 64
STEPS, WARM_UP = 130, 20


class Stages:
    """A daemon of `count` sequences, all of which decode; CPU seconds of each stage of each step."""

    def __init__(self, count: int, *, want_text: bool) -> None:
        layout = layout_for(vocab_size=49_152, max_model_len=8192)
        rings = Rings()
        self.sessions = [Session(b"%d" % i, Peer(0, 0, 0), "", str(i), b"") for i in range(min(SESSIONS, count))]
        for session in self.sessions:
            session.arena = SessionArena(layout, rings)
        self.harness = Harness(
            num_blocks=10 * count,
            max_num_seqs=count,
            max_num_batched_tokens=2 * count + 64,
            prefix_cache=False,
            make_backend=lambda model, limits: ScriptedBackend(model.program, model.checkpoint, limits),
        )
        options = {"max_tokens": STEPS + 9, "ignore_eos": True, "want_text": want_text}
        for number in range(count):
            session = self.sessions[number % len(self.sessions)]
            request = self.harness.submit([5, 6, 7 + number % 300], session=session, **options)
            request.handle = number // len(self.sessions) + 1
        nobody = cast(Any, None)  # is slow, gone or hostile
        self.delivery = Delivery(self.harness.engine, lambda peer, data: Sent.YES, rings, gone=nobody, damaged=nobody)
        self.spent: dict[str, list[float]] = {"schedule, collect": [], "text, messages": [], "ring": [], "reader": []}

    def run(self) -> None:
        engine, flush_s = self.harness.engine, 0.0
        flush = engine._flush

        def timed() -> None:
            nonlocal flush_s
            begin = time.thread_time()
            flush()
            flush_s = time.thread_time() - begin

        engine._flush = timed  # type: ignore[method-assign]
        readers = [self._reader(session) for session in self.sessions]
        for step in range(STEPS):
            begin = time.thread_time()
            engine.turn(self.harness.now, step_done=engine.in_flight)
            turned = time.thread_time()
            outputs = engine.take_outputs(), engine.take_ring_tokens(), engine.epoch
            self.delivery.give_turn(self.delivery.address(*outputs))
            given = time.thread_time()
            for ring, streams in readers:
                for handle, event in ring.read():
                    streams[handle].push_event(event)
                for stream in streams.values():
                    stream.take()
            read = time.thread_time()
            if step >= WARM_UP:
                costs = (turned - begin - flush_s, flush_s, given - turned, read - given)
                for name, cost in zip(self.spent, costs, strict=True):
                    self.spent[name].append(cost)

    def _reader(self, session: Session) -> tuple[RingReader, dict[int, StreamState]]:
        """The client's end, in this process: it is awake, and has read nothing yet."""
        if session.arena is None:
            raise ValueError("the session has no arena")
        arena = session.arena._arena
        arena.words[READER_AWAKE], arena.words[RING_TAIL] = 1, arena.words[RING_HEAD]
        handles = range(1, len(self.harness.engine.works_on()) // len(self.sessions) + 2)
        return RingReader(arena, RowReader(arena)), {handle: StreamState("", 1, None) for handle in handles}

    def close(self) -> None:
        for session in self.sessions:
            if session.arena is not None:
                session.arena.close()
        self.harness.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="64,960")
    options = parser.parse_args()
    print(f"python -m bench.delivery --sequences {options.sequences}\n")
    print("CPU for each token in microseconds")
    for count in map(int, options.sequences.split(",")):
        for want_text in (True, False):
            stages = Stages(count, want_text=want_text)
            stages.run()
            medians = {name: 1e6 * statistics.median(costs) / count for name, costs in stages.spent.items()}
            told = ", ".join(f"{name} {cost:.2f}" for name, cost in medians.items())
            print(f"{count:>5} sequences {'with text' if want_text else 'ids only '}: {told}", flush=True)
            stages.close()


if __name__ == "__main__":
    main()
