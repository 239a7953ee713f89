"""The NumPy oracle of sampling against published vectors and cases small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import ArrayLike

from tests.support.numpy_sampling import draw_u64, kept_weights, philox4x32_10

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32_10(counter, key) == expected


def test_draw_uses_every_bit_of_seed_and_counter() -> None:
    draws = {draw_u64(1 << bit, 0) for bit in range(64)} | {draw_u64(0, 1 << bit) for bit in range(63)}
    assert len(draws) == 127


def kept(scaled: ArrayLike, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    return np.flatnonzero(kept_weights(np.asarray(scaled, dtype=np.float32), top_k, top_p, min_p)).tolist()


def test_filters_by_hand() -> None:
    halves = np.log([0.5, 0.25, 0.125, 0.125]) - np.log(0.5)
    assert kept(halves) == [0, 1, 2, 3]
    assert kept(halves, top_k=3) == [0, 1, 2]
    assert kept(halves, top_k=9) == [0, 1, 2, 3]
    assert kept(halves, top_p=0.7) == [0, 1]
    assert kept(halves, top_p=0.8) == [0, 1, 2]
    assert kept(halves, top_p=1e-9) == [0]
    assert kept(halves, min_p=0.4) == [0, 1]
    assert kept(halves, top_k=2, top_p=0.6) == [0]  # top-p counts what top-k left: 0.5 of 0.75
    assert kept([0, 0, 0, 0], top_p=0.5) == [0, 1]
    assert kept([-1, 0, -1, 0], top_k=3) == [0, 1, 3]
    assert kept([-np.inf, 0, -40], top_k=2) == [1]
