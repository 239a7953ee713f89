"""`CupyDevice` against a CuPy made of NumPy and the PTX interpreter; and that one against the real one, where it is."""

from __future__ import annotations

import inspect
import os
import re
import select
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install numba-cuda[cu13])")

from kvpool.model.backend import BackendLimits
from kvpool.model.cuda import device as cuda_device
from kvpool.model.cuda.backend import CudaBackend
from kvpool.model.cuda.device import Arguments, CupyDevice
from tests.support import fake_cupy
from tests.support.cuda_card import Card
from tests.support.cuda_rooms import norms
from tests.support.fake_cupy import FakeCupy
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.steps import Piece, Shape, step_batch, tiny_program


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda_device, "assemble", lambda kernel, capability: kernel.ptx.encode())
    return fake


def decoded(device: Any) -> tuple[list[list[int]], np.ndarray]:
    """Tokens and logprobs of a prompt and four captured decode steps in float32."""
    program = tiny_program(Shape(num_layers=1, hidden_size=32, intermediate_size=40, num_heads=4, head_dim=16))
    limits = BackendLimits(block_size=8, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    backend = CudaBackend(program, RandomCheckpoint(program), limits, dtype="float32", device=device)
    backend.allocate_pool(6)
    backend.write_blocks(range(6), np.zeros((6, backend.block_bytes), np.uint8))
    pieces, tokens, logprobs = [Piece([3, 4, 5], 0, [4, 1]), Piece([9], 0, [2, 0])], [], []
    for _ in range(5):
        batch = step_batch(pieces, 8, temperature=0.9, seeds=[1, 2])
        batch.want_logits = batch.want_hidden = False
        backend.launch(batch)
        assert select.select([backend.fileno()], [], [], 10)[0]
        result = backend.collect()
        tokens.append(result.tokens.tolist())
        logprobs.append(result.logprobs)
        pieces = [
            Piece([token], each.start + len(each.tokens), each.blocks)
            for token, each in zip(tokens[-1], pieces, strict=True)
        ]
    blocks = backend.read_blocks([4, 2])
    backend.copy_blocks([4], [5])
    backend.write_blocks([3], blocks[1:])
    np.testing.assert_array_equal(backend.read_blocks([5, 3]), blocks)
    backend.allocate_host(3)
    backend.swap_out([4, 2], [2, 0])
    backend.swap_in([0, 2], [1, 0])
    np.testing.assert_array_equal(backend.read_blocks([0, 1]), blocks)
    np.testing.assert_array_equal(backend.read_host([2, 0]), blocks)
    num_blocks, seconds = backend.take_swap_times()
    assert num_blocks == 4
    assert seconds > 0
    backend.close()
    return tokens, np.stack(logprobs)


def test_the_back_end_runs_on_it_as_on_the_interpreter(cupy: FakeCupy) -> None:
    device = CupyDevice()
    assert device.name == "a card of CuPy's (sm_90)"
    tokens, logprobs = decoded(device)
    expected = decoded(Card())
    assert tokens == expected[0]
    np.testing.assert_array_equal(logprobs, expected[1])
    assert len(cupy.freed) == len(set(cupy.freed)) > 3
    device.close()


def test_products_of_the_vendor_are_those_of_numpy_and_cannot_be_captured(cupy: FakeCupy) -> None:
    device, random = CupyDevice(), np.random.default_rng(0)
    x, weight = (random.normal(0, 1, size).astype(np.float32) for size in ((3, 8), (5, 8)))
    addresses = [device.allocate(each.nbytes, "", "") for each in (x, weight, np.zeros((3, 5), np.float32))]
    for address, each in zip(addresses, (x, weight), strict=False):
        device.upload(address, each.reshape(-1).view(np.uint8))
    out = device.staging(60, "", "")
    for add, times in ((False, 1), (True, 2)):
        device.multiply("float32", *addresses, (3, 5, 8), add)
        device.download(out, addresses[2])
        device.synchronize()
        np.testing.assert_allclose(out.view(np.float32).reshape(3, 5), times * x @ weight.T, rtol=1e-5)
    assert device.capture(lambda: device.multiply("float32", *addresses, (3, 5, 8), False)) is None
    assert cupy.capturing is None  # the stream is as before
    device.close()


def test_a_card_that_fails_is_heard_of_by_poll_and_by_error(cupy: FakeCupy) -> None:
    device, event = CupyDevice(), os.eventfd(0)
    cupy.failing = True
    mark = device.mark()
    device.notify(mark, event)
    assert select.select([event], [], [], 10)[0]
    with pytest.raises(RuntimeError, match=r"the card failed.*illegal"):
        mark()
    with pytest.raises(RuntimeError, match="the card failed"):
        device.synchronize()
    device.close()
    os.close(event)


def test_memory_that_is_not_there_is_refused_with_the_remedy(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> bytearray:
        raise fake_cupy.CUDARuntimeError("no more")

    device = CupyDevice()
    with pytest.raises(MemoryError, match=r"the pool needs 9\.31 GiB .* lower pool_bytes"):
        device.allocate(10**10, "the pool", "lower pool_bytes")
    with pytest.raises(MemoryError, match=r"the host pool needs 953674316 MiB of page-locked .* lower host_pool_bytes"):
        device.staging(10**15, "the host pool", "lower host_pool_bytes")
    monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", refuse)
    with pytest.raises(MemoryError, match=r"the driver refuses \(no more\); lower host_pool_bytes"):
        device.staging(10, "the host pool", "lower host_pool_bytes")
    device.close()


def test_arguments_that_a_kernel_does_not_take_are_refused() -> None:
    arguments = Arguments(norms.rms_norm("float32"))
    arguments.fill((1 << 40, 2, 3, -4, 0.5))
    assert arguments.values[0] == 1 << 40
    assert arguments.values[3:].view(np.int32)[::2][0] == -4
    assert arguments.values[4:].view(np.float32)[0] == 0.5
    for wrong in ((1, 2, 3, 4), (1, 2, 3, 4.5, 0.5), (1, 2, 3, 1 << 31, 0.5)):
        with pytest.raises(TypeError, match="rms_norm"):
            arguments.fill(wrong)


@pytest.mark.parametrize("part", ["runtime", "driver"])
def test_cupy_has_what_the_fake_has(part: str) -> None:
    real = getattr(pytest.importorskip("cupy.cuda", reason="CuPy is not installed"), part)
    fake = getattr(fake_cupy, part.capitalize())
    for name, member in vars(fake).items():
        if name.startswith("_"):
            continue
        theirs = getattr(real, name)
        if not callable(member) or isinstance(member, type):
            assert isinstance(member, type) or member == theirs, name
            continue
        signature = re.match(r"\w+\((.*?)\)", theirs.__doc__ or "")
        assert signature is not None, name
        wanted = [each.split("=")[0].split()[-1] for each in signature[1].split(",") if each.strip()]
        assert wanted == list(inspect.signature(member).parameters)[1:], name
