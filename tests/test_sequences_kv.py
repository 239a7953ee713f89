"""`sequence.kv()`: what attention reads, layer by layer, held against a forward pass in NumPy; and who may look."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.client import AsyncClient, Busy, InvalidArgument, NotFound, SequenceKV, Unsupported, calls
from kvpool.client.calls import Question
from kvpool.client.keys_values import KVPiece, KVPieces
from kvpool.client.requests import Options, make_generate
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.errors import ProtocolError
from kvpool.cpu_kernels.isa import host_has_half
from kvpool.cuda_kernels.layout import AttentionShape
from kvpool.model.backend import BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.keys_values import planes_as_numbers
from kvpool.model.loading import LoadedModel, load_model
from tests.support import cuda_twins
from tests.support.arena_rig import Rig, RigClient
from tests.support.daemon_process import DaemonProcess, eventually, left_clean
from tests.support.engine_harness import numpy_backend, tiny_model
from tests.support.numpy_backend import NumpyBackend
from tests.support.other_user import as_user
from tests.support.steps import Piece, run_step
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_model import write_tiny_model

PROMPT = [5, 9, 13, 21] * 12
GREEDY = {"temperature": 0.0, "ignore_eos": True}
BLOCK_SIZE = 16


def forward(model: LoadedModel, tokens: list[int]) -> NDArray[np.float32]:
    """(num_layers, 2, tokens, num_kv_heads, head_dim) of one undisturbed pass by the twin, in one block."""
    length = len(tokens)
    twin = NumpyBackend(model.program, model.checkpoint, BackendLimits(length, 1, length, length))
    twin.allocate_pool(1)
    run_step(twin, [Piece(tokens, 0, [0])], length)
    config = model.config
    shape = (2, config.num_layers, length, config.num_kv_heads, config.head_dim)
    found = twin.pool[0].reshape(shape).transpose(1, 0, 2, 3, 4)
    twin.close()
    return found


def assert_is(kv: SequenceKV, expected: NDArray[np.float32], begin: int = 0, tolerance: float = 2e-4) -> None:
    assert kv.begin == begin
    assert kv.keys.dtype == kv.values.dtype == np.float32
    assert not kv.keys.flags.writeable
    assert not kv.values.flags.writeable
    for layer in range(len(expected)):
        np.testing.assert_allclose(kv.keys[layer], expected[layer, 0, begin:], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(kv.values[layer], expected[layer, 1, begin:], rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    process = DaemonProcess("slow", socket_mode="0666")
    process.directory.chmod(0o755)
    with process:
        yield process


@pytest.fixture
def daemon(shared: DaemonProcess) -> Iterator[DaemonProcess]:
    with left_clean(shared):
        yield shared


def test_they_are_those_of_a_forward_pass(daemon: DaemonProcess) -> None:
    with daemon.client() as pool, pool.open(PROMPT) as chat:
        empty = chat.kv()
        assert empty.num_tokens == 0
        tokens = PROMPT + chat.generate(max_tokens=21, **GREEDY).token_ids
        kv = chat.kv()
        assert kv.num_tokens == len(tokens) - 1  # the last one was sampled, and not computed
        expected = forward(daemon.model(), tokens[:-1])
        assert kv.keys.shape == kv.values.shape == (2, 68, *expected.shape[3:])
        assert_is(kv, expected)
        with chat.fork(at=30) as other:
            other.append([1, 2])
            other.generate(max_tokens=1, **GREEDY)
            assert_is(other.kv(), forward(daemon.model(), [*tokens[:30], 1, 2]))
        chat.truncate(20)
        assert_is(chat.kv(), expected[:, :, :20])


def test_asyncio_has_them_too(daemon: DaemonProcess) -> None:
    async def read() -> SequenceKV:
        async with AsyncClient(daemon.address) as pool, await pool.open(PROMPT) as chat:
            await chat.generate(max_tokens=1, **GREEDY)
            return await chat.kv()

    assert_is(asyncio.run(read()), forward(daemon.model(), PROMPT))


def test_of_a_sequence_that_goes_on_meanwhile(daemon: DaemonProcess) -> None:
    """The steps of its own answer, and those of others, go on between two pieces."""
    with daemon.client() as pool, pool.open(PROMPT) as chat:
        with chat.submit(max_tokens=60, **GREEDY) as stream:
            tokens = [*PROMPT, next(stream).token_id]
            kvs = [chat.kv() for _ in range(4)]
            tokens += [event.token_id for event in stream if event.token_id >= 0]
        expected = forward(daemon.model(), tokens)
        assert len(PROMPT) <= kvs[0].num_tokens <= kvs[-1].num_tokens < len(tokens)
        for kv in kvs:
            assert_is(kv, expected[:, :, : kv.num_tokens])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
def test_only_its_owner_sees_them(daemon: DaemonProcess) -> None:
    with daemon.client() as pool, pool.open(PROMPT, sequence_id="mine") as chat:
        chat.generate(max_tokens=1, **GREEDY)
        assert as_user(daemon.address, 20_001, 20_001, [["kv", "mine", {}]]) == ["not_found"]
        chat.share(uid=20_002)
        assert as_user(daemon.address, 20_002, 20_002, [["attach", "mine", {}], ["kv", "mine", {}]]) == [
            len(PROMPT) + 1,
            "not_owner",
        ]


def test_what_cannot_be_answered(daemon: DaemonProcess) -> None:
    with daemon.client() as pool, pool.open(PROMPT, sequence_id="s") as chat:
        with pytest.raises(NotFound):
            pool._ask(calls.read_kv("another", 0))
        with pytest.raises(InvalidArgument, match="begin"):
            pool._ask(calls.read_kv("s", 1000))
        with pytest.raises(Busy, match="0 tokens are computed"):
            pool._ask(calls.read_kv("s", 1))
        with daemon.client(arena=False) as remote, pytest.raises(Unsupported):
            remote.attach("s").kv()
        chat.generate(max_tokens=1, **GREEDY)
        assert chat.kv().num_tokens == len(PROMPT)


def test_among_other_rows(daemon: DaemonProcess) -> None:
    """Threads of one client read K and V, logits and embeddings all at once."""
    with daemon.client() as pool, pool.open(PROMPT) as chat:
        chat.generate(max_tokens=1, **GREEDY)
        expected, stop = forward(daemon.model(), PROMPT), threading.Event()
        problems: list[BaseException] = []

        def again_and_again(work: object) -> None:
            try:
                while not stop.is_set():
                    work()  # type: ignore[operator]
            except BaseException as error:
                problems.append(error)

        def logits() -> None:
            with pool.submit(PROMPT, max_tokens=8, want_logits=True, **GREEDY) as stream:
                rows = [event.logits for event in stream if event.token_id >= 0]
                assert all(row is not None and row.shape == (384,) for row in rows)

        def embedding() -> None:
            assert pool.embed([PROMPT]).shape == (1, 64)

        threads = [threading.Thread(target=again_and_again, args=[work]) for work in (logits, embedding)]
        for thread in threads:
            thread.start()
        for _ in range(12):
            kv = patiently(chat)
            assert_is(kv, expected)
        stop.set()
        for thread in threads:
            thread.join(20.0)
        assert not problems


def patiently(chat: object) -> SequenceKV:
    """Where another thread's rows wait to be read, the daemon asks for patience."""
    found: list[SequenceKV] = []

    def read() -> bool:
        try:
            found.append(chat.kv())  # type: ignore[attr-defined]
        except Busy:
            return False
        return True

    assert eventually(read)
    return found[0]


def test_a_model_in_gguf_and_one_whose_blocks_leave_the_window(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "hf", "mistral", sliding_window=20)
    gguf = write_tiny_gguf(write_tiny_model(tmp_path / "plain", "llama"), tmp_path / "tiny.gguf")
    for path, begin in ((source, 32), (gguf, 0)):  # of 52 tokens the last 20 are looked at
        daemon = DaemonProcess("numpy")
        daemon.command = [f"--model={path}" if part.startswith("--model=") else part for part in daemon.command]
        with daemon, daemon.client() as pool, pool.open(PROMPT) as chat:
            tokens = PROMPT + chat.generate(max_tokens=5, **GREEDY).token_ids
            assert_is(chat.kv(), forward(load_model(path), tokens[:-1]), begin)


def ask(rig: Rig, client: RigClient, question: Question[Any]) -> Any:
    pending = client.core.call(question.make, question.name)
    while not pending.done:
        client.read()
        rig.turn()
    return question.read(pending.value())


@pytest.mark.parametrize("swapped", [False, True])
def test_pieces_of_what_lies_on_the_device_or_the_host(tmp_path: Path, swapped: bool) -> None:
    """A piece has at most half of the bytes of a small arena, and whole blocks while there are more."""
    rig = Rig(tmp_path, make_backend=numpy_backend, num_blocks=8, host_blocks=16)
    client = rig.client()
    rig.harness.scheduler.costs.compute_s_per_token = 1e3  # so that swapping is the cheaper way
    ask(rig, client, calls.open_sequence("s", PROMPT, False, 0.0))
    message = make_generate("s", SamplingParams(max_tokens=1, ignore_eos=True), Options(window=None))
    client.core.submit(message, 1)
    rig.run()
    if swapped:
        rig.client().submit([7] * 112, max_tokens=1)
        rig.run()
    held = rig.clients.sequences.own(rig.sessions.get(client.name), "s").sequence  # type: ignore[arg-type]
    assert bool(held.host_slots) is swapped
    pieces, sizes = KVPieces(), []
    while pieces.missing:
        found = ask(rig, client, calls.read_kv("s", pieces.position))
        sizes.append(found.values.shape[2])
        pieces.add(found)
    assert sizes == [32, 16]
    assert_is(pieces.whole(), forward(tiny_model(), PROMPT))
    client.full = True
    first, second = (client.core.call(calls.read_kv("s", 0).make, "kv") for _ in range(2))
    client.read()
    client.full = False
    while not (first.done and second.done):
        client.read()
        rig.turn()
    assert first.error is None
    assert isinstance(second.error, Busy)
    rig.close()


# The layouts


@pytest.mark.parametrize("block_size", [4, 16, 7])
@pytest.mark.parametrize(
    ("kv", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2), ("float16", 1e-2), ("int8", 5e-2)]
)
def test_blocks_of_the_cpu_as_numbers(kv: str, tolerance: float, block_size: int, tmp_path: Path) -> None:
    if kv == "float16" and not host_has_half():
        pytest.skip("this processor has no float16")
    model = load_model(write_tiny_model(tmp_path, "llama", head_dim=24, num_key_value_heads=3, num_attention_heads=3))
    limits = BackendLimits(block_size, 4, 64, 64)
    backend = CpuBackend(model.program, model.checkpoint, limits, dtype="float32", kv_dtype=kv, threads=1)
    backend.allocate_pool(16)
    tokens, table = PROMPT[:21], [3, 9, 1, 7, 4, 2]
    run_step(backend, [Piece(tokens, 0, table)], block_size)
    numbers = backend.keys_values(backend.read_blocks(table[: -(-21 // block_size)]))
    backend.close()
    found = numbers.transpose(1, 2, 0, 3, 4, 5).reshape(2, 2, -1, 3, 24)[:, :, :21]
    np.testing.assert_allclose(found, forward(model, tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "float16", "int8", "float8_e4m3"])
def test_blocks_of_the_card_as_numbers(kv: str) -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, kv=kv)
    numbers = np.random.default_rng(0).normal(0, 1, (3, 5, 2, 2, 8, 16)).astype(np.float32)
    scales = np.ones(numbers.shape[:-1], np.float32)
    if kv in cuda_twins.LARGEST_CODE:
        scales = np.abs(numbers).max(axis=-1) / np.float32(cuda_twins.LARGEST_CODE[kv])
    codes = cuda_twins.stored(numbers / scales[..., None], kv)
    parts = [np.ascontiguousarray(codes).view(np.uint8).reshape(3, -1)]
    if kv in cuda_twins.LARGEST_CODE:
        parts.append(scales.astype(np.float32).view(np.uint8).reshape(3, -1))
    found = planes_as_numbers(np.concatenate(parts, axis=1), shape, num_layers=5)
    exact = cuda_twins.values(codes, kv) * scales[..., None]
    np.testing.assert_allclose(found, exact.transpose(0, 1, 2, 4, 3, 5), rtol=1e-6)


# Answers


def piece(**fields: object) -> dict[str, object]:
    shape = (1, 2, 3, 1, 4)
    return {"shape": shape, "state": (1, 0), "begin": 0, "num_computed_tokens": 5, "data": bytes(96)} | fields


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": None},
        {"shape": (1, 3, 2, 1, 4)},
        {"shape": (1, 2, 3, 1)},
        {"shape": (1, 2, -3, 1, -4)},
        {"shape": (2**31, 2, 2**31, 2**31, 2**31)},
        {"state": (1,)},
        {"state": (1, True)},
        {"begin": -1},
        {"num_computed_tokens": "5"},
        {"shape": (2**31, 2, 0, 2**31, 2**31), "data": b"", "num_computed_tokens": 2**31},
        {"data": bytes(95)},
        {"data": None},
    ],
)
def test_an_answer_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    assert KVPiece.of(piece()).values.shape == (1, 2, 3, 1, 4)
    with pytest.raises(ProtocolError):
        KVPiece.of(piece(**wrong))


@pytest.mark.parametrize("second", [{"state": (1, 1)}, {"begin": 4}, {"shape": (1, 2, 0, 1, 4), "data": b""}])
def test_pieces_of_something_else_are_not_put_together(second: dict[str, object]) -> None:
    pieces = KVPieces()
    pieces.add(KVPiece.of(piece()))
    assert (pieces.position, pieces.missing) == (3, True)
    with pytest.raises(Busy):
        pieces.add(KVPiece.of(piece(begin=3) | second))
    pieces.add(KVPiece.of(piece(begin=3, num_computed_tokens=9)))
    assert (pieces.whole().num_tokens, pieces.missing) == (5, False)
