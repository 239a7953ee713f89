"""Hostile clients against a real daemon, beside one that only wants to stream.

`python -m tests.support.hostility` with `fuzz ADDRESS COUNT SEED`, `sessions ADDRESS COUNT SEED`, or `neighbour
ADDRESS`, which reads names of phases from its standard input and prints the seconds between tokens of each at its end.
Where they can, the hostile ones are another user, so that nothing they say is an administrator's word.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

from kvpool.client.lifeline import FrameKind, encode_frame
from kvpool.client.wire.protocol import Attach, Call, Cancel, Credit, Goodbye, Hello, OpenSequence, Submit, encode
from tests.support.daemon_process import ROOT, DaemonProcess, at_rest, eventually
from tests.support.other_user import become
from tests.support.raw_client import RawClient
from tests.support.wire_samples import SAMPLES

COMMAND = [sys.executable, "-m", "tests.support.hostility"]
STRANGER = 20_001
PHASE_S = 3.0  # that the neighbour is alone
MESSAGES_A_SESSION = 2000
MAX_GROWTH_KIB = 8192
NEIGHBOURS_REQUEST = "neighbour"


@dataclass
class Outcome:
    """What came of it. `wrong` has one line for everything that should not be."""

    messages: int = 0
    messages_s: float = 0.0
    refused: int = 0
    sessions: int = 0
    sessions_s: float = 0.0
    resident_kib: dict[str, int] = field(default_factory=dict)
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def run_hostility(
    messages: int, sessions: int, seed: int, *, report: Callable[[str], None] = lambda line: None
) -> Outcome:
    """A tenth of everything first, so that what is used is in use; then all of it, and a look at what is left."""
    outcome = Outcome(messages, sessions=sessions)
    daemon = DaemonProcess("slow", socket_mode="0666", max_num_seqs=8, log_level="error")
    daemon.directory.chmod(0o755)
    with daemon, Neighbour(daemon) as neighbour:
        pid = daemon.pid
        neighbour.phase("alone")
        time.sleep(PHASE_S)
        neighbour.phase("warming up")
        attack(daemon, "fuzz", messages // 10, seed)
        attack(daemon, "sessions", sessions // 10, seed)
        outcome.resident_kib["after a tenth"] = daemon.resident_kib()
        report(f"a tenth is done, {daemon.resident_kib():,} KiB")
        neighbour.phase("fuzzed")
        begin = time.monotonic()
        outcome.refused = attack(daemon, "fuzz", messages, seed + 1)
        outcome.messages_s = time.monotonic() - begin
        outcome.resident_kib["after the messages"] = daemon.resident_kib()
        report(f"{messages:,} messages are done, {daemon.resident_kib():,} KiB")
        neighbour.phase("hostile")
        begin = time.monotonic()
        attack(daemon, "sessions", sessions, seed + 1)
        outcome.sessions_s = time.monotonic() - begin
        outcome.resident_kib["after the sessions"] = daemon.resident_kib()
        report(f"{sessions:,} sessions are done, {daemon.resident_kib():,} KiB")
        outcome.gaps_s, wrong = neighbour.finish()
        outcome.wrong += wrong
        judge(daemon, pid, outcome)
    return outcome


def judge(daemon: DaemonProcess, pid: int, outcome: Outcome) -> None:
    if daemon.process is None or daemon.process.poll() is not None or daemon.pid != pid:
        outcome.wrong.append(f"the daemon ended:\n{daemon.log[-2000:]}")
        return
    with daemon.client() as pool:
        for row in pool.ps():  # fuzzed messages may ask for sequences to be kept
            if row["state"] == "idle":
                pool.cancel(str(row["sequence_id"]))
        if not eventually(lambda: at_rest(pool) and pool.stats()["clients"] == 1, 20.0):
            outcome.wrong.append(f"left over: {pool.ps()} {pool.stats()['clients']} clients")
        if internal := pool.stats()["refused_total"].get("internal", 0):
            outcome.wrong.append(f"{internal} answers say that there is a bug:\n{daemon.log[-2000:]}")
    sizes = list(outcome.resident_kib.values())
    if sizes[-1] - sizes[0] > MAX_GROWTH_KIB:
        outcome.wrong.append(f"memory has grown: {outcome.resident_kib}")


def attack(daemon: DaemonProcess, kind: str, count: int, seed: int) -> int:
    """The number that the attacker tells when it is done."""
    command = [*COMMAND, kind, daemon.address, str(count), str(seed)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout)


class Neighbour:
    """The client that is to notice nothing."""

    def __init__(self, daemon: DaemonProcess) -> None:
        command = [*COMMAND, "neighbour", daemon.address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def phase(self, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()

    def finish(self) -> tuple[dict[str, list[float]], list[str]]:
        told, _ = self._process.communicate()
        found: dict[str, Any] = json.loads(told)
        return found["gaps_s"], found["wrong"]

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


# The processes


def be_a_neighbour(address: str) -> None:
    from kvpool.client import Client

    gaps: dict[str, list[float]] = {}
    wrong: list[str] = []
    expected: list[int] = []
    said: list[str | None] = [""]  # the phases so far; None at the end

    def listen() -> None:
        said.extend(line.strip() for line in sys.stdin)
        said.append(None)

    threading.Thread(target=listen, daemon=True).start()
    with Client(address, timeout_s=60.0, client_name="neighbour") as pool:
        while True:
            stream = pool.submit(
                [7] * 40, request_id=NEIGHBOURS_REQUEST, max_tokens=150, temperature=0.0, ignore_eos=True
            )
            last, found = 0.0, []
            for event in stream:
                now = time.monotonic()
                if last and said[-1] and event.token_id >= 0:
                    gaps.setdefault(said[-1], []).append(now - last)
                last = now
                found += [event.token_id] if event.token_id >= 0 else []
            expected = expected or found
            if found != expected:
                wrong.append(f"the neighbour's tokens are others: {found}")
            if said[-1] is None:
                print(json.dumps({"gaps_s": gaps, "wrong": wrong}))
                return


def fuzz(address: str, count: int, seed: int) -> int:
    """Send `count` messages; how many answers came."""
    dice = random.Random(seed)
    bases = [data for message in SAMPLES.values() if (data := encode(message))]
    answers = sent = 0
    while sent < count:
        with RawClient(address) as raw:
            if dice.random() < 0.8:
                raw.open()
            for _ in range(min(MESSAGES_A_SESSION, count - sent)):
                answers += send_and_read(raw, fuzzed(dice, bases))
                sent += 1
            raw.dealer.setsockopt(zmq.LINGER, 1000)
            while raw.dealer.poll(50):
                raw.dealer.recv()
                answers += 1
    return answers


def send_and_read(raw: RawClient, data: bytes) -> int:
    """Send when there is room; the number of answers that came meanwhile."""
    answers = 0
    while True:
        with contextlib.suppress(zmq.Again):
            while True:
                raw.dealer.recv(zmq.NOBLOCK)
                answers += 1
        try:
            raw.dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            raw.dealer.poll(100, zmq.POLLIN | zmq.POLLOUT)
        else:
            return answers


ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, 1e300, float("nan"), float("inf"), "", "x",
    "\0", "é" * 200, b"", b"\xff" * 7, [], [[]], [0] * 50, {}, {"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}},
]  # fmt: skip


def fuzzed(dice: random.Random, bases: list[bytes]) -> bytes:
    """Something that is nearly a message, or not at all."""
    kind = dice.randrange(8)
    if kind == 0:
        return dice.randbytes(dice.randrange(200))
    base = dice.choice(bases)
    if kind == 1:
        return base[: dice.randrange(len(base) + 1)]
    if kind == 2:
        return base + dice.choice(bases)
    if kind in (3, 4):
        changed = bytearray(base)
        for _ in range(dice.randrange(1, 6)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        return bytes(changed)
    if kind == 5:
        at = dice.randrange(len(base) + 1)
        return base[:at] + dice.randbytes(dice.randrange(1, 9)) + base[at:]
    fields: dict[Any, Any] = msgpack.unpackb(base, strict_map_key=False)
    for _ in range(dice.randrange(1, 3)):
        fields[dice.choice([*fields, dice.choice(["", "kind", "params", 5])])] = dice.choice(ODD_VALUES)
    packed: bytes = msgpack.packb(fields)
    return packed


def vanish_without_lifeline(raw: RawClient, dice: random.Random) -> None:
    raw.send(Hello((1,), "hostile"))


def offer_a_wrong_token(raw: RawClient, dice: random.Random) -> None:
    raw.hello()
    raw.tie(dice.randbytes(dice.choice([0, 31, 32, 33])))


def say_hello_twice(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    raw.refused(Hello((1,), "again"))


def vanish_while_streaming(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    for number in range(dice.randrange(1, 4)):
        raw.send(Submit(f"r{number}", prompt="x" * dice.randrange(1, 200), params={"max_tokens": 100}))
    if dice.random() < 0.5:
        raw.receive()


def submit_too_much(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    for number in range(60):
        raw.send(Submit(f"r{number}", prompt=[3] * 240, params={"max_tokens": 10**6, "n": 64}))  # type: ignore[arg-type]
    raw.receive()


def use_a_name_twice(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    raw.send(Submit("same", prompt="x", params={"max_tokens": 50}, credit=0))
    raw.refused(Submit("same", prompt="y"))
    raw.send(Cancel("same"))
    raw.send(Cancel("other"))
    raw.send(Credit("other", 2**31 - 1))


def want_what_is_others(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    raw.send(Attach(NEIGHBOURS_REQUEST, (0,)))
    raw.send(Cancel(NEIGHBOURS_REQUEST))
    if os.geteuid() != 0:
        raw.send(Call(1, "cancel", {"request_id": NEIGHBOURS_REQUEST}))
        raw.send(Call(2, "drain"))
    raw.send(Call(3, "no such method", {"x": 1}))
    raw.receive()


def leave_sequences_behind(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    for number in range(5):
        raw.send(OpenSequence(number, f"s{number}", prompt="x" * 100))
    raw.receive()


def write_garbage_on_lifelines(raw: RawClient, dice: random.Random) -> None:
    for garbage in (b"GET / HTTP/1.0\r\n\r\n", dice.randbytes(100), encode_frame(FrameKind.REFUSED), b"KVL1"):
        with contextlib.suppress(OSError), raw.connect_lifeline() as stream:
            stream.sendall(garbage)


def go_on_after_goodbye(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    raw.send(Goodbye())
    raw.send(Submit("late", prompt="x"))
    raw.receive()


def never_read(raw: RawClient, dice: random.Random) -> None:
    raw.open()
    for number in range(100):
        raw.send(Call(number, "stats"))


HOSTILE: list[Callable[[RawClient, random.Random], None]] = [
    vanish_without_lifeline,
    offer_a_wrong_token,
    say_hello_twice,
    vanish_while_streaming,
    submit_too_much,
    use_a_name_twice,
    want_what_is_others,
    leave_sequences_behind,
    write_garbage_on_lifelines,
    go_on_after_goodbye,
    never_read,
]


def be_hostile(address: str, count: int, seed: int) -> int:
    dice = random.Random(seed)
    for number in range(count):
        behave = HOSTILE[number % len(HOSTILE)]
        with RawClient(address, receive_hwm=10 if behave is never_read else 1000) as raw:
            behave(raw, dice)
            raw.dealer.setsockopt(zmq.LINGER, 100)  # what was said last is to arrive
    return count


@contextlib.contextmanager
def as_a_stranger() -> Iterator[None]:
    if os.geteuid() == 0:
        become(STRANGER, STRANGER)
    yield


if __name__ == "__main__":
    _, mode, where, *numbers = sys.argv
    if mode == "neighbour":
        be_a_neighbour(where)
    else:
        with as_a_stranger():
            run = {"fuzz": fuzz, "sessions": be_hostile}[mode]
            print(run(where, int(numbers[0]), int(numbers[1])))
