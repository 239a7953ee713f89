"""SamplingParams: no wrong value gets past it, and what is right survives the wire."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client import sampling_params as limits
from kvpool.client.sampling_params import SamplingParams
from kvpool.client.wire.errors import InvalidArgument
from kvpool.client.wire.messages import MAX_SAMPLES
from kvpool.client.wire.schema import PlainMap

NAN, INF = float("nan"), float("inf")
NAMES = [field.name for field in fields(SamplingParams)]
INTEGERS = ["max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs", "prompt_logprobs"]
REALS = [
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
]  # fmt: skip
FLAGS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]
TOKEN_LISTS = ["stop_token_ids", "allowed_token_ids"]


def refused(**values: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**values)
    (name,) = [name for name in values if (caught.value.field or "").split("[")[0] == name]
    assert name
    assert caught.value.message
    return caught.value


def test_defaults_are_what_an_experienced_user_expects() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n) == (1.0, 1.0, 0, 0.0, 1)
    assert (params.max_tokens, params.seed, params.logprobs, params.stop) == (128, None, None, ())
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.to_wire() == {}


@pytest.mark.parametrize("value", [True, 1.0, 1.5, "1", b"1", NAN, INF, [1], {}, 10**400, -(10**400)])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_take_nothing_else(name: str, value: object) -> None:
    assert "integer" in refused(**{name: value}).message


@pytest.mark.parametrize("value", [True, "1", b"1", NAN, INF, -INF, [1.0], {}, None, 10**400, 1e308, -1e308])
@pytest.mark.parametrize("name", REALS)
def test_reals_take_nothing_else(name: str, value: object) -> None:
    assert "number from" in refused(**{name: value}).message


@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_take_nothing_else(name: str, value: object) -> None:
    refused(**{name: value})


@pytest.mark.parametrize(
    ("name", "allowed", "wrong"),
    [
        ("max_tokens", [0, 1, 2**31 - 1], [-1, 2**31, 2**64]),
        ("top_k", [-1, 0, 1, 9_999_999, 2**31 - 1], [-2, 2**31, 2**63]),
        ("top_p", [0, 1, 1.0, 0.5], [-1e-9, 1.0000001, 2]),
        ("min_p", [0, 1, 0.05], [-1e-9, 1.0000001]),
        ("temperature", [0, 1e-45, 2, 100], [-1e-9, 100.1]),
        ("seed", [None, 0, 2**63, 2**64 - 1], [-1, -(2**63), 2**64]),
        ("n", [1, limits.MAX_N], [0, -1, limits.MAX_N + 1]),
        ("logprobs", [None, 0, 1, 20], [-1, 21, 49153]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21]),
        ("presence_penalty", [-2, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
        ("repetition_penalty", [0.01, 1, 100], [0, -1, 0.001, 101]),
        ("stop_token_ids", [[], [0], (5, 2**31 - 1)], [[-1], [2**31], [2**64 - 1], [True], ["1"], [1, 1], 5, "5"]),
        ("allowed_token_ids", [None, [0], [7, 5]], [[], [-1], [2**31], [1.0], [3, 3], list(range(65537)), 5]),
        (
            "stop",
            [[], "a", ["a", "b"], ["x" * 256]],
            ["", ["a", ""], ["a", "a"], ["x" * 257], [5], 5, None, ["\ud800"]],
        ),
        ("stop", [["é" * 128]], [["é" * 129], [str(i) for i in range(33)]]),
        (
            "logit_bias",
            [None, {}, {0: -100}, {5: 100.0, 6: 1}],
            [{-1: 1}, {2**31: 1}, {2**64 - 1: 1}, {"5": 1}, {True: 1}, {5: NAN}, {5: -INF}, {5: 100.1}, {5: None}],
        ),
        ("logit_bias", [dict.fromkeys(range(1024), 0.5)], [dict.fromkeys(range(1025), 0.5), [(5, 1)], 5, "5"]),
    ],
)
def test_ranges(name: str, allowed: list[Any], wrong: list[Any]) -> None:
    for value in allowed:
        params = SamplingParams(**{name: value})
        assert SamplingParams.from_wire(params.to_wire()) == params
    for value in wrong:
        refused(**{name: value})


def test_errors_name_the_place_and_the_range() -> None:
    assert refused(stop=["a", ""]).field == "stop[1]"
    assert refused(stop_token_ids=[1, 2, -1]).field == "stop_token_ids[2]"
    assert refused(logit_bias={5: 1.0, 77: 1e9}).field == "logit_bias[77]"
    assert str(refused(top_p=1.5)) == "top_p: must be a number from 0 to 1, not 1.5"


def test_min_tokens_is_within_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    error = refused(min_tokens=6, max_tokens=5)
    assert error.field == "min_tokens"
    assert "5" in error.message


def test_allowed_tokens_that_min_tokens_forbids_are_refused() -> None:
    refused(allowed_token_ids=[5], stop_token_ids=[5, 6], min_tokens=1)
    SamplingParams(allowed_token_ids=[5], stop_token_ids=[5, 6])
    SamplingParams(allowed_token_ids=[5, 7], stop_token_ids=[5, 6], min_tokens=1)


def test_unknown_names_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "values",
    [
        {"stop_token_ids": [100]},
        {"allowed_token_ids": [3, 100]},
        {"logit_bias": {100: 1}},
        {"logit_bias": {2**31 - 1: 1}},
    ],
)
def test_validate_holds_token_ids_against_the_vocabulary(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    params.validate()
    params.validate(vocab_size=2**31)
    with pytest.raises(InvalidArgument, match="0 to 99") as caught:
        params.validate(vocab_size=100)
    assert caught.value.field == next(iter(values))


def test_validate_holds_max_tokens_against_the_context() -> None:
    SamplingParams(max_tokens=2048).validate(max_model_len=2048)
    with pytest.raises(InvalidArgument, match="2048") as caught:
        SamplingParams(max_tokens=2049).validate(max_model_len=2048)
    assert caught.value.field == "max_tokens"


def test_numpy_values_are_taken_as_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4], dtype=np.int32),  # type: ignore[arg-type]
        logit_bias={np.int64(7): np.float64(1)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(temperature=0.5, seed=2**64 - 1, stop_token_ids=[3, 4], logit_bias={7: 1.0})
    assert type(params.seed) is int
    refused(ignore_eos=np.int64(1))
    refused(seed=np.bool_(True))


def test_values_cannot_be_changed_afterwards() -> None:
    stop, bias = ["a"], {5: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[6] = NAN
    assert params == SamplingParams(stop="a", logit_bias={5: 1.0})
    with pytest.raises(FrozenInstanceError):
        params.top_p = 7.0  # type: ignore[misc]
    with pytest.raises(InvalidArgument):
        replace(params, top_p=7.0)


def test_limits_fit_the_wire() -> None:
    assert limits.MAX_N <= MAX_SAMPLES


# --- the wire ---------------------------------------------------------------------------------------------------------

token_ids = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
valid = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(100, 2**31 - 1),
        "min_tokens": st.integers(0, 100),
        "temperature": st.floats(0, 100),
        "top_k": st.integers(-1, 2**31 - 1),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "n": st.integers(1, 128),
        "stop": texts | st.lists(texts, max_size=4, unique=True),
        "stop_token_ids": st.lists(token_ids, max_size=4, unique=True),
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(0, 20),
        "prompt_logprobs": st.none() | st.integers(0, 20),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.none() | st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
    },
)


@settings(deadline=None)
@given(valid)
def test_round_trip_through_msgpack(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    wire = params.to_wire()
    assert all(wire[name] != getattr(SamplingParams(), name) for name in wire)
    received = PlainMap(max_depth=4).check(msgpack.unpackb(msgpack.packb(wire)))
    assert SamplingParams.from_wire(received) == params


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), anything, max_size=3))
def test_any_data_is_a_valid_value_or_a_typed_error(wire: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_wire(wire)
    except InvalidArgument as error:
        assert (error.field or "").split("[")[0] in {*wire, "min_tokens"}  # noqa: PT017
    else:
        assert SamplingParams.from_wire(params.to_wire()) == params


@pytest.mark.parametrize("wire", [None, [], "x", 5, b""])
def test_wire_must_be_a_map(wire: object) -> None:
    with pytest.raises(InvalidArgument):
        SamplingParams.from_wire(wire)


@pytest.mark.parametrize("name", ["max_token", "use_beam_search", "__class__", "to_wire", "", 5, None, "x" * 1000])
def test_unknown_wire_names_are_refused_by_name(name: object) -> None:
    with pytest.raises(InvalidArgument, match="not a sampling parameter") as caught:
        SamplingParams.from_wire({"top_p": 0.5, name: 1})
    assert caught.value.field == (name[:64] if isinstance(name, str) else type(name).__name__)


@pytest.mark.parametrize(
    "pairs", [5, "ab", {5: 1}, [5], [[5]], [[5, 1, 2]], [["5", 1]], [[True, 1]], [[5, 1], [5, 2]], [[5, 1]] * 2000]
)
def test_wire_bias_must_be_distinct_pairs(pairs: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams.from_wire({"logit_bias": pairs})
    assert caught.value.field == "logit_bias"
