"""Outputs of layers from the engine: those of a forward pass, and the same bit for bit whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.client.wire.errors import InvalidArgument
from kvpool.daemon.engine import hidden_states
from kvpool.daemon.engine.hidden_states import HiddenStates, resolve_layers
from kvpool.daemon.engine.request import Request
from kvpool.model.batch import StepBatch
from kvpool.model.cpu.backend import CpuBackend
from tests.support.dense import dense_forward
from tests.support.engine_harness import Harness, prompts
from tests.support.tiny_model import write_tiny_llama

(LONG,) = prompts(1, 90)
ASKED: dict[str, Any] = {"hidden_layers": (0, -1), "max_tokens": 12, "ignore_eos": True}
Array = NDArray[Any]


class Watched(CpuBackend):
    """The real back end, whose bits do not depend on the batch; it remembers how much of layers steps asked for."""

    asked: list[tuple[int, int]]

    def launch(self, batch: StepBatch) -> None:
        self.asked.append((len(batch.layers), len(batch.layer_rows)))
        super().launch(batch)


def cpu_engine(**options: Any) -> Harness:
    def make(model: Any, limits: Any) -> CpuBackend:
        backend = Watched(model.program, model.checkpoint, limits, dtype="float32", threads=2)
        backend.asked = []
        return backend

    return Harness(**({"num_blocks": 64, "make_backend": make} | options))


@pytest.fixture
def engine() -> Iterator[Harness]:
    harness = cpu_engine()
    yield harness
    harness.assert_clean()
    harness.close()


def joined(harness: Harness, request: Request, kind: str, sample: int = 0) -> Array:
    """(count, layers, hidden_size): all rows of a kind, which begin at 0 and follow each other without a gap."""
    found = [rows for rows in harness.answer(request, sample).rows if rows.kind == kind]
    assert found[0].index == 0
    for before, after in pairwise(found):
        assert after.index == before.index + len(before.values)
    return np.concatenate([rows.values for rows in found])


def test_they_are_those_of_a_forward_pass(engine: Harness, tmp_path: Path) -> None:
    request = engine.submit(LONG, **ASKED)
    engine.run()
    tokens = LONG + engine.answer(request).token_ids
    expected = dense_forward(write_tiny_llama(tmp_path), tokens[:-1])[0].transpose(1, 0, 2)
    prompt, drawn = joined(engine, request, "prompt_hidden"), joined(engine, request, "hidden")
    assert prompt.shape == (len(LONG), 2, 64)
    assert drawn.shape == (12, 2, 64)
    assert prompt.dtype == drawn.dtype == np.float32
    assert np.abs(expected[:, 0] - expected[:, 1]).max() > 0.5
    np.testing.assert_allclose(prompt, expected[: len(LONG)], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(drawn, expected[len(LONG) - 1 :], rtol=1e-4, atol=1e-4)
    assert drawn[0].tobytes() == prompt[-1].tobytes()


def test_in_the_order_asked_for_beside_others_who_ask_for_other_layers(engine: Harness) -> None:
    requests = [engine.submit(LONG, **(ASKED | {"hidden_layers": layers})) for layers in ((1, 0), (-2,), (1, 1), ())]
    engine.run()
    one, two, twice = (joined(engine, request, "prompt_hidden") for request in requests[:3])
    assert one[:, 1].tobytes() == two[:, 0].tobytes()
    assert one[:, 0].tobytes() == twice[:, 0].tobytes() == twice[:, 1].tobytes()
    assert engine.answer(requests[3]).rows == []
    assert len({tuple(engine.answer(request).token_ids) for request in requests}) == 1


DISTURBANCES: dict[str, dict[str, Any]] = {
    "in small chunks": {"max_num_batched_tokens": 16},
    "in odd chunks": {"max_num_batched_tokens": 37},
    "in small blocks": {"block_size": 4},
    "without a prefix cache": {"prefix_cache": False},
}


@pytest.fixture(scope="module")
def alone() -> tuple[bytes, bytes]:
    """The rows of a request that nothing disturbs."""
    harness = cpu_engine()
    request = harness.submit(LONG, **ASKED)
    harness.run()
    harness.close()
    return joined(harness, request, "prompt_hidden").tobytes(), joined(harness, request, "hidden").tobytes()


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_bit_for_bit_whatever_the_batch_and_the_chunks(disturbance: str, alone: tuple[bytes, bytes]) -> None:
    harness = cpu_engine(**({"num_blocks": 256} | DISTURBANCES[disturbance]))
    for other in [LONG, *prompts(3, 40, seed=5)]:
        harness.submit(other, max_tokens=20, ignore_eos=True)
    harness.turn()
    request = harness.submit(LONG, **ASKED)
    harness.run()
    assert (
        joined(harness, request, "prompt_hidden").tobytes(),
        joined(harness, request, "hidden").tobytes(),
    ) == alone
    harness.assert_clean()
    harness.close()


def test_a_cached_prompt_is_computed_all_the_same(engine: Harness, alone: tuple[bytes, bytes]) -> None:
    engine.generate(LONG)
    request = engine.submit(LONG, **ASKED)
    engine.run()
    assert request.samples[0].usage.cached_tokens == 0
    assert joined(engine, request, "prompt_hidden").tobytes() == alone[0]


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_preempted_in_prompt_and_answer_nothing_is_told_twice(host_blocks: int, alone: tuple[bytes, bytes]) -> None:
    """By recomputing and by swapping."""
    harness = cpu_engine(num_blocks=9, max_num_batched_tokens=16, host_blocks=host_blocks)
    request = harness.submit(LONG, **ASKED)
    sequence = request.samples[0].sequence
    for seed, num_tokens in enumerate((40, len(LONG) + 4)):
        while sequence.num_computed_tokens < num_tokens:
            harness.turn()
        harness.submit(prompts(1, 100, seed=seed + 1)[0], priority=50, max_tokens=8)
    harness.run()
    assert sequence.preemptions == 2
    assert (
        joined(harness, request, "prompt_hidden").tobytes(),
        joined(harness, request, "hidden").tobytes(),
    ) == alone
    harness.assert_clean()
    harness.close()


def test_each_sample_has_the_states_of_its_own_tokens_and_the_first_the_prompts(engine: Harness) -> None:
    request = engine.submit(LONG, **ASKED, n=3, temperature=1.0, seed=4)
    engine.run()
    assert len(joined(engine, request, "prompt_hidden")) == len(LONG)
    states = [joined(engine, request, "hidden", index) for index in range(3)]
    assert len({tuple(engine.answer(request, index).token_ids) for index in range(3)}) == 3
    assert {rows.tobytes() for rows in (found[0] for found in states)} == {states[0][0].tobytes()}
    for index, found in enumerate(states):
        again = engine.submit(LONG + engine.answer(request, index).token_ids[:-1], **(ASKED | {"max_tokens": 0}))
        engine.run()
        assert found.tobytes() == joined(engine, again, "prompt_hidden")[len(LONG) - 1 :].tobytes()
        assert all(rows.kind == "prompt_hidden" for rows in engine.answer(again).rows)


def test_steps_of_others_copy_nothing(engine: Harness) -> None:
    request = engine.submit(LONG, **ASKED)
    other = engine.submit(LONG[:40], max_tokens=30, ignore_eos=True)
    engine.run()
    asked = engine.backend.asked  # type: ignore[attr-defined]
    assert sum(rows for _, rows in asked) == len(LONG) + 11
    assert asked[-1] == (0, 0)
    assert engine.answer(other).rows == []
    assert request.done


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"hidden_layers": (0, 2)}, "hidden_layers[1]"),
        ({"hidden_layers": (-3,)}, "hidden_layers[0]"),
        ({"hidden_layers": (0,), "beam_width": 2}, "hidden_layers"),
        ({"hidden_layers": (0,), "best_of": 2}, "hidden_layers"),
    ],
)
def test_what_cannot_be_told_is_refused(engine: Harness, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        engine.submit(LONG, **options)
    assert refusal.value.field == field


def test_a_step_tells_of_no_more_than_memory_is_meant_for(
    monkeypatch: pytest.MonkeyPatch, alone: tuple[bytes, bytes]
) -> None:
    monkeypatch.setattr(hidden_states, "MAX_STEP_BYTES", 7 * 2 * 64 * 4)
    harness = cpu_engine()
    request = harness.submit(LONG, **ASKED)
    harness.run()
    asked = [rows for _, rows in harness.backend.asked]  # type: ignore[attr-defined]
    assert asked[:13] == [7] * 12 + [6]
    assert joined(harness, request, "prompt_hidden").tobytes() == alone[0]
    harness.close()


def test_layers_are_counted_from_either_end() -> None:
    assert resolve_layers((0, 3, -1, -4), 4) == (0, 3, 3, 0)
    with pytest.raises(InvalidArgument, match="from -4 to 3: the model has 4 layers"):
        resolve_layers((4,), 4)


def test_of_what_an_earlier_daemon_gave_out_only_the_prompt_is_told_again() -> None:
    states = HiddenStates((0,), num_prompt_tokens=3, sample=0, max_tokens=6)
    states.skip_tokens(2)
    values = np.arange(5, dtype=np.float32).reshape(5, 1, 1)
    prompt, drawn = states.take(range(5), values)
    assert (prompt.kind, prompt.index, prompt.values.ravel().tolist()) == ("prompt_hidden", 0, [0.0, 1.0, 2.0])
    assert (drawn.kind, drawn.index, drawn.values.ravel().tolist()) == ("hidden", 2, [4.0])
    assert states.missing(3, 6) == range(5, 6)
