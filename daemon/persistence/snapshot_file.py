"""A sequence as a safetensors file: tokens, computed blocks, whose they are, and what they can be used with.

The file has three tensors: `tokens` int32 (num_tokens,), `checksums` uint8 (num_blocks, 16) and `blocks` uint8
(num_blocks, block_bytes), as the device keeps them. A block's checksum is the BLAKE2b of its bytes; that of the header,
the tokens and the block checksums together stands in the header. The header must be, byte for byte, the one that this
module writes for what it says, so there is no byte in a file whose change goes unnoticed.

A file of another block size, layout or precision is still a sequence of the same model: its tokens are restored, and
their blocks computed again. A file of another model, owner or version is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...client.wire.errors import InvalidArgument, NotOwner, TooLong, Unsupported

FORMAT, VERSION = "kvpool-sequence", "1"
CHECKSUM_BYTES = 16
MAX_HEADER_BYTES = 1 << 16
MAX_SIZE = 1 << 40  # of a tensor in any direction
ALIGNMENT = 8
METADATA = ("format", "version", "model_hash", "kv_layout", "block_size", "owner", "num_computed_tokens")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Image:
    """What is stored of a sequence; without blocks, all of it will be computed again."""

    token_ids: NDArray[np.int32]  # (num_tokens,)
    num_computed_tokens: int
    blocks: Bytes  # (num_blocks, block_bytes): those of the computed tokens


@dataclass(frozen=True, slots=True)
class Suitability:
    """What this daemon can use."""

    model_hash: str
    kv_layout: str
    block_size: int
    block_bytes: int
    vocab_size: int
    max_model_len: int

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def pieces(image: Image, owner: int, here: Suitability) -> Iterator[bytes | memoryview]:
    """The bytes of a file, piece by piece."""
    checksums = b"".join(_checksum(block) for block in image.blocks)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model_hash": here.model_hash,
        "kv_layout": here.kv_layout,
        "block_size": str(here.block_size),
        "owner": str(owner),
        "num_computed_tokens": str(image.num_computed_tokens),
    }
    tokens = image.token_ids.astype("<i4").tobytes()
    shape = (len(image.token_ids), *image.blocks.shape)
    yield _header(metadata | {"checksum": _checksum_of_all(metadata, shape, tokens, checksums)}, shape)
    yield tokens
    yield checksums
    for block in image.blocks:
        yield block.data


def read(file: BinaryIO, size: int, owner: int, here: Suitability) -> Image:
    """The sequence in a file of `size` bytes, every byte of it verified. Raises InvalidArgument for a file that is
    damaged, NotOwner, TooLong, or Unsupported for one that is of no use here."""
    metadata, shape = _read_header(file, size)
    num_tokens, num_blocks, block_bytes = shape
    tokens, checksums = _exactly(file, 4 * num_tokens), _exactly(file, CHECKSUM_BYTES * num_blocks)
    stated = metadata.pop("checksum")
    if stated != _checksum_of_all(metadata, shape, tokens, checksums):
        raise _damaged("its checksum is wrong")
    usable = _check_use(metadata, shape, owner, here)
    token_ids = np.frombuffer(tokens, dtype="<i4").astype(np.int32)
    if not num_tokens or token_ids.min() < 0 or token_ids.max() >= here.vocab_size:
        raise _damaged("it has tokens that the model does not")
    blocks: Bytes = np.empty((num_blocks if usable else 0, block_bytes), dtype=np.uint8)
    for number in range(num_blocks):
        block = _exactly(file, block_bytes)
        if _checksum(block) != checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]:
            raise _damaged(f"the checksum of block {number} is wrong")
        if usable:
            blocks[number] = np.frombuffer(block, dtype=np.uint8)
    return Image(token_ids, int(metadata["num_computed_tokens"]) if usable else 0, blocks)


def _check_use(metadata: Mapping[str, str], shape: tuple[int, int, int], owner: int, here: Suitability) -> bool:
    """Whether the blocks can be used, too. Raises where nothing can."""
    if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
        raise Unsupported(f"is a file of version {metadata['version']}, this daemon reads {VERSION}", field="name")
    if metadata["owner"] != str(owner):
        raise NotOwner("is a sequence of another user", field="name")
    if metadata["model_hash"] != here.model_hash:
        raise Unsupported("is a sequence of another model; start the daemon with that one", field="name")
    num_tokens, num_blocks, block_bytes = shape
    if num_tokens > here.max_model_len:
        raise TooLong(f"has {num_tokens} tokens, max_model_len is {here.max_model_len}", field="name")
    same = (metadata["kv_layout"], metadata["block_size"]) == (here.kv_layout, str(here.block_size))
    if not same or not num_blocks:
        return False
    computed = metadata["num_computed_tokens"]
    if not computed.isdecimal() or not 0 < int(computed) <= num_tokens:
        raise _damaged("it has more computed tokens than tokens")
    if block_bytes != here.block_bytes or num_blocks != here.num_blocks(int(computed)):
        raise _damaged("its blocks are not those of its tokens")
    return True


def _header(metadata: Mapping[str, str], shape: tuple[int, ...]) -> bytes:
    """Length and JSON of the only header that a file with this content can have."""
    num_tokens, num_blocks, block_bytes = shape
    ends = [0, 4 * num_tokens]
    ends += [ends[1] + CHECKSUM_BYTES * num_blocks]
    ends += [ends[2] + num_blocks * block_bytes]
    entries = {
        "__metadata__": dict(metadata),
        "tokens": {"dtype": "I32", "shape": [num_tokens], "data_offsets": ends[0:2]},
        "checksums": {"dtype": "U8", "shape": [num_blocks, CHECKSUM_BYTES], "data_offsets": ends[1:3]},
        "blocks": {"dtype": "U8", "shape": [num_blocks, block_bytes], "data_offsets": ends[2:4]},
    }
    text = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, str], tuple[int, int, int]]:
    """Metadata and (num_tokens, num_blocks, block_bytes); what follows is as long as they say."""
    prefix = _exactly(file, 8)
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, size):
        raise _damaged("it does not begin like one")
    text = _exactly(file, length)
    try:
        entries = json.loads(text)
        metadata = {str(key): str(value) for key, value in entries["__metadata__"].items()}
        (num_tokens,), (num_blocks, block_bytes) = entries["tokens"]["shape"], entries["blocks"]["shape"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged("its header cannot be read") from None
    shape = (num_tokens, num_blocks, block_bytes)
    if not all(type(count) is int and 0 <= count <= MAX_SIZE for count in shape) or {*metadata} != {
        *METADATA,
        "checksum",
    }:
        raise _damaged("its header has wrong entries")
    if prefix + text != _header(metadata, shape):
        raise _damaged("its header is not as it was written")
    if 8 + length + 4 * num_tokens + num_blocks * (CHECKSUM_BYTES + block_bytes) != size:
        raise _damaged("it is truncated, or something was added")
    return metadata, shape


def _checksum_of_all(metadata: Mapping[str, str], shape: tuple[int, ...], tokens: bytes, checksums: bytes) -> str:
    digest = blake2b(_header(metadata, shape), digest_size=CHECKSUM_BYTES)
    digest.update(tokens)
    digest.update(checksums)
    return digest.hexdigest()


def _checksum(block: Any) -> bytes:
    return blake2b(block, digest_size=CHECKSUM_BYTES).digest()


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise _damaged("it is truncated")
    return data


def _damaged(why: str) -> InvalidArgument:
    return InvalidArgument(f"the snapshot is damaged: {why}; save the sequence again", field="name")
