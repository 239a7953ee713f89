"""One of every message, and its bytes as recorded under `tests/wire/`, so that a change of the wire shows as a diff.

After a change that is meant, and a new PROTOCOL_VERSION where old peers would not understand it, record anew with

    python -m tests.support.wire_samples

What a version had when the next one began stays in a folder of its own (`v1`), as long as its peers are served.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack

from kvpool.client.lifeline import FrameKind, encode_frame
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.protocol import (
    Accepted,
    Append,
    Attach,
    AttachSequence,
    Call,
    Cancel,
    ChatMessage,
    CloseSequence,
    Closing,
    Credit,
    ErrorInfo,
    Failed,
    Finished,
    Fork,
    Generate,
    Goodbye,
    Hello,
    Notice,
    OpenSequence,
    ReadKV,
    Reply,
    Restore,
    Rows,
    Save,
    ServerLimits,
    Share,
    Submit,
    TokenBatch,
    Tokens,
    Truncate,
    Usage,
    Welcome,
    encode,
    pack_token_ids,
)

WIRE = Path(__file__).resolve().parents[1] / "wire"
LAST_VERSION = WIRE / "v1"
EPOCH = 1_700_000_000_000_000_000
PARAMS = SamplingParams(max_tokens=64, temperature=0.5, top_p=0.75, seed=7, stop=["\n\n"], logprobs=2)

SAMPLES: dict[str, Any] = {
    "hello": Hello((2, 1), "demo", 4242, ("arena-2",)),
    "submit_text": Submit("r1", prompt="The sea is", params=PARAMS.to_wire(), deadline_s=2.5, credit=256),
    "submit_ids": Submit("r2", prompt=pack_token_ids([1, 15, 99]), want_text=False, keep=True, linger_s=30.0),
    "submit_upload": Submit("r5", upload=(4096, 100_000), params={"max_tokens": 1}, handle=7),
    "submit_logits": Submit("r6", prompt="The", credit=16, want_logits=True),
    "submit_embedding": Submit("r7", prompt="The", params={"max_tokens": 0}, want_text=False, pooling="mean"),
    "submit_hidden": Submit("r8", prompt="The", credit=256, hidden_layers=(0, 12, -1)),
    "submit_messages": Submit("r3", messages=(ChatMessage("system", "Be terse."), ChatMessage("user", "Why?"))),
    "cancel": Cancel("r1"),
    "credit": Credit("r1", 128, 0),
    "attach": Attach("r1", (17, 16), 256),
    "goodbye": Goodbye(),
    "call": Call(1, "cancel", {"request_id": "r1"}),
    "open": OpenSequence(2, "s1", prompt="You are terse.", keep=True, linger_s=60.0),
    "attach_sequence": AttachSequence(3, "s1"),
    "append": Append(4, "s1", prompt=" Why?"),
    "generate": Generate("r4", "s1", params={"max_tokens": 16}, credit=256),
    "fork": Fork(5, "s1", "s2", 5),
    "truncate": Truncate(6, "s1", 9),
    "save": Save(7, "s1", "why"),
    "restore": Restore(8, "s3", "why"),
    "read_kv": ReadKV(11, "s1", 256),
    "share": Share(9, "s1", uid=1000),
    "close": CloseSequence(10, "s1"),
    "welcome": Welcome(
        EPOCH,
        2,
        "9f86d081",
        "smollm2-135m",
        ServerLimits(16 << 20, 8192, 49152, 16, 1024, 64),
        bytes(range(32)),
        "0.1.0",
        ("arena-2",),
    ),
    "accepted": Accepted(EPOCH, "r1", 2),
    "tokens": Tokens(
        EPOCH,
        (
            TokenBatch("r1", 0, 0, (260, 3834), (" a", " deep"), (-1.5, -0.25), (((260, -1.5),), ((3834, -0.25),))),
            TokenBatch("r2", 1, 41, (29,)),
        ),
    ),
    "rows": Rows(EPOCH, "r2", 0, "prompt_logprobs", 1, 2, bytes.fromhex("0000c0bf000080be")),
    "rows_in_arena": Rows(EPOCH, "r6", 0, "logits", 41, 1, (786_432, 196_608)),
    "rows_hidden": Rows(EPOCH, "r8", 0, "hidden", 41, 1, (983_040, 6_912), 3),
    "finished": Finished(EPOCH, "r1", 0, "stop", Usage(3, 2, 0)),
    "finished_error": Finished(EPOCH, "r2", 1, "error", Usage(3, 42, 0), "", ErrorInfo("numeric", "logits are NaN")),
    "notice": Notice(EPOCH, "r1", "paused", "the reader has no credit left", 0),
    "reply": Reply(EPOCH, 1, {"cancelled": 1, "consistent": True, "ratio": 0.5, "ids": (1, 2), "name": None}),
    "failed": Failed(EPOCH, "busy", "the queue is full", retry_after_ms=250, request_id="r1"),
    "failed_call": Failed(EPOCH, "not_found", "no such request", "request_id", call_id=1),
    "closing": Closing(EPOCH, "shutting_down"),
}
FRAMES: dict[str, bytes] = {
    "lifeline_token": encode_frame(FrameKind.TOKEN, bytes(range(32))),
    "lifeline_attached": encode_frame(FrameKind.ATTACHED),
    "lifeline_refused": encode_frame(FrameKind.REFUSED, b"unknown token"),
    "lifeline_arena": encode_frame(FrameKind.ARENA),
    "lifeline_pool_map": encode_frame(FrameKind.POOL_MAP),
}


def recording(data: bytes, readable: str) -> str:
    """The text of a file under tests/wire: what it means, then 32 bytes to a line."""
    lines = [data[start : start + 32].hex() for start in range(0, len(data), 32)]
    return "\n".join([f"# {readable}", *lines, ""])


def recorded(name: str, folder: Path = WIRE) -> bytes:
    text = (folder / f"{name}.hex").read_text()
    return bytes.fromhex("".join(line for line in text.splitlines() if not line.startswith("#")))


def recordings() -> dict[str, str]:
    """What every file should hold, by name."""
    messages = {name: encode(message) for name, message in SAMPLES.items()}
    texts = {name: recording(data, repr(msgpack.unpackb(data))) for name, data in messages.items()}
    return texts | {name: recording(data, name) for name, data in FRAMES.items()}


def main() -> None:
    WIRE.mkdir(exist_ok=True)
    for stale in WIRE.glob("*.hex"):
        stale.unlink()
    for name, text in recordings().items():
        (WIRE / f"{name}.hex").write_text(text)


if __name__ == "__main__":
    main()
