"""Every decoder of bytes that somebody else wrote, as a function of bytes that breaks when the decoder does.

A decoder may take its input, or refuse it with the errors that it promises; any other exception is a find, and so is
an input that is taken and does not say the same when it is written again. `SEEDS` are inputs to begin with.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import random
import struct
from collections.abc import Callable

import msgpack
import numpy as np

from kvpool.client.arena.arena import (
    BULK_TAIL,
    PAGE_BYTES,
    RECORD_BYTES,
    RING_HEAD,
    RING_TAIL,
    ROWS_RETURNED,
    Arena,
    Layout,
)
from kvpool.client.arena.map_segment import MapLayout, _unpacked
from kvpool.client.arena.pool_map import PoolMap
from kvpool.client.arena.regions import BulkWriter, UploadReader
from kvpool.client.arena.ring import (
    HAS_LOGPROB,
    LOGITS,
    PLACE,
    RECORD,
    TEXT_GOES_ON,
    RingReader,
)
from kvpool.client.arena.rows import RowReader, RowWriter
from kvpool.client.keys_values import KVPiece, KVPieces
from kvpool.client.lifeline import MAX_PAYLOAD_BYTES, FrameReader, encode_frame
from kvpool.client.prompt_rows import TOKEN_KINDS, RequestRows, array_of
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.codec import decode_client_message, decode_daemon_message, encode
from kvpool.client.wire.errors import Busy, KVPoolError, ProtocolError
from kvpool.client.wire.messages import Generate, Rows, Submit
from kvpool.daemon.persistence.journal_file import MAGIC, frame, read_frames
from kvpool.daemon.persistence.journal_records import Accept, End, Finish, Forget, JournalDamaged, pack, unpack
from kvpool.daemon.persistence.journal_records import Generate as Generated
from kvpool.daemon.persistence.snapshot_file import Image, Suitability, pieces, read
from kvpool.daemon.serving.rings import Rings

from .ring_records import records_of
from .wire_samples import FRAMES, SAMPLES

SMALL = Layout(128, PAGE_BYTES, PAGE_BYTES, row_bytes=400, num_rows=3)
CURSORS = struct.Struct("<QQQ")
HERE = Suitability("hash", "layout", block_size=4, block_bytes=24, vocab_size=100, max_model_len=50)


class Broken(Exception):
    """A decoder did what it promises not to do."""


def message(data: bytes) -> None:
    """A frame of the DEALER or the ROUTER, and what the two ends make of its parts."""
    for decode in (decode_client_message, decode_daemon_message):
        try:
            value = decode(data)
        except ProtocolError:
            continue
        if decode(encode(value)) != value:
            raise Broken(f"{value!r} is another one when written again")
        if isinstance(value, Submit | Generate):
            _parameters(value.params)
        if isinstance(value, Rows) and isinstance(value.data, bytes):
            _rows(value, value.data)


def _parameters(params: object) -> None:
    try:
        known = SamplingParams.from_wire(params or {})
        if SamplingParams.from_wire(known.to_wire()) != known:
            raise Broken(f"{known!r} is another one when written again")
    except KVPoolError:
        pass


def _rows(value: Rows, data: bytes) -> None:
    rows = RequestRows()
    try:
        rows.push(value, array_of(value, data))
        for kind in TOKEN_KINDS:
            rows.take(kind, value.sample, value.index)
        rows.prompt_hidden(value.count)
        rows.prompt_logprobs()
    except ProtocolError:
        pass


_arena = Arena(mmap.mmap(-1, SMALL.total_bytes), SMALL)
"""Not shared with anybody: what the other side could have written there is written by the targets."""

_rings = Rings()


def ring(data: bytes) -> None:
    """The client reads a ring: two cursors, then records; what lies before the ring's beginning lies at its end."""
    if len(data) < CURSORS.size:
        return
    head, second, _ = CURSORS.unpack_from(data)
    records = data[CURSORS.size : CURSORS.size + len(_arena.ring)]
    _arena.ring[: len(records)] = records
    _arena.ring[len(records) :] = bytes(len(_arena.ring) - len(records))
    _arena.words[RING_TAIL] = 0
    reader = RingReader(_arena, RowReader(_arena))
    try:
        for cursor in (head, second):
            _arena.words[RING_HEAD] = cursor
            tokens = reader.read()
            if len(tokens) > SMALL.ring_records or _arena.words[RING_TAIL] != cursor:
                raise Broken(f"{len(tokens)} tokens up to {cursor}, and the tail at {_arena.words[RING_TAIL]}")
            if any(event.token_id < 0 or event.text.encode().decode() != event.text for _, event in tokens):
                raise Broken("a token that cannot be")
    except ProtocolError:
        pass


def cursors(data: bytes) -> None:
    """The daemon writes, between readings of a client that says anything about what it has read."""
    words = RING_TAIL, BULK_TAIL, ROWS_RETURNED
    for word in words:
        _arena.words[word] = 0
    bulk, rows, logits = BulkWriter(_arena), RowWriter(_arena), np.zeros(100, np.float32)
    ring = _rings.open(_arena, bell=2**16)  # nobody is woken
    try:
        for said in CURSORS.iter_unpack(data[: len(data) // CURSORS.size * CURSORS.size][:2400]):
            for word, value in zip(words, said, strict=True):
                _arena.words[word] = value
            bulk_tail = said[1]
            text = "x" * (bulk_tail % 40)
            ring.write(b"".join(records_of([(1, text, None)] * 40)))
            bulk.put(logits)
            rows.put(logits)
    except ProtocolError:
        pass
    ring.close()


def upload(data: bytes) -> None:
    """A prompt in shared memory: its place as a message said it, and what lies there."""
    if len(data) < 16:
        return
    offset, count = struct.unpack_from("<qq", data)
    region = data[16 : 16 + PAGE_BYTES]
    _arena.upload[: len(region)] = region
    try:
        packed = UploadReader(_arena).copy(offset, count)
        if len(packed) != 4 * count:
            raise Broken(f"{len(packed)} bytes for {count} ids")
    except KVPoolError:
        pass


def lifeline(data: bytes) -> None:
    """A stream: whatever the pieces in which it arrives, the same frames, and the same refusal."""
    places = sorted(random.Random(len(data)).sample(range(len(data) + 1), min(len(data), 5)))
    cuts = [data[begin:end] for begin, end in itertools.pairwise([0, *places, len(data)])]
    whole, in_pieces = _frames([data]), _frames(cuts)
    if in_pieces[1] != whole[1] or in_pieces[0][: len(whole[0])] != whole[0]:
        raise Broken(f"{data!r} means something else in pieces")


def _frames(stream: list[bytes]) -> tuple[list[tuple[int, bytes]], bool]:
    """Frames that were delivered, and whether the stream was refused in the end."""
    reader, found = FrameReader(), []
    try:
        for piece in stream:
            found += [(frame.kind, frame.payload) for frame in reader.feed(piece)]
            if len(reader._buffer) > MAX_PAYLOAD_BYTES + 8:
                raise Broken(f"{len(reader._buffer)} bytes are kept of frames that are complete")
    except ProtocolError:
        return found, True
    return found, False


def headers(data: bytes) -> None:
    """The first bytes of a descriptor that came: of an arena, of a pool map."""
    try:
        layout = Layout.of_header(data)
        if layout.header() != data or layout.total_bytes > 2**32:
            raise Broken(f"{data!r} is not the header of {layout}")
    except ProtocolError:
        pass
    try:
        size = struct.unpack_from("<Q", data, 8)[0] if len(data) >= 16 else 0
        MapLayout.of_header(data, size)
    except ProtocolError:
        pass


def map_details(data: bytes) -> None:
    """The pool map's rows and counters."""
    try:
        value = _unpacked(data)
        arrays = {"states": b"ab", "owners": bytes(8), "ref_counts": b"cdef"}
        PoolMap.of({"num_blocks": 2, "block_size": 4} | arrays | value)
    except ProtocolError:
        pass


def kv_piece(data: bytes) -> None:
    """The value of an answer to `read_kv`, and what is made of two of them."""
    try:
        value = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    except Exception:  # what is no MessagePack is the target `message`
        return
    pieces = KVPieces()
    try:
        pieces.add(KVPiece.of(value))
        pieces.add(KVPiece.of(value))
    except (ProtocolError, Busy, MemoryError):
        pass
    whole = pieces.whole()
    if whole.keys.shape != whole.values.shape or whole.keys.flags.writeable:
        raise Broken(f"keys {whole.keys.shape}, values {whole.values.shape}")


_file = os.fdopen(os.memfd_create("journal", os.MFD_CLOEXEC), "w+b")


def journal(data: bytes) -> None:
    """A journal's file: any bytes; and any payloads in frames that are right."""
    for content in (data, MAGIC + frame(data or b"\xc0")):
        _file.seek(0)
        _file.truncate()
        _file.write(content)
        _file.seek(0)
        for payload in read_frames(_file):
            try:
                list(unpack(payload))
            except JournalDamaged:
                break


def snapshot(data: bytes) -> None:
    """A sequence's file; one that is taken is written with the same bytes again."""
    try:
        image = read(io.BytesIO(data), len(data), 1000, HERE)
    except KVPoolError:
        return
    if len(image.blocks) and b"".join(pieces(image, 1000, HERE)) != data:
        raise Broken("a file that no daemon writes was taken")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "message": message,
    "ring": ring,
    "cursors": cursors,
    "upload": upload,
    "lifeline": lifeline,
    "headers": headers,
    "map_details": map_details,
    "kv_piece": kv_piece,
    "journal": journal,
    "snapshot": snapshot,
}
PACKED = frozenset({"message", "map_details", "kv_piece", "journal"})
"""Targets whose inputs are MessagePack: mutations of what it says lead further than mutations of its bytes."""


KV_PIECE = {"shape": (1, 2, 3, 1, 4), "state": (1, 0), "begin": 0, "data": bytes(96)}


def _ring_seeds() -> list[bytes]:
    plain = RECORD.pack(1, 0, 5, -0.5, 0, HAS_LOGPROB, 3, b" se")
    goes_on = RECORD.pack(1, 1, 6, 0.0, 0, TEXT_GOES_ON, 12, b"abcdefghijkl") + RECORD.pack(1, 1, 6, 0.0, 0, 0, 1, b"m")
    logits = RECORD.pack(2, 0, 7, 0.0, 0, LOGITS, PLACE.size, PLACE.pack(1)) + RECORD.pack(2, 0, 7, 0, 0, 0, 0, b"")
    records = plain + goes_on + logits
    count = len(records) // RECORD_BYTES
    return [CURSORS.pack(first, count, 0) + records for first in (0, 1, 2, count)]


def _journal_seeds() -> list[bytes]:
    submit = Submit("r", prompt=bytes(8), params={"n": 2})
    finished = SAMPLES["finished"]
    events = [
        Accept(1, 1000, submit, 2, 7, 0.5, 1.5),
        Generated(1, 0, 0, (1, 2), (-0.5, -0.25), (((1, -0.5),), ())),
        End(1, finished),
        Finish(1, 2.5),
        Forget(1),
    ]
    payloads = [pack(event) for event in events]
    return [*payloads, b"".join(payloads), MAGIC + b"".join(map(frame, payloads))]


def _snapshot_seeds() -> list[bytes]:
    chance = np.random.default_rng(1)
    blocks = chance.integers(0, 256, (3, HERE.block_bytes), dtype=np.uint8)
    images = [Image(np.arange(10, dtype=np.int32), 9, blocks), Image(np.arange(3, dtype=np.int32), 0, blocks[:0])]
    return [b"".join(pieces(image, 1000, HERE)) for image in images]


SEEDS: dict[str, list[bytes]] = {
    "message": [encode(sample) for sample in SAMPLES.values()],
    "ring": _ring_seeds(),
    "cursors": [CURSORS.pack(0, 0, 0), b"".join(CURSORS.pack(20 * i, 448 * i, i // 3) for i in range(9))],
    "upload": [struct.pack("<qq", 0, 4) + bytes(range(16)), struct.pack("<qq", 64, 0), struct.pack("<qq", -4, 9)],
    "lifeline": [*FRAMES.values(), b"".join(FRAMES.values()), encode_frame(1, bytes(MAX_PAYLOAD_BYTES))],  # type: ignore[arg-type]
    "headers": [SMALL.header(), MapLayout(100, 16, 4096).header()],
    "map_details": [
        msgpack.packb({"sequences": [{"request_id": "r", "blocks": bytes(8)}], "counters": {"blocks_total": 2}}),
        msgpack.packb({"sequences": [], "counters": {}, "num_blocks": 2, "states": b"ab"}),
    ],
    "kv_piece": [
        msgpack.packb(
            {"shape": (1, 2, 3, 1, 4), "state": (1, 0), "begin": 0, "num_computed_tokens": n, "data": bytes(96)}
        )
        for n in (3, 6, 9)
    ],
    "journal": _journal_seeds(),
    "snapshot": _snapshot_seeds(),
}


def mutated(seed: bytes, chance: random.Random, *, packed: bool) -> bytes:
    """Another input, made of one by a few changes: to its bytes, or to what its MessagePack says."""
    if packed and chance.random() < 0.5:
        try:
            return bytes(msgpack.packb(_changed(msgpack.unpackb(seed, strict_map_key=False), chance)))
        except Exception:  # not MessagePack, or not such as can be packed again: then bytes
            pass
    raw = bytearray(seed or b"\0")
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(raw) or 1)
        match chance.randrange(5):
            case 0:
                raw[place : place + 1] = chance.randbytes(1)
            case 1:
                del raw[place + 1 :]
            case 2:
                raw[place:place] = chance.randbytes(chance.randint(1, 8))
            case 3:
                raw[place:place] = raw[: place + 1]
            case _:
                number = chance.choice(NUMBERS) & (2**64 - 1)
                width = chance.choice((1, 2, 4, 8))
                raw[place : place + width] = number.to_bytes(8, "little")[:width]
    return bytes(raw)


NUMBERS = (0, 1, 2, 3, 127, 128, 255, 256, 4096, 8192, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -1)
VALUES = (
    *(number for number in NUMBERS if -(2**63) <= number < 2**64),
    *(0.5, float("nan"), float("inf"), -float("inf"), 1e308, True, False, None),
    *("", "stop", "\x1b[2J", "\ud7ff", "n" * 200, b"", b"\xff" * 9, bytes(8)),
    *([], [1, 2], [[[[[[[1]]]]]]], {}, {"type": "hello"}, {"n": 2}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
)


def _changed(value: object, chance: random.Random) -> object:
    """One place of it is another value, gone, or there twice."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {name: item for name, item in value.items() if name != key}
            case 1:
                return value | {chance.choice(("params", "credit", "at", "x", 7)): chance.choice(VALUES)}
            case _:
                return value | {key: _changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        match chance.randrange(8):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value + value[place:]
            case _:
                return [*value[:place], _changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(VALUES)
