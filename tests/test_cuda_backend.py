"""The whole CUDA back end without a card: kernels by the PTX interpreter, or by their NumPy twins at the same seam."""

from __future__ import annotations

import select
from typing import Any

import numpy as np
import pytest

from kvpool.model.backend import BackendLimits
from kvpool.model.program import Program
from kvpool.model.quantised import NEAREST, nearest_codes
from tests.support.cuda_card import Card, TwinCard
from tests.support.cuda_rooms import layout
from tests.support.cuda_twins import code_values
from tests.support.numpy_backend import NumpyBackend
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.real_card import backend_card, fresh, interpreter_only
from tests.support.steps import Piece, Shape, run_step, step_batch, tiny_program

cuda_backend = pytest.importorskip("kvpool.model.cuda.backend")

LIMITS = BackendLimits(block_size=8, max_num_seqs=4, max_num_batched_tokens=96, max_model_len=128)
SHAPE = Shape(num_layers=1, hidden_size=32, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=16)


def made(program: Program, card: Card, **options: Any) -> Any:
    backend = cuda_backend.CudaBackend(program, RandomCheckpoint(program), LIMITS, device=card, **options)
    backend.allocate_pool(40)
    return backend


def prompt(seed: int, count: int) -> list[int]:
    return fresh(seed).integers(0, SHAPE.vocab_size, count).tolist()


TABLES = [[5, 17, 2], [30, 1, 9], [8, 7, 6]]
PROMPTS = [prompt(0, 7), prompt(1, 8), prompt(2, 17)]


def steps() -> list[list[Piece]]:
    """A ragged prefill, a chunk beside two decoding rows, and decode alone."""
    return [
        [Piece(PROMPTS[0], 0, TABLES[0]), Piece(PROMPTS[1], 0, TABLES[1]), Piece(PROMPTS[2][:9], 0, TABLES[2])],
        [Piece([3], 7, TABLES[0]), Piece([4], 8, TABLES[1]), Piece(PROMPTS[2][9:], 9, TABLES[2])],
        [Piece([5], 8, TABLES[0]), Piece([6], 9, TABLES[1]), Piece([7], 17, TABLES[2])],
    ]


@pytest.mark.parametrize("kind", ["interpreted", "twins"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPE, "float32"),
        (SHAPE, "bfloat16"),
        (
            Shape(
                num_layers=2, windows=(5, 0), head_norms=True, post_norm=True, bias=True, head_dim=16,
                activation="gelu_tanh", embedding_scale=3.5, tied=False,
            ),
            "float32",
        ),
    ],
    ids=["plain-float32", "plain-bfloat16", "gemma-like"],
)  # fmt: skip
def test_steps_equal_those_of_the_numpy_back_end(kind: str, shape: Shape, dtype: str) -> None:
    program = tiny_program(shape)
    config = program.config
    attention = layout.AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, LIMITS.block_size, dtype)
    card = backend_card() if kind == "interpreted" else TwinCard(attention, dtype)
    backend, twin = made(program, card, dtype=dtype), NumpyBackend(program, RandomCheckpoint(program), LIMITS)
    twin.allocate_pool(40)
    for pieces in steps():
        asked = {"layers": range(config.num_layers), "num_logprobs": 3}
        got, expected = (run_step(each, pieces, LIMITS.block_size, **asked) for each in (backend, twin))
        tolerance = 1e-4 if dtype == "float32" else 0.15
        for name in ("logits", "hidden", "logprobs", "layer_outputs"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=tolerance, atol=tolerance)
        if dtype == "float32":
            assert got.tokens.tolist() == expected.tokens.tolist()
            np.testing.assert_array_equal(got.top_tokens, expected.top_tokens)
        assert not got.numeric_errors.any()
    backend.close()
    twin.close()


def logits_of(backend: Any, pieces: list[Piece], row: int) -> np.ndarray:
    return run_step(backend, pieces, LIMITS.block_size).logits[row]


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_sequence_has_the_same_bits_whole_in_chunks_in_company_and_after_a_prefix_hit(kv_dtype: str) -> None:
    backend = made(tiny_program(SHAPE), backend_card(), dtype="bfloat16", kv_dtype=kv_dtype)
    backend.write_blocks(range(40), np.full((40, backend.block_bytes), 0xFF, np.uint8))  # NaN wherever nobody wrote
    tokens = prompt(3, 20)
    whole = logits_of(backend, [Piece(tokens, 0, [4, 5, 6])], 0)
    logits_of(backend, [Piece(tokens[:7], 0, [10, 11, 12])], 0)
    company = [Piece(prompt(4, 30), 0, [20, 21, 22, 23]), Piece(tokens[7:], 7, [10, 11, 12]), Piece([1], 0, [30])]
    np.testing.assert_array_equal(logits_of(backend, company, 1), whole)
    np.testing.assert_array_equal(logits_of(backend, [Piece(tokens[16:], 16, [4, 5, 13])], 0), whole)  # a prefix hit
    np.testing.assert_array_equal(logits_of(backend, [Piece(tokens[19:], 19, [4, 5, 6])], 0), whole)  # as decode
    backend.allocate_host(5)
    backend.swap_out([4, 5, 6], [3, 4, 0])
    backend.write_blocks([4, 5, 6], np.full((3, backend.block_bytes), 0xFF, np.uint8))
    backend.swap_in([3, 4, 0], [33, 31, 32])
    backend.copy_blocks([31], [7])
    np.testing.assert_array_equal(
        logits_of(backend, [Piece(tokens[19:], 19, [33, 7, 32])], 0), whole
    )  # swapped, copied


def greedy(batch: Any) -> Any:
    batch.want_logits = batch.want_hidden = False
    return batch


def test_captured_decode_steps_give_what_single_launches_give() -> None:
    program = tiny_program(SHAPE)
    attention = layout.AttentionShape(4, 2, 16, LIMITS.block_size, "float32")
    results = []
    for graphs in (True, False, None):
        card = TwinCard(attention, "float32")
        card.graphs_allowed = graphs is not None
        backend = made(program, card, dtype="float32", graphs=graphs is not False)
        for pieces in steps()[:2]:
            run_step(backend, pieces, LIMITS.block_size)
        tokens, logprobs = [], []
        pieces = steps()[2]
        for turn in range(4):
            some = pieces if turn % 2 else pieces[:3]
            sampling = {
                "temperature": 0.7,
                "seeds": [3, 4, 5],
                "counters": turn,
                "bias": [[(9, -np.inf)], [], [(8, 3.0)]],
            }
            backend.launch(greedy(step_batch(some, LIMITS.block_size, **sampling)))
            assert select.select([backend.fileno()], [], [], 1)[0]
            result = backend.collect()
            tokens.append(result.tokens.tolist())
            logprobs.append(result.logprobs)
            pieces = [
                Piece([token], piece.start + 1, piece.blocks) for token, piece in zip(tokens[-1], some, strict=True)
            ]
        results.append((tokens, np.stack(logprobs)))
        assert len(backend._graphs) == (0 if graphs is False else 1)
        backend.close()
    for tokens, logprobs in results[1:]:
        assert tokens == results[0][0]
        np.testing.assert_allclose(logprobs, results[0][1], rtol=1e-5)  # the twins' products are NumPy's


class Decoder:
    """Greedy sequences step by step, as the daemon would run them."""

    def __init__(self, backend: Any, blocks: list[list[int]]) -> None:
        self.backend, self.free = backend, [list(each) for each in blocks]
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.blocks: dict[int, list[int]] = {}

    def begin(self, sequence: int, length: int) -> None:
        self.tokens[sequence], self.logprobs[sequence] = prompt(50 + sequence, length), []
        self.blocks[sequence] = self.free.pop()

    def end(self, sequence: int) -> None:
        self.free.append(self.blocks.pop(sequence))

    def step(self, *sequences: int, **sampling: Any) -> None:
        """What each lacks, and a token for each."""
        pieces = []
        for each in sequences:
            start = len(self.tokens[each]) - 1 if self.logprobs[each] else 0
            pieces.append(Piece(self.tokens[each][start:], start, self.blocks[each]))
        counters = [len(self.logprobs[each]) for each in sequences]
        options = {"temperature": 0.8, "seeds": list(sequences), "counters": counters, "num_logprobs": 2, **sampling}
        self.backend.launch(greedy(step_batch(pieces, LIMITS.block_size, **options)))
        assert select.select([self.backend.fileno()], [], [], 5)[0]
        result = self.backend.collect()
        for each, token, logprob in zip(sequences, result.tokens.tolist(), result.logprobs.tolist(), strict=True):
            self.tokens[each].append(token)
            self.logprobs[each].append(logprob)


def decoded(ahead: bool, script: Any, **options: Any) -> tuple[Any, list[str]]:
    card = TwinCard(layout.AttentionShape(4, 2, 16, LIMITS.block_size, "float32"), "float32")
    backend = made(tiny_program(SHAPE), card, dtype="float32", ahead=ahead, **options)
    decoder = Decoder(backend, [[1, 11, 21, 31], [2, 12, 22, 32], [3, 13, 23, 33]])
    script(decoder)
    backend.close()
    return (decoder.tokens, decoder.logprobs), card.launches


def test_a_step_launched_ahead_is_the_step_that_is_asked_for() -> None:
    def script(decoder: Decoder) -> None:
        decoder.begin(0, 9)
        decoder.begin(1, 25)
        for _ in range(8):  # to the end of the second one's four blocks: what is behind it is not known
            decoder.step(0, 1)

    plain, few = decoded(False, script)
    ahead, many = decoded(True, script)
    assert ahead == plain
    assert many == few  # everything that was launched ahead was asked for


def test_a_step_launched_ahead_in_vain_leaves_no_trace() -> None:
    def script(decoder: Decoder) -> None:
        decoder.begin(0, 6)
        decoder.begin(1, 9)
        decoder.step(0, 1)
        decoder.step(0, 1)
        decoder.step(1)  # one is not scheduled
        decoder.step(0, 1)
        decoder.end(1)
        decoder.begin(2, 5)  # in the blocks to which a step launched ahead still writes
        decoder.step(0, 2)
        for _ in range(12):  # over the ends of blocks
            decoder.step(0, 2)
        decoder.step(2, 0)  # in another order
        decoder.step(2, 0, bias=[[(9, 50.0)], []])  # other wishes
        decoder.backend.copy_blocks([decoder.blocks[2][0]], [39])
        decoder.blocks[2][0] = 39
        decoder.step(2, 0)

    plain, few = decoded(False, script)
    ahead, many = decoded(True, script)
    assert ahead == plain
    assert len(many) > len(few)


def test_a_row_in_error_does_not_lead_the_next_step_astray() -> None:
    backend = made(tiny_program(SHAPE), backend_card(), dtype="bfloat16")
    backend.write_blocks([3], np.full((1, backend.block_bytes), 0xFF, np.uint8))
    backend.launch(greedy(step_batch([Piece([5], 2, [3])], LIMITS.block_size)))  # reads NaN; a step ahead is queued
    assert backend.collect().tokens.tolist() == [-1]
    backend.launch(greedy(step_batch([Piece([5], 0, [4])], LIMITS.block_size)))
    assert not backend.collect().numeric_errors.any()


def test_a_padded_capture_runs_as_machine_code_too() -> None:
    backend = made(tiny_program(SHAPE), backend_card(), dtype="bfloat16")
    for pieces in steps()[:2]:
        run_step(backend, pieces, LIMITS.block_size)
    plain = run_step(backend, steps()[2], LIMITS.block_size, num_logprobs=2)
    backend.launch(greedy(step_batch(steps()[2], LIMITS.block_size, num_logprobs=2)))
    captured = backend.collect()
    assert [rows for rows, _ in backend._graphs] == [4]  # three sequences, padded to four rows
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs", "numeric_errors"):
        np.testing.assert_array_equal(getattr(captured, name), getattr(plain, name))


def test_sequences_that_share_blocks_read_them_once_and_keep_their_bits() -> None:
    program, limits = tiny_program(SHAPE), BackendLimits(8, 4, 320, 320)
    card = backend_card()
    backend = cuda_backend.CudaBackend(program, RandomCheckpoint(program), limits, dtype="bfloat16", device=card)
    backend.allocate_pool(60)
    backend.write_blocks(range(60), np.full((60, backend.block_bytes), 0xFF, np.uint8))
    prefix = list(range(36))  # 288 tokens, more than a split
    tables = [[*prefix, 40 + own] for own in range(3)]
    run_step(backend, [Piece(prompt(7, 290), 0, tables[0])], 8)
    backend.copy_blocks([40, 40], [41, 42])
    pieces = [Piece([token], 290, table) for token, table in zip((3, 4, 5), tables, strict=True)]
    apart = [run_step(backend, [piece], 8).logits[0] for piece in pieces]
    card.launches.clear()
    together = run_step(backend, pieces, 8).logits
    np.testing.assert_array_equal(together, np.stack(apart))
    assert "paged_decode_16" in card.launches  # wide tiles hold rows of several sequences
    backend.launch(greedy(step_batch(pieces, 8)))
    np.testing.assert_array_equal(backend.collect().tokens, together.argmax(axis=1))


def test_more_logit_rows_than_the_buffer_holds_come_in_stretches() -> None:
    program = tiny_program(SHAPE)
    backend = made(program, TwinCard(layout.AttentionShape(4, 2, 16, 8, "float32"), "float32"), dtype="float32")
    twin = NumpyBackend(program, RandomCheckpoint(program), LIMITS)
    twin.allocate_pool(40)
    tokens = prompt(5, 11)
    targets = np.array([*tokens[1:], -1])
    penalties = [[(token, 1)] for token in tokens]
    options: dict[str, Any] = {"targets": targets, "num_logprobs": 5, "penalties": penalties, "repetition_penalty": 1.3}
    got, expected = (
        run_step(each, [Piece(tokens, 0, [3, 4])], 8, every_row=True, **options) for each in (backend, twin)
    )
    assert got.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(got.top_tokens, expected.top_tokens)
    np.testing.assert_allclose(got.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_fast_products_take_the_vendors_and_the_prefill_kernel() -> None:
    program = tiny_program(SHAPE)
    card = backend_card()
    fast, exact = (
        made(program, card, dtype="bfloat16", products="fast"),
        made(program, backend_card(), dtype="bfloat16"),
    )
    assert card.launches == ["vendor"]  # its memory is taken at the start
    card.launches.clear()
    pieces = [Piece(prompt(6, 70), 0, list(range(9))), Piece([5], 0, [12])]
    got, expected = (run_step(each, pieces, LIMITS.block_size) for each in (fast, exact))
    np.testing.assert_allclose(got.logits, expected.logits, rtol=0.05, atol=0.05)
    assert {"vendor", "paged_prefill", "paged_decode_16"} <= set(card.launches)


class Rounded(RandomCheckpoint):
    """Random matrices as their 8- or 4-bit codes stand for them."""

    def __init__(self, program: Program, packing: str) -> None:
        super().__init__(program)
        self._packing = packing

    def load(self, name: str) -> Any:
        values = super().load(name)
        if values.ndim == 1:
            return values
        codes = nearest_codes(values, NEAREST[self._packing])
        return code_values(codes)[:, : values.shape[1]].astype(np.float32)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_weights_give_the_logits_of_their_codes(dtype: str) -> None:
    program = tiny_program(SHAPE)
    backend, twin = made(program, backend_card(), dtype=dtype), NumpyBackend(program, Rounded(program, dtype), LIMITS)
    twin.allocate_pool(40)
    for pieces in steps()[:2]:
        got, expected = (run_step(each, pieces, LIMITS.block_size) for each in (backend, twin))
        assert np.linalg.norm(got.logits - expected.logits) < 0.02 * np.linalg.norm(expected.logits)
    assert dtype in backend.description


@interpreter_only
def test_what_cuda_cannot_do_is_said_with_the_value_to_set() -> None:
    program = tiny_program(SHAPE)
    with pytest.raises(ValueError, match="set dtype to"):
        made(program, Card(), dtype="int3")
    with pytest.raises(ValueError, match="kv_dtype float32 needs dtype float32"):
        made(program, Card(), kv_dtype="float32")
    with pytest.raises(ValueError, match="hidden_size"):
        made(tiny_program(Shape(hidden_size=37)), Card())
    with pytest.raises(MemoryError, match="smaller model or dtype"):
        made(program, Card(capacity_bytes=1 << 10))
    backend = made(program, Card(capacity_bytes=1 << 28), dtype="float32")
    with pytest.raises(MemoryError, match="lower pool_bytes"):
        backend.allocate_pool(1 << 20)
    with pytest.raises(MemoryError, match=r"the host pool.* lower host_pool_bytes"):
        backend.allocate_host(1 << 20)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        backend.launch(step_batch([Piece(prompt(0, 97), 0, list(range(13)))], 8))
    with pytest.raises(RuntimeError, match="no step"):
        backend.collect()
    backend.close()
    backend.close()


@interpreter_only
def test_the_ledger_adds_up() -> None:
    card = Card()
    backend = made(tiny_program(SHAPE), card, dtype="bfloat16")
    assert card.allocated == backend.weights_bytes + backend.workspace_bytes + 40 * backend.block_bytes
    assert backend.available_bytes() == card.free_bytes()
    assert backend.block_bytes == 2 * 2 * 8 * 16 * 2
